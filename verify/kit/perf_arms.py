"""The perf gate's arms on a GPU machine: a worker process each and per block, chains as captured graphs, two clocks.

Only one arm works at a time. Every process has a CUDA context of its own, draws its contents on the device from the
block's seed, and knows neither the others nor what is compared. What an arm left is copied out and held against the
other arms' here.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from k3_backend.ops import OPS
from verify.evaluator.client import Client
from verify.kit.child import started_arm
from verify.kit.context import KitContext
from verify.protocol.perf_plan import CellPlan
from verify.timing.compare import Left
from verify.timing.load import ForeignTime
from verify.timing.sampler import Paths, Slice, as_fault
from verify.workers.shared import View

__all__ = ["DECLARED", "ArmFiles", "KitBlock", "KitSampler", "files_of"]

BUFFER_BYTES = 1 << 29
"""Shared buffer per arm: outputs and sampled states of one chain."""
STATE_ELEMENTS = 1 << 22
OUTPUT_ELEMENTS = 1 << 18
"""Of an output, compared per leg: as many copies, drawn afterwards, as make about so many; two at least."""
FEWEST_COPIES = 2
OPEN_S = 240.0
SET_S = 240.0
"""Deadline for setting a chain: the first one of a process compiles what the standard path compiles."""
CALL_S = 60.0
MOST_REPLAYS = 1 << 12
DECLARED = frozenset({"op.missing", "op.no_schedule"})
"""Reasons for the standard path that an arm's files declare: it has no kernel for the op, or no bucket for the rows."""


@dataclass(frozen=True)
class ArmFiles:
    """What an arm runs; empty for the standard arm."""

    artifacts: Mapping[str, Path] = field(default_factory=dict)
    """`<op>/<geometry>` -> folder."""
    schedules: Path | None = None


def files_of(kit: KitContext, arm: str) -> ArmFiles:
    """The files of an arm of the kit."""
    units = kit.manifest.units(arm)
    if not units:
        return ArmFiles()
    return ArmFiles({f"{unit.op}/{unit.geometry}": kit.artifact(arm, unit) for unit in units}, kit.schedules(arm))


class KitSampler:
    """Starts workers; see `Sampler`.

    Args:
        chains: cell -> `geometry` and `copies` of its chain.
        arms: what the arms that may take part run; `standard` has no files.
        arch: of the artifacts.
        code: folder of the trusted Python.
        logs: folder for the workers' logs.
        bootstrap: first line of a worker.
    """

    def __init__(
        self,
        chains: Mapping[str, Mapping[str, Any]],
        arms: Mapping[str, ArmFiles],
        *,
        arch: str,
        code: Path,
        logs: Path,
        bootstrap: str,
    ) -> None:
        self._chains = chains
        self._arms = arms
        self._arch = arch
        self._where: dict[str, Any] = {"code": code, "logs": logs, "bootstrap": bootstrap}
        self.facts: dict[str, Any] = {}
        """Arm -> what its process said as it opened, of the latest block."""

    @contextlib.contextmanager
    def block(self, arms: Sequence[str], seed: str, cells: Sequence[CellPlan]) -> Iterator[KitBlock]:  # noqa: ARG002
        """See `Sampler.block`."""
        with contextlib.ExitStack() as stack:
            workers: dict[str, Client] = {}

            def start(arm: str) -> None:
                files = self._arms[arm]
                with as_fault(arm):
                    context = started_arm(
                        arm, files.artifacts, files.schedules, buffer_bytes=BUFFER_BYTES, **self._where
                    )
                    workers[arm] = stack.enter_context(context)
                    self.facts[arm] = workers[arm].call(
                        "chain.open", timeout_s=OPEN_S, arch=self._arch, seed=seed, geometries=self._geometries(files)
                    )["loaded"]

            # Nothing is timed yet, and most of a start is importing.
            with ThreadPoolExecutor(max_workers=len(arms)) as pool:
                for future in [pool.submit(start, arm) for arm in arms]:
                    future.result()
            yield KitBlock(self._chains, workers)

    def _geometries(self, files: ArmFiles) -> dict[str, list[str]]:
        """Geometry -> ops of a step that the arm has a kernel for."""
        found: dict[str, list[str]] = {str(chain["geometry"]): [] for chain in self._chains.values()}
        for name in files.artifacts:
            op, geometry = name.split("/")
            if geometry in found and op in OPS:
                found[geometry].append(op)
        return {geometry: sorted(ops) for geometry, ops in found.items()}


