"""Check the arguments of a call against the op's interface, before anything is packed or launched.

Everything that a kernel may rely on is established here: exact names, dtypes, one consistent value per symbolic size,
row-major contiguity, 64-byte alignment, the right device, and no overlap between a written tensor and any other.
Values are not inspected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from k3_backend.errors import BackendError
from k3_backend.geometry import Geometry
from k3_backend.ops.interface import DType, OpSpec, TensorSpec

__all__ = ["TENSOR_ALIGNMENT", "TORCH_DTYPES", "BindError", "call_sizes", "check_attrs", "check_tensors"]

TENSOR_ALIGNMENT = 64
"""Bytes; every tensor of a call starts at a multiple of it (one cache line, one AVX-512 register)."""

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}


class BindError(BackendError):
    """An argument of a launch does not fit the op's interface."""

    def __init__(self, what: str, *, op: str, argument: str, expected: str) -> None:
        super().__init__(
            what, where=f"op {op}, argument {argument}", expected=expected, next=f"see k3_backend/ops/{op}/interface.py"
        )
        self.op = op
        self.argument = argument


def check_tensors(
    spec: OpSpec,
    geometry: Geometry,
    tensors: Mapping[str, torch.Tensor | None],
    attrs: Mapping[str, int | float],
    rows: int,
    device: str = "cpu",
) -> list[torch.Tensor | None]:
    """The call's tensors in interface order.

    Args:
        spec: the op's interface.
        geometry: fixes the geometry-derived sizes; the others (B, T, pages, ...) follow from the tensors.
        tensors: by name; optional ones may be None or absent.
        attrs: only `tokens` is read, where the op has it: rows = B * tokens.
        rows: must equal the size M.
        device: type of the device that all tensors must lie on.

    Raises:
        BindError: the first argument that does not fit, with what was expected of it.
    """
    unknown = sorted(set(tensors) - {t.name for t in spec.tensors})
    if unknown:
        names = ", ".join(t.name for t in spec.tensors)
        raise BindError("no such tensor", op=spec.name, argument=unknown[0], expected=f"one of {names}")
    sizes = {**spec.sizes(geometry), "M": rows}
    bound: list[torch.Tensor | None] = []
    for tensor_spec in spec.tensors:
        tensor = tensors.get(tensor_spec.name)
        if tensor is None:
            if not tensor_spec.optional:
                raise BindError("missing", op=spec.name, argument=tensor_spec.name, expected=_form(tensor_spec))
        else:
            _check_tensor(spec.name, tensor_spec, tensor, sizes, device)
        bound.append(tensor)
    tokens = attrs.get("tokens", sizes.get("T"))
    if tokens is not None and "B" in sizes and sizes["B"] * tokens != rows:
        raise BindError(
            f"{rows} rows for {sizes['B']} requests of {tokens} tokens",
            op=spec.name,
            argument="M",
            expected="M = B * T",
        )
    _check_overlap(spec, bound)
    return bound


def call_sizes(spec: OpSpec, geometry: Geometry, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, int]:
    """Every symbolic size of a call whose tensors were checked: those of the geometry and those of the tensors."""
    sizes = dict(spec.sizes(geometry))
    for tensor_spec in spec.tensors:
        tensor = tensors.get(tensor_spec.name)
        if tensor is not None:
            sizes.update((d, n) for d, n in zip(tensor_spec.dims, tensor.shape, strict=True) if isinstance(d, str))
    return sizes


def check_attrs(spec: OpSpec, attrs: Mapping[str, int | float]) -> list[int | float]:
    """The call's attributes in interface order, as exactly int or float.

    Raises:
        BindError: unknown, missing or of another kind.
    """
    known = {a.name for a in spec.attrs}
    for name in attrs:
        if name not in known:
            raise BindError(
                "no such attribute",
                op=spec.name,
                argument=name,
                expected=f"one of {', '.join(sorted(known)) or '(none)'}",
            )
    numbers: list[int | float] = []
    for attr in spec.attrs:
        value = attrs.get(attr.name)
        if not isinstance(value, int if attr.kind == "int" else (int, float)) or isinstance(value, bool):
            raise BindError(f"is {value!r}", op=spec.name, argument=attr.name, expected=f"{attr.kind}: {attr.meaning}")
        numbers.append(value if attr.kind == "int" else float(value))
    return numbers


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.dims))}]"


def _check_tensor(op: str, spec: TensorSpec, tensor: torch.Tensor, sizes: dict[str, int], device: str) -> None:
    """Check one tensor; sizes that it is the first to use are recorded in `sizes`."""

    def fail(what: str, expected: str) -> BindError:
        return BindError(what, op=op, argument=spec.name, expected=expected)

    if not isinstance(tensor, torch.Tensor):
        raise fail(f"is {type(tensor).__name__}", f"a torch tensor on {device}")
    if tensor.device.type != device:
        raise fail(f"lies on {tensor.device.type}", f"a torch tensor on {device}")
    if tensor.dtype != TORCH_DTYPES[spec.dtype]:
        raise fail(f"dtype is {tensor.dtype}", _form(spec))
    shape = tuple(tensor.shape)
    if len(shape) != len(spec.dims):
        raise fail(f"shape is {list(shape)}", _form(spec))
    for size, dim in zip(shape, spec.dims, strict=True):
        wanted = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
        if size != wanted:
            raise fail(f"shape is {list(shape)}: {dim} is {size}", f"{_form(spec)} with {dim} = {wanted}")
    if not tensor.is_contiguous():
        raise fail(f"strides are {tensor.stride()}", "row-major contiguous memory")
    if tensor.data_ptr() % TENSOR_ALIGNMENT:
        raise fail(f"address {tensor.data_ptr():#x}", f"alignment to {TENSOR_ALIGNMENT} bytes")


def _check_overlap(spec: OpSpec, bound: Sequence[torch.Tensor | None]) -> None:
    """A tensor that the op writes shares no byte with another one, so kernels may assume `restrict`."""
    spans = [
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), s)
        for s, t in zip(spec.tensors, bound, strict=True)
        if t is not None and t.numel()
    ]
    spans.sort(key=lambda span: span[:2])
    reached: dict[bool, tuple[int, str]] = {}  # written or not -> furthest end so far, and whose
    for start, end, tensor_spec in spans:
        written = tensor_spec.role in ("output", "state")
        for other_written, (other_end, other) in reached.items():
            if start < other_end and (written or other_written):
                raise BindError(
                    f"overlaps {other}",
                    op=spec.name,
                    argument=tensor_spec.name,
                    expected="written tensors that share no memory with others",
                )
        if written not in reached or end > reached[written][0]:
            reached[written] = (end, tensor_spec.name)
