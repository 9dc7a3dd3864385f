"""Test-wide policy: one thread per process unless a test measures speed; a stated reason for each skipped GPU test."""

from __future__ import annotations

import os
import shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is None:
        skip = pytest.mark.skip(reason="no NVIDIA driver on this machine (nvidia-smi not found)")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
