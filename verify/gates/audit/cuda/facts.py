"""Facts of files: cubins with or without their PTX, PTX alone, disassembly listings. Judges nothing.

Content never raises: what cannot be read is stated in `malformed`, what could not be analysed in `unevaluated`, and
`verify.protocol.audit_cuda` lets neither pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from k3_backend.aot.cuda.cubin import Cubin, CubinError, Kernel, read
from verify.gates.audit.cuda import lower, program
from verify.gates.audit.cuda.code import code_facts
from verify.gates.audit.cuda.nvdisasm import disassemble
from verify.gates.audit.cuda.ops import Op
from verify.gates.audit.cuda.ptx import Entry, entries
from verify.gates.audit.cuda.records import Claims, Facts, Param, claims_facts, parameters, resources
from verify.gates.audit.cuda.sass import Listing, listed_kernels, parse

__all__ = ["inspect_cubin", "inspect_file"]

_MAX_FILE_BYTES = 256 << 20
_LISTING = "a listing holds no resource usage and its parameter table was read from text: audit the cubin"
_PTX = "PTX is not machine code: spills, registers and what ptxas moves or drops are not visible"


def inspect_cubin(
    cubin: bytes,
    *,
    entry: str | None = None,
    params: Sequence[Param] | None = None,
    claims: Claims | None = None,
    ptx: str | None = None,
) -> list[Facts]:
    """Facts of every kernel in a cubin, or of `entry` alone.

    Args:
        cubin: the file's bytes.
        entry: the kernel's symbol; None for all.
        params: roles of the parameters; None: every pointer, struct and tensor map is an activation.
        claims: what the launch descriptor promises; None: rules on claims find nothing to compare with.
        ptx: the source, to compare what the assembler dropped or moved.
    """
    return _inspect(cubin, entry, lambda _: params, claims, ptx)


def inspect_file(path: Path | str, constants: Sequence[int] = ()) -> list[Facts]:
    """Facts of a stand-alone .cubin, .ptx or .sass file, not necessarily of this project.

    Args:
        path: the file; .sass is the text of `nvdisasm` (with its data sections, if parameters are to be known).
        constants: indices of the parameters whose memory no kernel writes; all other pointers are activations.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return [_malformed(f"larger than {_MAX_FILE_BYTES >> 20} MiB", None)]
        data = path.read_bytes()
    except OSError as error:
        return [_malformed(f"cannot be read ({error.strerror})", None)]
    suffix = path.suffix.lower()
    if suffix == ".cubin":
        return _inspect(data, None, lambda k: _with_constants(k, constants) if constants else None, None, None)
    text = data.decode("utf-8", "replace")
    if suffix == ".ptx":
        return _inspect_ptx(text, constants)
    if suffix == ".sass":
        return _inspect_listing(text, constants)
    return [_malformed(f"a file of unknown kind {path.suffix or '(no suffix)'}; known are .cubin, .ptx, .sass", None)]


def _malformed(why: str, claims: Claims | None) -> Facts:
    return {"malformed": why, "kernel": None, "claims": claims_facts(claims)}


def _header(
    kernel: Kernel,
    slots: list[Param],
    params: Sequence[Param] | None,
    claims: Claims | None,
    image: Cubin | None,
    arch: str | None,
    level: str,
) -> Facts:
    actual = [[s.offset, s.size] for s in kernel.parameters]
    declared = None if params is None else [[p.offset, p.size] for p in params]
    return {
        "malformed": None,
        "kernel": kernel.name,
        "arch": arch,
        "level": level,
        "claims": claims_facts(claims),
        "parameters": [asdict(p) for p in slots],
        "parameter_table": {"cubin": actual, "declared": declared, "base": kernel.parameter_base},
        "roles_declared": params is not None,
        "resources": resources(kernel),
        "undefined_functions": list(image.undefined_functions) if image else [],
        "device_bytes": image.device_bytes if image else None,
        "ptx": None,
        "unevaluated": [],
    }


def _with_code(
    facts: Facts, listing: Listing, ops: list[Op], kernel: Kernel, slots: list[Param], missing: str | None
) -> Facts:
    gaps: list[dict[str, str]] = facts["unevaluated"]
    start = listing.functions.get(kernel.name, listing.sections.get(f".text.{kernel.name}"))
    if missing is not None or start is None or start >= len(listing.instructions):
        why = missing or "no code of this kernel in the listing"
        return {**facts, "unevaluated": [*gaps, {"what": "code", "why": why, "at": ""}]}
    if listing.unread_lines:
        why = f"{listing.unread_lines} lines not understood: {listing.unread[0]}"
        gaps = [*gaps, {"what": "listing", "why": why, "at": ""}]
    code = code_facts(program.from_sass(listing, ops, start, kernel.parameter_base, slots))
    return {**facts, **code, "unevaluated": [*gaps, *code["unevaluated"]]}


