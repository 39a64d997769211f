"""A replica of torchft recovers through a compressed state: over HTTP, without unpickling, within bounds."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shrinkpoint.errors import CorruptError, FormatError, MembershipError, PolicyError, StateError, TruncatedError

pytest.importorskip("torchft")

from shrinkpoint.train.torchft import CompressedTransport

SECONDS = timedelta(seconds=30)


@pytest.fixture
def transports() -> Iterator[Callable[..., CompressedTransport]]:
    made = []

    def make(**settings: Any) -> CompressedTransport:
        made.append(CompressedTransport(SECONDS, **settings))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()
        transport._server.server_close()


def trained_state(steps: int = 30) -> dict[str, Any]:
    """As torchft's Manager gives it to its transport."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(64, 64)
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    outer.step()
    user = {"model": model.state_dict(), "inner": optimizer.state_dict(), "outer": outer.state_dict()}
    return {"user": user, "torchft": {"step": 7, "batches_committed": 14}}


def leaves(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        return [leaf for key in nest for leaf in [key, *leaves(nest[key])]]
    return [leaf for member in nest for leaf in leaves(member)] if isinstance(nest, list | tuple) else [nest]


def assert_same(first: Any, second: Any) -> None:
    for one, other in zip(leaves(first), leaves(second), strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape
            one, other = (x.contiguous().view(-1).view(torch.uint8).tolist() for x in (one, other))
        assert one == other


def test_a_state_arrives_bit_for_bit(transports):
    state = trained_state()
    state["user"]["odd"] = {"nan": torch.tensor([float("nan"), -0.0]), "half": torch.ones(3, 2).bfloat16().t(), 5: None}
    sender, receiver = transports(), transports()
    for step in (7, 8):
        sender.send_checkpoint([1], step, state, SECONDS)
        assert_same(receiver.recv_checkpoint(0, sender.metadata(), step, SECONDS), state)
        sender.disallow_checkpoint()


def test_coded_moments_leave_all_else_exact_and_take_fewer_bytes(transports):
    state, sizes = trained_state(), {}
    for keys in ((), ("inner",)):
        sender = transports(own_moments=keys)
        sender.send_checkpoint([1], 7, state, SECONDS)
        sizes[keys] = len(sender.find_file("/checkpoint/7"))
        received = transports().recv_checkpoint(0, sender.metadata(), 7, SECONDS)
    assert sizes[("inner",)] < 0.6 * sizes[()]
    for own, other in zip(*(s["user"]["inner"]["state"].values() for s in (received, state)), strict=True):
        assert own["step"] == other["step"] and not torch.equal(own["exp_avg"], other["exp_avg"])
        assert 0.5 < own["exp_avg_sq"].sum() / other["exp_avg_sq"].sum() < 2
    received["user"]["inner"] = state["user"]["inner"]
    assert_same(received, state)
    with pytest.raises(PolicyError, match="no state 'other'; expected one of"):
        transports(own_moments=["other"]).send_checkpoint([1], 7, state, SECONDS)


def test_own_moments_are_those_of_the_key_alone_whatever_it_contains(transports):
    inner, model = trained_state()["user"]["inner"], trained_state()["user"]["model"]
    state = {"user": {"a/b": inner, "a": {"b": copy.deepcopy(inner)}, "model": model}, "torchft": {"step": 7}}
    sender = transports(own_moments=["a/b"])
    sender.send_checkpoint([1], 7, state, SECONDS)
    received = transports().recv_checkpoint(0, sender.metadata(), 7, SECONDS)
    assert_same(received["user"]["a"], state["user"]["a"])
    assert not torch.equal(received["user"]["a/b"]["state"][0]["exp_avg"], inner["state"][0]["exp_avg"])


def test_a_request_waits_until_there_is_a_state(transports):
    sender, receiver, received = transports(), transports(), []
    address = sender.metadata()
    thread = threading.Thread(target=lambda: received.append(receiver.recv_checkpoint(0, address, 3, SECONDS)))
    thread.start()
    sender.send_checkpoint([1], 3, {"x": torch.arange(5)}, SECONDS)
    thread.join()
    assert received[0]["x"].tolist() == [0, 1, 2, 3, 4]


def test_what_cannot_be_stored_is_an_error_of_the_sender(transports):
    with pytest.raises(StateError, match=r"user.*bad"):
        transports().send_checkpoint([1], 3, {"user": {"bad": object()}}, SECONDS)


@contextmanager
def serving(body: bytes, *, length: int | None = None, status: int = 200, stop: bool = False) -> Iterator[str]:
    """The address of a server that answers every request with these bytes."""
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if length != 0:
                self.send_header("Content-Length", str(length or len(body)))
            self.end_headers()
            self.wfile.write(body)
            if stop:
                self.wfile.flush()
                done.wait()

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("localhost", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}/checkpoint/"
        done.set()
        server.shutdown()
        thread.join()


class Touch:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", [pickle.dumps, None])
def test_what_a_peer_pickled_is_never_unpickled(write, tmp_path, transports):
    victim, buffer = tmp_path / "victim", io.BytesIO()
    if write is None:
        torch.save({"user": Touch(victim)}, buffer)
    data = buffer.getvalue() if write is None else write(Touch(victim))
    with serving(data) as address, pytest.raises(FormatError):
        transports().recv_checkpoint(0, address, 3, SECONDS)
    assert not victim.exists()


def encoded(transports: Callable[..., CompressedTransport], state: Any) -> bytes:
    sender = transports()
    sender.send_checkpoint([1], 3, state, SECONDS)
    return sender.find_file("/checkpoint/3")


def test_damaged_bytes_are_errors(transports):
    data = encoded(transports, trained_state(2))
    for offset in (3, 200, len(data) // 2, len(data) - 9):
        damaged = bytearray(data)
        damaged[offset] ^= 64
        with serving(bytes(damaged)) as address, pytest.raises(FormatError) as caught:
            transports().recv_checkpoint(0, address, 3, SECONDS)
        assert caught.value.where.startswith(f"state of step 3 from {address}")
    with serving(data[:-100]) as address, pytest.raises((TruncatedError, CorruptError)):
        transports().recv_checkpoint(0, address, 3, SECONDS)


def test_more_than_max_bytes_is_refused_before_memory_is_taken(transports):
    data = encoded(transports, {"zeros": torch.zeros(1 << 20)})
    assert len(data) < 1 << 16
    with serving(data) as address:
        assert not transports().recv_checkpoint(0, address, 3, SECONDS)["zeros"].any()
        with pytest.raises(CorruptError, match="bytes of tensors"):
            transports(max_bytes=1 << 21).recv_checkpoint(0, address, 3, SECONDS)
        with pytest.raises(CorruptError, match="Raise max_bytes="):
            transports(max_bytes=64).recv_checkpoint(0, address, 3, SECONDS)
    with serving(b"", length=1 << 60) as address, pytest.raises(CorruptError, match="at most"):
        transports().recv_checkpoint(0, address, 3, SECONDS)


def test_a_replica_that_is_gone_or_serves_another_step_is_a_membership_error(transports):
    receiver, sender = transports(), transports()
    sender.send_checkpoint([1], 4, {"x": 1}, SECONDS)
    with pytest.raises(MembershipError, match="404 /checkpoint/4 is served"):
        receiver.recv_checkpoint(0, sender.metadata(), 3, SECONDS)
    with serving(b"x") as address:
        pass
    for place in (address, "file:///etc/hostname", "nowhere", "http://localhost:x/checkpoint/"):
        with pytest.raises(MembershipError, match="expected the state"):
            receiver.recv_checkpoint(0, place, 3, SECONDS)
    for settings in ({"status": 302}, {"length": 0}, {"length": 100}):
        with serving(b"x", **settings) as address, pytest.raises(MembershipError):
            receiver.recv_checkpoint(0, address, 3, SECONDS)
    short = timedelta(seconds=0.2)
    with serving(b"x", length=100, stop=True) as address, pytest.raises(MembershipError, match=r"imed? ?out|in 0.2 s"):
        receiver.recv_checkpoint(0, address, 3, short)


def test_nothing_is_served_after_a_step(transports):
    sender = transports()
    sender.send_checkpoint([1], 3, {"x": 1}, SECONDS)
    sender.disallow_checkpoint()
    with pytest.raises(MembershipError):
        transports().recv_checkpoint(0, sender.metadata(), 3, timedelta(seconds=0.2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 60},
        {"timeout": timedelta(0)},
        {"own_moments": "inner"},
        {"own_moments": 3},
        {"threads": 0},
        {"max_bytes": 0},
    ],
)
def test_wrong_arguments_are_errors(wrong):
    with pytest.raises(PolicyError):
        CompressedTransport(**wrong)
