"""Writes checkpoints of many ranks as torch's `StorageWriter`."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError, ShrinkpointError, StorageError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.evaluate import ShardedModelEvaluator
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.planner import Planner, check_shardable, plan_shards
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.sharding.collectives import Collectives, LocalCollectives, make_collectives
from shrinkpoint.sharding.global_tensors import ShardLayout
from shrinkpoint.storage import AnyDirectory, ObjectUrl, directory_storage
from shrinkpoint.store import Keep
from shrinkpoint.store.chain_limit import ChainLimit
from shrinkpoint.store.directory import commit, manifest_condition
from shrinkpoint.store.identify import MANIFEST, has_file
from shrinkpoint.store.manifest import DCP_KEY, Payload, check_note
from shrinkpoint.store.retention import check_keep
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.store.save_settings import OnSave, SaveSettings
from shrinkpoint.tensors.flat_state import snapshot
from shrinkpoint.tensors.info import JSON
from shrinkpoint.train.background import call_on_save
from shrinkpoint.train.checkpointer import SaveOptions
from shrinkpoint.train.dcp import chain_registry, checkpoint_metadata
from shrinkpoint.train.dcp.chain_registry import ChainState, RestoreOrigin
from shrinkpoint.train.dcp.checkpoint_metadata import (
    METADATA_FILE,
    WrittenEntries,
    find_owners,
    metadata_to_json,
    report_entries,
    share_chunks,
)
from shrinkpoint.train.dcp.directory import CheckpointDirectory
from shrinkpoint.train.dcp.save_plan import (
    CollectedState,
    collect_plan_items,
    colocate_moments,
    plan_signatures,
    rank_slots,
)

_log = logging.getLogger("shrinkpoint")


class _RankInfo(NamedTuple):
    """Message of the coordinator to a rank, equal for every save, since torch may replay its plans."""

    rank: int
    world_size: int


class _WriteInfo(NamedTuple):
    """Message to the coordinator of a rank that has written a payload."""

    payload: Payload
    entries: WrittenEntries
    scheme: str
    loss: JSON
    lossy_restores: int
    stats: dict[str, float]


class CheckpointExistsError(PolicyError, RuntimeError):
    """There is a checkpoint already, and `overwrite=False`; a RuntimeError, as torch's own writer raises."""


