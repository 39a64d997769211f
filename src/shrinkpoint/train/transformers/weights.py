"""Finds a model's weights, or its adapter, in a checkpoint of any kind, and decodes the weights alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError
from shrinkpoint.storage import LocalStorage, Storage, is_object_url, local_path, resolve_storage, what_is_at
from shrinkpoint.store.chain import ChainFile, chain_identity, use_current
from shrinkpoint.store.checkpoint_file import DecodedFile, build_state
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.identify import is_checkpoint
from shrinkpoint.store.load import find_chain, find_directory, list_names
from shrinkpoint.store.step_storage import find_store
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.names import StatePath, tensor_name
from shrinkpoint.tensors.tree_decoder import SelectedLeaves, select_leaves
from shrinkpoint.tensors.wrappers import plain_names
from shrinkpoint.train.checkpointer import wait_for_writes

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SMALL_FILES = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.json|(special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(pre|video_pre)?processor_config\.json|vocab\.txt|merges\.txt|.*\.(model|tiktoken|jinja)"
)
"""Names of the files beside a model's weights: of its configuration, of its tokenizer or processor."""
_PLAIN_FILES = ("model.safetensors", "pytorch_model.bin")
_WEIGHT_FILES = (*_PLAIN_FILES, *(f"{name}.index.json" for name in _PLAIN_FILES))
_PATHS: tuple[StatePath, ...] = (
    ("model",),
    ("state_dict",),  # Lightning
    *(("state", name) for name in _WEIGHT_FILES),  # converted directories, then files
    ("state", "model"),
    ("state", "state_dict"),
    ("state",),
)
"""Keys under which a state may hold the weights, in the order in which to look."""
_EXPECTED = 'a dict of tensors by name under "model" or "state_dict", or as the state itself'


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights of a model, and the small files that belong to it.

    Attributes:
        where: the checkpoint, for messages.
        tensors: by name, without what wrappers add; tied ones share memory.
        directories: where small files may lie, in the order in which to look.
        files: small files that the checkpoint itself holds, by name.
    """

    where: str
    tensors: dict[str, Tensor]
    directories: tuple[Path, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = plain_names(self.tensors)
        object.__setattr__(self, "tensors", {names[name]: tensor for name, tensor in self.tensors.items()})

    @contextmanager
    def small_files(self) -> Iterator[Path | None]:
        """A directory with the model's configuration, and perhaps its tokenizer; None if there is no configuration."""
        if CONFIG_FILE in self.files:
            with TemporaryDirectory() as directory:
                for name, data in self.files.items():
                    Path(directory, name).write_bytes(data)
                yield Path(directory)
        else:
            yield next((path for path in self.directories if (path / CONFIG_FILE).is_file()), None)


def load_weights(
    where: str | Path | Storage,
    step: int | None,
    key: str | Sequence[str | int] | None,
    *,
    threads: int | None = None,
    max_bytes: int | None = None,
) -> PretrainedWeights:
    """Decode the weights of a checkpoint, and nothing else of it.

    Args:
        where: a file, a store, also in a bucket, a checkpoint directory of a framework, or its run.
        step: of a store or run; None: the newest.
        key: the key of the weights in the state, or the path of keys; None: they are looked for.

    Raises:
        NotFoundError: there is no such checkpoint, or it holds no weights.
        MismatchError: what is there is no dict of tensors.
        ChainError, FormatError, StorageError, PolicyError: as `shrinkpoint.load`.
    """
    if is_object_url(where) or not isinstance(where, str | Path):
        storage = resolve_storage(where, "where")
        weights = _decode_weights(where, step, key, (), threads, max_bytes)
        files: dict[str, bytes] = {}  # the configurations at the top of a store that is no directory here
        for name in (CONFIG_FILE, GENERATION_FILE):
            with suppress(NotFoundError):
                files[name] = bytes(storage.get(name))
        return replace(weights, files={**files, **weights.files})
    wait_for_writes(where)
    path = local_path(where).absolute()
    is_directory = what_is_at(path) == "a directory"
    directories = [path if is_directory else path.parent]
    if is_directory and find_store(LocalStorage(path)) is None:
        directory = find_directory(path, step)
        directories = [*dict.fromkeys((directory, *directories, directory.parent))]
        manifest = read_directory_manifest(directory)
        if len(manifest.payloads) != 1 or manifest.is_dcp:
            tensors = _load_distributed(directory, key, threads, max_bytes)
            return PretrainedWeights(str(where), tensors, tuple(directories))
    return _decode_weights(where, step, key, tuple(directories), threads, max_bytes)


def _decode_weights(
    where: str | Path | Storage,
    step: int | None,
    key: str | Sequence[str | int] | None,
    directories: tuple[Path, ...],
    threads: int | None,
    max_bytes: int | None,
) -> PretrainedWeights:
    name = str(where) if isinstance(where, str | Path) else where.describe()
    search = _WeightSearch(_as_path(key), directories)

    def decode(chain: Sequence[ChainFile]) -> tuple[DecodedFile, list[Path]]:
        decoded = decode_chain(chain, select=search.select, threads=threads, max_bytes=max_bytes)
        return decoded, [file.storage.path for file in reversed(chain) if isinstance(file.storage, LocalStorage)]

    decoded, chain_directories = use_current(lambda: find_chain(where, step), decode, chain_identity)
    state = build_state(decoded, name)
    value, files = state, {}
    for part in search.path:
        value = value[0] if type(value) is list else value[part]  # of a list, the selected item alone is there
    if search.path[:1] == ("state",):
        files = {file: data for file, data in state["state"].items() if type(data) is bytes}
    directories = tuple(dict.fromkeys((*directories, *chain_directories)))  # a fine-tune has its base's configuration
    return PretrainedWeights(name, _check_tensors(value, name, search.path), directories, files)