class KitBlock:
    """See `Block`. A call is one replay."""

    def __init__(self, chains: Mapping[str, Mapping[str, Any]], workers: Mapping[str, Client]) -> None:
        self._chains = chains
        self._workers = workers
        self._calls: dict[str, int] = {}
        self._outputs: dict[str, dict[str, View]] = {}
        self._choices: dict[str, list[Mapping[str, Any]]] = {}
        self._samples: dict[tuple[str, bool], str] = {}
        self._set: dict[str, str] = {}
        """Arm -> cell whose chain its process holds."""
        self._runs: dict[str, int] = {}
        """Arm -> slices since the last reset."""
        self._replays: dict[str, int] = {}
        """Arm -> replays asked for since then, untimed ones included."""
        self._load = ForeignTime(workers.values())

    def prepare(self, arm: str, cell: CellPlan, calls: int, slices: int) -> None:  # noqa: ARG002
        """See `Block.prepare`. A chain that is set already serves any number of calls."""
        self._calls[arm] = calls
        if self._set.get(arm) == cell.key:
            return
        chain, size = self._chains[cell.key], cell.cell
        answer = self._call(
            arm, "chain.set", SET_S, key=cell.key, scope=size["scope"], geometry_name=chain["geometry"],
            batch=size["batch"], context=size["context"] or 0, tokens=size["tokens"], copies=chain["copies"],
        )  # fmt: skip
        buffer = self._workers[arm].buffer
        buffer.reset()
        self._outputs[arm] = {}
        for name, made in answer["outputs"].items():
            copies, *shape = made["shape"]
            count = max(FEWEST_COPIES, min(copies, OUTPUT_ELEMENTS // math.prod(shape)))
            self._outputs[arm][name] = buffer.view(made["dtype"], (count, *shape))
        self._choices[arm] = answer["choices"]
        self._set[arm] = cell.key

    def most(self, cell: CellPlan) -> int:  # noqa: ARG002
        """See `Block.most`."""
        return MOST_REPLAYS

    def reset(self, arm: str, cell: CellPlan) -> None:  # noqa: ARG002
        """See `Block.reset`."""
        self._runs[arm] = self._replays[arm] = 0
        self._call(arm, "chain.reset", warm=1)

    def slice(self, arm: str, cell: CellPlan) -> Slice:  # noqa: ARG002
        """See `Block.slice`. One untimed replay goes before: the other arms' have emptied the caches."""
        calls = self._calls[arm]
        self._runs[arm] += 1
        self._replays[arm] += calls + 1
        self._call(arm, "chain.run", count=1)
        with as_fault(arm):
            answer, seconds = self._workers[arm].timed_call("chain.run", timeout_s=CALL_S, count=calls)
        return Slice(round(seconds * 1e9), int(answer["ns"]))

    def again(self, arm: str, cell: CellPlan, calls: int) -> None:  # noqa: ARG002
        """See `Block.again`."""
        self._runs[arm] += 1
        self._replays[arm] += calls
        self._call(arm, "chain.run", count=calls)

    def left(self, arm: str, cell: CellPlan) -> Left:
        """See `Block.left`."""
        first = self._runs[arm] == 1
        sample = self._samples.setdefault((cell.key, first), secrets.token_hex(16))
        buffer = self._workers[arm].buffer
        mark = buffer.used
        target = buffer.view("f32", (STATE_ELEMENTS,))
        views = {name: view.to_json() for name, view in self._outputs[arm].items()}
        answer = self._call(arm, "chain.collect", sample=sample, outputs=views, states=target.to_json())
        state = buffer.array(target)[: int(answer["elements"])].copy()
        outputs = {name: _values(buffer.array(view), view.dtype) for name, view in self._outputs[arm].items()}
        buffer.reset(mark)
        return Left(outputs, {"state": state} if state.size else {})

    def paths(self, arm: str, cell: CellPlan) -> Paths:  # noqa: ARG002
        """See `Block.paths`.

        A site takes the standard path by declaration where the arm has no kernel or no schedule for it; the device's
        ledger has to have counted that, too. Any other replay on the standard path, and any that the ledger lacks,
        counts as a fallback.
        """
        counts = self._call(arm, "chain.finish")["counts"]
        replays = self._replays[arm]
        specialised = fallbacks = 0
        for choice in self._choices[arm]:
            kernel, standard = counts[choice["key"]]
            if choice["path"] == "standard" and choice["code"] in DECLARED:
                fallbacks = max(fallbacks, kernel + replays - standard)
                continue
            specialised = max(specialised, kernel)
            fallbacks = max(fallbacks, standard + replays - kernel)
        return Paths(specialised, fallbacks)

    def reference(self, cell: CellPlan, left: Left) -> Mapping[str, float]:  # noqa: ARG002
        """None: the standard arm, another process, runs the same calls and stands for it."""
        return {}

    def foreign_share(self) -> float:
        """See `Block.foreign_share`."""
        return self._load.share()

    def facts(self, arm: str, cell: CellPlan) -> Mapping[str, Any]:  # noqa: ARG002
        """The different choices of the chain's sites: path, reason, tunables, kernels."""
        found = []
        for choice in self._choices[arm]:
            told = {**choice, "key": str(choice["key"]).partition(".")[2]}
            if told not in found:
                found.append(told)
        return {"sites": found}

    def _call(self, arm: str, method: str, timeout_s: float = CALL_S, **params: Any) -> dict[str, Any]:
        with as_fault(arm):
            return self._workers[arm].call(method, timeout_s=timeout_s, **params)


def _values(stored: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """A copy as f32, [calls, rows, ...]."""
    values = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32) if dtype == "bf16" else stored.copy()
    return values.reshape(values.shape[0], -1, values.shape[-1]).astype(np.float32, copy=False)
