"""What travels in a kit, that its bytes are decided by its inputs, and that a changed kit is refused before it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from kit_fixtures import ROOT, fake_arm, write_fake_kit

from harness import settings
from harness.errors import FasttrackError
from k3_backend.aot.cuda.arch import ARCHS
from verify.kit import entry
from verify.kit.build import MAX_BYTES, make_kit
from verify.kit.manifest import KitManifest, Unit, read_kit, read_manifest
from verify.kit.sources import OUTSIDE, closure

SETTINGS = settings.load(ROOT)
BLOCKED = ("pydantic", "typer", "rich", "elftools", "tvm_ffi", "filelock", "safetensors", "pyarrow", "jinja2", "duckdb")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    write_fake_kit(folder / "K", fake_arm(folder / "arm", {"kda_decode": "k3-pico"}), SETTINGS)
    return folder / "K"


def copy_of(kit: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-r", kit, folder / "K"], check=True)
    return folder / "K"


def run_entry(kit: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(kit / "kit.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd="/")


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, kit: Path) -> None:
    """A kit whose digest depends on the time, the machine's user or the order of files."""
    again = write_fake_kit(tmp_path / "K", fake_arm(tmp_path / "arm", {"kda_decode": "k3-pico"}), SETTINGS)
    assert again.digest == read_kit(kit).digest
    files = {name: (kit / name).read_bytes() for name in again.files}
    for name in ("a", "b"):
        run = make_kit(tmp_path / f"{name}.tar.gz", again, files)
        assert run == f"tar xzf {name}.tar.gz && python3 kit-{again.digest[:12]}/kit.py run --out R"
        os.utime(kit / "kit.py")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        assert {member.mtime for member in tar} == {0}
        assert f"kit-{again.digest[:12]}/kit.py" in tar.getnames()


def test_nothing_travels_that_should_not(kit: Path) -> None:
    """A candidate's Python, a text for readers, a compiled cache, or a binary of the toolkit in the kit."""
    manifest = read_kit(kit)
    assert sum(file["size"] for file in manifest.files.values()) < MAX_BYTES
    assert {Path(name).suffix for name in manifest.files} <= {".py", ".json", ".toml", ".cubin"}
    assert not [name for name in manifest.files if name.startswith(("code/k3_backend/kernels", "code/tests"))]
    assert {name.split("/")[0] for name in manifest.files} == {"arms", "code", "kit.py"}
    found = {path.relative_to(kit).as_posix() for path in kit.rglob("*") if path.is_file()}
    assert found == {*manifest.files, "manifest.json"}


def test_the_sources_import_nothing_that_the_gpu_machine_lacks(tmp_path: Path) -> None:
    """A kit that fails where it runs for want of a package that is only here."""
    names = closure(ROOT, frozenset(sys.stdlib_module_names))
    assert {"harness/durable.py", "verify/kit/run.py", "k3_backend/aot/cuda/launch.py"} <= set(names)
    assert not [name for name in names if name.startswith(("fasttrack", "agents", "reports", "verify/gates"))]
    broken = tmp_path / "verify" / "kit"
    broken.mkdir(parents=True)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (broken / "machine.py").write_text("def f():\n    import pydantic\n")
    with pytest.raises(FasttrackError, match="imports pydantic"):
        closure(tmp_path, frozenset(sys.stdlib_module_names))
    assert "pydantic" not in OUTSIDE


def test_the_code_runs_without_this_applications_packages(kit: Path) -> None:
    """An import that reading the sources does not show: the kit's modules, with everything else blocked."""
    program = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
sys.path.insert(0, {str(kit / "code")!r})
import verify.kit.run, verify.workers.card_methods, verify.evaluator.inputs
from k3_backend.ops import OPS
from k3_backend.ops.registry import reference, standard
for op in OPS:
    reference(op), standard(op)
assert verify.kit.run.__file__.startswith({str(kit)!r})
assert not [name for name in sys.modules if name.split(".")[0] in {("fasttrack", "agents", "reports")!r}]
"""
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-B", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr


def _flip(kit: Path) -> None:
    path = next(iter(sorted(kit.glob("arms/**/*.cubin"))))
    path.write_bytes(b"N" + path.read_bytes()[1:])


def _drop(kit: Path) -> None:
    (kit / "code" / "verify" / "kit" / "run.py").unlink()


def _add(kit: Path) -> None:
    (kit / "code" / "torch.py").write_text("print('mine')\n")


def _link(kit: Path) -> None:
    path = kit / "code" / "verify" / "kit" / "store.py"
    copy = kit.parent / "store.py"
    copy.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(copy)


def _edit(kit: Path) -> None:
    manifest = json.loads((kit / "manifest.json").read_text())
    manifest["batches"] = [1]
    (kit / "manifest.json").write_text(json.dumps(manifest))


def _deep(kit: Path) -> None:
    (kit / "manifest.json").write_text("[" * 100_000)


@pytest.mark.parametrize("change", [_flip, _drop, _add, _link, _edit, _deep], ids=lambda change: change.__name__[1:])
def test_a_changed_kit_is_refused_before_anything_of_it_is_imported(
    kit: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Results of a kit that is not the one that was built."""
    copy = copy_of(kit, tmp_path)
    change(copy)
    done = run_entry(copy, "run", "--out", str(tmp_path / "R"))
    assert done.returncode == entry.USAGE
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["what", "where", "expected", "next"]
    assert not (tmp_path / "R").exists()


def test_an_intact_kit_checks_and_says_what_this_machine_lacks(kit: Path, tmp_path: Path) -> None:
    """A traceback on a machine without a GPU, or results from one."""
    assert run_entry(kit, "check").returncode == 0
    done = run_entry(kit, "run", "--out", str(tmp_path / "R"))
    assert (done.returncode, "Traceback" in done.stderr) == (entry.USAGE, False)
    assert "GPU" in done.stderr
    assert not (tmp_path / "R").exists()
    for arguments in ((), ("run",), ("run", "--out", "R", "--gates", "perf"), ("walk",)):
        assert run_entry(kit, *arguments).returncode == entry.USAGE


def test_both_readers_of_the_manifest_agree(kit: Path) -> None:
    """The entry script and the rest of the kit name the same kit differently."""
    assert entry.check(kit)["digest"] == read_kit(kit).digest
    assert read_kit(kit).compute_capability == ARCHS["sm_90a"].compute_capability
    assert read_kit(kit).units("candidate") == (Unit("k3-pico", "kda_decode", "sm_90a"),)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "a/../b", "a\\b", "ä"])
def test_names_that_leave_the_kit_are_refused(kit: Path, name: str) -> None:
    """A manifest whose file names reach other folders."""
    content = {**vars(read_kit(kit)), "files": {name: {"sha256": "0" * 64, "size": 1}}}
    with pytest.raises(FasttrackError, match="file name"):
        read_manifest(KitManifest(**content).document(), "manifest.json")


def test_an_existing_path_is_not_overwritten(kit: Path) -> None:
    """A kit that replaces what lies at its place."""
    with pytest.raises(FasttrackError, match="exists already"):
        make_kit(kit, read_kit(kit), {})
