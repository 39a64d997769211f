"""Runs of Hugging Face's Trainer and of Lightning that keep the newest N checkpoints, stock and through shrinkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.studies.retention.meter import Meter
from lab.studies.retention.trainings import QUICK_SHAPE, SHAPE, Training
from lab.studies.workloads import evaluating, seed_everything, text
from shrinkpoint.store.checkpoint_file import build_state
from shrinkpoint.store.decode import decode_directory

PLAIN = "plain"
"""Names the framework's own checkpoints among the schemes."""


def note_rise(meter: Meter, scheme: str, live: float, decoded: float) -> None:
    """Note by how much the loss of a decoded checkpoint is above that of the model that was saved."""
    if scheme not in (PLAIN, "lossless"):
        meter.rises.append((decoded - live) / abs(live))


def state_of(directory: Path) -> Mapping[str, Any]:
    """The state in a checkpoint directory of ours."""
    state: Mapping[str, Any] = build_state(decode_directory(directory), str(directory))
    return state


class _Pieces(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of the text, by number."""

    def __init__(self, letters: Tensor, length: int, count: int = 1 << 14) -> None:
        self._windows, _ = text.windows(letters, length, count)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._windows[index], "labels": self._windows[index]}


def transformers_run(
    root: Path, scheme: str, data: Path, *, last: int, saves: int, interval: int, quick: bool = False
) -> Meter:
    """A GPT-2 of the shape of our GPT on the same text, in a Trainer with `save_total_limit`."""
    from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging as its_logging

    from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer

    its_logging.set_verbosity_error()
    its_logging.disable_progress_bar()
    seed_everything(0, torch.get_num_threads())
    meter, shape = Meter(root), QUICK_SHAPE if quick else SHAPE
    sizes = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads, "n_positions": shape.context}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    letters = text.text(data)[1]
    cut = int(len(letters) * (1 - text.HELD_OUT))
    held, _ = text.windows(letters[cut:], shape.context, 128)

    class Timed(Trainer if scheme == PLAIN else ShrinkTrainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            with meter.saving():
                super()._save_checkpoint(model, trial)

    settings = {"max_steps": saves * interval, "save_steps": interval, "save_total_limit": last, "learning_rate": 2e-3}
    quiet = {"report_to": "none", "logging_strategy": "no", "disable_tqdm": True, "log_level": "error"}
    own = {"per_device_train_batch_size": 16, "lr_scheduler_type": "constant", "use_cpu": True}
    arguments = TrainingArguments(str(root), dataloader_pin_memory=False, **settings, **own, **quiet)
    ours = {} if scheme == PLAIN else {"shrink": ShrinkConfig(scheme, on_save=lambda r: meter.files.append(_files(r)))}
    trainer = Timed(model=model, args=arguments, train_dataset=_Pieces(letters[:cut], shape.context), **ours)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if scheme != PLAIN:
        live = _gpt2_loss(model, held)
        saved = state_of(root / f"checkpoint-{saves * interval}")["model"]
        model.load_state_dict(saved, strict=False)  # a tied weight is stored once
        model.tie_weights()
        note_rise(meter, scheme, live, _gpt2_loss(model, held))
    return meter


def _files(report: Any) -> int:
    return int(report.depth) + 1


def _gpt2_loss(model: Any, held: Tensor) -> float:
    with evaluating(model):
        return float(model(input_ids=held, labels=held).loss)


def lightning_run(root: Path, scheme: str, training: Training, *, last: int, saves: int, interval: int) -> Meter:
    """One of our trainings, with the `ModelCheckpoint` that keeps the newest."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from shrinkpoint.train.lightning import ShrinkIO

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    meter, course = Meter(root), training.workload.build(0)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = course.model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return training.workload.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return [course.optimizer], [{"scheduler": course.scheduler, "interval": "step"}]

    class Timed(ModelCheckpoint):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step % interval:
                return
            with meter.saving():
                super().on_train_batch_end(trainer, *arguments)

    keep = Timed(root, monitor="step", mode="max", save_top_k=last, every_n_train_steps=interval)
    plugins = [] if scheme == PLAIN else [ShrinkIO(scheme, on_save=lambda report: meter.files.append(_files(report)))]
    bars = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    place = {"accelerator": "cpu", "devices": 1, "default_root_dir": root, "plugins": plugins, "callbacks": [keep]}
    trainer = pl.Trainer(max_steps=saves * interval, **place, **bars)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of loaders and loggers that a study does without
        trainer.fit(Module(), torch.utils.data.DataLoader(_Drawn(course), batch_size=None))
    if scheme != PLAIN:
        trial = _trial(training, Path(keep.best_model_path))
        note_rise(meter, scheme, training.held_out(course.model), training.held_out(trial))
    return meter


def _trial(training: Training, directory: Path) -> nn.Module:
    """A model with the weights of a checkpoint of `lightning_run`."""
    model, saved = training.workload.build(0).model, state_of(directory)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in saved.items()})
    return model


class _Drawn(torch.utils.data.IterableDataset[Any]):
    """The batches of a course, without an end."""

    def __init__(self, course: Any) -> None:
        self._course = course

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._course.stream.draw()


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
