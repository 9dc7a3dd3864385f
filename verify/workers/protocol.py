"""Framing of the control channel between evaluator and worker: one JSON object per line over a socket pair.

Both ends use it. It bounds message sizes and refuses records that do not carry the run's nonce, so that neither a
stray descriptor nor a stale message can pass for an answer. It carries no tensor data: bulk data live in the shared
buffer and messages only describe where (`verify.workers.shared`).
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["MAX_MESSAGE_BYTES", "Channel", "ChannelClosed", "ChannelTimeout", "ProtocolError"]

MAX_MESSAGE_BYTES = 16 << 20
"""Largest accepted line. The largest honest message is a ledger or a list of launches, far below this."""


class ProtocolError(Exception):
    """A message that the other end must not have sent: too long, not an object, or without this run's nonce."""


class ChannelClosed(Exception):  # noqa: N818 - an event, not a mistake
    """The other end is gone."""


class ChannelTimeout(Exception):  # noqa: N818 - an event, not a mistake
    """No complete message arrived before the deadline."""


class Channel:
    """One end of the control channel.

    Args:
        sock: connected stream socket; owned by the channel from now on.
        nonce: secret of this run; every message in either direction carries it.
    """

    def __init__(self, sock: socket.socket, nonce: str) -> None:
        self._sock = sock
        self._nonce = nonce
        self._pending = b""

    def fileno(self) -> int:
        """The socket's descriptor, for `select`."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket; the other end sees `ChannelClosed`."""
        self._sock.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises:
            ProtocolError: it would exceed `MAX_MESSAGE_BYTES`.
            ChannelClosed: the other end is gone.
            ValueError: it holds a NaN or an infinity, which JSON cannot carry.
        """
        line = json.dumps({**message, "nonce": self._nonce}, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {len(line)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        try:
            self._sock.sendall(line)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the other end closed the control channel") from error

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for one message and return it without its nonce.

        Args:
            timeout_s: seconds until `ChannelTimeout`; None waits for ever.

        Raises:
            ChannelClosed: end of file before a complete line.
            ChannelTimeout: the deadline passed.
            ProtocolError: line too long, not a JSON object, or another nonce.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if len(self._pending) > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"line longer than {MAX_MESSAGE_BYTES} bytes")
            self._wait(deadline)
            try:
                chunk = self._sock.recv(1 << 20)
            except ConnectionResetError as error:
                raise ChannelClosed("the other end closed the control channel") from error
            if not chunk:
                raise ChannelClosed("the other end closed the control channel")
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return self._decode(line)

    def _wait(self, deadline: float | None) -> None:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise ChannelTimeout("no message before the deadline")
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(None if remaining is None else remaining * 1000):
            raise ChannelTimeout("no message before the deadline")

    def _decode(self, line: bytes) -> dict[str, Any]:
        if len(line) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"line of {len(line)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"line is not JSON: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"message is a {type(message).__name__}; expected an object")
        if message.pop("nonce", None) != self._nonce:
            raise ProtocolError("message without this run's nonce")
        return message
