"""Promise: the verdict says where two runs part and what is at fault: training, store, restore, or a file."""

from __future__ import annotations

from dataclasses import replace

from shrinkpoint_lab.demo.training_log import TrainingLog
from shrinkpoint_lab.demo.verdict import Cause, CheckpointCheck, Verdict, judge

SAME = {step: {"w": str(step), "m": str(step)} for step in range(1, 10)}


def log(name: str, first: int, last: int, *, changed: int | None = None, restored: str = "") -> TrainingLog:
    """A process that makes these steps; from step `changed` on its weights are other ones."""
    states = {step: dict(SAME[step]) for step in range(first, last + 1)}
    for step in states.keys() & set(range(changed or 10, 10)):
        states[step]["w"] = f"{name} {step}"
    restored_state = SAME[first - 1] if first > 1 else None
    if restored:
        restored_state = {**SAME[first - 1], "w": restored}
    return TrainingLog(
        name, first, last, restored_state=restored_state, losses=dict.fromkeys(states, 1.0), states=states
    )


WHOLE, KILLED, RESUMED = log("never killed", 1, 9), log("killed", 1, 6), log("resumed", 4, 9)
EXACT = [CheckpointCheck(step) for step in (3, 6, 9)]


def verdict(*processes, after_kill=EXACT[:1], at_end=EXACT, differences=(), again=None) -> Verdict:
    return judge(
        WHOLE,
        processes,
        after_kill=after_kill,
        at_end=at_end,
        differences=differences,
        replay=lambda *_: again,
    )


def test_equal_runs_pass_without_a_finding():
    assert verdict(KILLED, RESUMED) == Verdict(True, Cause.NOTHING, ())


def test_a_killed_process_that_differs_before_the_kill_shows_that_training_is_not_deterministic():
    found = verdict(
        log("killed", 1, 6, changed=2), log("resumed", 4, 9, changed=4, restored="killed 3"), differences=["w"]
    )
    assert not found.passed and found.cause is Cause.TRAINING and len(found.findings) == 1
    assert (
        "After step 2 the killed process" in found.findings[0] and ": w. It had restored nothing" in found.findings[0]
    )


def test_a_killed_process_that_differs_only_in_lost_steps_is_a_finding_of_a_run_that_passed():
    found = verdict(log("killed", 1, 6, changed=5), RESUMED)
    assert found.passed and found.cause is Cause.TRAINING and "After step 5" in found.findings[0]


def test_a_checkpoint_that_gives_back_another_state_is_the_fault_of_the_store():
    bad = [CheckpointCheck(3, ("w", "m"))]
    parted = log("resumed", 4, 9, changed=4, restored="other")
    found = verdict(KILLED, parted, after_kill=bad, at_end=[*bad, *EXACT[1:]], differences=["w"])
    assert not found.passed and found.cause is Cause.STORED_STATE
    assert "step 3 gives back another state" in found.findings[0] and "w and 1 more" in found.findings[0]


def test_a_process_that_begins_with_another_state_than_the_checkpoint_has_is_the_fault_of_the_restore():
    found = verdict(KILLED, log("resumed", 4, 9, changed=4, restored="other"), differences=["w"])
    assert found.cause is Cause.RESTORE and "saved at step 3: w" in found.findings[0]


def test_what_parts_after_a_restore_is_found_by_training_again():
    parted = log("resumed", 4, 9, changed=7)
    cases = [
        (log("trained again", 4, 7), Cause.TRAINING),  # as the run that was never killed
        (replace(parted, name="trained again"), Cause.MISSING_STATE),  # the same way
        (log("trained again", 4, 7, changed=6), Cause.TRAINING),  # a third way
        (log("trained again", 4, 5), Cause.UNKNOWN),  # it died
        (None, Cause.UNKNOWN),
    ]
    for again, cause in cases:
        found = verdict(KILLED, parted, differences=["w"], again=again)
        assert not found.passed and found.cause is cause and "After step 7 the resumed" in found.findings[0]


def test_a_damaged_checkpoint_is_named_whether_it_was_replaced_or_not():
    damaged = [CheckpointCheck(3, error="rank-0: flipped")]
    found = verdict(KILLED, RESUMED, after_kill=damaged)
    assert (
        found.passed and found.cause is Cause.DAMAGE and "step 3 cannot be read: rank-0: flipped" in found.findings[0]
    )
    assert not verdict(KILLED, RESUMED, at_end=[*damaged, *EXACT[1:]]).passed


def test_a_difference_that_no_step_shows_is_not_explained_away():
    found = verdict(KILLED, RESUMED, differences=["model/w"])
    assert not found.passed and found.cause is Cause.UNKNOWN and "model/w" in found.findings[0]
