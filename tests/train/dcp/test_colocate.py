"""Replicas share what they save: a weight and its moments are written by one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.processes import ranks
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from shrinkpoint.errors import PolicyError
from shrinkpoint.train.dcp.save_plan import colocate_moments, rank_slots

REPLICAS = """
import torch
from helpers import multi_rank_training as training
from pathlib import Path
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Writer, load, reset_chains
from shrinkpoint.train.dcp.reader import open_checkpoint

def owners(folder):
    _, description = open_checkpoint(Path(folder))
    return {fqn: [(chunk.offsets, chunk.payload) for chunk in item.chunks] for fqn, item in description.entries.items()}

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    results = {}
    for kind in ("shards", "cached", "numbers"):
        run, apart, wrong, bytes = training.Run(None if kind == "numbers" else mesh), [], [], []
        for step in range(5):
            run.train(1)
            state = run.state()
            if kind == "numbers":
                state = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
            if kind == "cached" and step >= 2 and rank == 1:
                state["model"]["odd"] = torch.ones(5)  # the plan of one rank changes, the other is replayed
            if kind == "cached" and step >= 3:
                del state["model"]["last.bias"]
            place = f"{folder}/{kind}-{step}"
            dcp.save(state, storage_writer=Writer(place),
                     planner=DefaultSavePlanner(enable_plan_caching=kind == "cached"))
            found = owners(place)
            for name in list(found):
                head, _, slot = name.rpartition(".")
                if slot == "exp_avg_sq":
                    weight = head.replace("optim.state", "model")
                    beside = [head + ".exp_avg", *([weight] if weight in found else [])]
                    apart += [(step, one) for one in beside if found[one] != found[name]]
            bytes.append([payload.raw_bytes for payload in directories.verify_directory(place, deep=True).payloads])
            if rank == 1:
                state = {key: {**one} for key, one in state.items() if key != "note"}
                got = {key: one for key, one in load(place).items() if key in state}
                wrong += [step] if training.digest(got) != training.digest(state) else []
        reset_chains()
        results[kind] = [apart, wrong, bytes]
    training.done(rank, folder, results)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks(REPLICAS, 2, tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("kind", ["shards", "cached", "numbers"])
def test_a_weight_and_its_moments_are_in_one_file_whichever_replica_writes_it(
    kind: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        apart, wrong, nbytes = result[kind]
        assert apart == []
        assert wrong == []
        for shares in nbytes:
            assert max(shares) < 0.6 * sum(shares)  # and no rank has more than its part to write


def _plans(states: list[dict[str, Any]], owners: Mapping[str, int]) -> list[SavePlan]:
    """Of ranks that have these, after torch has said which of them writes what."""
    plans = []
    for rank, state in enumerate(states):
        plan = create_default_local_save_plan(state, rank == 0)
        plan = replace(plan, storage_data=rank_slots(plan))
        plans.append(replace(plan, items=[item for item in plan.items if owners.get(item.index.fqn, rank) == rank]))
    return plans


def _names(plans: list[SavePlan]) -> list[list[str]]:
    return [[item.index.fqn for item in plan.items] for plan in plans]


def test_what_a_rank_does_not_have_stays_where_it_is() -> None:
    weight, moment = {"model.a": torch.ones(3)}, {"optim.state.a.exp_avg": torch.ones(3)}
    plans = _plans([weight, weight | moment], {"model.a": 0})
    assert _names(colocate_moments(plans)) == [["model.a"], ["optim.state.a.exp_avg"]]
    plans = _plans([weight | moment] * 2, {"model.a": 0, "optim.state.a.exp_avg": 1})
    assert _names(colocate_moments(plans)) == [["model.a", "optim.state.a.exp_avg"], []]


def test_moments_of_another_shape_are_of_another_weight() -> None:
    state = {"model.a": torch.ones(3), "optim.state.a.exp_avg": torch.ones(4), "optim.state.a.step": torch.ones(())}
    owners = {"model.a": 0, "optim.state.a.exp_avg": 1, "optim.state.a.step": 1}
    plans = _plans([state] * 2, owners)
    assert _names(colocate_moments(plans)) == _names(plans)


def test_the_shortest_of_several_names_is_the_weight() -> None:
    state = {name: torch.ones(3) for name in ("average.module.a", "model.a", "optim.state.a.exp_avg")}
    plans = _plans([state] * 2, {"average.module.a": 1, "model.a": 0, "optim.state.a.exp_avg": 1})
    assert _names(colocate_moments(plans)) == [["model.a", "optim.state.a.exp_avg"], ["average.module.a"]]


def test_a_planner_that_hides_its_plans_is_refused_and_one_that_replays_all_of_them_is_left_alone() -> None:
    plans = _plans([{"model.a": torch.ones(3)}] * 2, {"model.a": 0})
    replayed = SavePlan([], usable=False)
    assert colocate_moments([replayed, replayed]) == [replayed, replayed]
    with pytest.raises(PolicyError, match="enable_plan_caching"):
        colocate_moments([plans[0], replayed])


def test_a_planner_that_passes_nothing_on_gets_its_own_choice() -> None:
    state = {"model.a": torch.ones(3), "optim.state.a.exp_avg": torch.ones(3)}
    plans = _plans([state] * 2, {"model.a": 0, "optim.state.a.exp_avg": 1})
    plans = [replace(plan, storage_data=None) for plan in plans]
    assert _names(colocate_moments(plans)) == _names(plans)
