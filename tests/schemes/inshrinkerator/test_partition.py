"""Who is pruned and who is protected: shares, kinds, and what wins over what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.quantize.layer_types import ATTENTION, LINEAR
from shrinkpoint.schemes.inshrinkerator.partition import (
    MAGNITUDE,
    SENSITIVITY,
    PrunePartition,
    ScoredWeight,
    score_weights,
    sensitivity,
)

SHARES = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
PROTECTED = st.sampled_from([0.0005, 0.005, 0.01])


def score(weight: ScoredWeight, metric: str) -> torch.Tensor:
    """What a weight is ranked by: its magnitude if there is no sensitivity."""
    if metric == SENSITIVITY and weight.sensitivity is not None:
        return weight.sensitivity
    return weight.values.abs()


def weights(scales=(1.0, 0.01, 10.0), kinds=(LINEAR, LINEAR, ATTENTION), gradients=(True, True, True), seed=0):
    """Tensors of different scale, some with gradients that have nothing to do with their size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {str(i): scale * torch.randn(150, 200, generator=generator) for i, scale in enumerate(scales)}
    recorded = {
        name: torch.randn(x.shape, generator=generator)
        for (name, x), wanted in zip(tensors.items(), gradients, strict=True)
        if wanted
    }
    return score_weights(tensors, dict(zip(tensors, kinds, strict=True)), recorded)


def split(found, metric, prune, protect, printed=False):
    partition = PrunePartition(found, printed)
    masks = {name: partition.masks(one, metric, prune, protect) for name, one in found.items()}
    return {name: one[0] for name, one in masks.items()}, {name: one[1] for name, one in masks.items()}


@pytest.fixture(autouse=True)
def the_same_weights_every_time():
    torch.manual_seed(0)


def share(masks, names) -> float:
    return float(torch.cat([masks[name] for name in names]).float().mean())


