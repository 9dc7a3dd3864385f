"""The launcher: what reaches a kernel, what is refused before it runs, and how errors come back."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from spy_kernels import ARCH, HELPERS, PICO, runtime, spy_source, write_kernel, write_schedule

from k3_backend.aot.build import build, build_runtime
from k3_backend.aot.cpu.host import ARCHS, best_arch, runnable_archs
from k3_backend.aot.cpu.launch import BindError, KernelSet, LaunchError, LaunchList, LoadedOp, Pool, Runtime, _Context
from k3_backend.aot.manifest import Artifact, ArtifactError, file_digest
from k3_backend.aot.schedule import ScheduleError
from k3_backend.errors import BackendError
from k3_backend.geometry import geometry

OP = "moe_front"  # five kinds of argument: bf16 and f32 inputs, i32, f32 and bf16 outputs, an int and a float attribute

# Writes into `latent` what the kernel saw: worker ids, tunables and attributes.
SEES = (
    HELPERS
    + """
K3_EXPORT(moe_front) {
  k3::Args a(args, num_args, result);
  const K3Context* ctx = a.context();
  int64_t shape[2];
  a.tensor<uint16_t>(2, shape);
  a.tensor<uint16_t>(2);
  a.tensor<float>(1);
  a.tensor<uint16_t>(2);
  int32_t* ids = a.tensor<int32_t>(2);
  float* weights = a.tensor<float>(2);
  a.tensor<uint16_t>(2);
  const float scale = a.real();
  const int64_t top_k = a.integer();
  const int64_t workers = a.integer();
  const int64_t mode = a.integer();
  if (int rc = a.finish()) return rc;
  if (mode == 1) return -1;
  if (mode == 2) { TVMFFIErrorSetRaisedFromCStr("RuntimeError", "deliberate"); return -1; }
  for (int64_t i = 0; i < shape[0] * top_k; ++i) { ids[i] = -1; weights[i] = 0; }
  if (mode == 4) {  // every worker counts, meets the others, then checks the total; 200 rounds
    alignas(64) static thread_local int unused; (void)unused;
    int64_t* counts = static_cast<int64_t*>(ctx->scratch);
    for (int i = 0; i < 256 * 8; ++i) counts[i] = 0;
    int64_t* bad = counts + 256 * 8;
    *bad = 0;
    k3::parallel(ctx, int32_t(workers), [&](int32_t me, int32_t n) {
      for (int64_t round = 1; round <= 200; ++round) {
        counts[me * 8] = round;
        ctx->barrier(ctx);
        for (int32_t w = 0; w < n; ++w)
          if (counts[w * 8] != round) __atomic_fetch_add(bad, 1, __ATOMIC_RELAXED);
        ctx->barrier(ctx);
      }
    });
    weights[0] = float(*bad);
    return 0;
  }
  k3::parallel(ctx, int32_t(workers), [&](int32_t me, int32_t n) {
    ids[me] = n;
    weights[me] = scale;
  });
  return 0;
}
"""
)
TUNABLES = """
[tunables.workers]
values = [1, 2, 3, 99]
meaning = "workers of the region"
[tunables.mode]
values = [0, 1, 2, 4]
meaning = "what the test wants to see"
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    root = tmp_path_factory.mktemp("kernel")
    write_kernel(root / "kernels", OP, SEES, TUNABLES)
    return build(OP, ARCH, PICO, root / "kernels", root / "cache")


@pytest.fixture(scope="module")
def pool(built: Artifact) -> Pool:
    return runtime(built.path.parent).pool(3)


@pytest.fixture(scope="module")
def kernel(built: Artifact) -> LoadedOp:
    return LoadedOp(built, PICO)


