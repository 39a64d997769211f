"""Which checkpoint depends on which."""

from __future__ import annotations

from helpers.manifests import manifest, run

from shrinkpoint.store import chain

RUN = {manifest.step: manifest for manifest in run(7)}  # keyframes 1, 4 and 7
DIGESTS = {step: manifest.digest for step, manifest in RUN.items()}


def test_a_chain_leads_from_the_keyframe_to_the_step() -> None:
    paths = [(*chain.ancestors(DIGESTS, manifest), step) for step, manifest in RUN.items()]
    assert paths == [(1,), (1, 2), (1, 2, 3), (4,), (4, 5), (4, 5, 6), (7,)]
    assert [[link.step for link in chain.chain_links(one)] for one in RUN.values()] == [[*path] for path in paths]


def test_a_missing_step_on_the_way_is_no_ancestor() -> None:
    without = {step: digest for step, digest in DIGESTS.items() if step != 5}
    assert chain.ancestors(without, RUN[6]) == [4]


def test_a_step_saved_again_is_no_longer_the_base_it_was() -> None:
    again = {**RUN, 5: manifest(5, again="2")}
    assert chain.ancestors({step: manifest.digest for step, manifest in again.items()}, RUN[6]) == [4]
    assert not chain.is_current(again, RUN[6].bases[-1])
    assert chain.is_current(RUN, RUN[6].bases[-1])


def test_an_unknown_step_is_named_with_those_there_are() -> None:
    assert chain.describe_steps(RUN) == "one of 1, 2, 3, 4, 5, 6, 7"
    assert chain.describe_steps({one.step: one for one in run(30)}) == "one of 1, 2, 3, ..., 28, 29, 30"
    assert "none yet" in chain.describe_steps({})
