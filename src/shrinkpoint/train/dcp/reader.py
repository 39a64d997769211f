"""Reads checkpoints of many ranks: as torch's `StorageReader`, or as one state dict in a single process."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shrinkpoint import validate
from shrinkpoint.errors import (
    VERIFY_ADVICE,
    ChainError,
    CorruptError,
    FormatError,
    MismatchError,
    NotFoundError,
    PolicyError,
    StorageError,
)
from shrinkpoint.storage import AnyDirectory, ObjectUrl, resolve_directory
from shrinkpoint.store.chain import manifest_identity, use_current
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.identify import MANIFEST, identify
from shrinkpoint.store.load import check_patterns, no_match_error
from shrinkpoint.store.manifest import DCP_KEY, DirectoryManifest
from shrinkpoint.tensors.dtypes import as_bits, empty, torch_dtype
from shrinkpoint.tensors.names import tensor_name
from shrinkpoint.tensors.tree_decoder import is_selected, match_patterns
from shrinkpoint.train.dcp import chain_registry
from shrinkpoint.train.dcp.checkpoint_metadata import (
    CheckpointMetadata,
    ChunkMetadata,
    EntryMetadata,
    box_slices,
    metadata_from_json,
)
from shrinkpoint.train.dcp.directory import CheckpointDirectory
from shrinkpoint.train.dcp.payload import PayloadReader, check_stored_tensors, pickle_plain

_log = logging.getLogger("shrinkpoint")


class StrictLoadPlanner(DefaultLoadPlanner):
    """torch's planner, with a MismatchError for a key that a checkpoint lacks or has in another shape.

    Args:
        where: the checkpoint.
        do: advice in that error.
    """

    def __init__(self, where: str, do: str) -> None:
        super().__init__()
        self._where, self._do = where, do

    def create_local_plan(self) -> LoadPlan:
        try:
            return super().create_local_plan()
        except (RuntimeError, ValueError) as error:
            found = f"{error}".removesuffix(".")
            found = found[0].lower() + found[1:]
            raise MismatchError(self._where, found=found, expected="what is to be loaded", do=self._do) from error


class Reader(CheckpointDirectory, StorageReader):
    """Reads what `Writer` wrote, on any number of ranks, in any layout; no file is ever unpickled.

    `dcp.load(state, storage_reader=Reader(path))` loads in place. Only what a rank requests is decoded; if that is
    most of a payload, all of that payload at once. Payloads are read one after the other.

    Memory: at most twice the largest payload that is decoded at once.

    Args:
        path: directory of the checkpoint, or a URL such as "s3://bucket/run/step-100"; None: it is passed to
            `dcp.load`.
        threads: native threads for decoding; None: every core, shared with the other ranks on this machine.
        max_bytes: how much memory the tensors of one file may take; None: as for `shrinkpoint.load`.

    Attributes:
        load_id: id of the current load, or of the last one.

    Raises:
        PolicyError: a URL of something else than object storage, or a number out of range.
    """

    def __init__(
        self, path: AnyDirectory | None = None, *, threads: int | None = None, max_bytes: int | None = None
    ) -> None:
        super().__init__(path, threads)
        self._max_bytes = validate.check_optional_int("max_bytes", max_bytes, none_meaning="for the default")
        self._manifest: DirectoryManifest | None = None
        self._metadata = CheckpointMetadata({})
        self.load_id = secrets.token_hex(8)

    def reset(self, checkpoint_id: AnyDirectory | None = None) -> None:
        """Begin a load. Raises nothing, as torch would not report an error here to the other ranks."""
        self._manifest, self._metadata = None, CheckpointMetadata({})
        self.load_id = secrets.token_hex(8)
        if checkpoint_id is not None:
            self._set_checkpoint_id(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the checkpoint.

        Raises:
            NotFoundError: there is no checkpoint of ours.
            FormatError: its manifest is damaged.
            PolicyError: the metadata of one rank is requested, which no checkpoint of ours has.
        """
        if kwargs.get("rank") is not None:  # torch retries so after an error, which may concern one rank only
            do = "see the first error: why the whole checkpoint does not load"
            raise PolicyError("Reader", found=f"metadata of rank {kwargs['rank']}", expected="that of all ranks", do=do)
        self._manifest, self._metadata = open_checkpoint(self._directory)
        metadata = self._metadata.to_torch()
        metadata.storage_meta = StorageMeta(self.checkpoint_id, save_id=self._manifest.id, load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned for this rank into its tensors.

        Raises:
            ChainError, FormatError: bytes are damaged or missing; tensors that were read before the error are changed.
            MismatchError: the checkpoint does not have what is planned, or in another shape.
            StorageError: reading failed.
        """
        if self._manifest is None:
            self._manifest, self._metadata = open_checkpoint(self._directory)
        while True:
            try:
                self._read_planned(plan, planner, self._manifest)
                break
            except (ChainError, FormatError, StorageError, NotFoundError):
                if not self._take_current():
                    raise
        manifest = self._manifest
        entries = self._metadata.entries.values()
        signatures = ((entry.fqn, entry.size, entry.dtype) for entry in entries if entry.is_tensor)
        chain_registry.record_restore(self._directory, manifest, signatures)
        _log.info("loaded %s (%s)", self._directory, manifest.kind)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _take_current(self) -> bool:
        """True if the checkpoint was saved again with the same layout, so that the plan can be read of the new one.

        Not among several ranks: others may have read the old one already.
        """
        assert self._manifest is not None
        manifest, metadata = open_checkpoint(self._directory)
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        is_new = manifest_identity(manifest) != manifest_identity(self._manifest)
        if not (is_alone and is_new and metadata == self._metadata):
            return False
        self._manifest, self._metadata = manifest, metadata
        return True

    def _read_planned(self, plan: LoadPlan, planner: LoadPlanner, manifest: DirectoryManifest) -> None:
        items_by_payload = dict[int, list[ReadItem]]()
        for item in plan.items:
            items_by_payload.setdefault(self._find_chunk(item).payload, []).append(item)
        for index, items in sorted(items_by_payload.items()):
            boxes = [item for item in items if item.type != LoadItemType.BYTE_IO]
            entries = self._metadata.entries
            requested = sum(entries[item.storage_index.fqn].nbytes(tuple(item.lengths)) for item in boxes)
            whole = 2 * requested >= manifest.payloads[index].raw_bytes  # then this is faster than box after box
            limits: dict[str, Any] = {"whole": whole, "max_bytes": self._max_bytes}
            with PayloadReader(self._directory, manifest, index, self._threads, **limits) as payload:
                for item in items:
                    self._read_item(item, payload, planner)

    def _find_chunk(self, item: ReadItem) -> ChunkMetadata:
        index = item.storage_index
        return self._metadata.find_chunk(index.fqn, index.offset or (), str(self._path))

    def _read_item(self, item: ReadItem, payload: PayloadReader, planner: LoadPlanner) -> None:
        index = item.storage_index
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, pickle_plain(payload.load_object(index.fqn)))
            return
        entry = self._metadata.entries[index.fqn]
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            found, expected = f"{tuple(target.shape)} to read into", f"{tuple(item.lengths)}"
            do = "build the state with the saved shapes"
            raise MismatchError(f"{self._path}, {index.fqn!r}", found=found, expected=expected, do=do)
        starts, sizes = tuple(item.storage_offsets), tuple(item.lengths)
        values = payload.read_box(entry, self._find_chunk(item), starts, sizes)
        if target.dtype == values.dtype and target.device.type == "cpu":
            as_bits(target).copy_(as_bits(values))
        else:
            if target.dtype != values.dtype:
                _log.warning("values of %s are read into a tensor of %s", values.dtype, target.dtype)
            target.copy_(values)
        planner.commit_tensor(item, target)


def open_checkpoint(directory: Path | ObjectUrl) -> tuple[DirectoryManifest, CheckpointMetadata]:
    """The manifest of a checkpoint, and the metadata of its state dict.

    Raises:
        NotFoundError: there is no checkpoint of ours.
        MismatchError: another framework wrote it.
        FormatError: its manifest is damaged.
    """
    try:
        manifest = read_directory_manifest(directory)
    except NotFoundError:
        identity = identify(directory) if isinstance(directory, Path) else None
        if identity is None:
            raise
        expected = f"the directory of one checkpoint, with {MANIFEST}"
        raise NotFoundError(str(directory), found=identity.description, expected=expected, do=identity.do) from None
    if not manifest.is_dcp:
        found, do = "a checkpoint that `dcp.save` did not write", "load it with the program that saved it"
        raise MismatchError(str(directory), found=found, expected="one of torch.distributed.checkpoint", do=do)
    where = str(directory / MANIFEST)
    extra: Any = manifest.extra
    return manifest, metadata_from_json(extra[DCP_KEY], len(manifest.payloads), where)


@torch.no_grad()
def load(
    directory: AnyDirectory,
    *,
    only: str | Sequence[str] | None = None,
    nested: bool = True,
    threads: int | None = None,
    max_bytes: int | None = None,
) -> dict[str, Any]:
    """The state dict that was saved, or a part of it, with every global tensor on the CPU.

    Memory: the state, and one payload with its reference; of a small part of a payload only that part.

    Args:
        only: a pattern of names, or several, such as `"model.*"`, as of `shrinkpoint.load`; None: all.
        nested: False: values by fully qualified name, as torch stores them.
        threads: native threads for decoding; None: every core.
        max_bytes: how much memory the tensors of one file may take; None: as for `shrinkpoint.load`.

    Raises:
        NotFoundError: there is no checkpoint of ours; nothing matches `only`.
        MismatchError: another framework wrote it.
        PolicyError: `only` is no pattern, nor several.
        ChainError, FormatError: bytes are damaged or missing.
        StorageError: reading failed.
    """
    root = resolve_directory(directory)
    return use_current(
        lambda: open_checkpoint(root),
        lambda opened: _load(root, *opened, only=only, nested=nested, threads=threads, max_bytes=max_bytes),
        lambda opened: manifest_identity(opened[0]),
    )


def _load(
    root: Path | ObjectUrl,
    manifest: DirectoryManifest,
    metadata: CheckpointMetadata,
    *,
    only: str | Sequence[str] | None,
    nested: bool,
    threads: int | None,
    max_bytes: int | None,
) -> dict[str, Any]:
    entries = [*metadata.entries.values()]
    if only is not None:
        patterns = check_patterns(only)
        matches = match_patterns(patterns)
        paths = {entry.fqn: tuple(entry.path or (entry.fqn,)) for entry in entries}
        entries = [entry for entry in entries if is_selected(paths[entry.fqn], matches)]
        if not entries:
            raise no_match_error(str(root), patterns, [tensor_name(path) for path in paths.values()])
    chunks_by_payload: dict[int, list[tuple[EntryMetadata, ChunkMetadata]]] = {}
    for entry in entries:
        for chunk in entry.chunks:
            chunks_by_payload.setdefault(chunk.payload, []).append((entry, chunk))
    for index, chunks in sorted(chunks_by_payload.items()):  # before memory for what the manifest declares is allocated
        check_stored_tensors(root, manifest, index, [(entry, chunk) for entry, chunk in chunks if entry.is_tensor])
    state: dict[str, Any] = {entry.fqn: _allocate(entry, root) if entry.is_tensor else None for entry in entries}
    for index, chunks in sorted(chunks_by_payload.items()):
        requested = sum(entry.nbytes(chunk.sizes) for entry, chunk in chunks if entry.is_tensor)
        whole = only is None or 2 * requested >= manifest.payloads[index].raw_bytes
        with PayloadReader(root, manifest, index, threads, whole=whole, max_bytes=max_bytes) as payload:
            for entry, chunk in chunks:
                if not entry.is_tensor:
                    state[entry.fqn] = payload.load_object(entry.fqn)
                    continue
                values = payload.read_box(entry, chunk, (0,) * len(chunk.sizes), chunk.sizes)
                as_bits(state[entry.fqn])[box_slices(chunk.offsets, chunk.sizes)].copy_(as_bits(values))
    return unflatten(state, metadata.entries) if nested else state


def _allocate(entry: EntryMetadata, root: Path | ObjectUrl) -> Tensor:
    chunk_bytes = sum(entry.nbytes(chunk.sizes) for chunk in entry.chunks)
    if chunk_bytes != entry.nbytes(entry.size):
        found, expected = f"boxes of {chunk_bytes} bytes", f"{entry.nbytes(entry.size)}, all of the tensor"
        raise CorruptError(f"{root}: {entry.fqn!r}", found=found, expected=expected, do=VERIFY_ADVICE)
    return empty(entry.size, torch_dtype(entry.dtype))


def unflatten(state: Mapping[str, Any], entries: Mapping[str, EntryMetadata]) -> dict[str, Any]:
    """The nested state dict of values by fully qualified name."""
    nest: dict[str, Any] = {}
    for fqn, value in state.items():
        path = entries[fqn].path or (fqn,)
        level: Any = nest
        for key, next_key in pairwise(path):
            level = _child(level, key, [] if isinstance(next_key, int) else {})
        _child(level, path[-1], None)
        level[path[-1]] = value
    return nest


def _child(level: Any, key: str | int, default: Any) -> Any:
    if isinstance(level, list) and isinstance(key, int):
        level.extend([None] * (key + 1 - len(level)))
        level[key] = default if level[key] is None else level[key]
    elif isinstance(level, dict) and isinstance(key, str):
        level.setdefault(key, default)
    else:
        found = f"{key!r} in {validate.type_name(level)}"
        raise CorruptError("path", found=found, expected="a dict or a list", do=VERIFY_ADVICE)
    return level[key]
