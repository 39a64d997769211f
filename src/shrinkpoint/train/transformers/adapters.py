"""Loads and exports the adapters (PEFT) that a checkpoint holds in place of a model's weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import is_peft_available

from shrinkpoint.errors import MissingExtraError, NotFoundError
from shrinkpoint.storage import LocalStorage, Storage, is_object_url, local_path, what_is_at
from shrinkpoint.store.load import find_directory
from shrinkpoint.store.step_storage import find_store
from shrinkpoint.train.checkpointer import wait_for_writes
from shrinkpoint.train.transformers.weights import SMALL_FILES

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def find_adapter(where: str | Path | Storage, step: int | None) -> Path | None:
    """The checkpoint directory of a Trainer that has an adapter in place of weights; None for other checkpoints.

    Args:
        where, step: as of `pretrained.from_pretrained`.
    """
    if is_object_url(where) or not isinstance(where, str | Path):
        return None
    wait_for_writes(where)
    path = local_path(where).absolute()
    if what_is_at(path) != "a directory" or find_store(LocalStorage(path)) is not None:
        return None
    directory = find_directory(path, step)
    return directory if (directory / _CONFIG_FILE).is_file() else None


def load_adapter(model_class: Any, directory: Path, model_args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The base model with its adapter, as `model_class.from_pretrained` loads both.

    Raises:
        NotFoundError: the weights of the adapter are missing, or the name of its base.
        MissingExtraError: PEFT is not installed.
    """
    if not is_peft_available():
        expected, do = f"what reads the adapter in {directory}", "run pip install peft"
        raise MissingExtraError("peft", found="not installed", expected=expected, do=do)
    _check_complete(directory)
    if not json.loads((directory / _CONFIG_FILE).read_bytes()).get("base_model_name_or_path"):
        found, expected = f"a base without a name in {_CONFIG_FILE}", "the directory or the name of the adapter's base"
        do = f"build the base, and call PeftModel.from_pretrained(base, {str(directory)!r})"
        raise NotFoundError(str(directory), found=found, expected=expected, do=do)
    return model_class.from_pretrained(str(directory), *model_args, **kwargs)


def copy_adapter(directory: Path, target: Path) -> int:
    """Copy an adapter, and the tokenizer beside it, into a new directory; returns the number of its tensors."""
    _check_complete(directory)
    for path in sorted(directory.iterdir()):
        if path.name in (_CONFIG_FILE, _WEIGHTS_FILE) or SMALL_FILES.fullmatch(path.name):
            shutil.copyfile(path, target / path.name)
    with safe_open(target / _WEIGHTS_FILE, framework="pt") as file:
        return len(file.keys())


def _check_complete(directory: Path) -> None:
    if not (directory / _WEIGHTS_FILE).is_file():
        do = "load another checkpoint of the run: step="
        raise NotFoundError(str(directory), found=f"no {_WEIGHTS_FILE}", expected="that of the adapter", do=do)
