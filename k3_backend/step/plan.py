"""When the specialised path is chosen: the complete list of conditions, each with a stable refusal code.

`Planner.plan(batch)` returns a `Step` (the specialised path runs) or a `Refusal` that lists every reason (the standard
path runs and the ledger counts it). Conditions that cannot change after construction are checked once; the others per
batch. Planning reads shapes and lengths only; it touches no state and launches nothing.

| code | refused because |
| --- | --- |
| `mode.off` | the switch `decode_backend` is off (the default) |
| `arch.unsupported` | this CPU runs none of the known architecture levels |
| `kernels.none` | no kernels are loaded |
| `layout.unsupported` | tensor or decode-context parallelism that the CPU ops do not implement |
| `geometry.mismatch` | kernels or state were made for another geometry than the weights |
| `dtype.mismatch` | a weight or state pool has another dtype than its op's interface |
| `op.missing` | an op of the step has no specialised kernel |
| `op.unsupported` | a kernel does not support an attribute value that the step needs (MXFP4 experts, say) |
| `op.no_schedule` | an op's schedule has no bucket for this number of rows |
| `batch.not_decode` | the batch holds a prefill chunk |
| `batch.ragged` | the requests have different numbers of query tokens |
| `batch.too_many_requests` | more requests than `MAX_REQUESTS` |
| `batch.too_many_tokens` | more query tokens per request than `MAX_TOKENS` |
| `batch.block_table` | more pages per request than the captured buffers hold |
| `state.too_few_taps` | the conv windows hold too few taps for this many query tokens |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from k3_backend.aot.cpu.host import ARCHS, best_arch
from k3_backend.aot.cpu.launch import KernelSet
from k3_backend.errors import BackendError
from k3_backend.model.batch import Batch
from k3_backend.model.program import DTYPES, Site, decode_program
from k3_backend.model.state import DecodeState
from k3_backend.model.weights import ModelWeights
from k3_backend.ops import OPS

__all__ = [
    "CAPTURED_REQUESTS", "MAX_REQUESTS", "MAX_TOKENS", "Layout", "Mode", "PlanError", "Planner", "Refusal",
    "RefusalReason", "Step", "captured_requests", "max_pages",
]  # fmt: skip

Mode = Literal["off", "auto", "latency_specialized"]
"""`off`: always the standard path. `auto`: specialised where it can, else standard, counted. `latency_specialized`: the
same per batch, but construction fails unless every decode and verify batch in scope can take the specialised path."""

CAPTURED_REQUESTS: tuple[int, ...] = (*range(1, 9), 12, 16, 24, 32, 48, 64)
"""Numbers of requests for which steps are captured; others are padded up with null requests."""
MAX_REQUESTS = CAPTURED_REQUESTS[-1]
MAX_TOKENS = 8
"""Query tokens per request: 1 + up to 7 drafts."""


@dataclass(frozen=True)
class Layout:
    """Parallel layout of the serving process."""

    tp: int = 1
    dcp: int = 1


@dataclass(frozen=True)
class RefusalReason:
    """One condition that does not hold."""

    code: str
    message: str
    where: str
    expected: str

    def __str__(self) -> str:
        return f"{self.code} ({self.where}: {self.message}; expected {self.expected})"


@dataclass(frozen=True)
class Refusal:
    """The specialised path cannot run this batch; every reason, not the first."""

    reasons: tuple[RefusalReason, ...]

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes, each once, in order of checking."""
        return tuple(dict.fromkeys(reason.code for reason in self.reasons))


@dataclass(frozen=True)
class Step:
    """The specialised path runs this batch, in the capture of `captured` requests with `tokens` query tokens each."""

    batch: Batch
    captured: int
    tokens: int


