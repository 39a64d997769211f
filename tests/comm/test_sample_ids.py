"""All ranks of a pipeline have the ids of a step's samples before its first message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shrinkpoint.comm import rendezvous
from shrinkpoint.comm.rendezvous import SampleIdBroadcast, StoreChannel
from shrinkpoint.errors import MismatchError, PolicyError

pytestmark = pytest.mark.usefixtures("single_rank_group")


def _pair(monkeypatch: pytest.MonkeyPatch, timeout: float = 5.0) -> tuple[SampleIdBroadcast, SampleIdBroadcast]:
    """The first stage's side and another one's, in one process with one channel."""
    monkeypatch.setattr(rendezvous, "group_timeout", lambda _: timeout)
    first, other = (SampleIdBroadcast(None, is_source=sends) for sends in (True, False))
    other._channel = first._channel
    return first, other


def test_the_ids_given_to_the_first_stage_reach_the_others_step_by_step(monkeypatch):
    first, other = _pair(monkeypatch)
    for step in range(200):
        ids = torch.randint(-(2**62), 2**62, (step % 7 + 1,), generator=torch.Generator().manual_seed(step))
        assert torch.equal(first.broadcast(ids), ids) and torch.equal(other.broadcast(None), ids)
    messages = dist.distributed_c10d._get_process_group_store(first._channel.group).num_keys()
    assert messages < 100  # of 200 steps


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_ids_may_be_of_any_integer_dtype(monkeypatch, dtype):
    first, other = _pair(monkeypatch)
    assert first.broadcast(torch.arange(5, dtype=dtype)).tolist() == other.broadcast(None).tolist() == [0, 1, 2, 3, 4]


def test_missing_ids_are_an_error_on_all_ranks_and_the_next_step_works(monkeypatch):
    first, other = _pair(monkeypatch)
    for end in (first, other):
        with pytest.raises(PolicyError, match="no sample ids"):
            end.broadcast(None)
    assert torch.equal(first.broadcast(torch.arange(2)), other.broadcast(None))


def test_a_silent_first_stage_is_an_error_after_the_timeout(monkeypatch):
    with pytest.raises(MismatchError, match="published no sample ids"):
        _pair(monkeypatch, 0.1)[1].broadcast(None)


def test_channels_of_two_topics_are_separate():
    StoreChannel(None, "one").publish(0, "word")
    with pytest.raises(TimeoutError):
        StoreChannel(None, "other").read(0, 0.1)
