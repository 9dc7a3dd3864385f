"""Load CPU kernels and replay them: named tensors in, one native call out.

`Runtime` is the trusted launcher library, `Pool` its fork-join workers, `LoadedOp` one kernel object with its declared
tunables and schedule, `LaunchList` an ordered set of launches whose arguments are packed once and replayed many times
(what graph replay is on a GPU). Every tensor is checked against the op's interface when it is bound, on this trusted
side: name, dtype, shape, contiguity, 64-byte alignment, and that written tensors overlap nothing else of the call.
A kernel's own behaviour is not judged here. Objects are called through apache-tvm-ffi's packed C signature.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from k3_backend.aot.arguments import TENSOR_ALIGNMENT, BindError, check_attrs, check_tensors
from k3_backend.aot.compile import ABI_VERSION
from k3_backend.aot.cpu.binding import CallArguments
from k3_backend.aot.cpu.host import ARCHS, host_cpu_flags
from k3_backend.aot.manifest import Artifact, ArtifactError
from k3_backend.aot.schedule import Schedule, ScheduleError, Tunable, load_declarations
from k3_backend.errors import BackendError
from k3_backend.geometry import Geometry
from k3_backend.ops import OPS, OpSpec

__all__ = ["TENSOR_ALIGNMENT", "BindError", "KernelSet", "LaunchError", "LaunchList", "LoadedOp", "Pool", "Runtime"]

IDLE_SPIN_US = 200
"""How long an idle helper spins after a replay before it sleeps; covers the host work between two decode steps."""

_ERROR_BYTES = 1024


class LaunchError(BackendError):
    """A kernel reported an error while a launch list was replayed. `op`, `layer` and `site` name the launch."""

    def __init__(self, what: str, *, op: str, layer: int | None, site: str) -> None:
        place = site if layer is None else f"layer {layer} {site}"
        super().__init__(
            what,
            where=f"op {op} ({place})",
            expected="status 0 from the kernel",
            next=f"fasttrack verify --gates kernels  # op {op}",
        )
        self.op = op
        self.layer = layer
        self.site = site


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("num_args", ctypes.c_int64),
        ("counter", ctypes.c_void_p),
    )


class Runtime:
    """The launcher library. Load once per process; make one `Pool` per number of threads."""

    def __init__(self, artifact: Artifact) -> None:
        """Load a verified `runtime` artifact.

        Raises:
            ArtifactError: not a runtime, altered, not loadable, or of another ABI version.
        """
        _require(artifact, op="runtime", geometry="any")
        library = _open(artifact)
        for name, restype, argtypes in (
            ("k3_runtime_abi", ctypes.c_int32, ()),
            ("k3_pool_create", ctypes.c_void_p, (ctypes.c_int32, ctypes.c_int64)),
            ("k3_pool_destroy", None, (ctypes.c_void_p,)),
            ("k3_pool_context", ctypes.c_void_p, (ctypes.c_void_p,)),
            (
                "k3_replay",
                ctypes.c_int64,
                (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64),
            ),
        ):
            function = _symbol(library, name, artifact)
            function.restype = restype
            function.argtypes = argtypes
        if library.k3_runtime_abi() != ABI_VERSION:
            raise ArtifactError(
                f"runtime has ABI {library.k3_runtime_abi()}",
                where=str(artifact.object_path),
                expected=f"ABI {ABI_VERSION}",
                next="build it again",
            )
        self.artifact = artifact
        self._library = library

    def pool(self, threads: int, *, idle_spin_us: int = IDLE_SPIN_US) -> Pool:
        """Start a pool of `threads` workers (the calling thread is one of them).

        Raises:
            BackendError: not a positive number, or the system refuses threads or memory.
        """
        return Pool(self, threads, idle_spin_us)


class Pool:
    """Workers, launch context and scratch. One replay at a time; a second thread waits its turn.

    Helpers keep off the CPU on which the caller starts a replay; the caller's own affinity is never changed. They spin
    during a replay and for a bounded time after it, then sleep.
    """

    def __init__(self, runtime: Runtime, threads: int, idle_spin_us: int) -> None:
        library = runtime._library
        ctypes.set_errno(0)
        address = library.k3_pool_create(threads, idle_spin_us) if threads >= 1 else None
        if not address:
            reason = os.strerror(ctypes.get_errno()) if threads >= 1 else "not a positive number"
            raise BackendError(
                f"no pool of {threads} threads ({reason})",
                where="k3_backend.aot.cpu",
                expected="1 to 256 threads",
                next="choose fewer threads",
            )
        self.threads = threads
        self._library = library
        self._address: int = address
        self.context: int = library.k3_pool_context(address)
        self._pid = os.getpid()
        self.close: Callable[[], object] = weakref.finalize(self, _destroy, library, address, self._pid)
        """Stop the helpers and free the scratch memory; also runs when the pool is collected. Later replays raise."""

    def replay(
        self, launches: ctypes.Array[_Launch], count: int, error: ctypes.Array[ctypes.c_char], times_ns: int | None
    ) -> int:
        """Run the first `count` launches; -1, or the index of the one that failed. Use `LaunchList.replay`."""
        if not self.close.alive:  # type: ignore[attr-defined]
            raise BackendError(
                "the pool is closed", where="Pool.replay", expected="a live pool", next="make a new pool"
            )
        if os.getpid() != self._pid:
            what = f"the pool's workers live in process {self._pid}, not in its fork"
            raise BackendError(what, where="Pool.replay", expected="a pool of this process", next="make a new pool")
        failed: int = self._library.k3_replay(self._address, launches, count, times_ns, error, len(error))
        return failed

    @property
    def scratch(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """View of the scratch memory that all launches share (uint8); tests poison it between calls."""
        pointer, size = _scratch_of(self.context)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), shape=(size,))


class LoadedOp:
    """One specialised op of one geometry, ready to be bound or called."""

    def __init__(self, artifact: Artifact, geometry: Geometry, schedule_file: Path | None = None) -> None:
        """Load a verified artifact and, if the file exists, its schedule.

        Raises:
            ArtifactError: unknown op, other geometry or ABI, not runnable on this CPU, altered, not loadable, no entry.
            ScheduleError: the schedule file does not fit the tunables that the kernel declares.
        """
        if artifact.op not in OPS:
            raise ArtifactError(
                f"unknown op {artifact.op!r}",
                where=str(artifact.path),
                expected=f"one of {', '.join(OPS)}",
                next="fasttrack ops",
            )
        _require(artifact, op=artifact.op, geometry=geometry.name)
        missing = ARCHS[artifact.arch].cpu_flags - host_cpu_flags() if artifact.arch in ARCHS else {artifact.arch}
        if missing:
            raise ArtifactError(
                f"this CPU lacks {', '.join(sorted(missing))}",
                where=str(artifact.path),
                expected="a level this host can run",
                next="fasttrack doctor",
            )
        self.artifact = artifact
        self.spec: OpSpec = OPS[artifact.op]
        self.geometry = geometry
        declared = load_declarations(artifact.path / "cpu.toml")
        self.tunables: tuple[Tunable, ...] = declared.tunables
        self.supports: Mapping[str, tuple[int, ...]] = declared.supports
        """Integer attribute -> values that the kernel implements; others are unrestricted."""
        attrs = [attr.name for attr in self.spec.attrs if attr.kind == "int"]
        if unknown := sorted(set(self.supports) - set(attrs)):
            raise ScheduleError(
                f"supports.{unknown[0]}: op {artifact.op} has no such integer attribute",
                where=str(artifact.path / "cpu.toml"), expected=f"one of {', '.join(attrs) or '(none)'}",
                next=f"see k3_backend/ops/{artifact.op}/interface.py",
            )  # fmt: skip
        self.schedule: Schedule | None = None
        if schedule_file is not None and schedule_file.exists():
            self.schedule = Schedule.load(schedule_file, op=artifact.op, geometry=geometry.name, tunables=self.tunables)
        self._library = _open(artifact)
        entry = _symbol(self._library, f"__tvm_ffi_{artifact.op}", artifact)
        self.entry: int = ctypes.cast(entry, ctypes.c_void_p).value or 0

    def choose(self, rows: int, tunables: Mapping[str, int] | None = None) -> dict[str, int] | None:
        """Tunable values for `rows` = M: the given ones, checked against the declaration, else the schedule's.

        None means that no schedule covers these rows (the planner refuses).

        Raises:
            ScheduleError: given values that are not exactly one declared value per tunable.
        """
        if tunables is None:
            return self.schedule.lookup(rows) if self.schedule else None
        declared = {t.name: t.values for t in self.tunables}
        if set(tunables) != set(declared) or any(tunables[name] not in values for name, values in declared.items()):
            raise ScheduleError(
                f"tunables {dict(tunables)}",
                where=f"op {self.spec.name}",
                expected=f"one value each of {declared}",
                next="see the kernel's cpu.toml",
            )
        return {name: tunables[name] for name in declared}

    def __call__(
        self,
        pool: Pool,
        tensors: Mapping[str, torch.Tensor | None],
        attrs: Mapping[str, int | float],
        *,
        rows: int,
        tunables: Mapping[str, int] | None = None,
    ) -> None:
        """Run once. Outputs and states among `tensors` are written in place. Arguments as in `LaunchList.add`."""
        launches = LaunchList(pool)
        launches.add(self, tensors, attrs, rows=rows, tunables=tunables)
        launches.replay()


class LaunchList:
    """Launches in execution order, packed once, replayed as one native call.

    The list keeps every bound tensor alive and reads and writes it at the address it had when it was bound; changed
    contents are seen by the next replay, a re-allocated tensor is not.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._names: list[tuple[str, int | None, str]] = []
        self._arguments: list[CallArguments] = []
        self._entries: list[tuple[LoadedOp, int | None]] = []
        self._packed: ctypes.Array[_Launch] | None = None
        self._counters: list[object] = []
        self._error = ctypes.create_string_buffer(_ERROR_BYTES)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> Sequence[tuple[str, int | None, str]]:
        """(op, layer, site) of each launch."""
        return tuple(self._names)

    def add(
        self,
        op: LoadedOp,
        tensors: Mapping[str, torch.Tensor | None],
        attrs: Mapping[str, int | float],
        *,
        rows: int,
        layer: int | None = None,
        site: str | None = None,
        tunables: Mapping[str, int] | None = None,
        counter: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None,
    ) -> None:
        """Check and pack one launch.

        Args:
            op: the kernel.
            tensors: one entry per tensor of the op's interface; optional ones may be None or left out.
            attrs: one number per attribute of the interface.
            rows: M = batch * tokens, which selects the schedule bucket.
            layer: layer index for error messages.
            site: name of the place in the step; default the op's name.
            tunables: overrides the schedule (tuning, tests).
            counter: one-element int64 array, incremented natively after each finished launch (the ledger).

        Raises:
            BindError: a tensor or attribute does not fit the interface; names op and argument.
            ScheduleError: no schedule for these rows and no `tunables` given.
        """
        chosen = op.choose(rows, tunables)
        if chosen is None:
            raise ScheduleError(
                f"no schedule for {rows} rows", where=f"op {op.spec.name} ({op.geometry.name})",
                expected="a bucket with max_rows >= rows, or explicit tunables",
                next=f"add schedules/cpu/{op.geometry.name}/{op.spec.name}.toml",
            )  # fmt: skip
        bound = check_tensors(op.spec, op.geometry, tensors, attrs, rows)
        numbers = check_attrs(op.spec, attrs)
        arguments = CallArguments(self.pool.context, bound, numbers, list(chosen.values()))
        self._names.append((op.spec.name, layer, site or op.spec.name))
        self._arguments.append(arguments)
        self._entries.append((op, counter.ctypes.data if counter is not None else None))
        self._counters.append(counter)
        self._packed = None

    def replay(self, count: int | None = None) -> None:
        """Run the first `count` launches once, in order; all of them by default.

        Raises:
            LaunchError: a kernel returned an error; launches after it did not run.
            ValueError: the list does not have so many.
        """
        if count is not None and not 0 <= count <= len(self):
            raise ValueError(f"{count} launches asked for of a list of {len(self)}")
        self._run(len(self) if count is None else count, None)

    def replay_timed(self) -> list[int]:
        """Run all launches once; nanoseconds of each, including its dispatch (about 25 ns of clock reading)."""
        times = np.zeros(len(self), dtype=np.int64)
        self._run(len(self), times.ctypes.data)
        return [int(t) for t in times]

    def _run(self, count: int, times_ns: int | None) -> None:
        if self._packed is None:
            self._packed = (_Launch * len(self))(
                *(
                    _Launch(op.entry, arguments.address, arguments.count, counter)
                    for (op, counter), arguments in zip(self._entries, self._arguments, strict=True)
                )
            )
        failed = self.pool.replay(self._packed, count, self._error, times_ns)
        if failed >= 0:
            op, layer, site = self._names[failed]
            raise LaunchError(self._error.value.decode("utf-8", "replace"), op=op, layer=layer, site=site)


