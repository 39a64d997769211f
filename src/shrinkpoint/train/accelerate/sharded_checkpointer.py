"""Saves and loads models that are sharded over processes, through torch.distributed.checkpoint."""

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
from torch import Tensor, nn
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

from shrinkpoint.errors import PolicyError, ShrinkpointError, error_text
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.storage.base import MemorySource, MemoryStorage
from shrinkpoint.store import Keep
from shrinkpoint.store.checkpoint_file import read_file, write_file
from shrinkpoint.store.directory_retention import RunPlan
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.tensors.wrappers import match_names
from shrinkpoint.train.accelerate import prepared_state
from shrinkpoint.train.dcp import Reader, Writer
from shrinkpoint.train.dcp.reader import StrictLoadPlanner
from shrinkpoint.train.dcp.retention import ShardRetention
from shrinkpoint.train.state_dicts import restore_slots

T = TypeVar("T")
_CHAIN_NUMBERS = itertools.count()
_SHARED_KEY, _RANK_KEY = "accelerate", "accelerate-rank-{}"


class ShardedCheckpointer:
    """Saves and loads the shards of an Accelerator's models, and the remaining state as tensors of bytes.

    All processes call all methods.

    Args:
        accelerator: whose models are sharded.
        max_bytes: of `Reader`.
        settings: of `Writer`.
    """

    def __init__(self, accelerator: Accelerator, *, max_bytes: int | None = None, **settings: Any) -> None:
        self._accelerator, self._settings, self._max_bytes = accelerator, settings, max_bytes
        self._chain = f"accelerate {next(_CHAIN_NUMBERS)}"
        self._group: dist.ProcessGroup | None = None
        self._save_future: Future[Any] | None = None
        self._settled: set[frozenset[str]] = set()

    def save(
        self,
        directory: Path | ObjectUrl,
        shared: dict[str, Any],
        per_rank: dict[str, Any],
        background: bool,
        *,
        make_plan: Callable[[Keep], RunPlan],
        **save_options: Any,
    ) -> None:
        """Save models, optimizers and the remaining state; then delete what no rule keeps.

        Args:
            shared: the state that is equal on all processes, without models and optimizers.
            per_rank: the state of this process alone.
            background: return once the state is copied, unless the scheme measures the model.
            make_plan: decides what `keep` does with the checkpoints; called on the first process, once it is saved.
            save_options: step, metrics and note for the manifest; `keep` of `Writer`; `keyframe` must be False.

        Raises:
            PolicyError: `keyframe` is set.
            ShrinkpointError: on every process, the error of the first rank that failed.
        """
        if save_options.pop("keyframe"):
            raise PolicyError("save_state", found="keyframe=True with shards", do="choose keyframe_every=")
        state = _sharded_state(self._accelerator) | {_RANK_KEY.format(self._accelerator.process_index): _pack(per_rank)}
        if self._accelerator.is_main_process:
            state[_SHARED_KEY] = _pack(shared)
        background &= getattr(self._settings.get("scheme"), "evaluate", None) is None  # else the model has to wait
        if background and self._group is None:  # training uses the default group meanwhile
            self._group = dist.new_group(backend="gloo")
        models = [prepared_state.unwrap_model(model) for model in self._accelerator._models]
        settings = self._settings
        if isinstance(directory, ObjectUrl):  # a delta would need other directories, of which nobody knows
            settings = {**settings, "keyframe_every": 1}
        writer = Writer(
            directory,
            chain=self._chain,
            group=self._group,
            model=models[0] if len(models) == 1 else models,
            **settings,
            **save_options,
        )
        retention = ShardRetention(save_options["keep"], make_plan, writer, self._settled)
        if not background:
            with retention.removing_failed(None):
                _raise_first(lambda: save(state, storage_writer=writer))
            retention.apply(None)
            return
        future = _raise_first(lambda: async_save(state, storage_writer=writer, process_group=self._group))
        assert isinstance(future, Future)
        self._save_future = retention.apply_after(future, self._group)

    def wait(self) -> None:
        """Wait for the background save.

        Raises:
            ShrinkpointError: its error, once.
        """
        future, self._save_future = self._save_future, None
        if future is not None:
            _raise_first(future.result)

    def load(self, directory: Path | ObjectUrl) -> None:
        """Load a checkpoint, on any number of processes; the small parts are checked before anything is changed.

        Raises:
            MismatchError: it is no checkpoint of an Accelerator, or does not fit. Where shapes or names differ, models
                and optimizers may have changed.
            ChainError, FormatError, StorageError: the checkpoint cannot be loaded.
        """
        auxiliary, where = self._read_auxiliary_state(directory), str(directory)
        gather_or_raise(lambda: prepared_state.check_prepared(self._accelerator, auxiliary, [], where, strict=True))
        gather_or_raise(lambda: prepared_state.load_registered(self._accelerator, auxiliary, where, strict=True))
        state = _sharded_state(self._accelerator)
        _load_in_place(state, Reader(directory, threads=self._settings.get("threads"), max_bytes=self._max_bytes))
        models = [prepared_state.unwrap_model(model) for model in self._accelerator._models]
        for index, model in enumerate(models):
            set_model_state_dict(model, state[_state_key("model", index)])
        for index, optimizer in enumerate(self._accelerator._optimizers):
            model = _model_of(optimizer, models)
            saved = state[_state_key("optimizer", index)]
            set_optimizer_state_dict(model, optimizer.optimizer, saved)
            parameters, slots = dict(model.named_parameters()), saved.get("state", {})
            names = match_names(slots, parameters)
            restore_slots(optimizer, [(parameters[name], slots[key]) for name, key in names.items()])
        gather_or_raise(lambda: prepared_state.load_auxiliary_state(self._accelerator, auxiliary, where))

    def _read_auxiliary_state(self, directory: Path | ObjectUrl) -> dict[str, Any]:
        """The state without models and optimizers; "ranks" holds the state of this process only."""
        entries = _raise_first(lambda: Reader(directory).read_metadata()).state_dict_metadata
        rank = self._accelerator.process_index
        rank_key = _RANK_KEY.format(rank)
        packed: dict[str, Tensor] = {}
        for key in (_SHARED_KEY, rank_key):
            if isinstance(entry := entries.get(key), TensorStorageMetadata):
                packed[key] = torch.empty(entry.size, dtype=torch.uint8, device="cpu")
        if _SHARED_KEY not in packed:
            raise prepared_state.not_ours(str(directory))
        _load_in_place(dict(packed), Reader(directory, max_bytes=self._max_bytes))
        states = {key: _unpack(data, str(directory)) for key, data in packed.items()}
        shared: dict[str, Any] = states[_SHARED_KEY]
        rank_states: list[Any] = [None] * sum(name.startswith(_RANK_KEY.format("")) for name in entries)
        if rank_key in states:
            rank_states[rank] = states[rank_key]
        return shared | {"ranks": rank_states}


