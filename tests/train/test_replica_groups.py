"""Replicas save together: real processes, a real gloo group."""

from __future__ import annotations

import json

import pytest
from helpers.processes import ranks

import shrinkpoint as sp

RANKS = """
    import json
    import torch
    import torch.distributed as dist
    import shrinkpoint as sp
    from helpers.small_training import Run
    from shrinkpoint.errors import ShrinkpointError


    def of_rank(rank, width, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=width)
        run, results = Run(steps=20), {"chosen": [], "errors": {}}
        scheme = sp.Inshrinkerator(threshold=0.05, evaluate=run.evaluate, group=dist.group.WORLD)
        mirror = f"{folder}/mirror"
        with sp.CheckpointManager(f"{folder}/store", scheme=scheme, mirror=mirror) as manager:
            for step in (1, 2):
                before = run.photo()
                report = manager.save(step, **run.parts)
                chosen = None if report is None else report.loss_report["chosen"]
                results["chosen"].append([chosen, str(scheme._last_choice)])
                run.steps(10)
            results["calls"] = run.calls

            def failing(model):
                model.train()
                if rank == width - 1:
                    raise ValueError("boom")
                return 1.0

            scheme._evaluate, before = failing, run.photo()
            report = manager.save(3, **run.parts)
            results["exact"] = report and report.loss_report["exact"]
            after = run.photo()
            weights, weights_after = before["model"], after["model"]
            results["untouched"] = all(torch.equal(weights[key], weights_after[key]) for key in weights)
            results["untouched"] &= before["training"] == after["training"]
            scheme._evaluate = run.evaluate
            manager.save(4, **run.parts)
        dist.barrier()
        elsewhere = sp.CheckpointManager(f"{folder}/machine-{rank}", mirror=mirror).restore(**run.parts)
        results["elsewhere"] = [elsewhere.step, elsewhere.where == mirror, run.loss()]
        other = sp.CheckpointManager(f"{folder}/store", scheme=sp.Inshrinkerator(
            threshold=0.05, evaluate=run.evaluate, group=dist.group.WORLD))
        holder = sp.Store(f"{folder}/store") if rank == 1 else None
        if holder is not None:
            holder.begin(9).abort()  # another process that saves: the leader is refused, and so are all
        dist.barrier()
        try:
            other.save(5, **run.parts)
        except ShrinkpointError as error:
            results["errors"]["locked"] = [type(error).__name__, str(error)]
        dist.barrier()
        if holder is not None:
            holder.close()
        dist.barrier()
        at = other.restore(**run.parts)
        results["restored"] = [at.step, run.loss(), str(other._scheme._last_choice)]
        other.save(6, **run.steps(5).parts)
        other.close()
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(results, file)
        dist.barrier()
"""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def group(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    return ranks(RANKS, request.param, folder), folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    from helpers.small_training import Run

    run, folder = Run(steps=20), tmp_path_factory.mktemp("alone")
    with sp.CheckpointManager(folder, scheme=sp.Inshrinkerator(threshold=0.05, evaluate=run.evaluate)) as manager:
        reports = []
        for step in (1, 2):
            reports.append(manager.save(step, **run.parts))
            run.steps(10)
    return reports, run.calls


def test_the_writer_alone_fills_the_mirror_and_all_find_it(group):
    results, folder = group
    assert [*sp.Store(folder / "mirror").steps()] == [*sp.Store(folder / "store").steps()][:-1] == [1, 2, 3, 4]
    assert [result["elsewhere"][:2] for result in results] == [[4, True]] * len(results)
    assert len({result["elsewhere"][2] for result in results}) == 1


def test_only_the_first_rank_writes_and_all_agree(group):
    results, folder = group
    for step in range(2):
        first, *others = [result["chosen"][step] for result in results]
        assert first[0] is not None and all(report is None for report, _ in others)
        assert {last for _, last in others} == {first[1]}
    store = sp.Store(folder / "store")
    assert store.steps() == [1, 2, 3, 4, 6] and store.verify(deep=True) == []


def measured(loss):
    """What the first search found, by what was tried."""
    trials = loss["searches"][0]["trials"]
    return {json.dumps(trial["settings"], sort_keys=True): (trial["size"], trial["degradation"]) for trial in trials}


def test_replicas_measure_what_one_process_alone_does(group, alone):
    """Which points are tried depends on how many can be at once, and on a model as small as this one, where quality
    goes up and down, so does the choice; `search/test_trials.py` has the proof for where it does not."""
    _, folder = group
    first, second, *_ = (manifest.loss for manifest in sp.Store(folder / "store").list())
    together, by_itself = measured(first), measured(alone[0][0].loss_report)
    both = together.keys() & by_itself.keys()
    assert len(both) > 2 and all(together[point] == by_itself[point] for point in both)
    assert first["degradation"] <= 0.05 and second["degradation"] <= 0.05


def test_trials_are_shared(group, alone):
    results, _ = group
    assert max(result["calls"] for result in results) < alone[1]


def test_an_evaluate_that_raises_on_one_rank_makes_the_checkpoint_exact_and_leaves_nothing_changed(group):
    results, _ = group
    assert "ValueError: boom" in results[0]["exact"]
    assert all(result["untouched"] for result in results)


def test_a_leader_that_may_not_write_does_not_leave_the_others_waiting(group):
    results, _ = group
    assert all(result["errors"]["locked"][0] == "LockedError" for result in results)


def test_all_ranks_restore_the_same_and_search_near_it(group):
    results, _ = group
    assert all(result["restored"] == results[0]["restored"] for result in results)
    assert results[0]["restored"][0] == 4 and results[0]["restored"][2] != "None"


ONE_SAVES = """
    import json, warnings
    import torch
    import torch.distributed as dist
    import shrinkpoint as sp
    from shrinkpoint.errors import LossWarning
    from torch import nn

    warnings.simplefilter("error", LossWarning)


    def of_rank(rank, width, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=width)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        replicas = nn.parallel.DistributedDataParallel(model)  # whose forward pass sends rank 0's running averages
        x, seen, ratio = torch.randn(64, 64), set(), 0.0

        def evaluate(models):
            seen.add(type(models["net"]).__name__)
            return (models["net"](x) - x).square().mean(1)

        scheme = sp.Fisher(budget="5%", evaluate=evaluate)
        with sp.CheckpointManager(f"{folder}/{rank}", scheme=scheme) as manager:
            for step in range(4):
                batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
                optimizer.zero_grad()
                (replicas(batch) - batch).square().mean().backward()
                optimizer.step()
                if rank == 0 and step % 2:
                    ratio = manager.save(step, model={"net": replicas}, optimizer=optimizer).ratio
        weights = [float(p.detach().double().sum()) for p in model.parameters()]
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump({"weights": weights, "seen": [*seen], "ratio": ratio}, file)
        dist.barrier()
"""


def test_one_rank_of_replicas_measures_without_their_collectives(tmp_path):
    first, other = ranks(ONE_SAVES, 2, tmp_path)
    assert first["weights"] == other["weights"]
    assert first["seen"] == ["Sequential"] and first["ratio"] > 3
