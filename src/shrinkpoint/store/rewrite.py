"""Rewrites checkpoints of a store: against other parents, as keyframes, or without moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shrinkpoint.codec.reference import DecodedTensors, Reference, as_decoded, lattice_sources
from shrinkpoint.errors import ChainError, FormatError
from shrinkpoint.progress import Task, track
from shrinkpoint.schemes.base import QuantizedState, Scheme
from shrinkpoint.schemes.lossless import Recode
from shrinkpoint.storage import Storage
from shrinkpoint.store.chain import is_orphaned, orphaned_deltas, store_chain
from shrinkpoint.store.checkpoint_file import DecodedFile, build_state
from shrinkpoint.store.decode import decode_chain, iter_checkpoints
from shrinkpoint.store.listing import Listing, read_step, scan
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.retention import RewriteTarget
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.store.transaction import CheckpointTransaction
from shrinkpoint.tensors.dtypes import materialize
from shrinkpoint.tensors.flat_state import FlatState, flatten, without_optimizer_state
from shrinkpoint.tensors.info import JSON, EncodedRecord
from shrinkpoint.tensors.memory import available_bytes
from shrinkpoint.tensors.optimizers import has_optimizer_state

_ENCODED_STATES = 2
"""States that may wait in memory, encoded, for their place."""
_REVERSE_STATES = 7
"""States for which there must be memory: the six that `write_reversed` takes at most, and one to spare."""


@dataclass(frozen=True)
class _EncodedCheckpoint:
    """A checkpoint whose records wait for their place, as the scheme that writes them."""

    id: str  # of the scheme that first wrote it
    state: FlatState  # its structure; the tensors are not held
    records: Sequence[EncodedRecord]  # as a reader of its new parent decodes them
    loss: JSON  # the `loss` of the original manifest

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        return QuantizedState(state, loss=self.loss)

    def encode(self, *arguments: Any, **options: Any) -> Iterator[EncodedRecord]:
        return iter(self.records)


class RewrittenCheckpoint(NamedTuple):
    """A checkpoint whose payload was written again; `transaction.commit_manifest(after)` commits it."""

    # `before`, `after`: its manifests.
    before: Manifest
    after: Manifest
    report: SaveReport  # of the new payload
    names: frozenset[str]  # of the files and links that were written, relative to the step's directory
    transaction: CheckpointTransaction


def has_moments(storage: Storage, manifest: Manifest) -> bool:
    """True if the optimizers of a checkpoint have state for their parameters; False if its header cannot be read.

    Raises:
        StorageError: reading failed.
    """
    *_, own = store_chain(storage, manifest)
    try:
        return own.read(lambda reader: has_optimizer_state(reader.tree))
    except (ChainError, FormatError):
        return False


def write_again(
    storage: Storage,
    listing: Listing,
    targets: Sequence[RewriteTarget],
    transactions: ExitStack,
    threads: int | None = None,
    title: str = "",
) -> list[RewrittenCheckpoint]:
    """Write the payloads of checkpoints of a chain again without further loss, whatever the schemes were.

    The values that a reader gets are encoded exactly, those of lossy schemes by their codes. Memory: three states.

    Args:
        listing: the content of the store.
        targets: by rising step.
        transactions: aborts what is not committed when it is closed.
        title: of the task, for progress bars; "": none is shown.

    Raises:
        ChainError, FormatError: one does not load.
        StorageError: reading or writing failed.
    """
    by_step = {target.manifest.step: target for target in targets}
    rewritten: list[RewrittenCheckpoint] = []
    previous: Reference | None = None  # the tensors of the last one that was written
    checkpoints = iter_checkpoints(storage, [target.manifest for target in targets], threads=threads)
    for manifest, decoded in track(checkpoints, title, len(targets)) if title else checkpoints:
        step, target = manifest.step, by_step[manifest.step]
        parent, reference = None, None
        if target.parent is not None and target.parent not in by_step:
            parent = listing.manifests[target.parent]
            reference = decode_chain(store_chain(storage, parent), threads=threads).reference
        elif rewritten and target.parent == rewritten[-1].after.step:
            parent, reference = rewritten[-1].after, previous
        state = build_state(decoded, f"step {step}")
        flat_state = without_optimizer_state(state) if target.weights_only else flatten(state)
        transaction = transactions.enter_context(CheckpointTransaction(storage, listing, step, parent, reference))
        scheme = Recode(decoded.reference.quantized, manifest.loss, manifest.scheme)
        item = _write_payload(transaction, target, flat_state, scheme, threads)
        listing = listing.with_files(step, item.names)
        taken = transaction.take_reference()
        previous = None
        if any(other.parent == step for other in targets):
            # As a reader decodes them: contiguous.
            tensors = {name: materialize(tensor).contiguous() for name, tensor in taken.tensors.items()}
            previous = Reference(as_decoded(tensors), dict(taken.quantized))
        rewritten.append(item)
    return rewritten


def _write_payload(
    transaction: CheckpointTransaction, target: RewriteTarget, state: FlatState, scheme: Scheme, threads: int | None
) -> RewrittenCheckpoint:
    report = transaction.add(state, scheme=scheme, threads=threads)
    after = transaction.rewritten_manifest(target.manifest, weights_only=target.weights_only)
    return RewrittenCheckpoint(target.manifest, after, report, transaction.written_names, transaction)


def has_memory_to_reverse(raw_bytes: int) -> bool:
    """True if there is memory for `write_reversed` of states of so many bytes, as far as the system says."""
    available = available_bytes()
    return available == 0 or available > _REVERSE_STATES * raw_bytes


def write_reversed(
    storage: Storage,
    listing: Listing,
    targets: Sequence[RewriteTarget],
    transactions: ExitStack,
    threads: int | None = None,
    title: str = "",
    known: Mapping[int, Reference] | None = None,
) -> Iterator[RewrittenCheckpoint]:
    """Write the payloads of checkpoints again without further loss, as deltas against newer checkpoints.

    A chain is decoded from its keyframe on, and a delta names its parent's file. So groups of checkpoints, as large as
    memory allows, are encoded, the oldest first, and then written, the newest first. Memory: four states, and the
    encoded ones, up to two more.

    Args:
        targets: the newest first: each comes after its parent, if that is one of them.
        listing, transactions, threads, title: as for `write_again`.
        known: values of checkpoints that are in memory, by step.

    Yields:
        Each checkpoint once its payload is written, in the order of `targets`. It is committed before the next is asked
        for; the files that it needed before may go then.

    Raises: as `write_again`.
    """
    largest = max([1, *(manifest.stored_bytes for manifest in listing.manifests.values())])
    count = max(1, _ENCODED_STATES * min((target.manifest.raw_bytes for target in targets), default=0) // largest)
    decoded = dict(known or {})  # by step; later the oldest that was encoded last
    for first in range(0, len(targets), count):
        group = targets[first : first + count]
        encoded, decoded = _encode_reversed(storage, listing, group, decoded, threads, title)
        for target in group:
            step = target.manifest.step
            parent = None if target.parent is None else listing.manifests[target.parent]
            transaction = transactions.enter_context(CheckpointTransaction(storage, listing, step, parent, None))
            checkpoint = encoded.pop(step)
            item = _write_payload(transaction, target, checkpoint.state, checkpoint, threads)
            yield item
            listing = listing.with_files(step, item.names, manifest=item.after)


def _with_codes(state: FlatState, decoded: Reference) -> FlatState:
    """The state with the codes of what was decoded from codes, so that nobody compares these with its values."""
    codes = {
        name: source
        for name, source in lattice_sources(decoded.tensors, state.tensors).items()
        if source.values is not None and state.tensors[name].data_ptr() == source.values.data_ptr()
    }
    return replace(state, tensors=DecodedTensors({**state.tensors, **codes})) if codes else state


def _encode_reversed(
    storage: Storage,
    listing: Listing,
    targets: Sequence[RewriteTarget],
    known: Mapping[int, Reference],
    threads: int | None,
    title: str,
) -> tuple[dict[int, _EncodedCheckpoint], dict[int, Reference]]:
    """By step, the records of checkpoints as deltas against their parents, and the values of the oldest.

    Args:
        known: values of parents, by step.
    """
    by_step = {target.manifest.step: target for target in targets}
    encoded: dict[int, _EncodedCheckpoint] = {}
    oldest: dict[int, Reference] = {}

    def encode(target: RewriteTarget, decoded: DecodedFile, reference: Reference | None) -> None:
        manifest = target.manifest
        state = _with_codes(flatten(build_state(decoded, f"step {manifest.step}")), decoded.reference)
        scheme = Recode(decoded.reference.quantized, manifest.loss, manifest.scheme)
        quantized = scheme.quantize(state, reference)
        records = [*scheme.encode(quantized.state, reference, quantized=quantized.quantized, threads=threads)]
        encoded[manifest.step] = _EncodedCheckpoint(manifest.scheme, replace(state, tensors={}), records, manifest.loss)

    def decode_parent(target: RewriteTarget) -> Reference | None:
        if target.parent is None or target.parent in known:
            return None if target.parent is None else known[target.parent]
        return decode_chain(store_chain(storage, listing.manifests[target.parent]), threads=threads).reference

    waiting: tuple[RewriteTarget, DecodedFile] | None = None  # for its parent, which is decoded next as a rule
    checkpoints = iter_checkpoints(storage, [target.manifest for target in targets], threads=threads)
    for manifest, decoded in track(checkpoints, title, len(targets)):
        oldest = oldest or {manifest.step: decoded.reference}
        if waiting is not None:
            is_parent = waiting[0].parent == manifest.step
            encode(*waiting, decoded.reference if is_parent else decode_parent(waiting[0]))
        waiting = by_step[manifest.step], decoded
    if waiting is not None:
        encode(*waiting, decode_parent(waiting[0]))
    return encoded, oldest


def merge_orphaned_deltas(storage: Storage, *, threads: int | None = None) -> Iterator[RewrittenCheckpoint]:
    """Rewrite and commit each delta that depends on a file of a checkpoint which is forgotten, deleted or saved again.

    It becomes a delta against its nearest ancestor that is still visible, or a keyframe if there is none. So a sequence
    of deltas whose middle is forgotten merges into one. Memory: three states.
    """
    listing = scan(storage)
    with Task(f"compacting {storage.describe()}", len(orphaned_deltas(listing.visible))) as task:
        for step in sorted(listing.visible, key=listing.depth):
            listing.raise_unreadable()
            manifest = listing.visible[step]
            if not is_orphaned(listing.visible, manifest):
                continue
            # A checkpoint with the id of a base holds the values that it held when the delta was made
            ids = {other.step: other.id for other in listing.visible.values()}
            intact = (base.step for base in reversed(manifest.bases) if ids.get(base.step) == base.id)
            target = RewriteTarget(manifest, manifest.weights_only, next(intact, None))
            yield rewrite_and_commit(storage, listing, target, threads)
            listing = listing.replace(step, read_step(storage, step))
            task.advance()


def rewrite_and_commit(
    storage: Storage, listing: Listing, target: RewriteTarget, threads: int | None
) -> RewrittenCheckpoint:
    """Write one checkpoint again, and commit it; deltas that were made against it keep its old file.

    Raises:
        ChainError, FormatError: it does not load; nothing is changed.
        StorageError: reading or writing failed; the checkpoint loads, as it was or as it is written again.
    """
    with ExitStack() as transactions:
        (rewritten,) = write_again(storage, listing, [target], transactions, threads)
        rewritten.transaction.commit_manifest(rewritten.after)
        return rewritten
