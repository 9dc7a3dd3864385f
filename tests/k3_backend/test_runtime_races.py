"""The launcher under ThreadSanitizer: the memory orders that its comments argue for, shown to be there and needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from k3_backend.aot.compile import ABI_DIR, FfiPaths

pytestmark = pytest.mark.slow

WEAKENED = {
    "join": ("box.done.store(seen, std::memory_order_release)", "box.done.store(seen, std::memory_order_relaxed)"),
    "dispatch": ("box.go.load(std::memory_order_acquire)", "box.go.load(std::memory_order_relaxed)"),
    "barrier": (
        "generation.store(generation + 1, std::memory_order_release)",
        "generation.store(generation + 1, std::memory_order_relaxed)",
    ),
    "arrival": ("arrived.fetch_add(1, std::memory_order_acq_rel)", "arrived.fetch_add(1, std::memory_order_relaxed)"),
}


def _run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "runtime.cc").write_text(source)
    shutil.copy(ABI_DIR / "k3_cpu.h", folder)
    shutil.copy(Path(__file__).parent / "runtime_stress.cc", folder)
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-fsanitize=thread",
        "-pthread",
        f"-I{folder}",
        f"-I{FfiPaths.installed().include}",
    ]
    subprocess.run(["g++", *flags, str(folder / "runtime_stress.cc"), "-o", str(folder / "stress")], check=True)
    # ThreadSanitizer of this compiler generation needs addresses that are not randomised further than it expects.
    command = ["setarch", "-R", str(folder / "stress")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_no_race_and_every_region_counted(tmp_path: Path) -> None:
    """A worker's writes are not ordered by a region, a barrier or a sleep, or a region is lost."""
    done = _run(tmp_path, (ABI_DIR / "runtime.cc").read_text())
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("order", WEAKENED)
def test_each_memory_order_is_needed(tmp_path: Path, order: str) -> None:
    """The stress cannot see a missing order, so its silence would prove nothing."""
    strong, weak = WEAKENED[order]
    source = (ABI_DIR / "runtime.cc").read_text()
    assert source.count(strong) == 1
    done = _run(tmp_path, source.replace(strong, weak))
    assert done.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