class PlanError(BackendError):
    """`latency_specialized` was asked for but cannot be kept; `refusal` lists every reason."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            "; ".join(map(str, refusal.reasons)),
            where="decode_backend = latency_specialized",
            expected="every decode and verify batch in scope to take the specialised path",
            next="remove the causes, or use decode_backend = auto",
        )
        self.refusal = refusal


def captured_requests(requests: int) -> int:
    """The smallest captured number of requests that holds `requests` (at most MAX_REQUESTS)."""
    return CAPTURED_REQUESTS[bisect_left(CAPTURED_REQUESTS, requests)]


def max_pages(state: DecodeState) -> int:
    """Block-table columns of a captured step: pages for the longest possible request, at most the whole pool."""
    return min(state.pages, -(-state.geometry.max_positions // state.page_size))


class Planner:
    """Checks batches against the conditions above.

    Args:
        mode: the switch.
        weights: the model.
        kernels: loaded kernels, or None.
        state: pools the step works on.
        layout: parallel layout.

    Raises:
        PlanError: mode is `latency_specialized` and some condition that batches in scope rely on does not hold.
    """

    def __init__(
        self, mode: Mode, weights: ModelWeights, kernels: KernelSet | None, state: DecodeState, layout: Layout
    ) -> None:
        self.kernels = kernels
        self.state = state
        self._weights = weights
        self._shapes: dict[tuple[int, int], tuple[RefusalReason, ...]] = {}
        self.static = (
            *_mode_reasons(mode, kernels, layout),
            *_geometry_reasons(weights, kernels, state),
            *_dtype_reasons(weights, state),
            *_missing_ops(self.program(1), kernels),
        )
        """Reasons that hold for every batch."""
        if mode == "latency_specialized" and (reasons := self._unmet()):
            raise PlanError(Refusal(reasons))

    def program(self, tokens: int) -> tuple[Site, ...]:
        """The step's sites for T = tokens."""
        return decode_program(self._weights.geometry, tokens, self._weights.expert_format)

    def plan(self, batch: Batch) -> Step | Refusal:
        """The step, or every reason against it."""
        reasons = [*self.static, *self._batch_reasons(batch)]
        tokens = batch.uniform_tokens
        if tokens is None or batch.requests > MAX_REQUESTS:
            return Refusal(tuple(reasons))
        captured = captured_requests(batch.requests)
        reasons += self._shape_reasons(captured, tokens)
        return Refusal(tuple(reasons)) if reasons else Step(batch, captured, tokens)

    def _batch_reasons(self, batch: Batch) -> Iterable[RefusalReason]:
        if not batch.pure_decode:
            chunks = batch.decode.count(False)
            yield RefusalReason("batch.not_decode", f"{chunks} prefill chunks", "batch.decode", "decode rows only")
        if batch.uniform_tokens is None:
            lens = sorted(set(batch.query_lens_list))
            rule = f"{batch.slots.shape[1]} query tokens (one per slot column) in every request"
            yield RefusalReason("batch.ragged", f"query lengths {lens}", "batch.query_lens", rule)
        if batch.requests > MAX_REQUESTS:
            rule = f"at most {MAX_REQUESTS}"
            yield RefusalReason("batch.too_many_requests", f"{batch.requests} requests", "batch", rule)
        if batch.block_table.shape[1] > max_pages(self.state):
            what = f"{batch.block_table.shape[1]} columns"
            rule = f"at most {max_pages(self.state)}"
            yield RefusalReason("batch.block_table", what, "batch.block_table", rule)

    def _shape_reasons(self, captured: int, tokens: int) -> tuple[RefusalReason, ...]:
        """Reasons that depend only on the captured shape; remembered, since a step must not look them up again."""
        key = (captured, tokens)
        if key not in self._shapes:
            self._shapes[key] = (
                *_token_reasons(tokens, self.state),
                *_kernel_reasons(self.program(tokens), self.kernels, captured * tokens),
            )
        return self._shapes[key]

    def _unmet(self) -> tuple[RefusalReason, ...]:
        """Reasons against any uniform decode or verify batch that the state can hold, each once."""
        tokens = range(1, min(MAX_TOKENS, self.state.max_tokens) + 1)
        shapes = (reason for t in tokens for size in CAPTURED_REQUESTS for reason in self._shape_reasons(size, t))
        return tuple(dict.fromkeys((*self.static, *shapes)))


