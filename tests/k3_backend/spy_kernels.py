"""Kernels that compute nothing useful but show what the launcher and the step handed them.

`spy_tree` writes a kernel folder for every op, generated from the op's interface: outputs are zeroed, and a few ops
leave a trace (`attn_res` copies the prefix to its output, `kda_decode` adds 1 to every state it was given a slot for,
`mla_query` writes 1 to every mapped cache row). One source text per op, so a test build takes a fraction of a second.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from k3_backend.aot.build import build_all, build_runtime
from k3_backend.aot.cpu.host import best_arch, runnable_archs
from k3_backend.aot.cpu.launch import KernelSet, Runtime
from k3_backend.geometry import geometry
from k3_backend.ops import OPS

PICO = geometry("k3-pico")
ARCH = best_arch(runnable_archs()) or "x86-64-v3"

TRACES = {
    "attn_res": "memcpy(t_out->data, t_prefix->data, bytes(t_out));",
    "kda_decode": """
  const int32_t* slots = static_cast<const int32_t*>(t_slots->data);
  float* state = static_cast<float*>(t_state->data);
  const int64_t each = bytes(t_state) / t_state->shape[0] / 4;
  for (int64_t i = 0; i < t_slots->shape[0] * t_slots->shape[1]; ++i)
    if (slots[i] > 0)
      for (int64_t e = 0; e < each; ++e) state[slots[i] * each + e] += 1.0f;""",
    "mla_query": """
  const int64_t* rows = static_cast<const int64_t*>(t_slot_mapping->data);
  const int64_t width = t_kv_cache->shape[2];
  for (int64_t m = 0; m < t_slot_mapping->shape[0]; ++m)
    if (rows[m] >= 0)
      for (int64_t e = 0; e < width; ++e) static_cast<uint16_t*>(t_kv_cache->data)[rows[m] * width + e] = 0x3f80;""",
}

HELPERS = """
#include "k3_cpu.h"
#include <string.h>
namespace {
inline int64_t bytes(const DLTensor* t) {
  int64_t n = t->dtype.bits / 8;
  for (int32_t i = 0; i < t->ndim; ++i) n *= t->shape[i];
  return n;
}
}
"""


def spy_source(op: str, trace: str = "") -> str:
    """C++ text of one op's spy."""
    spec = OPS[op]
    lines = [HELPERS, f"K3_EXPORT({op}) {{", "  (void)result; (void)bytes;"]
    count = 1 + len(spec.tensors) + len(spec.attrs)
    lines.append(f'  if (num_args < {count}) {{ TVMFFIErrorSetRaisedFromCStr("ValueError", "too few"); return -1; }}')
    for at, tensor in enumerate(spec.tensors, 1):
        lines.append(f"  DLTensor* t_{tensor.name} = static_cast<DLTensor*>(args[{at}].v_ptr); (void)t_{tensor.name};")
        if tensor.role == "output":
            lines.append(f"  memset(t_{tensor.name}->data, 0, size_t(bytes(t_{tensor.name})));")
    lines += [trace, "  return 0;", "}"]
    return "\n".join(lines)


def write_kernel(tree: Path, op: str, source: str, declarations: str = "") -> Path:
    """One kernel folder below `tree`; returns the path of cpu.cc."""
    folder = tree / op
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cc").write_text(source)
    (folder / "cpu.toml").write_text(declarations)
    return folder / "cpu.cc"


def write_schedule(schedules: Path, op: str, text: str) -> Path:
    """One schedule file of the k3-pico geometry."""
    folder = schedules / "cpu" / PICO.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{op}.toml").write_text(text)
    return folder / f"{op}.toml"


@cache
def runtime(cache_dir: Path) -> Runtime:
    """The launcher, built into a cache folder."""
    return Runtime(build_runtime(cache_dir))


def spy_kernels(root: Path, max_rows: int = 512, without_schedule: tuple[str, ...] = ()) -> KernelSet:
    """A spy for every op of k3-pico, built and loaded, each with one schedule bucket up to `max_rows`."""
    tree, schedules = root / "kernels", root / f"schedules-{max_rows}-{'-'.join(without_schedule)}"
    for op in OPS:
        write_kernel(tree, op, spy_source(op, TRACES.get(op, "")))
        if op not in without_schedule:
            write_schedule(schedules, op, f"version = 1\n[[bucket]]\nmax_rows = {max_rows}\n")
    artifacts = build_all(OPS, ARCH, PICO, tree, root / "cache")
    return KernelSet.load(artifacts, schedules, PICO, build_runtime(root / "cache"))
