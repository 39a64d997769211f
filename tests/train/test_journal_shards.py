"""Promise: a sharded run goes on from its last step, bit for bit, from what each rank has kept of its own shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.processes import ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import shrinkpoint as sp
from shrinkpoint.comm import compress_ddp, compress_fsdp
from shrinkpoint.errors import PolicyError
from shrinkpoint.train import Journal
from shrinkpoint.train.dcp import Manager

RANKS = """
    import os, random
    import numpy as np
    import torch
    import torch.distributed as dist
    from helpers.journal_training import make_sharded
    from helpers.replica_search import caught, join, leave

    HOWS = {
        "as they are": {},
        "q4:64": {"shard_compressor": "q4:64"},
        "q3:64:dither": {"shard_compressor": "q3:64:dither",
                         "wire": {"all_gather": "q8:64:dither", "reduce_scatter": "q4:64:dither"}},
        "top10": {"shard_compressor": "top10", "optimizer": "sgd"},
        "uncompressed": {"wire": {"all_gather": None, "reduce_scatter": None}, "optimizer": "adam"},
        "replicas": {"replicas": 2, "wire": {"all_reduce": "q4:64:dither"}},
    }

    def of_rank(rank, width, folder):
        said = join(rank, width, folder)
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)

        def state(run):
            return [run.bits(), run.random(), run.restored and [run.restored.step, run.restored.replayed]]

        def made(name, how, **more):
            return make_sharded(f"{folder}/{name}", rank=rank, width=width, **HOWS[how], **more)

        for how in HOWS:
            if how == "replicas" and width % 2:
                continue
            end = 7 if how in ("as they are", "q4:64") else 6  # past another save, or not
            said["whole " + how] = state(made(how + "-whole", how).train(end, 3).close())
            dist.barrier()
            for last in (5, end):
                said[how] = state(made(how, how).train(last, 3).close())
            dist.barrier()

        # two backward passes a step, the gradients of which add up
        def accumulate(name, last):
            run = made(name, "q4:64")
            run.restored = run.journal.restore(**run.objects)
            if run.restored is None:
                torch.manual_seed(rank)
                run.journal.save(0, **run.objects)
            for step in range(run.restored.step + 1 if run.restored else 1, last + 1):
                run.backward(), run.backward(), run.journal.step(step)
            return state(run.close())
        said["whole sums"] = accumulate("sums-whole", 5)
        accumulate("sums", 4)
        said["sums"] = accumulate("sums", 5)

        # a rank that was killed a step earlier than the others
        made("uneven", "q4:64").train(5, 3).close()
        dist.barrier()
        if rank == 1:
            path = f"{folder}/uneven/journal/000000000003-00001.journal"
            os.truncate(path, os.path.getsize(path) - 9)
        dist.barrier()
        said["uneven"] = state(made("uneven", "q4:64").train(7, 3).close())

        # an error of one rank before a step is one of all, though `update` has collectives
        made("damaged", "q4:64", check_every=1).train(5, 3).close()
        dist.barrier()
        run = made("damaged", "q4:64", check_every=1,
                   update=lambda run: rank == 1 and run.optimizer.param_groups[0].update(lr=1.0))
        said["other"] = caught(lambda: run.journal.restore(**run.objects))
        run.close()
        run = made("damaged", "as they are")
        said["settings"] = caught(lambda: run.journal.restore(**run.objects))
        run.close()

        # a rehearsal finds what does not repeat
        run = made("rehearsed", "q4:64").train(5, 3)
        before = state(run)
        said["rehearsed"] = [run.journal.rehearse(**run.objects).replayed, state(run)[:2] == before[:2]]
        run.close()
        noise = lambda run: run.model.first.weight.grad.mul_(1 + os.urandom(1)[0])
        run = made("unlike", "q4:64", update=noise).train(5, 3)
        said["unlike"] = caught(lambda: run.journal.rehearse(**run.objects))
        run.close()
        said["bytes"] = [os.path.getsize(f"{folder}/{how}/journal/000000000006-{rank:05d}.journal")
                         for how in ("as they are", "q4:64")]
        leave(said, rank, folder)
"""


@pytest.mark.parametrize("width", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_ranks_go_on_from_their_last_step(tmp_path: Path, width: int):
    reports = ranks(RANKS, width, tmp_path)
    for report in reports:
        for how in [name.removeprefix("whole ") for name in report if name.startswith("whole ")]:
            expected = report["whole " + how]
            assert report[how] == [*expected[:2], [4, 4] if how == "sums" else [5, 2]], how
        assert report["uneven"] == [*report["whole q4:64"][:2], [4, 1]]
        assert report["other"][0] == "MismatchError" and "other weights" in report["other"][1]
        assert report["settings"][0] == "MismatchError" and "shard_compressor" in report["settings"][1]
        assert report["rehearsed"] == [2, True]
        assert report["unlike"][0] == "MismatchError" and "weights" in report["unlike"][1]
        assert report["bytes"][1] < report["bytes"][0]
    assert len({str(report["whole q4:64"][1]) for report in reports}) == width  # each has dropout of its own
    assert ("replicas" in reports[0]) == (width == 2)


def test_what_cannot_be_replayed_is_refused_with_the_reason(tmp_path: Path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        manager, model = Manager(tmp_path), lambda: fully_shard(nn.Linear(4, 4))
        with pytest.raises(PolicyError, match=r'error feedback.*feedback="restart"'):
            Journal(manager, compress_fsdp(model(), reduce_scatter="ef(q4:64)"), print)
        with pytest.raises(PolicyError, match="Leave out the feedback"):
            Journal(manager, compress_fsdp(model()), print, shard_compressor="ef(q4:64)")
        with pytest.raises(PolicyError, match=r"dcp\.Manager, for shards"):
            Journal(sp.CheckpointManager(tmp_path), compress_fsdp(model()), print)
        ddp_model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        replicas = compress_ddp(ddp_model)
        with pytest.raises(PolicyError, match="CheckpointManager, for replicas"):
            Journal(manager, replicas, print)
        with pytest.raises(PolicyError, match="Leave it out"):
            Journal(sp.CheckpointManager(tmp_path), replicas, print, shard_compressor="q4:64")
        sharded = compress_fsdp(model())
        journal = Journal(manager, sharded, lambda: None, shard_compressor="q4:64")
        with pytest.raises(PolicyError, match="second journal"):
            Journal(manager, sharded, print)
        journal.save(0, model=sharded.module)
        with pytest.raises(PolicyError, match="Call backward"):
            journal.step(1)
        sharded.module(torch.ones(1, 4)).sum().backward()
        journal.step(1), journal.close()
    finally:
        dist.destroy_process_group()
