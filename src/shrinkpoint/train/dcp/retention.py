"""Retention of checkpoints that ranks write together: what one deletes, and what all of them write again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.store import Keep, layout
from shrinkpoint.store.directory import delete_expired, own_files
from shrinkpoint.store.directory_retention import Directory, RunPlan, chains_to_strip, directories_to_reverse
from shrinkpoint.store.directory_rewrite import Ranks, RunRewriter
from shrinkpoint.store.identify import is_checkpoint
from shrinkpoint.store.rewrite import has_memory_to_reverse
from shrinkpoint.train.dcp.checkpoint_metadata import MOMENTS
from shrinkpoint.train.dcp.directory import ranks_on_machine
from shrinkpoint.train.dcp.writer import Writer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_log = logging.getLogger("shrinkpoint")


def has_memory_on_all_ranks(raw_bytes: int) -> bool:
    """True if every rank of this machine has memory to write checkpoints of so many bytes again."""
    return has_memory_to_reverse(raw_bytes * ranks_on_machine())


class ShardRetention:
    """Deletes checkpoints of ranks, and what failed saves leave, and writes older ones again, each rank some payloads.

    Args:
        keep: the rules; None: all stay, and nothing is done.
        make_plan: decides what the rules do; called on the first rank once the checkpoint is saved.
        writer: of this rank, which saves now; it may end its chain where older checkpoints can be written again.
        settled: chains whose moments stay, as deleting them frees nothing; more are added.
    """

    def __init__(
        self, keep: Keep | None, make_plan: Callable[[Keep], RunPlan], writer: Writer, settled: set[frozenset[str]]
    ) -> None:
        self._keep, self._make_plan, self._writer, self._settled = keep, make_plan, writer, settled
        writer.can_reverse = has_memory_on_all_ranks

    @contextmanager
    def removing_failed(self, group: ProcessGroup | None) -> Iterator[None]:
        """Remove what ranks have written if the save within fails on one of them."""
        try:
            yield
        except BaseException:
            directory = self._writer.path
            if isinstance(directory, Path) and not ranks_of(group).rank:  # the rank that commits
                _remove_incomplete(directory)
            raise

    def apply_after(self, save: Future[T], group: ProcessGroup | None) -> Future[T]:
        """The same as both in a thread, for a background save; returns when all is done."""

        def wait_and_apply() -> T:
            with self.removing_failed(group):
                result = save.result()
            self.apply(group)
            return result

        executor = ThreadPoolExecutor(1, "shrinkpoint-retention")
        future = executor.submit(wait_and_apply)
        executor.shutdown(wait=False)
        return future

    def apply(self, group: ProcessGroup | None) -> None:
        """Delete what no rule keeps, and write older checkpoints again where that frees bytes; all ranks call this.

        What fails is logged: it is no reason to end a run.
        """
        keep, ranks = self._keep, ranks_of(group)
        if keep is None:
            return

        def plan_and_delete() -> RunPlan | None:
            if ranks.rank:
                return None
            plan = self._make_plan(keep)
            delete_expired(plan.delete)
            return plan

        try:
            plan, *_ = ranks.gather(plan_and_delete)
            rewriter = RunRewriter(plan.keep, threads=self._writer.threads, ranks=ranks)
            for chain in chains_to_strip(plan):
                self._strip(rewriter, chain)
            self._reverse(rewriter, plan, keep, ranks)
        except (ShrinkpointError, OSError, MemoryError, RuntimeError) as error:  # torch reports what it cannot allocate
            if not ranks.rank:
                _log.warning("older checkpoints stay, or take more bytes than they need: %s", error)

    def _strip(self, rewriter: RunRewriter, chain: list[Directory]) -> None:
        """Delete the moments of checkpoints of one chain."""
        names = frozenset(path.name for path in chain)
        if names not in self._settled and not rewriter.rewrite(chain, MOMENTS):
            self._settled.add(names)

    def _reverse(self, rewriter: RunRewriter, plan: RunPlan, keep: Keep, ranks: Ranks) -> None:
        """Make what is kept of ended chains deltas against newer checkpoints."""
        manifests, limit = [*plan.keep.values()], self._writer.chain_limit
        if limit is not None:
            limit.kept = len(manifests)
        if len(manifests) < 2 or all(payload.bases for payload in manifests[-1].payloads):
            return
        own, before = (manifest.of_rank(ranks.rank) for manifest in (manifests[-1], manifests[-2]))

        def wants_reverse() -> bool:
            if own is None:
                return False
            if limit is not None:
                return limit.wants_reverse(own)
            # Another process writes; a keyframe behind a delta has ended a chain
            return before is not None and before.depth > own.depth == 0 and has_memory_on_all_ranks(own.raw_bytes)

        wants = ranks.gather(wants_reverse)
        due = [rank for rank, is_due in enumerate(wants) if is_due]
        if due:  # and what ranks have written that do not save any more
            written = {layout.rank_of(payload.name) for manifest in manifests for payload in manifest.payloads}
            due += sorted(written - {layout.rank_of(payload.name) for payload in manifests[-1].payloads})
        parents = {rank: directories_to_reverse(plan, keep, rank) for rank in due}
        if any(parents.values()):
            shares = rewriter.reverse(parents, keep)
            if limit is not None:
                limit.note_reversed(shares.get(ranks.rank))


def _remove_incomplete(directory: Path) -> None:
    """Remove what ranks have written into a directory whose checkpoint was not committed, as far as that is possible.

    The rank that commits calls this: it knows whether the manifest is there.
    """
    with suppress(ShrinkpointError, OSError):
        if is_checkpoint(directory):
            return
        for path in own_files(directory):
            path.unlink(missing_ok=True)
    for folder in (directory / layout.BASES, directory):
        with suppress(OSError):  # there is none, or a file of somebody else is in it
            folder.rmdir()


def ranks_of(group: ProcessGroup | None) -> Ranks:
    """The ranks of a group; None: all, or this process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(dist.get_rank(group), dist.get_world_size(group), partial(gather_or_raise, group=group))
