"""What the scheme does to weights: codes with fixed meanings, protected values exact, centers that stay put."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from helpers.round_trip import write
from helpers.small_training import LettersRun, Run

from shrinkpoint import Inshrinkerator
from shrinkpoint.codec.codebook_record import CODERS
from shrinkpoint.schemes.evaluate import TrialEvaluator
from shrinkpoint.schemes.inshrinkerator.scheme import SPACE
from shrinkpoint.schemes.search.candidates import PreviousCodes
from shrinkpoint.schemes.select import select_tensors
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import flatten

CONFIG = {"bins": 8, "embedding_bins": 32, "prune": 0.2, "protect": 0.005}


def scheme(**changes) -> Inshrinkerator:
    paper = changes.pop("paper", False)
    return Inshrinkerator(config=CONFIG | changes, paper=paper)


@lru_cache
def states() -> list[dict[str, torch.Tensor]]:
    """A run at four times, 30 steps apart."""
    run = Run(steps=60)
    return [{k: v.clone() for k, v in run.steps(30).model.state_dict().items()} for _ in range(4)]


@lru_cache
def letters() -> dict[str, torch.Tensor]:
    return copy.deepcopy(dict(LettersRun(steps=30).model.state_dict()))


def test_a_code_says_what_a_value_is():
    state = states()[0]
    kept = scheme().quantize(flatten(state), None)
    assert [*kept.quantized] == ["body.0.weight", "body.3.weight"]
    for name, one in kept.quantized.items():
        x, found = state[name], kept.state.tensors[name]
        assert one.codes.dtype == torch.uint8 and one.codes.shape == x.shape and one.first_code == 2 and one.bins == 8
        assert not found[one.codes == 0].any()
        assert torch.equal(found[one.codes == 1], x[one.codes == 1].bfloat16().float())
        assert torch.equal(one.exact, x[one.codes == 1].bfloat16())
        assert torch.equal(found[one.codes >= 2], one.centers[(one.codes[one.codes >= 2] - 2).long()])
        assert 0 < (one.codes == 1).float().mean() < 0.02 and 0.1 < (one.codes == 0).float().mean() < 0.3
        assert bool((one.centers.diff() > 0).all())
    untouched = [name for name in state if name not in kept.quantized]
    assert untouched and all(kept.state.tensors[name] is not None for name in untouched)
    assert all(torch.equal(kept.state.tensors[name], state[name]) for name in untouched)


def test_embeddings_have_bins_of_their_own():
    symbols = scheme().quantize(flatten(letters()), None).quantized
    assert {name: one.bins for name, one in symbols.items()} == {
        "wte.weight": 32,
        "attn_out.weight": 8,
        "deep.weight": 8,
    }


@pytest.mark.parametrize("paper", [False, True])
def test_a_file_gives_back_what_was_kept(paper):
    parent, reference = None, None
    for state in states():
        kept = scheme(paper=paper).quantize(flatten(state), reference)
        written = write(state, parent, scheme=scheme(paper=paper))
        read = written.read()
        assert all(torch.equal(read[name], kept.state.tensors[name]) for name in state)
        parent, reference = written, written.reference()


def test_on_paper_there_is_the_papers_coder_alone():
    for paper in (False, True):
        chain = [write(states()[0], scheme=scheme(paper=paper))]
        chain.append(write(states()[1], chain[0], scheme=scheme(paper=paper)))
        codes = [
            [recipe["codes"] for recipe in one.recipes().values() if recipe["kind"] == "quantized"] for one in chain
        ]
        assert all(len(some) == 2 for some in codes)
        assert [all("cyclic" in one for one in some) for some in codes] == [paper, paper]
    assert scheme(paper=True).coders == ("rearranged",) and scheme().coders == CODERS


def test_on_paper_shares_are_not_below_what_was_asked():
    state = states()[0]
    pruned = {paper: scheme(paper=paper, prune=0.5).quantize(flatten(state), None).quantized for paper in (False, True)}
    for name, one in pruned[True].items():
        assert int((one.codes == 0).sum()) > int((pruned[False][name].codes == 0).sum())
        assert int((one.codes == 1).sum()) >= int((pruned[False][name].codes == 1).sum())
    count = sum(one.codes.numel() for one in pruned[True].values())
    protected = sum(int((one.codes == 1).sum()) for one in pruned[True].values())
    assert protected >= CONFIG["protect"] * count - 1


def migrations(*schemes: Inshrinkerator) -> list[float]:
    """Shares of the codes that change from one checkpoint to the next."""
    shares, parent, before = [], None, None
    for state, one in zip(states(), schemes, strict=True):
        parent = write(state, parent, scheme=one)
        after = parent.reference().quantized
        if before is not None:
            changed = [(after[name].codes != before[name].codes).float().mean() for name in after]
            shares.append(float(sum(changed) / len(changed)))
        before = after
    return shares


@pytest.mark.parametrize("bins", [8, 32])
def test_centers_that_are_taken_over_keep_codes_where_they_were(bins):
    """Against centers from a random start every time. (One from the same start finds its way back about as well.)"""
    warm = migrations(*[scheme(bins=bins)] * 4)
    fresh = migrations(*[Inshrinkerator(config=CONFIG | {"bins": bins}, paper=True, seed=i) for i in range(4)])
    assert all(a < b for a, b in zip(warm, fresh, strict=True))
    assert sum(warm) < 0.6 * sum(fresh)


def test_ours_is_smaller_than_the_papers():
    sizes = {}
    for paper in (False, True):
        parent, sizes[paper] = None, 0
        for state in states():
            parent = write(state, parent, scheme=scheme(paper=paper))
            sizes[paper] += parent.report.stored_bytes
    assert sizes[False] < sizes[True]


def test_quantizing_what_was_quantized_changes_nothing():
    """A checkpoint right after a restore: no value is rounded a second time."""
    for changes in ({}, {"bins": 4, "prune": 0.5}, {"bins": 32, "prune": 0.0, "protect": 0.01}):
        first = write(states()[0], scheme=scheme(**changes))
        again = write(first.read(), first, scheme=scheme(**changes))
        a, b = first.read(), again.read()
        changed = [float((a[name] != b[name]).float().mean()) for name in first.reference().quantized]
        far = [float((a[name] - b[name]).norm() / a[name].norm()) for name in first.reference().quantized]
        assert max(changed) < 0.011, changed  # what was protected and no longer is
        assert max(far) < 0.06, far


def points():
    return [point for variant in SPACE.variants[:1] for point in SPACE.points(variant)]


def test_a_knob_for_tensors_that_there_are_none_of_is_not_tried():
    for state, count in ((states()[0], 108), (letters(), 216), ({"wte.weight": letters()["wte.weight"]}, 36)):
        flat = flatten(state)
        tensors = select_tensors(flat, GlobalTensors.from_state(flat)).tensors
        stats = GlobalStats(GlobalTensors.from_state(flat), tensors)
        found = scheme().candidates(tensors, PreviousCodes(), TrialEvaluator(flat, None), stats)
        assert sum(found.size(point) < float("inf") for point in points()) == count
