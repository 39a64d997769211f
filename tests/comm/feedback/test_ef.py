"""Error feedback: nothing is lost for good."""

from __future__ import annotations

import pytest
import torch
from helpers.comm_links import batches, cross, ends, same

from shrinkpoint.comm import Link, MessageContext, parse


@pytest.mark.parametrize("spec", ["top10", "q2:16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_published_recursion(spec, dtype):
    """c = C(x + e), e <- x + e - c, computed here by hand."""
    sender, receiver = ends(f"ef({spec})")
    compressor, residual = parse(spec), torch.zeros(6, 23)
    for x, _ in batches(20, dtype=dtype):
        rows = len(x)
        total = (residual[:rows] + x).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        c = compressor.decode(compressor.encode(total), torch.empty_like(total)).to(dtype)
        residual[:rows] = residual[:rows] + x - c
        assert same(cross(sender, receiver, x), c)
    assert same(sender.state_dict()["feedback"]["residual"]["0.0"], residual)


@pytest.mark.parametrize("spec", ["ef(top10)", "ef(q1:23)", "efmixed(top20)", "ef(bf16)"])
def test_what_was_sent_adds_up_to_what_was_given(spec):
    sender, receiver = ends(spec)
    given, sent = torch.zeros(6, 23), torch.zeros(6, 23)
    for seed in range(60):
        x = torch.randn(6, 23, generator=torch.Generator().manual_seed(seed))
        given, sent = given + x, sent + cross(sender, receiver, x)
    rest = sender.state_dict()["feedback"]["residual"]["0.0"]
    assert torch.allclose(given, sent + rest, atol=1e-4)
    assert float(rest.norm()) < float(given.norm())


def test_slots_and_tensors_have_their_own_residuals():
    """What was lost of micro-batch 0 is not added to micro-batch 1."""
    link, alone = Link("ef(top10)"), Link("ef(top10)")
    rows = [torch.randn(4, 30, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    for n, x in enumerate(rows):
        wire = link.pack(x, MessageContext(slot=n % 2, tensor=1))
        if n % 2 == 0:
            assert torch.equal(wire, alone.pack(x, MessageContext(tensor=1)))


def test_a_short_batch_uses_the_first_rows_and_leaves_the_others():
    link = Link("ef(top10)")
    link.pack(torch.randn(6, 20, generator=torch.Generator().manual_seed(0)))
    before = link.state_dict()["feedback"]["residual"]["0.0"].clone()
    link.pack(torch.ones(4, 20))
    after = link.state_dict()["feedback"]["residual"]["0.0"]
    assert torch.equal(before[4:], after[4:]) and not torch.equal(before[:4], after[:4])
    assert link.stats.restarts == 0


def test_a_receiver_keeps_nothing():
    sender, receiver = ends("ef(top10)")
    cross(sender, receiver, torch.ones(4, 10))
    assert receiver.state_dict()["feedback"] == {"residual": {}}