class Writer(CheckpointDirectory, StorageWriter):
    """Writes a payload for each rank, a delta against the payload that the rank wrote last, and then a manifest.

    `dcp.save(state, storage_writer=Writer(path))`, or a path for each save with `checkpoint_id=`. The checkpoint is
    self-contained: every older directory may be deleted. The reference of the next delta is kept by the process, so
    that a new writer for each save has the same effect as one writer for all.

    Memory on each rank: a copy of what it writes, for each of the last `chain_registry.MAX_CHAINS` chains.

    Args:
        path: directory of the next checkpoint, or a URL such as "s3://bucket/run/step-100"; None: it is passed to
            `dcp.save`.
        scheme, keyframe_every, threads, on_save: see `SaveSettings`. A scheme decides for global tensors, over all
            ranks. `keyframe_every="auto"`: 20 in a directory; 1 in a bucket, where a delta needs the directories that
            it was made against, as there are no links. Without `threads`, the ranks on one machine share its cores.
            `on_save` is called on the rank that coordinates; `async_save` in another process needs one that can be
            pickled.
        chain: name of the chain; None: paths that differ only in numbers are one chain.
        group: what is passed to `dcp.save` as `process_group`; only a lossy scheme needs it.
        model: the model whose state is saved; only a scheme that evaluates it needs it.
        step, metrics, note: stored in the manifest, for people.
        overwrite: False: raise if the directory has a checkpoint already.
        keep: the rules by which the caller deletes checkpoints, which ends chains before they hold more than plain
            checkpoints would; None: it keeps all. The writer itself deletes nothing.

    Attributes:
        overwrite: as passed.
        save_id: id of the current save, or of the last one; the manifest has that of the coordinator's writer.
        can_reverse: see `ChainLimit`; what the caller sets holds for the next saves.
        chain_limit: where the chain of this rank's payloads ends; None before the first save.

    Raises:
        PolicyError: an unknown scheme, a number out of range, a URL of something else than object storage.
    """

    def __init__(
        self,
        path: AnyDirectory | None = None,
        *,
        scheme: str | Scheme = "lossless",
        keyframe_every: int | Literal["auto"] | None = "auto",
        chain: str | None = None,
        threads: int | None = None,
        group: dist.ProcessGroup | None = None,
        model: Any = None,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        overwrite: bool = True,
        on_save: OnSave | None = None,
        keep: Keep | None = None,
    ) -> None:
        super().__init__(path, threads)
        limit = 20 if keyframe_every == "auto" else keyframe_every
        settings = SaveSettings(scheme, limit, threads=threads, on_save=on_save)
        if step is not None:
            validate.check_int("step", step, minimum=0, do="leave it out")
        if chain is not None:
            validate.check_str("chain", chain, do="leave it out: paths that differ only in numbers are one chain")
        self._scheme, self._chain = get_scheme(settings.scheme), chain
        self._keyframe_option: int | Literal["auto"] | None = keyframe_every
        self._group, self._model, self._is_coordinator = group, model, True
        self._save_options = SaveOptions(step, validate.as_floats(metrics), check_note(note))
        self._on_save, self._keep = settings.on_save, check_keep(keep)
        self.overwrite, self.save_id = overwrite, secrets.token_hex(8)
        self.can_reverse: Callable[[int], bool] | None = None
        self.chain_limit: ChainLimit | None = None
        self._condition: object = None  # what the manifest may replace
        self._restored: dict[str, RestoreOrigin] | None = None  # by the process that sent this writer

    def __getstate__(self) -> dict[str, Any]:
        """State for the process of `async_save`: no group and no model, but what was restored here."""
        restored = self._restored or chain_registry.restored_origins()
        return {**self.__dict__, "_group": None, "_model": None, "_restored": restored, "chain_limit": None}

    @property
    def _keyframe_every(self) -> int | None:
        if self._keyframe_option != "auto":
            return self._keyframe_option
        return 1 if isinstance(self._directory, ObjectUrl) else 20

    @property
    def threads(self) -> int | None:
        """Native threads of this rank; None: every core."""
        return self._threads

    def reset(self, checkpoint_id: AnyDirectory | None = None) -> None:
        """Begin a save. Raises nothing, as torch would not report an error here to the other ranks."""
        self.save_id = secrets.token_hex(8)
        if checkpoint_id is not None:
            self._set_checkpoint_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note whether this rank is the coordinator, and check the directory.

        Raises:
            PolicyError: no path of a directory; a save without collectives.
            CheckpointExistsError: there is a checkpoint already, and it must not be overwritten.
        """
        self._is_coordinator, directory = is_coordinator, self._directory
        self._condition = manifest_condition(directory) if is_coordinator else None
        if not self.overwrite and any(has_file(directory, name) for name in (MANIFEST, METADATA_FILE)):
            found, do = f"Checkpoint already exists and {self.overwrite=}", "save elsewhere, or with overwrite=True"
            raise CheckpointExistsError(str(directory), found=found, do=do)
        if not kwargs.get("use_collectives", True):
            found = "use_collectives=False, with which no rank knows if all of the checkpoint was written"
            raise PolicyError("Writer", found=found, expected="collectives", do="leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add what this rank has to its plan, before torch divides among the ranks what several have."""
        return replace(plan, storage_data=rank_slots(plan, type(self._scheme).__name__)) if plan.usable else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Move moments to the ranks of their weights, and add to every plan the number of its rank.

        Raises:
            PolicyError: a planner that replays plans in another way than torch's.
        """
        colocated = colocate_moments(plans)
        return [replace(plan, storage_data=_RankInfo(rank, len(plans))) for rank, plan in enumerate(colocated)]

    @torch.no_grad()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's payload durably; the checkpoint exists only after `finish`.

        Raises:
            StateError: something cannot be stored.
            PolicyError: a scheme that cannot be used here.
            StorageError: writing failed; no part of the payload is left.
        """
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, once every rank has written all that was planned.

        Raises:
            StorageError: something is missing, or writing failed; a previous checkpoint there is still valid.
        """
        directory = self._directory
        writes = [write for rank in results for result in rank if isinstance(write := result.storage_data, _WriteInfo)]
        share_chunks(metadata)
        owners = find_owners(metadata, [write.entries for write in writes])
        missing = {fqn: count for fqn, payloads in owners.items() if (count := int((payloads < 0).sum()))}
        if missing or not writes:
            found = "no payload"
            if missing:
                found = f"{sum(missing.values())} entries that no rank wrote, such as {next(iter(missing))!r}"
            raise StorageError(str(directory), found=found, expected="all that was planned", do="report this")
        options = replace(self._save_options, extra={DCP_KEY: metadata_to_json(metadata, owners)})
        manifest = commit(
            directory,
            [write.payload for write in writes],
            scheme=writes[0].scheme,
            lossy_restores=max(write.lossy_restores for write in writes),
            loss=next((write.loss for write in writes if write.loss is not None), None),
            stats=_worst_stats([write.stats for write in writes]),
            id=self.save_id,
            condition=self._condition,
            keep_payloads=isinstance(directory, ObjectUrl) and self._keyframe_every != 1,
            **options.manifest_fields(),
        )
        try:
            content = checkpoint_metadata.metadata_file_bytes(manifest.id)
            directory_storage(directory).put(METADATA_FILE, content)
        except ShrinkpointError as error:  # the checkpoint is valid; this file is for other tools
            _log.warning("%s", error)
        report = SaveReport.from_manifest(str(directory), manifest)
        _log.info("saved %s, in %.2f s", report, report.seconds)
        call_on_save(self._on_save, report)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        rank_info, directory = plan.storage_data, self._directory
        assert isinstance(rank_info, _RankInfo)
        rank, default_name = rank_info.rank, chain_registry.default_name(directory)
        origins = chain_registry.restored_origins() if self._restored is None else self._restored

        def collect() -> CollectedState:
            collected = collect_plan_items(plan, planner)
            chain.load_parent(origins.get(default_name), collected.state, rank, self._threads)
            return collected

        with chain_registry.acquire_chain(
            self._chain or default_name, rank, keyframe_every=self._keyframe_every, threads=self._threads
        ) as chain:
            chain.confirm_last_write()
            self.chain_limit = chain.delta_writer.chain_limit
            self.chain_limit.keep, self.chain_limit.can_reverse = self._keep, self.can_reverse
            origin = chain_registry.find_origin(origins, default_name, plan_signatures(plan))
            scheme = chain.scheme_for(self._scheme, origin)
            if isinstance(scheme, Lossless):
                collected = collect()
            else:
                scheme, collected = self._plan_across_ranks(scheme, collect, chain, rank_info.world_size)
            if not collected.indices and not self._is_coordinator:
                return []
            copy = None if collected.state.is_on_cpu else snapshot(collected.state)
            report = chain.delta_writer.write(
                directory, copy or collected.state, scheme=scheme, rank=rank, adopt=copy is not None
            )
            payload = chain.delta_writer.payload
            chain.unconfirmed = str(directory), payload  # the base of the next delta, once the next save confirms it
            chain.delta_writer.commit_reference()
            entries, restores = report_entries(collected.indices), chain.lossy_restores
            write = _WriteInfo(payload, entries, report.scheme, report.loss_report, restores, report.stats)
        return [WriteResult(MetadataIndex("~payload"), payload.size, write)]  # one for all entries: torch reads none

    def _plan_across_ranks(
        self, scheme: Scheme, collect: Callable[[], CollectedState], chain: ChainState, world_size: int
    ) -> tuple[Scheme, CollectedState]:
        """The plan of a lossy scheme, which gives every shard of a tensor the same recipe, and the collected state."""
        collectives: Collectives = LocalCollectives()
        if world_size > 1:
            if dist.get_world_size(self._group) != world_size:
                found = f"{dist.get_world_size(self._group)} ranks in its group, while {world_size} save"
                raise PolicyError("Writer", found=found, do="pass group=, the same as process_group= of dcp.save")
            collectives = make_collectives(self._group)

        def prepare() -> tuple[CollectedState, ShardedModelEvaluator | None]:
            is_sent = self._restored is not None  # to another process than the model's
            is_concurrent = is_sent or threading.current_thread().name.startswith("AsyncCheckpointExecutor")
            evaluate = getattr(scheme, "evaluate", None)
            if is_concurrent and evaluate is not None:  # the model is being trained meanwhile, or is elsewhere
                found = "async_save with a scheme that evaluates the model"
                do = "use dcp.save, or a scheme without evaluate="
                raise PolicyError("Writer", found=found, expected="a model that waits", do=do)
            check_shardable(scheme, measures=self._model is not None or is_sent)
            collected = collect()
            if is_concurrent or self._model is None:
                return collected, None
            return collected, ShardedModelEvaluator(collected.state, evaluate, self._model)

        collected, evaluator = collectives.run_all_or_raise(prepare)
        # A planning scheme uses the last checkpoint even if this one is a keyframe; others only code differences to it.
        writer = chain.delta_writer
        reference = writer.last_reference if isinstance(scheme, Planner) else writer.reference
        layout = ShardLayout(collected.shards, collectives)
        return plan_shards(scheme, collected.state, reference, layout, evaluator), collected


def _worst_stats(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for rank in stats for name in rank)
    by_name = {name: [rank[name] for rank in stats if name in rank] for name in names}
    return {name: min(values) if name == "retention" else max(values) for name, values in by_name.items()}
