"""Bits go where the loss minds errors most."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shrinkpoint.comm.simulate import insert_compression
from shrinkpoint.errors import PolicyError
from shrinkpoint_lab.forecast.bit_allocation import allocate_bits, greedy_allocate

SPECS = ("q2:64", "q4:64", "q8:64")


class Net(nn.Module):
    """Three boundaries; the last but one is seen a thousand times as clearly as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(3))
        self.told: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(())
        for part, weight in zip(self.parts, (1.0, 1000.0, 1.0), strict=True):
            out = out + weight * (part(x) - x).square().mean()
        return out


X = torch.randn(8, 256, generator=torch.Generator().manual_seed(3))
AFTER = ("parts.0", "parts.1", "parts.2")


def loss(net: nn.Module) -> float:
    return float(net(X))


def test_the_sensitive_boundary_gets_the_bits() -> None:
    assert allocate_bits(Net(), AFTER, loss, ratio=7.0, candidates=SPECS).specs == ("q2:64", "q8:64", "q2:64")


def test_the_messages_are_as_small_as_was_asked() -> None:
    net = Net()
    found = allocate_bits(net, AFTER, loss, ratio=7.0, candidates=SPECS)
    points = insert_compression(net, AFTER, per_point=found.per_link)
    with torch.no_grad():
        risen = loss(net)
    ledgers = points.link_stats().values()
    assert sum(one.raw_bytes for one in ledgers) >= 7.0 * sum(one.wire_bytes for one in ledgers)
    assert risen == pytest.approx(found.predicted_increase, rel=1e-5)  # this loss is a sum over boundaries


def test_the_model_is_left_unchanged() -> None:
    net = Net()
    allocate_bits(net, AFTER, loss, ratio=4.0, candidates=SPECS)
    assert loss(net) == 0.0 and not any(part._forward_hooks for part in net.parts)


def test_more_than_the_smallest_messages_is_refused() -> None:
    with pytest.raises(PolicyError, match="bytes at least"):
        allocate_bits(Net(), AFTER, loss, ratio=31.0, candidates=SPECS)


def test_a_model_that_is_broken_already_is_refused() -> None:
    with pytest.raises(PolicyError, match="nan without compression"):
        allocate_bits(Net(), AFTER, lambda net: float("nan"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(0, 60))
def test_shares_stay_within_the_bytes_and_never_raise_the_loss(table, spare) -> None:
    names, sizes = ("a", "b", "c"), (10, 20, 40)
    rises = [dict(zip(names, sorted(row, reverse=True), strict=True)) for row in table]
    size = [dict(zip(names, sizes, strict=True))] * len(table)
    most = 10 * len(table) + spare
    chosen = greedy_allocate(rises, size, most)
    assert sum(size[0][spec] for spec in chosen) <= most
    best = min(
        sum(rise[spec] for rise, spec in zip(rises, picked, strict=True))
        for picked in itertools.product(names, repeat=len(table))
        if sum(size[0][spec] for spec in picked) <= most
    )
    found = sum(rise[spec] for rise, spec in zip(rises, chosen, strict=True))
    first = sum(rise["a"] for rise in rises)
    assert best <= found <= first
