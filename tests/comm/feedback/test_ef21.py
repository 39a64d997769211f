"""EF21: both ends hold what was sent so far."""

from __future__ import annotations

import torch
from helpers.comm_links import batches, cross, ends, same

from shrinkpoint.comm import MessageContext, parse


def test_it_is_the_published_recursion():
    """g <- g + C(x - g), computed here by hand."""
    sender, receiver = ends("ef21(top10)")
    compressor, g = parse("top10"), torch.zeros(6, 23)
    for x, _ in batches(20):
        change = x - g[: len(x)]
        g[: len(x)] += compressor.decode(compressor.encode(change), torch.empty_like(x))
        assert same(cross(sender, receiver, x), g[: len(x)])


def test_what_stays_the_same_is_soon_known_exactly():
    sender, receiver = ends("ef21(top10)")
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    for _ in range(9):
        assert not torch.equal(cross(sender, receiver, x), x)
    assert torch.equal(cross(sender, receiver, x), x)


def test_an_end_that_missed_a_message_is_found_out():
    sender, receiver = ends("ef21(q4:64)")
    cross(sender, receiver, torch.ones(4, 8))
    state = receiver.state_dict()
    state = {**state, "feedback": {"reference": {"0.0": state["feedback"]["reference"]["0.0"].clone()}}}
    for number in range(3):
        cross(
            sender,
            receiver,
            torch.randn(4, 8, generator=torch.Generator().manual_seed(number)),
            MessageContext(slot=number),
        )
    receiver.load_state_dict(state)
    assert sender.fingerprint() != receiver.fingerprint()
    receiver.load_state_dict(sender.state_dict())
    assert sender.fingerprint() == receiver.fingerprint()
    receiver._state._buffers.get(receiver._message_info(MessageContext()), torch.empty(4, 8))[0, 0] += 1
    assert sender.fingerprint() != receiver.fingerprint()


def test_loading_copies():
    sender, receiver = ends("ef21(top10)")
    cross(sender, receiver, torch.ones(4, 8))
    receiver.load_state_dict(sender.state_dict())
    cross(sender, receiver, torch.full((4, 8), 2.0))
    assert sender.fingerprint() == receiver.fingerprint()
