"""The CUDA builder on a small tree: real compiler, real cubins, no GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from k3_backend.aot.compile import BuildError, run_local
from k3_backend.aot.cuda.build import build, choices, scheduled, specialised_values
from k3_backend.aot.cuda.cubin import CubinError, read
from k3_backend.aot.cuda.descriptor import Descriptor
from k3_backend.aot.manifest import Artifact, ArtifactError
from k3_backend.aot.schedule import Schedule, ScheduleError, load_declarations
from k3_backend.geometry import geometry
from k3_backend.ops import OPS

SLICE = geometry("k3-slice-tp8")
SOURCE = Path(__file__).parent / "cuda_tree" / "scale.py.txt"
TOML = """
[tunables.threads]
values = [64, 128]
meaning = "threads per block"

[specialised]
N = ["kda_proj_rows", "mla_proj_rows"]
"""
SCHEDULE = """
version = 1

[[bucket]]
N = 6288
max_rows = 8
threads = 64

[[bucket]]
N = 6288
max_rows = 64
threads = 128

[[bucket]]
N = 3648
max_rows = 64
threads = 64
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


def make_tree(root: Path) -> Path:
    op, common = root / "kernels" / "input_projection", root / "kernels" / "common"
    op.mkdir(parents=True)
    common.mkdir()
    shutil.copy(SOURCE, op / "cute.py")
    (op / "cute.toml").write_text(TOML)
    (common / "index.py").write_text(
        "from cutlass import Int32, cute\n\n\n@cute.jit\ndef place(block: Int32, tid: Int32) -> Int32:\n"
        "    width, _, _ = cute.arch.block_dim()\n    return block * width + tid\n"
    )
    (common / "other.py").write_text("raise RuntimeError('nobody imports this')\n")
    for family in ("h200", "gb300"):
        place = root / "schedules" / family / SLICE.name
        place.mkdir(parents=True)
        (place / "input_projection.toml").write_text(SCHEDULE)
    return root


def make(tree: Path, out: Path, arch: str = "sm_90a") -> Artifact:
    return build("input_projection", arch, SLICE, tree / "kernels", tree / "schedules", out)


def test_an_artifact_holds_what_the_schedule_can_ask_for_and_what_the_cubin_says(tree: Path, tmp_path: Path) -> None:
    artifact = make(tree, tmp_path / "out")
    descriptor = Descriptor.read(artifact.path, OPS["input_projection"])
    assert [v.choices for v in descriptor.variants] == [
        {"threads": 64, "N": 6288}, {"threads": 128, "N": 6288}, {"threads": 64, "N": 3648},
    ]  # fmt: skip
    launch = descriptor.variants[0].launches[0]
    assert [(p.name, p.kind, p.role, p.offset) for p in launch.parameters] == [
        ("x", "pointer", "activation", 0), ("out", "pointer", "output", 8), ("spare", "pointer", "workspace", 16),
        ("M", "i32", "scalar", 24), ("extra", "i32", "scalar", 28),
    ]  # fmt: skip
    assert launch.grid == ("ceil_div(M, 64)", "1", "1")
    kernel = read((artifact.path / launch.image).read_bytes()).kernels[launch.entry]
    assert (kernel.registers, kernel.frame_bytes, kernel.shared_bytes) == (launch.registers, 0, launch.static_shared)
    assert artifact.device == "cuda"
    assert artifact.toolchain["nvidia-cutlass-dsl"] == "4.8.1"
    assert scheduled("sm_90a", tree / "kernels", tree / "schedules") == (("input_projection", SLICE.name),)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_two_folders_give_one_digest_and_no_path_in_the_machine_code(tmp_path: Path, arch: str) -> None:
    one = make(make_tree(tmp_path / "a"), tmp_path / "out-a", arch)
    two = make(make_tree(tmp_path / "b" / "deeper"), tmp_path / "out-b", arch)
    assert one.digest == two.digest
    for name in one.files:
        content = (one.path / name).read_bytes()
        assert str(tmp_path).encode() not in content
        assert str(Path(__file__).parents[2]).encode() not in content, name


