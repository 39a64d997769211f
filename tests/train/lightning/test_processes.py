"""Two real processes: FSDP2, saved by a `Manager` in a callback, and replicas."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

from shrinkpoint.store.directory import verify_directory

PROGRAM = """
import json, os, warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from helpers.lightning_runs import Small, every, points, trainer
from torch.distributed.fsdp import fully_shard

from shrinkpoint.train.dcp import Manager
from shrinkpoint.train.lightning import ShrinkIO

STORE = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free


class ShardedSmall(Small):
    def configure_model(self):
        if not self.sharded:
            self.sharded = True
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[4], self.net):
                fully_shard(layer, mesh=mesh)


class Reseeded(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        torch.manual_seed(trainer.global_step)


class SaveShards(pl.Callback):
    def __init__(self, root):
        self.manager, self.sums = Manager(root), []

    def on_train_start(self, trainer, module):
        objects = {"model": module, "optimizer": trainer.optimizers[0]}
        self.resumed = self.manager.restore(**objects) is not None
        self.sums.append(sums(module))

    def on_train_epoch_end(self, trainer, module):
        self.manager.save(trainer.global_step, model=module, optimizer=trainer.optimizers[0])
        self.sums.append(sums(module))


def sums(model):
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
             for name, value in model.state_dict().items()}
    return {name: value.double().sum().item() for name, value in whole.items()}


def fit(root, epochs):
    torch.manual_seed(0)
    model = ShardedSmall(width=64)
    model.sharded = False
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    shards = SaveShards(root / "shards")
    run = trainer(root, epochs=epochs, callbacks=[Reseeded(), shards], strategy=strategy, devices=2,
                  use_distributed_sampler=False)
    run.fit(model, points(4))
    return [shards.resumed, shards.sums]


def replicas(root, epochs, ckpt_path=None):
    torch.manual_seed(0)
    model, io = Small(width=64), ShrinkIO(background=True)
    strategy = DDPStrategy(process_group_backend="gloo")
    callbacks = [Reseeded(), every(root, save_top_k=1)]
    run = trainer(root, io, epochs=epochs, callbacks=callbacks, strategy=strategy, devices=2)
    run.fit(model, points(8), ckpt_path=ckpt_path)
    return {"losses": model.losses, "sums": {name: x.double().sum().item() for name, x in model.named_parameters()}}


def of_rank(rank, width, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(STORE.port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(width), LOCAL_WORLD_SIZE=str(width), GROUP_RANK="0", TORCHELASTIC_RUN_ID="test",
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )
    folder = Path(folder)
    found = {"shards": [fit(folder / "sharded", 2), fit(folder / "sharded", 1)]}
    found["replicas"] = replicas(folder / "whole", 3)
    replicas(folder / "replicas", 2)
    found["replicas resumed"] = replicas(folder / "replicas", 3, ckpt_path=folder / "replicas/epoch=1.ckpt")
    (folder / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, ranks(PROGRAM, 2, folder)


def test_shards_saved_in_a_callback_are_restored(found):
    for report in found[1]:
        (resumed, saved), (resumed_again, restored) = report["shards"]
        assert (resumed, resumed_again) == (False, True)
        assert restored[0] == saved[-1] != saved[0]


def test_replicas_go_on_from_what_the_first_of_them_wrote(found):
    folder, results = found
    for report in results:
        assert report["replicas resumed"]["sums"] == report["replicas"]["sums"] == results[0]["replicas"]["sums"]
        assert report["replicas resumed"]["losses"] == report["replicas"]["losses"][8:]
    assert results[0]["replicas"]["losses"] != results[1]["replicas"]["losses"]
    verify_directory(folder / "replicas/epoch=2.ckpt", deep=True)
