"""The writing half of `torch.distributed.checkpoint`."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError, ShrinkpointError, StorageError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import directory as folders
from shrinkpoint.store.manifest import Payload
from shrinkpoint.tensors.flat_state import snapshot
from shrinkpoint.tensors.info import JSON
from shrinkpoint.train.dcp import chain_registry, checkpoint_metadata, planning
from shrinkpoint.train.dcp.chain_registry import ChainState, RestoreOrigin
from shrinkpoint.train.dcp.checkpoint_id import CheckpointId, is_path, threads_per_rank
from shrinkpoint.train.dcp.checkpoint_metadata import DCP_KEY, expected_indices, metadata_to_json
from shrinkpoint.train.dcp.collect import CollectedState, collect_plan_items, plan_signatures
from shrinkpoint.train.dcp.colocate import colocate_moments, rank_slots
from shrinkpoint.train.state_dicts import as_floats

_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class _RankInfo:
    """What the coordinator tells a rank: facts that are the same for every save, for torch may replay its plans."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class _WriteInfo:
    """What a rank tells the coordinator."""

    payload: Payload
    scheme: str
    loss: JSON
    lossy_restores: int


class CheckpointExistsError(PolicyError, RuntimeError):
    """There is a checkpoint already, and `overwrite=False`; torch's own writer raises a RuntimeError."""


