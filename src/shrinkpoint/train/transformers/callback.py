"""Callbacks for the Trainer: one saves and restores optimizer, scheduler and random generators next to the stock
weights, one calls a gradient recorder at every optimizer step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.storage import local_path
from shrinkpoint.store import Keep, SaveReport
from shrinkpoint.store.identify import is_checkpoint
from shrinkpoint.store.retention import check_keep
from shrinkpoint.store.save_settings import OnSave, SaveSettings
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.train.background import require_single_process
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.newest_valid import NoCheckpointError
from shrinkpoint.train.save_decision import SaveDecisionPolicy, SaveSchedule, check_policy
from shrinkpoint.train.state_alignment import NAMES_KEY, collect_names
from shrinkpoint.train.state_dicts import check_storable, load_aligned
from shrinkpoint.train.transformers import checkpoint_dirs

_log = logging.getLogger("shrinkpoint")


class ShrinkCallback(TrainerCallback):
    """Saves optimizer, scheduler and random generators with the Trainer's checkpoints of weights, and restores them.

    For a Trainer that cannot be subclassed. With `save_only_model=True` the Trainer does not write these itself;
    without it, the callback deletes the Trainer's files once its own are complete. With `save_only_model=True`, pass a
    `save_total_limit` of at least 2: the Trainer deletes older checkpoints before it calls `on_save` of a callback.
    Resuming from a broken checkpoint is an error; `resume_from_checkpoint=latest_valid(output_dir)` skips broken ones.

    Args:
        scheme, keyframe_every, background, threads, max_bytes, on_save: see `SaveSettings`. The scheme, for the
            optimizer state, must need no model and no process group.
        resume_from_checkpoint: directory to restore from; None: the one that the Trainer resumes from.
        keep: rules by which this deletes checkpoints, once a later one is complete; then leave `save_total_limit` out.
            None: the Trainer deletes by that.

    Raises:
        PolicyError: an argument is out of range, or the scheme is not supported.
    """

    def __init__(
        self,
        *,
        scheme: str | Scheme = "lossless",
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
        max_bytes: int | None = None,
        resume_from_checkpoint: str | Path | None = None,
        on_save: OnSave | None = None,
        keep: Keep | None = None,
    ) -> None:
        self._keep = check_keep(keep)
        settings = SaveSettings(scheme, keyframe_every, background, threads, max_bytes, on_save)
        self._on_save = settings.on_save
        self._checkpointer = Checkpointer(**vars(replace(settings, on_save=self._saved)))
        require_single_process(self._checkpointer.scheme, "ShrinkCallback")
        if resume_from_checkpoint is not None:
            local_path(resume_from_checkpoint, "resume_from_checkpoint")
        self._resume_from = resume_from_checkpoint
        self._rng_states: Any = None  # restored, but not set yet

    def wait(self) -> SaveReport | None:
        """Wait until the last checkpoint is complete; its report, or None if nothing was saved yet.

        Raises:
            Exception: any error of the background save, once.
        """
        return self._checkpointer.wait()

    @property
    def stall_seconds(self) -> float:
        """Seconds for which the last save blocked training."""
        return self._checkpointer.stall_seconds

    def _saved(self, report: SaveReport) -> None:
        directory = Path(report.path)
        (directory / checkpoint_dirs.UNFINISHED).unlink(missing_ok=True)
        checkpoint_dirs.remove_stale(directory, ("optimizer", "rng"))
        if self._on_save is not None:
            self._on_save(report)

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check `output_dir` and `save_total_limit`.

        Raises:
            PolicyError: the first is a URL, or the second is given beside `keep`.
        """
        local_path(args.output_dir, "output_dir")
        checkpoint_dirs.check_keep(self._keep, args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore what the Trainer itself has not restored.

        Raises:
            StateError: what is to be saved cannot be stored.
            NotFoundError: the checkpoint that training resumes from holds nothing that this callback saved.
            MismatchError: it was saved at another step.
            ChainError, FormatError, StorageError: it is broken.
        """
        _check_arguments(args, state)
        if args.should_save:
            check_storable(_stateful_objects(kwargs))
        with suppress(Exception):  # an error of an earlier training is in the log already
            self._checkpointer.close()
        self._rng_states = None
        if state.global_step == 0:
            return
        directory = self._resume_dir(args, state)
        if directory is None:
            return
        checkpoint_dirs.validate_checkpoint(directory, optimizer=True)
        restored = self._checkpointer.load(directory)
        if restored.step != state.global_step:
            found, expected = f"step {restored.step}", f"{state.global_step}, at which training resumes"
            do = "pass resume_from_checkpoint= here, too"
            raise MismatchError(str(directory), found=found, expected=expected, do=do)
        objects = _stateful_objects(kwargs)
        for name in objects.keys() - restored.state.keys():
            _log.warning("%s holds no %s: it starts afresh", directory, name)
        saved = {name: obj for name, obj in objects.items() if name in restored.state}
        alternative = "or begin anew from the weights alone"
        load_aligned(saved, restored.state, str(directory), model=kwargs.get("model"), alternative=alternative)
        self._rng_states = checkpoint_dirs.select_rng_state(restored.state["rng"], args, directory)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the random generators, if training resumes at the start of an epoch, before its order is drawn.

        In the middle of an epoch, `on_step_begin` sets them.
        """
        if args.ignore_data_skip or float(state.epoch or 0).is_integer():
            self._restore_rng()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the random generators, if training resumes within an epoch, after the batches that were skipped."""
        self._restore_rng()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the previous save, before the Trainer saves and deletes older checkpoints; mark the first one.

        Raises:
            Exception: any error of the background save.
        """
        if control.should_save or control.should_evaluate:  # save_strategy="best" decides after an evaluation
            self._checkpointer.wait()
        if control.should_save and args.should_save and args.save_only_model:
            checkpoint_dirs.mark_first_save(args.output_dir, state.global_step)

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save next to the weights. All processes call this; the writing ones gather the generators of all."""
        rng_states = gather_object([get_rng_state()])
        if not args.should_save:
            return
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        objects = _stateful_objects(kwargs)
        states = {name: obj.state_dict() for name, obj in objects.items()} | {"rng": rng_states}
        if names := collect_names({"model": kwargs.get("model"), **objects}):
            states[NAMES_KEY] = names
        extra = checkpoint_dirs.manifest_extra(directory, states)
        checkpoint_dirs.retain(self._checkpointer, self._keep, args, state)
        metrics = checkpoint_dirs.eval_metrics(state)
        self._checkpointer.save(
            directory, states, objects=objects, step=state.global_step, metrics=metrics, extra=extra
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the last save, and free the memory.

        Raises:
            Exception: any error of the background save.
        """
        self._checkpointer.close()

    def _resume_dir(self, args: Any, state: Any) -> Path | None:
        """The directory that training resumes from; None if the Trainer has restored everything itself."""
        default = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        candidates = (self._resume_from, _trainers_resume_dir(), args.resume_from_checkpoint)
        named = [Path(place) for place in candidates if isinstance(place, str | Path) and Path(place).is_dir()]
        directory = named[0] if named else default
        if is_checkpoint(directory):
            return directory
        if (directory / "optimizer.pt").is_file():
            return None
        found, expected = "no optimizer that was saved by ShrinkCallback", "a checkpoint with an optimizer"
        do = "resume from latest_valid(output_dir)"
        raise NoCheckpointError(str(directory), found=found, expected=expected, do=do)

    def _restore_rng(self) -> None:
        rng_states, self._rng_states = self._rng_states, None
        if rng_states is not None:
            set_rng_state(rng_states)


def _trainers_resume_dir() -> str | Path | None:
    """The directory that the Trainer which calls this resumes from; None if it is not found.

    A Trainer does not tell its callbacks: the directory is an argument of its methods alone.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        resume = frame.f_locals.get("resume_from_checkpoint")
        if isinstance(frame.f_locals.get("self"), Trainer) and isinstance(resume, str | Path):
            return resume
        frame = frame.f_back
    return None


class BeginCallback(TrainerCallback):
    """Calls a function when training begins.

    Args:
        check: it may raise.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._check()


class SavePolicyCallback(TrainerCallback):
    """Lets a Trainer save when a policy says so, besides what its arguments say; after SIGTERM it ends by itself.

    Args:
        policy: asked after every step, on all processes, with the metrics of the last evaluation.

    Raises:
        PolicyError: it is no policy.
    """

    def __init__(self, policy: SaveDecisionPolicy) -> None:
        self._policy = check_policy(policy)
        self._schedule: SaveSchedule | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to watch."""
        self.on_train_end(args, state, control)
        self._schedule = SaveSchedule(self._policy, group=dist.group.WORLD if args.world_size > 1 else None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask the policy.

        Raises:
            Exception: whatever the policy raises, on all processes.
        """
        assert self._schedule is not None
        metrics: dict[str, Any] = next((entry for entry in reversed(state.log_history) if "eval_runtime" in entry), {})
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        control.should_save |= self._schedule.should_save(state.global_step, metrics=numbers)
        control.should_training_stop |= self._schedule.reached_preemption

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a save that the arguments asked for."""
        if self._schedule is not None:
            self._schedule.note_saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let SIGTERM do what it did before."""
        if self._schedule is not None:
            self._schedule.close()


class GradientCallback(TrainerCallback):
    """Calls a gradient recorder at every optimizer step, when gradients are accumulated, clipped and not yet cleared.

    Args:
        make_recorder: returns the recorder; called once for every training.
    """

    def __init__(self, make_recorder: Callable[[], GradientRecorder]) -> None:
        self._make_recorder = make_recorder
        self._recorder: GradientRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the recorder, and set its step to the one that training starts at."""
        self._recorder = self._make_recorder()
        self._recorder.set_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Release the recorder, and with it the model: the next training may use another one."""
        self._recorder = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the gradients."""
        if self._recorder is not None:
            self._recorder.after_backward()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        if self._recorder is not None:
            self._recorder.before_zero_grad()


def _check_arguments(args: Any, state: Any) -> None:
    for name, is_unsupported, advice in (
        ("enable_jit_checkpoint", args.enable_jit_checkpoint, "use ShrinkTrainer: callbacks are not called for those"),
        ("hyperparameter_search", state.is_hyper_param_search, "use ShrinkTrainer: each trial has its own directory"),
        ("fsdp or deepspeed", bool(args.fsdp or args.deepspeed), "save shards with shrinkpoint.train.dcp.Manager"),
    ):
        if is_unsupported:
            found = "a setting that ShrinkCallback does not support"
            raise PolicyError(name, found=found, expected="another setting", do=advice)
    if not args.save_only_model:
        _log.info("the Trainer writes its optimizer, too, which is then deleted: save_only_model=True saves this time")
    elif args.save_total_limit == 1:
        _log.warning("save_total_limit=1: the Trainer deletes the only checkpoint before the next one is complete")


def _stateful_objects(kwargs: dict[str, Any]) -> dict[str, Any]:
    optimizer = kwargs["optimizer"]
    scaler = getattr(optimizer, "scaler", None)
    objects = {"optimizer": optimizer, "scheduler": kwargs["lr_scheduler"], "scaler": scaler}
    return {name: obj for name, obj in objects.items() if obj is not None}
