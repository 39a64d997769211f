"""Promise of every writer: after a kill, a power cut or damage a run goes on from the last checkpoint, or says why not.

`python -m helpers.writer_trials` makes more of these trials, of all writers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import shadow_tree, writer_trials
from helpers.writers import WRITERS

DAILY = ("file",)
ALL = [pytest.param(name, marks=[] if name in DAILY else pytest.mark.nightly) for name in WRITERS]

needs_a_recorder = pytest.mark.skipif(shadow_tree.missing() is not None, reason=f"{shadow_tree.missing()}")


@needs_a_recorder
@pytest.mark.parametrize("name", ALL)
def test_power_cuts_lose_no_checkpoint_whose_save_returned(tmp_path: Path, name: str) -> None:
    counts = writer_trials.power(name, tmp_path, every=6)
    assert counts["records"] > 30 and all(counts[mode] for mode in shadow_tree.MODES)


@needs_a_recorder
def test_the_trial_sees_a_writer_that_flushes_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="expected one of"):
        writer_trials.power("unflushed", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRITERS)
def test_kills_lose_no_checkpoint_whose_save_returned(tmp_path: Path, name: str) -> None:
    counts = writer_trials.kills(name, tmp_path, count=2)
    assert counts.total() == 2


@pytest.mark.parametrize("name", ALL)
def test_damage_gives_an_error_or_an_older_checkpoint_and_never_other_bits(tmp_path: Path, name: str) -> None:
    counts = writer_trials.damage(name, tmp_path, count=30)
    assert counts.total() == 30 and counts["newest"] < 30
