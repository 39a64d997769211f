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
from shrinkpoint.schemes import Settling
from shrinkpoint.state.rng import capture, reinstate
from shrinkpoint.storage import local_path
from shrinkpoint.store import SaveReport
from shrinkpoint.store.folder import is_checkpoint
from shrinkpoint.train import objects
from shrinkpoint.train.gradients import Gradients
from shrinkpoint.train.trail import Trail, settle
from shrinkpoint.train.transformers import folders
from shrinkpoint.train.transformers.beside import interval, is_adapted, measured, save_beside
from shrinkpoint.train.transformers.evaluation import Evaluation
from shrinkpoint.train.transformers.recording import Recording
from shrinkpoint.train.transformers.settings import Shrink, checked

_log = logging.getLogger("shrinkpoint")
_WAY = "or begin anew from its weights alone"
_TAKEN = object()
"""In the place of a part that was taken out of memory."""


@dataclass
class _Parts:
    """What the Trainer's own methods hand over while it makes one checkpoint."""

    folder: Path
    limit: int | None
    state: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, state: Any, live: Any = None) -> None:
        self.state[name] = state
        if live is not None:
            self.live[name] = live


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

    shrink: Shrink = Shrink()

    def __init__(self, *args: Any, shrink: Shrink | None = None, **kwargs: Any) -> None:
        self.shrink = checked(self.shrink if shrink is None else shrink)
        self._trail: Trail | None = None
        self._trail_of: nn.Module | None = None
        self._recorder: Gradients | None = None
        self._parts: _Parts | None = None  # while a checkpoint is made
        self._unfinished: _Parts | None = None  # it is being written, or just was
        self._loaded: tuple[str, dict[str, Any]] | None = None  # of a checkpoint that is resumed from
        for one in (*args, *kwargs.values()):
            if isinstance(one, TrainingArguments):  # before the Trainer makes a directory of that name
                local_path(one.output_dir, "output_dir")
        super().__init__(*args, **kwargs)
        self._check_settings()
        if self.shrink.gradients and self._shrinks:
            self.add_callback(Recording(self._recorded))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `Trainer.train`.

        Raises:
            NotFoundError: there are checkpoints to resume from, and none is whole.
            ChainError, FormatError, StorageError: the one that is named is broken.
            whatever writing a checkpoint raised.
        """
        resume = self._chosen(resume_from_checkpoint)
        if self.model_init is not None:  # the model of before would stay in memory beside the one that is made now
            self._forget()
        try:
            result = super().train(resume, *args, **kwargs)
            self._finish()
        except BaseException:
            with suppress(Exception):  # it is in the log already
                self._finish()
            raise
        finally:
            self._loaded = None
            if self._trail is not None:
                self._trail.close()
        return result

    def shrink_wait(self) -> SaveReport | None:
        """Wait until the last checkpoint is whole; what it did, or None if there is none yet.

        Raises:
            whatever writing it raised in the background, once.
        """
        self._finish()
        return None if self._trail is None else self._trail.wait()

    @property
    def shrink_stall(self) -> float:
        """Seconds for which writing the last checkpoint held up training."""
        return 0.0 if self._trail is None else self._trail.stall

    # what the Trainer calls to save

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let the Trainer collect and write its small files, write the payload, then delete older ones."""
        if not self._shrinks:
            super()._save_checkpoint(model, trial)
            return
        self._finish()
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._parts = parts = _Parts(Path(self._get_output_dir(trial=trial)) / name, self.args.save_total_limit)
        self.args.save_total_limit = None  # nothing may be deleted before this checkpoint is whole
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._parts, self.args.save_total_limit = None, parts.limit
        if self._takes_part:
            self._write(parts)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        parts = self._parts
        if parts is None or output_dir is None:
            super()._save(output_dir, state_dict)
        else:
            with self._limit_of(parts):
                self._save_small(parts, output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._parts is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self._takes_part:
            self._parts.add("optimizer", self.optimizer.state_dict(), self.optimizer)
            self._parts.add("scheduler", self.lr_scheduler.state_dict())

    def _save_scaler(self, output_dir: str) -> None:
        if self._parts is None:
            super()._save_scaler(output_dir)
        elif self._takes_part and self._scaler is not None:
            self._parts.add("scaler", self._scaler.state_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        """All processes come here: the generators of all go to those that write."""
        if self._parts is None or self.args.device.type not in ("cpu", "cuda"):
            super()._save_rng_state(output_dir)
        else:
            self._parts.add("rng", gather_object([capture()]))

    # what the Trainer calls to go on

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights = self._taken(resume_from_checkpoint, "model")
        if weights is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(self._model if model is None else model, weights)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer, scheduler = (self._taken(checkpoint, name) for name in ("optimizer", "scheduler"))
        if optimizer is not None and scheduler is not None:
            for one, saved, name in (
                (self.optimizer, optimizer, "optimizer"), (self.lr_scheduler, scheduler, "scheduler")
            ):  # fmt: skip
                objects.check(one, saved, f"{checkpoint}, {name}", strict=True, way=_WAY)
            self.optimizer.load_state_dict(optimizer)
            self.lr_scheduler.load_state_dict(scheduler)
            return
        if self._loaded is not None:
            _log.warning("%s holds no optimizer: it starts afresh", checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = self._taken(checkpoint, "scaler")
        if scaler is None or self._scaler is None:
            super()._load_scaler(checkpoint)
        else:
            self._scaler.load_state_dict(scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        generators = self._taken(checkpoint, "rng")
        self._loaded = None  # nothing comes after this
        if generators is None:
            super()._load_rng_state(checkpoint)
        elif len(generators) == self.args.world_size:
            reinstate(generators[self.args.process_index])
        else:
            found = f"{len(generators)} processes, and now there are {self.args.world_size}"
            _log.warning("%s was saved by %s: random numbers will be others", checkpoint, found)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        self._finish()
        weights = self._taken(best, "model")
        self._loaded = None
        if weights is None:
            super()._load_best_model()
        else:
            self._load_weights(self._model, weights)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._finish()
        return super()._finalize_training(*args, **kwargs)

    # ours

    @property
    def _shrinks(self) -> bool:
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
        if not self._shrinks:
            if not self.shrink.is_default:
                found, do = "sharded training", "shrink that with shrinkpoint.train.dcp.install"
                raise PolicyError("Shrink", found=found, expected="the whole state in one process", do=do)
            _log.warning("sharded training: checkpoints are those of the stock Trainer (or of dcp.install)")
        elif args.push_to_hub and args.hub_strategy != HubStrategy.END and not is_adapted(self.model):
            found, do = f"hub_strategy={args.hub_strategy.value!r}", "push at the end: hub_strategy='end'"
            raise PolicyError("push_to_hub", found=found, expected="one that needs no weights in checkpoints", do=do)
        if self._shrinks:
            scheme = self._prepared().scheme  # what cannot be is said now
            if self.args.should_save and isinstance(scheme, Settling) and not scheme.leads:
                found, do = f"{scheme!r} with a group that another process leads", "make the process that saves lead"
                raise PolicyError("Shrink", found=found, expected="a scheme that writes where the Trainer saves", do=do)

    def _prepared(self) -> Trail:
        """What writes; another one, where `model_init` has made another model."""
        model = self._model
        if self._trail is None or self._trail_of is not model:
            self._forget()
            evaluation, asked = None, self.shrink.evaluate
            if asked is not None:
                evaluation = Evaluation(self, asked, self.shrink.batches)
            self._recorder = self.shrink.recorder(model, interval(self.args))
            higher = evaluation is not None and evaluation.higher
            self._trail, self._trail_of = self.shrink.trail(evaluation, higher, self._recorder), model
        return self._trail

    def _forget(self) -> None:
        """Hold neither the model of before nor what writes it."""
        if self._trail is not None:
            self._trail.close()
        self._trail, self._trail_of, self._recorder = None, None, None

    def _recorded(self) -> Gradients:
        self._prepared()
        assert self._recorder is not None
        return self._recorder

    @property
    def _takes_part(self) -> bool:
        """Whether this process writes, or is one of those that search a setting together."""
        if self.args.should_save:
            return True
        scheme = self._prepared().scheme
        return isinstance(scheme, Settling) and not scheme.leads

    def _write(self, parts: _Parts) -> None:
        writes = self.args.should_save
        extra = folders.about(parts.folder, parts.state) if writes else None
        self._prepared().save(
            parts.folder, parts.state, parts=parts.live, step=self.state.global_step, metrics=measured(self.state),
            extra=extra,
        )  # fmt: skip
        parts.state, parts.live = dict.fromkeys(parts.state), {}  # a copy is being written, if anything is
        self._unfinished = parts if writes else None
        if not self.shrink.background:
            self._finish()

    def _finish(self) -> None:
        """Once the last checkpoint is whole: delete what it makes superfluous."""
        parts, self._unfinished = self._unfinished, None
        if self._trail is not None:
            self._trail.wait()
        if parts is not None:
            best = self.state.best_model_checkpoint
            keep = {parts.folder} if best is None else {parts.folder, Path(best)}
            folders.sweep(parts.folder, parts.state)
            folders.rotate(parts.folder.parent, parts.limit, keep)

    def _chosen(self, resume: Any) -> Any:
        """What to resume from, the same on all processes."""
        if resume is None or resume is False or not self._shrinks:
            return resume
        if resume is not True:
            settle(resume)
            folders.examine(resume)
            return resume
        answer: list[Any] = [None]
        if self.args.process_index == 0:
            try:
                answer = [folders.to_resume(self.args.output_dir, optimizer=not self.args.save_only_model)]
            except Exception as error:
                answer = [error]
        broadcast_object_list(answer)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return True if answer[0] is None else answer[0]  # of none at all the Trainer says it

    def _taken(self, checkpoint: Any, name: str) -> Any:
        """A part of a checkpoint of ours, out of memory and for once; None where it has none."""
        if checkpoint is None or not self._shrinks or not is_checkpoint(checkpoint):
            return None
        if self._loaded is None or self._loaded[0] != str(checkpoint) or self._loaded[1].get(name) is _TAKEN:
            self._loaded = None  # taken twice, where a training begins again with smaller batches
            trail = self._prepared() if self._takes_part else Trail(threads=self.shrink.threads)  # holds no base, then
            self._loaded = str(checkpoint), trail.load(checkpoint).state
        state = self._loaded[1]
        part = state.get(name)
        if name in state:
            state[name] = _TAKEN
        return part

    def _load_weights(self, model: Any, weights: Mapping[str, Any]) -> None:
        self._issue_warnings_after_load(model.load_state_dict(weights, strict=False))

    def _save_small(self, parts: _Parts, output_dir: str, state_dict: Any) -> None:
        """Hand the weights over, and write what belongs beside them; where they are adapters, these too."""
        if is_adapted(self.model):
            super()._save(output_dir, state_dict)
            return
        model = self._model
        if self._takes_part:
            parts.add("model", model.state_dict() if state_dict is None else state_dict, model)
        if self.args.should_save:
            save_beside(self, model, output_dir)

    @contextmanager
    def _limit_of(self, parts: _Parts) -> Iterator[None]:
        """The arguments as the user passed them."""
        self.args.save_total_limit = parts.limit
        try:
            yield
        finally:
            self.args.save_total_limit = None
