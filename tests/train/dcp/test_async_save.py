"""Saves beside the loop: in a thread, and in another process."""

from __future__ import annotations

from pathlib import Path

from helpers.processes import ranks

BESIDE = """
import torch
from helpers import multi_rank_training as training
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Reader, Writer

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    mesh, group = training.mesh_of(range(width)), dist.new_group()  # the loop talks over the default one meanwhile
    results = {}
    for kind in KINDS:
        run, want = training.Run(mesh), []
        for step in range(3):
            run.train(2)
            want.append(training.digest(run.state()))
            how = {"storage_writer": Writer(), "process_group": group}
            how["async_checkpointer_type"] = AsyncCheckpointerType[kind.upper()]
            future = dcp.async_save(run.state(), checkpoint_id=f"{folder}/{kind}/step-{step}", **how)
            run.train(2)  # while it is written
            future.result()
        other = training.Run(mesh, seed=3)
        other.train(1)
        got = []
        for step in range(3):
            got.append(training.digest(other.restore(storage_reader=Reader(f"{folder}/{kind}/step-{step}"))))
        depth = [directories.verify_directory(f"{folder}/{kind}/step-{step}", deep=True).depth for step in range(3)]
        results[kind] = [want == got and len(set(want)) == 3, depth]
        if "process" in kind:  # a restore here is known there
            run = training.Run(mesh, seed=3)
            run.train(1)
            run.restore(storage_reader=Reader(f"{folder}/{kind}/step-2"))
            writer = Writer(f"{folder}/{kind}/step-9", keyframe_every=9)
            dcp.async_save(run.state(), storage_writer=writer,
                           async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
            results[kind].append(directories.read_directory_manifest(f"{folder}/{kind}/step-9").depth)
            broken = run.state() | {"odd": bytearray(2)}
            try:
                dcp.async_save(broken, storage_writer=Writer(f"{folder}/{kind}/step-10"),
                               async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
            except BaseException as error:
                results[kind].append("odd" in str(error) and not directories.is_checkpoint(f"{folder}/{kind}/step-10"))
    training.done(rank, folder, results)
"""


def run(kinds: list[str], folder: Path) -> list[dict[str, list[object]]]:
    return ranks(f"KINDS = {kinds!r}\n{BESIDE}", 2, folder)


def test_what_a_thread_or_another_process_writes_is_the_state_of_the_call_and_a_delta(tmp_path: Path) -> None:
    expected = {"thread": [True, [0, 1, 2]], "process": [True, [0, 1, 2], 3, True]}
    assert run([*expected], tmp_path) == [expected] * 2
