"""Measuring together: real processes, a real gloo group."""

from __future__ import annotations

import pytest
from helpers.processes import ranks
from helpers.search_spaces import random_landscape

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.search.space import Point
from shrinkpoint.schemes.search.strategies import branch_and_bound, diagonal, neighbourhood
from shrinkpoint.schemes.search.trials import Trials

SEEDS = range(6)
RANKS = """
    import json
    import torch.distributed as dist
    from helpers.search_spaces import random_landscape
    from shrinkpoint.errors import CorruptError, ShrinkpointError
    from shrinkpoint.schemes.search.strategies import branch_and_bound
    from shrinkpoint.schemes.search.strategies import diagonal
    from shrinkpoint.schemes.search.strategies import neighbourhood
    from shrinkpoint.schemes.search.space import Point
    from shrinkpoint.schemes.search.trials import Trials


    def plain(outcome):
        chosen = outcome.chosen
        trials = [[t.point.variant, t.point.index, t.size, t.degradation, t.seconds] for t in outcome.trials]
        return [chosen and [chosen.point.variant, chosen.point.index], trials, outcome.rounds]


    def of_rank(rank, width, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=width)
        group, said = dist.group.WORLD, {"outcomes": [], "asked": 0, "errors": {}}
        for seed in range(6):
            land = random_landscape(seed, variants=("a", "b"), sizes="monotone")
            trials = Trials(land.measure, group=group)
            assert trials.width == width
            for search, more in ((branch_and_bound, ()), (diagonal, ()), (neighbourhood, (Point("a", (3, 3, 1)),))):
                said["outcomes"].append(plain(search(land.space, land.size, trials, land.threshold, *more)))
            said["asked"] += len(land.asked)

        def caught(name, call):
            try:
                call()
            except ShrinkpointError as error:
                said["errors"][name] = [type(error).__name__, str(error), type(error.__cause__).__name__]

        def failing(error):
            def measure(point):
                if rank == width - 1:
                    raise error
                return 0.0
            return measure

        points, foreign = land.space.points("a")[:width], failing(ValueError("boom"))
        own = failing(CorruptError("file", found="junk", do="mend it"))
        caught("foreign", lambda: Trials(foreign, group=group).run(points))
        caught("own", lambda: Trials(own, group=group).run(points))
        caught("search", lambda: branch_and_bound(land.space, land.size, Trials(foreign, group=group), 0.5))
        caught("size", lambda: branch_and_bound(land.space, foreign, Trials(land.measure, group=group), 0.5))
        said["after"] = Trials(lambda point: float(point.index[2]), group=group).run(land.space.points("a")[1:2])
        other = dist.new_group([0])
        if rank:
            caught("stranger", lambda: Trials(land.measure, group=other))
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(said, file)
        dist.barrier()
"""


def local() -> list:
    outcomes = []
    for seed in SEEDS:
        land = random_landscape(seed, variants=("a", "b"), sizes="monotone")
        for search, more in ((branch_and_bound, ()), (diagonal, ()), (neighbourhood, (Point("a", (3, 3, 1)),))):
            outcomes.append(search(land.space, land.size, Trials(land.measure), land.threshold, *more))
    return outcomes


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return ranks(RANKS, 4, tmp_path_factory.mktemp("group"))


def test_all_ranks_find_the_same_and_what_one_alone_finds(said):
    assert all(one["outcomes"] == said[0]["outcomes"] for one in said)
    for (chosen, _, _), alone in zip(said[0]["outcomes"], local(), strict=True):
        assert chosen == (alone.chosen and [alone.chosen.point.variant, list(alone.chosen.point.index)])


def test_the_ranks_share_the_trials(said):
    trials = sum(len(trials) for _, trials, _ in said[0]["outcomes"])
    assert sum(one["asked"] for one in said) == trials
    assert all(one["asked"] < trials * 0.8 for one in said)


def test_more_ranks_need_fewer_rounds(said):
    together, alone = sum(rounds for _, _, rounds in said[0]["outcomes"]), sum(one.rounds for one in local())
    assert together < 0.55 * alone


def test_an_error_on_one_rank_reaches_all_with_its_name(said):
    last = len(said) - 1
    for rank, one in enumerate(said):
        kind, text, cause = one["errors"]["foreign"]
        assert (kind, cause) == ("PolicyError", "ValueError" if rank == last else "NoneType")
        assert f"rank {last}: evaluate: ValueError: boom" in text
        kind, text, _ = one["errors"]["own"]
        assert (kind, text) == ("CorruptError", f"rank {last}: file: junk. Mend it")
        assert one["errors"]["search"][0] == one["errors"]["size"][0] == "PolicyError"


def test_a_group_works_on_after_an_error_and_ranks_without_a_point_wait(said):
    assert [one["after"] for one in said] == [[1.0]] * len(said)


def test_a_process_outside_of_the_group_is_refused(said):
    assert [one["errors"]["stranger"][0] for one in said[1:]] == ["PolicyError"] * (len(said) - 1)


def test_alone_an_error_passes_as_it_is():
    def measure(point):
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        Trials(measure).run([Point("", (0,))])


def test_more_points_than_ranks_are_refused():
    with pytest.raises(PolicyError, match="2 points; expected at most 1"):
        Trials(lambda point: 0.0).run([Point("", (0,)), Point("", (1,))])


def test_what_measures_may_return_anything_that_is_a_number():
    import torch

    trials = Trials(lambda point: torch.tensor(0.5))
    assert trials.run([Point("", (0,))]) == [0.5] and trials.seconds[Point("", (0,))] >= 0
