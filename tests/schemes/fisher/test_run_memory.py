"""What a run learns of its loss: from single rises, from pairs of opposite errors, and from weights with hysteresis."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.schemes.evaluate import Degradation
from shrinkpoint.schemes.fisher.run_memory import MAX_TERMS_ERROR, UNKNOWN_ERROR, HeldRatios, RunMemory
from shrinkpoint.schemes.fisher.steps import QuantizedWeights

TERM = 1e-3


def weights(term: float = TERM, hysteresis: float = 0.5) -> QuantizedWeights:
    return QuantizedWeights(0, {}, 0.0, term, hysteresis)


def examples(mean: float, deviation: float, seed: int, count: int = 400) -> Degradation:
    differences = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * deviation
    differences += mean - differences.mean()
    return Degradation(mean, None, differences)


def test_a_single_rise_moves_what_is_known_by_less_than_two():
    learned = RunMemory(num_terms=100.0, terms_error=0.3)
    learned.update(weights(), Degradation(50.0), 1e-4)  # says 50000: a matter of chance
    assert 100 < learned.num_terms <= 200
    assert learned.needs_pair  # ... or of a training that has changed: a pair can tell
    sure = RunMemory(num_terms=100.0, terms_error=0.3)
    sure.update(weights(), Degradation(-1.0), 1e-4)
    assert 50 <= sure.num_terms < 100 and not sure.needs_pair


def test_a_first_rise_counts_as_something():
    first = RunMemory()
    first.update(weights(), Degradation(-1.0), 1e-4)
    assert first.num_terms == pytest.approx(0.1) and first.needs_pair


def test_what_says_nothing_teaches_nothing():
    learned = RunMemory(num_terms=100.0)
    for line, rise in ((weights(0.0), 1.0), (weights(), math.nan), (weights(), math.inf)):
        learned.update(line, Degradation(rise), 1e-4)
        learned.update_from_pair(line, Degradation(rise), Degradation(1.0), 1e-4)
    assert (learned.num_terms, learned.terms_error) == (100.0, UNKNOWN_ERROR)


@pytest.mark.parametrize("before", [None, 1.0, 5000.0])
def test_a_pair_tells_the_number_of_terms_whatever_the_slope(before):
    for slope in [0.0, 0.05, -0.05, -10.0]:
        learned = RunMemory(num_terms=before)
        learned.update_from_pair(weights(), Degradation(0.2 + slope), Degradation(0.2 - slope), 1e-4)
        assert learned.num_terms == pytest.approx(200.0, rel=0.5)
        assert not learned.needs_pair


def test_an_interval_is_as_wide_as_the_slope_and_the_noise_of_a_pair_ask_for():
    widths = []
    for slope, deviation in ((0.0, 0.0), (0.4, 0.0), (0.0, 8.0)):
        learned = RunMemory()
        learned.update_from_pair(weights(), examples(0.2 + slope, deviation, 0), examples(0.2 - slope, 0.0, 1), 1e-4)
        low, high = learned.predict(weights()).interval
        widths.append(high - low)
    assert widths[1] > widths[0] + 2 * 0.4 and widths[2] > widths[0] + 2 * 0.4


def test_a_pair_that_is_lost_in_noise_bounds_the_number_of_terms():
    learned = RunMemory(num_terms=1e6)
    learned.update_from_pair(weights(), examples(0.01, 1.0, 0), examples(-0.01, 1.0, 1), 1e-4)
    assert learned.num_terms == pytest.approx(2 * (1 / 20 / 2**0.5) / TERM, rel=0.2)  # two standard errors of the mean
    small = RunMemory(num_terms=3.0)
    small.update_from_pair(weights(), examples(0.01, 1.0, 0), examples(-0.01, 1.0, 1), 1e-4)
    assert small.num_terms == 3.0


def test_a_pair_is_asked_for_again_as_training_goes_on():
    learned = RunMemory()
    learned.update_from_pair(weights(), Degradation(0.2), Degradation(0.2), 1e-4)
    saves = 0
    while not learned.needs_pair:
        learned.begin_save()
        saves += 1
    assert 3 <= saves <= 20
    for _ in range(100):
        learned.begin_save()
    assert MAX_TERMS_ERROR < learned.terms_error <= UNKNOWN_ERROR


def test_hysteresis_has_a_factor_of_its_own():
    learned = RunMemory(num_terms=100.0, terms_error=0.3)
    wide = learned.predict(weights(hysteresis=0.6))
    for rise in (-0.05, -0.04, -0.06, -0.05, -0.05, -0.05):
        learned.update(weights(hysteresis=0.6), Degradation(rise), 1e-4)
    assert learned.num_terms == 100.0
    now = learned.predict(weights(hysteresis=0.6))
    assert now.rise == pytest.approx(-0.05, rel=0.1) and now.interval[0] < -0.05 < now.interval[1]
    assert now.interval[1] - now.interval[0] < 0.8 * (wide.interval[1] - wide.interval[0])
    assert learned.predict(weights()).rise == pytest.approx(0.1)


def test_intervals_cover_what_is_drawn_from_what_they_assume():
    generator, covered = torch.Generator().manual_seed(3), 0
    for _ in range(300):
        true = 100 * math.exp(0.3 * float(torch.randn((), generator=generator)))
        rise = true * TERM * math.exp(0.6 * float(torch.randn((), generator=generator)))
        low, high = RunMemory(num_terms=100.0, terms_error=0.3).predict(weights()).interval
        covered += low <= rise <= high
    assert 0.85 <= covered / 300 <= 0.98


EXTREME = [5e-324, 1e-200, 1e-9, 1.0, 1e200, 1.7e308]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, -1.0, *EXTREME, *(-x for x in EXTREME), math.nan, math.inf]),
            st.sampled_from([0.0, -1.0, *EXTREME]),
            st.sampled_from(EXTREME),
            st.sampled_from([0.5, 0.6]),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.sampled_from([None, *EXTREME]),
)
def test_whatever_is_measured_what_is_known_stays_a_number(measured, num_terms):
    learned = RunMemory(num_terms=num_terms)
    for rise, opposite, term, hysteresis, is_pair in measured:
        line = weights(term, hysteresis)
        if is_pair:
            learned.update_from_pair(line, Degradation(rise), Degradation(opposite), 1e-6)
        else:
            learned.update(line, Degradation(rise), 1e-6)
        learned.begin_save()
        learned.predict(line)
        assert learned.num_terms is None or 0 < learned.num_terms < math.inf
        assert 0 < learned.terms_error <= UNKNOWN_ERROR
        json.dumps(learned.to_json(), allow_nan=False)


def test_what_a_manifest_records_is_read_again():
    learned = RunMemory(log_step=-3, num_terms=250.0, terms_error=0.25, held=HeldRatios(2.5, -0.5, 0.75), slope=0.5)
    assert RunMemory.from_json(json.loads(json.dumps(learned.to_json())), 7.0) == learned
    assert RunMemory.from_json({"size": 3, "terms": 5.0}, None) == RunMemory(3, 5.0)  # of an earlier release


def test_entries_of_no_use_are_passed_over():
    for error in [None, "1", -1.0, 0.0, 1e9, math.nan, True]:
        for held in [None, [], [1.0, 2.0], [1.0, 2.0, "3"], [-1.0, 1.0, 1.0], [1.0, math.nan, 1.0], {}]:
            found = RunMemory.from_json({"size": 1, "terms": 5.0, "terms_error": error, "held": held}, None)
            assert found == RunMemory(1, 5.0)
