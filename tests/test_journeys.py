"""How many functions and files a save, a restore and a gradient pass through: a reader follows a tensor through these.

The limits may fall, and rise only by what a capability of its own adds. Moments that rest, exponents that move and
matrices that are chosen added 13 functions to a save and 5 to a restore. Kernels of devices added 3 to a gradient, 6 to
a save and one to a restore; first moments that are coarse where their weights are, 6 functions and a file to a save. A
lock that is looked for and the mode of a file that is replaced added a function each to a save, strides of moments one
to a restore.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.journeys import follow
from helpers.processes import ranks
from torch import nn

import shrinkpoint as sp

SAVE = (587, 70, 1150)
RESTORE = (351, 47, 1143)
GRADIENT = (82, 10, 118)


def assert_within(counts: tuple[int, int, int], limits: tuple[int, int, int]) -> None:
    assert all(count <= limit for count, limit in zip(counts, limits, strict=True)), (
        f"{counts} functions, files and changes of file; at most {limits}"
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fisher_save_and_restore(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with follow() as journey:
        with sp.CheckpointManager(tmp_path, scheme=sp.Fisher(), background=False) as manager:
            for step in (1, 2, 3):
                optimizer.zero_grad()
                model(torch.randn(16, 64)).square().mean().backward()
                optimizer.step()
                journey.clear()
                manager.save(step, model=model, optimizer=optimizer)
            assert_within(journey.counts, SAVE)
        with sp.CheckpointManager(tmp_path, scheme=sp.Fisher()) as manager:
            journey.clear()
            manager.restore(model=model, optimizer=optimizer)
            assert_within(journey.counts, RESTORE)


COMPRESSED = """
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from helpers.journeys import follow
    from helpers.replica_search import join, leave
    from shrinkpoint.comm import compress_ddp

    def of_rank(rank, width, folder):
        said = join(rank, width, folder)
        model = DistributedDataParallel(nn.Linear(64, 64))
        with follow() as journey:
            compress_ddp(model, "q4:64")
            for _ in range(3):
                loss = model(torch.randn(4, 64)).square().mean()
                journey.clear()
                loss.backward()
            said["counts"] = journey.counts
        leave(said, rank, folder)
"""


def test_gradient_through_compress_ddp(tmp_path: Path):
    for said in ranks(COMPRESSED, 2, tmp_path):
        assert_within(tuple(said["counts"]), GRADIENT)
