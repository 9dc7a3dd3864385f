"""Schedules: which value each tunable of a kernel takes, by number of rows.

Two small TOML files meet here. `kernels/<op>/cpu.toml` and `cute.toml` *declare* tunables (name, allowed values,
meaning), which values of its op's integer attributes the kernel `supports`, and, for CUDA, which sizes or attributes
it is `specialised` in: compiled once for each value. `schedules/<family>/<geometry>/<op>.toml` *chooses* one value per
tunable for ascending buckets of rows M = B*T; the first bucket with `max_rows >= M` applies, and beyond the last bucket
there is no schedule, so that the planner refuses instead of guessing. A bucket may name values of specialised sizes
(`when`): it then applies to those calls only. Nothing here searches or measures.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from k3_backend.errors import BackendError

__all__ = [
    "Bucket", "Declarations", "Schedule", "ScheduleError", "Tunable", "load_declarations", "load_tunables", "render",
]  # fmt: skip

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
class Declarations:
    """What `cpu.toml` says about a kernel."""

    tunables: tuple[Tunable, ...]
    """In argument order."""
    supports: Mapping[str, tuple[int, ...]]
    """Integer attribute of the op -> values that the kernel implements; an attribute that is absent is unrestricted."""
    specialised: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Size or attribute of a call -> values that machine code exists for: integers, or names of geometry fields."""


@dataclass(frozen=True)
class Bucket:
    """The choices for all row counts up to `max_rows` that no smaller bucket covers."""

    max_rows: int
    values: Mapping[str, int]
    when: Mapping[str, int] = field(default_factory=dict)
    """Specialised sizes that a call must have; none: any call."""

    def applies(self, sizes: Mapping[str, int]) -> bool:
        """Whether a call with these specialised sizes may use the bucket, its rows aside."""
        return all(sizes.get(name) == value for name, value in self.when.items())


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


def load_declarations(path: Path) -> Declarations:
    """Read what a kernel's `cpu.toml` declares.

    Raises:
        ScheduleError: unreadable file, unknown keys, an empty or repeated list of values, a missing meaning.
    """
    doc = _read(path, "declare tunables as in docs/kernel-authoring.md")
    for key, table in doc.data.items():
        if key not in ("tunables", "supports", "specialised") or not isinstance(table, dict):
            where = doc.line(rf"\[*\s*\"?{re.escape(key)}")
            rule = "only [tunables.<name>], [supports] and [specialised] tables"
            raise _declaration_error(f"unexpected {key!r}", where, rule)
    tunables = tuple(_tunable(doc, name, table) for name, table in doc.data.get("tunables", {}).items())
    supports = doc.data.get("supports", {})
    for name, values in supports.items():
        if not _is_int_list(values):
            where = doc.line(rf"{re.escape(name)}\s*=")
            raise _declaration_error(f"supports.{name} = {values!r}", where, "a non-empty list of different integers")
    specialised = doc.data.get("specialised", {})
    for name, values in specialised.items():
        if not _is_list_of_sizes(values) or name in {t.name for t in tunables}:
            rule = "a non-empty list of different integers or geometry fields, under a name of its own"
            raise _declaration_error(f"specialised.{name} = {values!r}", doc.line(rf"{re.escape(name)}\s*="), rule)
    return Declarations(
        tunables,
        {name: tuple(values) for name, values in supports.items()},
        {name: tuple(values) for name, values in specialised.items()},
    )


def load_tunables(path: Path) -> tuple[Tunable, ...]:
    """The tunables that a kernel's `cpu.toml` declares, in argument order; ScheduleError as `load_declarations`."""
    return load_declarations(path).tunables


def _declaration_error(what: str, where: str, expected: str) -> ScheduleError:
    return ScheduleError(what, where=where, expected=expected, next="see docs/kernel-authoring.md")