def _tensors(rows: int = 4) -> dict[str, torch.Tensor | None]:
    g = PICO
    return {
        "x": torch.zeros(rows, g.hidden, dtype=torch.bfloat16),
        "w_gate": torch.zeros(g.experts, g.hidden, dtype=torch.bfloat16),
        "bias": torch.zeros(g.experts),
        "w_down": torch.zeros(g.latent, g.hidden, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(rows, g.top_k, dtype=torch.int32),
        "topk_weights": torch.zeros(rows, g.top_k),
        "latent": torch.zeros(rows, g.latent, dtype=torch.bfloat16),
    }


ATTRS = {"top_k": 4, "scale": 2}


@pytest.mark.parametrize(("asked", "ran"), [(1, 1), (2, 2), (3, 3), (99, 3)])
def test_parallel_runs_every_worker_once(kernel: LoadedOp, pool: Pool, asked: int, ran: int) -> None:
    """A worker is lost, runs twice, or more workers than the pool has are promised."""
    tensors = _tensors()
    for _ in range(200):
        kernel(pool, tensors, ATTRS, rows=4, tunables={"workers": asked, "mode": 0})
        ids, weights = tensors["topk_ids"], tensors["topk_weights"]
        assert ids is not None
        assert weights is not None
        assert ids.flatten().tolist() == [ran] * ran + [-1] * (16 - ran)
        assert weights.flatten().tolist() == [2.0] * ran + [0.0] * (16 - ran)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_barrier_orders_memory(kernel: LoadedOp, pool: Pool, workers: int) -> None:
    """A worker passes a barrier too early, or a lone one waits for workers of an earlier region."""
    tensors = _tensors()
    kernel(pool, tensors, ATTRS, rows=4, tunables={"workers": 3, "mode": 0})
    kernel(pool, tensors, ATTRS, rows=4, tunables={"workers": workers, "mode": 4})
    weights = tensors["topk_weights"]
    assert weights is not None
    assert weights.flatten()[0] == 0


def test_helpers_sleep_between_replays(kernel: LoadedOp, built: Artifact) -> None:
    """Idle helpers burn a core, or never wake up again."""
    pool = runtime(built.path.parent).pool(3, idle_spin_us=50)
    tensors = _tensors()

    def helpers_cpu_s() -> float:
        ticks = 0
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) not in before:
                ticks += sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    before = {int(t.name) for t in Path("/proc/self/task").iterdir()}
    second = runtime(built.path.parent).pool(3, idle_spin_us=50)
    for each in (pool, second):
        kernel(each, tensors, ATTRS, rows=4, tunables={"workers": 3, "mode": 0})
    time.sleep(0.05)
    start = helpers_cpu_s()
    time.sleep(0.4)
    assert helpers_cpu_s() - start <= 0.1
    for _ in range(3):
        kernel(second, tensors, ATTRS, rows=4, tunables={"workers": 3, "mode": 0})
        time.sleep(0.002)
    ids = tensors["topk_ids"]
    assert ids is not None
    assert ids.flatten().tolist()[:3] == [3, 3, 3]
    pool.close()
    second.close()


def test_helpers_keep_off_the_callers_cpu(kernel: LoadedOp, built: Artifact) -> None:
    """On a busy machine caller and helper share one CPU and every region costs a time slice."""
    mine = os.sched_getaffinity(0)
    before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    pool = runtime(built.path.parent).pool(2)
    (helper,) = {int(task.name) for task in Path("/proc/self/task").iterdir()} - before
    for _ in range(20):
        kernel(pool, _tensors(), ATTRS, rows=4, tunables={"workers": 2, "mode": 0})
    allowed = os.sched_getaffinity(helper)
    assert allowed <= mine
    assert len(allowed) == max(len(mine) - 1, 1)
    assert os.sched_getaffinity(0) == mine
    pool.close()


def test_list_replays_in_order_sees_new_contents_and_counts(kernel: LoadedOp, pool: Pool) -> None:
    """A replay skips a launch, uses stale contents, or counts what did not run."""
    counts = np.zeros(3, dtype=np.int64)
    launches = LaunchList(pool)
    tensors = [_tensors(), _tensors(), _tensors()]
    for at, mode in enumerate((0, 2, 0)):
        launches.add(
            kernel, tensors[at], ATTRS, rows=4, layer=at, site="moe_front", counter=counts[at : at + 1],
            tunables={"workers": 1, "mode": mode},
        )  # fmt: skip
    with pytest.raises(LaunchError, match=r"op moe_front \(layer 1 moe_front\): RuntimeError: deliberate") as caught:
        launches.replay()
    assert (caught.value.op, caught.value.layer, caught.value.site) == (OP, 1, "moe_front")
    assert counts.tolist() == [1, 0, 0]
    assert launches.names[2] == (OP, 2, "moe_front")

    good = LaunchList(pool)
    good.add(kernel, tensors[0], ATTRS, rows=4, counter=counts[:1], tunables={"workers": 1, "mode": 0})
    ids = tensors[0]["topk_ids"]
    assert ids is not None
    for _ in range(3):
        ids.fill_(7)
        good.replay()
        assert ids.flatten().tolist() == [1] + [-1] * 15
    times = good.replay_timed()
    assert len(times) == 1
    assert times[0] > 0
    assert counts.tolist() == [5, 0, 0]


