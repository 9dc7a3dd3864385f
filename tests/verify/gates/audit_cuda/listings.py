"""Small hand-written listings in nvdisasm's form, for properties that a compiler does not produce on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verify.gates.audit.cuda import inspect_file

HEAD = """\t.target\tsm_103a
//--------------------- .text.k --------------------------
\t.section\t.text.k,"ax",@progbits
        .other          k,@"STO_CUDA_ENTRY STV_DEFAULT"
k:
.text.k:
"""


def listing(body: str) -> str:
    """A kernel `k`; body lines are instructions without offset and semicolon, or labels ending in a colon."""
    lines = []
    offset = 0
    for line in body.strip().splitlines():
        text = line.strip()
        if text.endswith(":"):
            lines.append(text)
        else:
            lines.append(f"        /*{offset:04x}*/                   {text} ;")
            offset += 16
    return HEAD + "\n".join(lines) + "\n"


def facts(tmp_path: Path, body: str, constants: tuple[int, ...] = ()) -> dict[str, Any]:
    """Facts of one hand-written kernel; parameters are 8 bytes each from c[0x0][0x380] on."""
    path = tmp_path / "k.sass"
    path.write_text(listing(body))
    found = inspect_file(path, constants)
    assert len(found) == 1
    return found[0]


def rows(found: dict[str, Any], op: str) -> list[dict[str, Any]]:
    """The accesses of one opcode."""
    return [row for row in found["accesses"] if row["op"] == op]
