"""Runs of Hugging Face's Trainer that are over in a second: two small GPT-2 layers, with dropout, on standard text."""

from __future__ import annotations

import copy
import random
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from shrinkpoint.tensors.rng import get_rng_state

torch.set_num_threads(1)  # these models are far too small for more
logging.set_verbosity_error()
WEIGHTS = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
"""What the stock Trainer writes large."""
TEXT = (str(copy.__doc__) + str(random.__doc__) + str(warnings.__doc__) + str(np.__doc__)).encode("ascii", "ignore")


class Text(Dataset):
    """Pieces of 16 bytes."""

    def __init__(self, count: int = 64, start: int = 0) -> None:
        letters = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long() % 128
        self.pieces = letters[start * 16 : (start + count) * 16].reshape(count, 16)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


class Until(TrainerCallback):
    """Ends a run early, its schedule being that of a long one."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self._step


def gpt2(width: int = 32, layers: int = 1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 128, "n_positions": 16, "n_embd": width, "n_layer": layers, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


def arguments(folder: Path, **further: Any) -> TrainingArguments:
    defaults = {
        "max_steps": 8,
        "save_steps": 2,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "seed": 7,
        "logging_steps": 100,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "log_level": "error",
    }
    return TrainingArguments(output_dir=str(folder), **(defaults | further))


def made(kind: type[Trainer], folder: Path, *, count: int = 64, **further: Any) -> Trainer:
    """A Trainer with a fresh model; arguments that are its own begin with "trainer_"."""
    own = {name.removeprefix("trainer_"): further.pop(name) for name in [*further] if name.startswith("trainer_")}
    own = {"model": gpt2(), "train_dataset": Text(count), "eval_dataset": Text(24, 64)} | own
    return kind(args=arguments(folder, **further), **own)


def everything(trainer: Trainer) -> dict[str, Any]:
    """All that a run which goes on exactly has in common, now, with one that was not interrupted."""
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "generators": get_rng_state(),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
    }


def ended(trainer: Trainer, resume: str | Path | bool | None = None) -> dict[str, Any]:
    """What there is when a training has ended."""
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    return copy.deepcopy(everything(trainer))


@cache
def whole() -> dict[str, Any]:
    """The end of a stock run of eight steps that nothing interrupts."""
    with TemporaryDirectory() as folder:
        return ended(made(Trainer, Path(folder), save_strategy="no"))


def lay(folder: Path, kind: type[Trainer]) -> Path:
    """A directory with checkpoints of steps 2, 4, 6 and 8 of that run; those of the stock Trainer: 2 and 4."""
    for name, content in _files(kind).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@cache
def _files(kind: type[Trainer]) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        made(kind, Path(folder), max_steps=4 if kind is Trainer else 8).train()
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
