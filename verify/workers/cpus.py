"""Where a worker's driver thread runs while kernels are timed."""

from __future__ import annotations

import os

__all__ = ["settle", "unsettle"]

_CPUS = os.sched_getaffinity(0)


def settle() -> None:
    """Keep this thread on one CPU from now on, as an engine's driver thread is.

    Left free, it wakes on another CPU after most requests; caller and helper then change places, and each finds the
    other's share of the weights in its cache. Call it when all threads exist, since they inherit the restriction.
    """
    os.sched_setaffinity(0, {min(_CPUS)})


def unsettle() -> None:
    """Let this thread use all CPUs again, before it makes others."""
    os.sched_setaffinity(0, _CPUS)
