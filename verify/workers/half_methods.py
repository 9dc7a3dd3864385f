"""Methods that replay captured half-layers on a GPU, over an image of device memory in the shared buffer.

They answer what was captured, what the ledger counted, and which kernels the profiler saw; results lie in the image,
where the evaluator compares them. What touches the GPU is behind `HalfCard`, so that the sequence can be tried without
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from k3_backend.geometry import Geometry, LayerKind, geometry
from k3_backend.model.program import Site
from verify.workers.half_layer import half_layer
from verify.workers.main import Method, Session
from verify.workers.shared import View

__all__ = ["METHODS", "HalfCard", "install"]

_CARD, _SHAPES = "half.device", "half.geometry"


class HalfCard(Protocol):
    """A GPU with an arm's kernels loaded."""

    def load(self, folders: Mapping[str, Path], schedules: Path, g: Geometry, arch: str, nbytes: int) -> dict[str, Any]:
        """Load every op's images and reserve device memory.

        Returns:
            `images`: op to image to sha256 of the bytes handed to the driver; `device`: facts for the raw line;
            `profiler`: `obstacle`, why kernels cannot be counted, or null, and `ledger`, the symbol of the ledger's
            kernel, or null.
        """
        ...

    def bind(
        self,
        program: tuple[Site, ...],
        views: Mapping[str, View],
        image: npt.NDArray[np.uint8],
        mode: str,
        spoil: Sequence[str],
    ) -> list[dict[str, Any]]:
        """Capture a program over device memory with the image's contents, on which every site runs once before.

        Returns:
            How each site was captured (`SiteChoice.record`).
        """
        ...

    def run(self, image: npt.NDArray[np.uint8], replays: int, *, profile: bool) -> dict[str, Any]:
        """Replay the captured program on the image's contents, results into it: `ledger` and `kernels`."""
        ...


def install(session: Session, card: HalfCard) -> None:
    """Use another card than the real one: for tests without a GPU."""
    session.areas[_CARD] = card


def load(session: Session, *, arch: str, geometry_name: str, nbytes: int) -> dict[str, Any]:
    """Load the arm's artifacts of one geometry.

    Args:
        session: the worker's.
        arch: architecture of the artifacts.
        geometry_name: their dimensions.
        nbytes: device memory to reserve, the size of the largest image.
    """
    if session.schedules is None:
        raise ValueError("this arm has no schedules")
    if _CARD not in session.areas:
        from verify.workers.cuda_half_card import CudaHalfCard

        session.areas[_CARD] = CudaHalfCard()
    g = session.areas[_SHAPES] = geometry(geometry_name)
    return dict(_card(session).load(session.artifacts, session.schedules, g, arch, nbytes))


def bind(
    session: Session,
    *,
    half: LayerKind,
    tokens: int,
    mode: str,
    views: Mapping[str, Any],
    used: int,
    spoil: Sequence[str] = (),
) -> dict[str, Any]:
    """Capture a half-layer over the image's places: `sites`, how each was captured.

    Args:
        session: with an arm loaded.
        half: `kda` or `mla`.
        tokens: T, query tokens per request.
        mode: `auto`, or `off` for the standard path.
        views: every buffer, state, batch field and weight (`half_layer.constant_name`) by name.
        used: bytes of the image.
        spoil: ops whose results are made deliberately wrong right after they ran, in every replay.
    """
    if mode not in ("auto", "off"):
        raise ValueError(f"mode {mode!r}; expected auto or off")
    program = half_layer(session.areas[_SHAPES], half, tokens)
    placed = {name: View.from_json(view) for name, view in views.items()}
    return {"sites": _card(session).bind(program, placed, session.buffer[:used], mode, spoil)}


def run(session: Session, *, used: int, replays: int, profile: bool) -> dict[str, Any]:
    """Replay the captured half-layer on the first `used` bytes of the image.

    Returns:
        `ledger`: counts `before` and `after`; `kernels`: symbol to count, or null without `profile`.
    """
    return _card(session).run(session.buffer[:used], replays, profile=profile)


def _card(session: Session) -> HalfCard:
    card: HalfCard = session.areas[_CARD]
    return card


METHODS: dict[str, Method] = {"half.load": load, "half.bind": bind, "half.run": run}
