"""Steps that follow the curvature, and points that stay where they are as long as that costs no progress."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.adam_states import adam, global_weights, known_of, normal, squares
from helpers.parameters import each_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.codec.lattice import STEPS_PER_OCTAVE, Lattice, LatticeTensor, as_matrix
from shrinkpoint.codec.reference import Reference, RowSample
from shrinkpoint.quantize.statistics import value_sums
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.rounding import fit_hysteresis
from shrinkpoint.schemes.fisher.steps import (
    MAX_STEP_STD,
    MIN_RELATIVE_CURVATURE,
    ROW_COL_EXPONENT,
    SENSITIVE_STEP,
    TENSOR_EXPONENT,
    PreviousPoints,
    StepCandidates,
    make_lattice,
    quantize_weight,
    rescale,
    weight_dither_seed,
)

WEIGHTS = {"a": normal(48, 64, scale=0.02), "b": normal(96, 48, seed=1, scale=0.5), "c": normal(8, 4, 3, 3, seed=2)}


def steps_of(weights: dict[str, Tensor], v: dict[str, Tensor] | None = None, size: int = 0) -> dict[str, Tensor]:
    """log2 of the steps before any is capped, in standard deviations of the weight, as matrices."""
    drafts = StepCandidates(global_weights(weights), known_of(adam(weights, v)), None, None, 0, 0)
    return {
        name: (rescale(drafts.unit_lattices[name], size).scales().expand(as_matrix(x).shape) / value_sums(x).std).log2()
        for name, x in weights.items()
    }


def mean(steps: dict[str, Tensor]) -> float:
    return float(torch.cat([one.reshape(-1) for one in steps.values()]).mean())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.floats(0, 2), st.floats(-20, 20))
def test_steps_are_one_standard_deviation_in_the_geometric_mean_over_all_weights(seed, octaves, level):
    v = {name: squares(*x.shape, seed=seed + i, octaves=octaves) for i, (name, x) in enumerate(WEIGHTS.items())}
    v["b"] = v["b"] * 2.0**level  # one tensor matters far more than the others, or less
    assert abs(mean(steps_of(WEIGHTS, v))) <= 1 / STEPS_PER_OCTAVE


def test_rows_and_columns_that_matter_more_have_finer_steps_by_the_stated_power():
    """Sixteen times the squared gradients: half the step, at a power of one quarter."""
    v = torch.ones(48, 64)
    v[:24] *= 16.0
    v[:, :32] *= 256.0
    steps = steps_of({"a": WEIGHTS["a"]}, {"a": v})["a"]
    torch.testing.assert_close(
        steps[24:] - steps[:24], torch.full((24, 64), 4 * ROW_COL_EXPONENT), atol=1.1 / STEPS_PER_OCTAVE, rtol=0
    )
    torch.testing.assert_close(
        steps[:, 32:] - steps[:, :32], torch.full((48, 32), 8 * ROW_COL_EXPONENT), atol=1.1 / STEPS_PER_OCTAVE, rtol=0
    )


def test_tensors_that_matter_more_have_finer_steps_by_the_stated_power():
    weights = {"a": normal(32, 32), "b": normal(32, 32, seed=1, scale=7.0)}
    steps = steps_of(weights, {"a": torch.ones(32, 32), "b": torch.full((32, 32), 4096.0)})
    assert float(steps["a"].mean() - steps["b"].mean()) == pytest.approx(
        12 * TENSOR_EXPONENT, abs=1.1 / STEPS_PER_OCTAVE
    )


@pytest.mark.parametrize("size", [0, 16, 200])
def test_no_row_has_steps_above_the_widest(size):
    v = squares(48, 64, octaves=1)
    v[:5] *= 1e-4
    drafts = StepCandidates(
        global_weights({"a": WEIGHTS["a"]}), known_of(adam({"a": WEIGHTS["a"]}, {"a": v})), None, None, 0, 0
    )
    lattice = drafts._lattice_at("a", size)
    widest = math.log2(MAX_STEP_STD * value_sums(WEIGHTS["a"]).std) * STEPS_PER_OCTAVE
    assert int(lattice.rows.max()) <= widest
    if size == 200:
        assert set(lattice.rows.tolist()) == {math.floor(widest)}
    if size == 0:
        assert len(lattice.rows.unique()) > 3


@pytest.mark.parametrize("what", ["row", "column", "most"])
def test_dead_rows_and_columns_do_not_get_steps_without_bound(what):
    v = torch.ones(48, 64)
    place = {"row": (slice(7, 8),), "column": (slice(None), slice(7, 8)), "most": (slice(1, None),)}[what]
    v[place] = 0.0
    steps = steps_of({"a": WEIGHTS["a"]}, {"a": v})["a"]
    largest = max(float(v.mean(axis).max()) for axis in (0, 1)) / float(v.mean())
    assert (
        float(steps[place].max() - steps.min())
        <= ROW_COL_EXPONENT * math.log2(largest / MIN_RELATIVE_CURVATURE) + 2.1 / STEPS_PER_OCTAVE
    )
    assert float(steps[place].min()) >= float(steps.max()) - 1e-6


def test_a_weight_that_does_not_vary_has_no_lattice():
    nothing = Curvature()
    for x in (torch.zeros(8, 8), torch.full((8, 8), 0.37), torch.full((40,), -1.0), torch.full((3, 9), 1e-30)):
        assert make_lattice(tuple(x.shape), nothing, 0.0, 0, value_sums(x).std) is None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(64,), (6, 9), (4, 3, 2, 2), (1, 30), (30, 1)]),
    st.integers(-17, 17),
    st.integers(-37, 37),
    st.integers(0, 9),
)
def test_whatever_weights_and_curvature_are_like_steps_fit_the_weight(shape, scale, level, random):
    x = normal(*shape, seed=random, scale=10.0**scale)
    with_v = Curvature(as_matrix(squares(*shape, seed=random, octaves=0.5)) * 1e6 * 10.0**level / 100)
    for known, usual in ((Curvature(), 0.0), (with_v, with_v.mean)):
        lattice = make_lattice(shape, known, usual, 7, value_sums(x).std)
        assert lattice is not None and quantize_weight(x, lattice, None, 0.5) is not None
        steps = lattice.scales() / value_sums(x).std
        assert 2**-4 < float(steps.log2().mean().exp2()) < 2**4


def test_vectors_and_what_is_not_known_beside_others_have_careful_steps():
    weights = {"known": normal(32, 32), "other": normal(32, 32, seed=1), "bias": normal(32, seed=2)}
    known = known_of(adam({name: weights[name] for name in ("known", "bias")}))
    drafts = StepCandidates(global_weights(weights), known | {"other": Curvature()}, None, None, 0, 0)
    other = float((drafts.unit_lattices["other"].scales() / value_sums(weights["other"]).std).mean())
    assert math.log2(other) == pytest.approx(math.log2(SENSITIVE_STEP), abs=1 / STEPS_PER_OCTAVE)
    for known in ({name: Curvature() for name in weights}, known_of(adam(weights))):
        steps = (
            StepCandidates(global_weights(weights), known, None, None, 0, 0).unit_lattices["bias"].scales()
            / value_sums(weights["bias"]).std
        )
        assert known["bias"].squares is not None or steps.log2().mean() == pytest.approx(-2, abs=1 / STEPS_PER_OCTAVE)


@pytest.mark.parametrize(("is_measured", "expected"), [(False, SENSITIVE_STEP), (True, 1.0)])
def test_weights_with_a_momentum_beside_adam_have_full_steps_where_the_loss_decides(is_measured, expected):
    """As Muon's have; without a measured loss nothing says what their errors cost."""
    weights = {"known": normal(32, 32), "muon": normal(32, 32, seed=1)}
    known = known_of(adam({"known": weights["known"]})) | {"muon": Curvature(first=normal(32, 32, seed=2))}
    drafts = StepCandidates(global_weights(weights), known, None, None, 0, 0, is_measured=is_measured)
    step = float((drafts.unit_lattices["muon"].scales() / value_sums(weights["muon"]).std).mean())
    assert math.log2(step) == pytest.approx(math.log2(expected), abs=1 / STEPS_PER_OCTAVE)


