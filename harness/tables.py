"""`run.sqlite`: a run's history as tables, for queries by people and the dashboard.

Derived from `events.jsonl` and never read back by the run itself, so a damaged or deleted file costs nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.evidence import DiskError
from harness.proposals import CandidateRow

__all__ = ["Tables"]

_SCHEMA = """
create table if not exists candidates(
  number integer primary key, key text not null unique, head text not null, origin text not null, note text not null,
  outcome text, reason text);
create table if not exists state(key text primary key, value text not null);
create table if not exists spent(what text primary key, amount real not null);
create table if not exists applied(events integer not null);
"""


class Tables:
    """The tables of one run. Rollback journal and full sync: safe on every file system, and writes are rare."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._connection = self._connect()
        except sqlite3.DatabaseError:
            # Not a database any more (a torn page, say). It holds nothing that events.jsonl does not.
            for stale in (path, path.with_name(path.name + "-journal")):
                stale.unlink(missing_ok=True)
            try:
                self._connection = self._connect()
            except sqlite3.Error as error:
                raise self._error(error) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=10)
        try:
            connection.execute("pragma journal_mode=delete")
            connection.execute("pragma synchronous=full")
            connection.executescript(_SCHEMA)
            if connection.execute("pragma quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("quick_check failed")
        except BaseException:
            connection.close()
            raise
        return connection

    def sync(
        self, events: int, candidates: Sequence[CandidateRow], state: Mapping[str, Any], totals: Mapping[str, float]
    ) -> None:
        """Bring the tables to the state after `events` events, in one transaction.

        Raises:
            DiskError: full or read-only disk; the history in events.jsonl is not affected.
        """
        try:
            self._sync(events, candidates, state, totals)
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("rollback")
            raise self._error(error) from error

    def _error(self, error: sqlite3.Error) -> DiskError:
        return DiskError(
            f"cannot write the tables ({error})",
            where=str(self.path),
            expected="a writable disk with free space; the history is kept in events.jsonl",
            next=f"df -h {self.path.parent}; then resume the run",
        )

    def _sync(
        self, events: int, candidates: Sequence[CandidateRow], state: Mapping[str, Any], totals: Mapping[str, float]
    ) -> None:
        run = self._connection.execute
        if run("select events from applied").fetchone() == (events,):
            return
        run("begin immediate")
        for table in ("candidates", "state", "spent", "applied"):
            run(f"delete from {table}")  # noqa: S608 - fixed names
        self._connection.executemany(
            "insert into candidates values(?,?,?,?,?,?,?)",
            [(c.number, c.key, c.head, c.origin, c.note, c.outcome, c.reason) for c in candidates],
        )
        self._connection.executemany(
            "insert into state values(?,?)", [(k, json.dumps(v, sort_keys=True)) for k, v in state.items()]
        )
        self._connection.executemany("insert into spent values(?,?)", list(totals.items()))
        run("insert into applied values(?)", (events,))
        run("commit")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
