"""Promise: rivals are compared at the same rise of the same chains, by curves whose arithmetic is checked."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.paths import REPOSITORY


@pytest.fixture(scope="module")
def patch() -> pytest.MonkeyPatch:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        yield patch


@pytest.fixture(scope="module")
def curves(patch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("rate_distortion_curves")


def test_rises_of_the_curve_do_not_grow_with_the_bits(curves: ModuleType) -> None:
    given = [curves.Point(*pair) for pair in ((1, 0.5), (0.25, 4.0), (4, 0.0), (2, 0.7), (0.5, 3.0))]
    found = curves.monotone(given)
    assert [point.bits for point in found] == [0.25, 0.5, 1, 2, 4]
    assert [point.rise for point in found] == pytest.approx([4.0, 3.0, 0.6, 0.6, 0.0])


def test_bits_at_a_rise_are_measured_or_between_two_settings(curves: ModuleType) -> None:
    given = [curves.Point(0.25, 1.0, "coarse"), curves.Point(1, 0.5, "middle"), curves.Point(4, 0.25, "fine")]
    assert curves.bits_at(given, 0.5) == (1, "measured", "middle")
    assert curves.bits_at(given, 3.0) == (0.25, "measured", "coarse")
    bits, how, name = curves.bits_at(given, 0.75)
    assert (how, name) == ("between", "middle and coarse")
    assert bits == pytest.approx(0.5)
    assert curves.bits_at(given, 0.1) is None
    assert curves.bits_at([curves.Point(1, math.nan)], 0.1) is None


def test_bound_is_that_of_a_gaussian_and_leaves_out_what_has_no_error(curves: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(deviation: float) -> torch.Tensor:
        return deviation * torch.randn(4, 50_000, generator=generator)

    before = noise(1.0)
    after = before + noise(0.3)
    decoded = before + noise(0.1), after + noise(0.1)
    decoded[1][0] = after[0]
    names = ({"a": x, "b": x[0]} for x in (before, after, *decoded))
    assert curves.gaussian_bound(*names) == pytest.approx(0.5 * math.log2(1 + 0.3**2 / 0.1**2), rel=0.01)
    exact = {"a": before}
    assert math.isnan(curves.gaussian_bound(exact, {"a": after}, exact, {"a": after}))


def test_retention_is_the_written_share_of_the_movement(curves: ModuleType) -> None:
    first, last = {"a": torch.zeros(3)}, {"a": torch.tensor([2.0, 0.0, 0.0])}
    assert curves.retained(first, last, first, {"a": torch.tensor([0.5, 7.0, 0.0])}) == pytest.approx(0.25)
    assert curves.retained(first, first, first, last) == 1.0


@pytest.mark.filterwarnings("ignore")  # of states this small torch and schemes say much
def test_a_toy_of_the_whole_is_resumed_and_summarized(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmark = importlib.import_module("rate_distortion")
    places = [f"--{name}={tmp_path / name}" for name in ("ledger", "recordings", "out")]
    patch.setattr(sys, "argv", ["", "--quick", "--only", "fisher", "lossless", "--data=nowhere", *places])
    benchmark.main()
    rows = {row["rival"]: row for row in json.loads((tmp_path / "out").read_text())["rows"]}
    assert rows.keys() == {"fisher", "lossless"}
    lossless, fisher = rows["lossless"], rows["fisher"]
    assert (lossless["rise"], lossless["error"], lossless["retention"], lossless["bound"]) == (0, 0, 1, None)
    assert 0 < fisher["bound"] < fisher["bits"] < lossless["bits"] < 32
    assert fisher["state x"] > lossless["state x"] > 1
    lines = (tmp_path / "ledger").read_text()
    benchmark.main()
    assert (tmp_path / "ledger").read_text() == lines
