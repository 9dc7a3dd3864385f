"""Runs NVIDIA's disassembler on a cubin, inside the sandbox: the file may come from an untrusted author."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import sandbox
from harness.errors import FasttrackError

__all__ = ["Disassembly", "disassemble", "find"]

_TIMEOUT_S = 120
_SIGNAL = 128
"""A status from here on means that a signal ended the program."""
_OUTPUT_BYTES = 128 << 20


@dataclass(frozen=True)
class Disassembly:
    """The listing, or why there is none."""

    text: str
    missing: str | None
    """The machine cannot disassemble: no tool or no sandbox."""
    failed: str | None
    """The tool refused the file."""


def find() -> Path | None:
    """The `nvdisasm` of the installed package nvidia-cuda-nvdisasm, else one on the path."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    for place in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for tool in sorted(Path(place).glob("*/bin/nvdisasm")):
            if os.access(tool, os.X_OK):
                return tool
    found = shutil.which("nvdisasm")
    return Path(found) if found else None


def disassemble(cubin: bytes) -> Disassembly:
    """Text of `nvdisasm -c -g`: code with source lines where the file has them."""
    tool = find()
    if tool is None:
        return Disassembly("", "nvdisasm not found; pip install nvidia-cuda-nvdisasm", None)
    reason = sandbox.unavailable()
    if reason is not None:
        return Disassembly("", f"no sandbox for nvdisasm: {reason.message}; {reason.next}", None)
    with tempfile.TemporaryDirectory(prefix="fasttrack-audit-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "kernel.cubin"
        path.write_bytes(cubin)
        path.chmod(0o644)
        try:
            done = _run(tool, path)
            if _machines_fault(done):
                done = _run(tool, path)
        except FasttrackError as error:
            return Disassembly("", f"nvdisasm cannot be started: {error}", None)
    why = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"status {done.returncode}"])[-1][:200]
    if _machines_fault(done):
        return Disassembly("", f"nvdisasm did not run to its end (status {done.returncode}: {why})", None)
    if done.returncode:
        return Disassembly("", None, f"nvdisasm: {why}")
    if len(done.stdout) >= _OUTPUT_BYTES:
        return Disassembly("", None, f"nvdisasm printed more than {_OUTPUT_BYTES >> 20} MiB")
    return Disassembly(done.stdout.decode("utf-8", "replace"), None, None)


def _run(tool: Path, path: Path) -> sandbox.Finished:
    argv = [str(tool), "-c", "-g", str(path)]
    return sandbox.run(argv, ro=[tool, path], timeout_s=_TIMEOUT_S, output_bytes=_OUTPUT_BYTES)


def _machines_fault(done: sandbox.Finished) -> bool:
    """Killed, too slow, or failed without a word of its own: says nothing about the file."""
    return done.timed_out or done.returncode >= _SIGNAL or (done.returncode != 0 and b"nvdisasm" not in done.stderr)