class Writer(StorageWriter):
    """Writes one payload a rank, each a delta against what this rank wrote before, and a manifest at the end.

    `dcp.save(state, storage_writer=Writer(path))`, or a path for each save with `checkpoint_id=`. The checkpoint is
    self-contained: every older directory may be deleted. What the next delta stands on is held by the process, so that
    a new writer for each save is as good as one for all.

    Memory on each rank: a copy of what it writes, for each of the last `chains.MOST` chains.

    Args:
        path: directory of the next checkpoint; None: `dcp.save` says it.
        scheme: "lossless", or a scheme of one's own settings, which decides for whole tensors over all ranks.
        keyframe_every: each chain has at most this many checkpoints, its keyframe included; None: no bound.
        chain: what belongs together; None: paths that differ in their numbers only.
        threads: native threads for coding; None: every core, shared with the other ranks on this machine.
        group: what is passed to `dcp.save` as `process_group`; only a lossy scheme needs it.
        model: whose state is saved; only a scheme that measures needs it.
        step, metrics, note: for the manifest: what is saved, for people.
        overwrite: False: a directory that has a checkpoint already is refused.

    Attributes:
        save_id: of the save that goes on, or was last; the `id` of the manifest is that of the coordinator's writer.

    Raises:
        PolicyError: a scheme nobody knows, a number out of range, a URL.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        scheme: str | Scheme = "lossless",
        keyframe_every: int | None = 20,
        chain: str | None = None,
        threads: int | None = None,
        group: dist.ProcessGroup | None = None,
        model: Any = None,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        overwrite: bool = True,
    ) -> None:
        super().__init__()
        keyframe_every = validate.check_keyframe_every(keyframe_every)
        if step is not None:
            validate.check_int("step", step, minimum=0, do="leave it out")
        validate.check_str("note", note)
        if chain is not None:
            validate.check_str("chain", chain, do="leave it out: paths that differ in their numbers belong together")
        self._scheme, self._keyframe_every, self._chain = get_scheme(scheme), keyframe_every, chain
        self._threads, self._group, self._model = threads_per_rank(threads), group, model
        self._manifest_fields: dict[str, Any] = {"step": step, "metrics": as_floats(metrics), "note": note}
        self._checkpoint_id, self._is_coordinator = CheckpointId(path, strict=True), True
        self.overwrite, self.save_id = overwrite, _new_id()
        self._restored: dict[str, RestoreOrigin] | None = None  # in the process that this writer was sent from

    def __getstate__(self) -> dict[str, Any]:
        """For `async_save` in a process, which gets neither group nor model, but is told what was restored here."""
        return {
            **self.__dict__,
            "_group": None,
            "_model": None,
            "_restored": self._restored or chain_registry.restored_origins(),
        }

    @property
    def checkpoint_id(self) -> Path | None:
        """The directory of this checkpoint."""
        return self._checkpoint_id.path

    @property
    def path(self) -> Path | None:
        """The same, as torch's own writer calls it."""
        return self._checkpoint_id.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a directory: any path but a URL."""
        return is_path(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save. Nothing is raised here: torch calls this where other ranks would not hear of it."""
        self.save_id = _new_id()
        if checkpoint_id is not None:
            self._checkpoint_id = CheckpointId(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take a role.

        Raises:
            PolicyError: no path, or none of a directory; a save in which ranks do not speak to each other.
            CheckpointExistsError: there is one already, and it must not be overwritten.
        """
        self._is_coordinator, folder = is_coordinator, self._checkpoint_id.directory
        if not self.overwrite and (
            folders.is_checkpoint(folder) or (folder / checkpoint_metadata.METADATA_FILE).exists()
        ):
            found, do = f"Checkpoint already exists and {self.overwrite=}", "save elsewhere, or with overwrite=True"
            raise CheckpointExistsError(str(folder), found=found, do=do)
        if not kwargs.get("use_collectives", True):
            found = "use_collectives=False, which makes checkpoints that no rank can vouch for"
            raise PolicyError("Writer", found=found, expected="collectives", do="leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add which entries this rank has, before torch shares out what several have: see `together`."""
        return replace(plan, storage_data=rank_slots(plan, type(self._scheme).__name__)) if plan.usable else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Bring moments to their weights, and tell every rank its number.

        Raises:
            PolicyError: a planner that replays plans in a way of its own.
        """
        return [
            replace(plan, storage_data=_RankInfo(rank, len(plans))) for rank, plan in enumerate(colocate_moments(plans))
        ]

    @torch.no_grad()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's payload, durably; there is no checkpoint before `finish`.

        Raises:
            StateError: something cannot be stored.
            PolicyError: a scheme that cannot be used here.
            StorageError: writing failed; nothing of it is left.
        """
        results = self._write(plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint exist, once every rank has written all that was planned.

        Raises:
            StorageError: something is missing, or writing failed; the checkpoint before stands.
        """
        folder = self._checkpoint_id.directory
        wrote, owners = _merge_results(results)
        missing = [index for index in expected_indices(metadata) if index not in owners]
        if missing or not wrote:
            found = f"{len(missing)} entries that nobody wrote, such as {missing[0].fqn!r}" if missing else "no payload"
            raise StorageError(str(folder), found=found, expected="all that was planned", do="report this")
        loss = next((one.loss for one in wrote if one.loss is not None), None)
        manifest = folders.commit(
            folder,
            [one.payload for one in wrote],
            scheme=wrote[0].scheme,
            lossy_restores=max(one.lossy_restores for one in wrote),
            loss=loss,
            extra={DCP_KEY: metadata_to_json(metadata, owners)},
            id=self.save_id,
            **self._manifest_fields,
        )
        try:
            LocalStorage(folder).put(
                checkpoint_metadata.METADATA_FILE, checkpoint_metadata.metadata_file_bytes(manifest.id)
            )
        except ShrinkpointError as error:  # the checkpoint stands; this is for other people's tools
            _log.warning("%s", error)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._checkpoint_id.path, save_id=self.save_id)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        mine = plan.storage_data
        assert isinstance(mine, _RankInfo)
        folder = self._checkpoint_id.directory
        default = chain_registry.default_name(folder)
        name = self._chain or default
        restored = chain_registry.restored_origins() if self._restored is None else self._restored
        with chain_registry.acquire_chain(
            name, mine.rank, keyframe_every=self._keyframe_every, threads=self._threads
        ) as chain:
            chain.confirm_last_write()
            loaded = restored.get(default)
            scheme = chain.scheme_for(
                self._scheme, chain_registry.find_origin(restored, default, plan_signatures(plan))
            )
            if isinstance(scheme, Lossless):
                collected = self._collect(plan, planner, chain, loaded, mine.rank)
            else:
                scheme, collected = planning.plan_across_ranks(
                    scheme,
                    lambda: self._collect(plan, planner, chain, loaded, mine.rank),
                    chain,
                    world_size=mine.world_size,
                    group=self._group,
                    model=self._model,
                    is_sent=self._restored is not None,
                )
            if not collected.item_nbytes and not self._is_coordinator:
                return []
            copy = None if collected.is_on_cpu else snapshot(collected.state)
            report = chain.delta_writer.write(
                folder, copy or collected.state, scheme=scheme, rank=mine.rank, adopt=copy is not None
            )
            wrote = _WriteInfo(chain.record_write(folder), report.scheme, report.loss_report, chain.lossy_restores)
        results = [WriteResult(index, nbytes, None) for index, nbytes in collected.item_nbytes.items()]
        return [*results, WriteResult(MetadataIndex("~payload"), wrote.payload.size, wrote)]

    def _collect(
        self, plan: SavePlan, planner: SavePlanner, chain: ChainState, origin: RestoreOrigin | None, rank: int
    ) -> CollectedState:
        collected = collect_plan_items(plan, planner)
        chain.load_parent(origin, collected.state, rank, self._threads)
        return collected


def _new_id() -> str:
    """Of a checkpoint that is going to be written."""
    return secrets.token_hex(8)


def _merge_results(results: list[list[WriteResult]]) -> tuple[list[_WriteInfo], dict[MetadataIndex, int]]:
    """What the ranks that wrote say, and which of their payloads has what."""
    wrote: list[_WriteInfo] = []
    owners: dict[MetadataIndex, int] = {}
    for rank in results:
        said = [one.storage_data for one in rank if isinstance(one.storage_data, _WriteInfo)]
        owners.update({one.index: len(wrote) for one in rank if not isinstance(one.storage_data, _WriteInfo) and said})
        wrote += said[:1]
    return wrote, owners
