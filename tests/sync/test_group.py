"""Through a torch.distributed group: the same bytes, from one rank to all others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.processes import ranks
from torch import nn

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.sync import Publisher, Subscriber

PROGRAM = """
import json
import torch
import torch.distributed as dist
from pathlib import Path
from shrinkpoint.errors import MismatchError
from shrinkpoint.sync import Publisher, Subscriber

def state(version):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(200, 300, generator=generator)
    matrix[version] *= 1.5
    return {"matrix": matrix.bfloat16(), "count": torch.tensor(version), "even": torch.full((5,), 2.0 * version)}

def of_rank(rank, width, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=width)
    group = dist.new_group([*range(width)])
    seen = []
    if rank == 1:
        with Publisher(group=group) as publisher:
            for version in range(6):
                report = publisher.publish(state(version))
                seen.append([report.version, report.delta_bytes, report.keyframe_bytes])
    else:
        live = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
        subscriber = Subscriber(group=group)
        assert subscriber.latest() is None
        wrong = {"other": torch.zeros(3)}
        while True:
            if rank == 2 and len(seen) == 2:
                # This rank did not keep what it read: as one that is started again.
                subscriber._held = None
            try:
                update = subscriber.update(wrong if len(seen) == 4 and rank == 0 else live)
            except MismatchError:
                seen.append(["mismatch", 0])
                continue
            if update is None:
                break
            expected = state(update.version)
            assert all(torch.equal(live[name], expected[name]) for name in live)
            assert subscriber.latest() == subscriber.version == update.version
            seen.append([update.version, update.nbytes])
        assert subscriber.update(live) is None
    Path(f"{folder}/{rank}.json").write_text(json.dumps(seen))
"""


def test_all_ranks_of_a_group_follow_and_one_that_lacks_a_version_gets_a_keyframe(tmp_path: Path):
    first, published, second = ranks(PROGRAM, 3, tmp_path)
    assert [version for version, _, _ in published] == [*range(6)]
    assert [delta is None for _, delta, _ in published] == [True] + [False] * 5
    assert [keyframe is None for _, _, keyframe in published] == [False, True, False, True, True, True]
    assert [version for version, _ in first] == [0, 1, 2, 3, "mismatch", 5]
    assert [version for version, _ in second] == [*range(6)]
    deltas, keyframes = ([row[index] for row in published] for index in (1, 2))
    assert [nbytes for _, nbytes in second] == [keyframes[0], deltas[1], keyframes[2], *deltas[3:]]
    assert first[2][1] == deltas[2] and max(deltas[1:]) < keyframes[0] / 5


def test_a_group_or_a_place_and_not_both():
    for kind in (Publisher, Subscriber):
        with pytest.raises(PolicyError, match="neither"):
            kind()
        with pytest.raises(PolicyError, match="a process group that"):
            kind(group="world")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(PolicyError, match="both"):
            Publisher(MemoryStorage(), group=dist.group.WORLD)
        with Publisher(group=dist.group.WORLD) as publisher:
            assert publisher.publish(nn.Linear(2, 2)).version == 0
    finally:
        dist.destroy_process_group()
