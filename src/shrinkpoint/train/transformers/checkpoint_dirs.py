"""Checkpoint directories of a Trainer, ours and the stock ones: listing, validation, the Trainer's own files."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import is_peft_available

from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError, StorageError, TruncatedError, error_text
from shrinkpoint.storage import local_path
from shrinkpoint.storage.zip_records import check_zip_records
from shrinkpoint.store import Keep
from shrinkpoint.store.directory import verify_directory
from shrinkpoint.store.identify import find_checkpoints, is_checkpoint, refuse_store
from shrinkpoint.tensors.info import JSON
from shrinkpoint.train import newest_valid
from shrinkpoint.train.checkpointer import Checkpointer, wait_for_writes
from shrinkpoint.train.directory_run import DirectoryRun
from shrinkpoint.train.newest_valid import NoCheckpointError

STATE_FILE = "trainer_state.json"
SENTINEL = "checkpoint-is-incomplete.txt"
"""The file that `enable_jit_checkpoint` keeps in a directory until the checkpoint is complete."""
UNFINISHED = "optimizer-is-incomplete.txt"
"""The file that `ShrinkCallback` keeps in the first directory of a run until its own part is there too."""
WEIGHT_FILES = re.compile(r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
OPTIMIZER_FILES = re.compile(r"(optimizer|scheduler|scaler)\.pt")
RNG_FILES = re.compile(r"rng_state(_\d+)?\.pth")
_SPEED_SUFFIXES = ("_runtime", "_per_second", "_preparation_time")
_STEP_DIR = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_REQUIRED_PAIR = ("optimizer.pt", "scheduler.pt")
_RESUME_ADVICE = "resume from another checkpoint"
_NOT_FOUND_TEXT = "Can't find a valid checkpoint at"  # The Trainer's own message, for programs that look for it
_DAMAGE_ERRORS = (
    AttributeError,
    EOFError,
    KeyError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)
"""Exceptions that JSON, safetensors and zip raise for a file that is cut or damaged."""
_log = logging.getLogger("shrinkpoint")
ErrorT = TypeVar("ErrorT", bound=ShrinkpointError)


class UnfinishedError(TruncatedError, ValueError):
    """A directory whose save was cut short. Also a ValueError, which the Trainer itself raises for this."""


def latest_valid(output_dir: str | Path, *, deep: bool = True, optimizer: bool = True) -> str | None:
    """Return the newest valid checkpoint of a run, for `resume_from_checkpoint`; a warning is logged for each skipped.

    Checkpoints of the stock Trainer have no digests: their files must exist and be complete.

    Args:
        output_dir: that of the `TrainingArguments`.
        deep: also compare every byte with its digest.
        optimizer: skip checkpoints without an optimizer, such as those that a `ShrinkCallback` did not finish.

    Returns:
        None if there are no checkpoints, or only one and its save was cut short: a run that was killed during its first
        save starts anew.

    Raises:
        NotFoundError: there are checkpoints, and none is valid.
        MismatchError: a `CheckpointManager` has saved in the directory.
    """
    return _find_valid(output_dir, deep=deep, optimizer=optimizer, may_begin_anew=True)


def directories_of(output_dir: str | Path) -> DirectoryRun:
    """The checkpoint directories of a Trainer; their names end with the step."""
    return DirectoryRun(
        local_path(output_dir, "output_dir"),
        lambda name: int(match[1]) if (match := _STEP_DIR.fullmatch(name)) else None,
    )


def find_resume_checkpoint(output_dir: str | Path, *, optimizer: bool) -> str | None:
    """The newest valid checkpoint of a run that must be resumed; None if there are no checkpoints at all.

    Args:
        optimizer: skip checkpoints without an optimizer.

    Raises:
        NotFoundError: there are checkpoints, and none is valid.
    """
    return _find_valid(output_dir, deep=True, optimizer=optimizer, may_begin_anew=False)


def _find_valid(output_dir: str | Path, *, deep: bool, optimizer: bool, may_begin_anew: bool) -> str | None:
    run = directories_of(output_dir)
    for path in run.numbers():
        wait_for_writes(path)
    if not run.numbers():
        refuse_store(run.root)
    directory, skipped = newest_valid.latest_valid(
        run.newest_first(), check=lambda path: validate_checkpoint(path, deep=deep, optimizer=optimizer)
    )
    if directory is not None:
        return str(directory)
    is_first_save = len(skipped) == 1 and isinstance(skipped[0].error, UnfinishedError)
    if skipped and not (may_begin_anew and is_first_save):
        found = f"{len(skipped)} checkpoints, none of them valid; the newest: {skipped[0].error}"
        raise NoCheckpointError(str(output_dir), found=found, expected="a valid checkpoint", do="pass one to try")
    return None


def validate_checkpoint(directory: str | Path, *, deep: bool = False, optimizer: bool = False) -> None:
    """Raise unless a checkpoint is complete and undamaged.

    Args:
        deep: read every byte.
        optimizer: require an optimizer state.

    Raises:
        NotFoundError: there is no checkpoint, or it has no optimizer state.
        ChainError, FormatError: files are missing or damaged.
        StorageError: reading failed.
    """
    root = Path(directory)
    if not root.is_dir():
        raise _error(NoCheckpointError, root, f"no such directory. {_NOT_FOUND_TEXT} {root}", "a checkpoint")
    if (root / SENTINEL).exists():
        raise _error(UnfinishedError, root / SENTINEL, "a save that was cut short", "a whole one")
    if optimizer and (root / UNFINISHED).exists() and not is_checkpoint(root):
        raise _error(UnfinishedError, root, "the first save of a run, which was cut short", "one with an optimizer")
    try:
        has_optimizer = _validate_own(root, deep) if is_checkpoint(root) else _validate_stock(root, deep)
        if optimizer and not has_optimizer:
            found, do = "weights without an optimizer", "pass its path to resume from the weights alone"
            raise NoCheckpointError(str(root), found=found, expected="weights and the optimizer", do=do)
    except OSError as error:
        if isinstance(error, ShrinkpointError):
            raise
        do = "check the disk and the permissions"
        raise StorageError(str(root), found=error_text(error), expected="files to read", do=do) from error


def manifest_extra(directory: Path, state: Mapping[str, Any]) -> JSON:
    """Describe the Trainer's own files, which must all be written already, for the manifest's `extra`.

    Args:
        state: what the payload in the directory will hold.

    Returns:
        "state": SHA-256 of `trainer_state.json`; "weights": file name -> bytes; "holds": the names in `state`.
    """
    # Where the payload holds the model, weight files are left from an earlier save into the same directory.
    weight_files = () if "model" in state else _iter_weight_files(directory)
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in weight_files}
    names: list[JSON] = [*sorted(state)]
    state_digest = _digest(directory / STATE_FILE) if (directory / STATE_FILE).is_file() else None
    return {"framework": "transformers", "state": state_digest, "weights": dict(sizes), "holds": names}


def mark_first_save(output_dir: str | Path, step: int) -> None:
    """Mark the directory of a step as unfinished if it will be the first one of its run: a kill leaves the mark."""
    run = directories_of(output_dir)
    if not run.numbers():
        directory = run.root / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / UNFINISHED).write_text("The optimizer of this checkpoint is not saved yet.\n")


def remove_stale(directory: Path, saved: Collection[str]) -> None:
    """Remove stock files that an earlier save left in the directory and that the payload replaces.

    Args:
        saved: names of what the payload in the directory holds.
    """
    patterns = {"model": WEIGHT_FILES, "optimizer": OPTIMIZER_FILES, "rng": RNG_FILES}
    stale = [pattern for name, pattern in patterns.items() if name in saved]
    for path in [*directory.iterdir()] if directory.is_dir() else []:
        if any(pattern.fullmatch(path.name) for pattern in stale):
            path.unlink(missing_ok=True)


def retain(checkpointer: Checkpointer, keep: Keep | None, args: Any, state: Any) -> None:
    """Tell a checkpointer which checkpoints of a Trainer stay.

    Args:
        keep: the rules of the settings, by which the checkpointer deletes; None: the Trainer deletes by its own.
        args: the `TrainingArguments`.
        state: the `TrainerState`.
    """
    if keep is not None:
        best = state.best_model_checkpoint
        checkpointer.retain(keep, deletes=True, protected=() if best is None else (Path(best).absolute(),))
        return
    limit = args.save_total_limit
    if limit is None or limit <= 0:
        checkpointer.retain(None)
        return
    metric = args.metric_for_best_model or ("loss" if args.load_best_model_at_end else None)
    if metric is None:
        checkpointer.retain(Keep(last=limit))
        return
    mode: Any = "max" if args.greater_is_better else "min"
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    checkpointer.retain(Keep(last=limit, best=1, metric=metric, mode=mode))


def eval_metrics(state: Any) -> dict[str, float]:
    """The metrics that a `TrainerState` has of the current step, without timings."""
    entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    metrics = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not name.endswith(_SPEED_SUFFIXES)
    }


def check_keep(keep: Keep | None, args: Any) -> None:
    """Check that one thing says which checkpoints of a Trainer stay.

    Raises:
        PolicyError: both the settings and the `TrainingArguments` do.
    """
    if keep is not None and args.save_total_limit:
        found = f"keep={keep!r}, and save_total_limit={args.save_total_limit} of the TrainingArguments"
        do = "leave save_total_limit out"
        raise PolicyError("keep", found=found, expected="one of them", do=do)


def rotate(output_dir: str | Path, limit: int | None, keep: set[Path]) -> None:
    """Delete the oldest checkpoint directories until `limit` remain; by the order of saving, and not by clocks.

    Args:
        limit: None or 0: delete nothing.
        keep: never deleted. The Trainer itself protects the directory with the latest step, which may be broken.
    """
    if limit is None or limit <= 0:
        return
    directories = directories_of(output_dir).newest_first()[::-1]
    surplus = len(directories) - max(limit, len(keep))
    for path in [path for path in directories if path not in keep][: max(surplus, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def select_rng_state(rng_states: Sequence[Any], args: Any, directory: str | Path) -> Any:
    """The states of this process's random generators; None, with a warning, if the number of processes has changed.

    Args:
        rng_states: by process.
        args: the `TrainingArguments`.
    """
    if len(rng_states) == args.world_size:
        return rng_states[args.process_index]
    text = "%s was saved by %d processes, and now there are %d: random numbers will differ"
    _log.warning(text, directory, len(rng_states), args.world_size)
    return None


def _validate_own(root: Path, deep: bool) -> bool:
    """Validate a checkpoint with a manifest; return whether it has an optimizer."""
    manifest = verify_directory(root, deep=deep)
    _validate_trainer_state(root)
    extra = manifest.extra if isinstance(manifest.extra, dict) else {}
    if extra.get("state") != _digest(root / STATE_FILE):
        found = "another file than the one that was there at the save"
        raise _error(CorruptError, root / STATE_FILE, found, "the one of this checkpoint")
    sizes = extra.get("weights")
    for name, size in sizes.items() if isinstance(sizes, dict) else ():
        actual_size = (root / name).stat().st_size if (root / name).is_file() else None
        if actual_size != size:
            found = "no such file" if actual_size is None else f"{actual_size} bytes"
            raise _error(TruncatedError, root / name, found, f"{size} bytes")
        _validate_file(root / name, deep=deep)
    names = extra.get("holds")
    has_optimizer = isinstance(names, list) and "optimizer" in names and not manifest.weights_only
    return has_optimizer or (root / _REQUIRED_PAIR[0]).is_file()


def _validate_stock(root: Path, deep: bool) -> bool:
    """Validate a checkpoint of the stock Trainer; return whether it has an optimizer."""
    weight_files = [*_iter_weight_files(root)]
    is_sharded = any(path.is_dir() and path.name.startswith("pytorch_model_fsdp") for path in root.iterdir())
    if not weight_files and not is_sharded:
        run = find_checkpoints(root)
        found = f"no checkpoint, but {run[-1].name} in it" if run else "neither a manifest nor weights"
        found, expected = f"{found}. {_NOT_FOUND_TEXT} {root}", "a checkpoint whose writing ended"
        raise _error(UnfinishedError, root, found, expected)
    _validate_trainer_state(root)
    present = [name for name in _REQUIRED_PAIR if (root / name).is_file()]
    missing = sorted({*_REQUIRED_PAIR} - {*present})
    if present and missing and not is_sharded:
        raise _error(TruncatedError, root / missing[0], "no such file", f"one beside {present[0]}")
    for path in root.iterdir():
        if path.is_file() and (OPTIMIZER_FILES.fullmatch(path.name) or RNG_FILES.fullmatch(path.name)):
            weight_files.append(path)
    for path in weight_files:
        _validate_file(path, deep=deep)
    return bool(present) or is_sharded


def _validate_trainer_state(root: Path) -> None:
    """Raise unless `trainer_state.json`, which the Trainer writes last and not atomically, is complete."""
    path = root / STATE_FILE
    if not path.is_file():
        raise _error(TruncatedError, path, "no such file", "what the Trainer writes last")
    try:
        if isinstance(json.loads(path.read_text("utf-8")), dict):
            return
    except ValueError:
        pass
    raise _error(CorruptError, path, "no JSON object", "the state of a Trainer")


def _validate_file(path: Path, *, deep: bool) -> None:
    """Raise unless a file is complete, as far as its format tells."""
    try:
        if path.suffix == ".json":
            for shard in {*json.loads(path.read_text("utf-8"))["weight_map"].values()}:
                shard_path = path.parent / shard
                if not shard_path.is_file():
                    raise _error(TruncatedError, shard_path, "no such file", "a shard")
        elif path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt"):
                pass
        elif deep:
            check_zip_records(path)
        else:
            with zipfile.ZipFile(path):
                pass
    except _DAMAGE_ERRORS as error:
        if isinstance(error, ShrinkpointError):
            raise
        raise _error(CorruptError, path, error_text(error), "a whole file") from error


def _error(kind: type[ErrorT], path: Path, found: str, expected: str) -> ErrorT:
    return kind(str(path), found=found, expected=expected, do=_RESUME_ADVICE)


def _iter_weight_files(root: Path) -> Iterator[Path]:
    for path in sorted([*root.glob("*"), *root.glob("*/*")]):
        if path.is_file() and WEIGHT_FILES.fullmatch(path.name):
            yield path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save_auxiliary_files(trainer: Any, model: Any, output_dir: str) -> None:
    """Write configuration, tokenizer and training arguments, as `Trainer._save` does next to the weights."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if isinstance(model, PreTrainedModel):
        # Write what `save_pretrained` writes without the weights
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        if model.is_remote_code():
            custom_object_save(model, output_dir, config=model.config)
        model.config.save_pretrained(output_dir)
        if model.can_generate():
            model.generation_config.save_pretrained(output_dir)
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(output_dir)
    torch.save(trainer.args, Path(output_dir) / TRAINING_ARGS_NAME)


def has_adapters(model: Any) -> bool:
    """True if only adapters of a model are saved (PEFT)."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return True
    if not is_peft_available():
        return False
    from peft import PeftModel  # type: ignore[import-not-found,unused-ignore]

    return isinstance(model, PeftModel)