def test_error_status_without_an_error(kernel: LoadedOp, pool: Pool) -> None:
    """A kernel that fails silently crashes the process or passes."""
    with pytest.raises(LaunchError, match="without raising an error"):
        kernel(pool, _tensors(), ATTRS, rows=4, tunables={"workers": 1, "mode": 1})


def test_kernel_that_reads_other_arguments_reports_it(tmp_path: Path, pool: Pool) -> None:
    """A kernel compiled against another interface reads arguments at random."""
    write_kernel(tmp_path, OP, SEES.replace("const int64_t mode = a.integer();", "const int64_t mode = 0;"), TUNABLES)
    kernel = LoadedOp(build(OP, ARCH, PICO, tmp_path, tmp_path / "out"), PICO)
    with pytest.raises(LaunchError, match="more arguments than the op's interface"):
        kernel(pool, _tensors(), ATTRS, rows=4, tunables={"workers": 1, "mode": 0})


def test_kernel_of_another_context_version_refuses(kernel: LoadedOp, built: Artifact) -> None:
    """An object built against another launch context dereferences the wrong fields."""
    pool = runtime(built.path.parent).pool(1)
    context = _Context.from_buffer_copy(_Context.from_address(pool.context))
    context.abi_version = 99
    pool.context = ctypes.addressof(context)
    with pytest.raises(LaunchError, match="launch context has another ABI version"):
        kernel(pool, _tensors(), ATTRS, rows=4, tunables={"workers": 1, "mode": 0})


def _misaligned(shape: tuple[int, ...]) -> torch.Tensor:
    size = int(np.prod(shape))
    return torch.zeros(size + 1, dtype=torch.bfloat16)[1:].view(shape)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", None, "argument x: missing"),
        ("y", torch.zeros(1), "argument y: no such tensor"),
        ("x", torch.zeros(4, PICO.hidden), "dtype is torch.float32"),
        ("x", torch.zeros(3, PICO.hidden, dtype=torch.bfloat16), r"M is 3.*with M = 4"),
        ("x", torch.zeros(4, PICO.hidden, 1, dtype=torch.bfloat16), "shape is"),
        ("w_down", torch.zeros(PICO.latent, 7, dtype=torch.bfloat16), r"D is 7.*D = 192"),
        ("x", torch.zeros(PICO.hidden, 4, dtype=torch.bfloat16).t(), "strides are"),
        ("latent", _misaligned((4, PICO.latent)), "alignment to 64 bytes"),
        ("x", np.zeros(3), "is ndarray"),
        ("x", torch.zeros(4, PICO.hidden, dtype=torch.bfloat16, device="meta"), "a torch tensor on cpu"),
    ],
)
def test_unfit_tensors_never_reach_a_kernel(
    kernel: LoadedOp, pool: Pool, name: str, value: object, message: str
) -> None:
    """A kernel reads out of bounds because nobody compared shapes with the interface."""
    tensors = {**_tensors(), name: value}
    with pytest.raises(BindError, match=message) as caught:
        kernel(pool, tensors, ATTRS, rows=4, tunables={"workers": 1, "mode": 0})  # type: ignore[arg-type]
    assert (caught.value.op, caught.value.argument) == (OP, name)


def test_overlapping_tensors(kernel: LoadedOp, pool: Pool) -> None:
    """An output aliases an input although kernels assume that it does not; shared inputs are fine."""
    tensors = _tensors()
    memory = torch.zeros(4 * PICO.hidden, dtype=torch.bfloat16)
    tensors["x"] = memory.view(4, PICO.hidden)
    tensors["latent"] = memory[: 4 * PICO.latent].view(4, PICO.latent)
    with pytest.raises(BindError, match="overlaps"):
        kernel(pool, tensors, ATTRS, rows=4, tunables={"workers": 1, "mode": 0})
    tensors = _tensors()
    tensors["w_gate"] = torch.zeros(PICO.latent, PICO.hidden, dtype=torch.bfloat16)[: PICO.experts]
    tensors["w_down"] = torch.zeros(PICO.latent, PICO.hidden, dtype=torch.bfloat16)
    tensors["w_gate"] = tensors["w_down"][: PICO.experts]
    kernel(pool, tensors, ATTRS, rows=4, tunables={"workers": 1, "mode": 0})


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"top_k": 4}, "argument scale: is None"),
        ({"top_k": 4.0, "scale": 1.0}, "argument top_k: is 4.0"),
        ({"top_k": True, "scale": 1.0}, "argument top_k: is True"),
        ({"top_k": 4, "scale": "1"}, "argument scale"),
        ({"top_k": 4, "scale": 1.0, "eps": 1.0}, "argument eps: no such attribute"),
    ],
)
def test_unfit_attributes(kernel: LoadedOp, pool: Pool, attrs: dict[str, int | float], message: str) -> None:
    """An attribute of the wrong kind is packed as garbage bits."""
    with pytest.raises(BindError, match=message):
        kernel(pool, _tensors(), attrs, rows=4, tunables={"workers": 1, "mode": 0})


