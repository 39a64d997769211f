"""EF-mixed: a message has room for what is new and for what was lost."""

from __future__ import annotations

import pytest
import torch
from helpers.comm_links import cross, ends, same

from shrinkpoint.comm import Link, parse


def test_it_is_half_of_the_tensor_and_half_of_what_was_lost():
    sender, receiver = ends("efmixed(top10)")
    half, residual = parse("top5"), torch.zeros(5, 40)
    for seed in range(12):
        x = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed))
        a, b = (half.decode(half.encode(one), torch.empty_like(one)) for one in (x, residual))
        assert same(cross(sender, receiver, x), a + b)
        residual = residual + x - (a + b)
    assert same(sender.state_dict()["feedback"]["residual"]["0.0"], residual)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 10 + 10), (0.25, 5 + 15), (0.75, 15 + 5)])
def test_the_budget_is_split(share, expected):
    sender, receiver = ends(f"efmixed(top20, share={share})")
    for seed in range(3):
        out = cross(sender, receiver, torch.randn(1, 100, generator=torch.Generator().manual_seed(seed)))
        places = receiver.indices()
        assert places is not None and places.numel() <= expected
        assert set(out.flatten().nonzero().flatten().tolist()) <= set(places.tolist())


def test_a_message_costs_about_what_a_plain_one_does():
    mixed, plain = (Link(how).wire_bytes((8, 1000), torch.float32) for how in ("efmixed(top10)", "top10"))
    assert plain <= mixed < 1.1 * plain


def test_the_halves_of_random_indices_differ():
    sender, receiver = ends("efmixed(rand20)")
    cross(sender, receiver, torch.ones(1, 200))
    places = receiver.indices()
    assert places is not None and 20 < places.numel() < 40
