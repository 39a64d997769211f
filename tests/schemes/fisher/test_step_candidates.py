"""One state, many ways to write it: what each costs and what it loses."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.adam_states import adam, global_weights, known_of, normal, squares
from helpers.parameters import each_value
from helpers.round_trip import write
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.lattice import STEPS_PER_OCTAVE
from shrinkpoint.codec.reference import Reference, RowSample
from shrinkpoint.schemes.fisher.curvature import Curvature
from shrinkpoint.schemes.fisher.rounding import MAX_HYSTERESIS, MIN_RETAINED
from shrinkpoint.schemes.fisher.steps import StepCandidates, from_log_step, to_log_step

WEIGHTS = {"a": normal(64, 96, scale=0.02), "b": normal(96, 64, seed=1), "bias": normal(96, seed=2)}


def drafts(
    weights: dict[str, Tensor] = WEIGHTS,
    reference: Reference | None = None,
    size: int | None = None,
    generation: int = 0,
    starts: dict[str, RowSample] | None = None,
) -> StepCandidates:
    known = known_of(adam(weights))
    return StepCandidates(global_weights(weights), known, reference, size, generation, 0, starts=starts)


def errors(made: StepCandidates, size: int) -> dict[str, Tensor]:
    return {
        name: one.dequantize(torch.float32) - made.weights[name] for name, one in made.quantize(size).points.items()
    }


def reference_of(made: StepCandidates, size: int) -> Reference:
    points = made.quantize(size).points
    values = {name: one.dequantize(torch.float32) for name, one in points.items()}
    return Reference(values, dict(points), dict(made.weights))


@pytest.mark.parametrize("size", [-24, -8, 0])
def test_what_is_predicted_without_a_draft_is_what_a_draft_has(size):
    """Errors are about even over each cell."""
    made = drafts()
    assert made.quantize(size).curvature_term == pytest.approx(made.curvature_term(size), rel=0.1)
    assert made.curvature_term(size - STEPS_PER_OCTAVE) == pytest.approx(made.curvature_term(size) / 4, rel=1e-3)


def test_points_and_slope_do_not_depend_on_whether_the_curvature_term_is_asked_for():
    made = drafts()
    whole, part = made.quantize(-8), made.quantize(-8, with_curvature=False)
    assert part.curvature_term == 0 < whole.curvature_term and part.slope_term == whole.slope_term
    assert all(torch.equal(part.points[name].codes, points.codes) for name, points in whole.points.items())


def test_smaller_steps_lose_less_and_cost_more():
    made = drafts()
    sizes = [*range(-48, 1, 8)]
    lost = [sum(float(one.square().sum()) for one in errors(made, size).values()) for size in sizes]
    bits = [made.bits(size) for size in sizes]
    assert lost == sorted(lost) and bits == sorted(bits, reverse=True) and len({*bits}) == len(sizes)


@pytest.mark.parametrize(("later", "size"), each_value([False, True], [-32, -16, -8, 0]))
def test_the_bits_that_are_expected_are_about_those_that_are_written(size, later):
    weights = {"a.weight": normal(200, 300), "b.weight": normal(300, 400, seed=1)}
    first = {"model": weights}
    scheme = sp.Fisher(relative_error=from_log_step(size) / math.sqrt(12))
    parent = write(first, scheme=scheme) if later else None
    state = {"model": {name: x + 0.05 * normal(*x.shape, seed=9) for name, x in weights.items()}} if later else first
    bits = 8 * sum(write(state, parent, scheme=scheme).bytes_of(f"model/{name}") for name in weights)
    named = {f"model/{name}": x for name, x in state["model"].items()}
    made = StepCandidates(
        global_weights(named), dict.fromkeys(named, Curvature()), parent and parent.reference(), None, 0, 0
    )
    assert made.bits(size) == pytest.approx(bits, rel=0.35 if later else 0.06)


def test_steps_of_the_checkpoint_before_are_taken_over():
    """Whatever weights and curvature have become since: what has not moved far costs nothing then."""
    before = reference_of(drafts(), -8)
    later = {name: x * 1.5 for name, x in WEIGHTS.items()}
    made = StepCandidates(
        global_weights(later),
        known_of(adam(later, {n: squares(*x.shape, seed=50) for n, x in later.items()})),
        before,
        -8,
        0,
        0,
    )
    assert all(one.lattice == before.quantized[name].lattice for name, one in made.quantize(-8).points.items())
    fresh = StepCandidates(global_weights(later), made.curvatures, before, None, 0, 0)
    assert not any(one.lattice == before.quantized[name].lattice for name, one in fresh.quantize(-8).points.items())


def test_after_a_restore_they_are_taken_over_with_another_dither():
    before = reference_of(drafts(generation=1), -8)
    for generation, same in ((1, True), (2, False)):
        for name, one in drafts(reference=before, size=-8, generation=generation).quantize(-8).points.items():
            old = before.quantized[name].lattice
            assert torch.equal(old.rows, one.lattice.rows) and torch.equal(old.columns, one.lattice.columns)
            assert (old.seed == one.lattice.seed) is same and old.seed > 0


def test_weights_that_only_shake_stay_put_as_far_as_progress_allows():
    weights = {"a": normal(256, 256), "b": normal(128, 256, seed=1)}
    before, starts = reference_of(drafts(weights), -8), drafts(weights).lattice_starts(drafts(weights).quantize(-8))
    now = {name: x + 0.1 * normal(*x.shape, seed=7) for name, x in weights.items()}
    draft = drafts(now, before, -8, starts=starts).quantize(-8)
    assert 0.5 < draft.hysteresis <= MAX_HYSTERESIS
    kept = moved = changed = nearest = 0.0
    for name, one in draft.points.items():
        step, written = now[name] - weights[name], one.dequantize(torch.float32) - before.tensors[name]
        kept, moved = kept + float((step * written).sum()), moved + float(step.square().sum())
        changed += float((one.codes != before.quantized[name].codes).sum())
        nearest += float((drafts(now, None).quantize(-8).points[name].codes != before.quantized[name].codes).sum())
    assert kept / moved > MIN_RETAINED - 0.03
    assert changed < 0.95 * nearest
    assert all(torch.equal(one.first_codes, before.quantized[name].codes) for name, one in draft.points.items())
    assert any(one.gain > 1 for one in draft.points.values())
    unknown = drafts(now, before, -8).quantize(-8)  # where the weights were is known to nobody any more
    assert unknown.hysteresis == 0.5 and all(one.origin is None for one in unknown.points.values())


def test_a_weight_of_another_shape_or_dtype_begins_afresh():
    before = reference_of(drafts(), -8)
    others = {"a": normal(32, 96), "b": WEIGHTS["b"].bfloat16(), "bias": normal(96)}
    draft = drafts(others, before, -8).quantize(-8)
    assert draft.points["a"].codes.shape == (32, 96)
    assert draft.points["a"].lattice != before.quantized["a"].lattice


def test_weights_whose_points_would_not_reach_are_left_out():
    x = normal(64, 64)
    x[3, 3] = 1e7
    made = drafts({"a": x, "b": normal(64, 64, seed=1)})
    assert {*made.quantize(0).points} == {"a", "b"} and {*made.quantize(to_log_step(1e-3)).points} == {"b"}
    assert {*made.quantize(-900).points} == set()
