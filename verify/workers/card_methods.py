"""Methods that run single ops on a GPU, over an image of device memory in the shared buffer.

The evaluator writes the image and says where its tensors lie; a run makes the image the device memory's contents,
launches the bound call, and copies the memory back. Which values the tunables take follows from the arm's schedule, as
in a planned step. What touches the GPU is behind `Card`, so that the sequence can be tried without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from k3_backend.aot.arguments import BindError, call_sizes
from k3_backend.aot.cuda.choices import Choices, Declined
from k3_backend.aot.manifest import file_digest
from k3_backend.geometry import Geometry, geometry
from k3_backend.ops import ALL_OPS
from k3_backend.ops.interface import OpSpec
from verify.workers.card import MODES, Card, Plan
from verify.workers.main import Method, Session
from verify.workers.shared import View

__all__ = ["METHODS", "install"]


@dataclass
class _Area:
    card: Card
    spec: OpSpec
    geometry: Geometry
    choices: Choices
    plans: dict[int, Plan] = field(default_factory=dict)


def install(session: Session, card: Card) -> None:
    """Use this card for the session; the default is `cuda_card.CudaCard`, made on first use."""
    session.areas["card.device"] = card


def load(
    session: Session, *, op: str, arch: str, geometry_name: str, nbytes: int, separate: bool = False
) -> dict[str, Any]:
    """Load one op's kernels; says which bytes were handed to the driver.

    Args:
        session: the worker's; its artifacts hold the op's folder.
        op: op name.
        arch: names the schedules' family.
        geometry_name: what the artifact was built for.
        nbytes: largest image of a call.
        separate: give every tensor an allocation of its own, for memory checkers.
    """
    folder, spec, g = session.artifacts[op], ALL_OPS[op], geometry(geometry_name)
    if session.schedules is None:
        raise ValueError("this arm has no schedules")
    choices = Choices.read(folder, session.schedules, spec, g, arch)
    digests = {name: file_digest(folder / name) for name in choices.descriptor.images()}
    card = session.areas.get("card.device")
    if card is None:
        from verify.workers.cuda_card import CudaCard
        from verify.workers.separate_card import SeparateCard

        card = session.areas["card.device"] = SeparateCard() if separate else CudaCard()
    facts = card.load(folder, spec, g, nbytes)
    session.areas["card"] = _Area(card, spec, g, choices)
    return {"images": digests, "device": facts}


def begin(
    session: Session, *, layout: Mapping[str, Any], attrs: Mapping[str, int | float], rows: int
) -> dict[str, Any]:
    """Choose tunables for a call and say which workspaces it needs; or `refused`, why nobody would launch it."""
    area = _area(session)
    views = {name: View.from_json(view) for name, view in layout.items()}
    chosen = area.choices.tunables(rows, _sizes(area, views), attrs)
    if isinstance(chosen, Declined):
        return {"refused": chosen.message}
    plan = Plan(area.spec, area.geometry, dict(attrs), chosen)
    try:
        scratch = area.card.scratch(plan, views)
    except BindError as error:
        return {"refused": str(error)}
    area.plans[len(area.plans)] = plan
    return {"plan": len(area.plans) - 1, "tunables": chosen, "scratch": [list(entry) for entry in scratch]}


def bind(session: Session, *, plan: int, views: Mapping[str, Any], scratch: Mapping[str, Any]) -> dict[str, Any]:
    """Pack a planned call over the image's places."""
    area = _area(session)
    placed = {name: View.from_json(view) for name, view in views.items()}
    work = {name: View.from_json(view) for name, view in scratch.items()}
    return {"handle": area.card.bind(area.plans[plan], placed, work)}


def spoil(session: Session) -> dict[str, Any]:
    """Make results deliberately wrong from now on: what is compared must come from this op (*watermark*)."""
    _area(session).card.spoil()
    return {}


def run(session: Session, *, handle: int, mode: str, used: int, delay_ns: int = 0) -> dict[str, Any]:
    """Run a bound call on the first `used` bytes of the image."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}; expected one of {', '.join(MODES)}")
    _area(session).card.run(handle, mode, session.buffer[:used], delay_ns)
    return {}


def repeat(session: Session, *, handle: int, used: int, views: Sequence[Any], at: int, count: int) -> dict[str, Any]:
    """Run `count` times; the bytes of `views` after each run go to the shared buffer from offset `at` on."""
    placed = [View.from_json(view) for view in views]
    size = sum(view.nbytes for view in placed)
    out = session.buffer[at : at + count * size]
    if out.nbytes != count * size or at < used:
        raise ValueError(f"{count} results of {size} bytes do not fit behind offset {at}")
    _area(session).card.repeat(handle, session.buffer[:used], placed, out, count)
    return {}


def _area(session: Session) -> _Area:
    area = session.areas["card"]
    assert isinstance(area, _Area)
    return area


def _sizes(area: _Area, views: Mapping[str, View]) -> dict[str, int]:
    """Symbolic sizes of a call from shapes alone."""
    import torch

    shapes: dict[str, torch.Tensor | None] = {
        name: torch.empty(view.shape, device="meta") for name, view in views.items()
    }
    return call_sizes(area.spec, area.geometry, shapes)


METHODS: dict[str, Method] = {
    "card.load": load,
    "card.begin": begin,
    "card.bind": bind,
    "card.spoil": spoil,
    "card.run": run,
    "card.repeat": repeat,
}
