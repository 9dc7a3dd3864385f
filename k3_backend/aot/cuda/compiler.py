"""Compile an op's variants with the CuTe DSL: runs in the sandbox, because `kernels/<op>/cute.py` is a candidate's.

    python -m k3_backend.aot.cuda.compiler REQUEST.json OUT_DIR        (working folder: the parent of `kernels`)

Request: op, arch, geometry, list of choices. For each variant the file's `variant(choices)` is called, each launch is
compiled to PTX and cubin, and `OUT_DIR/result.json` describes them. Kernel files are imported as `kernels.<op>.cute`
under relative file names, so that line tables, and with them digests, do not depend on where the tree lies.
A failure names variant and launch in `OUT_DIR/error.json`; the traceback names the line.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import linecache
import os
import re
import sys
import traceback
from collections.abc import Sequence
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["KernelFinder", "main"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class _RelativeLoader(SourceFileLoader):
    """Loads a source file under the relative name it was found by."""

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - the protocol's signature
        return compile(Path(self.path).read_bytes(), self.path, "exec", dont_inherit=True)


class KernelFinder(MetaPathFinder):
    """Finds `kernels` and what lies below it in the working folder, nowhere else."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 - the protocol's signature
        parts = fullname.split(".")
        if parts[0] != "kernels":
            return None
        base = "/".join(parts)
        if os.path.isdir(base):
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [base]
            return spec
        file = f"{base}.py"
        if not os.path.isfile(file) or os.path.islink(file):
            return None
        spec = ModuleSpec(fullname, _RelativeLoader(fullname, file), origin=file)
        spec.has_location = True  # with the helper of importlib.util the name would become absolute
        return spec


def main(argv: Sequence[str]) -> int:
    """Compile one request; 0 if everything was compiled, 1 with `error.json` if not."""
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    out = Path(argv[1])
    place: dict[str, Any] = {"choices": None, "launch": None}
    sys.meta_path.insert(0, KernelFinder())
    try:
        result = [_compile_variant(request, choices, out, place) for choices in request["choices"]]
    except BaseException as error:
        text = _ANSI.sub("", "".join(traceback.format_exception(error)))
        said = _ANSI.sub("", f"{type(error).__name__}: {error}").strip()
        problem = {**place, "error": said, "file_line": _kernel_line(error, text), "traceback": text[-20_000:]}
        (out / "error.json").write_text(json.dumps(problem), encoding="utf-8")
        return 1
    loaded = sorted(m.__file__ for name, m in sys.modules.items() if name.startswith("kernels.") and m.__file__)
    (out / "result.json").write_text(json.dumps({"variants": result, "loaded": loaded}), encoding="utf-8")
    return 0


def _kernel_line(error: BaseException, text: str) -> str | None:
    """`kernels/<op>/<file>:line` of the innermost frame in a kernel file; the DSL's own message if no frame is left."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("kernels/")]
    if isinstance(error, SyntaxError) and (error.filename or "").startswith("kernels/"):
        return f"{error.filename}:{error.lineno}"
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno}"
    at = text.find("kernels/")
    return text[at:].split(maxsplit=1)[0].rstrip(",") if at >= 0 else None


def _compile_variant(request: dict[str, Any], chosen: dict[str, Any], out: Path, place: dict[str, Any]) -> Any:
    from k3_backend.aot.cuda.contract import Choices
    from k3_backend.geometry import geometry

    place.update(choices=chosen, launch=None)
    module = importlib.import_module(f"kernels.{request['op']}.cute")
    choices = Choices(request["arch"], geometry(request["geometry"]), chosen["tunables"], chosen["specialised"])
    variant = module.variant(choices)
    launches = []
    for launch in variant.launches:
        place["launch"] = launch.name
        launches.append(_compile_launch(request["op"], launch, variant, out))
    return {
        "choices": {**chosen["tunables"], **chosen["specialised"]},
        "launches": launches,
        "workspaces": [
            {"name": w.name, "dtype": w.dtype, "elements": str(w.elements), "zeroed": bool(w.zeroed)}
            for w in variant.workspaces
        ],
        "requires": list(variant.requires),
    }


def _compile_launch(op: str, launch: Any, variant: Any, out: Path) -> dict[str, Any]:
    from k3_backend.aot.cuda.contract import TensorMap, Value
    from k3_backend.ops import ALL_OPS

    dsl = _dsl()
    spec = ALL_OPS[op]
    tensors = {t.name: t for t in spec.tensors}
    attrs = {a.name: a for a in spec.attrs}
    scratch = {w.name: w for w in variant.workspaces}
    arguments: list[Any] = []
    parameters: list[dict[str, Any]] = []

    def pointer(name: str, dtype: str, role: str) -> None:
        arguments.append(dsl.pointer(dtype))
        parameters.append(
            {"name": name, "kind": "pointer", "role": role, "expression": None, "tensor": None, "box": None}
        )

    def scalar(name: str, kind: str, expression: str | None = None) -> None:
        arguments.append(dsl.scalar(kind))
        parameters.append(
            {"name": name, "kind": kind, "role": "scalar", "expression": expression, "tensor": None, "box": None}
        )

    for argument in launch.arguments:
        if isinstance(argument, TensorMap):
            pointer(argument.name, "u8", tensors[argument.tensor].role)
            parameters[-1] |= {"kind": "map", "tensor": argument.tensor, "box": [argument.rows, argument.columns]}
        elif isinstance(argument, Value):
            scalar(argument.name, "i32", argument.expression)
        elif argument in tensors:
            pointer(argument, tensors[argument].dtype, tensors[argument].role)
        elif argument in scratch:
            pointer(argument, scratch[argument].dtype, "workspace")
        elif argument in attrs:
            scalar(argument, "i32" if attrs[argument].kind == "int" else "f32")
        else:
            scalar(argument, "i32")  # a size; binding a call refuses names without a value

    image, ptx = dsl.compile_launch(launch, arguments)
    digest = hashlib.sha256(image).hexdigest()
    (out / f"{digest}.cubin").write_bytes(image)
    (out / f"{digest}.ptx").write_text(ptx, encoding="utf-8")
    return {
        "name": launch.name, "image": f"{digest}.cubin", "parameters": parameters,
        "grid": [str(extent) for extent in launch.grid], "block": int(launch.block), "cluster": int(launch.cluster),
        "shared": int(launch.shared), "min_ctas_per_sm": int(launch.min_ctas_per_sm), "pdl": bool(launch.pdl),
        "expects": list(launch.expects), "polling": launch.polling, "urgent": bool(launch.urgent),
        "carveout": None if launch.carveout is None else int(launch.carveout),
    }  # fmt: skip


@lru_cache(maxsize=1)
def _dsl() -> ModuleType:
    """`dsl.py` under a relative file name: its host function is in the line tables of every kernel."""
    name = "k3_backend/aot/cuda/dsl.py"
    source = Path(__file__).with_name("dsl.py").read_text(encoding="utf-8")
    module = ModuleType("k3_backend_dsl")
    module.__file__ = name
    sys.modules[module.__name__] = module
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - this package's own file
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
