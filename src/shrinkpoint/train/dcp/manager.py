"""Saves and restores a training loop whose state is sharded: a directory a step, all ranks together."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError, ShrinkpointError
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import Keep, SaveReport, layout
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.identify import is_checkpoint, is_stock_dcp, refuse_store_checkpoint
from shrinkpoint.store.manifest import DirectoryManifest
from shrinkpoint.store.retention import best_first
from shrinkpoint.tensors.dtypes import torch_dtype
from shrinkpoint.tensors.names import StatePath
from shrinkpoint.tensors.wrappers import match_names
from shrinkpoint.train.dcp.checkpoint_metadata import EntryMetadata
from shrinkpoint.train.dcp.directory import latest_valid
from shrinkpoint.train.dcp.reader import Reader, open_checkpoint, unflatten
from shrinkpoint.train.dcp.retention import ShardRetention
from shrinkpoint.train.dcp.writer import Writer
from shrinkpoint.train.directory_run import DirectoryRun
from shrinkpoint.train.restore_result import RestoreResult
from shrinkpoint.train.save_decision import SaveDecisionPolicy, ScheduledSaver
from shrinkpoint.train.state_alignment import NAMES_KEY, align_state, iter_leaves, label_of
from shrinkpoint.train.state_dicts import (
    check_state_dicts,
    check_tensor_fits,
    collect_state_dicts,
    has_optimizer,
    load_state_dicts,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("shrinkpoint")


class Manager(ScheduledSaver):
    """Saves a loop's objects by `Writer`, losslessly, into a directory a step, and restores them by `Reader`.

    All ranks make the same calls. The state of an optimizer is stored by the names of its parameters; nothing is made
    up for one that has not stepped yet. What differs between ranks and is not sharded, such as random generators, is
    not saved: a `Journal` keeps those of each rank.

    Args:
        path: the directory of the checkpoints, which ranks share.
        keep: rules by which checkpoints are deleted, or how many of the newest stay; None: all stay. With
            `moments_last`, older ones are written again without what optimizers keep for each parameter, by all ranks.
        keyframe_every, threads: as of `Writer`.
        group: the ranks; None: all.
        save_decision_policy: what `should_save` asks, on all ranks; None: the loop decides itself.

    Attributes:
        last_report: the report of the last save, on the rank that coordinates; None elsewhere, and before.

    Raises:
        PolicyError: an invalid argument.
    """

    is_sharded: ClassVar[bool] = True

    def __init__(
        self,
        path: str | Path,
        *,
        keep: Keep | int | None = 2,
        keyframe_every: int | Literal["auto"] | None = "auto",
        threads: int | None = None,
        group: ProcessGroup | None = None,
        save_decision_policy: SaveDecisionPolicy | None = None,
    ) -> None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        super().__init__(save_decision_policy, world if group is None else group)
        self._root = LocalStorage(path).path.absolute()
        if not isinstance(keep, Keep):
            keep = validate.check_optional_int("keep", keep, none_meaning="for all")
        self._keep = Keep(last=keep) if isinstance(keep, int) else keep
        self._threads, self._group = threads, group
        self._writer_options: dict[str, Any] = {"keyframe_every": keyframe_every, "threads": threads, "group": group}
        Writer(**self._writer_options)  # refuses wrong ones now
        self.last_report: SaveReport | None = None
        self._settled: set[frozenset[str]] = set()  # see `ShardRetention`
        self.scheme = Lossless()

    def __repr__(self) -> str:
        return f"Manager({str(self._root)!r})"

    @property
    def journal_directory(self) -> Path:
        """Directory of a `Journal` of these checkpoints."""
        return self._root / "journal"

    def save(self, step: int, *, metrics: Mapping[str, Any] | None = None, **objects: Any) -> SaveReport | None:
        """Save objects as they are now, and return once that is committed; then delete what `keep` does not keep.

        Args:
            step: number of the training step, at least 0.
            metrics: numbers, for people.
            objects: modules, optimizers over their parameters, others with `state_dict`, and lists and dicts of these,
                by name.

        Returns:
            The report, on the rank that coordinates.

        Raises:
            PolicyError: an object without `state_dict`; a step or metric that is not a number.
            MismatchError: the step's directory holds a checkpoint of torch's own writer, or of a store.
            StorageError: writing failed on a rank; every checkpoint that was there still loads.
            Exception: whatever else failed on a rank.
        """
        directory = self._root / layout.step_dir(layout.check_step(step))
        gather_or_raise(lambda: _refuse_foreign(directory), self._group)
        names = _parameter_names(objects)
        state = {name: _state_of(obj, name, names) for name, obj in objects.items()}
        reports: list[SaveReport] = []
        writer = Writer(
            directory, **self._writer_options, step=step, metrics=metrics, on_save=reports.append, keep=self._keep
        )
        retention = ShardRetention(self._keep, self._run.plan, writer, self._settled)
        with _own_errors(), retention.removing_failed(self._group):
            save(state, storage_writer=writer, process_group=self._group)
        if reports:
            [self.last_report] = reports
        self._note_saved(step, validate.as_floats(metrics))
        retention.apply(self._group)
        return reports[0] if reports else None

    def steps(self) -> list[int]:
        """The steps of the checkpoints, rising."""
        return sorted(step for path, step in self._run.numbers().items() if is_checkpoint(path))

    def latest_step(self) -> int | None:
        """The step that was saved last; None if there is none."""
        complete = filter(is_checkpoint, self._run.newest_first())
        return next((self._run.numbers()[path] for path in complete), None)

    def best_step(self) -> int | None:
        """The step with the best metric of the rule `best`, or of `val_loss`; None if none has it."""
        ranked = best_first(self._previous_manifests()[::-1], self._keep or Keep())
        return ranked[0].step if ranked else None

    def _previous_manifests(self) -> list[DirectoryManifest]:
        return [read_directory_manifest(path) for path in self._run.newest_first() if is_checkpoint(path)]

    def _find_step(self, step: int | str | None) -> Any:
        """The number of the step to restore, on all ranks; None: the newest that is valid."""
        if isinstance(step, str):
            validate.check_choice("step", step, ("best", "latest"))
            if step == "latest":
                return None
            best = gather_or_raise(self.best_step, self._group)[0]
            if best is None:
                found, do = "no checkpoint with the metric", "pass metrics= to save, and Keep(metric=) to the manager"
                raise NotFoundError(str(self._root), found=found, expected="a best checkpoint", do=do)
            return best
        return step

    @property
    def _run(self) -> DirectoryRun:
        return DirectoryRun(self._root, layout.step_of_dir)

    @torch.inference_mode(False)  # training cannot change tensors that are made within that mode
    @torch.no_grad()
    def restore(
        self, step: int | Literal["best", "latest"] | None = None, *, max_bytes: int | None = None, **objects: Any
    ) -> RestoreResult[int] | None:
        """Load a checkpoint into objects, on any number of ranks; modules in place.

        Args:
            step: None or "latest": the newest checkpoint that is valid on all ranks. A number, or "best", which is
                `best_step()`: that checkpoint or an error.
            max_bytes: how much memory the tensors of one file may take; None: as for `shrinkpoint.load`.
            objects: what was passed to `save`; objects that are left out are not changed.

        Returns:
            Where training resumes; None if there is no checkpoint.

        Raises:
            MismatchError: the checkpoint does not fit; nothing was changed unless an object itself refused its state.
                Or torch's own writer, or a store, has written it.
            NotFoundError: there is no such checkpoint.
            ChainError, FormatError, StorageError: it does not load; modules may have changed.
        """
        begin = time.perf_counter()
        number = self._find_step(step)
        directory: Any = self._root / layout.step_dir(layout.check_step(number)) if number is not None else None
        if directory is None and (directory := latest_valid(self._root, self._group)) is None:
            gather_or_raise(lambda: _refuse_foreign(*self._run.newest_first()), self._group)
            return None
        flat: dict[str, Any] = {}

        def prepare() -> None:
            if not is_checkpoint(directory):
                _refuse_foreign(directory)
                raise NotFoundError(str(directory), found="no checkpoint", do="restore another step")
            manifest, metadata = open_checkpoint(directory)
            if manifest.weights_only and has_optimizer(objects):
                found = "weights only: retention has deleted the moments (Keep(moments_last=))"
                do = "restore a newer step, or leave the optimizer out"
                raise MismatchError(str(directory), found=found, expected="a step with moments", do=do)
            flat.update(_targets(metadata.entries, objects, str(directory)))

        gather_or_raise(prepare, self._group)
        with _own_errors():
            reader = Reader(directory, threads=self._threads, max_bytes=max_bytes)
            load(flat, storage_reader=reader, process_group=self._group)
        manifest, metadata = open_checkpoint(directory)
        state = _by_number(objects, unflatten(flat, metadata.entries))
        aligned = align_state(objects, state, str(directory), strict=True)
        options: dict[str, Any] = {"strict": True, "saved_dtypes": aligned.saved_dtypes}
        for name, obj in objects.items():
            check_state_dicts(obj, aligned.state.get(name, {}), f"{directory}, {name}", **options)
        for name, obj in objects.items():
            load_state_dicts(obj, aligned.state.get(name, {}), f"{directory}, {name}", **options)
        assert manifest.step is not None
        self._note_restored(manifest.step)
        seconds = time.perf_counter() - begin
        result: RestoreResult[Any] = RestoreResult.from_manifest(manifest, seconds, directory=directory)
        return result

    def wait(self) -> None:
        """Return: a save is durable when `save` returns."""


def _refuse_foreign(*directories: Path) -> None:
    """Raise a MismatchError if torch's own writer or a store has saved a checkpoint in one of the directories."""
    for directory in directories:
        refuse_store_checkpoint(directory)
        if not is_stock_dcp(directory):
            continue
        found = "a checkpoint that torch.distributed.checkpoint's own writer has saved"
        do = "load it with dcp.load without storage_reader=, and give the Manager another directory"
        raise MismatchError(str(directory), found=found, expected="checkpoints of dcp.Manager", do=do)


