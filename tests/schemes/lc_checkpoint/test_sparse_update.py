"""SCAR and TOPN: which values are written, that they are exact, and that the others are what was written last."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from helpers.parameters import each_value
from helpers.round_trip import write
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes import QuantizedState
from shrinkpoint.tensors.flat_state import flatten

RANDOM = torch.Generator()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=RANDOM.manual_seed(seed))


def kept_of(scheme: Any, state: dict[str, Tensor], parent: QuantizedState | None = None) -> QuantizedState:
    reference = None if parent is None else Reference(parent.state.tensors, parent.quantized)
    return scheme.quantize(flatten(state), reference)


def joined(state: Any) -> Tensor:
    return torch.cat([x.reshape(-1) for x in state.values()])


def walk(steps: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Two weights, of which the values move in every step, some by far more than others."""
    out = [{"a.weight": noise(50, 90, seed=1), "b.weight": noise(70, 61, seed=2)}]
    for step in range(1, steps):
        moves = (noise(*x.shape, seed=10 * step + n) ** 3 + 0.3 for n, x in enumerate(out[0].values()))
        out.append({name: x + 0.1 * move for (name, x), move in zip(out[-1].items(), moves, strict=True)})
    return [{name: x.to(dtype) for name, x in state.items()} for state in out]


def places(scheme: Any, states: list[dict[str, Tensor]]) -> list[Tensor]:
    """Which values each save after the first one writes: bool."""
    held, out = kept_of(scheme, states[0]), []
    for state in states[1:]:
        held = kept_of(scheme, state, held)
        out.append(torch.cat([(held.quantized[name].codes == 0).reshape(-1) for name in state]))
    return out


def test_largest_writes_exactly_those_that_are_farthest_away():
    scheme, held = sp.SCAR(fraction=0.1), None
    for state in walk(5):
        before, held = held, kept_of(scheme, state, held)
        if before is None:
            continue
        far = (joined(state) - joined(before.state.tensors)).abs()
        expected = far >= far.sort(descending=True).values[math.ceil(0.1 * far.numel()) - 1]
        assert torch.equal(joined({name: one.codes for name, one in held.quantized.items()}) == 0, expected)


def test_what_has_waited_longer_is_farther_away_and_comes_first():
    """Distances are to what a reader has, not to the state before: steady drift brings every value its turn."""
    states = [{"a.weight": noise(64, 64, seed=1)}]
    speed = 0.5 + torch.rand(64, 64, generator=RANDOM.manual_seed(3))
    for _ in range(12):
        states.append({"a.weight": states[-1]["a.weight"] + speed})
    counts = torch.stack(places(sp.SCAR(fraction=1 / 4), states)).sum(0)
    assert int(counts.min()) >= 1 and float(counts.float().mean()) == 3.0


@given(parts=st.integers(1, 12), total=st.integers(64, 90))
@settings(max_examples=15)
def test_round_robin_writes_every_value_once_before_it_writes_one_again(parts, total):
    states = [{"a.weight": torch.full((total, 65), float(step))} for step in range(2 * parts + 1)]
    written = torch.stack(places(sp.SCAR(fraction=1 / parts, order="round robin"), states)).long()
    for begin in range(parts):
        some = written[begin : begin + parts].sum(0)
        assert int(some.min()) == 1 and int((some > 1).sum()) < parts  # the share is rounded up


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_round_robin_goes_on_from_the_manifest(stop):
    """And begins again where the last checkpoint was a keyframe, which holds every value."""
    states = walk(9)
    whole = places(sp.SCAR(fraction=1 / 4, order="round robin"), states)
    first, held = sp.SCAR(fraction=1 / 4, order="round robin"), None
    for state in states[: stop + 1]:
        held = kept_of(first, state, held)
    second = sp.SCAR(fraction=1 / 4, order="round robin")
    second.resume(held.loss, 1)
    for step, state in enumerate(states[stop + 1 :], stop):
        held = kept_of(second, state, held)
        assert torch.equal(torch.cat([(one.codes == 0).reshape(-1) for one in held.quantized.values()]), whole[step])


