"""Writes checkpoints of a store again: against other parents, or without moments. Nothing is committed here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from shrinkpoint.codec.reference import Reference, as_decoded
from shrinkpoint.errors import ChainError, FormatError
from shrinkpoint.progress import track
from shrinkpoint.schemes.lossless import Recode
from shrinkpoint.storage import Storage
from shrinkpoint.store.chain import store_chain
from shrinkpoint.store.checkpoint_file import build_state
from shrinkpoint.store.decode import decode_chain, iter_checkpoints
from shrinkpoint.store.listing import Listing
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.retention import RewriteTarget
from shrinkpoint.store.transaction import CheckpointTransaction
from shrinkpoint.tensors.dtypes import materialize
from shrinkpoint.tensors.flat_state import flatten, without_optimizer_state
from shrinkpoint.tensors.optimizers import has_optimizer_state


class RewrittenCheckpoint(NamedTuple):
    """A checkpoint that was written again, but for its manifest.

    Attributes:
        before, after: its manifests.
        names: of the files and links that were written, relative to the step's directory.
        transaction: commits it.
    """

    before: Manifest
    after: Manifest
    names: frozenset[str]
    transaction: CheckpointTransaction


def has_moments(storage: Storage, manifest: Manifest) -> bool:
    """Whether the optimizers of a checkpoint have state for their parameters; False if its header cannot be read.

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
) -> list[RewrittenCheckpoint]:
    """Write the payloads of checkpoints of a chain again without further loss, whatever the schemes were.

    The values that a reader gets are encoded exactly, those of lossy schemes by their codes. Memory: three states.

    Args:
        listing: the content of the store.
        targets: by rising step.
        transactions: aborts what is not committed when it is closed.

    Raises:
        ChainError, FormatError: one does not load.
        StorageError: reading or writing failed.
    """
    by_step = {target.manifest.step: target for target in targets}
    rewritten: list[RewrittenCheckpoint] = []
    previous: Reference | None = None  # the tensors of the last one that was written
    checkpoints = iter_checkpoints(storage, [target.manifest for target in targets], threads=threads)
    title = f"writing a chain of {storage.describe()} again"
    for manifest, decoded in track(checkpoints, title, len(targets)):
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
        transaction.add(flat_state, scheme=scheme, threads=threads)
        after = transaction.rewritten_manifest(manifest, weights_only=target.weights_only)
        names = transaction.written_names
        entry = listing.directories[step]
        listing = listing.replace(step, replace(entry, names=entry.names | names))
        taken = transaction.take_reference()
        # As a reader decodes them: contiguous.
        tensors = {name: materialize(tensor).contiguous() for name, tensor in taken.tensors.items()}
        previous = Reference(as_decoded(tensors), dict(taken.quantized))
        rewritten.append(RewrittenCheckpoint(manifest, after, names, transaction))
    return rewritten
