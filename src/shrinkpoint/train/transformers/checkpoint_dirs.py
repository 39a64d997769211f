"""Checkpoint directories of a Trainer, ours and the stock ones: listing, validation, the manifest's extra data,
rotation.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from shrinkpoint.errors import CorruptError, NotFoundError, ShrinkpointError, StorageError, TruncatedError
from shrinkpoint.storage import local_path
from shrinkpoint.store import directory as folders
from shrinkpoint.tensors.info import JSON
from shrinkpoint.train import latest

STATE_FILE = "trainer_state.json"
SENTINEL = "checkpoint-is-incomplete.txt"
"""What `enable_jit_checkpoint` puts into a directory until it is whole."""
WEIGHT_FILES = re.compile(r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
OPTIMIZER_FILES = re.compile(r"(optimizer|scheduler|scaler)\.pt")
RNG_FILES = re.compile(r"rng_state(_\d+)?\.pth")
_STEP_DIR = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_REQUIRED_PAIR = ("optimizer.pt", "scheduler.pt")
_RESUME_ADVICE = "resume from another checkpoint"
_NOT_FOUND_TEXT = "Can't find a valid checkpoint at"
"""The Trainer's own: who looks for them shall find them."""


class NoCheckpointError(NotFoundError, ValueError):
    """There is nothing to resume from: of that the Trainer itself makes a ValueError."""


class UnfinishedError(TruncatedError, ValueError):
    """A directory without what makes it a checkpoint; for the Trainer, too, that is a ValueError."""


def latest_valid(output_dir: str | Path, *, deep: bool = True, optimizer: bool = True) -> str | None:
    """The newest whole checkpoint of a run, for `resume_from_checkpoint`; what is passed over is logged as a warning.

    Of checkpoints that the stock Trainer wrote as much is checked as can be: that files are there, and complete.

    Args:
        output_dir: that of the `TrainingArguments`.
        deep: compare every byte with its digest, too.
        optimizer: pass over those with weights alone. (A checkpoint that a `ShrinkCallback` had not finished is one.)

    Returns:
        None: there are no checkpoints, or one alone, whose save was cut short: a run that was killed in its first save
        begins anew.

    Raises:
        NotFoundError: there are, and none is whole.
    """
    whole, errors = _search_latest(output_dir, deep=deep, optimizer=optimizer)
    if whole is None and not (len(errors) == 1 and isinstance(errors[0], UnfinishedError)):
        _raise_if_skipped(output_dir, errors)
    return whole


def find_resume_checkpoint(output_dir: str | Path, *, optimizer: bool) -> str | None:
    """As `newest`, for whoever wants to resume and not to begin: None where there are no checkpoints at all.

    Raises:
        NotFoundError: there are, and none is whole.
    """
    whole, errors = _search_latest(output_dir, deep=True, optimizer=optimizer)
    if whole is None:
        _raise_if_skipped(output_dir, errors)
    return whole


def _search_latest(output_dir: str | Path, *, deep: bool, optimizer: bool) -> tuple[str | None, list[Exception | None]]:
    """The newest valid checkpoint, and why the newer ones are not valid."""
    directory, skipped = latest.latest_valid(
        list_checkpoint_dirs(output_dir), check=lambda path: validate_checkpoint(path, deep=deep, optimizer=optimizer)
    )
    return None if directory is None else str(directory), [checkpoint.error for checkpoint in skipped]


def _raise_if_skipped(output_dir: str | Path, errors: Sequence[Exception | None]) -> None:
    """Raise where something was passed over."""
    if errors:
        found = f"{len(errors)} checkpoints, none of them whole; the newest: {errors[0]}"
        raise NoCheckpointError(str(output_dir), found=found, expected="a whole checkpoint", do="name one to try")


def list_checkpoint_dirs(output_dir: str | Path) -> list[Path]:
    """The checkpoint directories of a run, the one of the last step first."""
    root = local_path(output_dir, "output_dir")
    inside = list(root.iterdir()) if root.is_dir() else []
    steps = {path: match for path in inside if path.is_dir() and (match := _STEP_DIR.fullmatch(path.name))}
    return sorted(steps, key=lambda path: int(steps[path][1]), reverse=True)


def validate_checkpoint(directory: str | Path, *, deep: bool = False, optimizer: bool = False) -> None:
    """Make sure that a checkpoint is whole.

    Args:
        deep: read every byte.
        optimizer: there must be one.

    Raises:
        NotFoundError: there is none.
        ChainError, FormatError: files are missing, or not as they were written.
        StorageError: reading failed.
    """
    root = Path(directory)
    if not root.is_dir():
        raise NoCheckpointError(
            str(root), found=f"no such directory. {_NOT_FOUND_TEXT} {root}", expected="a checkpoint", do=_RESUME_ADVICE
        )
    if (root / SENTINEL).exists():
        raise UnfinishedError(
            str(root / SENTINEL), found="a save that was cut short", expected="a whole one", do=_RESUME_ADVICE
        )
    try:
        has_optimizer = _validate_own(root, deep) if folders.is_checkpoint(root) else _validate_stock(root, deep)
        if optimizer and not has_optimizer:
            found, do = "weights without an optimizer", "name it, to go on from its weights alone"
            raise NoCheckpointError(str(root), found=found, expected="all that training goes on with", do=do)
    except OSError as error:
        if isinstance(error, ShrinkpointError):
            raise
        raise StorageError(str(root), found=f"{type(error).__name__}: {error}", expected="files to read") from error


