"""Schedules: which value each tunable of a kernel takes, by number of rows.

Two small TOML files meet here. `kernels/<op>/cpu.toml` *declares* tunables (name, allowed values, meaning); the order
of declaration is the order of the kernel's trailing arguments. `schedules/cpu/<geometry>/<op>.toml` *chooses* one value
per tunable for ascending buckets of rows M = B*T; the first bucket with `max_rows >= M` applies, and beyond the last
bucket there is no schedule, so that the planner refuses instead of guessing. Nothing here searches or measures.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_backend.errors import BackendError

__all__ = ["Bucket", "Schedule", "ScheduleError", "Tunable", "load_tunables", "render"]

SCHEDULE_VERSION = 1


class ScheduleError(BackendError):
    """A tunables or schedule file that does not say exactly what it must."""


@dataclass(frozen=True)
class Tunable:
    """One declared choice of a kernel."""

    name: str
    values: tuple[int, ...]
    """Allowed values, as declared."""
    meaning: str


@dataclass(frozen=True)
class Bucket:
    """The choices for all row counts up to `max_rows` that no smaller bucket covers."""

    max_rows: int
    values: Mapping[str, int]


@dataclass(frozen=True)
class _Text:
    """A TOML document with its source, so that errors about meaning can name a line."""

    path: Path
    lines: tuple[str, ...]
    data: dict[str, Any]

    def line(self, pattern: str, occurrence: int = 0) -> str:
        """`file:line` of the n-th line matching a regular expression, else the file alone."""
        hits = [n for n, text in enumerate(self.lines, 1) if re.match(pattern, text.strip())]
        return f"{self.path}:{hits[occurrence]}" if occurrence < len(hits) else str(self.path)

    def key_in_bucket(self, bucket: int, key: str) -> str:
        """`file:line` of a key inside the n-th `[[bucket]]` table, else of the table's header."""
        starts = [n for n, text in enumerate(self.lines) if re.match(r"\[\[\s*bucket\s*\]\]", text.strip())]
        if bucket >= len(starts):
            return str(self.path)
        end = starts[bucket + 1] if bucket + 1 < len(starts) else len(self.lines)
        for number in range(starts[bucket], end):
            if re.match(rf"\"?{re.escape(key)}\"?\s*=", self.lines[number].strip()):
                return f"{self.path}:{number + 1}"
        return f"{self.path}:{starts[bucket] + 1}"


