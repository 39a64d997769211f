"""What has not moved since the checkpoint before loses nothing more, whoever has which part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.adam_states import adam, normal
from helpers.parameters import each_value
from helpers.sharded_states import Ranks, after, columns, cut, joined, quarters, rows
from helpers.small_state import PRUNED, run
from helpers.strategies import bits
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.planner import plan_shards
from shrinkpoint.schemes.select import is_bitwise_equal, unchanged_tensors
from shrinkpoint.sharding.collectives import Collectives
from shrinkpoint.sharding.global_tensors import GlobalTensors, ShardLayout
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.tensors.flat_state import FlatState, flatten

SCHEMES = {
    "fisher": lambda: sp.Fisher(relative_error=0.2),
    "fisher by ratio": lambda: sp.Fisher(ratio=12),
    "inshrinkerator": lambda: sp.Inshrinkerator(config=PRUNED),
    "cnr": lambda: sp.CNR(config={"bins": 16, "steps": 50, "range": 0.3}),
}
FROZEN = ("model/up.weight", "model/wte.weight")
PARTLY = "model/head.weight"


def restored(flat: FlatState, values: dict[str, Tensor]) -> FlatState:
    """The next state of a run, some of whose weights have not moved since it was restored."""
    tensors = dict(flat.tensors) | {name: values[name].clone() for name in FROZEN}
    tensors[PARTLY] = torch.cat([values[PARTLY][:70], flat.tensors[PARTLY][70:]])
    return replace(flat, tensors=tensors)


@pytest.mark.parametrize(("name", "ranks"), each_value(SCHEMES, [(1, rows), (3, rows), (2, columns), (4, quarters)]))
def test_on_several_ranks_what_does_not_move_keeps_its_values_through_restores(name, ranks):
    width, cutter = ranks
    values: dict[str, Tensor] = {}
    reference: list[Reference | None] = [None] * width
    losses: list[Any] = [None]
    for generation in range(4):
        flat = restored(run()[1], values) if generation else run()[0]
        parts = cut(flat, width, cutter)

        def work(rank: int, collectives: Collectives, now: Any = (parts, reference, losses[-1], generation)) -> Any:
            parts, before, loss, generation = now
            scheme, mine = SCHEMES[name](), parts[rank]
            scheme.resume(loss, generation)
            settled = plan_shards(scheme, mine.flat, before[rank], ShardLayout(mine.places, collectives))
            kept = settled.quantize(mine.flat, before[rank])
            return kept, after(kept, mine.flat)

        found = Ranks(width).all(work)
        before, values = values, joined([(found[i][0].state.tensors, parts[i].places) for i in range(width)])
        reference, losses = [one for _, one in found], [found[0][0].loss]
        if generation:
            assert all(bits(values[one]) == bits(before[one]) for one in FROZEN)
            moved = flat.tensors[PARTLY][70:]
            assert 0 < (values[PARTLY][70:] - moved).norm() < 0.5 * moved.norm()
            if name.startswith("fisher"):  # by element
                assert bits(values[PARTLY][:70]) == bits(before[PARTLY][:70])


def unchanged(state: Any, reference: Reference | None) -> dict[str, Any]:
    return unchanged_tensors(state.tensors, state, reference, GlobalTensors.from_state(state))


def test_what_a_reader_has_exactly_or_as_a_difference_has_nothing_to_be_kept():
    state = {"a.weight": normal(64, 80), "b.weight": normal(64, 80, seed=1)}
    flat = flatten(state)
    assert unchanged(flat, None) == {} == unchanged(flat, Reference(flat.tensors))
    kept = sp.LCCheckpoint().quantize(flatten({n: x + 0.01 for n, x in state.items()}), Reference(flat.tensors))
    assert kept.quantized and unchanged(kept.state, Reference(kept.state.tensors, kept.quantized)) == {}
    kept = sp.Fisher(relative_error=0.2).quantize(flat, None)
    assert unchanged(kept.state, Reference(kept.state.tensors, kept.quantized)).keys() == {*state}
    assert unchanged(flat, Reference(kept.state.tensors, kept.quantized)) == {}


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (70, 90), (0, 4), (2, 9000)])
def test_equal_is_equal_in_every_bit(shape):
    x = torch.randn(shape)
    assert is_bitwise_equal(x, x.clone()) and is_bitwise_equal(x.to(torch.bfloat16), x.to(torch.bfloat16))
    if x.numel():
        other = x.clone()
        other.view(-1)[-1] = float("nan")
        assert not is_bitwise_equal(x, other) and is_bitwise_equal(other, other.clone())
        assert not is_bitwise_equal(torch.zeros_like(x), -torch.zeros_like(x))


def test_an_unmoved_base_takes_nothing_of_the_room_that_a_ratio_leaves():
    """Most of the state is frozen: what a delta has to hold is the small rest, with nearly all of the bytes."""
    state = {"base.weight": normal(400, 400), "a.weight": normal(64, 80, seed=1)}
    store = sp.Store(MemoryStorage())
    store.save(1, adam(state), scheme=sp.Fisher(ratio=12))
    found = store.restore()
    scheme = sp.Fisher(ratio=12)
    scheme.resume(found.manifest.loss, 1)
    now = found.state
    now["model"]["a.weight"] = now["model"]["a.weight"] + 0.5 * normal(64, 80, seed=2)
    expected = now["model"]["a.weight"].clone()
    store.save(2, now, scheme=scheme)
    error = (store.load(2)["model"]["a.weight"] - expected).norm() / expected.norm()
    assert error < 0.1


def test_master_copies_count_as_weights():
    masters = {"a.weight": normal(80, 80), "b.weight": normal(80, 80, seed=1)}
    state = {"model": {name: x.bfloat16() for name, x in masters.items()}, "fp32_masters": masters}
    for scheme, least in ((sp.Fisher(relative_error=0.3), 8), (sp.Inshrinkerator(config=PRUNED), 5), ("lossless", 1)):
        report = sp.Store(MemoryStorage()).save(1, state, scheme=scheme)
        assert least < report.weights_ratio < 100
