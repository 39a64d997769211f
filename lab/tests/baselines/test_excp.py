"""ExCP: what is pruned is what the formulas say, moments are a state's own, and codes are coded under each other."""

from __future__ import annotations

import copy
import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from helpers.round_trip import write
from helpers.small_training import Digits, Run
from helpers.strategies import bits, difference
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.tensors.flat_state import flatten

WEIGHTS = {"model/body.0.weight": 0, "model/body.3.weight": 4}
"""Those that are large enough, and what the optimizer calls them."""


@lru_cache
def course(optimizer: str = "adam") -> list[dict[str, Any]]:
    """Three states of a real training, ten steps apart."""
    run = Run(lambda: Digits(256), steps=0)
    if optimizer == "sgd":
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    run.steps(20)
    return [copy.deepcopy(state(run.steps(10))) for _ in range(3)]


def state(run: Run) -> dict[str, Any]:
    return {"model": dict(run.model.state_dict()), "optimizer": run.optimizer.state_dict()}


def kept_of(scheme: sp.ExCP, given: Any, parent: QuantizedState | None = None) -> QuantizedState:
    reference = None if parent is None else Reference(parent.state.tensors, parent.quantized)
    return scheme.quantize(flatten(given), reference)


def after(scheme: sp.ExCP, first: Any, second: Any) -> tuple[QuantizedState, QuantizedState]:
    before = kept_of(scheme, first)
    return before, kept_of(scheme, second, before)


def moments(name: str) -> tuple[str, str]:
    return tuple(f"optimizer/state/{WEIGHTS[name]}/{moment}" for moment in ("exp_avg", "exp_avg_sq"))  # type: ignore


@pytest.mark.parametrize("rule", ["paper", "released"])
@pytest.mark.parametrize(("alpha", "beta"), [(5e-5, 2.0), (3e-4, 0.5), (0.0, 0.0)])
def test_what_is_kept_is_what_the_formulas_say(rule, alpha, beta):
    first, second, _ = course()
    before, kept = after(sp.ExCP(alpha=alpha, beta=beta, rule=rule), first, second)
    given, shares = flatten(second).tensors, []
    for name in WEIGHTS:
        m, v = (given[one] for one in moments(name))
        residual = (given[name] - before.state.tensors[name]).double()
        factor = alpha / v.double().sqrt() if rule == "paper" else min(2.5, alpha / v.double().mean().sqrt())
        threshold = factor * residual.abs().median()
        in_weights = (residual != 0) & ((residual.abs() > threshold) | (alpha == 0))
        in_moments = in_weights & (m.double().abs() > beta * m.double().abs().mean())
        for one, mask in zip((name, *moments(name)), (in_weights, in_moments, in_moments & (v != 0)), strict=True):
            close = (kept.quantized[one].codes != 0) == mask  # at the threshold float32 may round to the other side
            assert float(close.float().mean()) > 0.9995
        shares.append(float(in_moments.float().mean()))
    assert all(0.005 < share < 0.9 for share in shares) or alpha == 0


def test_what_is_pruned_is_zero_and_the_rest_lies_on_few_centers():
    first, second, _ = course()
    before, kept = after(sp.ExCP(bits=3), first, second)
    for name in WEIGHTS:
        moved = kept.state.tensors[name] - before.state.tensors[name]
        codes = kept.quantized[name].codes
        assert torch.equal(kept.state.tensors[name][codes == 0], before.state.tensors[name][codes == 0])
        assert float(moved[codes != 0].abs().min()) > 0 and len(codes.unique()) == 8
        for moment in moments(name):
            found, codes = kept.state.tensors[moment], kept.quantized[moment].codes
            assert bool((found[codes == 0] == 0).all()) and len(found.unique()) == 8


@pytest.mark.parametrize("bits", range(2, 9))
def test_so_many_centers_as_bits_allow(bits):
    first, second, _ = course()
    scheme = sp.ExCP(bits=bits, alpha=0, beta=0)
    written = write(second, write(first, scheme=scheme), scheme=scheme)
    _, kept = after(scheme, first, second)
    assert {one.bins for one in kept.quantized.values()} == {min(2**bits - 1, 254)}
    assert all(torch.equal(written.reference().tensors[name], kept.state.tensors[name]) for name in kept.quantized)


