"""The reading half of `torch.distributed.checkpoint`."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.state.dtypes import raw
from shrinkpoint.store import folder as folders
from shrinkpoint.store.foldermanifest import FolderManifest
from shrinkpoint.train.dcp import chains
from shrinkpoint.train.dcp.contents import Contents, Pieces, Whole
from shrinkpoint.train.dcp.description import KEY, Description, understand
from shrinkpoint.train.dcp.place import Place, is_path, threads_of
from shrinkpoint.train.dcp.values import packed

_log = logging.getLogger("shrinkpoint")


class Reader(StorageReader):
    """Reads what `Writer` wrote, on any number of ranks, in any layout; nothing on the disk is ever unpickled.

    `dcp.load(state, storage_reader=Reader(path))`, in place. Only what a rank wants is decoded; where that is most of
    a payload, all of that payload at once. One payload is read after the other.

    Memory: twice the largest payload that is read as a whole, at most.

    Args:
        path: directory of the checkpoint; None: `dcp.load` says it.
        threads: native threads for decoding; None: every core, shared with the other ranks on this machine.

    Attributes:
        load_id: of the load that goes on, or was last.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, threads: int | None = None) -> None:
        super().__init__()
        self._threads, self._place = threads_of(threads), Place(path, strict=True)
        self._manifest: FolderManifest | None = None
        self._description = Description({})
        self.load_id = secrets.token_hex(8)

    @property
    def checkpoint_id(self) -> Path | None:
        """The directory of this checkpoint."""
        return self._place.path

    @property
    def path(self) -> Path | None:
        """The same, as torch's own reader calls it."""
        return self._place.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a directory: any path but a URL."""
        return is_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load. Nothing is raised here: torch calls this where other ranks would not hear of it."""
        self._manifest, self._description = None, Description({})
        self.load_id = secrets.token_hex(8)
        if checkpoint_id is not None:
            self._place = Place(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds.

        Raises:
            NotFoundError: there is no checkpoint of ours.
            FormatError: its manifest is not to be trusted.
            PolicyError: asked for the metadata of one rank, which no checkpoint of ours has.
        """
        if kwargs.get("rank") is not None:  # torch does so where the first time failed, on one rank alone perhaps
            do = "look at why the checkpoint as a whole does not load"
            raise PolicyError("Reader", found=f"metadata of rank {kwargs['rank']}", expected="of all", do=do)
        self._manifest, self._description = opened(self._place.folder)
        metadata = self._description.metadata()
        metadata.storage_meta = StorageMeta(self._place.path, save_id=self._manifest.id, load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned for this rank into place.

        Raises:
            ChainError, FormatError: bytes are at fault; what was read before stays read.
            MismatchError: the checkpoint has not what is planned, or not in this shape.
            StorageError: reading failed.
        """
        manifest = self._of_manifest()
        for at, items in sorted(self._by_payload(plan).items()):
            with self._contents(manifest, at, items) as contents:
                for item in items:
                    self._read(item, contents, planner)
        entries = self._description.items.values()
        chains.remember(self._place.folder, manifest, ((x.fqn, x.size, x.dtype) for x in entries if x.is_tensor))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _of_manifest(self) -> FolderManifest:
        if self._manifest is None:
            self._manifest, self._description = opened(self._place.folder)
        return self._manifest

    def _by_payload(self, plan: LoadPlan) -> Mapping[int, list[ReadItem]]:
        found: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            index = item.storage_index
            chunk = self._description.chunk(index.fqn, index.offset or (), str(self._place.path))
            found.setdefault(chunk.payload, []).append(item)
        return found

    def _contents(self, manifest: FolderManifest, at: int, items: list[ReadItem]) -> Contents:
        """All of a payload where most of it is wanted: that is quicker than one box after the other."""
        wanted = sum(self._nbytes(item) for item in items)
        kind = Whole if 2 * wanted >= manifest.payloads[at].raw_bytes else Pieces
        return kind(self._place.folder, manifest, at, self._threads)

    def _nbytes(self, item: ReadItem) -> int:
        if item.type == LoadItemType.BYTE_IO:
            return 0
        return self._description.items[item.storage_index.fqn].nbytes(tuple(item.lengths))

    def _read(self, item: ReadItem, contents: Contents, planner: LoadPlanner) -> None:
        index = item.storage_index
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, packed(contents.value(index.fqn)))
            return
        entry = self._description.items[index.fqn]
        chunk = self._description.chunk(index.fqn, index.offset or (), str(self._place.path))
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            found, expected = f"{tuple(target.shape)} to read into", f"{tuple(item.lengths)}"
            raise MismatchError(f"{self._place.path}, {index.fqn!r}", found=found, expected=expected)
        _put(target, contents.box(entry, chunk, tuple(item.storage_offsets), tuple(item.lengths)))
        planner.commit_tensor(item, target)


def opened(folder: Path) -> tuple[FolderManifest, Description]:
    """A checkpoint's manifest, and what it says of the state dict.

    Raises:
        NotFoundError: there is no checkpoint of ours.
        MismatchError: it is another framework's to read.
        FormatError: its manifest is not to be trusted.
    """
    manifest = folders.read_manifest(folder)
    if not isinstance(manifest.extra, dict) or KEY not in manifest.extra:
        found, do = "a checkpoint that `dcp.save` did not write", "read it with what wrote it"
        raise MismatchError(str(folder), found=found, expected="one of torch.distributed.checkpoint", do=do)
    return manifest, understand(manifest.extra[KEY], len(manifest.payloads), str(folder / folders.MANIFEST))


def _put(target: Tensor, values: Tensor) -> None:
    if target.dtype == values.dtype and target.device.type == "cpu":
        raw(target).copy_(raw(values))
        return
    if target.dtype != values.dtype:
        _log.warning("values of %s are read into a tensor of %s", values.dtype, target.dtype)
    target.copy_(values)