class KernelSet(Mapping[str, LoadedOp]):
    """The specialised ops of one geometry, by op name, and the runtime that launches them."""

    def __init__(self, ops: Mapping[str, LoadedOp], geometry: Geometry, runtime: Runtime) -> None:
        self._ops = dict(ops)
        self.geometry = geometry
        self.runtime = runtime

    @classmethod
    def load(
        cls, artifacts: Mapping[str, Artifact], schedules_dir: Path, geometry: Geometry, runtime: Artifact
    ) -> KernelSet:
        """Load artifacts of one geometry with the schedules in `schedules_dir` (the folder that holds `cpu/`).

        An op without a schedule file is loaded; the planner refuses to use it. `runtime` is `build_runtime()`'s.

        Raises:
            ArtifactError, ScheduleError: as in `LoadedOp`, of the first op that cannot be loaded.
        """
        folder = schedules_dir / "cpu" / geometry.name
        ops = {op: LoadedOp(artifact, geometry, folder / f"{op}.toml") for op, artifact in artifacts.items()}
        return cls(ops, geometry, Runtime(runtime))

    def __getitem__(self, op: str) -> LoadedOp:
        return self._ops[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)


class _Context(ctypes.Structure):
    """`K3Context` of k3_cpu.h."""

    _fields_ = (
        ("abi_version", ctypes.c_int32),
        ("max_workers", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
        ("barrier", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("pool", ctypes.c_void_p),
    )


def _destroy(library: ctypes.CDLL, address: int, pid: int) -> None:
    """Stop the workers, unless this is a forked child, where they do not exist and could never be joined."""
    if os.getpid() == pid:
        library.k3_pool_destroy(address)


def _scratch_of(context: int) -> tuple[int, int]:
    fields = _Context.from_address(context)
    return fields.scratch, fields.scratch_bytes


def _require(artifact: Artifact, *, op: str, geometry: str) -> None:
    """Check identity and bytes of an artifact before any of its code is loaded."""
    found = (artifact.op, artifact.geometry, artifact.device, artifact.abi)
    wanted = (op, geometry, "cpu", ABI_VERSION)
    if found != wanted:
        raise ArtifactError(
            f"is (op, geometry, device, ABI) {found}",
            where=str(artifact.path),
            expected=str(wanted),
            next="build the artifact again",
        )
    artifact.verify()


def _open(artifact: Artifact) -> ctypes.CDLL:
    """Load an object; the first call also loads libtvm_ffi globally, which kernel objects resolve against."""
    try:
        import tvm_ffi  # noqa: F401 - planning and the standard path work without it
    except ImportError as error:
        raise ArtifactError(
            f"apache-tvm-ffi is not installed ({error})",
            where=str(artifact.object_path),
            expected="the library that CPU kernels report errors through",
            next="pip install 'k3-backend[cpu]'",
        ) from error
    try:
        return ctypes.CDLL(str(artifact.object_path), mode=os.RTLD_NOW | os.RTLD_LOCAL, use_errno=True)
    except OSError as error:
        raise ArtifactError(
            f"cannot be loaded ({error})",
            where=str(artifact.object_path),
            expected="a shared object for this machine",
            next="build the artifact again",
        ) from error


def _symbol(library: ctypes.CDLL, name: str, artifact: Artifact) -> ctypes._NamedFuncPointer:
    try:
        return getattr(library, name)  # type: ignore[no-any-return]
    except AttributeError:
        raise ArtifactError(
            f"exports no {name}",
            where=str(artifact.object_path),
            expected=f"the symbol {name}",
            next="docs/kernel-authoring.md",
        ) from None
