"""Contents of a timed chain on a device: weights, states, caches and inputs, drawn there from the block's seed.

The same seed, name and shape give the same values in every process on one kind of device, so arms need not be sent
gigabytes. Scales keep activations in a sane range; nothing is near a value at which a mistake would cancel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from k3_backend.ops.interface import TensorSpec

__all__ = ["constant", "filled", "rng"]


def rng(seed: str, what: str, device: torch.device) -> torch.Generator:
    """An independent stream per seed and purpose."""
    digest = hashlib.sha256(f"{seed}/{what}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def filled(tensor: Tensor, seed: str, what: str, std: float = 1.0, mean: float = 0.0) -> Tensor:
    """The tensor, with normal values in place."""
    return tensor.normal_(mean, std, generator=rng(seed, what, tensor.device))


def constant(
    spec: TensorSpec, shape: tuple[int, ...], dtype: torch.dtype, seed: str, what: str, device: torch.device
) -> Tensor:
    """A weight."""
    draw = _SPECIAL.get(spec.name)
    value = torch.empty(shape, dtype=dtype, device=device)
    if draw is not None:
        return draw(value, seed, what)
    if spec.name.endswith("norm"):
        return filled(value, seed, what, 0.1, 1.0)
    return filled(value, seed, what, shape[-1] ** -0.5)


def _conv(value: Tensor, seed: str, what: str) -> Tensor:
    """One dominant tap (the current token) beside three that matter."""
    filled(value, seed, what, 0.3)
    value[..., -1] += 1.0
    return value


_SPECIAL: dict[str, Callable[[Tensor, str, str], Tensor]] = {
    "conv_w": _conv,
    "a_log": lambda value, seed, what: value.uniform_(1.0, 16.0, generator=rng(seed, what, value.device)).log_(),
    "dt_bias": filled,
    "res_proj": lambda value, seed, what: filled(value, seed, what, 0.05),
}
