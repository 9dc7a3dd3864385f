"""A program of sites on a GPU, captured into one CUDA graph: each site's path and reason, and a ledger for replays.

`CudaArm` holds an arm's loaded kernels and schedules. `capture` runs every site once, then records all of them into one
graph: the specialised op where the arm has one for the call, else the op's standard path on the GPU, with the reason.
The last node of the graph adds a constant vector to the ledger, so what it counts is what was replayed. An output of a
standard site stays where the standard path made it, at a fixed address in the graph's memory, and is copied only if a
specialised site reads it: so the standard path pays for no copy that stock serving would not make. No code of an arm
runs on the host; `k3_backend.aot.cuda.launch` launches its cubins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from k3_backend.aot.arguments import BindError, call_sizes
from k3_backend.aot.cuda.choices import Choices, Declined
from k3_backend.aot.cuda.launch import BoundCall, CudaOp
from k3_backend.aot.manifest import file_digest
from k3_backend.errors import BackendError
from k3_backend.geometry import Geometry
from k3_backend.model.program import Site, bind
from k3_backend.ops import OPS
from k3_backend.ops.registry import Standard, standard

__all__ = ["AfterSite", "Captured", "CudaArm", "DeviceLedger", "SiteChoice", "capture"]

Constants = Callable[[Site], Mapping[str, Tensor]]
"""Weights of a site by argument name, on the device."""
AfterSite = Callable[[Site, Mapping[str, Tensor | None]], None]
"""Called after a site's work was enqueued, while recording too: (site, its arguments and outputs). For watermarks."""
SPECIALISED, STANDARD = 0, 1
"""Columns of the ledger."""


@dataclass(frozen=True)
class SiteChoice:
    """What a captured site runs."""

    key: str
    """`Site.key`."""
    op: str
    path: Literal["specialized", "standard"]
    code: str | None
    """Why the standard path, as `k3_backend.step.plan` names it; None on the specialised path."""
    message: str | None
    tunables: Mapping[str, int]
    kernels: tuple[str, ...]
    """Entry symbol of every launch, in order; empty on the standard path."""

    def record(self) -> dict[str, Any]:
        """JSON for a raw line."""
        return {**asdict(self), "tunables": dict(self.tunables), "kernels": list(self.kernels)}


class CudaArm:
    """An arm's kernels on the current device. One without artifacts is the standard arm.

    Args:
        artifacts: op -> folder of its artifact.
        schedules: folder of the arm's schedules: the one that holds the families; may be None without artifacts.
        geometry: that of all artifacts.
        arch: as they were built for.

    Raises:
        BackendError: an artifact or a schedule cannot be read, or the driver refuses an image.
    """

    def __init__(self, artifacts: Mapping[str, Path], schedules: Path | None, geometry: Geometry, arch: str) -> None:
        if artifacts and schedules is None:
            raise BackendError(
                "artifacts without schedules", where=", ".join(artifacts), expected="the arm's folder of schedules",
                next="pass schedules",
            )  # fmt: skip
        self.geometry = geometry
        self.arch = arch
        self.ops: dict[str, CudaOp] = {}
        self.choices: dict[str, Choices] = {}
        self.images: dict[str, dict[str, str]] = {}
        """Op -> image -> sha256 of the bytes that were handed to the driver."""
        for op, folder in artifacts.items():
            assert schedules is not None
            self.choices[op] = Choices.read(folder, schedules, OPS[op], geometry, arch)
            self.ops[op] = CudaOp(folder, OPS[op], geometry)
            self.images[op] = {name: file_digest(folder / name) for name in self.choices[op].descriptor.images()}

    def choose(
        self, site: Site, arguments: Mapping[str, Tensor | None]
    ) -> tuple[BoundCall, Mapping[str, int]] | Declined:
        """The bound call of a site with its tunables, or why it takes the standard path."""
        if site.op not in self.ops:
            return Declined("op.missing", f"no specialised kernel for {site.op}")
        op = self.ops[site.op]
        sizes = call_sizes(OPS[site.op], self.geometry, arguments)
        chosen = self.choices[site.op].tunables(sizes["M"], sizes, site.attrs)
        if isinstance(chosen, Declined):
            return chosen
        try:
            return op.bind(arguments, site.attrs, chosen), chosen
        except BindError as error:
            return Declined("op.unbound", str(error))


class DeviceLedger:
    """Finished replays per site and path, counted on the device: int64 [sites, 2], (specialised, standard)."""

    def __init__(self, keys: Sequence[str], device: torch.device | str = "cuda") -> None:
        self.keys = tuple(keys)
        self.counts = torch.zeros(len(self.keys), 2, dtype=torch.int64, device=device)

    def vector(self, choices: Sequence[SiteChoice]) -> Tensor:
        """What one replay of a graph with these sites adds."""
        step = torch.zeros(len(self.keys), 2, dtype=torch.int64)
        for choice in choices:
            step[self.keys.index(choice.key), SPECIALISED if choice.path == "specialized" else STANDARD] += 1
        return step.to(self.counts.device)

    def reset(self) -> None:
        """Set every count to zero, in place."""
        self.counts.zero_()

    def snapshot(self) -> dict[str, list[int]]:
        """Site key -> [specialised, standard]; waits for the device."""
        return dict(zip(self.keys, self.counts.cpu().tolist(), strict=True))


