"""Ranks that decide together: what they measure, what they refuse, and what they tell each other."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.adam_states import global_weights
from helpers.sharded_states import Part, Ranks, Saved, box_of, cut, joined, other, rows, saved, whole
from helpers.small_state import SCHEMES, assert_agreed, run
from torch import nn

import shrinkpoint as sp
from shrinkpoint.codec.lattice import as_matrix
from shrinkpoint.errors import LossWarning, MismatchError, PolicyError, StateError
from shrinkpoint.schemes import Scheme
from shrinkpoint.schemes.evaluate import ShardedModelEvaluator
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.steps import StepCandidates
from shrinkpoint.schemes.planner import check_shardable, plan_shards
from shrinkpoint.sharding.collectives import LocalCollectives
from shrinkpoint.sharding.global_tensors import ShardLayout, ShardSpec
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import Role

# what is measured


class Parts(nn.Module):
    """What a rank has of a model: its boxes are the parameters."""

    def __init__(self, flat: FlatState) -> None:
        super().__init__()
        self.names = [name for name, info in flat.infos.items() if info.role is Role.PARAMETER]
        self.all = nn.ParameterList([nn.Parameter(flat.tensors[name], requires_grad=False) for name in self.names])
        self.best = [x.detach().clone() for x in self.all]


def bowl(model: Parts) -> float:
    """1 and the mean squared distance to where it began, of some parameters more than of others."""
    model.eval()
    sums = (
        (1 + i % 3) * float((x - best).double().square().sum())
        for i, (x, best) in enumerate(zip(model.all, model.best, strict=True))
    )
    return 1 + sum(sums) / 1000


def measured(make: Any, width: int) -> tuple[list[Saved], list[Any]]:
    """A chain of checkpoints whose loss all ranks measure: each that of its part, as many times as there are ranks."""
    flats = [copy.deepcopy(flat) for flat in run()]
    models: list[Parts] = []

    def target(part: Part) -> ShardedModelEvaluator:
        models.append(Parts(part.flat))
        return ShardedModelEvaluator(part.flat, lambda model: 1 + width * (bowl(model) - 1), models[-1])

    found = saved(make, flats, width, target=target)
    for model in models:
        assert model.training and all(map(torch.equal, model.all, model.best))
    return found, models


@pytest.mark.parametrize(
    "options",
    [{"nats": 0.05}, {"budget": "2%"}, {"relative_error": 0.2}],
    ids=str,
)
def test_all_ranks_measure_the_same_trials_together(options):
    def make() -> Scheme:
        return sp.Fisher(evaluate=lambda model: bowl(model), **options)

    (one, two), (three, four) = measured(make, 1)[0], measured(make, 3)[0]
    assert [other(one, three), other(two, four)] == [[], []]
    assert_agreed([three, four])
    assert one.loss[0]["tried"] and three.loss[0]["rise"] == pytest.approx(one.loss[0]["rise"], rel=1e-6)


def test_a_search_of_several_ranks_chooses_what_one_would():
    def make() -> Scheme:
        return sp.CNR(threshold=0.02, evaluate=bowl)

    (one, two), (three, four) = measured(make, 1)[0], measured(make, 3)[0]
    assert [other(one, three), other(two, four)] == [[], []]
    assert one.loss[0]["chosen"] == three.loss[0]["chosen"] and two.loss[0]["chosen"] == four.loss[0]["chosen"]
    assert_agreed([three, four])


def test_where_nothing_is_known_of_weights_all_ranks_ask_for_it_together():
    plain = [flatten({"model": state_of(flat)}) for flat in run()[:1]]

    def make() -> Scheme:
        return sp.Fisher(nats=0.05, evaluate=bowl)

    def chain(width: int) -> Saved:
        def target(part: Part) -> ShardedModelEvaluator:
            return ShardedModelEvaluator(part.flat, lambda model: 1 + width * (bowl(model) - 1), Parts(part.flat))

        return saved(make, copy.deepcopy(plain), width, target=target)[0]

    one, three = chain(1), chain(3)
    assert one.loss[0]["probed"].keys() == three.loss[0]["probed"].keys() and len(one.loss[0]["probed"]) > 3
    assert one.loss[0]["probed"] == pytest.approx(three.loss[0]["probed"], rel=1e-4)
    assert other(one, three) == []
    assert_agreed([three])


def state_of(flat: FlatState) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model/"): x for name, x in flat.tensors.items() if name.startswith("model/")}


class Recorder:
    """Squares of gradients, by the names of the model; of boxes, or of all of it."""

    ready = True

    def __init__(self, square: dict[str, torch.Tensor]) -> None:
        self.square = self.mean = square


@pytest.mark.parametrize("by_box", [False, True])
def test_squares_that_were_recorded_are_those_of_the_boxes(by_box):
    weights = state_of(run()[0])
    flat = flatten({"model": weights})
    squares = {name: x.detach().square() + 0.1 for name, x in weights.items()}
    parts = cut(flat, 3)

    def settled(rank, collectives):
        mine = parts[rank]
        given = squares
        if by_box:
            given = {name: box_of(x, *rows(tuple(x.shape), 3, rank)) if x.dim() else x for name, x in squares.items()}
        scheme = sp.Fisher(relative_error=0.05, gradients=Recorder(given))
        return plan_shards(scheme, mine.flat, None, ShardLayout(mine.places, collectives)).quantize(mine.flat, None)

    found = Ranks(3).all(settled)
    made = joined([(kept.state.tensors, parts[rank].places) for rank, kept in enumerate(found)])
    known = {f"model/{name}": Curvature(as_matrix(x)) for name, x in squares.items()}
    steps = whole_steps(flat, known)
    for name, lattice in steps.items():
        x, kept = flat.tensors[name], found[0].quantized[name]
        part = ShardSpec(name, tuple(x.shape), (0,) * x.dim()).slice_lattice(lattice, tuple(kept.codes.shape))
        moved = kept.lattice.rows.int() - part.rows.int()
        assert torch.equal(kept.lattice.columns, part.columns) and len({*moved.tolist()}) <= 2  # the size; a cap
    assert {*made} == {*flat.tensors}


def whole_steps(flat: FlatState, known: dict[str, Curvature]) -> dict[str, Any]:
    weights = {name: x for name, x in flat.tensors.items() if name in known and x.numel() >= 16 and x.dim()}
    return StepCandidates(
        global_weights(weights), {name: known[name] for name in weights}, None, None, 0, 0
    ).unit_lattices


# what is refused


class SilentCollectives(LocalCollectives):
    """Collectives that no rank may call."""

    def all_to_all(self, objects: Any) -> list[Any]:
        raise AssertionError("a rank waited for others")

    all_gather = all_to_all


class Strange:
    """A scheme of somebody else's."""

    id = "strange"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (Strange, "several ranks can decide"),
        (lambda: sp.Fisher(evaluate=bowl), "no model that is saved"),
        (lambda: sp.CNR(evaluate=bowl), "no model that is saved"),
        (lambda: sp.CNR(config={"bins": 16, "steps": 50, "range": 0.3}, group=object()), "share the trials"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_any_rank_waits(make, match):
    part = cut(run()[0], 2)[0]
    with pytest.raises(PolicyError, match=match):
        plan_shards(make(), part.flat, None, ShardLayout(part.places, SilentCollectives()))
    with pytest.raises(PolicyError, match=match):
        check_shardable(make())


def test_lossless_waits_for_nobody():
    part, scheme = cut(run()[0], 2)[0], sp.Lossless()
    check_shardable(scheme)
    assert plan_shards(scheme, part.flat, None, ShardLayout(part.places, SilentCollectives())) is scheme


def test_ranks_with_different_schemes_are_told_so():
    parts = cut(run()[0], 2)

    def work(rank, collectives):
        return plan_shards(
            sp.Fisher(ratio=10 + rank), parts[rank].flat, None, ShardLayout(parts[rank].places, collectives)
        )

    errors = Ranks(2).run(work)
    assert all(isinstance(one, MismatchError) and "ratio=10.0" in str(one) for one in errors)


def test_a_model_that_shares_no_memory_with_what_is_saved_is_refused_on_all_ranks():
    parts = cut(run()[0], 2)

    def work(rank, collectives):
        mine = parts[rank]
        target = ShardedModelEvaluator(mine.flat, bowl, Parts(copy.deepcopy(mine.flat)))
        return plan_shards(sp.Fisher(evaluate=bowl), mine.flat, None, ShardLayout(mine.places, collectives), target)

    assert all(isinstance(one, PolicyError) and "share memory" in str(one) for one in Ranks(2).run(work))


def test_a_tied_weight_is_measured_and_written_once_though_it_has_two_names():
    flat = copy.deepcopy(run()[0])
    names = {"model/wte.weight": "model/tied.weight"}
    for name, twin in names.items():
        flat.tensors[twin], flat.infos[twin] = flat.tensors[name], replace(flat.infos[name], name=twin)
    parts = cut(flat, 2)
    for part in parts:  # one memory, as in a model
        part.flat.tensors["model/tied.weight"] = part.flat.tensors["model/wte.weight"]

    def work(rank, collectives):
        mine = parts[rank]
        target = ShardedModelEvaluator(mine.flat, bowl, Parts(mine.flat))
        assert {"model/wte.weight", "model/tied.weight"} <= target.quantizable
        made = plan_shards(
            sp.Fisher(nats=0.05, evaluate=bowl), mine.flat, None, ShardLayout(mine.places, collectives), target
        )
        return made.quantize(mine.flat, None)

    for kept in Ranks(2).all(work):
        assert torch.equal(kept.state.tensors["model/tied.weight"], kept.state.tensors["model/wte.weight"])
        assert "model/wte.weight" in kept.quantized and "model/tied.weight" not in kept.quantized


def test_replicas_of_which_each_saves_a_part_are_not_measured():
    """A trial's values would be on the rank that saves them, and the other ranks would measure old ones."""
    flat = flatten({"model": {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(64, 64)}})
    parts = cut(flat, 2, lone={"model/a.weight": 0, "model/b.weight": 1})

    def work(rank, collectives):
        mine = parts[rank]
        names = {name: mine.flat.tensors.get(name, torch.zeros(64, 64)) for name in flat.tensors}
        replica = nn.ModuleDict({name[6]: nn.Linear(64, 64, bias=False) for name in names})
        for name, x in names.items():
            replica[name[6]].weight = nn.Parameter(x, requires_grad=False)
        return plan_shards(
            sp.Fisher(evaluate=bowl),
            mine.flat,
            None,
            ShardLayout(mine.places, collectives),
            ShardedModelEvaluator(mine.flat, bowl, replica),
        )

    first, second = Ranks(2).run(work)
    assert isinstance(first, PolicyError) and "a.weight" in str(first) and str(first) == str(second)


@pytest.mark.parametrize("name", ["fisher by error", "inshrinkerator", "excp"])
def test_what_goes_wrong_on_one_rank_is_raised_by_all(name):
    parts = cut(run()[0], 3)
    broken = parts[1].flat
    tensors = broken.tensors | {"model/up.weight": torch.zeros(99, 64)}
    parts[1].flat = replace(broken, tensors=tensors)

    def work(rank, collectives):
        mine = parts[rank]
        return plan_shards(SCHEMES[name](), mine.flat, None, ShardLayout(mine.places, collectives))

    assert all(isinstance(one, StateError) and "up.weight" in str(one) for one in Ranks(3).run(work))


def test_an_evaluate_that_raises_on_one_rank_makes_all_exact():
    parts = cut(copy.deepcopy(run()[0]), 2)

    def work(rank, collectives):
        def evaluate(model):
            if rank == 1:
                raise ZeroDivisionError("batch 7")
            return bowl(model)

        mine = parts[rank]
        target = ShardedModelEvaluator(mine.flat, evaluate, Parts(mine.flat))
        return plan_shards(sp.Fisher(evaluate=bowl), mine.flat, None, ShardLayout(mine.places, collectives), target)

    with pytest.warns(LossWarning, match="batch 7"):
        plans = Ranks(2).run(work)
    assert all(plan.loss["exact"].endswith("ZeroDivisionError: batch 7") and not plan.quantized for plan in plans)


def test_a_rank_without_memory_to_plan_makes_all_exact():
    parts = cut(run()[0], 3)

    def work(rank, collectives):
        scheme, mine = sp.Fisher(relative_error=0.3), parts[rank]

        def fail(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        if rank == 1:
            scheme._quantize_weights = fail
        return plan_shards(scheme, mine.flat, None, ShardLayout(mine.places, collectives))

    with pytest.warns(LossWarning, match="out of memory while planning"):
        plans = Ranks(3).run(work)
    assert all("CUDA out of memory" in plan.loss["exact"] and not plan.quantized for plan in plans)


# what crosses


@pytest.mark.parametrize("name", ["fisher by budget", "inshrinkerator", "lc", "excp"])
def test_what_ranks_tell_each_other_is_small(name):
    """Sums by row and by column, and sketches: of a weight of a million values, a thousandth of the state, or so."""
    torch.manual_seed(3)
    x, move = torch.randn(2, 1024, 1024)
    flats = [flatten({"model": {"a.weight": x + i * move}}) for i in (0, 0.01)]
    ranks = Ranks(2)
    saved(SCHEMES[name], flats, 2, ranks=ranks)
    assert max(ranks.received) < 0.02 * flats[0].nbytes
    assert max(ranks.rounds) < 200


def test_a_state_with_nothing_to_quantize_is_written_as_it_is():
    flat = flatten({"model": {"a.weight": torch.arange(12).reshape(4, 3)}, "step": torch.tensor(3)})
    for make in SCHEMES.values():
        (found,) = saved(make, [flat], 3)
        assert all(torch.equal(x, flat.tensors[name]) for name, x in found.tensors.items())
        assert_agreed([found])


def test_a_rank_with_nothing_takes_part():
    flat = run()[0]
    lone = dict.fromkeys(flat.tensors, 0)
    for make in (SCHEMES["fisher by budget"], SCHEMES["inshrinkerator"], SCHEMES["excp"]):
        (expected,), (found,) = whole(make(), [flat]), saved(make, [flat], 2, lone=lone)
        assert other(expected, found) == [] and not found.kept[1].state.tensors
        assert_agreed([found])


def test_a_box_beyond_its_tensor_is_refused_on_all_ranks():
    parts = cut(run()[0], 2)
    place = parts[1].places["model/up.weight"]
    parts[1].places["model/up.weight"] = replace(place, offsets=(90, 0))

    def work(rank, collectives):
        return plan_shards(sp.LCCheckpoint(), parts[rank].flat, None, ShardLayout(parts[rank].places, collectives))

    assert all(isinstance(one, StateError) and "up.weight" in str(one) for one in Ranks(2).run(work))