def _is_int_list(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(map(_is_int, values)) and len(set(values)) == len(values)


def _is_list_of_sizes(values: object) -> bool:
    if not isinstance(values, list) or not values or len({str(v) for v in values}) != len(values):
        return False
    return all(_is_int(v) or (isinstance(v, str) and v.isidentifier()) for v in values)


def _tunable(doc: _Text, name: str, table: object) -> Tunable:
    where = doc.line(rf"\[\s*tunables\s*\.\s*\"?{re.escape(name)}\"?\s*\]")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name == "max_rows":
        rule = "lower-case letters, digits and underscores, other than the schedule's own max_rows"
        raise _declaration_error(f"tunable name {name!r}", where, rule)
    if not isinstance(table, dict) or set(table) != {"values", "meaning"}:
        keys = sorted(table) if isinstance(table, dict) else table
        raise _declaration_error(f"tunable {name}: {keys}", where, "a table with exactly `values` and `meaning`")
    values, meaning = table["values"], table["meaning"]
    if not _is_int_list(values):
        raise _declaration_error(f"tunable {name}: values {values!r}", where, "a non-empty list of different integers")
    if not isinstance(meaning, str) or not meaning.strip():
        raise _declaration_error(f"tunable {name}: empty meaning", where, "one sentence saying what the value controls")
    return Tunable(name, tuple(values), meaning)


@dataclass(frozen=True)
class Schedule:
    """The chosen tunables of one op on one geometry; buckets with the same `when` ascend and cover 1..max_rows."""

    op: str
    geometry: str
    tunables: tuple[Tunable, ...]
    buckets: tuple[Bucket, ...]

    def lookup(self, rows: int, sizes: Mapping[str, int] | None = None) -> dict[str, int] | None:
        """Values for `rows` = B*T rows, in declaration order; None beyond the last bucket (no schedule: refuse).

        Args:
            rows: of the call.
            sizes: the call's specialised sizes and attributes, by name.
        """
        if rows < 1:
            raise ValueError(f"schedule {self.op}: rows is {rows}; expected at least 1")
        for bucket in self.buckets:
            if rows <= bucket.max_rows and bucket.applies(sizes or {}):
                return {t.name: bucket.values[t.name] for t in self.tunables}
        return None

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        op: str,
        geometry: str,
        tunables: Sequence[Tunable],
        specialised: Mapping[str, Sequence[int]] | None = None,
    ) -> Schedule:
        """Read `schedules/<family>/<geometry>/<op>.toml` against the kernel's declared tunables.

        Args:
            path: the file.
            op: names the schedule in errors.
            geometry: likewise.
            tunables: as declared.
            specialised: sizes that a bucket may name, with the values that machine code exists for.

        Raises:
            ScheduleError: unreadable file, wrong version, unknown or missing tunables, values outside the declared
                lists, unsorted or repeated buckets, no bucket at all. The message names file and line.
        """
        doc = _read(
            path, f"write it with the tuner or by hand (op {op}, geometry {geometry}): docs/kernel-authoring.md"
        )
        for key in doc.data:
            if key not in ("version", "bucket"):
                where = doc.line(rf"\[*\s*\"?{re.escape(key)}")
                raise _schedule_error(op, f"unknown key {key!r}", where, "version and [[bucket]] tables only")
        version = doc.data.get("version")
        if not _is_int(version) or version != SCHEDULE_VERSION:
            where = doc.line(r"version\s*=")
            raise _schedule_error(op, f"version is {version!r}", where, f"version = {SCHEDULE_VERSION}")
        tables = doc.data.get("bucket")
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            raise _schedule_error(op, "no buckets", doc.line(r"\[*\s*bucket"), "at least one [[bucket]] table")
        buckets: list[Bucket] = []
        for index, table in enumerate(tables):
            when = {name: table[name] for name in (specialised or {}) if name in table}
            previous = next((b.max_rows for b in reversed(buckets) if b.when == when), 0)
            find = partial(doc.key_in_bucket, index)
            for name, value in when.items():
                if value not in (specialised or {})[name]:
                    rule = f"one of {list((specialised or {})[name])}"
                    raise _schedule_error(op, f"{name} = {value!r}", find(name), rule)
            rest = {name: value for name, value in table.items() if name not in when}
            buckets.append(replace(_bucket(op, rest, tunables, previous, find), when=when))
        return cls(op, geometry, tuple(tunables), tuple(buckets))


def _schedule_error(op: str, what: str, where: str, expected: str) -> ScheduleError:
    return ScheduleError(what, where=where, expected=expected, next=f"compare with kernels/{op}/cpu.toml")


def _bucket(
    op: str, table: Mapping[str, Any], tunables: Sequence[Tunable], previous: int, where: Callable[[str], str]
) -> Bucket:
    """One validated bucket; `previous` is the max_rows before it, `where` finds the line of a key."""
    rows = table.get("max_rows")
    if not _is_int(rows) or rows is None or rows <= previous:
        rule = f"an integer above {previous} (strictly ascending)"
        raise _schedule_error(op, f"max_rows is {rows!r}", where("max_rows"), rule)
    known = {t.name: t for t in tunables}
    for name, value in table.items():
        if name == "max_rows":
            continue
        if name not in known:
            rule = f"tunables {', '.join(known) or '(none)'}"
            raise _schedule_error(op, f"unknown tunable {name!r}", where(name), rule)
        if not _is_int(value) or value not in known[name].values:
            rule = f"one of {list(known[name].values)} ({known[name].meaning})"
            raise _schedule_error(op, f"{name} = {value!r}", where(name), rule)
    if missing := [name for name in known if name not in table]:
        what = f"bucket max_rows = {rows}: no value for {', '.join(missing)}"
        raise _schedule_error(op, what, where("max_rows"), "one value per declared tunable")
    return Bucket(rows, {name: table[name] for name in known})


def render(schedule: Schedule) -> str:
    """Canonical TOML text of a schedule, which the tuner writes and `Schedule.load` reads back equal."""
    lines = [
        f"# {schedule.op} on {schedule.geometry}: tunables by rows M = B*T; first bucket with max_rows >= M.",
        f"version = {SCHEDULE_VERSION}",
    ]
    for bucket in schedule.buckets:
        lines += ["", "[[bucket]]", *(f"{name} = {value}" for name, value in bucket.when.items())]
        lines.append(f"max_rows = {bucket.max_rows}")
        lines += [f"{t.name} = {bucket.values[t.name]}" for t in schedule.tunables]
    return "\n".join(lines) + "\n"
