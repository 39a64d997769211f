"""Promise: SCAR's bound has the constants of the course that it is fitted to."""

from __future__ import annotations

import math

import pytest

from lab.studies.rework.bound import Bound


def test_bound_of_a_geometric_course() -> None:
    steps = range(0, 100, 10)
    fitted = Bound.fit(steps, [5 * 0.9**step for step in steps])
    assert (fitted.c, fitted.start) == (pytest.approx(0.9), pytest.approx(5))
    # a perturbation as large as what is left doubles the distance, which is what log(2) / log(1 / c) iterations halve
    assert fitted.iterations(20, 5 * 0.9**20) == pytest.approx(math.log(2) / math.log(1 / 0.9))
    assert Bound.fit(steps, [1.1**step for step in steps]).iterations(20, 1.0) is None
