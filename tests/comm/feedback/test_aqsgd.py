"""AQ-SGD: what both ends know of each sample, within a bound, in memory or in a file."""

from __future__ import annotations

import math
import resource

import pytest
import torch
from links import batches, cross, ends, same

from shrinkpoint.comm import AQSGD, At, Link, Uniform, parse
from shrinkpoint.comm.feedback.shelf import Shelf
from shrinkpoint.errors import MismatchError, PolicyError, StorageError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_it_is_the_published_recursion(dtype, warmup):
    """m(s) <- m(s) + C(x - m(s)), what is remembered being rounded; computed here by hand."""
    sender, receiver = ends(AQSGD(Uniform(3, 16), warmup=warmup, dtype=dtype))
    operator, known = parse("q3:16"), {}
    for number, (x, at) in enumerate(batches(40, slots=1)):
        m = torch.stack([known.get(one, torch.zeros(23)).float() for one in at.ids.tolist()])
        change = operator.decode(operator.encode(x - m), torch.empty_like(x))
        expected = x if number < warmup else m + change
        known.update(zip(at.ids.tolist(), expected.to(DTYPES[dtype]), strict=True))
        assert same(cross(sender, receiver, x, at), expected)


def test_first_steps_are_exact_in_every_slot():
    sender, receiver = ends("aq(q2:64, warmup=2)")
    for number, (x, at) in enumerate(batches(12, slots=3, dtype=torch.bfloat16)):
        assert same(cross(sender, receiver, x, at), x) == (number < 6)


def test_samples_that_come_back_cost_little_error():
    sender, receiver = ends("aq(q2:64)", sample_every=1)
    plain, other = ends("q2:64", sample_every=1)
    for x, at in batches(60):
        cross(sender, receiver, x, at)
        cross(plain, other, x, at)
    assert sender.ledger.relative_error < plain.ledger.relative_error / 2


def test_a_sample_of_no_memory_costs_what_the_operator_alone_does():
    sender, receiver = ends("aq(q2:64, dtype=fp32)")
    plain, other = ends("q2:64")
    x = torch.randn(6, 23, generator=torch.Generator().manual_seed(0))
    at = At(ids=torch.arange(6))
    assert same(cross(sender, receiver, x, at), cross(plain, other, x))


@pytest.mark.parametrize("how", ["aq(q2:64, dtype=bf16", "aq(top10, warmup=4, most_bytes=500"])
def test_a_file_holds_what_memory_holds(how, tmp_path):
    sender, receiver = ends(f"{how})")
    other, twin = ends(f"{how}, folder={tmp_path / 'new'})")
    for x, at in batches(80, samples=200):
        assert same(cross(sender, receiver, x, at), cross(other, twin, x, at))
    assert sender.fingerprint() == twin.fingerprint()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a folder to write to"):
        Link(AQSGD(Uniform(2), folder=str(tmp_path / "file"))).pack(torch.ones(2, 4), At(ids=torch.arange(2)))


def test_a_file_that_cannot_grow_is_an_error(tmp_path):
    link = Link(AQSGD(Uniform(2), folder=str(tmp_path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match="bytes for the samples of AQ-SGD"):
            link.pack(torch.ones(4, 1000), At(ids=torch.arange(4)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_stays_within_its_bound_and_the_oldest_go_first():
    rows = 5
    sender, receiver = ends(f"aq(exact, dtype=fp32, most_bytes={rows * 40 + 39})")

    def step(*ids: int) -> None:
        cross(sender, receiver, torch.ones(len(ids), 10), At(ids=torch.tensor(ids)))

    def kept(link: Link) -> list[int]:
        state = link.state_dict()["feedback"]["samples"]["0"]
        assert state["rows"].numel() * 4 <= rows * 40 + 39
        return state["ids"].tolist()

    step(0, 1, 2, 3)
    step(1, 4)
    step(5, 0)
    assert kept(sender) == kept(receiver) == [3, 1, 4, 5, 0]
    step(10, 11, 12, 13, 14, 15, 16)
    assert kept(sender) == kept(receiver) == [12, 13, 14, 15, 16]


def test_a_row_beyond_the_bound_is_refused():
    with pytest.raises(PolicyError, match="at least the 20 bytes of a row"):
        Link("aq(q2:64, most_bytes=19)").pack(torch.ones(2, 10), At(ids=torch.arange(2)))


def test_of_a_sample_that_is_twice_in_a_batch_the_later_row_counts():
    shelf = Shelf(torch.float32, most_bytes=1000)
    shelf.put([3, 4, 3], torch.tensor([[1.0], [2.0], [5.0]]))
    assert shelf.get([4, 3, 9], torch.empty(3, 1)).tolist() == [[2.0], [5.0], [0.0]]


def test_what_is_beyond_half_precision_starts_from_nothing_and_is_not_lost():
    sender, receiver = ends("aq(q8:16)")
    x, at = torch.tensor([[1e6, 1.0, -1e6, 2.0]]), At(ids=torch.tensor([1]))
    for _ in range(3):
        out = cross(sender, receiver, x, at)
        assert out.isfinite().all() and torch.allclose(out, x, atol=1e4)


def test_rows_of_another_shape_begin_anew():
    sender, receiver = ends("aq(q4:64)")
    for columns in (8, 12, 12, 8):
        cross(sender, receiver, torch.ones(3, columns), At(ids=torch.arange(3)))
        assert sender.fingerprint() == receiver.fingerprint()
    assert sender.ledger.restarts == receiver.ledger.restarts == 2


def test_a_smaller_bound_keeps_what_was_used_last():
    big, small = (AQSGD(Uniform(4), most_bytes=size) for size in (10_000, 60))
    link, other = Link(big), Link(small)
    link.pack(torch.arange(50.0).reshape(5, 10), At(ids=torch.arange(5)))
    shelf, state = Shelf(torch.float16, most_bytes=60), link.state_dict()["feedback"]["samples"]["0"]
    shelf.load_state_dict(state)
    assert shelf.state_dict()["ids"].tolist() == [2, 3, 4]
    assert torch.equal(shelf.state_dict()["rows"], state["rows"][2:])
    with pytest.raises(MismatchError):
        other.load_state_dict(link.state_dict())
    with pytest.raises(MismatchError, match="float16"):
        Shelf(torch.bfloat16, most_bytes=60).load_state_dict(state)


def test_a_scalar_has_no_samples():
    with pytest.raises((PolicyError, MismatchError)):
        Link("aq(q4:64)").pack(torch.tensor(math.pi), At(ids=torch.arange(1)))
