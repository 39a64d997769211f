"""Both ends of a link stay in step, and what one of them may not do is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers.comm_links import STATEFUL, STATELESS, batches, cross, ends, same
from helpers.parameters import each_value
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.comm import CompressorContext, Link, MessageContext, parse
from shrinkpoint.errors import MismatchError, PolicyError


@pytest.mark.parametrize("spec", [*STATELESS, *STATEFUL])
def test_both_ends_hold_the_same_reference(spec):
    """What the sender believes the other end to have is what it has: its own account of the loss is exact."""
    sender, receiver = ends(spec, sample_every=1)
    lost = []
    for x, context in batches(80 if spec in STATEFUL else 20):
        out = cross(sender, receiver, x, context)
        assert sender.fingerprint() == receiver.fingerprint()
        assert out.isfinite().all()
        lost.append(float(torch.linalg.vector_norm(x - out) / torch.linalg.vector_norm(x)))
    assert sender.stats.relative_error == pytest.approx(math.fsum(lost) / len(lost), rel=1e-5)
    assert sender.stats.wire_bytes == receiver.stats.wire_bytes
    assert sender.stats.raw_bytes == receiver.stats.raw_bytes


@pytest.mark.parametrize("spec", ["q4:64", "top10", *STATEFUL])
def test_every_dtype_crosses(spec):
    for dtype in [torch.bfloat16, torch.float16, torch.float64]:
        sender, receiver = ends(spec, sample_every=1)
        for x, context in batches(12, dtype=dtype):
            kept = x.clone()
            out = cross(sender, receiver, x, context)
            assert out.dtype == dtype and out.isfinite().all() and same(x, kept)
        assert sender.fingerprint() == receiver.fingerprint()


@pytest.mark.parametrize("spec", ["q4:64", "ef(q4:64)", "ef21(top10)", "efmixed(top20)"])
def test_every_shape_and_stride_crosses(spec):
    for shape in [(), (1,), (7,), (3, 1, 5), (2, 3, 4, 4)]:
        sender, receiver = ends(spec)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        other, twin = ends(spec)
        for _ in range(3):
            out = cross(sender, receiver, x)
            turned = x.mT.contiguous().mT if x.dim() > 1 else x
            if x.dim() == 4:
                turned = x.contiguous(memory_format=torch.channels_last)
            assert same(cross(other, twin, turned), out)


@given(
    st.sampled_from(STATEFUL),
    st.lists(
        st.tuples(st.integers(1, 7), st.integers(0, 2), st.integers(0, 1), st.booleans(), st.booleans()), max_size=12
    ),
)
def test_whatever_comes_both_ends_stay_in_step(how, messages):
    """Rows, slots, tensors, evaluation in between, values that are not finite: in any order."""
    sender, receiver = ends(how)
    for number, (rows, slot, tensor, training, bad) in enumerate(messages):
        x = torch.randn(rows, 9 + tensor, generator=torch.Generator().manual_seed(number))
        if bad:
            x[-1, 3] = math.inf
        out = cross(sender, receiver, x, MessageContext(slot, tensor, training, ids=torch.arange(rows) * number % 11))
        assert bool(out.isfinite().all()) != bad
        assert sender.fingerprint() == receiver.fingerprint()


def test_no_two_messages_have_the_same_key():
    link = Link("q4:64:dither")
    keys = {
        link._message_info(MessageContext(slot, tensor, training)).context.key
        for _ in range(50)
        for slot in range(8)
        for tensor in range(3)
        for training in (True, False)
        if not training or not link._advance(MessageContext(slot, tensor), 0)
    }
    assert len(keys) == 50 * 8 * 3 + 8 * 3 and max(keys) < 2**32


def test_links_of_other_names_have_other_noise():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    a, b = (Link("q2:64:dither", name=name).pack(x) for name in ("0 forward", "1 forward"))
    assert not torch.equal(a, b) and torch.equal(a, Link("q2:64:dither").pack(x))


@pytest.mark.parametrize("spec", [*STATELESS, *STATEFUL])
def test_evaluation_changes_no_state_and_uses_the_compressor_alone(spec):
    sender, receiver = ends(spec)
    for x, context in batches(7):
        cross(sender, receiver, x, context)
    before = sender.fingerprint(), receiver.fingerprint()
    for x, context in batches(4, seed=5):
        out = cross(sender, receiver, x, MessageContext(context.slot, training=False))
        compressor, key = (
            sender.compressor,
            CompressorContext(sender._message_info(MessageContext(context.slot, training=False)).context.key),
        )
        assert same(out, compressor.decode(compressor.encode(x, key), torch.empty_like(x), key))
    assert (sender.fingerprint(), receiver.fingerprint()) == before
    other, twin = ends(spec)
    for number, (x, context) in enumerate(batches(9)):
        expected = cross(other, twin, x, context)
        if number >= 7:
            assert same(cross(sender, receiver, x, context), expected)


# ---- what is not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*STATELESS, *STATEFUL])
def test_what_is_not_finite_passes_and_is_then_forgotten(spec):
    for bad in [math.nan, math.inf, -math.inf]:
        sender, receiver = ends(spec)
        for number, (x, context) in enumerate(batches(24)):
            if number in (3, 4, 10):
                x[0, 1] = bad
            out = cross(sender, receiver, x, context)
            assert bool(out.isfinite().all()) == (number not in (3, 4, 10))
            assert sender.fingerprint() == receiver.fingerprint()


@pytest.mark.parametrize("spec", ["q4:64", "top10", "ef(top10)", "ef21(q4:64)", "aq(q2:64)"])
def test_it_raises_where_it_should_and_leaves_no_rank_waiting(spec):
    sender, receiver = ends(spec, nonfinite="raise", name="2 forward")
    (good, context), (bad, later) = batches(2, slots=1)
    cross(sender, receiver, good, context)
    bad[0, 0] = math.nan
    wire, out = sender.pack(bad, later), torch.zeros_like(bad)
    with pytest.raises(PolicyError, match=r"link 2 forward, micro-batch 0.*not finite"):
        receiver.unpack(wire, out)
    assert out.isnan().any() and receiver.stats.nonfinite > 0
    with pytest.raises(PolicyError, match="1 values that are not finite"):
        sender.pack(good, context)
    assert sender.stats.nonfinite == 1
    sender.check()
    assert sender.fingerprint() == receiver.fingerprint()
    cross(sender, receiver, good, context)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_another_shape_begins_anew_and_is_counted():
    sender, receiver = ends("ef21(top10)")
    for shape in ((4, 10), (4, 12), (2, 12), (4, 12), (5, 12)):
        cross(sender, receiver, torch.ones(shape))
        assert sender.fingerprint() == receiver.fingerprint()
    assert sender.stats.restarts == receiver.stats.restarts == 2


def test_what_crosses_as_it_is():
    link = Link("q4", min_numel=10)
    assert link.is_compressible(torch.zeros(10)) and link.is_compressible(
        torch.zeros(10, dtype=torch.bfloat16, device="meta")
    )
    assert not link.is_compressible(torch.zeros(9)) and not link.is_compressible(torch.zeros(10, dtype=torch.int64))
    assert not Link("q4").is_compressible(torch.zeros(0, 4))
    link.stats.add_uncompressed(torch.zeros(9))
    assert (link.stats.messages, link.stats.raw_bytes, link.stats.wire_bytes) == (1, 36, 36)


@pytest.mark.parametrize(
    ("dtype", "spec"),
    each_value(
        [torch.float32, torch.bfloat16],
        ["top10", "rand10", "ef(top10)", "ef21(top10)", "efmixed(top10)", "aq(top10, warmup=0)"],
    ),
)
def test_both_ends_know_the_indices_of_the_last_message(spec, dtype):
    sender, receiver = ends(spec)
    assert sender.indices() is None
    seen = {}
    for x, context in batches(6, dtype=dtype):
        before = seen.get(context.slot)
        out = cross(sender, receiver, x, context)
        ours, theirs = sender.indices(context), receiver.indices(context)
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
        assert ours.dtype == torch.int64 and bool((ours.diff() > 0).all()) and ours.numel() < x.numel() // 3
        if spec in ("top10", "rand10", "ef(top10)", "efmixed(top10)"):
            assert set(out.flatten().nonzero().flatten().tolist()) <= set(ours.tolist())
        seen[context.slot] = before
    assert Link("q4").indices() is None


def test_same_indices_for_the_way_back():
    forward, back = ends("top10"), ends("same:bf16")
    x, gradient = (torch.randn(6, 40, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    cross(*forward, x)
    out = cross(*back, gradient, MessageContext(indices=forward[1].indices()))
    expected = torch.zeros(240)
    expected[forward[0].indices()] = gradient.flatten()[forward[0].indices()].bfloat16().float()
    assert same(out, expected.reshape(6, 40))
    with pytest.raises(PolicyError, match="no indices"):
        back[0].pack(gradient)


# ---- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["aq(q2:64, warmup=0)", "ef21(q4:64)", "q4:64"])
def test_sample_ids_cross_with_the_message(spec):
    sender, receiver = ends(spec, with_ids=True)
    for x, context in batches(8):
        bare = Link(spec.rpartition("(")[2].partition(",")[0].removesuffix(")")).wire_bytes(x.shape, x.dtype)
        assert sender.wire_bytes(x.shape, x.dtype, context) == bare + 8 * len(x)
        cross(sender, receiver, x, context)
        found = receiver.ids(context)
        assert found is not None and torch.equal(found, context.ids)


@pytest.mark.parametrize("spec", ["aq(q2:64)", "ef21(q4:64)"])
def test_ids_that_are_missing_or_too_many_are_an_error(spec):
    link, x = Link(spec, with_ids=True), torch.ones(4, 8)
    with pytest.raises(PolicyError, match="set_sample_ids"):
        link.pack(x)
    with pytest.raises(MismatchError):
        link.pack(x, MessageContext(ids=torch.arange(5)))
    assert link.fingerprint() == Link(spec).fingerprint()


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_one_link_is_not_both_ends():
    link, x = Link("ef21(top10)"), torch.ones(4, 8)
    wire = link.pack(x)
    with pytest.raises(PolicyError, match="one for each end"):
        link.unpack(wire, torch.empty(4, 8))


def test_a_message_that_does_not_fit_is_refused_and_changes_nothing():
    sender, receiver = ends("ef21(q4:64)")
    wire = sender.pack(torch.ones(4, 8))
    for bad in (wire[:-1], torch.cat((wire, wire)), wire.float(), wire[None]):
        with pytest.raises(MismatchError, match="link 0 forward"):
            receiver.unpack(bad, torch.empty(4, 8))
    assert receiver.fingerprint() == Link("q4").fingerprint()
    receiver.unpack(wire, torch.empty(4, 8))


def test_the_two_ends_describe_themselves_alike_and_others_differently(tmp_path):
    links = [
        Link("q4:64"),
        Link("q4"),
        Link("ef(q4:64)"),
        Link("q4:64", name="1 forward"),
        Link("q4:64", min_numel=3),
        Link("aq(q4:64)"),
        Link("aq(q4:64, warmup=2)"),
        Link("q4:64", with_ids=True),
    ]
    words = [json.dumps(link.describe(), sort_keys=True) for link in links]
    assert len(set(words)) == len(words)
    assert Link(parse(f"aq(q4:64, folder={tmp_path})")).describe() == Link("aq(q4:64)").describe()
    assert Link("q4:64", sample_every=1, nonfinite="raise").describe() == links[0].describe()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_sends_the_messages_that_a_cpu_sends():
    for spec in (*STATELESS, *STATEFUL):
        sender, receiver = ends(spec, sample_every=3)
        host, other = ends(spec, sample_every=3)
        sender.stats.events = True
        for (x, context), (y, _) in zip(batches(20, device="cuda"), batches(20), strict=True):
            wire, expected = sender.pack(x, context), host.pack(y, context)
            assert wire.is_cuda and torch.equal(wire.cpu(), expected), spec
            out = receiver.unpack(wire, torch.empty_like(x), MessageContext(context.slot))
            assert same(out.cpu(), other.unpack(expected, torch.empty_like(y), MessageContext(context.slot))), spec
        assert sender.fingerprint() == receiver.fingerprint() == host.fingerprint() == other.fingerprint(), spec
        assert sender.stats.relative_error == pytest.approx(host.stats.relative_error, rel=1e-4), spec
        assert sender.stats.encode_seconds > 0
