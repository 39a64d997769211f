"""What our integrations wrote, in the layout of their frameworks; what has none is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shrinkpoint.convert.discover import discover
from shrinkpoint.convert.export import target_form, write_state
from shrinkpoint.convert.part import origin_info
from shrinkpoint.errors import PolicyError
from shrinkpoint.train import Checkpointer


def _read(folder, state, extra):
    with Checkpointer() as trail:
        trail.save(folder, state, extra=extra, step=5)
    (one,) = discover(folder).checkpoints
    assert one.step == 5
    return one.read()


def test_a_folder_of_no_framework_is_the_state_that_was_saved(tmp_path):
    state = _read(tmp_path / "a", {"w": torch.ones(2), "n": 3}, None)
    assert state["n"] == 3
    assert origin_info(state) is None
    with pytest.raises(PolicyError, match="was not converted"):
        target_form(state, "original", "a")
    assert target_form(state, "torch", "a")["form"] == "torch"


def test_hyperparameters_of_other_kinds_are_what_they_were(tmp_path):
    state = {"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"root": Path("/data"), "kinds": {1, 2}}}
    read = _read(tmp_path / "a.ckpt", state, {"lightning": "2.6.6"})["state"]
    assert read["hyper_parameters"] == state["hyper_parameters"]
    write_state(state, tmp_path / "b.ckpt", as_torch=True)
    found = torch.load(tmp_path / "b.ckpt", weights_only=False)
    assert found["hyper_parameters"] == state["hyper_parameters"] and torch.equal(
        found["state_dict"]["w"], torch.ones(2)
    )


@pytest.mark.parametrize("framework", ["transformers", "accelerate"])
def test_a_folder_that_is_not_laid_out_as_its_framework_says_is_refused(tmp_path, framework):
    with pytest.raises(PolicyError, match=framework):
        _read(tmp_path / "a", {"rng": [{"odd": 1}], "ranks": [{"odd": 1}]}, {"framework": framework})


def test_what_an_older_save_of_the_framework_left_beside_is_not_taken_for_the_newer_one(tmp_path):
    state = {"model": {"w": torch.ones(3)}, "step": 1, "ranks": []}
    with Checkpointer() as trail:
        trail.save(tmp_path / "last", state, extra={"framework": "accelerate"})
    save_file({"w": torch.zeros(3)}, tmp_path / "last" / "model.safetensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "last" / "adapter.safetensors")
    content = discover(tmp_path / "last").checkpoints[0].read()["state"]
    assert content["model.safetensors"]["w"].sum() == 3
    assert content["adapter.safetensors"]["w"].sum() == 0
