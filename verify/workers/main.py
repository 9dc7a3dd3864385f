"""Entry point of a worker process: reads requests from the control channel, runs a method, answers.

Started by `verify.evaluator.worker` inside the sandbox. Methods are named `<area>.<name>` and looked up in the area's
table on first use, so that a worker that only runs single ops never pays for importing torch. It decides nothing and
prints nothing of meaning: stdout and stderr are a log.
"""

from __future__ import annotations

import importlib
import mmap
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verify.workers.protocol import Channel, ChannelClosed

__all__ = ["Method", "Session", "main", "serve"]


@dataclass
class Session:
    """What a method may use: the arm, the shared buffer, and a place for what its area keeps between calls."""

    kind: str
    """`standard` or `specialized`."""
    artifacts: dict[str, Path]
    """op name (and `runtime`) -> folder of its built artifact; empty for the standard arm."""
    schedules: Path | None
    """Folder of the arm's schedules: the one that holds `cpu/`."""
    threads: int
    """Worker threads that kernels and torch may use."""
    buffer: npt.NDArray[np.uint8]
    """The shared buffer, u8 [bytes]."""
    areas: dict[str, Any] = field(default_factory=dict)
    """area name -> that area's own state."""


Method = Callable[..., dict[str, Any]]
"""`method(session, **params) -> JSON object`."""

_AREAS = {
    "op": "verify.workers.op_methods",
    "path": "verify.workers.path_methods",
    "step": "verify.workers.step_methods",
    "engine": "verify.workers.engine_methods",
    "tune": "verify.workers.tune_methods",
    "card": "verify.workers.card_methods",
    "half": "verify.workers.half_methods",
    "chain": "verify.workers.chain_methods",
    "peers": "verify.workers.peer_methods",
}


def main() -> None:
    """Serve until the evaluator closes the channel. argv: base tree, control descriptor, buffer descriptor."""
    base_tree, control, memory = Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3])
    if base_tree not in Path(__file__).resolve().parents:
        raise SystemExit(f"worker code comes from {__file__}; expected it under {base_tree}")
    hello_channel = socket.socket(fileno=control)
    nonce = _read_nonce(hello_channel)
    channel = Channel(hello_channel, nonce)
    hello = channel.receive()
    size = os.fstat(memory).st_size
    buffer = np.frombuffer(mmap.mmap(memory, size), dtype=np.uint8)
    os.close(memory)
    session = Session(
        kind=str(hello["kind"]),
        artifacts={op: Path(path) for op, path in hello["artifacts"].items()},
        schedules=None if hello["schedules"] is None else Path(hello["schedules"]),
        threads=int(hello["threads"]),
        buffer=buffer,
    )
    channel.send({"id": 0, "result": {"pid": os.getpid()}})
    serve(channel, session)


def serve(channel: Channel, session: Session) -> None:
    """Answer requests one by one. A Python exception of a method becomes an `error` answer; the worker goes on."""
    while True:
        try:
            request = channel.receive()
        except ChannelClosed:
            return
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            answer["result"] = _method(str(request["method"]))(session, **_params(request))
        except Exception as error:  # every failure of a method is the evaluator's to judge
            answer["error"] = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        channel.send(answer)


def _params(request: Mapping[str, Any]) -> dict[str, Any]:
    params = request["params"]
    if not isinstance(params, dict):
        raise TypeError(f"params is a {type(params).__name__}; expected an object")
    return params


def _method(name: str) -> Method:
    area = name.partition(".")[0]
    if area not in _AREAS:
        raise LookupError(f"unknown method {name!r}; areas: {', '.join(_AREAS)}")
    methods: dict[str, Method] = importlib.import_module(_AREAS[area]).METHODS
    if name not in methods:
        raise LookupError(f"unknown method {name!r}; known: {', '.join(sorted(methods))}")
    return methods[name]


def _read_nonce(sock: socket.socket) -> str:
    """The first line of the channel is the nonce itself; one byte at a time, so that nothing after it is consumed."""
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > 256:
            raise SystemExit("the control channel did not start with a nonce")
        line += byte
    return line[:-1].decode("ascii")


if __name__ == "__main__":
    main()