def _ptx_facts(entry: Entry | None, slots: list[Param]) -> Facts:
    """What the PTX of a kernel asks for, to compare with the machine code; `loads` is null if it was not understood."""
    if entry is None:
        return {"waits": None, "loads": None, "why": "the PTX does not hold this kernel"}
    waits = sum(s.opcode == "griddepcontrol.wait" for s in entry.statements)
    code = code_facts(program.from_ptx(entry, _ptx_slots(entry, slots)))
    gaps = [g["why"] for g in code["unevaluated"]] + entry.unread[:1]
    if gaps:
        return {"waits": waits, "loads": None, "why": gaps[0]}
    loads = [
        {"params": row["params"], "poll": row["poll"], "count": row["count"]}
        for row in code["accesses"]
        if row["touch"] == "load" and not row["strong"]
    ]
    return {"waits": waits, "loads": loads, "why": None}


def _ptx_slots(entry: Entry, slots: list[Param]) -> list[Param]:
    """Names and roles by position: offsets differ, because ptxas aligns parameters to their place in the bank."""
    table = entry.kernel.parameters
    if len(table) != len(slots):
        return parameters(entry.kernel, None)
    return [replace(p, offset=s.offset, size=s.size) for p, s in zip(slots, table, strict=True)]


def _with_constants(kernel: Kernel, constants: Sequence[int]) -> list[Param]:
    slots = parameters(kernel, None)
    return [replace(p, role="constant") if i in constants and p.role != "scalar" else p for i, p in enumerate(slots)]


def _inspect(
    cubin: bytes,
    entry: str | None,
    roles: Callable[[Kernel], Sequence[Param] | None],
    claims: Claims | None,
    ptx: str | None,
) -> list[Facts]:
    try:
        image = read(cubin)
    except CubinError as error:
        return [_malformed(error.what, claims)]
    wanted = [k for k in image.kernels.values() if entry is None or k.name == entry]
    if not wanted:
        have = ", ".join(image.kernels) or "none"
        return [_malformed(f"no kernel {entry or ''} in the file (kernels: {have[:200]})", claims)]
    done = disassemble(cubin)
    if done.failed is not None:
        return [_malformed(done.failed, claims)]
    listing = parse(done.text)
    ops = lower.lower(listing)
    sources = {e.kernel.name: e for e in entries(ptx)} if ptx is not None else {}
    found = []
    for kernel in wanted:
        params = roles(kernel)
        slots = parameters(kernel, params)
        facts = _header(kernel, slots, params, claims, image, listing.target or image.arch, "sass")
        if ptx is not None:
            facts["ptx"] = _ptx_facts(sources.get(kernel.name), slots)
        found.append(_with_code(facts, listing, ops, kernel, slots, done.missing))
    return found


def _inspect_ptx(text: str, constants: Sequence[int]) -> list[Facts]:
    found = []
    for entry in entries(text):
        slots = _with_constants(entry.kernel, constants)
        target = next((w.split()[1].strip(",") for w in text.splitlines() if w.startswith(".target ")), None)
        facts = _header(entry.kernel, slots, slots, None, None, target, "ptx")
        gaps = [{"what": "level", "why": _PTX, "at": ""}]
        if entry.unread_lines:
            gaps.append(
                {"what": "ptx", "why": f"{entry.unread_lines} statements not understood", "at": entry.unread[0]}
            )
        code: Facts = {"unevaluated": [{"what": "code", "why": "an entry without instructions", "at": ""}]}
        if entry.statements:
            code = code_facts(program.from_ptx(entry, slots))
        found.append({**facts, **code, "unevaluated": [*gaps, *code["unevaluated"]]})
    return found or [_malformed("no entry function in the PTX", None)]


def _inspect_listing(text: str, constants: Sequence[int]) -> list[Facts]:
    listing = parse(text)
    kernels = listed_kernels(listing, text)
    if not kernels:
        why = listing.unread[0] if listing.unread else "no code section"
        return [_malformed(f"not a listing of nvdisasm ({why})", None)]
    ops = lower.lower(listing)
    found = []
    for kernel in kernels:
        slots = _with_constants(kernel, constants)
        facts = _header(kernel, slots, slots, None, None, listing.target, "listing")
        facts["unevaluated"] = [{"what": "level", "why": _LISTING, "at": ""}]
        found.append(_with_code(facts, listing, ops, kernel, slots, None))
    return found
