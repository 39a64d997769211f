"""The prediction decides where nothing is measured, and what was measured calibrates it."""

from __future__ import annotations

import pytest
from helpers.small_training import Run

import shrinkpoint as sp
from shrinkpoint.storage import MemoryStorage

pytestmark = pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("every", "measured"), [(None, [1, 0, 0, 0, 0]), (2, [1, 0, 1, 0, 1]), (1, [1, 1, 1, 1, 1])])
def test_the_loss_is_measured_as_often_as_it_is_asked_for(every: int | None, measured: list[int], background) -> None:
    run, calls, reports = Run(steps=20), [], []
    scheme = sp.Fisher(budget="1%", evaluate=run.evaluate, evaluate_every=every, terms=64)
    with sp.CheckpointManager(MemoryStorage(), scheme=scheme, background=background) as manager:
        for step in range(5):
            before = run.calls
            manager.save(step, **run.parts)
            reports.append(manager.wait())
            calls.append(run.calls > before)
            run.steps(5)
    assert calls == [bool(item) for item in measured] == [report.is_measured for report in reports]
    for report, is_measured in zip(reports, calls, strict=True):
        (trial, *_) = report.loss_report["tried"]
        if not is_measured:  # half of the budget, by the calibrated prediction, is what steps aim at
            assert trial["rise"] is None and 0 < trial["curvature"] < 0.01 * report.loss_report["quality"]
            assert report.loss_increase is None and "predicted" in str(report)


def test_a_resumed_run_goes_on_with_what_was_calibrated() -> None:
    run, storage = Run(steps=20), MemoryStorage()
    make = lambda: sp.Fisher(budget="1%", evaluate=run.evaluate, evaluate_every=None)  # noqa: E731
    with sp.CheckpointManager(storage, scheme=make()) as manager:
        terms = manager.save(0, **run.parts).loss_report["terms"]
    with sp.CheckpointManager(storage, scheme=make()) as manager:
        manager.restore(**run.parts)
        run.steps(5)
        calls = run.calls
        report = manager.save(1, **run.parts)
    assert run.calls == calls and not report.is_measured and report.loss_report["terms"] == terms


def test_terms_that_a_trainer_counts_stand_in_for_those_that_were_not_given() -> None:
    for given, expected in ((None, 500.0), (64, 64.0)):
        run, scheme = Run(steps=20), sp.Fisher(nats=0.01, terms=given)
        scheme.note_terms(500)
        with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager:
            report = manager.save(0, **run.parts)
        assert report.loss_report["terms"] == expected
        assert 0 < report.loss_report["tried"][0]["curvature"] <= 0.01
