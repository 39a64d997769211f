"""Models that are spread over processes: saved and loaded through torch.distributed.checkpoint."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from shrinkpoint.errors import MismatchError, PolicyError, ShrinkpointError
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.storage.memory import MemorySource, MemoryStorage
from shrinkpoint.store.checkpoint_file import read_file, write_file
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.tensors.flatten import flatten, unflatten
from shrinkpoint.train.accelerate import prepared_state
from shrinkpoint.train.dcp import Reader, Writer
from shrinkpoint.train.dcp.checkpoint_metadata import DCP_KEY

T = TypeVar("T")
_CHAIN_NUMBERS = itertools.count()
_SHARED_KEY, _RANK_KEY = "accelerate", "accelerate-rank-{}"


class ShardedCheckpointer:
    """Saves and loads the shards of an Accelerator's models, and what is beside them as tensors of bytes.

    All its methods are called by all processes.

    Args:
        settings: of `Writer`.
    """

    def __init__(self, accelerator: Accelerator, **settings: Any) -> None:
        self._accelerator, self._settings = accelerator, settings
        self._chain = f"accelerate {next(_CHAIN_NUMBERS)}"
        self._group: dist.ProcessGroup | None = None
        self._save_future: Future[Any] | None = None

    def save(
        self,
        directory: Path,
        shared: dict[str, Any],
        per_rank: dict[str, Any],
        *,
        background: bool,
        **save_options: Any,
    ) -> None:
        """Save; in the background, what comes after the copy.

        Args:
            shared: what every process has alike, beside models and optimizers.
            per_rank: what this one has alone.

            save_options: step, metrics and note, for people; `keyframe` must not be asked for.

        Raises:
            PolicyError: a keyframe is asked for.
            ShrinkpointError: on every process, what the first that failed raised.
        """
        if save_options.pop("keyframe"):
            found, do = "keyframe=True with shards", "choose keyframe_every="
            raise PolicyError("save_state", found=found, do=do)
        state = _sharded_state(self._accelerator) | {_RANK_KEY.format(self._accelerator.process_index): _pack(per_rank)}
        if self._accelerator.is_main_process:
            state[_SHARED_KEY] = _pack(shared)
        if background and self._group is None:  # not the one that training uses at the same time
            self._group = dist.new_group(backend="gloo")
        models = [prepared_state.unwrap_model(model) for model in self._accelerator._models]
        writer = Writer(
            directory,
            chain=self._chain,
            group=self._group,
            model=models[0] if len(models) == 1 else models,
            **self._settings,
            **save_options,
        )
        if not background:
            _raise_first(lambda: save(state, storage_writer=writer))
            return
        saving = _raise_first(lambda: async_save(state, storage_writer=writer, process_group=self._group))
        assert isinstance(saving, Future)
        self._save_future = saving

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
            ShrinkpointError: whatever it raised, once.
        """
        running, self._save_future = self._save_future, None
        if running is not None:
            _raise_first(running.result)

    def read_auxiliary_state(self, directory: Path) -> dict[str, Any]:
        """What is beside the models and optimizers, checked against what is prepared and registered.

        Raises:
            MismatchError: it does not fit.
            ChainError, FormatError, StorageError: the checkpoint does not load.
        """
        entries = _raise_first(lambda: Reader(directory).read_metadata()).state_dict_metadata
        rank = self._accelerator.process_index
        state: dict[str, Tensor] = {}
        for name in (_SHARED_KEY, _RANK_KEY.format(rank)):
            if isinstance(entry := entries.get(name), TensorStorageMetadata):
                state[name] = torch.empty(entry.size, dtype=torch.uint8)
        if _SHARED_KEY not in state:
            do = "load it with what saved it"
            raise MismatchError(
                str(directory), found="no state of an Accelerator", expected="what save_state saves", do=do
            )
        _load_in_place(dict(state), Reader(directory))
        known = {name: _unpack(data, str(directory)) for name, data in state.items()}
        alike: dict[str, Any] = known[_SHARED_KEY]
        ranks: list[Any] = [None] * sum(name.startswith(_RANK_KEY.format("")) for name in entries)
        if _RANK_KEY.format(rank) in known:
            ranks[rank] = known[_RANK_KEY.format(rank)]
        return alike | {"ranks": ranks}

    def load(self, directory: Path) -> None:
        """Load models and optimizers, on any number of processes. Where it fails, they may have changed.

        Raises:
            MismatchError: shapes or names differ.
            ChainError, FormatError, StorageError: the checkpoint does not load.
        """
        state = _sharded_state(self._accelerator)
        _load_in_place(state, Reader(directory, threads=self._settings.get("threads")))
        models, optimizers = self._accelerator._models, self._accelerator._optimizers
        for index, model in enumerate(models):
            set_model_state_dict(prepared_state.unwrap_model(model), state[_state_key("model", index)])
        for index, optimizer in enumerate(optimizers):
            model = prepared_state.unwrap_model(models[index])
            set_optimizer_state_dict(model, optimizer.optimizer, state[_state_key("optimizer", index)])


def is_sharded_checkpoint(manifest: DirectoryManifest) -> bool:
    """Whether a checkpoint is one of torch.distributed.checkpoint."""
    return isinstance(manifest.extra, dict) and DCP_KEY in manifest.extra


def _sharded_state(accelerator: Accelerator) -> dict[str, Any]:
    """The state dicts of models and optimizers; as Accelerate does, the first optimizer is the first model's."""
    models = [prepared_state.unwrap_model(model) for model in accelerator._models]
    state: dict[str, Any] = {
        _state_key("model", index): get_model_state_dict(model) for index, model in enumerate(models)
    }
    for index, optimizer in enumerate(accelerator._optimizers):
        state[_state_key("optimizer", index)] = get_optimizer_state_dict(models[index], optimizer.optimizer)
    return state


def _state_key(kind: str, index: int) -> str:
    return kind if index == 0 else f"{kind}_{index}"


def _pack(state: dict[str, Any]) -> Tensor:
    """A nest as the bytes of a file of ours: what is loaded in place needs no template for it then."""
    storage, scheme = MemoryStorage(), Lossless()
    kept = scheme.quantize(flatten(state), None)
    size = write_file(storage, "state", kept, scheme=scheme, reference=None, parent=None).report.stored_bytes
    with storage.open("state") as source:
        return torch.frombuffer(bytearray(source.read(0, size)), dtype=torch.uint8)


def _unpack(data: Tensor, where: str) -> Any:
    decoded = read_file(MemorySource(data.numpy().tobytes(), where), where, None)
    return unflatten(decoded.tree, decoded.reference.tensors, where=where, max_bytes=decoded.max_copy_bytes)


def _load_in_place(state: dict[str, Any], reader: Reader) -> None:
    with warnings.catch_warnings():  # that one process is one is no news to the caller
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _raise_first(lambda: load(state, storage_reader=reader))


def _raise_first(work: Callable[[], T]) -> T:
    """The result; what torch raises for several processes at once becomes what the first of them raised.

    Raises:
        ShrinkpointError: of the class that was raised; of no class below it where the error was not one of ours.
    """
    try:
        return work()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, ShrinkpointError):
            where = f"rank {rank}: {cause.where}"
            raise type(cause)(where, found=cause.found, expected=cause.expected, do=cause.do) from error
        found = f"{type(cause).__name__}: {cause}"
        raise ShrinkpointError(f"rank {rank}", found=found, do="see the traceback above") from error
