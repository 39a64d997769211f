"""Promise: wrappers do not change which tensor is which, and nothing that differs in more than wrappers is paired."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from shrinkpoint.tensors.wrappers import match_names, match_state_keys, plain_names

PLAIN = ["a.weight", "a.bias", "b.module.weight"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("a.", "a._orig_mod."),
        lambda name: name.replace("a.", "a.module._fsdp_wrapped_module."),
        lambda name: name.replace("b.", "b._checkpoint_wrapped_module."),
    ],
)
def test_names_match_in_both_directions(wrap):
    wrapped = {name: wrap(name) for name in PLAIN}
    assert match_names(wrapped.values(), PLAIN) == wrapped
    assert match_names(PLAIN, wrapped.values()) == {other: name for name, other in wrapped.items()}


@pytest.mark.parametrize(
    ("saved", "live", "pairs"),
    [
        (
            ["module.weight", "weight"],
            ["module.weight", "weight"],
            {"module.weight": "module.weight", "weight": "weight"},
        ),
        (
            ["module.module.weight", "module.weight"],
            ["module.weight", "weight"],
            {"module.weight": "module.module.weight", "weight": "module.weight"},
        ),
        (["a.module.weight", "a.weight"], ["a._orig_mod.weight"], {"a._orig_mod.weight": "a.weight"}),
        (["a.weight"], ["b.weight"], {}),
        ([], ["module.weight"], {}),
    ],
)
def test_a_module_of_the_users_own_is_no_wrapper(saved, live, pairs):
    assert match_names(saved, live) == pairs


def test_a_state_keeps_the_versions_of_its_modules():
    plain, wrapped = nn.Sequential(nn.BatchNorm1d(3)), nn.DataParallel(nn.Sequential(nn.BatchNorm1d(3)))
    renamed = match_state_keys(wrapped.state_dict(), plain.state_dict())
    assert isinstance(renamed, OrderedDict) and list(renamed) == list(plain.state_dict())
    assert renamed._metadata["0"] == plain.state_dict()._metadata["0"]
    plain.load_state_dict(renamed)
    assert torch.equal(plain[0].running_var, wrapped.module[0].running_var)


def test_names_that_would_coincide_stay():
    assert plain_names(["a._orig_mod.w", "a.w"]) == {"a._orig_mod.w": "a._orig_mod.w", "a.w": "a.w"}
