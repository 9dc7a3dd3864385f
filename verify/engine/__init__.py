"""A small serving engine for the reduced geometries: continuous batching, chunked prefill, paged cache, state slots,
sampling, n-gram drafted speculation. It stands in for the serving engine around a decode backend, so that features and
model evals can run both arms on a CPU. It is shared, protected code: a candidate supplies kernels, never any of this.
"""

from verify.engine.engine import Engine, EngineConfig
from verify.engine.request import Completion, FinishReason, Request, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "Request", "SamplingParams"]
