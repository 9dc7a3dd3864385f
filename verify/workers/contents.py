"""Secret contents of caches, states and prompts, from a seed, fast enough to refill gigabytes per block.

Values are random bits with the exponent held in a narrow range: magnitudes within a factor of four, random signs and
mantissas. That is a sane scale for caches and states, costs a few operations per element, and nothing in it repeats.
Which seed is used, and when, is the evaluator's business.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["fill_cache", "fill_state", "generator", "prompts"]

_PROMPTS = Path(__file__).with_name("prompts.txt")


def generator(seed: str, what: str) -> np.random.Generator:
    """An independent stream per seed and purpose."""
    digest = hashlib.sha256(f"{seed}/{what}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


def fill_cache(bits: npt.NDArray[np.uint16], rng: np.random.Generator) -> None:
    """Fill a bf16 tensor (its bits, any shape, contiguous) with values of magnitude in [0.5, 2), about unit RMS."""
    flat = bits.reshape(-1)
    _random_bits(flat.view(np.uint8), rng)
    flat &= np.uint16(0x80FF)
    flat |= np.uint16(0x3F00)


def fill_state(bits: npt.NDArray[np.uint32], rng: np.random.Generator) -> None:
    """Fill an f32 tensor (its bits, any shape, contiguous) with values of magnitude in [1/32, 1/8)."""
    flat = bits.reshape(-1)
    _random_bits(flat.view(np.uint8), rng)
    flat &= np.uint32(0x80FF_FFFF)
    flat |= np.uint32(0x3D00_0000)


def prompts(requests: int, tokens: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Consecutive byte tokens of English text, one secret window per request, i64 [requests, tokens].

    Real text and not uniform noise, because the tokens decide which experts a step reads.
    """
    text = np.frombuffer(_PROMPTS.read_bytes(), dtype=np.uint8).astype(np.int64)
    starts = rng.integers(0, text.size, size=(requests, 1))
    window: npt.NDArray[np.int64] = text[(starts + np.arange(tokens)) % text.size]
    return window


_CHUNK = 1 << 22


def _random_bits(target: npt.NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Random bytes into a contiguous array, in chunks that stay in a cache."""
    for start in range(0, target.size, _CHUNK):
        part = target[start : start + _CHUNK]
        words = rng.integers(0, 1 << 64, size=-(-part.size // 8), dtype=np.uint64, endpoint=False)
        part[:] = words.view(np.uint8)[: part.size]
