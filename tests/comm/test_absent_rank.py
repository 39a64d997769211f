"""Ranks that compress and one that does not: what each of them gets, in processes that end as programs do."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

PROGRAM = """
    import json, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from helpers.replica_search import batch, join, plain_net
    from shrinkpoint.comm import compress_ddp, compress_fsdp

    KIND, ABSENT = {kind!r}, {absent}

    def of_rank(rank, width, folder):
        join(rank, width, folder)
        model = plain_net()
        if KIND == "ddp":
            model = DDP(model, bucket_cap_mb=0.005)
            rank == ABSENT or compress_ddp(model, timeout=2)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (width,)))
            rank == ABSENT or compress_fsdp(model, timeout=2)
        dist.barrier()  # a rank that is only late is not the one that is missed
        report = ["none", ""]
        try:
            x, y = batch(0, rank)
            mse_loss(model(x), y).backward()
        except Exception as error:
            report = [type(error).__name__, str(error)]
        Path(folder, f"{{rank}}.json").write_text(json.dumps(report))
        # and the process ends, as that of a program with an error of which nobody took care
"""


@pytest.mark.parametrize(("kind", "absent"), [("ddp", 1), ("fsdp", 0)])
def test_ranks_that_compress_get_our_error_and_one_that_does_not_torchs(kind, absent, tmp_path):
    reports = ranks(PROGRAM.format(kind=kind, absent=absent), 3, tmp_path)
    for rank, (name, text) in enumerate(reports):
        if rank == absent:
            assert name in ("RuntimeError", "DistBackendError", "DistNetworkError")
            assert "onnection" in text, text
        else:
            assert name == "MismatchError"
            assert f"rank {absent} published no configuration within 2 s" in text
            assert "Call it on every rank of the group" in text
