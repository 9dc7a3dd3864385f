"""Ask a CUDA kernel file which choices it takes, without compiling: runs in the sandbox.

    python -m k3_backend.aot.probe REQUEST.json OUT_DIR        (working folder: the parent of `kernels`)

The request is the compiler's (`k3_backend.aot.cuda.compiler`). `OUT_DIR/probe.json` lists, per choice, why it is
refused, or null: a ValueError of the file's `variant`, or more shared memory than a block may have. Any other error
fails the probe, as it would fail the build.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3_backend.aot.cuda.arch import ARCHS
from k3_backend.aot.cuda.compiler import KernelFinder
from k3_backend.aot.cuda.contract import Choices
from k3_backend.geometry import geometry

__all__ = ["main", "refusal"]


def refusal(module: Any, request: dict[str, Any], chosen: dict[str, dict[str, int]]) -> str | None:
    """Why the kernel file refuses a choice, or null."""
    choices = Choices(request["arch"], geometry(request["geometry"]), chosen["tunables"], chosen["specialised"])
    try:
        variant = module.variant(choices)
    except ValueError as error:
        return str(error)
    limit = ARCHS[request["arch"]].max_shared_per_block
    for launch in variant.launches:
        if launch.shared * launch.min_ctas_per_sm > limit:
            return f"{launch.name}: {launch.min_ctas_per_sm} x {launch.shared} bytes of shared memory, of {limit}"
    return None


def main(argv: Sequence[str]) -> int:
    """Answer one request."""
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    sys.meta_path.insert(0, KernelFinder())
    module = importlib.import_module(f"kernels.{request['op']}.cute")
    answer = [refusal(module, request, chosen) for chosen in request["choices"]]
    (Path(argv[1]) / "probe.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
