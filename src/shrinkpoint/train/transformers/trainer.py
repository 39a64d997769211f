"""A Hugging Face Trainer whose checkpoints are deltas."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils import is_sagemaker_mp_enabled, is_torch_xla_available

from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.storage import local_path
from shrinkpoint.store import SaveReport
from shrinkpoint.store.identify import is_checkpoint
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.tensors.wrappers import match_state_keys
from shrinkpoint.train.checkpointer import Checkpointer, wait_for_writes
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.recent_batches import TermCounter, counts_terms, note_terms
from shrinkpoint.train.state_alignment import NAMES_KEY, collect_names
from shrinkpoint.train.state_dicts import check_storable, check_tensor_fits, load_aligned
from shrinkpoint.train.transformers import checkpoint_dirs
from shrinkpoint.train.transformers.callback import BeginCallback, GradientCallback, SavePolicyCallback
from shrinkpoint.train.transformers.checkpoint_dirs import has_adapters, save_auxiliary_files
from shrinkpoint.train.transformers.config import Evaluation, ShrinkConfig, TrainingLoss
from shrinkpoint.validate import check_instance

_log = logging.getLogger("shrinkpoint")
_ALTERNATIVE = "or begin anew from its weights alone"
_METHODS = {
    "model": ("_save", "_load_from_checkpoint", "_load_best_model"),
    "optimizer": ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"),
    "scaler": ("_save_scaler", "_load_scaler"),
    "rng": ("_save_rng_state", "_load_rng_state"),
}
"""Name of a part of a checkpoint -> the Trainer's methods that save and load it."""
_CONSUMED = object()
"""Replaces a part of a loaded checkpoint that was handed to the Trainer, so that its memory is freed."""


@dataclass
class _PendingCheckpoint:
    """Collects what the Trainer's save methods hand over for one checkpoint."""

    directory: Path  # of the checkpoint
    limit: int | None  # the user's `save_total_limit`
    state: dict[str, Any] = field(default_factory=dict)  # name of a part -> its state
    objects: dict[str, Any] = field(default_factory=dict)  # name of a part -> the live object

    def add(self, name: str, state: Any, obj: Any = None) -> None:
        """Add a part, and the live object behind it, if a scheme may evaluate it."""
        self.state[name] = state
        if obj is not None:
            self.objects[name] = obj