def test_tunables_come_from_the_schedule_or_are_declared(
    built: Artifact, kernel: LoadedOp, pool: Pool, tmp_path: Path
) -> None:
    """A kernel runs with an undeclared choice, or without any schedule."""
    with pytest.raises(ScheduleError, match="no schedule for 4 rows"):
        kernel(pool, _tensors(), ATTRS, rows=4)
    for bad in ({"workers": 1}, {"workers": 5, "mode": 0}, {"workers": 1, "mode": 0, "more": 1}):
        with pytest.raises(ScheduleError, match="one value each of"):
            kernel(pool, _tensors(), ATTRS, rows=4, tunables=bad)
    file = write_schedule(tmp_path, OP, "version = 1\n[[bucket]]\nmax_rows = 4\nworkers = 2\nmode = 0\n")
    scheduled = LoadedOp(built, PICO, file)
    tensors = _tensors()
    scheduled(pool, tensors, ATTRS, rows=4)
    ids = tensors["topk_ids"]
    assert ids is not None
    assert ids.flatten().tolist()[:3] == [2, 2, -1]
    with pytest.raises(ScheduleError, match="no schedule for 5 rows"):
        scheduled(pool, _tensors(5), ATTRS, rows=5)


def test_unknown_supports_attribute(tmp_path: Path) -> None:
    """A misspelt restriction is ignored and the kernel is used outside its support."""
    write_kernel(tmp_path, OP, spy_source(OP), "[supports]\ntop_q = [4]\n")
    with pytest.raises(ScheduleError, match="no such integer attribute"):
        LoadedOp(build(OP, ARCH, PICO, tmp_path, tmp_path / "out"), PICO)


@pytest.mark.parametrize("damage", ["altered", "garbage", "no symbol", "geometry", "abi", "arch", "op", "runtime"])
def test_objects_that_must_not_be_loaded(built: Artifact, tmp_path: Path, damage: str) -> None:
    """A broken, foreign or altered object is loaded, or ends in a traceback."""
    file = tmp_path / f"{OP}.so"
    file.write_bytes(built.object_path.read_bytes())
    (tmp_path / "cpu.toml").write_bytes((built.path / "cpu.toml").read_bytes())
    artifact = dataclasses.replace(built, path=tmp_path)
    g = PICO
    if damage == "altered":
        file.write_bytes(file.read_bytes() + b"\0")
    elif damage == "garbage":
        file.write_bytes(b"\x7fELF garbage")
        artifact = dataclasses.replace(artifact, files={**built.files, file.name: file_digest(file)})
    elif damage == "no symbol":
        write_kernel(tmp_path / "k", OP, spy_source("dense_mlp"))
        artifact = build(OP, ARCH, PICO, tmp_path / "k", tmp_path / "out")
    elif damage == "geometry":
        g = geometry("k3-nano")
    elif damage == "abi":
        artifact = dataclasses.replace(artifact, abi=2)
    elif damage == "arch":
        artifact = dataclasses.replace(artifact, arch="x86-64-v9")
    elif damage == "op":
        artifact = dataclasses.replace(artifact, op="softmax")
    else:
        artifact = build_runtime(tmp_path / "out")
    expected = {
        "altered": "changed after the build", "garbage": "cannot be loaded",
        "no symbol": "exports no __tvm_ffi_moe_front",
        "geometry": r"is \(op, geometry, device, ABI\)", "abi": r"is \(op, geometry, device, ABI\)",
        "arch": "this CPU lacks", "op": "unknown op 'softmax'", "runtime": "unknown op 'runtime'",
    }  # fmt: skip
    with pytest.raises(ArtifactError, match=expected[damage]):
        LoadedOp(artifact, g)


def test_runtime_refuses_a_kernel_object(built: Artifact) -> None:
    """Untrusted code is loaded in the launcher's place."""
    with pytest.raises(ArtifactError, match=r"is \(op, geometry, device, ABI\)"):
        Runtime(built)


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_impossible_pools(built: Artifact, threads: int) -> None:
    """A nonsense thread count crashes in native code."""
    with pytest.raises(BackendError, match=f"no pool of {threads} threads"):
        runtime(built.path.parent).pool(threads)


