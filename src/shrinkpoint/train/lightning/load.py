"""Checkpoints without a Trainer: a module from one, and the newest of a directory."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.saving import _load_state, load_hparams_from_tags_csv, load_hparams_from_yaml
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from torch import Tensor

from shrinkpoint.errors import PolicyError, ShrinkpointError
from shrinkpoint.store.directory import is_checkpoint, read_directory_manifest
from shrinkpoint.train import latest
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.lightning.io import load_checkpoint_dict, local_path_or_none, require_local_path

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
    """`cls.load_from_checkpoint(...)` for directories of ours, and, as it is, for everything else.

    Args:
        cls: a LightningModule or LightningDataModule.
        checkpoint_path: of the checkpoint.
        map_location: where its tensors, and the module, go; None: the CPU for ours.
        hparams_file: as Lightning has it.
        strict: as Lightning has it.
        weights_only: for stock files; ours are never unpickled.
        kwargs: arguments of `cls` in place of those that were saved.

    Raises:
        NotFoundError, ChainError, FormatError, StorageError: it cannot be read.
        whatever Lightning raises where the module does not fit.
    """
    folder = local_path_or_none(checkpoint_path)
    if folder is None or not folder.is_dir():
        made: LightningT = cls.load_from_checkpoint(
            checkpoint_path,
            map_location=map_location,
            hparams_file=hparams_file,
            weights_only=weights_only,
            **({} if strict is None else {"strict": strict}),
            **kwargs,
        )
        return made
    checkpoint = _pl_migrate_checkpoint(load_checkpoint_dict(Checkpointer(), folder, map_location), folder)
    if hparams_file is not None:
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = _load_hparams(hparams_file)
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    if not issubclass(cls, pl.LightningModule):
        return _load_state(cls, checkpoint, **kwargs)
    module = _load_state(cls, checkpoint, strict=strict, **kwargs)
    tensors = (value for value in checkpoint["state_dict"].values() if isinstance(value, Tensor))
    return module.to(next(tensors, torch.tensor(0)).device)


def latest_valid(directory: _PATH) -> Path | None:
    """The newest whole checkpoint of ours below a directory, such as a ModelCheckpoint's: for `ckpt_path=`.

    Every byte of it has been read and compared. What is newer and broken is said aloud, in the log.

    Returns:
        None: there is none.
    """
    root = require_local_path(directory)
    if not root.is_dir():
        return None
    places = sorted(root.rglob("*"), key=Path.is_symlink, reverse=True)  # a link, only where it points elsewhere
    found = {path.resolve(): path for path in places if path.is_dir() and _is_candidate(path, root)}
    return latest.latest_valid(sorted(found.values(), key=_creation_time, reverse=True))[0]


def _is_candidate(path: Path, root: Path) -> bool:
    """Whether it is a checkpoint, or what was to be one."""
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and (path.suffix == ".ckpt" or is_checkpoint(path))


def _creation_time(directory: Path) -> tuple[float, str]:
    try:
        return datetime.fromisoformat(read_directory_manifest(directory).created).timestamp(), directory.name
    except ShrinkpointError:
        return directory.stat().st_mtime, directory.name


def _load_hparams(path: _PATH) -> Any:
    extension = str(path).rsplit(".", 1)[-1].lower()
    if extension == "csv":
        return load_hparams_from_tags_csv(path)
    if extension in ("yml", "yaml"):
        return load_hparams_from_yaml(path)
    raise PolicyError("hparams_file", found=str(path), expected="a .csv, .yml or .yaml file")
