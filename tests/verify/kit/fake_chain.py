"""An engine of timed chains without a GPU: standard ops on the host, on a clock that goes as the arm's image says.

Imported inside workers by the bootstrap of `kit_fixtures.FakeMachine`. The images of an arm's artifacts hold lines
`replay_ms N`, `skips`, `dies` or `forgets`; an arm without artifacts is the standard arm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_backend.geometry import Geometry
from k3_backend.model.program import Site, bind
from k3_backend.ops.registry import standard
from verify.workers import chain_methods
from verify.workers.main import Session

STANDARD_MS = 40.0


def install() -> None:
    """Make this the engine of every session of this process."""
    real = chain_methods.open_arm

    def open_arm(session: Session, **params: Any) -> dict[str, Any]:
        chain_methods.install(session, FakeEngine())
        return real(session, **params)

    chain_methods.METHODS["chain.open"] = open_arm


class FakeEngine:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.told: dict[str, str] = {}
        self.ops: set[str] = set()

    def load(self, artifacts: Mapping[str, Path], schedules: Path | None, g: Geometry, arch: str) -> dict[str, Any]:
        del schedules, g, arch
        for op, folder in artifacts.items():
            self.ops.add(op)
            for image in folder.glob("*.cubin"):
                for line in image.read_text().splitlines():
                    key, _, value = line.partition(" ")
                    self.told[key] = value
        return {"images": sorted(artifacts)}

    def capture(
        self,
        g: Geometry,
        program: Sequence[Site],
        buffers: Mapping[str, Tensor],
        constants: Callable[[Site], Mapping[str, Tensor]],
        before: Callable[[], None],
    ) -> FakeGraph:
        del g
        return FakeGraph(self, program, buffers, constants, before)


class FakeGraph:
    def __init__(
        self,
        engine: FakeEngine,
        program: Sequence[Site],
        buffers: Mapping[str, Tensor],
        constants: Callable[[Site], Mapping[str, Tensor]],
        before: Callable[[], None],
    ) -> None:
        self.told, self.program, self.before, self.constants = engine.told, program, before, constants
        self.tensors = dict(buffers)
        self.choices = [
            {
                "key": site.key, "op": site.op, "path": "specialized" if site.op in engine.ops else "standard",
                "code": None if site.op in engine.ops else "op.missing", "message": None, "tunables": {}, "kernels": [],
            }
            for site in program
        ]  # fmt: skip
        self.ms = float(self.told.get("replay_ms", STANDARD_MS))
        self.replays = 0
        self.all = 0
        self._work()

    def replay(self, count: int) -> int:
        for _ in range(count):
            self.all += 1
            self.before()
            if not ("skips" in self.told and self.all % 2):
                self._work()
            if "dies" in self.told and self.all > 30:
                os._exit(3)
        self.replays += count
        return round(count * self.ms * 1e6 * (1 + 0.002 * (self.all * 7919 % 13) / 13))

    def counts(self) -> dict[str, list[int]]:
        done = self.replays - (1 if "forgets" in self.told else 0)
        return {
            choice["key"]: [done, 0] if choice["path"] == "specialized" else [0, self.replays]
            for choice in self.choices
        }

    def reset(self) -> None:
        self.replays = 0

    def _work(self) -> None:
        with torch.inference_mode():
            for site in self.program:
                arguments = bind(site, self.tensors, self.constants(site))
                for name, value in standard(site.op)(arguments, site.attrs).items():
                    place = self.tensors[site.bindings[name]]
                    place.view(value.shape).copy_(value)
