"""Stand-alone files: cubin, PTX, listing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.verify.gates.audit_cuda.conftest import CASES, Built
from verify.gates.audit.cuda import inspect_file
from verify.gates.audit.cuda.nvdisasm import find
from verify.protocol.audit_cuda import judge_kernel

_VISIBLE_IN_PTX = {
    "audit.load_above_wait", "audit.store_above_wait", "audit.prefetch_above_wait", "audit.wait_by_other_warp",
    "audit.cache_hint", "audit.clock", "audit.sleep", "audit.debug", "audit.address_unknown",
    "audit.load_after_relaxed_poll", "audit.relaxed_poll",
}  # fmt: skip


def _by_name(found: list[dict[str, object]], name: str) -> dict[str, object]:
    return next(f for f in found if str(f["kernel"]).startswith(f"kernel_cutlass_{name}_ptr"))


def _codes(facts: dict[str, object]) -> set[str]:
    return {f.code for f in judge_kernel(facts, "k", "n")}


def test_cubin_without_descriptor(built: Built) -> None:
    """Pointers count as activations, except those that the user names as constant."""
    for name, constants in (("weights_above_wait", ()), ("weights_above_wait", (2,))):
        codes = _codes(_by_name(built.file_facts("kernels.cubin", constants), name))
        assert codes == (set() if constants else {"audit.load_above_wait"})


_NEEDS_ROLES = {"mailbox_above_wait"}


@pytest.mark.parametrize(
    "name",
    [n for n, (_, code) in CASES.items() if (code in _VISIBLE_IN_PTX or code is None) and n not in _NEEDS_ROLES],
)
def test_ptx(built: Built, name: str) -> None:
    """The same rules on PTX, which never passes alone: it is not what runs."""
    code = CASES[name][1]
    codes = _codes(_by_name(built.file_facts("kernels.ptx", (2,)), name))
    assert "audit.not_evaluated" in codes
    if code is not None:
        assert code in codes
    else:
        # Without roles and claims, a kernel that polls is judged more strictly.
        assert codes <= {"audit.not_evaluated", "audit.load_after_relaxed_poll"} | (
            {"audit.relaxed_poll"} if "poll" in name else set()
        )


@pytest.mark.parametrize("options", [["-c"], ["-c", "-g"], ["-c", "-hex"], []])
def test_listing(built: Built, tmp_path: Path, options: list[str]) -> None:
    """nvdisasm's text in its usual forms gives the same accesses as the cubin."""
    tool = find()
    assert tool is not None
    cubin = tmp_path / "k.cubin"
    cubin.write_bytes(built.cubin("load_above_wait"))
    text = subprocess.run([str(tool), *options, str(cubin)], capture_output=True, check=True, timeout=120).stdout
    path = tmp_path / "k.sass"
    path.write_bytes(text)
    found = inspect_file(path, constants=(2,))
    for name in ("load_above_wait", "hidden_load_above_wait", "division"):
        listed, whole = _by_name(found, name), built.facts(name)
        assert len(listed["accesses"]) == len(whole["accesses"])  # type: ignore[arg-type]
        codes = _codes(listed)
        assert "audit.not_evaluated" in codes
        assert ("audit.load_above_wait" in codes) == (CASES[name][1] == "audit.load_above_wait")
