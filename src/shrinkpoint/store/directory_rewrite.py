"""Writes checkpoints of a framework's run again without further loss: without moments, or against newer ones.

Every directory needs no other one, before and afterwards, and its manifest is replaced atomically. So a crash at any
point leaves each checkpoint as it was or as it is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shrinkpoint.codec.reference import Reference, as_decoded
from shrinkpoint.schemes.lossless import Recode
from shrinkpoint.store import layout
from shrinkpoint.store.chain import directory_chain, file_sizes
from shrinkpoint.store.checkpoint_file import DecodedFile, build_state
from shrinkpoint.store.decode import decode_payload
from shrinkpoint.store.delta_writer import DirectoryPlace, chain_bytes, chain_digests, link_chain
from shrinkpoint.store.directory import manifest_condition, read_directory_manifest, replace_manifest
from shrinkpoint.store.directory_retention import Directory
from shrinkpoint.store.manifest import DirectoryManifest, Payload
from shrinkpoint.store.retention import Keep, ReversedShares, frees_bytes, reversed_shares
from shrinkpoint.tensors.dtypes import materialize
from shrinkpoint.tensors.flat_state import FlatState, flatten, without_optimizer_state
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class MomentFilter:
    """Removes what optimizers keep for each parameter, in the form in which a framework saves a state."""

    # Makes a decoded state, which it may change, and the `extra` of the manifest a state without it.
    flatten: Callable[[Any, JSON], FlatState] = lambda state, extra: without_optimizer_state(state)
    extra: Callable[[JSON], JSON] = lambda extra: extra  # makes the `extra` of the manifest one without it


@dataclass(frozen=True)
class Ranks:
    """The processes that write checkpoints again together; all of them make the same calls."""

    rank: int = 0  # of this process; the first one commits
    size: int = 1
    # Calls a function on every process and returns all results; if one fails, all raise its error.
    gather: Callable[[Callable[[], Any]], list[Any]] = lambda compute: [compute()]


@dataclass(frozen=True)
class _Parent:
    """The payload that a delta is to be made against, and its values."""

    directory: Path
    payload: Payload
    reference: Reference


class _ReversedChain:
    """The payloads of one rank that become deltas against newer ones.

    Args:
        parents: as for `RunRewriter.reverse`.
        kept: the manifests of the run, which change as payloads are committed.
        rank: the rank.
        keep: the rules of the run.
    """

    def __init__(
        self, parents: Mapping[Path, Path | None], kept: Mapping[Directory, DirectoryManifest], rank: int, keep: Keep
    ) -> None:
        self.parents, self._kept, self._rank, self._keep = parents, kept, rank, keep
        self.waiting: list[Path] = [*parents]
        self.last: _Parent | None = None  # what this process wrote last
        self._before = {place: part for place, manifest in kept.items() if (part := manifest.of_rank(rank))}
        self._after: dict[Directory, DirectoryManifest] = {}

    def parent(self, directory: Path, threads: int | None) -> _Parent:
        """The payload of a checkpoint, with its values."""
        if self.last is not None and self.last.directory == directory:
            return self.last
        part = self._kept[directory].of_rank(self._rank)
        assert part is not None
        payload = part.payloads[0]
        return _Parent(directory, payload, decode_payload(directory, payload, threads=threads).reference)

    def accept(self, directory: Path, old: Payload, new: Payload) -> Payload:
        """The new payload; the old one, from now on, once going on would free nothing."""
        if directory not in self.waiting:
            return old
        self.waiting.remove(directory)
        self._after[directory] = replace(self._before[directory], payloads=(new,), stored_bytes=-1)
        if frees_bytes(self._before, self._after, self.waiting, self._keep):
            return new
        self.waiting.clear()
        return old

    @property
    def shares(self) -> ReversedShares | None:
        return reversed_shares(self._after.values())


class RunRewriter:
    """Writes payloads of several directories again, and commits them if that frees bytes; else it removes them.

    Memory: three states of a rank.

    Args:
        kept: the manifests of all checkpoints of the run that stay: what others need as well frees nothing.
        threads: native threads; None: every core.
        ranks: those that share the work: each writes some of the payloads.
    """

    def __init__(
        self,
        kept: Mapping[Directory, DirectoryManifest],
        *,
        threads: int | None = None,
        ranks: Ranks = Ranks(),
    ) -> None:
        self._kept = dict(kept)
        self._threads, self._ranks = threads, ranks
        self._places: dict[Directory, list[DirectoryPlace]] = {}  # what is written and not committed
        self._conditions: dict[Directory, object] = {}
        self._before: dict[Directory, DirectoryManifest] = {}
        self._after: dict[Directory, DirectoryManifest] = {}

    def rewrite(self, directories: Sequence[Directory], moments: MomentFilter | None = None) -> bool:
        """Write checkpoints of one chain again; True if that freed bytes, else all stay as they are.

        The first becomes a keyframe, and the others deltas against the one before, where there are links.

        Args:
            directories: oldest first.
            moments: removes the moments; None: they stay.

        Raises:
            ChainError, FormatError: one does not load; all stay as they are.
            StorageError: reading or writing failed; every checkpoint loads.
        """
        references: dict[int, Reference] = {}
        previous: tuple[Path, DirectoryManifest] | None = None

        def write(directory: Directory, manifest: DirectoryManifest, index: int) -> Payload:
            payload = manifest.payloads[index]
            decoded = decode_payload(directory, payload, threads=self._threads)
            state = build_state(decoded, str(directory))
            flat_state = flatten(state) if moments is None else moments.flatten(state, manifest.extra)
            parent = None
            if previous is not None and len(previous[1].payloads) == len(manifest.payloads):
                parent = _Parent(previous[0], previous[1].payloads[index], references[index])
            written, references[index] = self._write(directory, manifest, index, flat_state, decoded, parent)
            return written

        with self:
            for directory in directories:
                manifest = self._read(directory)
                payloads = self._map(partial(write, directory, manifest), len(manifest.payloads))
                after = replace(manifest, payloads=tuple(payloads), stored_bytes=-1)
                if moments is not None:
                    after = replace(after, weights_only=True, extra=moments.extra(manifest.extra))
                self._after[directory] = after
                previous = (directory, after) if isinstance(directory, Path) else None
            return self._commit_if_smaller()

    def reverse(
        self, parents: Mapping[int, Mapping[Path, Path | None]], keep: Keep
    ) -> dict[int, ReversedShares | None]:
        """Write payloads again as deltas against newer ones, each checkpoint committed before the next.

        Where that would free nothing, the other payloads of the rank stay as they are.

        Args:
            parents: by rank, newest first, the checkpoints whose payload is written again, each with that against whose
                payload it becomes a delta; None: it becomes a keyframe.
            keep: the rules of the run.

        Returns:
            As `reversed_shares`, of what was written, by rank.

        Raises: as `rewrite`.
        """
        chains = {rank: _ReversedChain(targets, self._kept, rank, keep) for rank, targets in parents.items()}

        def write(directory: Path, manifest: DirectoryManifest, index: int) -> Payload:
            payload = manifest.payloads[index]
            chain = chains.get(layout.rank_of(payload.name))
            if chain is None or directory not in chain.waiting:
                return payload
            newer = chain.parents[directory]
            parent = None if newer is None else chain.parent(newer, self._threads)
            decoded = decode_payload(directory, payload, threads=self._threads)
            state = flatten(build_state(decoded, str(directory)))
            payload, reference = self._write(directory, manifest, index, state, decoded, parent)
            chain.last = _Parent(directory, payload, reference)
            return payload

        with self:
            for directory in [*self._kept][::-1]:
                if not any(directory in chain.waiting for chain in chains.values()):
                    continue
                assert isinstance(directory, Path)
                manifest = self._read(directory)
                written = self._map(partial(write, directory, manifest), len(manifest.payloads))
                payloads = tuple(
                    chains[rank].accept(directory, old, new) if (rank := layout.rank_of(old.name)) in chains else old
                    for old, new in zip(manifest.payloads, written, strict=True)
                )
                if payloads != manifest.payloads:
                    self._commit(directory, replace(manifest, payloads=payloads, stored_bytes=-1))
        return {rank: chain.shares for rank, chain in chains.items()}

    def __enter__(self) -> RunRewriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what was written and not committed."""
        for places in self._places.values():
            for place in places:
                place.remove()
        self._places, self._conditions, self._before, self._after = {}, {}, {}, {}

    def _read(self, directory: Directory) -> DirectoryManifest:
        def read() -> DirectoryManifest | None:
            if self._ranks.rank:
                return None
            self._conditions[directory] = manifest_condition(directory)
            return self._kept[directory] if isinstance(directory, Path) else read_directory_manifest(directory)

        self._before[directory], *_ = self._ranks.gather(read)
        return self._before[directory]

    def _map(self, write: Callable[[int], Payload], count: int) -> list[Payload]:
        """Results of a function for each index of a payload, which each process calls for some of them."""
        ranks = self._ranks
        shares = ranks.gather(lambda: {index: write(index) for index in range(ranks.rank, count, ranks.size)})
        return [shares[index % ranks.size][index] for index in range(count)]

    def _write(
        self,
        directory: Directory,
        manifest: DirectoryManifest,
        index: int,
        state: FlatState,
        decoded: DecodedFile,
        parent: _Parent | None,
    ) -> tuple[Payload, Reference]:
        rank = layout.rank_of(manifest.payloads[index].name)
        place, bases = DirectoryPlace(directory, rank), tuple[tuple[str, int], ...]()
        self._places.setdefault(directory, []).append(place)
        if parent is not None and link_chain(place, parent.directory, parent.payload) is not None:
            header = {"name": layout.base_name(parent.payload.digest), "digest": parent.payload.digest}
            place.hold_base(chain_bytes(parent.payload), parent.reference, header)
        *_, own = directory_chain(directory, manifest.payloads[index])
        infos = {info.name: info for record in own.read_header().records for info in record.infos}
        state = replace(state, infos={name: infos.get(name, info) for name, info in state.infos.items()})
        scheme = Recode(decoded.reference.quantized, manifest.loss, manifest.scheme)
        report = place.add(state, scheme=scheme, threads=self._threads)
        if place.base is not None and parent is not None:
            bases = chain_digests(parent.payload)
        taken, place.reference = place.reference, None
        assert taken is not None
        # As a reader decodes them: contiguous.
        tensors = {name: materialize(tensor).contiguous() for name, tensor in taken.tensors.items()}
        payload = Payload(place.payload_key, report.stored_bytes, report.digest, report.raw_bytes, bases)
        return payload, Reference(as_decoded(tensors), dict(taken.quantized))

    def _commit_if_smaller(self) -> bool:
        changed = [{**self._kept, **manifests} for manifests in (self._before, self._after)]
        before, after = (sum(file_sizes(manifests.values()).values()) for manifests in changed)
        if after >= before:
            return False
        for directory, manifest in self._after.items():
            self._commit(directory, manifest)
        return True

    def _commit(self, directory: Directory, manifest: DirectoryManifest) -> None:
        self._places.pop(directory, None)  # the manifest may be there even if this fails: nothing may be removed

        def commit() -> None:
            if not self._ranks.rank:
                replace_manifest(directory, manifest, self._conditions[directory])

        self._ranks.gather(commit)
        self._kept[directory] = manifest
