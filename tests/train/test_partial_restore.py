"""A part of a model comes back; the rest stays as it is."""

from __future__ import annotations

import pytest
import torch
from helpers.small_training import Digits, Letters, Run
from helpers.strategies import same
from torch import nn
from torch.optim import lr_scheduler

import shrinkpoint as sp
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.train import RankShard


@pytest.fixture
def saved(tmp_path):
    run = Run(steps=5)
    with sp.CheckpointManager(tmp_path) as manager:
        manager.save(1, **run.parts)
        before = run.photo()
        run.steps(5)
        yield run, manager, before["model"]


def test_what_fits_comes_back_and_nothing_else_changes(saved):
    run, manager, before = saved
    after = run.photo()
    at = manager.restore(model=run.model, only=["head.*", "body.0.w*"])
    assert at.step == 1
    now = run.photo()
    for name in before:
        wanted = before if name in ("head.weight", "head.bias", "body.0.weight") else after["model"]
        assert torch.equal(now["model"][name], wanted[name]), name
    assert all(same(now[part], after[part]) for part in ("optimizer", "rng", "training"))
    assert not torch.equal(before["head.weight"], after["model"]["head.weight"])


def test_a_model_that_lost_a_part_gets_just_that(saved):
    """The rest of the model need not be in the checkpoint."""
    _, manager, before = saved
    model = nn.ModuleDict({"head": nn.Linear(64, 10), "new": nn.Linear(3, 3)})
    new = model["new"].weight.clone()
    manager.restore(model=model, only=["head.*"])
    assert torch.equal(model["head"].weight, before["head.weight"]) and torch.equal(model["new"].weight, new)


def test_a_part_that_the_checkpoint_does_not_have_is_an_error(saved):
    _, manager, _ = saved
    with pytest.raises(MismatchError):
        manager.restore(model=nn.ModuleDict({"new": nn.Linear(3, 3)}), only=["new.*"])


@pytest.mark.parametrize("only", ["head.*", [], ["nothing.*"], ["head.*", "haed.*"], 3, [3]])
def test_a_pattern_that_fits_nothing_is_refused(saved, only):
    run, manager, _ = saved
    with pytest.raises(PolicyError, match="only"):
        manager.restore(model=run.model, only=only)


def test_only_is_of_a_model_and_its_optimizer(saved):
    run, manager, _ = saved
    with pytest.raises(PolicyError, match="model= alone"):
        manager.restore(**run.parts, scheduler=lr_scheduler.StepLR(run.optimizer, 1), only=["head.*"])
    with pytest.raises(PolicyError, match="one optimizer"):
        manager.restore(model=run.model, optimizer=[run.optimizer], only=["head.*"])
    other = torch.optim.AdamW([nn.Parameter(x.detach().clone()) for x in run.model.parameters()])
    with pytest.raises(PolicyError, match="none of the selected"):
        manager.restore(model=run.model, optimizer=other, only=["head.*"])
    with pytest.raises(PolicyError, match="model= alone"):
        manager.restore(only=["head.*"])


def test_of_an_empty_store_nothing_comes_back(tmp_path):
    assert sp.CheckpointManager(tmp_path).restore(model=Run().model, only=["head.*"]) is None


# parts of tensors

NAME = "body.0.weight"
SHAPE = (96, 64)


def _mask(shape, seed=0, share=0.3):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def _of(*at):
    out = torch.zeros(SHAPE, dtype=torch.bool)
    out[at] = True
    return out


