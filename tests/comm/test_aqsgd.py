"""AQ-SGD: what both ends know of each sample, within a bound, in memory or in a file."""

from __future__ import annotations

import math
import resource
from collections import Counter, OrderedDict

import pytest
import torch
from helpers.comm_links import batches, cross, ends, same
from helpers.parameters import each_value

from shrinkpoint.comm import AQSGD, Link, MessageContext, Uniform, parse
from shrinkpoint.comm.aqsgd import SampleCache
from shrinkpoint.errors import MismatchError, PolicyError, StorageError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize(
    ("spec", "warmup", "dtype"), each_value(["q3:16", "top10", "h16(q4:16)", "q8", "exact"], [0, 1, 3], DTYPES)
)
def test_it_is_the_published_recursion(dtype, warmup, spec):
    """A first visit is exact, then m(s) <- m(s) + C(x - m(s)), what is remembered being rounded; by hand."""
    compressor, known, visits, seen = parse(spec), {}, Counter(), 0
    sender, receiver = ends(AQSGD(compressor, warmup=warmup, dtype=dtype))
    for number, (x, message_context) in enumerate(batches(40, slots=1)):
        ids = message_context.ids.tolist()
        late = torch.tensor([visits[sample] >= warmup for sample in ids])
        expected, context = x.clone(), _context(sender, message_context, number)
        m = torch.stack([known.get(sample, torch.zeros(23)).float() for sample in ids])
        if late.any():
            change = (x - m)[late]
            expected[late] = m[late] + compressor.decode(compressor.encode(change, context), change.clone(), context)
        known.update(zip(ids, expected.to(DTYPES[dtype]), strict=True))
        visits.update(ids)
        seen += bool(late.any()) and not bool(late.all())
        assert same(cross(sender, receiver, x, message_context), expected)
    assert warmup == 0 or seen > 5  # messages of both kinds of rows


def _context(link, context, number):
    return link._message_info(MessageContext(context.slot, context.tensor)).context


