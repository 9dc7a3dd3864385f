"""The worker's side, in this process and on trusted kernels: serving, binding, replaying, spoiling, stepping."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured_fixtures import PICO, build_faults

from k3_backend.aot.manifest import Artifact
from k3_backend.aot.schedule import ScheduleError
from k3_backend.ops.registry import reference
from verify.evaluator.inputs import Call, Case, make
from verify.evaluator.steps import batch_json, draw_chain, standard_steps
from verify.evaluator.worker import SharedBuffer
from verify.workers import main, op_methods, path_methods, tune_methods
from verify.workers.arm import kernels, spoil, unspoil
from verify.workers.main import Session
from verify.workers.path_model import path_model
from verify.workers.protocol import Channel, ChannelClosed, ChannelTimeout, ProtocolError
from verify.workers.shared import View
from verify.workers.stress import Jitter

Built = tuple[dict[str, Artifact], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_faults(tmp_path_factory.mktemp("methods"))


@pytest.fixture(scope="module")
def buffer() -> Iterator[SharedBuffer]:
    shared = SharedBuffer(1 << 27)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def session(built: Built, buffer: SharedBuffer) -> Session:
    artifacts = {op: artifact.path for op, artifact in built[0].items()}
    return Session("specialized", artifacts, built[1], threads=2, buffer=buffer.bytes)


def place(buffer: SharedBuffer, call: Call) -> dict[str, Any]:
    """A call's tensors in the buffer; outputs are zero."""
    buffer.reset()
    views: dict[str, Any] = {}
    for spec in call.spec.tensors:
        dtype, shape = call.outputs.get(spec.name, (spec.dtype, ()))
        tensor = call.tensors.get(spec.name)
        if tensor is not None:
            shape = tuple(tensor.shape)
        view = buffer.view(dtype, shape)
        if tensor is None:
            buffer.array(view)[...] = 0
        else:
            bits = tensor.view(torch.int16).numpy().view(np.uint16) if dtype == "bf16" else tensor.numpy()
            buffer.array(view)[...] = bits
        views[spec.name] = view.to_json()
    return views


def result(buffer: SharedBuffer, views: dict[str, Any], name: str = "out") -> torch.Tensor:
    bits = buffer.array(View.from_json(views[name]))
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


CALL = make(Case("kda_decode", "gaussian", 2, 1, 2, "5eed", PICO.name))