def _parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    names: dict[int, str] = {}
    for _, obj in iter_leaves(objects):
        if isinstance(obj, nn.Module):
            for module in obj.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # after a forward pass alone the root has whole parameters
            names |= {id(parameter): name for name, parameter in obj.named_parameters()}
    return names


def _keys(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Name of each parameter of an optimizer in a checkpoint, in the order of its groups."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [names.get(id(parameter), f"{index}") for index, parameter in enumerate(parameters)]
    if len(set(keys)) < len(keys):
        found, do = "parameters of two modules with one name", "save each module with an optimizer of its own"
        raise PolicyError("optimizer", found=found, expected="a name for each parameter", do=do)
    return keys


def _state_of(obj: Any, name: str, names: Mapping[int, str]) -> Any:
    """The state dict of an object, or of each in a nest; of an optimizer, by the names of parameters."""
    if isinstance(obj, Mapping):
        return {key: _state_of(member, f"{name}[{key!r}]", names) for key, member in obj.items()}
    if isinstance(obj, list | tuple):
        return [_state_of(member, f"{name}[{index}]", names) for index, member in enumerate(obj)]
    state = collect_state_dicts(obj, name, "pass plain values and tensors in an object that has these methods")
    if not isinstance(obj, Optimizer):
        return state
    keys = _keys(obj, names)
    groups = [{**group, "params": [keys[index] for index in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {keys[index]: slots for index, slots in state["state"].items()}, "param_groups": groups}


def _owners(objects: Mapping[str, Any], keys: Iterable[str]) -> dict[str, tuple[str, Tensor]]:
    """Label of the module, and live parameter, of each key that a checkpoint has of an optimizer."""
    keys, owners = list(keys), dict[str, tuple[str, Tensor]]()
    for path, obj in iter_leaves(objects):
        if isinstance(obj, nn.Module):
            parameters = dict(obj.named_parameters(remove_duplicate=False))
            for live_key, key in match_names(keys, parameters).items():
                owners.setdefault(key, (label_of(path), parameters[live_key]))
    return owners


def _by_number(objects: Mapping[str, Any], state: Any) -> dict[str, Any]:
    """A state whose optimizers number their parameters in the saved order, with names beside them."""
    names: dict[str, Any] = {}
    module = next((label_of(path) for path, obj in iter_leaves(objects) if isinstance(obj, nn.Module)), "")

    def convert(obj: Any, saved: Any, path: StatePath) -> Any:
        if isinstance(obj, Mapping) and isinstance(saved, Mapping):
            return {key: convert(obj.get(key), member, (*path, key)) for key, member in saved.items()}
        if isinstance(obj, list | tuple) and isinstance(saved, list | tuple) and len(obj) == len(saved):
            return [convert(obj[index], member, (*path, index)) for index, member in enumerate(saved)]
        if not isinstance(obj, Optimizer) or not isinstance(saved, dict) or "param_groups" not in saved:
            return saved
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        owners, numbers = _owners(objects, keys), {key: number for number, key in enumerate(keys)}
        names[label_of(path)] = [
            [
                None if key not in owners and key.isdecimal() else f"{owners.get(key, (module,))[0]}/{key}"
                for key in group["params"]
            ]
            for group in saved["param_groups"]
        ]
        groups = [{**group, "params": [numbers[key] for key in group["params"]]} for group in saved["param_groups"]]
        slots = {numbers[key]: value for key, value in saved.get("state", {}).items()}
        slots = dict(sorted(slots.items(), key=lambda slot: slot[0]))
        return {**saved, "state": slots, "param_groups": groups}

    return {**convert(objects, state, ()), NAMES_KEY: {"optimizers": names}}


def _targets(entries: Mapping[str, EntryMetadata], objects: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Targets of a checkpoint's entries: the modules' own tensors, and new ones; a MismatchError if it does not fit."""
    names = _parameter_names(objects)
    paths = {fqn: tuple(map(str, entry.path or (fqn,))) for fqn, entry in entries.items()}
    for name in objects.keys() - {path[0] for path in paths.values()}:
        found = f"no {name!r}, only {', '.join(dict.fromkeys(repr(path[0]) for path in paths.values()))}"
        raise MismatchError(where, found=found, expected="all that is to be restored", do="leave it out")
    leaves = {tuple(map(str, path)): obj for path, obj in iter_leaves(objects)}
    below: dict[StatePath, dict[str, StatePath]] = {path: {} for path in leaves}
    """The entries of each object, and their paths in it."""
    targets: dict[str, Any] = {}
    for fqn, path in paths.items():
        length = next((length for length in range(1, len(path) + 1) if path[:length] in leaves), 0)
        if length:
            below[path[:length]][fqn] = path[length:]
        elif path[0] in objects:  # a nest without tensors
            targets[fqn] = None
    optimizers = [path for path, obj in leaves.items() if isinstance(obj, Optimizer)]
    slots = {rest[1] for path in optimizers for rest in below[path].values() if len(rest) > 1 and rest[0] == "state"}
    owners = _owners(objects, slots)
    for path, obj in leaves.items():
        place, rests = f"{where}, {label_of(path)}", below[path]
        live = _check_module(obj, {rest[0]: entries[fqn] for fqn, rest in rests.items() if rest}, place)
        loose = {}
        if isinstance(obj, Optimizer):
            parameters = (parameter for group in obj.param_groups for parameter in group["params"])
            loose = dict(zip(_keys(obj, names), parameters, strict=True))
        for fqn, rest in rests.items():
            owner = None
            if isinstance(obj, Optimizer) and len(rest) > 1 and rest[0] == "state":
                owner = owners[rest[1]][1] if rest[1] in owners else loose.get(rest[1])
                if owner is None:
                    found, do = f"the state of {rest[1]!r}", "build the optimizer over the same parameters"
                    raise MismatchError(place, found=found, expected="that of its parameters", do=do)
            targets[fqn] = live.get(rest[0]) if rest and isinstance(obj, nn.Module) else _empty(entries[fqn], owner)
    return targets


def _check_module(obj: Any, saved: Mapping[str, EntryMetadata], where: str) -> dict[str, Any]:
    """A module's own values, by the keys that a checkpoint has of them; nothing of another object."""
    if not isinstance(obj, nn.Module):
        return {}
    live = obj.state_dict()
    keys = {saved_key: key for key, saved_key in match_names(map(str, saved), live).items()}
    if saved.keys() != keys.keys() or len(live) != len(keys):
        key = next(iter([*(saved.keys() - keys.keys()), *(live.keys() - keys.values())]))
        found = f"{'a' if key in saved else 'no'} key {key!r} in the checkpoint"
        raise MismatchError(where, found=found, expected="the same keys", do="build the model as it was saved")
    values = {saved_key: live[key] for saved_key, key in keys.items()}
    for key, value in values.items():
        if isinstance(value, Tensor) and saved[key].is_tensor:
            like = torch.empty(saved[key].size, dtype=torch_dtype(saved[key].dtype), device="meta")
            check_tensor_fits(value, like, f"{where}, {key}", strict=True)
    return values


def _empty(entry: EntryMetadata, parameter: Tensor | None) -> Tensor | None:
    """A tensor for an entry, sharded as the parameter that has its shape; None for what is no tensor."""
    if not entry.is_tensor:
        return None
    dtype = torch_dtype(entry.dtype)
    if parameter is not None and entry.size and tuple(parameter.shape) == tuple(entry.size):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype, device="cpu")


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the first error of ours in the `CheckpointException` of torch, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        own = [failure for _, (failure, _) in sorted(error.failures.items()) if isinstance(failure, ShrinkpointError)]
        if own:
            raise own[0] from error
        raise