PARTS = {
    "all": (..., _of(...)),
    "a run of rows": (slice(3, 20), _of(slice(3, 20))),
    "every other row": (slice(None, None, 2), _of(slice(None, None, 2))),
    "the last rows": (slice(-5, None), _of(slice(-5, None))),
    "rows": ([0, 7, 95], _of([0, 7, 95])),
    "rows as a tensor": (torch.tensor([4, 2]), _of([2, 4])),
    "a box": ((slice(2, 5), slice(10, 64)), _of(slice(2, 5), slice(10, 64))),
    "a box by its ends": (((2, 5), (10, 64)), _of(slice(2, 5), slice(10, 64))),
    "values": (_mask(SHAPE), _mask(SHAPE)),
    "no value": (torch.zeros(SHAPE, dtype=torch.bool), torch.zeros(SHAPE, dtype=torch.bool)),
    "a function": (lambda name, x: slice(0, len(x) // 2), _of(slice(0, 48))),
}


def _states(run: Run) -> dict[str, dict]:
    """What the optimizer keeps, by the name of the parameter."""
    return {name: dict(run.optimizer.state[x]) for name, x in run.model.named_parameters() if x in run.optimizer.state}


def _copied(states):
    return {
        name: {key: x.clone() if torch.is_tensor(x) else x for key, x in one.items()} for name, one in states.items()
    }


@pytest.fixture
def trained(tmp_path):
    run = Run(steps=5)
    with sp.CheckpointManager(tmp_path) as manager:
        manager.save(1, **run.parts)
        before = run.photo()["model"], _copied(_states(run))
        run.steps(5)
        yield run, manager, before


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_a_tensor_comes_back_with_its_moments_and_nothing_else_changes(trained, kind):
    run, manager, (weights, states) = trained
    part, mask = PARTS[kind]
    after, others = run.photo(), _copied(_states(run))
    manager.restore(model=run.model, optimizer=run.optimizer, only={NAME: part})
    now, found = run.photo(), _states(run)
    for name, x in now["model"].items():
        wanted = torch.where(mask, weights[name], after["model"][name]) if name == NAME else after["model"][name]
        assert torch.equal(x, wanted), name
    for name, state in found.items():
        for slot, x in state.items():
            old, new = states[name][slot], others[name][slot]
            wanted = new if name != NAME else torch.where(mask, old, new) if x.dim() else old if kind == "all" else new
            assert torch.equal(x, wanted), (name, slot)
    assert all(same(now[name], after[name]) for name in ("rng", "training"))
    groups = [now["optimizer"]["param_groups"], after["optimizer"]["param_groups"]]
    assert same(*groups)
    assert not torch.equal(weights[NAME], after["model"][NAME])


def test_without_an_optimizer_its_moments_stay(trained):
    run, manager, (weights, _) = trained
    others = _copied(_states(run))
    manager.restore(model=run.model, only={NAME: slice(0, 3)})
    assert torch.equal(run.model.body[0].weight[:3], weights[NAME][:3])
    assert same(_copied(_states(run)), others)


def test_of_an_optimizer_that_has_not_begun_the_rest_is_as_at_its_start(trained):
    _, manager, (_, states) = trained
    fresh = Run()
    manager.restore(model=fresh.model, optimizer=fresh.optimizer, only={NAME: slice(0, 3)})
    found = _states(fresh)
    assert [*found] == [NAME]
    assert torch.equal(found[NAME]["exp_avg"][:3], states[NAME]["exp_avg"][:3])
    assert not found[NAME]["exp_avg"][3:].any() and found[NAME]["step"] == states[NAME]["step"]
    fresh.steps(1)


def test_what_was_saved_before_the_first_step_brings_back_moments_of_zero(tmp_path):
    run = Run()
    with sp.CheckpointManager(tmp_path) as manager:
        manager.save(0, **run.parts)
        run.steps(3)
        others = _copied(_states(run))
        manager.restore(model=run.model, optimizer=run.optimizer, only={NAME: slice(0, 3), "head.*": ...})
    state = _states(run)
    assert not state[NAME]["exp_avg"][:3].any() and torch.equal(state[NAME]["exp_avg"][3:], others[NAME]["exp_avg"][3:])
    assert state[NAME]["step"] == 3 and state["head.weight"] == {}
    run.steps(1)


@pytest.mark.parametrize("kind", ["sgd", "adafactor", "rmsprop"])
def test_any_optimizer_of_torch_resumes(tmp_path, kind):
    run = Run()
    run.optimizer = {
        "sgd": lambda: torch.optim.SGD(run.model.parameters(), lr=0.01, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(run.model.parameters()),
        "rmsprop": lambda: torch.optim.RMSprop(run.model.parameters(), centered=True),
    }[kind]()
    run.steps(2)
    with sp.CheckpointManager(tmp_path) as manager:
        manager.save(1, **run.parts)
        states = _copied(_states(run))
        run.steps(2)
        others = _copied(_states(run))
        manager.restore(model=run.model, optimizer=run.optimizer, only={"body.0.*": slice(0, 9)})
    for slot, x in _states(run)[NAME].items():
        if torch.is_tensor(x) and x.shape == SHAPE:
            assert torch.equal(x[:9], states[NAME][slot][:9]) and torch.equal(x[9:], others[NAME][slot][9:])
        elif torch.is_tensor(x):
            assert torch.equal(x, others[NAME][slot])  # it has no such part
    run.steps(1)


@pytest.mark.parametrize("ranks", [1, 2, 5, 7])
def test_the_shards_of_all_ranks_are_the_parameters_split_as_torch_does(trained, ranks):
    run, manager, (weights, states) = trained
    buffers = {name: x.clone() for name, x in run.model.named_buffers()}
    for rank in range(ranks):
        before = run.photo()["model"]
        manager.restore(model=run.model, optimizer=run.optimizer, only={"*": RankShard(rank, ranks)})
        for name, x in run.model.named_parameters():
            chunks = [list(one.chunk(ranks)) for one in (x, weights[name], before[name])]
            for number, (now, old, was) in enumerate(zip(*chunks, strict=True)):
                assert torch.equal(now, old if number == rank else was), (name, number)
    for name, x in run.model.named_parameters():
        assert torch.equal(x, weights[name])
        assert torch.equal(run.optimizer.state[x]["exp_avg_sq"], states[name]["exp_avg_sq"])
    assert all(torch.equal(x, buffers[name]) for name, x in run.model.named_buffers())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "RankShard, rank: 2; expected a whole number from 0 to 1"),
        ((-1, 2), "RankShard, rank: -1"),
        ((0.5, 2), "RankShard, rank: 0.5"),
        (("0", 2), "RankShard, rank: '0'"),
        ((0, 0), "RankShard, world_size: 0"),
        ((0, 2.0), "RankShard, world_size: 2.0"),
        ((0, 2, -1), "RankShard, axis: -1; expected a whole number from 0"),
        ((0, 2, None), "RankShard, axis: None"),
    ],
)
def test_a_shard_of_a_rank_or_an_axis_that_is_not_there_is_refused(arguments, message):
    with pytest.raises(PolicyError, match=message):
        RankShard(*arguments)