def bound(session: Session, buffer: SharedBuffer, **changed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    views = place(buffer, CALL)
    wanted = {"op": "kda_decode", "tensors": views, "attrs": dict(CALL.attrs), "rows": 2, "threads": 2, **changed}
    return op_methods.bind(session, **wanted), views


def test_a_bound_call_computes_and_sees_new_contents(session: Session, buffer: SharedBuffer) -> None:
    """A replay on stale addresses, or a call bound to other tensors than named."""
    answer, views = bound(session, buffer)
    assert answer["tunables"] == {"fault": 0}
    assert op_methods.replay(session, handle=answer["handle"], times=1, scratch=0xFF) == {"denormals": True}
    want = reference("kda_decode")(CALL.tensors, CALL.attrs)["out"]
    assert torch.allclose(result(buffer, views).double(), want, rtol=0.02, atol=0.02)
    before = result(buffer, views)
    buffer.array(View.from_json(views["proj"]))[...] ^= 0x8000
    op_methods.replay(session, handle=answer["handle"])
    assert not torch.equal(result(buffer, views), before)
    assert op_methods.release(session)["released"] >= 1


def test_calls_that_no_planner_would_launch_are_refused(session: Session, buffer: SharedBuffer) -> None:
    """A call without a schedule bucket or with an unsupported attribute that runs anyway."""
    assert "no schedule bucket for 999 rows" in bound(session, buffer, rows=999)[0]["refused"]
    loaded = kernels(session)["kda_decode"]
    supports, loaded.supports = loaded.supports, {"eps": (1,)}
    try:
        assert "the kernel supports [1]" in bound(session, buffer)[0]["refused"]
    finally:
        loaded.supports = supports


def test_a_spoiled_op_is_wrong_until_it_is_honest_again(session: Session, buffer: SharedBuffer) -> None:
    """A watermark that changes nothing, or calls bound earlier, or that cannot be taken off."""
    honest, views = bound(session, buffer)
    op_methods.replay(session, handle=honest["handle"])
    right = result(buffer, views)
    op_methods.spoil(session, op="kda_decode", on=True)
    marked, views = bound(session, buffer)
    op_methods.replay(session, handle=marked["handle"])
    op_methods.spoil(session, op="kda_decode", on=False)
    place(buffer, CALL)
    op_methods.replay(session, handle=marked["handle"])
    wrong = result(buffer, views)
    assert torch.equal(wrong.view(-1)[1::2], right.view(-1)[1::2])
    assert torch.equal(wrong.view(-1)[::2], -right.view(-1)[::2])
    place(buffer, CALL)
    op_methods.replay(session, handle=honest["handle"])
    assert torch.equal(result(buffer, views), right)


def test_late_workers_change_when_not_what(session: Session, buffer: SharedBuffer) -> None:
    """Delays that are never inserted, or that change what a correct kernel computes."""
    plain, views = bound(session, buffer)
    op_methods.replay(session, handle=plain["handle"])
    right = result(buffer, views)
    late, views = bound(session, buffer, jitter=7)
    op_methods.replay(session, handle=late["handle"])
    assert torch.equal(result(buffer, views), right)
    assert session.areas["op"].jitters[2].regions > 0


def test_delays_reach_barriers(session: Session) -> None:
    """A barrier of the launch context that is not delayed."""
    pool = kernels(session).runtime.pool(1)
    jitter = Jitter(pool, 3)
    before = jitter._random.getstate()
    jitter._barrier(pool.context)
    assert jitter._random.getstate() != before
    pool.close()


def test_arms_without_kernels_say_so(buffer: SharedBuffer) -> None:
    """A standard arm that loads something, or an arm without its launcher."""
    with pytest.raises(ValueError, match="no specialised kernels"):
        op_methods.load(Session("standard", {}, None, 1, buffer.bytes))


def test_steps_run_on_the_evaluators_pools(session: Session, buffer: SharedBuffer) -> None:
    """Steps on pools of the worker's own, where nobody looks."""
    path_methods.open_model(session, geometry_name=PICO.name, seed=4)
    chain = draw_chain(PICO, requests=2, tokens=1, context=5, steps=1, seed=9)
    buffer.reset()
    pools = {}
    for name, pool in chain.state.tensors().items():
        view = buffer.view("bf16" if pool.dtype == torch.bfloat16 else "f32", tuple(pool.shape))
        bits = pool.view(torch.int16).numpy().view(np.uint16) if pool.dtype == torch.bfloat16 else pool.numpy()
        buffer.array(view)[...] = bits
        pools[name] = view
    hidden = buffer.view("bf16", (2, PICO.hidden))
    views = {name: view.to_json() for name, view in pools.items()}
    path_methods.bind(session, mode="off", pools=views, threads=1, spoil=["kda_decode"])
    answer = path_methods.step(session, batch=batch_json(chain.batches[0]), hidden=hidden.to_json())
    assert "mode.off" in {code for code, *_ in answer["refusal"]}
    want = standard_steps(path_model(PICO.name, 4), chain)[0]
    assert torch.equal(result(buffer, {"out": hidden.to_json()}), want)
    slot = int(chain.batches[0].slots[0, 0])
    assert not np.array_equal(buffer.array(pools["state.0"])[slot], chain.state.state[0][slot].numpy())
    assert path_methods.ledger(session)["steps"] == {"specialized": 0, "standard": 1}
    path_methods.bind(session, mode="off", pools=views, threads=1)
    assert session.areas["path"].spoiled == ()


def test_spoiling_twice_still_ends_honest(session: Session) -> None:
    """A wrapper around a wrapper: signs flipped back, and the honest entry lost."""
    honest = kernels(session)["kda_decode"].entry
    spoil(session, "kda_decode")
    spoil(session, "kda_decode")
    assert kernels(session)["kda_decode"].entry != honest
    unspoil(session, "kda_decode")
    assert kernels(session)["kda_decode"].entry == honest


# --- serving ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(session: Session) -> Iterator[Channel]:
    """The evaluator's end of a channel on which this process serves."""
    ours, theirs = socket.socketpair()
    server = threading.Thread(target=main.serve, args=(Channel(theirs, "n0"), session))
    server.start()
    channel = Channel(ours, "n0")
    yield channel
    channel.close()
    server.join(5)
    assert not server.is_alive()


def test_requests_are_answered_in_order(served: Channel) -> None:
    """Answers without their request's id, or a method of one area found in another."""
    for number in range(3):
        served.send({"id": number, "method": "op.ping", "params": {"n": number}})
    for number in range(3):
        answer = served.receive(5)
        assert (answer["id"], answer["result"]["echo"]) == (number, {"n": number})


@pytest.mark.parametrize(
    ("method", "params", "kind"),
    [
        ("op.nothing", {}, "LookupError"),
        ("nowhere.ping", {}, "LookupError"),
        ("op.ping", [1], "TypeError"),
        ("op.bind", {}, "TypeError"),
    ],
)
def test_bad_requests_are_errors_with_a_traceback(served: Channel, method: str, params: Any, kind: str) -> None:
    """A request that ends the server, or an error without its place."""
    served.send({"id": 1, "method": method, "params": params})
    error = served.receive(5)["error"]
    assert error["type"] == kind
    assert "Traceback" in error["traceback"]
    served.send({"id": 2, "method": "op.ping", "params": {}})
    assert served.receive(5)["id"] == 2


def test_channels_refuse_what_does_not_belong() -> None:
    """A message that is believed although it is foreign, broken, or not a number that JSON has."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "right")
    for raw in (b'{"nonce":"wrong"}\n', b"[]\n", b"PASS\n", b"\xff\n", b'{"id":1}\n'):
        theirs.sendall(raw)
        with pytest.raises(ProtocolError):
            channel.receive(1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        channel.send({"x": float("nan")})
    with pytest.raises(ChannelTimeout):
        channel.receive(0.01)
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.receive(1)
    with pytest.raises(ChannelClosed):
        channel.send({"x": 1})


def test_the_nonce_comes_first() -> None:
    """A channel that starts with something else is served."""
    ours, theirs = socket.socketpair()
    ours.sendall(b"abc123\nrest")
    assert main._read_nonce(theirs) == "abc123"
    assert theirs.recv(16) == b"rest"
    ours.close()
    with pytest.raises(SystemExit, match="nonce"):
        main._read_nonce(theirs)


def test_points_are_timed_on_the_calls_that_were_asked_for(session: Session, buffer: SharedBuffer) -> None:
    """The tuner goes by times of nothing, of other calls, or in another order than its points."""
    views = place(buffer, CALL)
    asked = {"op": "kda_decode", "rows": 2, "sets": [views], "attrs": dict(CALL.attrs), "turns": 2}
    found = tune_methods.points(session, tunables=[{"fault": 0}, {"fault": 0}], **asked)
    assert len(found["seconds"]) == 2
    assert all(1e-6 < seconds < 1.0 for seconds in found["seconds"])
    want = reference("kda_decode")(CALL.tensors, CALL.attrs)["state"]
    assert not torch.equal(torch.from_numpy(buffer.array(View.from_json(views["state"]))).double(), want), "many calls"
    with pytest.raises(ScheduleError):
        tune_methods.points(session, tunables=[{"fault": 10_000}], **asked)
