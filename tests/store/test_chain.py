"""Which deltas have lost a base, and which steps a message names."""

from __future__ import annotations

from helpers.manifests import manifest, run

from shrinkpoint.store import chain

RUN = {manifest.step: manifest for manifest in run(7)}  # keyframes 1, 4 and 7


def test_a_delta_whose_base_was_saved_again_or_is_gone_has_lost_it() -> None:
    assert chain.orphaned_deltas(RUN) == []
    assert chain.orphaned_deltas({**RUN, 5: manifest(5, again="2")}) == [6]
    assert chain.orphaned_deltas({step: one for step, one in RUN.items() if step != 1}) == [2, 3]


def test_an_unknown_step_is_named_with_those_there_are() -> None:
    assert chain.describe_steps(RUN) == "one of 1, 2, 3, 4, 5, 6, 7"
    assert chain.describe_steps({one.step: one for one in run(30)}) == "one of 1, 2, 3, ..., 28, 29, 30"
    assert "none yet" in chain.describe_steps({})