class ShrinkTrainer(Trainer):
    """A Trainer that saves deltas; also a mixin for its subclasses: `class MyTrainer(ShrinkTrainer, SFTTrainer)`.

    A checkpoint directory has the Trainer's small files (configuration, tokenizer, arguments, `trainer_state.json`);
    one payload, a delta against the previous checkpoint, in place of weights, optimizer, scheduler and random
    generators; and a manifest with digests of all of these. It needs no other directory. `save_model` is unchanged.

    `resume_from_checkpoint=True` resumes from the newest valid checkpoint, and logs a warning for each one that is
    skipped; a named checkpoint that is broken is an error. Checkpoints of the stock Trainer can be resumed from, too.

    What a trainer behind this one in the method resolution order saves or loads by methods of its own, that is saved
    and loaded by these, as `SentenceTransformerTrainer` does with the model; the payload holds the rest.

    Not changed: DeepSpeed, FSDP, XLA, SageMaker, and the
    weights of PEFT models, which are adapters.

    Args:
        args, kwargs: of `Trainer`.
        shrink: settings; None: those of the class attribute `shrink`.

    Raises:
        PolicyError: the settings do not fit the training arguments.
    """

    shrink: ShrinkConfig = ShrinkConfig()

    def __init__(self, *args: Any, shrink: ShrinkConfig | None = None, **kwargs: Any) -> None:
        expected, do = "settings, a ShrinkConfig(...)", 'write shrink=ShrinkConfig("fisher")'
        config = self.shrink if shrink is None else shrink
        self.shrink = check_instance("shrink", config, ShrinkConfig, expected=expected, do=do)
        self._saver = _ModelCheckpointer(self)
        self._pending_checkpoint: _PendingCheckpoint | None = None  # while the Trainer collects one
        self._unfinished_checkpoint: _PendingCheckpoint | None = None  # being written, or just written
        self._loaded_parts = _LoadedParts(self._saver)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, TrainingArguments):  # checked before the Trainer makes a directory of that name
                local_path(argument.output_dir, "output_dir")
        super().__init__(*args, **kwargs)
        _check_settings(self)
        if self._has_full_state:
            self.add_callback(BeginCallback(self._check_storable))
        if self.shrink.save_decision_policy is not None:
            self.add_callback(SavePolicyCallback(self.shrink.save_decision_policy))
        if self.shrink.gradients and self._has_full_state:
            self.add_callback(GradientCallback(self._saver.get_recorder))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does.

        Raises:
            NotFoundError: there are checkpoints to resume from, and none is valid.
            ChainError, FormatError, StorageError: the named checkpoint is broken.
            Exception: any error of a background save.
        """
        resume = _resolve_resume(self, resume_from_checkpoint)
        if self.model_init is not None:  # frees the previous model before a new one is made
            self._saver.reset()
        try:
            result = super().train(resume, *args, **kwargs)
            self._finish_checkpoint()
        except BaseException:
            with suppress(Exception):  # in the log already
                self._finish_checkpoint()
            raise
        finally:
            self._loaded_parts.clear()
            self._saver.close()
        return result

    def wait_for_checkpoint(self) -> SaveReport | None:
        """Wait until the last checkpoint is complete; its report, or None if nothing was saved yet.

        Raises:
            Exception: any error of the background save, once.
        """
        self._finish_checkpoint()
        return None if self._saver.checkpointer is None else self._saver.checkpointer.wait()

    @property
    def stall_seconds(self) -> float:
        """Seconds for which the last save blocked training."""
        return 0.0 if self._saver.checkpointer is None else self._saver.checkpointer.stall_seconds

    # overridden methods of the Trainer: training

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The batches of an optimizer step, of which schemes learn what the loss averages."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        saver = self._saver
        if self._has_full_state and saver.participates and counts_terms(saver.for_model().scheme):
            shift = bool(getattr(self, "_loss_shifts_labels", False))
            saver.counter.add(batches, scale=self.args.world_size, shift=shift)
            if saver.training_loss is not None:
                saver.training_loss.add(batches)
        return batches, num_items

    # overridden methods of the Trainer: saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let the Trainer write its small files and hand over the state, write the payload, then rotate."""
        if not self._has_full_state:
            super()._save_checkpoint(model, trial)
            return
        self._finish_checkpoint()
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._pending_checkpoint = pending = _PendingCheckpoint(
            Path(self._get_output_dir(trial=trial)) / name, self.args.save_total_limit
        )
        self.args.save_total_limit = None  # nothing may be deleted before this checkpoint is complete
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._pending_checkpoint, self.args.save_total_limit = None, pending.limit
        if self._saver.participates and pending.state:
            self._write_checkpoint(pending)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        pending = self._pending_checkpoint
        if pending is None or output_dir is None:
            super()._save(output_dir, state_dict)
            return
        self.args.save_total_limit = pending.limit  # the Trainer saves the arguments that the user has passed
        try:
            if has_adapters(self.model) or self._is_own("model"):
                super()._save(output_dir, state_dict)
                return
            model = self._model
            if self._saver.participates:
                pending.add("model", model.state_dict() if state_dict is None else state_dict, model)
            if self.args.should_save:
                save_auxiliary_files(self, model, output_dir)
        finally:
            self.args.save_total_limit = None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._pending_checkpoint is None or self._is_own("optimizer"):
            super()._save_optimizer_and_scheduler(output_dir)
        elif self._saver.participates:
            self._pending_checkpoint.add("optimizer", self.optimizer.state_dict(), self.optimizer)
            self._pending_checkpoint.add("scheduler", self.lr_scheduler.state_dict())
            objects = {"model": self._model, "optimizer": self.optimizer, "scheduler": self.lr_scheduler}
            if names := collect_names(objects):
                self._pending_checkpoint.add(NAMES_KEY, names)

    def _save_scaler(self, output_dir: str) -> None:
        if self._pending_checkpoint is None or self._is_own("scaler"):
            super()._save_scaler(output_dir)
        elif self._saver.participates and self._scaler is not None:
            self._pending_checkpoint.add("scaler", self._scaler.state_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        """Gather the random generators of all processes, all of which call this."""
        is_stock = self.args.device.type not in ("cpu", "cuda") or self._is_own("rng")
        if self._pending_checkpoint is None or is_stock:
            super()._save_rng_state(output_dir)
        else:
            self._pending_checkpoint.add("rng", gather_object([get_rng_state()]))

    # overridden methods of the Trainer: resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights = self._pop_part(resume_from_checkpoint, "model")
        if weights is None:
            super()._load_from_checkpoint(resume_from_checkpoint, *(() if model is None else (model,)))
        else:
            self._load_weights(self._model if model is None else model, weights, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        saved = {name: self._pop_part(checkpoint, name) for name in ("optimizer", "scheduler", NAMES_KEY)}
        if saved["optimizer"] is not None and saved["scheduler"] is not None:
            objects = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
            load_aligned(objects, saved, str(checkpoint), model=self._model, alternative=_ALTERNATIVE)
            return
        if self._loaded_parts and not self._is_own("optimizer"):
            _log.warning("%s holds no optimizer: it starts afresh", checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = self._pop_part(checkpoint, "scaler")
        if scaler is None or self._scaler is None:
            super()._load_scaler(checkpoint)
        else:
            self._scaler.load_state_dict(scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        rng_states = self._pop_part(checkpoint, "rng")
        self._loaded_parts.clear()  # the last part that the Trainer loads
        if checkpoint is None or rng_states is None:
            super()._load_rng_state(checkpoint)
            return
        rng_state = checkpoint_dirs.select_rng_state(rng_states, self.args, checkpoint)
        if rng_state is not None:
            set_rng_state(rng_state)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        self._finish_checkpoint()
        weights = self._pop_part(best, "model")
        self._loaded_parts.clear()
        if weights is None:
            super()._load_best_model()
        else:
            self._load_weights(self._model, weights, str(best))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._finish_checkpoint()
        return super()._finalize_training(*args, **kwargs)

    # what this class adds

    @property
    def _has_full_state(self) -> bool:
        """True if one process holds the whole state, so that this class saves it."""
        return not (
            self.is_deepspeed_enabled
            or self.is_fsdp_enabled
            or self.is_fsdp_xla_enabled
            or self.is_distributed_loading_by_transformers
            or is_sagemaker_mp_enabled()
            or is_torch_xla_available()
        )

    def _is_own(self, part: str) -> bool:
        """True if a class behind this one saves or loads a part of a checkpoint by methods of its own."""
        order = type(self).__mro__
        behind = order[order.index(ShrinkTrainer) + 1 : order.index(Trainer)]
        return any(method in vars(cls) for cls in behind for method in _METHODS[part])

    @property
    def _model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _scaler(self) -> Any:
        return getattr(self.accelerator, "scaler", None)

    def _check_storable(self) -> None:
        """Check what this class saves, and not a class behind it or PEFT."""
        objects = {} if self._is_own("model") or has_adapters(self._model) else {"model": self._model}
        if not self._is_own("optimizer"):
            objects |= {"optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        if self._saver.participates:
            check_storable(objects)

    def _write_checkpoint(self, pending: _PendingCheckpoint) -> None:
        writes = self.args.should_save
        extra = checkpoint_dirs.manifest_extra(pending.directory, pending.state) if writes else None
        checkpointer = self._saver.for_model()
        note_terms(checkpointer.scheme, self._saver.counter.terms)
        checkpoint_dirs.retain(checkpointer, self.shrink.keep, self.args, self.state)
        checkpointer.save(
            pending.directory,
            pending.state,
            objects=pending.objects,
            step=self.state.global_step,
            metrics=checkpoint_dirs.eval_metrics(self.state),
            extra=extra,
        )
        # Frees them: a background save has its own copy.
        pending.state, pending.objects = dict.fromkeys(pending.state), {}
        self._unfinished_checkpoint = pending if writes else None
        if not self.shrink.background:
            self._finish_checkpoint()

    def _finish_checkpoint(self) -> None:
        """Wait until the last checkpoint is complete, then delete what it replaces."""
        unfinished, self._unfinished_checkpoint = self._unfinished_checkpoint, None
        report = None if self._saver.checkpointer is None else self._saver.checkpointer.wait()
        if unfinished is not None:
            if self.shrink.log_saves and report is not None:
                self.log(report.metrics("checkpoint/"))
            best = self.state.best_model_checkpoint
            keep = {unfinished.directory} if best is None else {unfinished.directory, Path(best)}
            checkpoint_dirs.remove_stale(unfinished.directory, unfinished.state)
            checkpoint_dirs.rotate(unfinished.directory.parent, unfinished.limit, keep)

    def _pop_part(self, checkpoint: Any, name: str) -> Any:
        """Remove a part of one of our checkpoints from memory, and return it; None if the checkpoint lacks it."""
        if checkpoint is None or not self._has_full_state or not is_checkpoint(checkpoint):
            return None
        return self._loaded_parts.pop(str(checkpoint), name)

    def _load_weights(self, model: Any, weights: Mapping[str, Any], where: str) -> None:
        live = model.state_dict()
        weights = match_state_keys(weights, live)
        for name, tensor in live.items():
            if name in weights and isinstance(tensor, torch.Tensor):
                check_tensor_fits(tensor, weights[name], f"{where}, model, {name}", strict=False)
        self._issue_warnings_after_load(model.load_state_dict(weights, strict=False))


class _ModelCheckpointer:
    """The checkpointer and the gradient recorder of a Trainer's current model."""

    def __init__(self, trainer: ShrinkTrainer) -> None:
        self._trainer, self.counter = trainer, TermCounter()
        self.training_loss: TrainingLoss | None = None
        self.checkpointer: Checkpointer | None = None  # None until `for_model` is called
        self._model: nn.Module | None = None
        self._recorder: GradientRecorder | None = None

    def for_model(self) -> Checkpointer:
        """The checkpointer; a new one if `model_init` has made another model."""
        trainer, model = self._trainer, self._trainer._model
        if self.checkpointer is None or self._model is not model:
            self.reset()
            shrink = trainer.shrink
            evaluation: Evaluation | TrainingLoss | None = None
            if shrink.evaluate is not None:
                evaluation = Evaluation(trainer, shrink.evaluate, shrink.batches)
            elif shrink.measures_by_default:
                evaluation = self.training_loss = TrainingLoss(trainer, shrink.batches)
            # Number of optimizer steps between two saves, where that is fixed
            steps = trainer.args.save_steps if trainer.args.save_strategy == SaveStrategy.STEPS else 0
            self._recorder = shrink.make_recorder(model, int(steps) if steps >= 1 else None)
            higher_is_better = isinstance(evaluation, Evaluation) and evaluation.higher_is_better
            self.checkpointer = shrink.make_checkpointer(evaluation, higher_is_better, self._recorder)
            self._model = model
        return self.checkpointer

    def get_recorder(self) -> GradientRecorder:
        """The recorder of the model's gradients, which the settings must ask for."""
        self.for_model()
        assert self._recorder is not None
        return self._recorder

    def close(self) -> None:
        """Wait for the last save, and free the memory of the checkpointer, which may save again."""
        if self.checkpointer is not None:
            self.checkpointer.close()

    def reset(self) -> None:
        """Release the checkpointer, and with it the model."""
        self.close()
        self.checkpointer, self._model, self._recorder = None, None, None
        self.counter, self.training_loss = TermCounter(), None

    @property
    def participates(self) -> bool:
        """True if this process writes, or takes part in the search for the scheme's settings."""
        if self._trainer.args.should_save:
            return True
        scheme = self.for_model().scheme
        return isinstance(scheme, Planner) and not scheme.is_writer

    def load(self, directory: str) -> dict[str, Any]:
        """The state in a directory; a process that never saves keeps no reference for a next delta."""
        if self.participates:
            checkpointer = self.for_model()
        else:
            checkpointer = Checkpointer(threads=self._trainer.shrink.threads, max_bytes=self._trainer.shrink.max_bytes)
        restored = checkpointer.load(directory)
        state: dict[str, Any] = restored.state
        if restored.manifest is not None and restored.manifest.weights_only:
            state.pop("optimizer", None)
        return state


class _LoadedParts:
    """The parts of a checkpoint that the Trainer has not asked for yet; false if no checkpoint is loaded."""

    def __init__(self, saver: _ModelCheckpointer) -> None:
        self._saver, self._directory = saver, ""
        self._parts: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._directory)

    def clear(self) -> None:
        """Free the memory."""
        self._directory, self._parts = "", {}

    def pop(self, directory: str, name: str) -> Any:
        """Return a part of a checkpoint, and free it here; None if the checkpoint lacks it."""
        if self._directory != directory or self._parts.get(name) is _CONSUMED:
            self.clear()  # a part is read twice if training restarts with a smaller batch size
            self._parts = self._saver.load(directory)
            self._directory = directory
        part = self._parts.get(name)
        if name in self._parts:
            self._parts[name] = _CONSUMED
        return part


def _check_settings(trainer: ShrinkTrainer) -> None:
    args = trainer.args
    checkpoint_dirs.check_keep(trainer.shrink.keep, args)
    if not trainer._has_full_state:
        if trainer.shrink != ShrinkConfig():
            expected, do = "the whole state in one process", "save shards with shrinkpoint.train.dcp.Manager"
            raise PolicyError("ShrinkConfig", found="sharded training", expected=expected, do=do)
        _log.warning("sharded training: checkpoints are those of the stock Trainer")
        return
    if own := [part for part in _METHODS if trainer._is_own(part)]:
        text = (
            "%s: a class behind ShrinkTrainer has methods of its own for %s: files of its own hold them, uncompressed"
        )
        _log.warning(text, type(trainer).__name__, " and ".join(own))
    keeps_weights = has_adapters(trainer.model) or trainer._is_own("model")
    if args.push_to_hub and args.hub_strategy != HubStrategy.END and not keeps_weights:
        found, expected = f"hub_strategy={args.hub_strategy.value!r}", "one that needs no weights in checkpoints"
        raise PolicyError("push_to_hub", found=found, expected=expected, do="push at the end: hub_strategy='end'")
    scheme = trainer._saver.for_model().scheme  # raises now, and not at the first save
    if args.should_save and isinstance(scheme, Planner) and not scheme.is_writer:
        found = f"{scheme!r} with a group that another process leads"
        do = "make the process that saves the first rank of the group"
        raise PolicyError("ShrinkConfig", found=found, expected="a scheme that writes where the Trainer saves", do=do)


def _resolve_resume(trainer: ShrinkTrainer, resume: Any) -> Any:
    """The checkpoint to resume from, the same on all processes."""
    if resume is None or resume is False or not trainer._has_full_state:
        return resume
    if resume is not True:
        wait_for_writes(resume)
        checkpoint_dirs.validate_checkpoint(resume)
        return resume
    answer: list[Any] = [None]
    if trainer.args.process_index == 0:
        try:
            answer = [_find_newest(trainer.args)]
        except Exception as error:
            answer = [error]
    broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return True if answer[0] is None else answer[0]  # True: the Trainer itself raises, as there are no checkpoints


def _find_newest(args: Any) -> str | None:
    """The newest valid checkpoint, one with an optimizer if there is one; None if there are no checkpoints at all."""
    if args.save_only_model:
        return checkpoint_dirs.find_resume_checkpoint(args.output_dir, optimizer=False)
    try:
        return checkpoint_dirs.find_resume_checkpoint(args.output_dir, optimizer=True)
    except NotFoundError:  # the run may have been one with save_only_model
        with suppress(NotFoundError):
            return checkpoint_dirs.find_resume_checkpoint(args.output_dir, optimizer=False)
        raise
