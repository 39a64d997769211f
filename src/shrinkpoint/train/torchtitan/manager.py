"""torchtitan's checkpoint manager with `Writer` and `Reader` in place of torch's own."""

from __future__ import annotations

import copy
import logging
import re
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.storage import is_url
from shrinkpoint.store import Keep
from shrinkpoint.store.identify import find_checkpoints, is_checkpoint
from shrinkpoint.store.layout import BASES
from shrinkpoint.train.dcp.checkpoint_metadata import METADATA_FILE
from shrinkpoint.train.dcp.directory import latest_valid
from shrinkpoint.train.dcp.reader import Reader, StrictLoadPlanner
from shrinkpoint.train.dcp.retention import ShardRetention
from shrinkpoint.train.dcp.writer import Writer
from shrinkpoint.train.directory_run import DirectoryRun

_log = logging.getLogger("shrinkpoint")
_STEP_NAME = re.compile(r"step-([0-9]+)")


class TitanCheckpointManager(CheckpointManager):
    """Saves a torchtitan run by `Writer`, each checkpoint a delta against the one before, and restores it by `Reader`.

    `Trainer.Config(checkpoint=TitanCheckpointManager.Config(enable=True))`. All other options are those of torchtitan's
    `CheckpointManager`, which this class extends. Checkpoints in Hugging Face's format stay torchtitan's.

    A save that the storage refuses is logged as a warning, and the run goes on; the save of the last step raises.

    Attributes:
        scheme: scheme of the next saves; a `Scheme` that measures the loss can be set before training starts.

    Raises:
        PolicyError: an unknown scheme, a number out of range, or a folder that is a URL.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Options of torchtitan's manager, and three of `Writer`."""

        scheme: str = "lossless"  # Text of a scheme, such as "fisher(relative_error=0.3)"

        keyframe_every: int = 20  # Greatest number of checkpoints in a chain, its keyframe included

        threads: int | None = None
        """Native threads of this rank; None: every core, shared with the other ranks on this machine."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            Writer(scheme=self.scheme, keyframe_every=self.keyframe_every, threads=self.threads)  # refuses wrong ones

    save_future: Future[Any] | None

    def __init__(self, config: Config, **components: Any) -> None:
        own = copy.copy(config)
        own.keep_latest_k = 0  # torchtitan's thread would count what no save has completed
        super().__init__(own, **components)
        if not self.enable:
            return
        if is_url(self.folder):
            do = "save to a directory that all ranks share, and copy that to the bucket"
            raise PolicyError("checkpoint.folder", found=f"the URL {self.folder}", expected="a directory", do=do)
        self.keep_latest_k = config.keep_latest_k
        self.scheme: Any = config.scheme
        self._settled: set[frozenset[str]] = set()  # see `ShardRetention`
        self._options: dict[str, Any] = {"keyframe_every": config.keyframe_every, "threads": config.threads}

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a state dict; torchtitan's manager calls this.

        Raises:
            CheckpointException: the save failed, on all ranks.
            PolicyError: a scheme that measures the loss, with an asynchronous save.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        scheme = self.scheme
        model = None  # else only parameters could be lossy: torchtitan saves wq, wk and wv of a fused parameter
        if getattr(scheme, "evaluate", None) is not None:
            if async_mode != AsyncMode.DISABLED:
                found, do = f"{async_mode.value!r} with a scheme that measures the loss", 'set "disabled"'
                raise PolicyError("checkpoint.async_mode", found=found, expected="a model that waits", do=do)
            parts = self.states[MODEL].model
            model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
            own: dict[str, Any] = self.states[MODEL].cached_state_dict
            if any(state_dict[name] is not value for name, value in own.items()):  # weights in export_dtype
                _log.warning("weights in export_dtype are saved exactly: evaluate= measures the model's own")
                scheme = "lossless"
        keep = Keep(last=self.keep_latest_k) if self.keep_latest_k else None
        writer = Writer(
            scheme=scheme,
            group=self.pg,
            model=model,
            step=_step_of(Path(checkpoint_id).name),
            keep=keep,
            **self._options,
        )
        retention = ShardRetention(keep, self._run.plan, writer, self._settled)
        options: dict[str, Any] = {"checkpoint_id": checkpoint_id, "storage_writer": writer}
        if async_mode == AsyncMode.DISABLED:
            with retention.removing_failed(None):
                metadata = save(state_dict, **options)
            if enable_garbage_collection:  # which torchtitan turns off
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            retention.apply(None)
            return metadata
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            options |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
        result = async_save(state_dict, process_group=self.pg, **options)
        if isinstance(result, AsyncSaveResponse):
            done = retention.apply_after(result.upload_completion, self.pg)
            return replace(result, upload_completion=done)
        return retention.apply_after(result, self.pg)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a checkpoint into a state dict and into the model; torchtitan's manager calls this.

        Raises:
            NotFoundError: there is no checkpoint of ours.
            ChainError, FormatError: bytes are damaged or missing.
            MismatchError: the checkpoint does not fit.
            StorageError: reading failed.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        gather_or_raise(lambda: _check_own(checkpoint_id))
        do = "build the run as it was saved, list missing names in exclude_from_loading, or set load_step"
        planner, reader = StrictLoadPlanner(checkpoint_id, do), Reader(threads=self._options["threads"])
        try:
            load(state_dict, checkpoint_id=checkpoint_id, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            _raise_own(error)
        self.states[MODEL].load_state_dict(state_dict)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        try:
            return bool(super()._save(curr_step, last_step))
        except CheckpointException as error:
            if last_step:
                _raise_own(error)
            _warn_or_raise(error)
            return False

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        try:
            if future is not None:
                future.result()
        except CheckpointException as error:
            _warn_or_raise(error)

    def _close(self) -> None:
        if getattr(self, "save_future", None) is not None:
            self._wait_for_saving()
        super()._close()

    def _load(self, step: int = -1) -> bool:
        with suppress(OSError):
            Path(self.folder).mkdir(parents=True, exist_ok=True)  # or a rank without it would not join the others
        return bool(super()._load(step))

    def _find_load_step(self, folder: str = "") -> int:
        """Step of the newest checkpoint that is valid on all ranks; -1 if there is none.

        Raises:
            MismatchError: torchtitan's own manager wrote a later step, which a resume from ours would lose, or the name
                of the newest checkpoint has no step.
        """
        root = Path(folder or self.folder)
        directory = latest_valid(root)
        step = -1 if directory is None else _step_of(directory.name)
        if step is None:
            raise MismatchError(str(directory), found="another name", expected="step-N", do="move it elsewhere")

        def check() -> None:
            # By directory, the steps that a writer of torch.distributed.checkpoint has completed, ours or another
            steps = {file.parent: _step_of(file.parent.name) for file in root.glob(f"*/{METADATA_FILE}")}
            later = {path: number for path, number in steps.items() if number is not None and number > step}
            foreign = [path for path in later if not _is_own(path)]
            if foreign:
                latest = max(foreign, key=lambda path: later[path])
                found, do = "a checkpoint of torchtitan's own manager", "go on with that manager, or use another folder"
                raise MismatchError(str(latest), found=found, expected="a checkpoint of shrinkpoint", do=do)

        gather_or_raise(check)
        return step

    def _purge_stale_checkpoints(self) -> None:
        """Do nothing: all ranks delete, and write older checkpoints again, once a save is complete."""

    @property
    def _run(self) -> DirectoryRun:
        root = Path(self.folder).absolute()
        return DirectoryRun(root, lambda name: _step_of(name) if _is_own(root / name) else None)


def _step_of(name: str) -> int | None:
    """Step in the name of a checkpoint's directory; None for another name."""
    match = _STEP_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def _is_own(directory: Path) -> bool:
    """True if `Writer` has written into a directory, whether the checkpoint is complete or not."""
    return is_checkpoint(directory) or (directory / BASES).is_dir() or any(directory.glob("rank-*.safetensors"))


def _check_own(directory: str) -> None:
    if not is_checkpoint(directory):
        run = find_checkpoints(directory)
        do = (
            f"name one in it, such as {run[-1]}"
            if run
            else "load it with torchtitan's own manager, and save it with this one"
        )
        raise NotFoundError(directory, found="no checkpoint of shrinkpoint", do=do)


def _errors(error: CheckpointException) -> list[BaseException]:
    return [failure for _, (failure, _) in sorted(error.failures.items())]


def _raise_own(error: CheckpointException) -> NoReturn:
    """Raise the first error of ours in torch's exception, which `except Exception` misses; else that exception."""
    raise next((cause for cause in _errors(error) if isinstance(cause, ShrinkpointError)), error) from error


def _warn_or_raise(error: CheckpointException) -> None:
    """Log a warning if storage or memory failed on every rank that failed; other errors would come again."""
    causes = _errors(error)
    if not all(isinstance(cause, OSError | MemoryError) for cause in causes):
        _raise_own(error)
    _log.warning("the checkpoint is not saved, the run goes on: %s", causes[0])
