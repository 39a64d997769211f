"""What a manifest says of the loss, whoever wrote it and whatever it holds."""

from __future__ import annotations

import math

import pytest

from shrinkpoint.store.save_report import LossIncrease


def predicted(rise):
    """What Fisher records where it tried two steps and measured neither."""
    tried = [{"step": 2.0, "curvature": 0.5, "rise": None}, {"step": 1.0, "curvature": rise, "rise": None}]
    return {"chosen": {"step_in_deviations": 1.0}, "rise": None, "measured": False, "tried": tried}


def test_a_rise_is_told_relative_to_the_loss_with_its_interval():
    for loss, text, value in [
        (None, "", None),
        ({}, "", None),
        ({"chosen": None, "exact": "evaluate returned nan"}, "", None),
        ({"chosen": {"bins": 8}, "degradation": 0.0123, "measured": True}, "+1.2%", 0.0123),
        ({"chosen": {"bins": 8}, "degradation": -0.2}, "-20%", -0.2),
        ({"chosen": {"bins": 8}}, "not measured", None),
        ({"chosen": {"bins": 8}, "measured": False, "degradation": 0.1}, "not measured", None),
        ({"chosen": {"step_in_deviations": 1.0}, "rise": 0.02, "quality": 4.0}, "+0.5%", 0.005),
        ({"chosen": {"step_in_deviations": 1.0}, "rise": 0.02, "quality": 0.0}, "+2%", 0.02),
        ({"chosen": {"step_in_deviations": 1.0}, "rise": 0.02}, "measured", None),  # in nats, of a loss that is unknown
        ({"chosen": {"step_in_deviations": 1.0}, "rise": 0.0, "measured": True}, "0%", 0.0),
        ({"chosen": {"step_in_deviations": 1.0}, "rise": None, "terms": 3.0}, "not measured", None),
        (predicted(0.0021), "not measured, predicted +0.0021 nats", None),
        (predicted(None), "not measured", None),
        (predicted("inf"), "not measured", None),
        ({**predicted(0.0021), "rise": 0.02, "quality": 4.0, "measured": True}, "+0.5%", 0.005),
        ({"chosen": {"step_in_deviations": None}, "rise": None, "measured": True}, "0%", 0.0),
        ({"chosen": {}, "degradation": 0.01, "interval": [-0.005, 0.025]}, "+1% (-0.5% to +2.5%)", 0.01),
        ({"chosen": {}, "rise": 0.04, "quality": 4, "interval": [0.0, 0.08]}, "+1% (0% to +2%)", 0.01),
        ({"chosen": {}, "degradation": 0.01, "interval": ["-inf", "inf"]}, "+1%", 0.01),
    ]:
        found = LossIncrease.from_loss(loss)
        assert str(found) == text and found.value == (None if value is None else pytest.approx(value))


def test_what_restores_have_left_is_told_relative_to_the_loss():
    known = {"chosen": {"step_in_deviations": 1.0}, "rise": 0.02, "quality": 4.0, "restored_rise": 0.01}
    found = LossIncrease.from_loss(known)
    assert found.restored == 0.0025 and found.restored_text == "remaining rise of the loss about 0.25%"
    assert LossIncrease.from_loss({**known, "rise": None, "measured": False}).restored == 0.0025
    for nothing in ({**known, "restored_rise": 0.0}, {**known, "quality": None}, {**known, "chosen": None}):
        assert LossIncrease.from_loss(nothing).restored_text == ""


JUNK = [None, True, "x", "nan", 10**400, math.nan, math.inf, -1, [], [1], [1, "a"], [[], {}], {}, {"a": 1}]


NAMES = ["chosen", "degradation", "rise", "quality", "interval", "measured", "exact", "tried", "restored_rise"]


@pytest.mark.parametrize("name", NAMES)
def test_no_manifest_makes_it_fail(name):
    known = {"chosen": {"step_in_deviations": None}, "rise": 0.1, "quality": 2.0, "interval": [0.0, 1.0]}
    for junk in JUNK:
        trial = {"chosen": {"step_in_deviations": 1.0}, "tried": [junk, {"step": 1.0, "curvature": junk}]}
        for loss in (
            {**known, name: junk},
            {name: junk},
            {"chosen": {}, name: junk},
            {**predicted(0.1), name: junk},
            trial,
            junk,
        ):
            found = LossIncrease.from_loss(loss)
            assert isinstance(str(found), str) and (found.value is None or math.isfinite(found.value))