def test_more_bits_are_nearer():
    first, second, _ = course()
    errors = []
    for bits_each in (2, 4, 8):
        _, kept = after(sp.ExCP(bits=bits_each, alpha=0, beta=0), first, second)
        given = flatten(second).tensors
        errors.append(
            [
                float((kept.state.tensors[one] - given[one]).norm() / given[one].norm())
                for name in WEIGHTS
                for one in (name, *moments(name))
            ]
        )
    for few, some, many in zip(*errors, strict=True):
        assert many < 0.2 * some and some < 0.5 * few


@pytest.mark.parametrize("options", [{}, {"rule": "released", "paper_fp16": True}, {"beta": 0.0, "bits": 2}])
def test_no_second_moment_is_negative(options):
    scheme, held = sp.ExCP(**options), None
    for given in course():
        held = kept_of(scheme, given, held)
        for name in WEIGHTS:
            assert float(held.state.tensors[moments(name)[1]].min()) >= 0.0


def test_centers_in_float16_put_small_second_moments_at_zero():
    """The released code does so, and Adam then divides by its epsilon alone."""
    first, second, _ = course()
    second = copy.deepcopy(second)
    for slot in second["optimizer"]["state"].values():
        slot["exp_avg_sq"] *= 1e-5  # what gradients of larger models are like: the square of 1e-5
    (_, exact), (_, flushed) = (after(sp.ExCP(alpha=0, paper_fp16=half), first, second) for half in (False, True))
    for name in WEIGHTS:
        m, v = moments(name)
        kept = exact.quantized[v].codes != 0
        assert float((exact.state.tensors[v][kept] == 0).float().mean()) == 0
        assert float((flushed.state.tensors[v][kept] == 0).float().mean()) > 0.3
        assert float((flushed.state.tensors[m][kept] == 0).float().mean()) < 0.01


def test_centers_beyond_float16_stay_finite():
    first, second, _ = course()
    second = copy.deepcopy(second)
    for slot in second["optimizer"]["state"].values():
        slot["exp_avg_sq"] *= 1e12
    _, kept = after(sp.ExCP(alpha=0, paper_fp16=True), first, second)
    assert all(float(kept.state.tensors[moments(name)[1]].max()) == 65504 for name in WEIGHTS)


def test_under_the_codes_of_weights_and_moments_codes_are_smaller_than_in_lzma():
    first, second, third = course()
    sizes = {}
    for paper in (False, True):
        scheme = sp.ExCP(paper=paper)
        middle = write(second, write(first, scheme=scheme), scheme=scheme)
        last = write(third, middle, scheme=scheme)
        sizes[paper] = {name: [last.bytes_of(one) for one in (name, *moments(name))] for name in WEIGHTS}
        if paper:
            assert all(
                last.recipes()[one]["codes"] == {"lzma": 5} for name in WEIGHTS for one in (name, *moments(name))
            )
        else:
            assert all(last.recipes()[one]["under"] for name in WEIGHTS for one in moments(name))
    for name in WEIGHTS:
        w, m, v = zip(sizes[False][name], sizes[True][name], strict=True)
        assert w[0] < w[1] and m[0] < 0.8 * m[1] and v[0] < 0.7 * v[1], sizes


def test_a_keyframe_has_exact_weights_and_moments_that_are_large():
    given = flatten(course()[0]).tensors
    kept = kept_of(sp.ExCP(), course()[0])
    for name in WEIGHTS:
        assert torch.equal(kept.state.tensors[name], given[name]) and name not in kept.quantized
        m = given[moments(name)[0]]
        for one in moments(name):
            assert torch.equal(kept.quantized[one].codes != 0, m.abs() > 2 * m.abs().mean())
    assert kept.loss["optimizer"] == "lossy"


def test_a_state_that_is_saved_twice_keeps_its_moments():
    """No residual is larger than a threshold then, and all moments would be pruned with them."""
    first, second, _ = course()
    before, kept = after(sp.ExCP(), first, first)
    for name in WEIGHTS:
        for one in moments(name):
            assert torch.equal(kept.state.tensors[one], before.state.tensors[one]) and bool(
                kept.state.tensors[one].any()
            )
    assert second is not first and not set(WEIGHTS) & set(kept.quantized)