def test_where_nothing_is_known_embeddings_and_heads_have_careful_steps():
    names = {"wte.weight": SENSITIVE_STEP, "lm_head.weight": SENSITIVE_STEP, "mlp.fc.weight": 1.0}
    weights = {name: normal(64, 32, seed=i) for i, name in enumerate(names)}
    drafts = StepCandidates(global_weights(weights), {name: Curvature() for name in names}, None, None, 0, 0)
    for name, expected in names.items():
        step = float((drafts.unit_lattices[name].scales() / value_sums(weights[name]).std).mean())
        assert math.log2(step) == pytest.approx(math.log2(expected), abs=1 / STEPS_PER_OCTAVE)


# points


def lattice(shape: tuple[int, int] = (48, 64), seed: int = 0) -> Lattice:
    made = make_lattice(shape, Curvature(squares(*shape)), 1e-6, seed, value_sums(normal(*shape)).std)
    assert made is not None
    return made


def points(
    x: Tensor, on: Lattice, before: PreviousPoints | None = None, hold: float = 0.5, gain: float = 1.0
) -> LatticeTensor:
    found = quantize_weight(x, on, before, hold, gain)
    assert found is not None
    return found[0]


def held_points(
    x: Tensor, on: Lattice, held: LatticeTensor, start: Tensor | None, original: bool = True
) -> PreviousPoints | None:
    reference = Reference({"a": held.dequantize(torch.float32)}, {"a": held}, {"a": x} if original else {})
    return PreviousPoints.from_reference("a", x, on, reference, None if start is None else RowSample.from_tensor(start))


