"""What our integrations wrote, in the layout of their frameworks; what has none is said."""

from __future__ import annotations

import pytest
import torch

from shrinkpoint.errors import PolicyError, StateError
from shrinkpoint.foreign.back import form_of
from shrinkpoint.foreign.checkpoint import source_of
from shrinkpoint.foreign.run import find
from shrinkpoint.train.trail import Trail


def _read(folder, state, extra):
    with Trail() as trail:
        trail.save(folder, state, extra=extra, step=5)
    (one,) = find(folder).checkpoints
    assert one.step == 5
    return one.read()


def test_a_folder_of_no_framework_is_the_state_that_was_saved(tmp_path):
    state = _read(tmp_path / "a", {"w": torch.ones(2), "n": 3}, None)
    assert state["n"] == 3
    assert source_of(state) is None
    with pytest.raises(PolicyError, match="was not converted"):
        form_of(state, "original", "a")
    assert form_of(state, "torch", "a")["form"] == "torch"


def test_a_value_that_only_lightning_can_make_is_refused_by_its_place(tmp_path):
    state = {"state_dict": {}, "hyper_parameters": {"root": {"shrinkpoint:path": "/data"}}}
    with pytest.raises(StateError, match="hyper_parameters"):
        _read(tmp_path / "a.ckpt", state, {"lightning": "2.6.6"})


@pytest.mark.parametrize("framework", ["transformers", "accelerate"])
def test_a_folder_that_is_not_laid_out_as_its_framework_says_is_refused(tmp_path, framework):
    with pytest.raises(PolicyError, match=framework):
        _read(tmp_path / "a", {"rng": [{"odd": 1}], "ranks": [{"odd": 1}]}, {"framework": framework})