def test_a_part_that_no_tensor_has_is_refused_before_anything_is_read_or_changed(trained):
    for only, message in [
        ({NAME: slice(0, 97)}, "within 96"),
        ({NAME: slice(5, 5)}, "empty within 96"),
        ({NAME: slice(9, 0, -1)}, "step"),
        ({NAME: (slice(0, 2), slice(0, 65))}, "axis 1"),
        ({NAME: (slice(0, 2),) * 3}, "3 axes"),
        ({NAME: [96]}, "rows from 0 to 95"),
        ({NAME: [-1]}, "rows from 0"),
        ({NAME: []}, "shape"),
        ({NAME: torch.ones(96, dtype=torch.bool)}, "bool"),
        ({NAME: torch.ones(SHAPE)}, "float32"),
        ({NAME: "rows"}, "slice"),
        ({NAME: 3}, "slice"),
        ({NAME: None}, "slice"),
        ({"none.*": ...}, "none"),
        ({NAME: ..., "body.*": ...}, "two patterns"),
        ({"body.1.num_batches_tracked": slice(0, 1)}, "without axes"),
        ({NAME: ((0, 2), (3, 4, 5, 6))}, "slice"),
        ({}, "patterns"),
    ]:
        run, manager, _ = trained
        before = run.photo()
        with pytest.raises(PolicyError, match=message):
            manager.restore(model=run.model, optimizer=run.optimizer, only=only)
        assert same(run.photo(), before)


def test_a_part_of_what_does_not_fit_is_refused_before_anything_changes(trained):
    _, manager, _ = trained
    narrow, wide = Run(lambda: Digits(48)), Run(lambda: Digits(96).double())
    half = Run(lambda: Digits(96).bfloat16())
    for run, message in ((narrow, "shape"), (half, "bfloat16")):
        for parts in ({"model": run.model}, run.parts):
            before = run.photo()
            with pytest.raises(MismatchError, match=message):
                manager.restore(**parts, only={NAME: slice(0, 9)})
            assert same(run.photo(), before)
    manager.restore(model=half.model, only={NAME: slice(0, 9)}, strict=False)
    manager.restore(model=wide.model, only={NAME: slice(0, 9)})
    wide.optimizer = torch.optim.SGD(wide.model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(MismatchError, match="another kind"):
        manager.restore(model=wide.model, optimizer=wide.optimizer, only={NAME: slice(0, 9)})
    assert not wide.optimizer.state


def test_tied_tensors_stay_one(tmp_path):
    run = Run(Letters)
    with sp.CheckpointManager(tmp_path) as manager:
        manager.save(1, **run.parts)
        saved = run.model.wte.weight.detach().clone()
        with torch.no_grad():
            run.model.wte.weight.add_(1)
        for name in ("wte.weight", "lm_head.weight"):
            manager.restore(model=run.model, optimizer=run.optimizer, only={name: slice(0, 4)})
            assert run.model.lm_head.weight is run.model.wte.weight
            assert torch.equal(run.model.wte.weight[:4], saved[:4])
            assert torch.equal(run.model.wte.weight[4:], saved[4:] + 1)