def test_without_adam_nothing_is_pruned_and_momentum_stays_exact():
    first, second, _ = course("sgd")
    before, kept = after(sp.ExCP(), first, second)
    given = flatten(second).tensors
    assert set(kept.quantized) == set(WEIGHTS) and kept.loss["optimizer"] == "exact"
    for name in WEIGHTS:
        assert bool(((kept.quantized[name].codes != 0) == (given[name] != before.state.tensors[name])).all())
    others = {one: x for one, x in given.items() if one not in WEIGHTS}
    assert difference({one: kept.state.tensors[one] for one in others}, others) is None


def test_without_an_optimizer_either():
    first, second, _ = ({"model": one["model"]} for one in course())
    before, kept = after(sp.ExCP(), first, second)
    for name in WEIGHTS:
        residual = flatten(second).tensors[name] - before.state.tensors[name]
        assert torch.equal(kept.quantized[name].codes != 0, residual != 0)


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_moments_that_are_not_finite_stay_and_prune_nothing(moment, value):
    first, second, _ = course()
    second = copy.deepcopy(second)
    second["optimizer"]["state"][0][moment][3, 3] = value
    before, kept = after(sp.ExCP(), first, second)
    given, name = flatten(second).tensors, "model/body.0.weight"
    assert all(bits(kept.state.tensors[one]) == bits(given[one]) for one in moments(name))
    assert torch.equal(kept.quantized[name].codes != 0, given[name] != before.state.tensors[name])
    assert set(moments("model/body.3.weight")) < set(kept.quantized)


def test_second_moments_of_zero_prune_what_decay_alone_has_moved():
    first, second, _ = course()
    second = copy.deepcopy(second)
    for moment in ("exp_avg", "exp_avg_sq"):
        second["optimizer"]["state"][0][moment][:5] = 0.0
    for rule in ("paper", "released"):
        _, kept = after(sp.ExCP(rule=rule), first, second)
        codes = kept.quantized["model/body.0.weight"].codes
        assert bool(codes[5:].any()) and (bool(codes[:5].any()) is (rule == "released"))
        assert not bool(kept.quantized[moments("model/body.0.weight")[1]].codes[:5].any())


def test_masters_are_pruned_by_the_moments_wherever_these_are_found():
    """An optimizer's moments may have been linked to the narrow copies, which are named first."""
    torch.manual_seed(0)
    narrow = nn.Linear(80, 64, dtype=torch.bfloat16)
    masters = nn.ParameterList([one.detach().float().clone() for one in narrow.parameters()])
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3)
    states = []
    for _ in range(2):
        for master in masters:
            master.grad = torch.randn_like(master) * 1e-2
        optimizer.step()
        for one, master in zip(narrow.parameters(), masters, strict=True):
            one.data.copy_(master)
        parts = {"model": dict(narrow.state_dict()), "masters": dict(masters.state_dict())}
        states.append(copy.deepcopy({**parts, "optimizer": optimizer.state_dict()}))
    _, kept = after(sp.ExCP(alpha=3e-4, beta=0.5), *states)
    codes = kept.quantized["masters/0"].codes
    assert 0.1 < float((codes == 0).float().mean()) < 0.9
    for moment in ("exp_avg", "exp_avg_sq"):
        one = kept.quantized[f"optimizer/state/0/{moment}"]
        assert not bool((one.codes[codes == 0]).any()) and bool(one.codes.any())
    assert torch.equal(kept.state.tensors["model/weight"], kept.state.tensors["masters/0"].bfloat16())


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 1},
        {"bits": 9},
        {"bits": 4.0},
        {"bits": True},
        {"alpha": -1.0},
        {"alpha": float("nan")},
        {"beta": float("inf")},
        {"beta": "2"},
        {"rule": "mine"},
        {"seed": -1},
        {"seed": None},
    ],
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(PolicyError, match=next(iter(options))):
        sp.ExCP(**options)


def test_a_seed_gives_the_same_centers_and_another_may_give_others():
    first, second, _ = course()
    a, b, c = (after(sp.ExCP(bits=6, seed=seed), first, second)[1] for seed in (1, 1, 2))
    assert all(torch.equal(one.centers, b.quantized[name].centers) for name, one in a.quantized.items())
    assert not all(torch.equal(one.centers, c.quantized[name].centers) for name, one in a.quantized.items())


def test_the_state_is_not_changed():
    first, second, _ = course()
    copies: tuple[Any, Any] = copy.deepcopy((first, second))
    after(sp.ExCP(rule="released", paper_fp16=True), first, second)
    assert difference((first, second), copies) is None and isinstance(first["model"]["head.bias"], Tensor)