def _sharded_state(accelerator: Accelerator) -> dict[str, Any]:
    """The state dicts of models and optimizers."""
    models = [prepared_state.unwrap_model(model) for model in accelerator._models]
    state: dict[str, Any] = {
        _state_key("model", index): get_model_state_dict(model) for index, model in enumerate(models)
    }
    for index, optimizer in enumerate(accelerator._optimizers):
        state[_state_key("optimizer", index)] = get_optimizer_state_dict(
            _model_of(optimizer, models), optimizer.optimizer
        )
    return state


def _model_of(optimizer: Any, models: list[nn.Module]) -> nn.Module:
    """The model that an optimizer trains.

    Raises:
        PolicyError: no model has its parameters.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if not trained.isdisjoint(map(id, model.parameters())):
            return model
    found, do = "an optimizer without parameters of a prepared model", "prepare the model that it trains"
    raise PolicyError("save_state", found=found, expected="an optimizer of a prepared model", do=do)


def _state_key(kind: str, index: int) -> str:
    return kind if index == 0 else f"{kind}_{index}"


def _pack(state: dict[str, Any]) -> Tensor:
    """Encode a nest as a lossless file in a tensor of bytes: DCP, which loads in place, needs no template for that."""
    storage, scheme = MemoryStorage(), Lossless()
    quantized = scheme.quantize(flatten(state), None)
    size = write_file(storage, "state", quantized, scheme=scheme, reference=None, parent=None).report.stored_bytes
    with storage.open("state") as source:
        return torch.frombuffer(bytearray(source.read(0, size)), dtype=torch.uint8)


def _unpack(data: Tensor, where: str) -> Any:
    decoded = read_file(MemorySource(data.numpy().tobytes(), where), where, None)
    return unflatten(decoded.tree, decoded.reference.tensors, where=where, max_bytes=decoded.max_copy_bytes)


def _load_in_place(state: dict[str, Any], reader: Reader) -> None:
    with warnings.catch_warnings():  # torch warns if there is a single process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = StrictLoadPlanner(str(reader.path), "prepare models and optimizers as they were saved")
        _raise_first(lambda: load(state, storage_reader=reader, planner=planner))


def _raise_first(work: Callable[[], T]) -> T:
    """Return the result of `work`; of the errors that torch collects from all ranks, raise that of the first."""
    try:
        return work()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, ShrinkpointError):
            where = f"rank {rank}: {cause.where}"
            raise type(cause)(where, found=cause.found, expected=cause.expected, do=cause.do) from error
        raise ShrinkpointError(f"rank {rank}", found=error_text(cause), do="see the traceback above") from error