def test_closed_pool_raises(built: Artifact, kernel: LoadedOp) -> None:
    """A replay on freed memory."""
    pool = runtime(built.path.parent).pool(2)
    pool.close()
    with pytest.raises(BackendError, match="the pool is closed"):
        kernel(pool, _tensors(), ATTRS, rows=4, tunables={"workers": 2, "mode": 0})


def test_a_forked_child_neither_replays_nor_hangs(kernel: LoadedOp, built: Artifact) -> None:
    """A child process waits forever for workers that only its parent has."""
    pool = runtime(built.path.parent).pool(2)
    launches = LaunchList(pool)
    launches.add(kernel, _tensors(), ATTRS, rows=4, tunables={"workers": 2, "mode": 0})
    launches.replay()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            launches.replay()
        except BackendError as error:
            status = 0 if "not in its fork" in str(error) else 2
        pool.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    launches.replay()


def test_two_threads_take_turns(kernel: LoadedOp, pool: Pool) -> None:
    """Two Python threads replay on one pool at once and corrupt each other's regions."""

    def work() -> list[float]:
        tensors = _tensors()
        weights = tensors["topk_weights"]
        assert weights is not None
        launches = LaunchList(pool)
        launches.add(kernel, tensors, ATTRS, rows=4, tunables={"workers": 3, "mode": 4})
        seen = []
        for _ in range(5):
            weights.fill_(7)
            launches.replay()
            seen.append(float(weights.flatten()[0]))
        return seen

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(work) for _ in range(2)]
    assert [future.result() for future in futures] == [[0.0] * 5] * 2


def test_scratch_is_aligned_and_large(pool: Pool) -> None:
    """Kernels get less scratch, or less alignment, than k3_cpu.h promises."""
    scratch = pool.scratch
    assert scratch.nbytes == 8 << 20
    assert scratch.ctypes.data % 64 == 0
    scratch[:] = 0xFF


def test_kernel_set(built: Artifact, tmp_path: Path) -> None:
    """Schedules are looked up under another name than `<dir>/cpu/<geometry>/<op>.toml`."""
    write_schedule(tmp_path, OP, "version = 1\n[[bucket]]\nmax_rows = 4\nworkers = 2\nmode = 0\n")
    kernels = KernelSet.load({OP: built}, tmp_path, PICO, build_runtime(built.path.parent))
    assert list(kernels) == [OP]
    assert len(kernels) == 1
    assert kernels[OP].choose(4) == {"workers": 2, "mode": 0}
    assert kernels[OP].choose(5) is None


def test_arch_levels_are_ordered_and_derived_from_cpu_flags() -> None:
    """A machine is offered instructions that it cannot run, or a lower level than it could."""
    every = frozenset().union(*(arch.cpu_flags for arch in ARCHS.values()))
    assert runnable_archs(every) == ("x86-64-v4-amx", "x86-64-v4-bf16", "x86-64-v3")
    assert runnable_archs(every - {"amx_tile"}) == ("x86-64-v4-bf16", "x86-64-v3")
    assert runnable_archs(every - {"avx512_bf16"}) == ("x86-64-v3",)
    assert runnable_archs(frozenset()) == ()
    assert best_arch(["x86-64-v3", "x86-64-v4-bf16"], every) == "x86-64-v4-bf16"
    assert best_arch(["x86-64-v4-amx"], every - {"amx_bf16"}) is None


def test_amx_permission_is_requested(built: Artifact) -> None:
    """AMX kernels die with SIGILL because nobody asked the operating system for tile data."""
    if "x86-64-v4-amx" not in runnable_archs():
        pytest.skip("this CPU has no AMX")
    code = (
        "import json, sys, ctypes; from pathlib import Path\n"
        "from k3_backend.aot.manifest import Artifact; from k3_backend.aot.cpu.launch import Runtime\n"
        "pool = Runtime(Artifact.read(Path(sys.argv[1]))).pool(1)\n"
        "mask = ctypes.c_uint64(); libc = ctypes.CDLL(None)\n"
        "assert libc.syscall(158, 0x1022, ctypes.byref(mask)) == 0\n"  # arch_prctl(ARCH_GET_XCOMP_PERM)
        "print(json.dumps(bool(mask.value >> 18 & 1)))\n"
    )
    artifact = build_runtime(built.path.parent)
    done = subprocess.run([sys.executable, "-c", code, str(artifact.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is True
