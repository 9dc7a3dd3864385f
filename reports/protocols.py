"""Which function decides which gate from its raw lines.

The decisions live in `verify.protocol`, one module per gate, each a pure function from raw lines to a `Decision`. They
are the only part of `verify` that reports use: a stranger re-decides with them, without the harness, a compiler or a
model. Modules are found by name, so that a checkout that lacks one can say so instead of failing as a whole.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from harness.records import GateName
from verify.protocol.decision import Decision

__all__ = ["MODULES", "UnknownProtocolError", "implementation", "redecide"]

MODULES: dict[GateName, str] = {
    "scope": "verify.protocol.scope",
    "build": "verify.protocol.build",
    "audit": "verify.protocol.audit",
    "kernels": "verify.protocol.kernels",
    "path": "verify.protocol.path",
    "features": "verify.protocol.features",
    "evals": "verify.protocol.evals",
    "perf": "verify.protocol.perf",
}
"""Gate to the module whose `decide` judges its raw lines."""


class UnknownProtocolError(LookupError):
    """This checkout cannot decide by that protocol; the message says what it has instead."""


def implementation(gate: GateName, protocol_id: str) -> ModuleType:
    """The decision module that implements a protocol.

    Raises:
        UnknownProtocolError: this checkout has no such module, or one of another version.
    """
    name = MODULES[gate]
    if importlib.util.find_spec(name) is None:
        raise UnknownProtocolError(f"this checkout has no {name}")
    module = importlib.import_module(name)
    known = getattr(module, "PROTOCOL_IDS", (module.PROTOCOL_ID,))
    if protocol_id not in known:
        raise UnknownProtocolError(f"decided by protocol {protocol_id}; this checkout implements {', '.join(known)}")
    return module


def redecide(gate: GateName, protocol_id: str, lines: Sequence[Mapping[str, Any]]) -> Decision:
    """Decide a gate again from its raw lines.

    Raises:
        UnknownProtocolError: the lines were written under a protocol that this checkout does not implement.
        Exception: whatever the decision function raises on lines that no gate writes; callers treat it as a refusal.
    """
    decision: Decision = implementation(gate, protocol_id).decide(lines)
    return decision
