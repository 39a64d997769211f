"""Callbacks for the Trainer: one saves and restores optimizer, scheduler and random generators next to the stock
weights, one calls a gradient recorder at every optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.storage import local_path
from shrinkpoint.store import SaveReport
from shrinkpoint.store.directory import is_checkpoint
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.train import state_dicts
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.planning import require_single_process
from shrinkpoint.train.transformers import checkpoint_dirs

_log = logging.getLogger("shrinkpoint")


class ShrinkCallback(TrainerCallback):
    """Saves optimizer, scheduler and random generators with the Trainer's checkpoints of weights, and restores them.

    For a Trainer that cannot be subclassed; with `save_only_model=True`, and with `save_total_limit` of 2 at least: the
    Trainer deletes older checkpoints before a callback hears of the new one. A broken checkpoint is an error; pass
    `resume_from_checkpoint=newest(output_dir)`, which passes over those.

    Args:
        scheme: for the optimizer: "lossless", or a scheme that needs no model and no group of replicas.
        keyframe_every: each chain has at most this many checkpoints; None: no bound.
        background: training goes on while a checkpoint is written.
        threads: native threads for coding; None: every core.
        resume_from_checkpoint: where to go on from, if that is no directory of `output_dir`.

    Raises:
        PolicyError: settings that make no sense.
    """

    def __init__(
        self,
        *,
        scheme: str | Scheme = "lossless",
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
        resume_from_checkpoint: str | Path | None = None,
    ) -> None:
        self._checkpointer = Checkpointer(
            scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads
        )
        require_single_process(self._checkpointer.scheme, "ShrinkCallback")
        if resume_from_checkpoint is not None:
            local_path(resume_from_checkpoint, "resume_from_checkpoint")
        self._resume_from = resume_from_checkpoint
        self._rng_states: Any = None  # to be set where training goes on

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look where the Trainer will save.

        Raises:
            PolicyError: a URL.
        """
        local_path(args.output_dir, "output_dir")

    def wait(self) -> SaveReport | None:
        """Wait until the last checkpoint is whole; what it did, or None if there is none yet.

        Raises:
            whatever writing it raised in the background, once.
        """
        return self._checkpointer.wait()

    @property
    def stall_seconds(self) -> float:
        """Seconds for which writing the last checkpoint held up training."""
        return self._checkpointer.stall_seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore what the Trainer has not.

        Raises:
            NotFoundError: training goes on from a checkpoint without what is saved here.
            MismatchError: the checkpoint is one of another step.
            ChainError, FormatError, StorageError: it is broken.
        """
        _check_arguments(args, state)
        with suppress(Exception):  # of a training that an error ended: it is in the log, and no matter of this one
            self._checkpointer.close()
        self._rng_states = None
        if state.global_step == 0:
            return
        folder = self._resume_dir(args, state)
        if folder is None:
            return
        checkpoint_dirs.validate_checkpoint(folder)
        loaded = self._checkpointer.load(folder)
        if loaded.step != state.global_step:
            found, expected = f"step {loaded.step}", f"{state.global_step}, where training goes on"
            raise MismatchError(
                str(folder), found=found, expected=expected, do="pass resume_from_checkpoint= here, too"
            )
        stateful = _stateful_objects(kwargs)
        for name in stateful.keys() & loaded.state.keys():
            way = "or begin anew from the weights alone"
            state_dicts.check_state_dicts(
                stateful[name], loaded.state[name], f"{folder}, {name}", strict=True, alternative=way
            )
        for name, one in stateful.items():
            if name in loaded.state:
                one.load_state_dict(loaded.state[name])
            else:
                _log.warning("%s holds no %s: it starts afresh", folder, name)
        self._select_rng_states(loaded.state["rng"], args, folder)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """At the beginning of an epoch generators belong to what draws its order, too; else see `on_step_begin`."""
        if args.ignore_data_skip or float(state.epoch or 0).is_integer():
            self._restore_rng()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """In the midst of one, only when the batches before are skipped, which draws from them."""
        self._restore_rng()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait before the Trainer saves, and deletes what the checkpoint before was to replace.

        Raises:
            whatever writing that raised in the background.
        """
        if control.should_save or control.should_evaluate:  # of the best ones it saves, it knows after evaluating
            self._checkpointer.wait()

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save beside the weights. All processes come here; those that write get the generators of all."""
        generators = gather_object([get_rng_state()])
        if not args.should_save:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        stateful = _stateful_objects(kwargs)
        saved = {name: one.state_dict() for name, one in stateful.items()} | {"rng": generators}
        self._checkpointer.save(
            folder, saved, objects=stateful, step=state.global_step, extra=checkpoint_dirs.manifest_extra(folder, saved)
        )
        checkpoint_dirs.remove_stale(folder, saved)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for what is being written.

        Raises:
            whatever writing it raised.
        """
        self._checkpointer.close()

    def _resume_dir(self, args: Any, state: Any) -> Path | None:
        """The directory that training goes on from; None: the Trainer has restored all of it."""
        own = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        named = self._resume_from if self._resume_from is not None else args.resume_from_checkpoint
        folder = Path(named) if isinstance(named, str | Path) and Path(named).is_dir() else own
        if is_checkpoint(folder):
            return folder
        if (folder / "optimizer.pt").is_file():
            return None
        found, do = "no optimizer that was saved here", "resume from newest(output_dir)"
        raise checkpoint_dirs.NoCheckpointError(str(folder), found=found, expected="what training goes on with", do=do)

    def _select_rng_states(self, rng_states: Any, args: Any, directory: Path) -> None:
        if len(rng_states) == args.world_size:
            self._rng_states = rng_states[args.process_index]
        else:
            found = f"{len(rng_states)} processes, and now there are {args.world_size}"
            _log.warning("%s was saved by %s: random numbers will be others", directory, found)

    def _restore_rng(self) -> None:
        generators, self._rng_states = self._rng_states, None
        if generators is not None:
            set_rng_state(generators)


