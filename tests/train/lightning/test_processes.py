"""Two real processes: FSDP2, which saves through torch.distributed.checkpoint and so `dcp.install()`, and replicas."""

from __future__ import annotations

import json

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
from helpers.lightning_runs import Small, every, names, points, trainer
from torch.distributed.fsdp import fully_shard

from shrinkpoint.train import dcp
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


def fit(root, epochs, ckpt_path=None, **options):
    torch.manual_seed(0)
    model = ShardedSmall(width=64)
    model.sharded = False
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    run = trainer(
        root, epochs=epochs, callbacks=[Reseeded(), every(root, **options)], strategy=strategy, devices=2,
        use_distributed_sampler=False,
    )
    run.fit(model, points(4), ckpt_path=ckpt_path)
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
             for name, value in model.state_dict().items()}
    return {"losses": model.losses, "sums": {name: value.double().sum().item() for name, value in whole.items()}}


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
    found = {"stock": fit(folder / "stock", 3)}
    dcp.install()
    found["ours"] = fit(folder / "ours", 2, save_top_k=1)
    found["resumed"] = fit(folder / "ours", 3, ckpt_path=folder / "ours/epoch=1.ckpt", save_top_k=1)
    found["from stock"] = fit(folder / "more", 3, ckpt_path=folder / "stock/epoch=1.ckpt")
    dcp.uninstall()
    found["replicas"] = replicas(folder / "whole", 3)
    replicas(folder / "replicas", 2)
    found["replicas resumed"] = replicas(folder / "replicas", 3, ckpt_path=folder / "replicas/epoch=1.ckpt")
    found["names"] = names(folder / "ours")
    (folder / f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("sharded")
    return folder, ranks(PROGRAM, 2, folder)


def test_a_sharded_run_goes_on_from_a_delta_as_if_nothing_had_been(found):
    for report in found[1]:
        assert report["resumed"]["sums"] == report["stock"]["sums"]
        assert (
            report["resumed"]["losses"] == report["stock"]["losses"][8:]
            and report["ours"]["losses"] == report["stock"]["losses"][:8]
        )


def test_what_lightning_keeps_is_whole_without_what_it_deleted(found):
    folder, results = found
    (name,) = [name for name in results[0]["names"] if name != "epoch=1.ckpt"]  # what a run went on from is kept
    manifest = verify_directory(folder / "ours" / name, deep=True)
    assert name == "epoch=2.ckpt" and len(manifest.payloads) == 2 and manifest.depth == 2
    assert not list((folder / "ours" / name).glob("*.distcp")) and json.dumps(manifest.extra)


def test_a_sharded_run_of_the_stock_plugin_goes_on(found):
    for report in found[1]:
        assert report["from stock"]["sums"] == report["stock"]["sums"]


def test_replicas_go_on_from_what_the_first_of_them_wrote(found):
    folder, results = found
    for report in results:
        assert report["replicas resumed"]["sums"] == report["replicas"]["sums"] == results[0]["replicas"]["sums"]
        assert report["replicas resumed"]["losses"] == report["replicas"]["losses"][8:]
    assert results[0]["replicas"]["losses"] != results[1]["replicas"]["losses"]
    verify_directory(folder / "replicas/epoch=2.ckpt", deep=True)