@dataclass
class Captured:
    """One graph and everything whose addresses it holds."""

    graph: torch.cuda.CUDAGraph
    choices: tuple[SiteChoice, ...]
    """One per site, in program order."""
    tensors: Mapping[str, Tensor]
    """Binding name -> the tensor that holds its latest value after a replay."""
    ledger: DeviceLedger
    stream: torch.cuda.Stream
    kept: list[Any]
    """Bound calls and tensors that must outlive the graph."""

    def replay(self, count: int = 1) -> None:
        """Enqueue `count` replays on the graph's stream; does not wait."""
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                self.graph.replay()


def capture(
    arm: CudaArm,
    program: Sequence[Site],
    buffers: Mapping[str, Tensor],
    constants: Constants,
    *,
    ledger: DeviceLedger | None = None,
    before: Callable[[], None] | None = None,
    after: AfterSite | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Captured:
    """Record a program into a graph.

    Every site runs once before (kernels are loaded and compiled on first use, which a capture forbids), so contents of
    buffers and states are those after one run: fill them afterwards.

    Args:
        arm: decides per site.
        program: sites in order; keys are unique.
        buffers: every step buffer, batch field and state pool that the program binds, on the device.
        constants: weights of a site.
        ledger: shared by several graphs; by default one for this program.
        before: enqueues work that goes before the first site in every replay, such as fresh inputs.
        after: called after each site.
        stream: that replays run on; by default one of its own.

    Raises:
        BackendError: two sites have one key.
        KeyError: `buffers` or `constants` lacks what a site binds.
    """
    keys = [site.key for site in program]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BackendError("stands twice in the program", where=twice, expected="one site per key", next="number them")
    counted = ledger or DeviceLedger(keys)
    used = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        planned = _plan(arm, program, buffers, constants)
        choices = tuple(site.choice for site in planned)
        step = counted.vector(choices)
        torch.cuda.synchronize()
        with torch.cuda.stream(used):
            if before is not None:
                before()
            _enqueue(planned, buffers, constants, after)
        used.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=used):
            if before is not None:
                before()
            tensors = _enqueue(planned, buffers, constants, after)
            counted.counts.add_(step)
    return Captured(graph, choices, tensors, counted, used, [planned, dict(buffers), tensors, step])


@dataclass(frozen=True)
class _Planned:
    """A site with its decision."""

    site: Site
    choice: SiteChoice
    call: BoundCall | None
    """On the specialised path."""
    standard: Standard | None
    copied: frozenset[str] = frozenset()
    """Outputs of a standard site that a specialised one reads: it was bound to the caller's buffer."""


def _plan(arm: CudaArm, program: Sequence[Site], buffers: Mapping[str, Tensor], constants: Constants) -> list[_Planned]:
    """Decide and bind every site; nothing is launched."""
    planned: list[_Planned] = []
    for site in program:
        chosen = arm.choose(site, bind(site, buffers, constants(site)))
        if isinstance(chosen, Declined):
            choice = SiteChoice(site.key, site.op, "standard", chosen.code, chosen.message, {}, ())
            planned.append(_Planned(site, choice, None, standard(site.op, "cuda")))
        else:
            call, tunables = chosen
            entries = tuple(launch.entry for launch in call.variant.launches)
            choice = SiteChoice(site.key, site.op, "specialized", None, None, tunables, entries)
            planned.append(_Planned(site, choice, call, None))
    return [
        replace(one, copied=frozenset(_read_by_kernels(planned, at))) if one.standard is not None else one
        for at, one in enumerate(planned)
    ]


def _read_by_kernels(planned: Sequence[_Planned], at: int) -> Iterator[str]:
    """Outputs of the site at a place that a specialised site reads before another site writes them."""
    for spec in OPS[planned[at].site.op].tensors:
        bound = planned[at].site.bindings.get(spec.name)
        if spec.role != "output" or bound is None:
            continue
        for later in planned[at + 1 :]:
            if later.call is not None and bound in (name for _, name, _ in later.site.reads):
                yield spec.name
                break
            if bound in _written(later.site):
                break


def _written(site: Site) -> set[str]:
    """Bindings of a site's outputs."""
    outputs = (spec.name for spec in OPS[site.op].tensors if spec.role == "output")
    return {site.bindings[name] for name in outputs if name in site.bindings}


def _enqueue(
    planned: Sequence[_Planned], buffers: Mapping[str, Tensor], constants: Constants, after: AfterSite | None
) -> dict[str, Tensor]:
    """Enqueue every site on the current stream; the tensor of each binding."""
    tensors = dict(buffers)
    for one in planned:
        site = one.site
        if one.call is not None:
            one.call.launch()
            tensors |= {name: buffers[name] for name in _written(site)}
        else:
            assert one.standard is not None
            for name, value in one.standard(bind(site, tensors, constants(site)), site.attrs).items():
                bound = site.bindings[name]
                if name in one.copied:
                    buffers[bound].view(value.shape).copy_(value)
                    tensors[bound] = buffers[bound]
                else:
                    tensors[bound] = value
        if after is not None:
            after(site, bind(site, tensors, constants(site)))
    return tensors
