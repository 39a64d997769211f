"""Two workers of a vLLM engine that choose the version to write: one of them may be unable to read it.

    python tests/helpers/vllm_workers_program.py FOLDER

prints for each worker what it has chosen at first, and its error where the second one cannot read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shrinkpoint.sync.vllm as engine_module
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.sync import Publisher


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    engine = engine_module.ShrinkpointEngine.__new__(engine_module.ShrinkpointEngine)
    engine._written, engine._plans, engine._layout, engine._reading = {}, None, None, None
    engine.init_transfer_engine(engine_module.InitInfo(f"{folder}/weights"))
    group = SimpleNamespace(cpu_group=dist.group.WORLD)
    said = []
    with mock.patch.object(engine_module, "get_world_group", lambda: group):
        said.append(str(engine._agree(engine_module.UpdateInfo()).version))
        if rank:
            engine.init_transfer_engine(engine_module.InitInfo(f"{folder}/nothing"))
        try:
            engine._agree(engine_module.UpdateInfo(version=0, wait=0.1))
        except ShrinkpointError as error:
            said.append(type(error).__name__)
    Path(folder, f"said-{rank}").write_text(" ".join(said))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder = sys.argv[1]
    with Publisher(f"{folder}/weights") as publisher:
        publisher.publish(torch.nn.Linear(8, 8))
        publisher.publish(torch.nn.Linear(8, 8))
    mp.spawn(work, (folder,), nprocs=2)
    print(*(Path(folder, f"said-{rank}").read_text() for rank in range(2)), sep="\n")


if __name__ == "__main__":
    main()