def manifest_extra(directory: Path, state: Mapping[str, Any]) -> JSON:
    """What a manifest says of the Trainer's own files beside it, which are all written by now.

    Args:
        state: what the folder's payload will hold.
    """
    own = () if "model" in state else _iter_weight_files(directory)  # else they are of an earlier save into this folder
    weights = {path.relative_to(directory).as_posix(): path.stat().st_size for path in own}
    holds: list[JSON] = [*sorted(state)]
    return {
        "framework": "transformers",
        "state": _digest(directory / STATE_FILE),
        "weights": dict(weights),
        "holds": holds,
    }


def remove_stale(directory: Path, state: Mapping[str, Any]) -> None:
    """Remove the stock files that lay in a folder before, and would now be those of another step.

    Args:
        state: what the folder's payload holds.
    """
    kinds = {"model": WEIGHT_FILES, "optimizer": OPTIMIZER_FILES, "rng": RNG_FILES}
    stale = [kind for name, kind in kinds.items() if name in state]
    for path in [*directory.iterdir()] if directory.is_dir() else []:
        if any(kind.fullmatch(path.name) for kind in stale):
            path.unlink(missing_ok=True)


def rotate(output_dir: str | Path, limit: int | None, keep: set[Path]) -> None:
    """As the Trainer does: delete the oldest directories, until `limit` are left.

    But never `keep`: the Trainer protects what it takes for the newest, and a broken one of a later step is not.
    """
    if limit is None or limit <= 0:
        return
    found = [Path(path) for path in sort_checkpoints(str(output_dir), use_mtime=True)]
    surplus = len(found) - max(limit, len(keep))
    for path in [path for path in found if path not in keep][: max(surplus, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _validate_own(root: Path, deep: bool) -> bool:
    """Whether it has an optimizer."""
    manifest = folders.verify_directory(root, deep=deep)
    _validate_trainer_state(root)
    extra = manifest.extra if isinstance(manifest.extra, dict) else {}
    if extra.get("state") != _digest(root / STATE_FILE):
        found, expected = "another file than was there when this was saved", "the one of this checkpoint"
        raise CorruptError(str(root / STATE_FILE), found=found, expected=expected, do=_RESUME_ADVICE)
    weights = extra.get("weights")
    for name, size in weights.items() if isinstance(weights, dict) else ():
        there = (root / name).stat().st_size if (root / name).is_file() else None
        if there != size:
            found = "no such file" if there is None else f"{there} bytes"
            raise TruncatedError(str(root / name), found=found, expected=f"{size} bytes", do=_RESUME_ADVICE)
        _validate_file(root / name, deep=deep)
    holds = extra.get("holds")
    return isinstance(holds, list) and "optimizer" in holds


def _validate_stock(root: Path, deep: bool) -> bool:
    """Whether it has an optimizer."""
    weights = [*_iter_weight_files(root)]
    sharded = any(path.is_dir() and path.name.startswith("pytorch_model_fsdp") for path in root.iterdir())
    if not weights and not sharded:
        found = f"neither a manifest nor weights. {_NOT_FOUND_TEXT} {root}"
        expected = "a checkpoint whose writing ended"
        raise UnfinishedError(str(root), found=found, expected=expected, do=_RESUME_ADVICE)
    _validate_trainer_state(root)
    there = [name for name in _REQUIRED_PAIR if (root / name).is_file()]
    missing = sorted({*_REQUIRED_PAIR} - {*there})
    if there and missing and not sharded:
        raise TruncatedError(
            str(root / missing[0]), found="no such file", expected=f"one beside {there[0]}", do=_RESUME_ADVICE
        )
    inside = [path for path in root.iterdir() if path.is_file()]
    others = [path for path in inside if any(kind.fullmatch(path.name) for kind in (OPTIMIZER_FILES, RNG_FILES))]
    for path in [*weights, *others]:
        _validate_file(path, deep=deep)
    return bool(there) or sharded


def _validate_trainer_state(root: Path) -> None:
    """The Trainer writes this last, and not atomically."""
    path = root / STATE_FILE
    if not path.is_file():
        raise TruncatedError(
            str(path), found="no such file", expected="what the Trainer writes last", do=_RESUME_ADVICE
        )
    try:
        if isinstance(json.loads(path.read_text("utf-8")), dict):
            return
    except ValueError:
        pass
    raise CorruptError(str(path), found="no JSON object", expected="the state of a Trainer", do=_RESUME_ADVICE)


def _validate_file(path: Path, *, deep: bool) -> None:
    """As far as the format itself tells."""
    try:
        if path.suffix == ".json":
            folder = path.parent
            for shard in {*json.loads(path.read_text("utf-8"))["weight_map"].values()}:
                if not (folder / shard).is_file():
                    raise TruncatedError(
                        str(folder / shard), found="no such file", expected="a shard", do=_RESUME_ADVICE
                    )
        elif path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt"):
                pass
        else:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip() if deep else None
            if bad is not None:
                raise CorruptError(
                    str(path), found=f"wrong bytes in {bad}", expected="those of its checksum", do=_RESUME_ADVICE
                )
    except (SafetensorError, zipfile.BadZipFile, ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, ShrinkpointError):
            raise
        found = f"{type(error).__name__}: {error}"
        raise CorruptError(str(path), found=found, expected="a whole file", do=_RESUME_ADVICE) from error


def _iter_weight_files(root: Path) -> Iterator[Path]:
    """The Trainer's own files of weights: of the model, and of adapters in directories of their own."""
    for path in sorted([*root.glob("*"), *root.glob("*/adapter_model.*")]):
        if path.is_file() and WEIGHT_FILES.fullmatch(path.name):
            yield path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