def test_a_sample_is_exact_when_it_comes_first_however_late_and_only_then():
    """By visits, not by steps; a sample whose memory was taken for others comes as if it were new."""
    sender, receiver = ends("aq(q2:64, warmup=2, dtype=fp32, most_bytes=400)")  # four samples of 23 values
    known: OrderedDict[int, int] = OrderedDict()
    late = 0
    for number, (x, context) in enumerate(batches(120, rows=3, samples=7, slots=2)):
        exact = [known.get(sample, 0) < 2 for sample in context.ids.tolist()]
        out = cross(sender, receiver, x, context)
        assert [same(row, other) for row, other in zip(out, x, strict=True)] == exact
        late += any(exact) and number > 60
        counts = {sample: min(known.get(sample, 0) + 1, 2) for sample in context.ids.tolist()}
        for sample in context.ids.tolist():
            known.pop(sample, None)
            known[sample] = counts[sample]
            if len(known) > 4:
                known.popitem(last=False)
    assert late > 5
    assert sender.fingerprint() == receiver.fingerprint()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_exact_rows_are_their_own_bytes_and_no_other_row_pays_for_them(dtype):
    sender, receiver = ends("aq(q4:16)")
    x, context = torch.randn(6, 32).to(dtype), MessageContext(ids=torch.arange(6))
    ids, whole = 6 * 8, 6 * 32 * dtype.itemsize
    assert receiver.wire_bytes(x.shape, dtype, context) == ids + whole
    cross(sender, receiver, x[:2], MessageContext(ids=torch.arange(2)))
    rest = parse("q4:16").wire_bytes((2, 32), torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    assert sender.wire_bytes(x.shape, dtype, context) == ids + whole * 4 // 6 + rest
    x[2, 0], x[:2] = math.nan, x[:2] * 1.3
    out = cross(sender, receiver, x, context)
    assert same(out[2:], x[2:]) and not same(out[:2], x[:2])
    known = sender.wire_bytes(x.shape, dtype, context)
    assert known == ids + 3 * rest == ids + sender.compressor.wire_bytes(x.shape, dtype)
    assert Link("aq(q4:16)").wire_bytes(x.shape, dtype) == known  # without ids: the size for cached samples


@pytest.mark.parametrize(
    ("ahead", "spec"),
    each_value([1, 2, 4], ["aq(q2:16, dtype=bf16, most_bytes=600)", "aq(top10, warmup=2)", "aq(q4, warmup=0)"]),
)
def test_buffers_that_are_posted_before_others_are_read_have_the_right_size(spec, ahead):
    """Some schedules post receives of several micro-batches at once."""
    sender, receiver = ends(spec)
    twin, other = ends(spec)
    steps = list(batches(60, rows=3, samples=9, slots=ahead))
    for first in range(0, 60, ahead):
        window = steps[first : first + ahead]
        sizes = [receiver.expect(x.shape, x.dtype, context) for x, context in window]
        wires = [sender.pack(x, context) for x, context in window]
        assert sizes == [wire.numel() for wire in wires]
        for wire, (x, context) in zip(wires, window, strict=True):
            assert same(receiver.unpack(wire, torch.empty_like(x), context), cross(twin, other, x, context))
    assert sender.fingerprint() == receiver.fingerprint() == other.fingerprint()


def test_what_was_expected_in_a_step_that_failed_is_forgotten():
    sender, receiver = ends("aq(q2:16)")
    x, context = torch.randn(3, 16), MessageContext(ids=torch.arange(3))
    whole = receiver.expect(x.shape, x.dtype, context)
    assert receiver.expect(x.shape, x.dtype, MessageContext(slot=1, ids=context.ids)) < whole
    receiver.forget_expected()
    assert receiver.wire_bytes(x.shape, x.dtype, MessageContext(slot=1, ids=context.ids)) == whole
    assert same(cross(sender, receiver, x, MessageContext(slot=1, ids=context.ids)), x)


def test_a_message_of_other_samples_than_given_is_refused():
    sender, receiver = ends("aq(q2:16)")
    x = torch.randn(3, 16)
    wire = sender.pack(x, MessageContext(ids=torch.arange(3)))
    with pytest.raises(MismatchError, match="as this end was told"):
        receiver.unpack(wire, torch.empty_like(x), MessageContext(ids=torch.arange(1, 4)))
    assert same(receiver.unpack(wire, torch.empty_like(x), MessageContext(ids=torch.arange(3))), x)


@pytest.mark.parametrize("back", ["same", "same:bf16", "aq(same)", "aq(same, warmup=0)"])
def test_the_way_back_knows_the_indices_of_rows_of_both_kinds(back):
    there, here = ends("aq(top10)"), ends(back)
    for number, (x, context) in enumerate(batches(30, slots=1)):
        out = cross(*there, x, context)
        places = [link.indices(context) for link in there]
        assert torch.equal(*places) and bool((places[0].diff() > 0).all())
        given = MessageContext(context.slot, ids=context.ids, indices=places[0])
        gradient = torch.ones_like(x)
        came = here[1].unpack(here[0].pack(gradient, given), torch.empty_like(x), given)
        at_places = torch.zeros(x.numel()).index_fill(0, places[0], 1.0).reshape(x.shape)
        if "aq" not in back:
            assert same(came, at_places)
        new = [same(row, other) for row, other in zip(out, x, strict=True)]
        assert bool(at_places[torch.tensor(new)].all())
        assert number < 25 or not any(new)


def test_samples_that_come_back_cost_little_error():
    sender, receiver = ends("aq(q2:64, warmup=0)", sample_every=1)
    plain, other = ends("q2:64", sample_every=1)
    for x, context in batches(60):
        cross(sender, receiver, x, context)
        cross(plain, other, x, context)
    assert sender.stats.relative_error < plain.stats.relative_error / 2


def test_a_sample_of_no_memory_costs_what_the_compressor_alone_does():
    sender, receiver = ends("aq(q2:64, dtype=fp32, warmup=0)")
    plain, other = ends("q2:64")
    x = torch.randn(6, 23, generator=torch.Generator().manual_seed(0))
    context = MessageContext(ids=torch.arange(6))
    assert same(cross(sender, receiver, x, context), cross(plain, other, x))


@pytest.mark.parametrize("spec", ["aq(q2:64, dtype=bf16", "aq(top10, warmup=4, most_bytes=500"])
def test_a_file_holds_what_memory_holds(spec, tmp_path):
    sender, receiver = ends(f"{spec})")
    other, twin = ends(f"{spec}, folder={tmp_path / 'new'})")
    for x, context in batches(80, samples=200):
        assert same(cross(sender, receiver, x, context), cross(other, twin, x, context))
    assert sender.fingerprint() == twin.fingerprint()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a directory to write to"):
        Link(AQSGD(Uniform(2), folder=str(tmp_path / "file"))).pack(
            torch.ones(2, 4), MessageContext(ids=torch.arange(2))
        )


def test_a_file_that_cannot_grow_is_an_error(tmp_path):
    link = Link(AQSGD(Uniform(2), folder=str(tmp_path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match="bytes for the samples of AQ-SGD"):
            link.pack(torch.ones(4, 1000), MessageContext(ids=torch.arange(4)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_stays_within_its_bound_and_the_oldest_go_first():
    rows = 5
    sender, receiver = ends(f"aq(exact, dtype=fp32, most_bytes={rows * 40 + 39})")

    def step(*ids: int) -> None:
        cross(sender, receiver, torch.ones(len(ids), 10), MessageContext(ids=torch.tensor(ids)))

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
        Link("aq(q2:64, most_bytes=19)").pack(torch.ones(2, 10), MessageContext(ids=torch.arange(2)))


def test_of_a_sample_that_is_twice_in_a_batch_the_later_row_counts():
    shelf = SampleCache(torch.float32, max_bytes=1000)
    shelf.put([3, 4, 3], torch.tensor([[1.0], [2.0], [5.0]]))
    assert shelf.get([4, 3, 9], torch.empty(3, 1)).tolist() == [[2.0], [5.0], [0.0]]


def test_a_sample_that_is_twice_in_a_message_counts_one_visit():
    sender, receiver = ends("aq(q2:16, warmup=2, dtype=fp32)")
    x, context = torch.randn(3, 16), MessageContext(ids=torch.tensor([3, 4, 3]))
    for number in range(4):
        x = x * 1.3
        out = cross(sender, receiver, x, context)
        assert same(out, x) == (number < 2)
        assert sender.fingerprint() == receiver.fingerprint()


def test_a_state_from_before_visits_were_counted_is_gone_on_from():
    sender, receiver = ends("aq(q2:16)")
    x, context = torch.randn(3, 16), MessageContext(ids=torch.arange(3))
    cross(sender, receiver, x, context)
    states = [link.state_dict() for link in (sender, receiver)]
    for state in states:
        del state["feedback"]["samples"]["0"]["visits"]
    again = ends("aq(q2:16)")
    for link, state in zip(again, states, strict=True):
        link.load_state_dict(state)
    assert same(cross(*again, x * 1.3, context), cross(sender, receiver, x * 1.3, context))


def test_what_is_beyond_half_precision_starts_from_nothing_and_is_not_lost():
    sender, receiver = ends("aq(q8:16)")
    x, context = torch.tensor([[1e6, 1.0, -1e6, 2.0]]), MessageContext(ids=torch.tensor([1]))
    for _ in range(3):
        out = cross(sender, receiver, x, context)
        assert out.isfinite().all() and torch.allclose(out, x, atol=1e4)


def test_rows_of_another_shape_begin_anew():
    sender, receiver = ends("aq(q4:64)")
    for columns in (8, 12, 12, 8):
        cross(sender, receiver, torch.ones(3, columns), MessageContext(ids=torch.arange(3)))
        assert sender.fingerprint() == receiver.fingerprint()
    assert sender.stats.restarts == receiver.stats.restarts == 2


def test_a_state_of_a_larger_bound_is_refused():
    big, small = (AQSGD(Uniform(4), most_bytes=size) for size in (10_000, 60))
    link, other = Link(big), Link(small)
    link.pack(torch.arange(50.0).reshape(5, 10), MessageContext(ids=torch.arange(5)))
    state = link.state_dict()["feedback"]["samples"]["0"]
    for size, capacity in ((60, 3), (16, 0), (0, 0)):
        with pytest.raises(MismatchError, match=f"5 samples in the checkpoint; expected at most {capacity}"):
            SampleCache(torch.float16, max_bytes=size).load_state_dict(state)
    shelf = SampleCache(torch.float16, max_bytes=100)
    shelf.load_state_dict(state)
    assert shelf.state_dict()["ids"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(shelf.state_dict()["rows"], state["rows"])
    with pytest.raises(MismatchError):
        other.load_state_dict(link.state_dict())
    with pytest.raises(MismatchError, match="float16"):
        SampleCache(torch.bfloat16, max_bytes=60).load_state_dict(state)


def test_a_scalar_has_no_samples():
    with pytest.raises((PolicyError, MismatchError)):
        Link("aq(q4:64)").pack(torch.tensor(math.pi), MessageContext(ids=torch.arange(1)))
