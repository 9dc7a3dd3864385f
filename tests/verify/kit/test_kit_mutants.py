"""The planted faults that kits carry: they fit these kernels, and every plan holds cases that show them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from harness.settings import load
from k3_backend.aot.cuda.build import build, specialised_values
from k3_backend.aot.schedule import Schedule, load_declarations
from k3_backend.geometry import geometry
from tests.hostile.mutants.cuda.make import CHECKOUT, EVERY_ROW, FOLDER, KERNELS, Mutant, MutantError, mutants
from verify.evaluator.inputs import kinds
from verify.evaluator.plan import draw_plan

MUTANTS = mutants()
SLICE = geometry("k3-slice-tp8")
SCHEDULES = CHECKOUT / "k3_backend" / "schedules"
NAMES = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


def test_every_row_has_its_patch_and_every_patch_its_row() -> None:
    assert {mutant.name for mutant in MUTANTS} == {file.stem for file in FOLDER.glob("*.patch")}


@NAMES
def test_the_patch_is_the_one_for_these_kernels_and_applies(mutant: Mutant) -> None:
    patch = FOLDER / f"{mutant.name}.patch"
    assert patch.read_text() == mutant.patch(CHECKOUT), f"next: python {FOLDER.relative_to(CHECKOUT)}/make.py"
    done = subprocess.run(["git", "apply", "--check", patch], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(mutant.kinds) <= set(kinds(mutant.op))


def test_a_line_that_is_gone_is_named() -> None:
    gone = Mutant("gone", "kda_decode", "", "", (), 1, EVERY_ROW, (("no such line", ""),))
    with pytest.raises(MutantError, match=r"gone: 'no such line' stands 0 times in k3_backend/kernels/kda_decode"):
        gone.edits(CHECKOUT)


@pytest.mark.parametrize("tier", ["smoke", "pr"])
@NAMES
def test_every_plan_holds_a_case_that_shows_it(mutant: Mutant, tier: str) -> None:
    settings = load(CHECKOUT / "harness.toml")
    target, drawn = settings.target("h200"), settings.tier(tier)
    tokens = tuple(1 + drafts for drafts in target.drafts)
    for _ in range(20):  # plans are secret and random: none may miss the fault
        plan = draw_plan(
            [mutant.op], geometry=SLICE.name, batches=target.batches_of(drawn), tokens=tokens, draws=drawn.kernel_cases,
            edges={mutant.op: ()}, threads=(1,),
        )  # fmt: skip
        assert any(
            (not mutant.kinds or planned.case.kind in mutant.kinds)
            and planned.case.tokens >= mutant.tokens
            and mutant.rows[0] <= planned.case.rows <= mutant.rows[1]
            for planned in plan
        )


@pytest.mark.slow
@NAMES
def test_it_compiles_and_changes_the_machine_code(mutant: Mutant, tmp_path: Path) -> None:
    declared = load_declarations(CHECKOUT / KERNELS / mutant.op / "cute.toml")
    specialised = specialised_values(declared, SLICE)
    plain = {"tokens": mutant.tokens, "T": mutant.tokens, "cache_format": 0}
    values = {name: plain.get(name, min(found)) for name, found in specialised.items()}
    schedule = Schedule.load(
        SCHEDULES / "h200" / SLICE.name / f"{mutant.op}.toml", op=mutant.op, geometry=SLICE.name,
        tunables=declared.tunables, specialised=specialised,
    )  # fmt: skip
    chosen = schedule.lookup(min(64, mutant.rows[1]), values)
    assert chosen is not None
    only = [{"tunables": dict(chosen), "specialised": values}]
    images = []
    for planted in (False, True):
        tree = tmp_path / str(planted)
        shutil.copytree(CHECKOUT / KERNELS, tree / "kernels")
        for path, (_, text) in mutant.edits(CHECKOUT).items() if planted else ():
            (tree / Path(path).relative_to("k3_backend")).write_text(text)
        artifact = build(mutant.op, "sm_90a", SLICE, tree / "kernels", SCHEDULES, tmp_path / "out", only=only)
        images.append({file.name for file in artifact.path.glob("*.cubin")})
    assert images[0] - images[1]