def test_the_second_build_comes_from_the_cache_until_something_it_reads_changes(tree: Path, tmp_path: Path) -> None:
    runs = []

    def counting(argv: object, cwd: Path) -> object:
        runs.append(cwd)
        return run_local(argv, cwd)  # type: ignore[arg-type]

    def again() -> Artifact:
        return build(
            "input_projection", "sm_90a", SLICE, tree / "kernels", tree / "schedules", tmp_path / "out",
            run=counting,  # type: ignore[arg-type]
        )  # fmt: skip

    first = again()
    (tree / "kernels" / "common" / "other.py").write_text("raise RuntimeError('still nobody')\n")
    assert again().path == first.path
    assert len(runs) == 1
    index = tree / "kernels" / "common" / "index.py"
    index.write_text(index.read_text() + "\n\nUNUSED = 1\n")
    assert again().inputs_digest != first.inputs_digest
    assert len(runs) == 2
    damaged = again()
    image = next(damaged.path.glob("*.cubin"))
    image.write_bytes(image.read_bytes()[:-1])
    assert again().digest == damaged.digest
    assert len(runs) == 3


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        ("x[at].to(Float32)", "x[at].to(Float33)", "kernels/input_projection/cute.py:14", "Float33"),
        (
            "cute.arch.griddepcontrol_wait()", "cute.arch.no_such_thing()", "kernels/input_projection/cute.py:11",
            "no_such_thing",
        ),
        ("if at < m", "if at < m:\n  (", "kernels/input_projection/cute.py", "is not Python"),
        ('"M", Value', '"rows", Value', "", ""),
        ('Workspace("spare", "f32", "M * D")', 'Workspace("spare", "f32", "M.real")', "expression", "Attribute"),
        ("block=c", "shared=400000, block=c", "launch scale", "shared memory"),
    ],
)  # fmt: skip
def test_a_broken_kernel_names_op_choices_arch_and_line(
    tree: Path, tmp_path: Path, old: str, new: str, where: str, what: str
) -> None:
    file = tree / "kernels" / "input_projection" / "cute.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    if not what:  # a size that no call has is found when a call is bound, not here
        make(tree, tmp_path / "out")
        return
    with pytest.raises(BuildError) as error:
        make(tree, tmp_path / "out")
    said = str(error.value)
    assert what in said
    assert where in said
    assert "input_projection for sm_90a" in said
    assert "\x1b" not in said
    if "no_such_thing" in new:
        assert "threads = 64, N = 6288" in said
    assert not list((tmp_path / "out").iterdir())


def test_a_kernel_may_not_reach_files_that_no_import_statement_names(tree: Path, tmp_path: Path) -> None:
    file = tree / "kernels" / "input_projection" / "cute.py"
    file.write_text(file.read_text() + "\n__import__('kernels.common.third')\n")
    (tree / "kernels" / "common" / "third.py").write_text("")
    with pytest.raises(BuildError, match=r"outside the hashed sources.*kernels/common/third\.py"):
        make(tree, tmp_path / "out")


def test_the_schedule_decides_what_is_compiled(tree: Path) -> None:
    declared = load_declarations(tree / "kernels" / "input_projection" / "cute.toml")
    sizes = specialised_values(declared, SLICE)
    assert sizes == {"N": (6288, 3648)}
    path = tree / "schedules" / "h200" / SLICE.name / "input_projection.toml"
    schedule = Schedule.load(
        path, op="input_projection", geometry=SLICE.name, tunables=declared.tunables, specialised=sizes
    )
    assert schedule.lookup(8, {"N": 6288}) == {"threads": 64}
    assert schedule.lookup(9, {"N": 6288}) == {"threads": 128}
    assert schedule.lookup(9, {"N": 3648}) == {"threads": 64}
    assert schedule.lookup(65, {"N": 3648}) is None
    assert len(choices(declared, schedule, SLICE)) == 3
    path.write_text(SCHEDULE.replace("N = 3648", "N = 3649"))
    with pytest.raises(ScheduleError, match=r"input_projection\.toml:15: .*N = 3649.*one of \[6288, 3648\]"):
        Schedule.load(path, op="input_projection", geometry=SLICE.name, tunables=declared.tunables, specialised=sizes)


def test_a_descriptor_that_was_edited_is_refused(tree: Path, tmp_path: Path) -> None:
    artifact = make(tree, tmp_path / "out")
    file = artifact.path / "cuda.json"
    raw = json.loads(file.read_text())
    raw["variants"][0]["launches"][0]["parameters"][0]["role"] = "constant"
    file.write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match="changed after the build"):
        Artifact.read(artifact.path)
    with pytest.raises(ArtifactError, match="parameter x of scale is constant, not activation"):
        Descriptor.read(artifact.path, OPS["input_projection"])


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF" + bytes(200), b"not an object" * 100])
def test_what_is_no_cubin_is_refused(content: bytes) -> None:
    with pytest.raises(CubinError):
        read(content)
