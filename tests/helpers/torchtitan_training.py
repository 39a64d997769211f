"""A training of torchtitan's Trainer on the CPU: a layer of its debug Llama, FSDP2, random numbers as data."""

# ruff: noqa: E402

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._utils
from helpers.multi_rank_training import digest
from torch import nn
from torch.distributed.fsdp import FSDPModule

for _name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):  # imported, and never called here
    sys.modules.setdefault(_name, MagicMock())
torch._utils._get_available_device_type = lambda: "cpu"  # else torchtitan takes a machine without a GPU for one with

import torchtitan.trainer
from torchtitan.components import metrics
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.trainer import Trainer

from shrinkpoint.train.dcp import Writer, reset_chains
from shrinkpoint.train.torchtitan import TitanCheckpointManager


class _Memory:
    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = _Memory
distributed_utils.set_pg_timeouts = lambda **_: None  # its barrier names a device that gloo does not have
torchtitan.trainer.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})  # 2 s at the end of a run
Llama3Model.get_attention_masks = lambda self, positions: None  # FlexAttention has no backward pass on a CPU


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, tokenizer_path: str) -> None:
        self.eos_id = 0

    def encode(self, *args: Any, **options: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **options: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


class Numbers(torch.utils.data.IterableDataset):
    """Random tokens, which say where they are."""

    def __init__(self, rank: int, length: int) -> None:
        self.index, self.rank, self.length = 0, rank, length

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.index * 64 + self.rank)
            self.index += 1
            tokens = torch.randint(0, 2048, (self.length + 1,), generator=generator)
            yield {"input": tokens[:-1], "positions": torch.arange(self.length)}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, **_: Any) -> None:
        super().__init__(Numbers(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=1)


def parallelize(model: nn.Module, **options: Any) -> nn.Module:
    """The model, sharded as torchtitan does it, with sums that gloo has."""
    sharded = parallelize_llama(model, **options)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return sharded


def make_config(folder: str, steps: int, *, tensor_parallel: int = 1, **checkpoint: Any) -> Trainer.Config:
    spec = model_registry("debugmodel")
    spec.parallelize_fn = parallelize
    spec.model.layers = spec.model.layers[:1]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    options = {"interval": 1, "last_save_model_only": False, **checkpoint}
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=tensor_parallel),
        training=TrainingConfig(local_batch_size=1, seq_len=16, steps=steps),
        checkpoint=TitanCheckpointManager.Config(enable=True, **options),
    )


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def train(rank: int, width: int, port: str, folder: str, steps: int, **checkpoint: Any) -> dict[str, Any]:
    """What a run does: the step at which it began, and digests of its state there and at its end."""
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": width, "LOCAL_WORLD_SIZE": width, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in settings.items()}, MASTER_ADDR="localhost")
    reset_chains()
    trainer = make_config(folder, steps, **checkpoint).build()
    manager, said = trainer.checkpointer, dict[str, Any]()

    def load(step: int) -> None:
        TitanCheckpointManager.load(manager, step)
        said.update(begun=trainer.step, begun_state=state())

    def state() -> str:
        return digest({name: manager.states[name].state_dict() for name in ("model", "optimizer", "train_state")})

    manager.load = load
    trainer.train()
    trainer.close()
    said["state"] = state()
    torch.distributed.destroy_process_group()
    return said


def run_killed(step: int, *args: Any, **options: Any) -> int:
    """The signal that ends a run in another process, whose ranks are killed when they have written what step saves."""
    pid = os.fork()
    if pid == 0:
        write = Writer.write_data

        def write_and_die(writer: Writer, *arguments: Any) -> Any:
            written = write(writer, *arguments)
            if writer.checkpoint_id.name == f"step-{step}":
                os.kill(os.getpid(), signal.SIGKILL)
            return written

        Writer.write_data = write_and_die
        try:
            train(*args, **options)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
