"""A Trainer whose checkpoints are deltas."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import is_sagemaker_mp_enabled, is_torch_xla_available

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import PlanningScheme
from shrinkpoint.storage import local_path
from shrinkpoint.store import SaveReport
from shrinkpoint.store.directory import is_checkpoint
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.train import state_dicts
from shrinkpoint.train.checkpointer import Checkpointer, wait_for_writes
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.transformers import checkpoint_dirs
from shrinkpoint.train.transformers.auxiliary_files import (
    eval_metrics,
    has_adapters,
    save_auxiliary_files,
    save_interval,
)
from shrinkpoint.train.transformers.callback import GradientCallback
from shrinkpoint.train.transformers.config import ShrinkConfig, check_config
from shrinkpoint.train.transformers.evaluation import Evaluation

_log = logging.getLogger("shrinkpoint")
_ALTERNATIVE = "or begin anew from its weights alone"
_CONSUMED = object()
"""In the place of a part that was taken out of memory."""


@dataclass
class _PendingCheckpoint:
    """What the Trainer's own methods hand over while it makes one checkpoint."""

    directory: Path
    limit: int | None
    state: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, state: Any, obj: Any = None) -> None:
        self.state[name] = state
        if obj is not None:
            self.objects[name] = obj


class ShrinkTrainer(Trainer):
    """The Trainer, or a mixin for one of its subclasses: `class MyTrainer(ShrinkTrainer, SFTTrainer)`.

    A checkpoint directory has the Trainer's small files (configuration, tokenizer, arguments, `trainer_state.json`);
    in place of weights, optimizer, scheduler and random generators one payload, a delta against the checkpoint before;
    and a manifest that vouches for all of it. It needs no other directory. What `save_model` writes stays as it is.

    With `resume_from_checkpoint=True` the newest whole checkpoint is taken, and what is passed over is logged; one that
    is named and broken is an error. Checkpoints of the stock Trainer are resumed from as ever.

    Left as they are: DeepSpeed, FSDP (`shrinkpoint.train.dcp.install` shrinks its checkpoints), XLA, SageMaker, and the
    weights of PEFT models, which are adapters.

    Args:
        shrink: settings; they can also be an attribute of the class.
        further: what the Trainer takes.

    Raises:
        PolicyError: settings that do not fit the arguments.
    """

    shrink: ShrinkConfig = ShrinkConfig()

    def __init__(self, *args: Any, shrink: ShrinkConfig | None = None, **kwargs: Any) -> None:
        self.shrink = check_config(self.shrink if shrink is None else shrink)
        self._checkpointer: Checkpointer | None = None
        self._checkpointer_model: nn.Module | None = None
        self._recorder: GradientRecorder | None = None
        self._pending_checkpoint: _PendingCheckpoint | None = None  # while a checkpoint is made
        self._unfinished_checkpoint: _PendingCheckpoint | None = None  # it is being written, or just was
        self._loaded_checkpoint: tuple[str, dict[str, Any]] | None = None  # of a checkpoint that is resumed from
        for one in (*args, *kwargs.values()):
            if isinstance(one, TrainingArguments):  # before the Trainer makes a directory of that name
                local_path(one.output_dir, "output_dir")
        super().__init__(*args, **kwargs)
        self._check_settings()
        if self.shrink.gradients and self._has_full_state:
            self.add_callback(GradientCallback(self._get_recorder))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `Trainer.train`.

        Raises:
            NotFoundError: there are checkpoints to resume from, and none is whole.
            ChainError, FormatError, StorageError: the one that is named is broken.
            whatever writing a checkpoint raised.
        """
        resume = self._resolve_resume(resume_from_checkpoint)
        if self.model_init is not None:  # the model of before would stay in memory beside the one that is made now
            self._reset_checkpointer()
        try:
            result = super().train(resume, *args, **kwargs)
            self._finish_checkpoint()
        except BaseException:
            with suppress(Exception):  # it is in the log already
                self._finish_checkpoint()
            raise
        finally:
            self._loaded_checkpoint = None
            if self._checkpointer is not None:
                self._checkpointer.close()
        return result

    def wait_for_checkpoint(self) -> SaveReport | None:
        """Wait until the last checkpoint is whole; what it did, or None if there is none yet.

        Raises:
            whatever writing it raised in the background, once.
        """
        self._finish_checkpoint()
        return None if self._checkpointer is None else self._checkpointer.wait()

    @property
    def stall_seconds(self) -> float:
        """Seconds for which writing the last checkpoint held up training."""
        return 0.0 if self._checkpointer is None else self._checkpointer.stall_seconds

    # what the Trainer calls to save

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let the Trainer collect and write its small files, write the payload, then delete older ones."""
        if not self._has_full_state:
            super()._save_checkpoint(model, trial)
            return
        self._finish_checkpoint()
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._pending_checkpoint = parts = _PendingCheckpoint(
            Path(self._get_output_dir(trial=trial)) / name, self.args.save_total_limit
        )
        self.args.save_total_limit = None  # nothing may be deleted before this checkpoint is whole
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._pending_checkpoint, self.args.save_total_limit = None, parts.limit
        if self._participates:
            self._write_checkpoint(parts)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        parts = self._pending_checkpoint
        if parts is None or output_dir is None:
            super()._save(output_dir, state_dict)
        else:
            with self._user_save_limit(parts):
                self._save_auxiliary(parts, output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._pending_checkpoint is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self._participates:
            self._pending_checkpoint.add("optimizer", self.optimizer.state_dict(), self.optimizer)
            self._pending_checkpoint.add("scheduler", self.lr_scheduler.state_dict())

    def _save_scaler(self, output_dir: str) -> None:
        if self._pending_checkpoint is None:
            super()._save_scaler(output_dir)
        elif self._participates and self._scaler is not None:
            self._pending_checkpoint.add("scaler", self._scaler.state_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        """All processes come here: the generators of all go to those that write."""
        if self._pending_checkpoint is None or self.args.device.type not in ("cpu", "cuda"):
            super()._save_rng_state(output_dir)
        else:
            self._pending_checkpoint.add("rng", gather_object([get_rng_state()]))

    # what the Trainer calls to go on

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights = self._pop_part(resume_from_checkpoint, "model")
        if weights is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(self._model if model is None else model, weights)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer, scheduler = (self._pop_part(checkpoint, name) for name in ("optimizer", "scheduler"))
        if optimizer is not None and scheduler is not None:
            for one, saved, name in (
                (self.optimizer, optimizer, "optimizer"),
                (self.lr_scheduler, scheduler, "scheduler"),
            ):
                state_dicts.check_state_dicts(
                    one, saved, f"{checkpoint}, {name}", strict=True, alternative=_ALTERNATIVE
                )
            self.optimizer.load_state_dict(optimizer)
            self.lr_scheduler.load_state_dict(scheduler)
            return
        if self._loaded_checkpoint is not None:
            _log.warning("%s holds no optimizer: it starts afresh", checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = self._pop_part(checkpoint, "scaler")
        if scaler is None or self._scaler is None:
            super()._load_scaler(checkpoint)
        else:
            self._scaler.load_state_dict(scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        generators = self._pop_part(checkpoint, "rng")
        self._loaded_checkpoint = None  # nothing comes after this
        if generators is None:
            super()._load_rng_state(checkpoint)
        elif len(generators) == self.args.world_size:
            set_rng_state(generators[self.args.process_index])
        else:
            found = f"{len(generators)} processes, and now there are {self.args.world_size}"
            _log.warning("%s was saved by %s: random numbers will be others", checkpoint, found)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        self._finish_checkpoint()
        weights = self._pop_part(best, "model")
        self._loaded_checkpoint = None
        if weights is None:
            super()._load_best_model()
        else:
            self._load_weights(self._model, weights)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_checkpoint()
        return super()._finalize_training(*args, **kwargs)

    # ours

    @property
    def _has_full_state(self) -> bool:
        """Whether one process has the whole state."""
        return not (
            self.is_deepspeed_enabled
            or self.is_fsdp_enabled
            or self.is_fsdp_xla_enabled
            or self.is_distributed_loading_by_transformers
            or is_sagemaker_mp_enabled()
            or is_torch_xla_available()
        )

    @property
    def _model(self) -> Any:
        """The module as the user made it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _scaler(self) -> Any:
        return getattr(self.accelerator, "scaler", None)

    def _check_settings(self) -> None:
        args = self.args
        if not self._has_full_state:
            if not self.shrink.is_default:
                found, do = "sharded training", "shrink that with shrinkpoint.train.dcp.install"
                raise PolicyError("Shrink", found=found, expected="the whole state in one process", do=do)
            _log.warning("sharded training: checkpoints are those of the stock Trainer (or of dcp.install)")
        elif args.push_to_hub and args.hub_strategy != HubStrategy.END and not has_adapters(self.model):
            found, do = f"hub_strategy={args.hub_strategy.value!r}", "push at the end: hub_strategy='end'"
            raise PolicyError("push_to_hub", found=found, expected="one that needs no weights in checkpoints", do=do)
        if self._has_full_state:
            scheme = self._checkpointer_for_model().scheme  # what cannot be is said now
            if self.args.should_save and isinstance(scheme, PlanningScheme) and not scheme.is_writer:
                found, do = f"{scheme!r} with a group that another process leads", "make the process that saves lead"
                raise PolicyError("Shrink", found=found, expected="a scheme that writes where the Trainer saves", do=do)

    def _checkpointer_for_model(self) -> Checkpointer:
        """What writes; another one, where `model_init` has made another model."""
        model = self._model
        if self._checkpointer is None or self._checkpointer_model is not model:
            self._reset_checkpointer()
            evaluation, asked = None, self.shrink.evaluate
            if asked is not None:
                evaluation = Evaluation(self, asked, self.shrink.batches)
            self._recorder = self.shrink.make_recorder(model, save_interval(self.args))
            higher = evaluation is not None and evaluation.higher_is_better
            self._checkpointer, self._checkpointer_model = (
                self.shrink.make_checkpointer(evaluation, higher, self._recorder),
                model,
            )
        return self._checkpointer

    def _reset_checkpointer(self) -> None:
        """Hold neither the model of before nor what writes it."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._checkpointer, self._checkpointer_model, self._recorder = None, None, None

    def _get_recorder(self) -> GradientRecorder:
        self._checkpointer_for_model()
        assert self._recorder is not None
        return self._recorder

    @property
    def _participates(self) -> bool:
        """Whether this process writes, or is one of those that search a setting together."""
        if self.args.should_save:
            return True
        scheme = self._checkpointer_for_model().scheme
        return isinstance(scheme, PlanningScheme) and not scheme.is_writer

    def _write_checkpoint(self, pending: _PendingCheckpoint) -> None:
        writes = self.args.should_save
        extra = checkpoint_dirs.manifest_extra(pending.directory, pending.state) if writes else None
        self._checkpointer_for_model().save(
            pending.directory,
            pending.state,
            objects=pending.objects,
            step=self.state.global_step,
            metrics=eval_metrics(self.state),
            extra=extra,
        )
        pending.state, pending.objects = dict.fromkeys(pending.state), {}  # a copy is being written, if anything is
        self._unfinished_checkpoint = pending if writes else None
        if not self.shrink.background:
            self._finish_checkpoint()

    def _finish_checkpoint(self) -> None:
        """Once the last checkpoint is whole: delete what it makes superfluous."""
        parts, self._unfinished_checkpoint = self._unfinished_checkpoint, None
        if self._checkpointer is not None:
            self._checkpointer.wait()
        if parts is not None:
            best = self.state.best_model_checkpoint
            keep = {parts.directory} if best is None else {parts.directory, Path(best)}
            checkpoint_dirs.remove_stale(parts.directory, parts.state)
            checkpoint_dirs.rotate(parts.directory.parent, parts.limit, keep)

    def _resolve_resume(self, resume: Any) -> Any:
        """What to resume from, the same on all processes."""
        if resume is None or resume is False or not self._has_full_state:
            return resume
        if resume is not True:
            wait_for_writes(resume)
            checkpoint_dirs.validate_checkpoint(resume)
            return resume
        answer: list[Any] = [None]
        if self.args.process_index == 0:
            try:
                answer = [
                    checkpoint_dirs.find_resume_checkpoint(
                        self.args.output_dir, optimizer=not self.args.save_only_model
                    )
                ]
            except Exception as error:
                answer = [error]
        broadcast_object_list(answer)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return True if answer[0] is None else answer[0]  # of none at all the Trainer says it

    def _pop_part(self, checkpoint: Any, name: str) -> Any:
        """A part of a checkpoint of ours, out of memory and for once; None where it has none."""
        if checkpoint is None or not self._has_full_state or not is_checkpoint(checkpoint):
            return None
        if (
            self._loaded_checkpoint is None
            or self._loaded_checkpoint[0] != str(checkpoint)
            or self._loaded_checkpoint[1].get(name) is _CONSUMED
        ):
            self._loaded_checkpoint = None  # taken twice, where a training begins again with smaller batches
            trail = (
                self._checkpointer_for_model() if self._participates else Checkpointer(threads=self.shrink.threads)
            )  # holds no base, then
            self._loaded_checkpoint = str(checkpoint), trail.load(checkpoint).state
        state = self._loaded_checkpoint[1]
        part = state.get(name)
        if name in state:
            state[name] = _CONSUMED
        return part

    def _load_weights(self, model: Any, weights: Mapping[str, Any]) -> None:
        self._issue_warnings_after_load(model.load_state_dict(weights, strict=False))

    def _save_auxiliary(self, pending: _PendingCheckpoint, output_dir: str, state_dict: Any) -> None:
        """Hand the weights over, and write what belongs beside them; where they are adapters, these too."""
        if has_adapters(self.model):
            super()._save(output_dir, state_dict)
            return
        model = self._model
        if self._participates:
            pending.add("model", model.state_dict() if state_dict is None else state_dict, model)
        if self.args.should_save:
            save_auxiliary_files(self, model, output_dir)

    @contextmanager
    def _user_save_limit(self, pending: _PendingCheckpoint) -> Iterator[None]:
        """The arguments as the user passed them."""
        self.args.save_total_limit = pending.limit
        try:
            yield
        finally:
            self.args.save_total_limit = None
