"""Promise: no test fails because the machine is busy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.timeouts import PATIENCE
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

TESTS = Path(__file__).parent


@given(st.none())
def unlimited(_: None) -> None:
    """As any test of properties that says nothing of time."""


def test_no_example_is_measured_by_the_clock() -> None:
    chosen = unlimited._hypothesis_internal_use_settings
    assert chosen.deadline is None and HealthCheck.too_slow in chosen.suppress_health_check
    own = [
        f"{path.relative_to(TESTS)}: {found}"
        for path in sorted(TESTS.rglob("*.py"))
        for found in re.findall(r"deadline=(?!None)[^,)]+", path.read_text())
        if path != Path(__file__)
    ]
    assert own == []


def test_a_test_may_take_longer_than_what_it_waits_for(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) >= 2 * PATIENCE
    own = [
        f"{path.relative_to(TESTS)}: {found}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for found in re.findall(r"mark\.timeout\((\d+)", path.read_text())
        if float(found) < 2 * PATIENCE
    ]
    assert own == []
