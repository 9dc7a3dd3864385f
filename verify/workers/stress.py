"""A launch pool whose workers start late: parallel regions and barriers with random delays.

A kernel is right only if it is right for every order in which its workers arrive. On an idle machine they always arrive
together, so a missing barrier never shows. The delays sit in the launch context's two functions, between launcher and
kernel; kernels cannot tell them from a busy machine.
"""

from __future__ import annotations

import ctypes
import random
import time

from k3_backend.aot.build import ABI_VERSION
from k3_backend.aot.cpu.launch import Pool

__all__ = ["LONG_DELAY_S", "SHORT_DELAY_S", "Jitter"]

SHORT_DELAY_S = 0.0002
"""Largest delay of most arrivals."""
LONG_DELAY_S = 0.002
"""Delay of one arrival in four: longer than any region of a small model."""

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
_Parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
_Barrier = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


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


class Jitter:
    """Delays in every parallel region and barrier of one pool, from construction on. Keep it as long as the pool.

    Args:
        pool: a pool of its own; its context is changed.
        seed: of the delays.
    """

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool = pool
        self.regions = 0
        """Parallel regions seen so far."""
        self._random = random.Random(seed)  # noqa: S311 - delays, not secrets
        context = _Context.from_address(pool.context)
        if context.abi_version != ABI_VERSION:
            raise ValueError(f"launch context has ABI {context.abi_version}; expected {ABI_VERSION}")
        plain_parallel, plain_barrier = _Parallel(context.parallel), _Barrier(context.barrier)

        def parallel(ctx: int, workers: int, body: int, closure: int | None) -> None:
            self.regions += 1
            plain_body = _Body(body)

            def late(_: int, worker: int, count: int) -> None:
                time.sleep(self._delay())
                plain_body(closure, worker, count)

            plain_parallel(ctx, workers, ctypes.cast(_Body(late), ctypes.c_void_p), None)

        def barrier(ctx: int) -> None:
            time.sleep(self._delay())
            plain_barrier(ctx)

        self._parallel, self._barrier = _Parallel(parallel), _Barrier(barrier)
        context.parallel = ctypes.cast(self._parallel, ctypes.c_void_p)
        context.barrier = ctypes.cast(self._barrier, ctypes.c_void_p)

    def _delay(self) -> float:
        return LONG_DELAY_S if self._random.random() < 0.25 else self._random.random() * SHORT_DELAY_S
