"""A part of a model comes back; the rest stays as it is."""

from __future__ import annotations

import pytest
import torch
from lossy import Run
from strategies import same

import shrinkpoint as sp
from shrinkpoint.errors import MismatchError, PolicyError


@pytest.fixture
def saved(tmp_path):
    run = Run(steps=5)
    with sp.Manager(tmp_path) as manager:
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
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(64, 10), "new": torch.nn.Linear(3, 3)})
    new = model["new"].weight.clone()
    manager.restore(model=model, only=["head.*"])
    assert torch.equal(model["head"].weight, before["head.weight"]) and torch.equal(model["new"].weight, new)


def test_a_part_that_the_checkpoint_does_not_have_is_an_error(saved):
    _, manager, _ = saved
    with pytest.raises(MismatchError):
        manager.restore(model=torch.nn.ModuleDict({"new": torch.nn.Linear(3, 3)}), only=["new.*"])


@pytest.mark.parametrize("only", ["head.*", [], ["nothing.*"]])
def test_a_pattern_that_fits_nothing_is_refused(saved, only):
    run, manager, _ = saved
    with pytest.raises(PolicyError, match="only"):
        manager.restore(model=run.model, only=only)


def test_only_is_of_a_model(saved):
    run, manager, _ = saved
    with pytest.raises(PolicyError, match="model= alone"):
        manager.restore(**run.parts, only=["head.*"])
    with pytest.raises(PolicyError, match="model= alone"):
        manager.restore(only=["head.*"])


def test_of_an_empty_store_nothing_comes_back(tmp_path):
    assert sp.Manager(tmp_path).restore(model=Run().model, only=["head.*"]) is None
