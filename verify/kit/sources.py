"""Which of the base commit's Python files travel in a kit: what its entry points import, and nothing else.

Imports are read from the sources, never executed. A file that imports a package which the GPU machine need not have is
an error where the kit is built, not where it runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from harness.errors import FasttrackError

__all__ = ["ENTRY_POINTS", "closure"]

ENTRY_POINTS = (
    "verify.kit.run", "verify.workers.main", "verify.workers.card_methods", "verify.workers.cuda_card",
    "verify.workers.half_methods", "verify.workers.cuda_half_card",
    "verify.workers.chain_methods", "verify.workers.peer_methods", "verify.workers.race_controls",
)  # fmt: skip
DYNAMIC = (
    "k3_backend/ops/*/reference.py", "k3_backend/ops/*/standard.py", "k3_backend/ops/*/standard_cuda.py",
    "verify/bench/gpu/peers/*.py",
)  # fmt: skip
"""Files that are imported by a name made at run time (`k3_backend.ops.registry`, `verify.bench.gpu.measure`)."""
PACKAGES = ("k3_backend", "verify", "harness")
OUTSIDE = frozenset({"torch", "triton", "numpy", "scipy", "cuda"})
"""What the GPU machine has, besides the standard library; scipy only where speed is judged."""
LAZY_OUTSIDE = frozenset({"safetensors", "fla", "tvm_ffi"})
"""Imported inside functions that the kit never calls, or whose caller has another way where it is missing."""


def closure(root: Path, stdlib: frozenset[str], entries: tuple[str, ...] = ENTRY_POINTS) -> tuple[str, ...]:
    """Relative paths of all files that travel, sorted.

    Args:
        root: export of the base commit, with `PACKAGES`.
        stdlib: names of the standard library's modules.
        entries: modules that are started or imported by name.

    Raises:
        FasttrackError: a file imports what the GPU machine need not have, or an entry point is missing.
    """
    found: set[str] = set()
    left = [_path(root, module) for module in entries]
    left += [path for pattern in DYNAMIC for path in sorted(root.glob(pattern))]
    while left:
        path = left.pop()
        if path is None:
            raise FasttrackError(
                "the base commit cannot make kits", where=str(root), expected=f"modules {', '.join(entries)}",
                next="choose a newer base with --base",
            )  # fmt: skip
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        found.add(name)
        left += [p for parent in path.relative_to(root).parents if (p := root / parent / "__init__.py").is_file()]
        for module, lazy in _imports(path):
            top = module.split(".")[0]
            if top in PACKAGES:
                left += [p for p in (_path(root, module), _path(root, module.rpartition(".")[0])) if p is not None]
            elif top not in stdlib and top not in OUTSIDE and not (lazy and top in LAZY_OUTSIDE):
                raise FasttrackError(
                    f"imports {module}", where=name, expected=f"the standard library, {', '.join(sorted(OUTSIDE))}",
                    next="keep what the kit carries free of other packages",
                )  # fmt: skip
    return tuple(sorted(found))


def _path(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split(".")) if module else root
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if module and path.is_file():
            return path
    return None


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether the import stands inside a function) of every import statement, names of packages included."""
    tree = ast.parse(path.read_bytes(), filename=str(path))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lazy = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in lazy
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, id(node) in lazy
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) in lazy