def _mode_reasons(mode: Mode, kernels: KernelSet | None, layout: Layout) -> Iterable[RefusalReason]:
    if mode == "off":
        yield RefusalReason("mode.off", "the switch is off", "decode_backend", "auto or latency_specialized")
    if best_arch(ARCHS) is None:
        yield RefusalReason("arch.unsupported", "the host runs none of them", "host CPU", f"one of {', '.join(ARCHS)}")
    if kernels is None:
        yield RefusalReason("kernels.none", "no kernels are loaded", "kernels", "a KernelSet for this host")
    if layout != Layout():
        yield RefusalReason("layout.unsupported", f"TP {layout.tp}, DCP {layout.dcp}", "layout", "TP 1, DCP 1 on cpu")


def _geometry_reasons(weights: ModelWeights, kernels: KernelSet | None, state: DecodeState) -> Iterable[RefusalReason]:
    wanted = weights.geometry
    made_for = {"state": state.geometry} if kernels is None else {"kernels": kernels.geometry, "state": state.geometry}
    for name, found in made_for.items():
        if found != wanted:
            rule = f"the weights' geometry {wanted.name}, every field equal"
            yield RefusalReason("geometry.mismatch", f"made for {found.name}", name, rule)


def _dtype_reasons(weights: ModelWeights, state: DecodeState) -> Iterable[RefusalReason]:
    pools = state.tensors()
    for site in decode_program(weights.geometry, 1, weights.expert_format):
        constants = weights.constants(site.layer, site.name)
        for spec in OPS[site.op].tensors:
            tensor = (
                constants.get(spec.name) if spec.role == "constant" else pools.get(site.bindings.get(spec.name, ""))
            )
            if tensor is not None and tensor.dtype != DTYPES[spec.dtype]:
                where = f"{site.key}.{spec.name}"
                yield RefusalReason("dtype.mismatch", f"dtype {tensor.dtype}", where, str(DTYPES[spec.dtype]))


def _missing_ops(program: Iterable[Site], kernels: KernelSet | None) -> Iterable[RefusalReason]:
    for op in dict.fromkeys(site.op for site in program):
        if kernels is not None and op not in kernels:
            yield RefusalReason("op.missing", "no specialised kernel", f"op {op}", "an artifact in the kernel set")


def _token_reasons(tokens: int, state: DecodeState) -> Iterable[RefusalReason]:
    if tokens > MAX_TOKENS:
        what = f"{tokens} query tokens per request"
        yield RefusalReason("batch.too_many_tokens", what, "batch.query_lens", f"at most {MAX_TOKENS}")
    if tokens > state.max_tokens:
        rule = f"{state.taps + tokens - state.max_tokens} taps for {tokens} query tokens"
        yield RefusalReason("state.too_few_taps", f"{state.taps} taps", "state.conv_state", rule)


def _kernel_reasons(program: Iterable[Site], kernels: KernelSet | None, rows: int) -> Iterable[RefusalReason]:
    """Schedules and supported attribute values of the kernels that exist, each finding once."""
    found: dict[RefusalReason, None] = {}
    for site in program:
        kernel = kernels.get(site.op) if kernels is not None else None
        if kernel is None:
            continue
        where = f"op {site.op}"
        if kernel.choose(rows) is None:
            last = kernel.schedule.buckets[-1].max_rows if kernel.schedule else 0
            rule = f"a bucket with max_rows >= {rows} (largest is {last})"
            found[RefusalReason("op.no_schedule", f"no schedule for {rows} rows", where, rule)] = None
        for attr, values in kernel.supports.items():
            if attr in site.attrs and site.attrs[attr] not in values:
                what = f"{attr} = {site.attrs[attr]}"
                found[RefusalReason("op.unsupported", what, where, f"{attr} in {list(values)}")] = None
    return found