def _read(path: Path, next_step: str) -> _Text:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"cannot be read ({error})", where=str(path), expected="a UTF-8 TOML file", next=next_step
        ) from error
    try:
        return _Text(path, tuple(text.splitlines()), tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{found.group(1)}" if found else str(path)
        raise ScheduleError(f"not TOML ({error})", where=where, expected="valid TOML", next=next_step) from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def load_tunables(path: Path) -> tuple[Tunable, ...]:
    """Read the tunables that a kernel declares, in order.

    Raises:
        ScheduleError: unreadable file, unknown keys, an empty or repeated list of values, a missing meaning.
    """
    doc = _read(path, "declare tunables as in docs/kernel-authoring.md")

    def fail(what: str, where: str, expected: str) -> ScheduleError:
        return ScheduleError(what, where=where, expected=expected, next="see docs/kernel-authoring.md")

    for key in doc.data:
        if key != "tunables":
            raise fail(f"unknown key {key!r}", doc.line(rf"\[?\"?{re.escape(key)}"), "only [tunables.<name>] tables")
    declared = doc.data.get("tunables", {})
    if not isinstance(declared, dict):
        raise fail("tunables is not a table", doc.line("tunables"), "[tunables.<name>] tables")
    tunables = []
    for name, table in declared.items():
        where = doc.line(rf"\[\s*tunables\s*\.\s*{re.escape(name)}\s*\]")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise fail(f"tunable name {name!r}", where, "lower-case letters, digits and underscores")
        if name == "max_rows":
            raise fail("max_rows cannot be a tunable", where, "a name other than the schedule's own key")
        if not isinstance(table, dict) or set(table) != {"values", "meaning"}:
            raise fail(f"tunable {name}: keys {sorted(table)}", where, "exactly `values` and `meaning`")
        values, meaning = table["values"], table["meaning"]
        if (
            not isinstance(values, list)
            or not values
            or not all(map(_is_int, values))
            or len(set(values)) != len(values)
        ):
            raise fail(f"tunable {name}: values {values!r}", where, "a non-empty list of different integers")
        if not isinstance(meaning, str) or not meaning.strip():
            raise fail(f"tunable {name}: empty meaning", where, "one sentence saying what the value controls")
        tunables.append(Tunable(name, tuple(values), meaning))
    return tuple(tunables)


@dataclass(frozen=True)
class Schedule:
    """The chosen tunables of one op on one geometry. Buckets are ascending and cover 1..buckets[-1].max_rows."""

    op: str
    geometry: str
    tunables: tuple[Tunable, ...]
    buckets: tuple[Bucket, ...]

    def lookup(self, rows: int) -> dict[str, int] | None:
        """Values for `rows` = B*T rows, in declaration order; None beyond the last bucket (no schedule: refuse)."""
        if rows < 1:
            raise ValueError(f"schedule {self.op}: rows is {rows}; expected at least 1")
        for bucket in self.buckets:
            if rows <= bucket.max_rows:
                return {t.name: bucket.values[t.name] for t in self.tunables}
        return None

    @classmethod
    def load(cls, path: Path, *, op: str, geometry: str, tunables: Sequence[Tunable]) -> Schedule:
        """Read `schedules/cpu/<geometry>/<op>.toml` against the kernel's declared tunables.

        Raises:
            ScheduleError: unreadable file, wrong version, unknown or missing tunables, values outside the declared
                lists, unsorted or repeated buckets, no bucket at all. The message names file and line.
        """
        doc = _read(
            path, f"write it with the tuner, or by hand: docs/kernel-authoring.md (op {op}, geometry {geometry})"
        )

        def fail(what: str, where: str, expected: str) -> ScheduleError:
            return ScheduleError(what, where=where, expected=expected, next=f"compare with kernels/{op}/cpu.toml")

        for key in doc.data:
            if key not in ("version", "bucket"):
                raise fail(
                    f"unknown key {key!r}", doc.line(rf"\[*\"?{re.escape(key)}"), "version and [[bucket]] tables only"
                )
        version = doc.data.get("version")
        if not _is_int(version) or version != SCHEDULE_VERSION:
            raise fail(f"version is {version!r}", doc.line(r"version\s*="), f"version = {SCHEDULE_VERSION}")
        tables = doc.data.get("bucket")
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            raise fail("no buckets", doc.line("bucket"), "at least one [[bucket]] table")
        known = {t.name: t for t in tunables}
        buckets: list[Bucket] = []
        for index, table in enumerate(tables):
            rows = table.get("max_rows")
            where = doc.key_in_bucket(index, "max_rows")
            if not _is_int(rows) or rows < 1:
                raise fail(f"bucket {index + 1}: max_rows is {rows!r}", where, "an integer of at least 1")
            if buckets and rows <= buckets[-1].max_rows:
                raise fail(
                    f"bucket {index + 1}: max_rows {rows} after {buckets[-1].max_rows}",
                    where,
                    "strictly ascending max_rows",
                )
            for name, value in table.items():
                if name == "max_rows":
                    continue
                where = doc.key_in_bucket(index, name)
                if name not in known:
                    raise fail(f"unknown tunable {name!r}", where, f"tunables {', '.join(known) or '(none)'}")
                if not _is_int(value) or value not in known[name].values:
                    raise fail(
                        f"{name} = {value!r}", where, f"one of {list(known[name].values)} ({known[name].meaning})"
                    )
            missing = [name for name in known if name not in table]
            if missing:
                where = doc.key_in_bucket(index, "")
                raise fail(
                    f"bucket max_rows = {rows}: no value for {', '.join(missing)}",
                    where,
                    "one value per declared tunable",
                )
            buckets.append(Bucket(rows, {name: table[name] for name in known}))
        return cls(op, geometry, tuple(tunables), tuple(buckets))


def render(schedule: Schedule) -> str:
    """Canonical TOML text of a schedule, which the tuner writes and `Schedule.load` reads back equal."""
    lines = [
        f"# {schedule.op} on {schedule.geometry}: tunables by rows M = B*T; first bucket with max_rows >= M.",
        f"version = {SCHEDULE_VERSION}",
    ]
    for bucket in schedule.buckets:
        lines += ["", "[[bucket]]", f"max_rows = {bucket.max_rows}"]
        lines += [f"{t.name} = {bucket.values[t.name]}" for t in schedule.tunables]
    return "\n".join(lines) + "\n"