class _WeightSearch:
    """Selects the weights in a state's tree, and the small files of a converted directory."""

    def __init__(self, path: StatePath | None, directories: Sequence[Path]) -> None:
        self.path: StatePath = ()  # where the weights are, once `select` was called
        self._paths, self._is_free = (_PATHS, True) if path is None else ((path,), False)
        self._directories = directories

    def select(self, tree: JSON, where: str) -> SelectedLeaves:
        """The leaves of the weights; raises NotFoundError if there are none."""
        selected = SelectedLeaves({}, frozenset(), (), True)
        for path in self._paths:
            selected = select_leaves(tree, partial(_belongs_to_weights, weights=path), where)
            if selected.tensors and any(name.startswith(f"{tensor_name(path)}/") for name in selected.names):
                self.path = path
                return selected
        if self._is_free and not any("/" in name for name in selected.names):
            selected = select_leaves(tree, bool, where)
            if selected.tensors:
                return selected
        raise _no_weights_error(where, selected.names, self._directories)


def _belongs_to_weights(path: StatePath, weights: StatePath) -> bool:
    """True if a path is that of the weights, or of a small file beside them in a converted directory."""
    is_beside = len(weights) == len(path) == 2 and weights[0] == path[0] == "state"
    return path == weights or bool(is_beside and SMALL_FILES.fullmatch(str(path[1])))


def _load_distributed(
    directory: Path, key: str | Sequence[str | int] | None, threads: int | None, max_bytes: int | None
) -> dict[str, Tensor]:
    """The weights of a checkpoint of torch.distributed.checkpoint; only what they are made of is decoded."""
    from shrinkpoint.train.dcp.reader import load, open_checkpoint

    entries = open_checkpoint(directory)[1].entries
    paths = [tuple(entry.path or (fqn,)) for fqn, entry in entries.items()]
    requested = _as_path(key)
    for prefix in _PATHS if requested is None else (requested,):
        if any(path[: len(prefix)] == prefix and len(path) > len(prefix) for path in paths):
            value: Any = load(directory, only=escape(tensor_name(prefix)), threads=threads, max_bytes=max_bytes)
            for part in prefix:
                value = value[part]
            return _check_tensors(value, str(directory), prefix)
    if requested is None and all(len(path) == 1 for path in paths):
        return _check_tensors(load(directory, threads=threads, max_bytes=max_bytes), str(directory), ())
    raise _no_weights_error(str(directory), [tensor_name(path) for path in paths], [directory])


def _as_path(key: str | Sequence[str | int] | None) -> StatePath | None:
    if key is None:
        return None
    path = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, Sequence) else ()
    if not path or not all(type(part) in (str, int) for part in path):
        found, do = repr(key)[:80], 'pass e.g. key="ema", or key=("nets", "ema")'
        raise PolicyError("key", found=found, expected="a key of the state, or a path of keys", do=do)
    return path


def _check_tensors(value: Any, where: str, path: StatePath) -> dict[str, Tensor]:
    """`value` as tensors by name; raises MismatchError if it is another nest."""
    if type(value) is list and len(value) == 1:  # Accelerate saves a list of models
        return _check_tensors(value[0], where, path)
    found = validate.type_name(value)
    if isinstance(value, dict):
        wrong = [key for key, item in value.items() if type(key) is not str or not isinstance(item, Tensor)]
        if not wrong:
            return dict(value)
        found = f"{type(value[wrong[0]]).__name__} under {wrong[0]!r:.80}"
    do = "pass key=, the key or the path of keys of the weights"
    raise MismatchError(f"{where}: {tensor_name(path)}", found=found, expected="a dict of tensors by name", do=do)


def _no_weights_error(where: str, names: Sequence[str], directories: Sequence[Path]) -> NotFoundError:
    do = "pass key=, the key or the path of keys of the weights"
    for directory in directories:
        if is_checkpoint(directory) and any((directory / name).is_file() for name in _WEIGHT_FILES):
            do = f"the weights beside it are plain: call from_pretrained({str(directory)!r}) of the class itself"
    found = f"no weights, but {list_names(names).removeprefix('one of ')}"
    return NotFoundError(where, found=found, expected=_EXPECTED, do=do)


def find_adapter(where: str | Path | Storage, step: int | None) -> Path | None:
    """The checkpoint directory of a Trainer that has an adapter in place of weights; None for other checkpoints."""
    if is_object_url(where) or not isinstance(where, str | Path):
        return None
    wait_for_writes(where)
    path = local_path(where).absolute()
    if what_is_at(path) != "a directory" or find_store(LocalStorage(path)) is not None:
        return None
    directory = find_directory(path, step)
    return directory if (directory / ADAPTER_CONFIG).is_file() else None
