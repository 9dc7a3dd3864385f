"""Whether an arm computes what the op's reference computes: a wrong peer is no peer.

The reference is evaluated in fp64 on the first set's inputs. Peers round in other places than our kernels, so the bound
is one of size: far above every rounding, far below every wrong formula. What our kernels are held to is the kernels
gate's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from k3_backend.ops.registry import reference
from verify.bench.gpu.arm import Arm, Inputs

__all__ = ["MAX_ERROR", "MAX_ROW_ERROR", "compared", "expected"]

MAX_ERROR = 0.02
"""Largest L2 norm of the difference, over that of the reference; one bf16 rounding gives about 0.002."""
MAX_ROW_ERROR = 0.05
"""The same for each row of the last dimension."""


def expected(inputs: Inputs) -> dict[str, Tensor]:
    """The reference's results for the first set; states as the batch's requests have them."""
    first = inputs.sets[0]
    with _on_gpu():
        want = reference(inputs.cell.op)(first, inputs.attrs)
    if inputs.cell.op == "kda_decode":
        own = first["slots"].flatten().long()
        want["ordered_state"] = want["state"][own]
    return want


def compared(arm: Arm, want: Mapping[str, Tensor]) -> dict[str, dict[str, float | bool]]:
    """Run the first launch and compare what it left.

    Returns:
        per tensor: `error` and `row_error`, null-free, and whether both hold.
    """
    arm.launches[0]()
    torch.cuda.synchronize()
    found = {}
    for name, got in arm.results().items():
        exact = (arm.expected or want)[name].double()
        difference = got.double() - exact
        error = _ratio(difference.norm(), exact.norm())
        row_error = float(_ratios(difference.norm(dim=-1), exact.norm(dim=-1)).max())
        fine = error <= MAX_ERROR and row_error <= MAX_ROW_ERROR  # NaN is not
        found[name] = {"error": min(error, _HUGE), "row_error": min(row_error, _HUGE), "fine": fine}
    return found


_HUGE = 1e30
"""Stands for NaN and infinity, which a raw line cannot hold."""


def _ratio(difference: Tensor, size: Tensor) -> float:
    return float(_ratios(difference, size))


def _ratios(difference: Tensor, size: Tensor) -> Tensor:
    ratio = difference / size.clamp(min=1e-30)
    return torch.nan_to_num(ratio, nan=_HUGE, posinf=_HUGE)


@contextlib.contextmanager
def _on_gpu() -> Iterator[None]:
    """Tensors that a reference makes lie where its inputs do."""
    with torch.device("cuda"):
        yield