def test_sensitivity_predicts_what_the_loss_loses_with_a_weight():
    weights = torch.tensor([0.3, -0.002, 0.001], dtype=torch.float64, requires_grad=True)
    inputs = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)

    def loss(w):
        return torch.tanh(w @ inputs)

    loss(weights).backward()
    for i in (1, 2):
        without = weights.detach().clone()
        without[i] = 0
        change = (loss(without) - loss(weights)).abs().item()
        assert sensitivity(weights, weights.grad)[i].item() == pytest.approx(change, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(prune=SHARES, protect=PROTECTED, metric=st.sampled_from([MAGNITUDE, SENSITIVITY]))
def test_of_every_kind_the_same_share_is_pruned(prune, protect, metric):
    pruned, protected = split(weights(), metric, prune, protect)
    for names in (["0", "1"], ["2"]):
        assert prune - 0.012 <= share(pruned, names) + share(protected, names) and share(pruned, names) <= prune
    if prune and metric == MAGNITUDE:  # of one kind, and of very different scale
        assert share(pruned, ["0"]) < prune / 2 < prune < share(pruned, ["1"])
    for name in pruned:
        assert not (pruned[name] & protected[name]).any()


@settings(max_examples=30, deadline=None)
@given(prune=SHARES, protect=PROTECTED, metric=st.sampled_from([MAGNITUDE, SENSITIVITY]), rounded=st.booleans())
def test_as_printed_no_share_falls_short_of_what_was_asked(prune, protect, metric, rounded):
    found = weights()
    if rounded:  # on few values, as after a restore
        kinds = {name: one.layer_type for name, one in found.items()}
        found = score_weights(
            {name: (one.values / one.values.std()).round() + 0.5 for name, one in found.items()}, kinds, {}
        )
    pruned, protected = split(found, metric, prune, protect, printed=True)
    for names in (["0", "1"], ["2"]):
        count = sum(found[name].values.numel() for name in names)
        both = torch.cat([pruned[name] | protected[name] for name in names])
        assert float(both.sum()) >= int(prune * (count - 1))
        assert rounded or share(pruned, names) <= prune + 0.02
    for wanted in (MAGNITUDE,) if rounded else (MAGNITUDE, SENSITIVITY):
        scores = torch.cat([score(one, wanted) for one in found.values()])
        largest = scores >= scores.topk(int(protect * scores.numel())).values[-1]
        assert torch.cat([protected[name] for name in found])[largest].all()
    assert (prune == 0) == (not any(one.any() for one in pruned.values()))


@settings(max_examples=20, deadline=None)
@given(protect=PROTECTED, prune=SHARES)
def test_the_largest_and_the_most_sensitive_of_all_are_protected(protect, prune):
    found = weights()
    _, protected = split(found, MAGNITUDE, prune, protect)
    sizes = torch.cat([one.values.abs() for one in found.values()])
    sensitive = torch.cat([one.sensitivity for one in found.values()])
    union = (sizes > sizes.quantile(1 - protect / 1.5)) | (sensitive > sensitive.quantile(1 - protect / 1.5))
    both = torch.cat([protected[name] for name in found])
    assert both[union].all()
    assert protect * 0.6 < share(protected, found) <= 2 * protect


def test_protection_wins():
    """Values that matter by sensitivity are small, and would be pruned by size."""
    x = torch.full((100, 100), 1.0)
    x[:10] = 0.01
    gradient = torch.full_like(x, 1e-6)
    gradient[0, :40] = 1e3
    found = score_weights({"a": x + torch.rand(x.shape) * 0.01}, {"a": LINEAR}, {"a": gradient})
    pruned, protected = split(found, MAGNITUDE, 0.1, 0.005)
    assert protected["a"][:40].all() and not pruned["a"][:40].any()
    assert pruned["a"][100:900].float().mean() > 0.9


@pytest.mark.parametrize("prune", [0.0, 0.3])
def test_zeros_are_always_pruned(prune):
    x = torch.randn(100, 100)
    x[::2] = 0.0
    x[1, 1] = -0.0
    pruned, protected = split(score_weights({"a": x}, {}, {}), MAGNITUDE, prune, 0.01)
    assert pruned["a"][x.reshape(-1) == 0].all() and not protected["a"][x.reshape(-1) == 0].any()
    assert float(pruned["a"].float().mean()) < 0.51


def test_weights_without_a_gradient_are_ranked_by_size():
    found = weights(scales=(1.0, 1.0, 1.0), gradients=(True, False, True), kinds=(LINEAR, LINEAR, LINEAR))
    frozen = found["1"]
    assert frozen.sensitivity is None and frozen.usable_metric(SENSITIVITY) == MAGNITUDE
    assert torch.equal(score(frozen, SENSITIVITY), frozen.values.abs())
    pruned, protected = split(found, SENSITIVITY, 0.3, 0.005)
    assert frozen.values[pruned["1"]].abs().max() < frozen.values[~pruned["1"]].abs().min()
    assert 0.29 < share(pruned, ["1"]) <= 0.3 and 0.28 < share(pruned, ["0", "2"]) <= 0.3
    assert frozen.values[protected["1"]].abs().min() > frozen.values[~protected["1"]].abs().max()
    moved = found["0"]
    assert moved.sensitivity[pruned["0"]].max() < moved.sensitivity[~(pruned["0"] | protected["0"])].min()


def test_a_gradient_of_another_shape_is_none():
    found = score_weights({"a": torch.randn(64, 64)}, {}, {"a": torch.randn(64, 32)})
    assert found["a"].sensitivity is None


def test_gradients_that_have_vanished_rank_nothing():
    found = score_weights({"a": torch.randn(64, 64)}, {}, {"a": torch.zeros(64, 64)})
    pruned, protected = split(found, SENSITIVITY, 0.5, 0.01)
    assert not pruned["a"].any()
    assert not split(found, SENSITIVITY, 0.5, 0.01, printed=True)[0]["a"].any()
    assert 0.005 < share(protected, ["a"]) <= 0.01 + 1 / 4096  # a share of 4096 values is no whole number of them


@pytest.mark.parametrize("center", [0.1, 0.1013, 0.1024, 0.1031, 7.7])
def test_weights_that_lie_on_few_values_are_not_pruned_beyond_the_share(center):
    """As they do after a restore: a whole value of them is at the quantile."""
    x = torch.tensor([0.0, center, -center, 3 * center]).repeat_interleave(1024).reshape(64, 64)
    for share_of in (0.3, 0.4, 0.5):
        pruned, protected = split({"a": ScoredWeight.from_tensor("a", x, None, None)}, MAGNITUDE, share_of, 0.01)
        assert torch.equal(pruned["a"], x.reshape(-1) == 0)
        assert not protected["a"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_split_like_wide_ones(dtype):
    x = torch.randn(128, 128).to(dtype)
    narrow, wide = ({"a": ScoredWeight.from_tensor("a", one, None, None)} for one in (x, x.float()))
    for found, expected in zip(split(narrow, MAGNITUDE, 0.3, 0.01), split(wide, MAGNITUDE, 0.3, 0.01), strict=True):
        assert torch.equal(found["a"], expected["a"])