def before(x: Tensor, on: Lattice) -> PreviousPoints:
    found = held_points(x, on, points(x, on), x)
    assert found is not None
    return found


def away(x: Tensor, codes: Tensor, on: Lattice) -> Tensor:
    """How many steps a weight lies from points."""
    shape = as_matrix(x).shape[0], as_matrix(x).shape[1]
    return (x / on.scales().reshape(shape) - on.dither(shape) - codes).abs()


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 0.75), st.floats(0, 1), st.sampled_from([0, 77]))
def test_a_weight_leaves_its_point_when_it_is_further_than_the_hold_and_goes_to_the_nearest(hold, far, seed):
    on, x = lattice(seed=seed), normal(48, 64)
    old, now = before(x, on), normal(48, 64) + far * normal(48, 64, seed=1)
    found = points(now, on, old, hold)
    from_old, from_found = away(now, old.points.codes, on), away(now, found.codes, on)
    near, far_off = from_old < hold - 1e-3, from_old > hold + 1e-3
    assert torch.equal(found.codes[near], old.points.codes[near])
    assert bool((found.codes != old.points.codes)[far_off].all())
    assert float(from_found.max()) <= hold + 1e-3 and bool((from_found[far_off] <= 0.5 + 1e-3).all())


def moved(kind: str, by: float, shape: tuple[int, int]) -> Tensor:
    noise = normal(*shape, seed=5, scale=by)
    return noise if kind == "shaken" else noise * 0.2 + by * normal(shape[0], 1, seed=6)


@pytest.mark.parametrize(("by", "kind"), each_value([0.05, 0.2, 0.6], ["shaken", "drifting"]))
def test_the_hold_keeps_the_progress_that_is_wanted(kind, by):
    """Of all of the weight, though a part of it is measured; unless even the longest keeps more."""
    shape = (600, 512)
    x, on = normal(*shape), lattice(shape)
    held = before(x, on)
    now = x + moved(kind, by, shape)
    found = fit_hysteresis(global_weights({"a": now}), {"a": held}, 0.93, 0.75)
    hold, gain = found.threshold, found.gains["a"]
    written, gained = (
        points(now, on, held, hold, factor).dequantize(torch.float32) - held.points.dequantize(torch.float32)
        for factor in (1.0, gain)
    )
    plain, kept = (float((x_ * (now - x)).sum() / (now - x).square().sum()) for x_ in (written, gained))
    assert 0.5 < hold <= 0.75 and 1 <= gain <= 2
    assert kept > 0.86 and (hold > 0.74 or kept < 1.06), (hold, kept)
    assert gain == pytest.approx(min(2.0, max(1.0, 1 / plain)), abs=0.2)


def test_the_start_of_another_lattice_is_none_of_this_one():
    """Such as that of a save which failed: the chain goes on with an older one."""
    x, on = normal(48, 64), lattice()
    assert held_points(x, on, points(x, on), x + 2 * on.scales()) is None
    first, now = points(x, on), normal(48, 64) + 0.3 * normal(48, 64, seed=2)
    later = replace(points(now, on), origin=first.codes, gain=1.5)
    assert held_points(now, on, later, now) is None
    found = held_points(now, on, later, x)
    assert found is not None and found.points is later


def test_what_is_on_another_lattice_is_not_held():
    x, on = normal(48, 64), lattice()
    held = points(x, on)
    reference, start = Reference({"a": held.dequantize(torch.float32)}, {"a": held}, {"a": x}), RowSample.from_tensor(x)
    assert PreviousPoints.from_reference("a", x, on, reference, start) is not None
    others = (replace(on, rows=on.rows + 1), replace(on, seed=7))
    assert all(PreviousPoints.from_reference("a", x, other, reference, start) is None for other in others)
    assert PreviousPoints.from_reference("b", x, on, reference, start) is None
    assert PreviousPoints.from_reference("a", x, on, None, start) is None


def test_the_dither_is_another_one_for_each_weight_seed_and_restore_and_none_before_the_first():
    seeds = {
        weight_dither_seed(name, generation, seed) for name in ("a", "b") for generation in (1, 2, 3) for seed in (0, 1)
    }
    assert len(seeds) == 12 and all(0 < one < 1 << 32 for one in seeds)
    assert weight_dither_seed("a", 0, 0) == weight_dither_seed("b", 0, 5) == 0
