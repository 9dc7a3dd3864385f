"""Secret random draws: the distributions from which op inputs are made.

One `Draw` holds everything that decides a case's values: geometry, sizes, input class and one generator seeded from the
case's secret seed. The same case drawn twice gives the same bytes. Values are made in f32 and rounded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3_backend.geometry import Geometry

__all__ = ["ACTIVATION_KINDS", "Case", "Draw", "Source"]

ACTIVATION_KINDS = ("gaussian", "wide", "equal", "spikes", "tail")
"""Input classes that every op with floating activations has:

gaussian: unit normal; wide: magnitudes over 2^-8 .. 2^8 within a row; equal: one value everywhere; spikes: mostly zero
with rare large values; tail: signal only in the last two per cent of each row, the last element included.
"""


@dataclass(frozen=True)
class Case:
    """One secret case of the kernels gate. All fields are stored with the raw evidence, so that it can be replayed."""

    op: str
    kind: str
    """Input class."""
    batch: int
    """B, requests."""
    tokens: int
    """T, query tokens per request."""
    threads: int
    """Workers of the launch pool."""
    seed: str
    """Hex, from the operating system after the artifacts' digests were fixed."""
    geometry: str

    @property
    def rows(self) -> int:
        """M = B * T."""
        return self.batch * self.tokens

    @property
    def id(self) -> str:
        """Unique, readable key of the raw lines."""
        return f"{self.op}/{self.kind}/b{self.batch}/t{self.tokens}/w{self.threads}/{self.seed[:12]}"


class Source:
    """Uniform integers, permutations and real values from one seeded generator."""

    def __init__(self, *labels: str) -> None:
        digest = hashlib.sha256("|".join(labels).encode()).digest()
        self.generator = torch.Generator()
        self.generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def integer(self, low: int, high: int) -> int:
        """Uniform integer in [low, high]."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """Uniform i64 in [low, high]."""
        return torch.randint(low, high + 1, tuple(shape), generator=self.generator)

    def choose(self, *options: int) -> int:
        """One of the options."""
        return options[self.integer(0, len(options) - 1)]

    def permutation(self, count: int) -> Tensor:
        """Random order of 0 .. count-1."""
        return torch.randperm(count, generator=self.generator)

    def chance(self, probability: float, shape: Sequence[int]) -> Tensor:
        """Boolean tensor, true with the given probability."""
        return torch.rand(tuple(shape), generator=self.generator) < probability

    def normal(self, shape: Sequence[int], scale: float = 1.0) -> Tensor:
        """f32 normal values."""
        return torch.randn(tuple(shape), generator=self.generator) * scale

    def uniform(self, low: float, high: float, shape: Sequence[int]) -> Tensor:
        """f32 uniform values."""
        return torch.rand(tuple(shape), generator=self.generator) * (high - low) + low


class Draw(Source):
    """The generator of one case's values.

    Args:
        case: what is drawn.
        geometry: its dimensions.
        salt: another salt gives other values; `fixed` does not depend on it.
    """

    def __init__(self, case: Case, geometry: Geometry, salt: str = "") -> None:
        super().__init__("values", case.id, case.seed, salt)
        self.case = case
        self.geometry = geometry
        self.fixed = Source("fixed", case.id, case.seed)
        """Decides sizes and attributes: what stays when a bound call is replayed with changed contents."""

    @property
    def kind(self) -> str:
        """Input class of the case."""
        return self.case.kind

    def activation(self, shape: Sequence[int], scale: float = 1.0) -> Tensor:
        """bf16 activations of the case's input class; classes that an op defines itself draw gaussian ones here."""
        return self.values(shape, scale).to(torch.bfloat16)

    def values(self, shape: Sequence[int], scale: float = 1.0) -> Tensor:
        """f32 values of the case's input class; rows are the last dimension."""
        shape = tuple(shape)
        normal = self.normal(shape, scale)
        if self.kind == "wide":
            return normal * torch.exp2(self.uniform(-8.0, 8.0, shape))
        if self.kind == "equal":
            return torch.full(shape, float(self.uniform(0.25, 1.0, ())) * scale)
        if self.kind == "spikes":
            return torch.where(self.chance(0.02, shape), normal * 16.0, 0.0)
        if self.kind == "tail":
            keep = max(1, shape[-1] // 50)
            normal[..., : shape[-1] - keep] = 0.0
        return normal

    def weight(self, rows: int, columns: int, *leading: int) -> Tensor:
        """bf16 weight matrix [*leading, rows, columns] with unit gain."""
        return self.normal((*leading, rows, columns), columns**-0.5).to(torch.bfloat16)

    def norm_weight(self, width: int) -> Tensor:
        """bf16 norm weight near one, [width]."""
        return (1.0 + self.normal((width,), 0.1)).to(torch.bfloat16)