@pytest.mark.parametrize(
    "loss",
    [
        None,
        {},
        [],
        {"scheme": "topn", "turn": 3},
        {"scheme": "scar", "turn": -1},
        {"scheme": "scar", "turn": 1.5},
        {"scheme": "scar", "turn": 1 << 80},
    ],
)
def test_what_another_wrote_is_no_place_to_go_on_from(loss):
    states = walk(3)
    scheme = sp.SCAR(fraction=1 / 4, order="round robin")
    expected = places(scheme, states)
    scheme.resume(loss, 1)
    parent = kept_of(sp.TOPN(), states[0])
    symbols = kept_of(scheme, states[1], parent).quantized
    assert torch.equal(torch.cat([(one.codes == 0).reshape(-1) for one in symbols.values()]), expected[0])


def test_a_keyframe_begins_the_round_anew():
    states = walk(4)
    scheme = sp.SCAR(fraction=1 / 4, order="round robin")
    first = places(scheme, states)
    assert torch.equal(places(scheme, states)[0], first[0]) and not torch.equal(first[0], first[1])


def test_at_random_is_the_same_for_the_same_seed_and_other_places_every_time():
    states = walk(4)
    a, b, c = (places(sp.SCAR(order="random", seed=seed), states) for seed in (1, 1, 2))
    count = math.ceil(joined(states[0]).numel() / 8)
    assert all(torch.equal(x, y) and int(x.sum()) == count for x, y in zip(a, b, strict=True))
    some = [*a, *c]
    overlaps = [float((x & y).sum()) / count for i, x in enumerate(some) for y in some[:i]]
    assert all(0.08 < one < 0.18 for one in overlaps), overlaps  # an eighth, as independent draws have


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.5, 1.0])
def test_topn_writes_the_largest_entries_of_the_difference_and_nothing_else_moves(fraction):
    before, now = walk(2)
    held = kept_of(sp.TOPN(fraction=fraction), now, kept_of(sp.TOPN(fraction=fraction), before))
    entries, written = joined(now) - joined(before), joined(held.state.tensors)
    count = math.ceil(fraction * entries.numel())
    top = entries.abs().topk(count).indices
    expected = joined(before).clone()
    expected[top] = joined(now)[top]
    assert torch.equal(written, expected) and int((written != joined(before)).sum()) == count


@pytest.mark.parametrize(
    ("make", "dtype"),
    each_value(
        [sp.TOPN, sp.SCAR, lambda **more: sp.SCAR(order="random", **more)],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_a_written_value_is_exact_and_the_others_have_the_age_they_have(make, dtype):
    states, scheme, written = walk(5, dtype), make(fraction=0.2), None
    ages: list[Tensor] = []
    for state in states:
        written = write(state, written, scheme=scheme)
        ages.append(joined(state))
        found = joined(written.read())
        assert bool(torch.stack([found == one for one in ages]).any(0).all())  # of one of the states, to the bit
        assert len(ages) == 1 or float((found == ages[-1]).float().mean()) >= 0.2
    assert len({*(int((joined(written.read()) == one).sum()) for one in ages)}) > 1


def test_what_a_reader_has_is_not_written_again():
    before, now = walk(2)
    for name, x in now.items():
        x[: x.shape[0] // 2] = before[name][: x.shape[0] // 2]
    for scheme in (sp.SCAR(fraction=1.0, order="round robin"), sp.SCAR(fraction=0.9), sp.TOPN(fraction=1.0)):
        held = kept_of(scheme, now, kept_of(scheme, before))
        for name, one in held.quantized.items():
            assert one.exact.numel() == int((now[name] != before[name]).sum())
            assert torch.equal(held.state.tensors[name], now[name])


def test_places_cost_what_gaps_between_them_do():
    """The entropy of a share of one in a hundred is 0.0808 bits a value."""
    state = {"a.weight": noise(256, 1024, seed=1)}
    moved = {"a.weight": state["a.weight"] + noise(256, 1024, seed=2)}
    written = write(moved, write(state), scheme=sp.TOPN(fraction=0.01))
    (record,) = written.records()
    side, codes, _ = struct.unpack_from("<IQQ", record.parts["symbols"])
    places = 256 * 1024 * 0.0808 / 8
    assert places < side + codes < 1.05 * places + 64
    assert written.bytes_of("a.weight") < places + 4 * 2622  # the values themselves, without gain or loss