def _check_arguments(args: Any, state: Any) -> None:
    for name, wrong, do in (
        ("save_only_model", not args.save_only_model, "pass save_only_model=True, or optimizers are saved twice"),
        ("enable_jit_checkpoint", args.enable_jit_checkpoint, "use ShrinkTrainer: callbacks do not hear of those"),
        ("hyperparameter_search", state.is_hyper_param_search, "use ShrinkTrainer: directories are the trial's"),
        ("fsdp or deepspeed", bool(args.fsdp or args.deepspeed), "use shrinkpoint.train.dcp.install"),
    ):
        if wrong:
            raise PolicyError(name, found="what ShrinkCallback cannot serve", expected="something else", do=do)
    if args.save_total_limit == 1:
        _log.warning("save_total_limit=1: the Trainer deletes the only checkpoint before the next one is whole")


def _stateful_objects(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What is saved and restored, by name."""
    optimizer = kwargs["optimizer"]
    found = {"optimizer": optimizer, "scheduler": kwargs["lr_scheduler"], "scaler": getattr(optimizer, "scaler", None)}
    return {name: one for name, one in found.items() if one is not None}


class GradientCallback(TrainerCallback):
    """Calls a recorder at every optimizer step: gradients are accumulated and clipped by then, and not yet cleared.

    Args:
        make_recorder: gives the recorder, anew for every training.
    """

    def __init__(self, make_recorder: Callable[[], GradientRecorder]) -> None:
        self._make_recorder = make_recorder
        self._recorder: GradientRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on from the step that training goes on from."""
        self._recorder = self._make_recorder()
        self._recorder.set_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hold it no longer, nor the model in it, which the next training may make anew."""
        self._recorder = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record."""
        if self._recorder is not None:
            self._recorder.after_backward()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count."""
        if self._recorder is not None:
            self._recorder.before_zero_grad()
