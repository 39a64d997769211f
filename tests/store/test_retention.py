"""What is kept, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from helpers.manifests import EPOCH, manifest, run
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint import Keep
from shrinkpoint.errors import PolicyError
from shrinkpoint.store import chain
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.retention import apply_policy, parents_to_reverse

NOW = EPOCH + timedelta(hours=10)
ALONE = [
    manifest(step, hours=step, metrics={"val_loss": loss}) for step, loss in enumerate([3, 2, 1, math.nan, 2.5, 2.6], 1)
]


def test_each_rule_adds_to_what_is_kept() -> None:
    for keep, kept in [
        (Keep(), [1, 2, 3, 4, 5, 6]),
        (Keep(last=1), [6]),
        (Keep(last=2), [5, 6]),
        (Keep(last=99), [1, 2, 3, 4, 5, 6]),
        (Keep(every=3), [3, 6]),
        (Keep(every=4), [4, 6]),  # 6 is the newest
        (Keep(best=1), [3, 6]),
        (Keep(best=2, mode="max"), [1, 6]),
        (Keep(best=3), [2, 3, 5, 6]),
        (Keep(best=9), [1, 2, 3, 5, 6]),  # nan does not compete
        (Keep(best=1, metric="accuracy"), [6]),
        (Keep(within="6h"), [4, 5, 6]),
        (Keep(within=timedelta(hours=5)), [5, 6]),
        (Keep(within="1 d"), [1, 2, 3, 4, 5, 6]),
        (Keep(last=2, every=4, best=1), [3, 4, 5, 6]),
    ]:
        decision = apply_policy(ALONE, keep, NOW)
        assert list(decision.keep) == kept
        assert sorted(decision.keep + decision.drop) == [1, 2, 3, 4, 5, 6]


def test_reasons_are_sentences_a_person_can_use() -> None:
    decision = apply_policy(ALONE, Keep(last=2, every=3, best=2, within="6h"), NOW)
    assert decision.reasons[3] == ("a multiple of 3", "val_loss 1 is number 1 of the best 2")
    assert decision.reasons[6] == (
        "newest: a run resumes from it",
        "one of the last 2",
        "a multiple of 3",
        "younger than 6h",
    )
    assert decision.reasons[1] == ("no rule keeps it",)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equally_good_checkpoints_the_newer_is_kept(mode) -> None:
    equals = [manifest(step, hours=step, metrics={"val_loss": 1.0} if step < 4 else {}) for step in range(1, 5)]
    assert apply_policy(equals, Keep(best=1, mode=mode), NOW).keep == (3, 4)


def test_weights_alone_are_not_written_again_and_are_no_parent() -> None:
    kept = {one.step: replace(one, weights_only=one.step == 2) for one in run(4)}
    assert parents_to_reverse(kept, Keep(last=4), lambda _: False) == {3: 4, 1: 3}


def test_a_base_of_something_kept_is_kept_and_says_so() -> None:
    decision = apply_policy(run(6), Keep(last=1), NOW)
    assert decision.keep == (4, 5, 6)
    assert decision.reasons[4] == ("base of step 6",)


def test_a_step_saved_again_is_no_base_any_more() -> None:
    one, _, three = run(3)
    assert apply_policy([one, manifest(2, again="2"), three], Keep(last=1), NOW).keep == (1, 3)


def test_a_forgotten_base_stays_until_nothing_stands_on_it() -> None:
    made = run(3)
    assert apply_policy(made, Keep(), NOW, forgotten={1, 2}).keep == (1, 2, 3)
    decision = apply_policy(made, Keep(), NOW, forgotten={2, 3})
    assert decision.keep == (1,)
    assert "forgotten" in decision.reasons[2][0]


def test_a_rule_that_means_nothing_is_refused() -> None:
    for wrong in [
        {"last": 0},
        {"last": -1},
        {"last": 1.5},
        {"last": True},
        {"every": 0},
        {"best": "1"},
        {"mode": "low"},
        {"last": 3, "metric": "accuracy"},
        {"mode": "max"},
        {"within": "soon"},
        {"within": ""},
        {"within": "0s"},
        {"within": timedelta(0)},
        {"within": 3},
    ]:
        with pytest.raises(PolicyError, match="Keep"):
            Keep(**wrong)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(PolicyError, match="zone"):
        apply_policy(ALONE, Keep(within="1h"), datetime(2026, 1, 1))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Manifest], set[int]]:
    """Some checkpoints, in chains of any shape, some forgotten, some saved again or deleted by a foreign hand."""
    made: list[Manifest] = []
    step = 0
    for _ in range(draw(st.integers(0, 12))):
        step += draw(st.integers(1, 4))
        parent = draw(st.sampled_from([None, *made])) if made else None
        losses = st.none() | st.sampled_from([0.5, 1.0, 2.0, math.nan, math.inf])
        loss = draw(losses)
        made.append(manifest(step, parent, metrics={} if loss is None else {"val_loss": loss}, hours=step))
    made = [manifest(one.step, again="2") if draw(st.integers(0, 9)) == 0 else one for one in made]
    made = [one for one in made if draw(st.integers(0, 9))]
    steps = [one.step for one in made]
    return made, (draw(st.sets(st.sampled_from(steps))) if steps else set())


keeps = st.builds(
    lambda best, **rules: Keep(**rules, **best),
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 5),
    best=st.just({}) | st.fixed_dictionaries({"best": st.integers(1, 3), "mode": st.sampled_from(["min", "max"])}),
    within=st.none() | st.sampled_from(["1h", "5h", "20h"]),
)


@settings(deadline=None, max_examples=60)
@given(history=histories(), keep=keeps)
def test_nothing_kept_stands_on_something_dropped(history: tuple[list[Manifest], set[int]], keep: Keep) -> None:
    made, forgotten = history
    decision = apply_policy(made, keep, NOW, forgotten=forgotten)
    known = {one.step: one for one in made}
    assert set(decision.keep) | set(decision.drop) == set(known)
    assert not set(decision.keep) & set(decision.drop)
    digests = {step: one.digest for step, one in known.items()}
    for step in decision.keep:
        assert set(chain.ancestors(digests, known[step])) <= set(decision.keep)
    assert all(decision.reasons[step] for step in known)


@settings(deadline=None, max_examples=60)
@given(history=histories(), keep=keeps)
def test_deciding_twice_decides_nothing_new(history: tuple[list[Manifest], set[int]], keep: Keep) -> None:
    made, forgotten = history
    first = apply_policy(made, keep, NOW, forgotten=forgotten)
    left = [one for one in made if one.step in first.keep]
    assert apply_policy(left, keep, NOW, forgotten=forgotten).drop == ()


@settings(deadline=None, max_examples=60)
@given(history=histories(), count=st.integers(1, 5))
def test_last_keeps_that_many_and_the_newest_always_stays(history: tuple[list[Manifest], set[int]], count: int) -> None:
    made, forgotten = history
    shown = [one.step for one in made if one.step not in forgotten]
    assert set(shown[-count:]) <= set(apply_policy(made, Keep(last=count), NOW, forgotten=forgotten).keep)
    assert set(shown[-1:]) <= set(apply_policy(made, Keep(every=1000), NOW, forgotten=forgotten).keep)
