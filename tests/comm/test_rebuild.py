"""Local steps that go on in another group of ranks, formed by the program itself; and how many ranks there may be."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

START = """
    import copy
    import torch
    import torch.distributed as dist
    from helpers.elastic_training import SETUPS
    from helpers.replica_search import batch, caught, digest, join, leave, plain_net
    from shrinkpoint.comm.local_steps import LocalSteps
    from torch.nn.functional import mse_loss

    class Run:
        def __init__(self, rank, setup, group=None, every=3):
            self.rank, self.model = rank, plain_net(rank)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
            self.local = LocalSteps(self.model, self.optimizer, every, group=group, **SETUPS[setup])

        def steps(self, *numbers):
            for step in numbers:
                x, y = batch(step, self.rank)
                self.optimizer.zero_grad()
                mse_loss(self.model(x), y).backward()
                self.local.step()

        @property
        def bits(self):
            return [self.local.round, digest(*self.local.state_dict()["weights"].values())]
"""

REBUILD = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for name in SETUPS:
            said = reports[name] = {}
            run = Run(rank, name)
            run.steps(*range(6))
            said["all"] = run.bits
            three, again = dist.new_group([0, 2, 3]), dist.new_group()
            lost = {layout: x.clone() for layout, x in run.local._average.residuals().items()}
            if rank != 1:
                run.steps(6)  # in the middle of a round, which rank 1 is no part of
                mine = [digest(*run.model.parameters()), run.local.steps_in_round]
                run.local.rebuild(three)
                said["kept"] = [mine == [digest(*run.model.parameters()), run.local.steps_in_round]]
                said["kept"].append(
                    all(torch.equal(x, lost[layout]) for layout, x in run.local._residuals.items())
                    and len(run.local._residuals) == len(lost)
                )
                saved = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict(), run.local.state_dict()])
                run.steps(7, 8, 9)
                said["three"] = run.bits
                # one that was saved before the first exchange of the new group continues bit for bit
                other = Run(rank, name, three)
                for part, state in zip((other.model, other.optimizer, other.local), saved, strict=True):
                    part.load_state_dict(state)
                other.steps(7, 8, 9)
                said["resumed"] = other.bits == run.bits
            run.local.rebuild(again)  # rank 1 was away for a round, and has a state of before
            said["after"] = [*run.bits, len(run.local._residuals), run.local.steps_in_round]
            run.steps(*range(9 + (rank != 1), 16))
            said["end"] = run.bits
        # another setting on one rank
        run = Run(rank, "exact")
        if rank == 3:
            run.local._setup["every"] = 4
        reports["wrong"] = caught(lambda: run.local.rebuild(dist.new_group()))
        leave(reports, rank, folder)
"""

MANY = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for name in SETUPS:
            run = Run(rank, name, every=2)
            run.steps(*range(6))
            reports[name] = run.bits
            run.steps(6)
            reports["alone " + name] = digest(*run.model.parameters())
        leave(reports, rank, folder)
"""
NAMES = ("exact", "sparse", "dense", "random", "reference", "adam")


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    return ranks(START + REBUILD, 4, tmp_path_factory.mktemp("rebuild"))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_go_on_in_another_group_with_the_same_bits(rebuilt, name):
    reports = [report[name] for report in rebuilt]
    others = [reports[0], reports[2], reports[3]]
    assert all(said["all"] == [2, reports[0]["all"][1]] for said in reports)
    assert all(said["three"] == [3, reports[0]["three"][1]] for said in others)
    assert all(said["end"] == [5, reports[0]["end"][1]] for said in reports)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_keep_their_steps_and_their_feedback_and_resume_with_them(rebuilt, name):
    for rank in (0, 2, 3):
        assert rebuilt[rank][name]["kept"] == [True, True] and rebuilt[rank][name]["resumed"]


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_was_away_takes_over_the_state_of_the_others_without_feedback(rebuilt, name):
    (of_first, bits, kept, steps), away = rebuilt[0][name]["after"], rebuilt[1][name]["after"]
    assert away == [of_first, bits, 0, 0] and (of_first, steps) == (3, 1)
    assert (kept > 0) == (name in ("sparse", "dense", "random"))


def test_ranks_with_other_settings_do_not_form_a_group(rebuilt):
    for report in rebuilt:
        kind, text = report["wrong"]
        assert kind == "MismatchError" and "every: 3 on rank 0, 4 on rank 3" in text


@pytest.mark.parametrize("width", [2, 8])
def test_two_and_eight_ranks_have_the_same_bits(width, tmp_path):
    reports = ranks(START + MANY, width, tmp_path)
    for name in NAMES:
        assert {tuple(report[name]) for report in reports} == {(3, reports[0][name][1])}
        assert len({report[f"alone {name}"] for report in reports}) == width
