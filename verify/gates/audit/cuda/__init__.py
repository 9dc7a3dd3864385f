"""Reads compiled CUDA kernels on any machine: which instruction touches whose memory, in which order, with what.

`inspect_cubin` and `inspect_file` return facts; `verify.protocol.audit_cuda` judges them. Nothing is executed. What the
rules see and what they cannot see is in docs/audit.md.
"""

from verify.gates.audit.cuda.facts import inspect_cubin, inspect_file
from verify.gates.audit.cuda.records import Claims, Facts, Param, Role

__all__ = ["Claims", "Facts", "Param", "Role", "inspect_cubin", "inspect_file"]
