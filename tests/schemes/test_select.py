"""Only weights that are worth it are quantized; a narrow copy follows its master, and what is not finite stays."""

from __future__ import annotations

import math

import torch
from torch import nn

from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL, TensorSelection, select_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState, flatten

LARGE = (64, 64)


def weights(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(LARGE), "b.weight": torch.randn(4, 32, 32), **changes}


def select(state: FlatState, quantizable=None) -> TensorSelection:
    return select_tensors(state, GlobalTensors.from_state(state), quantizable)


def selected(state, quantizable=None) -> list[str]:
    return [*select(flatten(state), quantizable).tensors]


def test_weights_with_two_axes_and_enough_values_are_selected():
    state = {
        **weights(),
        "small.weight": torch.randn(63, 65),
        "bias": torch.randn(MIN_WEIGHT_NUMEL),
        "wide.bias": torch.randn(2 * MIN_WEIGHT_NUMEL),
        "ids.weight": torch.zeros(LARGE, dtype=torch.int64),
        "double.weight": torch.zeros(LARGE, dtype=torch.float64),
        "net.attn_mask": torch.zeros(LARGE),
        "net.running_mean": torch.zeros(LARGE),
        "loose": torch.zeros(LARGE),
        "line": torch.zeros(2 * MIN_WEIGHT_NUMEL),
    }
    assert 63 * 65 < MIN_WEIGHT_NUMEL <= 64 * 64
    assert selected(state) == ["a.weight", "b.weight", "loose"]  # the last at the root, as a pos_embed is


def test_every_float_that_training_uses_is_selected():
    assert selected({f"{dtype}.weight": torch.zeros(LARGE, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)})


def test_moments_gradients_and_averages_in_an_optimizer_are_never_selected():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    assert selected({"model": model.state_dict(), "optimizer": optimizer.state_dict()}) == ["model/weight"]


def test_tied_weights_are_selected_once():
    weight = torch.randn(LARGE)
    assert selected({"wte.weight": weight, "head.weight": weight}) == ["wte.weight"]


def test_a_copy_in_16_bits_follows_its_master():
    masters = [torch.randn(LARGE) for _ in range(3)]
    flat = flatten(
        {
            "model": {f"{i}.weight": master.bfloat16() for i, master in enumerate(masters)},
            "optimizer": {"state": {}, "param_groups": [], "fp32_masters": masters[::-1]},
        }
    )
    selection = select(flat)
    assert [*selection.cast_sources] == [f"model/{i}.weight" for i in range(3)]
    for name, source in selection.cast_sources.items():
        assert torch.equal(flat.tensors[name], flat.tensors[source].bfloat16())
    assert {*selection.tensors} == {*selection.cast_sources.values()}
    assert {*select(flat, {"model/1.weight"}).tensors} == {selection.cast_sources["model/1.weight"]}
    out = selection.with_casts({source: torch.full(LARGE, 1.001) for source in selection.tensors}, flat)
    assert {*out} == {*selection.tensors, *selection.cast_sources}
    assert all(torch.equal(out[name], torch.full(LARGE, 1.001).bfloat16()) for name in selection.cast_sources)


def test_a_weight_that_is_nobodys_copy_is_selected_itself():
    state = {"model": {"a.weight": torch.randn(LARGE).bfloat16()}, "masters": {"a.weight": torch.randn(LARGE)}}
    assert selected(state) == ["model/a.weight", "masters/a.weight"]


def test_copies_that_differ_late_are_told_apart():
    master = torch.randn(LARGE)
    other = master.bfloat16()
    other[-1, -1] += 1
    assert not select(flatten({"model": {"a.weight": other}, "masters": {"a.weight": master}})).cast_sources


def test_what_is_not_finite_is_refused_and_named():
    for value in (math.nan, math.inf, -math.inf):
        broken = torch.randn(LARGE)
        broken[3, 5] = value
        selection = select(flatten(weights(**{"b.weight": broken, "tiny.weight": torch.full((2, 2), value)})))
        assert [*selection.tensors] == ["a.weight"]
        assert selection.nonfinite == ("b.weight",)


def test_of_a_model_that_is_known_nothing_but_its_parameters_is_selected():
    state = {"model": weights(), "ema": weights()}
    assert len(selected(state)) == 4
    assert selected(state, {"model/b.weight"}) == ["model/b.weight"]
    assert selected({"model": {"no_dot": torch.randn(LARGE)}}, {"model/no_dot"}) == ["model/no_dot"]
    broken = torch.full(LARGE, math.nan)
    assert select(flatten({"model": weights(), "ema": {"a.weight": broken}}), {"model/a.weight"}).nonfinite == ()
