"""A kit in a repository of its own, and a machine without a GPU to run it on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fake_card
import fake_half_card
import torch

from harness.settings import Settings, Target, Tier
from k3_backend.aot.cuda.descriptor import DESCRIPTOR_NAME, Descriptor, LaunchSpec, VariantSpec
from k3_backend.aot.manifest import Artifact, file_digest
from verify.evaluator.failures import WorkerError
from verify.evaluator.memory import SharedBuffer
from verify.kit.build import Arm, describe, kit_files, make_kit
from verify.kit.machine import Machine
from verify.kit.manifest import KitManifest, Unit
from verify.protocol import chain
from verify.protocol.floors import Ceilings
from verify.workers import card_methods, half_methods
from verify.workers.main import Session

ROOT = Path(__file__).resolve().parents[3]
ARCH = "sm_90a"
BOOTSTRAP = (
    f"import sys; sys.path[:0] = [sys.argv[1], {str(Path(__file__).parent)!r}]; import fake_card; "
    "import fake_chain, fake_half_card; fake_card.install(); fake_chain.install(); fake_half_card.install(); "
    "from verify.workers.main import main; main()"
)


class FakeMachine(Machine):
    """Workers run the fake card, the evaluator computes on the host."""

    bootstrap = BOOTSTRAP

    def evaluator(self) -> Any:
        return torch.device("cpu")

    def require(self, compute_capability: tuple[int, int], packages: Mapping[str, str] | None = None) -> None:
        del packages
        assert compute_capability == (9, 0)

    def ceilings(self) -> Ceilings:
        table = ((24 << 20, 1e6), (1 << 30, 1e6))
        return Ceilings(
            threads=1, read=table, write=table, copy=table, fma_gflops=1e9, bf16_gflops=1e9, bf16_unit="none"
        )

    def standard_path(self) -> dict[str, str]:
        return {"torch": torch.__version__, "kda_decode": "torch"}

    def describe(self) -> dict[str, Any]:
        return {"gpu": {"name": "fake", "uuid_sha256": "0" * 64}, "gpu_missing": {}, "cuda": None}

    def state(self) -> dict[str, Any]:
        return {"sm_clock_mhz": None, "missing": {"sm_clock_mhz": "no GPU"}}


class PeerMachine(FakeMachine):
    """A fake machine whose workers have made-up peers, too."""

    bootstrap = (
        f"import sys; sys.path[:0] = [sys.argv[1], {str(Path(__file__).parent)!r}, {str(ROOT)!r}]; import fake_card; "
        "import fake_chain, fake_peers; fake_card.install(); fake_chain.install(); fake_peers.install(); "
        "from verify.workers.main import main; main()"
    )


def fake_artifact(
    folder: Path, op: str, geometry: str, image: bytes = b"machine code", entry: str = "kernel"
) -> Artifact:
    """An artifact whose image nothing can run: the fake card does not read it."""
    folder.mkdir(parents=True)
    name = f"{hashlib.sha256(image).hexdigest()}.cubin"
    (folder / name).write_bytes(image)
    (folder / name).with_suffix(".ptx").write_text("// text for readers\n")
    launch = LaunchSpec(
        name="only", image=name, entry=entry, parameters=(), grid=("1", "1", "1"), block=32, cluster=1, shared=0,
        min_ctas_per_sm=1, pdl=True, expects=(), polling=None, registers=32, static_shared=0,
    )  # fmt: skip
    variant = VariantSpec(choices={}, launches=(launch,), workspaces=(), requires=())
    descriptor = Descriptor(op=op, arch=ARCH, geometry=geometry, tunables=(), specialised=(), variants=(variant,))
    (folder / DESCRIPTOR_NAME).write_text(descriptor.to_text())
    (folder / "cute.toml").write_text("# no tunables\n")
    artifact = Artifact(
        op=op, arch=ARCH, geometry=geometry, device="cuda", abi=1, toolchain={"tool": "1"}, inputs_digest="0" * 64,
        files={file.name: file_digest(file) for file in sorted(folder.iterdir())}, path=folder,
    )  # fmt: skip
    artifact.write()
    return artifact


def fake_arm(
    folder: Path, units: Mapping[str, str], max_rows: int = 512, images: Mapping[str, bytes] | None = None,
    ends: Mapping[str, int] | None = None,
) -> Arm:  # fmt: skip
    """An arm of fake artifacts.

    Args:
        folder: where to put it.
        units: op to geometry.
        max_rows: where its schedules end.
        images: op to the content of its image.
        ends: op to where its schedule ends, where that is elsewhere.
    """
    artifacts = {}
    for op, geometry in units.items():
        artifacts[Unit(geometry, op, ARCH)] = fake_artifact(
            folder / "artifacts" / geometry / op, op, geometry, (images or {}).get(op, b"machine code"),
            f"kernel_{op}",
        )  # fmt: skip
        schedule = folder / "schedules" / "h200" / geometry / f"{op}.toml"
        schedule.parent.mkdir(parents=True, exist_ok=True)
        schedule.write_text(f"version = 1\n\n[[bucket]]\nmax_rows = {(ends or {}).get(op, max_rows)}\n")
    return Arm(artifacts, folder / "schedules")


def small(settings: Settings, **changes: Any) -> tuple[Target, Tier]:
    """Target and tier with few cases."""
    batches = changes.pop("tier_batches", (1, 2))
    target = settings.target("h200").model_copy(update={"batches": (1, 2), "drafts": (0, 1), **changes})
    return target, settings.tier("smoke").model_copy(update={"batches": batches})


def write_fake_kit(
    out: Path, arm: Arm, settings: Settings, *, gates: tuple[str, ...] = ("kernels",), best: Arm | None = None,
    plans: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any,
) -> KitManifest:  # fmt: skip
    """A kit folder of this checkout's sources."""
    arms = {"candidate": arm} if best is None else {"candidate": arm, "best": best}
    target, tier = small(settings, **changes)
    plans = dict(plans or {})
    if "path" in gates:
        plans.setdefault("path", {"geometries": sorted({unit.geometry for unit in arm.artifacts})})
    described = describe(
        target, tier, base="b" * 40, head="c" * 40, trees={"base": "d" * 40, "head": "e" * 40}, gates=gates,
        arms=arms, mutants={}, command="fasttrack verify --candidate c", plans=plans,
    )  # fmt: skip
    files = kit_files(ROOT, arms)
    listed = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in sorted(files.items())
    }
    manifest = KitManifest(**{**vars(described), "files": listed})
    make_kit(out, manifest, files)
    return manifest


