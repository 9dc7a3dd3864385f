"""The ways in which a worker does not answer as asked, each with the facts that a raw line keeps."""

from __future__ import annotations

from typing import Any, ClassVar

from verify.protocol.decision import Finding

__all__ = ["WorkerCrashed", "WorkerError", "WorkerFailure", "WorkerProtocolError", "WorkerTimeout"]


class WorkerFailure(Exception):  # noqa: N818 - error classes are named for the finding
    """A worker did not answer as asked. Subclasses say how; `record` is the raw line's account of it."""

    kind: ClassVar[str]

    def __init__(self, message: str, *, method: str, log: str = "", detail: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.method = method
        """The method that was running."""
        self.log = log
        """Last bytes of the worker's stdout and stderr: evidence for people, never parsed."""
        self.detail = detail or {}

    def record(self) -> dict[str, Any]:
        """JSON for a raw line."""
        return {"failure": self.kind, "method": self.method, "message": str(self), "log": self.log, **self.detail}

    def finding(self, gate: str, *, where: str, next: str) -> Finding:  # noqa: A002 - the field's name everywhere
        """The failure as `<gate>.<kind>`."""
        return Finding(
            f"{gate}.{self.kind}", str(self), where, "the call returns within its deadline, the process lives on", next
        )


class WorkerCrashed(WorkerFailure):
    """The process ended, whatever its exit status: success is an answer, never an exit code."""

    kind = "crash"


class WorkerTimeout(WorkerFailure):
    """No answer before the deadline; the process tree was killed."""

    kind = "timeout"


class WorkerProtocolError(WorkerFailure):
    """A message that trusted worker code never sends; the process tree was killed."""

    kind = "protocol"


class WorkerError(WorkerFailure):
    """The method raised in the worker, for example because a kernel returned an error. The worker lives on."""

    kind = "error"
