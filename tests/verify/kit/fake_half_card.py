"""A card for half-layers without a GPU, with planted faults: runs the standard path over an arena in host memory.

It says what a real card says: how each site was captured (from the arm's own schedule and descriptors), what a ledger
counted, and which kernels ran. A fault is chosen by the environment variable of this module, as one fault per worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3_backend.aot.arguments import TORCH_DTYPES, call_sizes
from k3_backend.aot.cuda.choices import Choices, Declined
from k3_backend.aot.manifest import file_digest
from k3_backend.geometry import Geometry
from k3_backend.model.program import Site, bind
from k3_backend.ops import OPS
from k3_backend.ops.registry import standard
from verify.workers import half_methods
from verify.workers.half_layer import constant_name
from verify.workers.main import Session
from verify.workers.shared import View
from verify.workers.spoil import disturb

FAULT = "FASTTRACK_TEST_FAULT"
LEDGER = "void ledger_add<long>()"
VENDOR = "void vendor_gemm()"


def install() -> None:
    """Make this the card of every session of this process."""
    real = half_methods.load

    def load(session: Session, **params: Any) -> dict[str, Any]:
        half_methods.install(session, FakeHalfCard(os.environ.get(FAULT, "")))
        return real(session, **params)

    half_methods.METHODS["half.load"] = load


def rows(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Counts by symbol as a trace gives them; what stands behind a slash are the threads, 32 by default."""
    found = []
    for name, count in sorted(counts.items()):
        symbol, _, block = name.partition("/")
        found.append({"name": symbol, "block": int(block or 32), "registers": 32, "shared": 0, "count": count})
    return found


class FakeHalfCard:
    """Replays by running the program again."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def load(self, folders: Mapping[str, Path], schedules: Path, g: Geometry, arch: str, nbytes: int) -> dict[str, Any]:
        if self.fault == "no_images":
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        self.g = g
        self.choices = {op: Choices.read(folder, schedules, OPS[op], g, arch) for op, folder in folders.items()}
        whole = np.zeros(nbytes + 256, dtype=np.uint8)
        self.arena = whole[-whole.ctypes.data % 256 :][:nbytes]
        images = {
            op: {name: file_digest(folders[op] / name) for name in choices.descriptor.images()}
            for op, choices in self.choices.items()
        }
        if self.fault == "other_image":
            images["attn_res"] = dict.fromkeys(images["attn_res"], "0" * 64)
        profiler = {"obstacle": None, "ledger": LEDGER}
        if self.fault == "no_profiler":
            profiler = {
                "obstacle": "the profiler failed: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",
                "ledger": None,
            }
        return {"images": images, "device": {"name": "fake", "multiprocessors": 1}, "profiler": profiler}

    def bind(
        self,
        program: tuple[Site, ...],
        views: Mapping[str, View],
        image: npt.NDArray[np.uint8],  # noqa: ARG002 - a real card runs every site before it captures
        mode: str,
        spoil: Sequence[str],
    ) -> list[dict[str, Any]]:
        if self.fault == "raises":
            raise RuntimeError("CUDA error: invalid argument")
        self.program, self.views, self.spoil = program, dict(views), () if self.fault == "unspoilt" else tuple(spoil)
        self.sites = [self._site(site, mode) for site in program]
        self.counts = {site["key"]: [7, 3] for site in self.sites}
        return self.sites

    def _site(self, site: Site, mode: str) -> dict[str, Any]:
        found: dict[str, Any] = {"key": site.key, "op": site.op, "path": "standard", "tunables": {}, "kernels": []}
        if mode == "off":
            return {**found, "code": "op.missing", "message": "no kernel"}
        choices = self.choices[site.op]
        arguments = self._arguments(site)
        sizes = call_sizes(OPS[site.op], self.g, arguments)
        chosen = choices.tunables(sizes["M"], sizes, site.attrs)
        if self.fault == "falls_back" and site.op == "input_projection":
            chosen = Declined("op.unbound", "nothing built for it")
        if isinstance(chosen, Declined):
            return {**found, "code": chosen.code, "message": chosen.message}
        variant = choices.descriptor.variant({**sizes, **chosen})
        assert variant is not None
        kernels = [launch.entry for launch in variant.launches]
        return {**found, "path": "specialized", "code": None, "message": None, "kernels": kernels}

    def run(self, image: npt.NDArray[np.uint8], replays: int, *, profile: bool) -> dict[str, Any]:
        if self.fault == "exits":
            os._exit(0)
        if self.fault == "hangs":
            time.sleep(3600)
        self.arena[: image.size] = image
        before = {key: list(row) for key, row in self.counts.items()}
        kernels: dict[str, int] = {}
        for number in range(replays):
            self._replay(kernels, number)
        image[:] = self.arena[: image.size]
        if self.fault == "silent_ledger":
            self.counts = before
        if self.fault == "miscounting_ledger":
            self.counts = {key: [row[0] - 1, row[1] + 1] for key, row in self.counts.items()}
        if self.fault == "extra_kernel":
            kernels["void cublas_gemm()"] = replays
        if self.fault == "copies":
            kernels["gpu_memcpy: Memcpy DtoD (Device -> Device)"] = 1
        if self.fault == "other_op":
            kernels["kernel_unused"] = replays
        if self.fault == "other_variant":
            kernels["kernel_attn_res/64"] = kernels.pop("kernel_attn_res", 0)
        return {"ledger": {"before": before, "after": self.counts}, "kernels": rows(kernels) if profile else None}

    def _replay(self, kernels: dict[str, int], number: int) -> None:
        for site in self.program:
            tensors = self._arguments(site)
            if self.fault == "runs_once" and number:
                continue
            results = standard(site.op)(tensors, site.attrs)
            for name, value in results.items():
                target = tensors[name]
                assert target is not None
                scale = 1.1 if self.fault == "wrong" and site.op == "input_projection" else 1.0
                target.copy_((value * scale).view(target.shape))
            if site.op in self.spoil:
                disturb(OPS[site.op], tensors)
        for captured in self.sites:
            column = 0 if captured["path"] == "specialized" else 1
            self.counts[captured["key"]][column] += 1
            names = captured["kernels"] or [VENDOR]
            if self.fault == "missing_symbol" and captured["op"] == "attn_res":
                names = []
            for name in names:
                kernels[name] = kernels.get(name, 0) + 1
        kernels[LEDGER] = kernels.get(LEDGER, 0) + 1
        if self.fault == "foreign_state":
            self._tensor(self.views["blocks.0"]).view(-1).view(torch.int16)[0] ^= 1
        if self.fault == "overrun":
            view = self.views[self.program[-1].bindings["out"]]
            self.arena[view.offset + view.nbytes] ^= 1

    def _arguments(self, site: Site) -> dict[str, Tensor | None]:
        weights = {
            spec.name: self._tensor(self.views[constant_name(site, spec.name)])
            for spec in OPS[site.op].tensors
            if spec.role == "constant"
        }
        tensors = {name: self._tensor(view) for name, view in self.views.items() if ":" not in name}
        return bind(site, tensors, weights)

    def _tensor(self, view: View) -> Tensor:
        data = torch.from_numpy(self.arena[view.offset : view.offset + view.nbytes])
        return data.view(TORCH_DTYPES[view.dtype]).view(view.shape)  # type: ignore[index]