def lines_of(results: Path, gate: str = "kernels") -> list[dict[str, Any]]:
    """Raw lines of a folder of results."""
    return [json.loads(line) for line in (results / "raw" / f"{gate}.jsonl").read_text().splitlines()]


def sealed(folder: Path, lines: list[dict[str, Any]], gate: str = "kernels") -> list[dict[str, Any]]:
    """The lines with a chain that holds, as the owner of the machine could make it."""
    header = json.loads((folder / "run.json").read_text())
    value, done = chain.start(header["kit"], header["nonce"], gate), []
    for line in lines:
        done.append(chain.seal(value, {key: item for key, item in line.items() if key != chain.KEY}))
        value = done[-1][chain.KEY]
    return done


class LocalWorker:
    """A worker inside this process, for tests of what is measured and decided rather than of processes."""

    def __init__(self, artifacts: Mapping[str, Path], schedules: Path, buffer_bytes: int, fault: str) -> None:
        self.buffer = SharedBuffer(buffer_bytes)
        self.session = Session("card", dict(artifacts), schedules, 1, self.buffer.bytes)
        half_methods.install(self.session, fake_half_card.FakeHalfCard(fault))
        card_methods.install(self.session, fake_card.FakeCard())

    def call(self, method: str, *, timeout_s: float, **params: Any) -> dict[str, Any]:  # noqa: ARG002 - as `Client` has it
        methods = {**half_methods.METHODS, **card_methods.METHODS}
        try:
            answer = methods[method](self.session, **json.loads(json.dumps(params)))
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}", method=method) from error
        found: dict[str, Any] = json.loads(json.dumps(answer))
        return found


@contextlib.contextmanager
def local_arm(
    name: str, artifacts: Mapping[str, Path], schedules: Path, *, buffer_bytes: int, **rest: Any
) -> Iterator[LocalWorker]:
    """`child.started_arm` without a process; the fault is the environment's."""
    del name, rest
    worker = LocalWorker(artifacts, schedules, buffer_bytes, os.environ.get(fake_half_card.FAULT, ""))
    yield worker
    worker.buffer.close()
