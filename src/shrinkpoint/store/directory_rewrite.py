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
from shrinkpoint.store.retention import frees_bytes, reverse_ratio
from shrinkpoint.tensors.dtypes import materialize
from shrinkpoint.tensors.flat_state import FlatState, flatten, without_optimizer_state
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class MomentFilter:
    """Removes what optimizers keep for each parameter, in the form in which a framework saves a state."""

    # Makes a decoded state, which it may change, and the `extra` of the manifest a state without it.
    flatten: Callable[[Any, JSON], FlatState] = lambda state, extra: without_optimizer_state(state)
    extra: Callable[[JSON], JSON] = lambda extra: extra  # makes the `extra` of the manifest one without it


def _map_serially(write: Callable[[int], Payload], count: int) -> list[Payload]:
    return [write(index) for index in range(count)]


@dataclass(frozen=True)
class _Parent:
    """The payload that a delta is to be made against, and its values."""

    directory: Path
    payload: Payload
    reference: Reference


class RunRewriter:
    """Writes payloads of several directories again, and commits them if that frees bytes; else it removes them.

    Memory: three states of a rank.

    Args:
        kept: the manifests of all checkpoints of the run that stay: what others need as well frees nothing.
        threads: native threads; None: every core.
        map_payloads: calls a function for each index of a payload and returns all results. With several processes, each
            calls it for some of them; then all make the same calls, and one commits.
        commits: whether this process replaces manifests.
    """

    def __init__(
        self,
        kept: Mapping[Directory, DirectoryManifest],
        *,
        threads: int | None = None,
        map_payloads: Callable[[Callable[[int], Payload], int], list[Payload]] = _map_serially,
        commits: bool = True,
    ) -> None:
        self._kept = dict(kept)
        self._threads, self._map, self._commits = threads, map_payloads, commits
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

    def reverse(self, parents: Mapping[Path, Path | None]) -> float | None:
        """Write checkpoints of one process again as deltas against newer ones, each committed before the next.

        Where that would free nothing, the others stay as they are.

        Args:
            parents: of each the directory that it becomes a delta against, newest first; None: it becomes a keyframe.

        Returns:
            As `reverse_ratio`, of those that were written.

        Raises: as `rewrite`.
        """
        before, after, waiting = dict(self._kept), dict[Directory, DirectoryManifest](), [*parents]
        references: dict[Path, Reference] = {}  # of the checkpoint that was decoded last

        def parent_of(directory: Path) -> _Parent:
            (payload,) = self._kept[directory].payloads
            reference = references.get(directory)
            if reference is None:
                reference = decode_payload(directory, payload, threads=self._threads).reference
            return _Parent(directory, payload, reference)

        with self:
            for directory, newer in parents.items():
                manifest, parent = self._read(directory), None if newer is None else parent_of(newer)
                decoded = decode_payload(directory, manifest.payloads[0], threads=self._threads)
                state = flatten(build_state(decoded, str(directory)))
                payload, reference = self._write(directory, manifest, 0, state, decoded, parent)
                waiting.remove(directory)
                after[directory] = replace(manifest, payloads=(payload,), stored_bytes=-1)
                references = {directory: reference}
                if not frees_bytes(before, after, waiting):
                    break
                self._commit(directory, after[directory])
        return reverse_ratio([(before[directory], manifest) for directory, manifest in after.items()])

    def __enter__(self) -> RunRewriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what was written and not committed."""
        for places in self._places.values():
            for place in places:
                place.remove()
        self._places, self._conditions, self._before, self._after = {}, {}, {}, {}

    def _read(self, directory: Directory) -> DirectoryManifest:
        self._conditions[directory] = manifest_condition(directory)
        # All processes that share the work must go on from the same manifest, so on this machine from the given one.
        is_local = isinstance(directory, Path)
        self._before[directory] = self._kept[directory] if is_local else read_directory_manifest(directory)
        return self._before[directory]

    def _write(
        self,
        directory: Directory,
        manifest: DirectoryManifest,
        index: int,
        state: FlatState,
        decoded: DecodedFile,
        parent: _Parent | None,
    ) -> tuple[Payload, Reference]:
        place, bases = DirectoryPlace(directory, index), tuple[tuple[str, int], ...]()
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
        if self._commits:
            replace_manifest(directory, manifest, self._conditions[directory])
        self._kept[directory] = manifest
