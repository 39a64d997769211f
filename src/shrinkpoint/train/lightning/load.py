"""Loads a module from a checkpoint, and finds the newest checkpoint of a directory, without a Trainer."""

from __future__ import annotations

import warnings
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.saving import _load_state, load_hparams_from_tags_csv, load_hparams_from_yaml
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from torch import Tensor

from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.storage import hide_credentials
from shrinkpoint.store.directory import newest_first, read_directory_manifest
from shrinkpoint.store.identify import is_checkpoint, refuse_store
from shrinkpoint.tensors.wrappers import match_state_keys
from shrinkpoint.train import newest_valid
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.lightning.io import is_own_directory, load_checkpoint_dict, place_or_none

LightningT = TypeVar("LightningT", pl.LightningModule, pl.LightningDataModule)


def load_from_checkpoint(
    cls: type[LightningT],
    checkpoint_path: _PATH,
    map_location: Any = None,
    hparams_file: _PATH | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> LightningT:
    """Load a module from a ShrinkIO checkpoint; anything else is passed to `cls.load_from_checkpoint`.

    Args:
        cls: a LightningModule or LightningDataModule.
        checkpoint_path: of the checkpoint.
        map_location: device of the tensors and the module; None: the CPU for ShrinkIO checkpoints.
        hparams_file: as for Lightning.
        strict: as for Lightning.
        weights_only: for stock files; ShrinkIO checkpoints are never unpickled.
        kwargs: arguments of `cls` that replace the saved ones.

    Raises:
        NotFoundError, ChainError, FormatError, StorageError: the checkpoint cannot be read.
        Exception: any error of Lightning, if the module does not fit.
    """
    directory = place_or_none(checkpoint_path)
    if directory is None or not is_own_directory(directory):
        stock_module: LightningT = cls.load_from_checkpoint(
            checkpoint_path,
            map_location=map_location,
            hparams_file=hparams_file,
            weights_only=weights_only,
            **({} if strict is None else {"strict": strict}),
            **kwargs,
        )
        return stock_module
    checkpoint = _pl_migrate_checkpoint(load_checkpoint_dict(Checkpointer(), directory, map_location), directory)
    if hparams_file is not None:
        extension = str(hparams_file).rsplit(".", 1)[-1].lower()
        if extension not in ("csv", "yml", "yaml"):
            do, expected = "pass the file of hyperparameters, or leave hparams_file out", "a .csv, .yml or .yaml file"
            raise PolicyError("hparams_file", found=str(hparams_file), expected=expected, do=do)
        read: Any = load_hparams_from_tags_csv if extension == "csv" else load_hparams_from_yaml
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = read(hparams_file)
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    if not issubclass(cls, pl.LightningModule):
        return _load_state(cls, checkpoint, **kwargs)
    module = _load_module(cls, checkpoint, strict, kwargs)
    tensors = (value for value in checkpoint["state_dict"].values() if isinstance(value, Tensor))
    return module.to(next(tensors, torch.tensor(0)).device)


def _load_module(
    cls: type[pl.LightningModule], checkpoint: dict[str, Any], strict: bool | None, kwargs: dict[str, Any]
) -> Any:
    """A module with the weights of a checkpoint, whatever wrappers its parts have or had."""
    failure: RuntimeError | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module: Any = _load_state(cls, checkpoint, strict=strict, **kwargs)
        except RuntimeError as error:  # other keys, or other shapes
            failure = error
            module = _load_state(cls, checkpoint, strict=False, **kwargs)
    weights = match_state_keys(checkpoint["state_dict"], module.state_dict())
    is_renamed = weights is not checkpoint["state_dict"]
    if failure is not None and not is_renamed:
        raise failure
    for warning in caught:
        if not (is_renamed and "Found keys that are" in str(warning.message)):  # keys with wrappers
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if is_renamed:
        module.load_state_dict(weights, strict=module.strict_loading if strict is None else strict)
    return module


def latest_valid(directory: _PATH) -> Path | None:
    """Return the newest valid ShrinkIO checkpoint below a directory, such as a ModelCheckpoint's, for `ckpt_path=`.

    Every byte of it is compared with its digest. A warning is logged for each newer one that is broken.

    Returns:
        None if there is no valid checkpoint.

    Raises:
        PolicyError: the directory is not on a local file system.
        MismatchError: a `CheckpointManager` has saved in it.
    """
    root = place_or_none(directory)
    if not isinstance(root, Path):
        found, do = hide_credentials(str(directory)), "pass the path of a checkpoint"
        raise PolicyError("ShrinkIO", found=found, expected="a path of a local file system", do=do)
    if not root.is_dir():
        return None
    paths = sorted(root.rglob("*"), key=Path.is_symlink, reverse=True)  # directories replace links that point to them
    visible = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    # checkpoints, and unfinished ones
    named = [path for path in visible if path.is_dir() and (path.suffix == ".ckpt" or is_checkpoint(path))]
    candidates = {path.resolve(): path for path in named}
    runs: dict[Path, list[Path]] = {}  # which are not compared by their steps, but by the clock
    for path in sorted(candidates.values(), key=_creation_time):
        runs.setdefault(path.parent, []).append(path)
    by_age = sorted(map(newest_first, runs.values()), key=lambda paths: _creation_time(paths[0]), reverse=True)
    if not by_age:
        refuse_store(root)
    return newest_valid.latest_valid(chain.from_iterable(by_age))[0]


def _creation_time(directory: Path) -> tuple[float, str]:
    try:
        return datetime.fromisoformat(read_directory_manifest(directory).created).timestamp(), directory.name
    except ShrinkpointError:
        return directory.stat().st_mtime, directory.name
