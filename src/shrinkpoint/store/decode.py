"""Decode a checkpoint of a store, of a directory or of single files: from its keyframe, delta by delta."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from shrinkpoint.codec import recipe as recipes
from shrinkpoint.codec.recipe import CopyRecipe, LatticeRecipe, PlainRecipe, RecipeParser
from shrinkpoint.codec.reference import Reference
from shrinkpoint.container import FileReader
from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.storage import AnyDirectory, Storage, map_requests
from shrinkpoint.store.chain import ChainFile, chain_links, directory_chain, manifest_identity, store_chain, use_current
from shrinkpoint.store.checkpoint_file import Allowance, DecodedFile, decode_records
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.manifest import DirectoryManifest, Manifest, Payload
from shrinkpoint.tensors.compare import LeafInfo
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.tree_decoder import SelectedLeaves, list_leaves

_log = logging.getLogger("shrinkpoint")
SelectLeaves: TypeAlias = Callable[[JSON, str], SelectedLeaves]
"""Selects leaves of a state's tree; the second argument is the file, for messages."""
MAX_KEPT_TENSORS = 1 << 12
"""Tensors of a file up to which its header is parsed once for a chain; of larger ones, again before it is decoded."""
_MAX_OPEN = 64
"""Files of a chain that stay open once their headers are read: in a bucket, each holds a block of its bytes."""
_MAX_AHEAD_BYTES = 1 << 25
"""Bytes of files in a bucket that are fetched while others are decoded; one file more may begin below."""
_BATCH = 16  # Files of which the headers are read at once


def decode_chain(
    chain: Iterable[ChainFile],
    *,
    select: SelectLeaves | None = None,
    threads: int | None = None,
    max_bytes: int | None = None,
) -> DecodedFile:
    """Decode the last file of a chain, each delta into the memory of its parent where that is possible.

    Of the files before, only the records are decoded that the last one needs, and only to codes of what is on lattices;
    all other bytes are compared with their digests. The digests of the last file's values show whether all of this went
    well. If not, every file is decoded whole, and the first one with an error is named.

    Args:
        chain: keyframe first; from `store_chain`, `directory_chain` or `file_chain`.
        select: decode what the selected leaves need, and read nothing else; the result has the tree of these alone, and
            perhaps other tensors besides. None: all.
        threads: native threads; None: every core.
        max_bytes: limit on the bytes of tensors in one file; None: the default of `Allowance`.

    Raises:
        Exception: whatever `select` raises.
        ChainError: a base is missing, or none found is the one the delta was made against.
        FormatError: bytes are at fault.
        StorageError: reading failed.
    """
    files = tuple(chain)
    selected: SelectedLeaves | None = None
    if select is not None:
        reader = files[-1].read_header()
        selected = select(reader.tree, reader.where)
    failure = ""
    if len(files) > 1 or selected is not None:
        try:
            content = _decode_last(files, threads, max_bytes, None if selected is None else selected.tensors)
            return content if selected is None else replace(content, tree=selected.tree)
        except ShrinkpointError as error:  # file by file, it is found at the first file that is damaged
            failure = str(error)  # not the error, which holds the frames, and so the memory, of what has failed
    decoded: DecodedFile | None = None
    for _, content in iter_chain(files, threads=threads, max_bytes=max_bytes):
        decoded = content
    assert decoded is not None
    if failure:
        _log.warning("decoded file by file, which takes longer, as the whole chain failed: %s", failure)
    return decoded if selected is None else replace(decoded, tree=selected.tree)


def _decode_last(
    files: Sequence[ChainFile], threads: int | None, max_bytes: int | None, selected: frozenset[str] | None
) -> DecodedFile:
    """Decode the last file of a chain, or some of its tensors; of a file before it, what that needs."""
    steps: list[tuple[ChainFile, frozenset[int]]] = []  # the last file first
    names = selected
    content: DecodedFile | None = None
    allowance = Allowance(max_bytes)
    try:
        for file, reader in _iter_headers(files):
            records, names = needed_records(reader, names)
            is_small = sum(len(head.infos) for head in reader.records) <= MAX_KEPT_TENSORS
            is_kept = is_small and len(steps) < _MAX_OPEN
            steps.append((file if is_kept else replace(file.close(), header=reader if is_small else None), records))
        while steps:
            if selected is None:
                _read_ahead([file for file, _ in reversed(steps)])
            file, records = steps.pop()
            is_last = not steps
            decode = partial(
                decode_records,
                reference=None if content is None else content.reference,
                threads=threads,
                allowance=allowance,
                records=None if is_last and selected is None else records,
                verify_others=selected is None,
                with_values=is_last,
                overwrite=True,
            )
            content = file.read(decode)
    finally:
        for file, _ in steps:
            file.close()
    assert content is not None
    return content


def needed_records(reader: FileReader, names: Collection[str] | None) -> tuple[frozenset[int], frozenset[str]]:
    """Return the records that decoding some tensors of a file needs, and the names of the parent's tensors besides.

    Args:
        reader: the file.
        names: of the tensors; those that the file lacks need nothing. None: all of them.

    Returns:
        Indices of records, and names; more than needed where a recipe does not say exactly what it needs.
    """
    heads, parse = reader.records, RecipeParser()
    record_of = {info.name: index for index, head in enumerate(heads) for info in head.infos}
    by_ordinal = [info.name for head in heads for info in head.infos]
    needed = set(range(len(heads))) if names is None else {record_of[name] for name in names if name in record_of}
    parents: set[str] = set()
    for index in reversed(range(len(heads))):  # a record needs earlier ones only
        if index not in needed:
            continue
        head = heads[index]
        try:
            recipe = parse(head.recipe, len(head.infos))
            others = [by_ordinal[ordinal] for ordinal in recipes.ordinals(recipe)]
        except (ValueError, LookupError):  # decoding it says what is wrong
            continue
        needed.update(record_of[name] for name in others if record_of[name] < index)
        may_need_parent = not isinstance(recipe, PlainRecipe | CopyRecipe)
        if isinstance(recipe, LatticeRecipe):
            may_need_parent = recipe.base
        if may_need_parent:
            parents.update(others, (info.name for info in head.infos))
    return frozenset(needed), frozenset(parents)


def _iter_headers(files: Sequence[ChainFile]) -> Iterator[tuple[ChainFile, FileReader]]:
    """The files of a chain with their headers, the last first, open; many at a time from a service."""
    storage, order = files[0].storage, files[::-1]
    batch = _BATCH if hasattr(storage, "request_pool") else 1
    for begin in range(0, len(order), batch):
        for file in map_requests(storage, ChainFile.open_ahead, order[begin : begin + batch]):
            assert file.header is not None
            yield file, file.header


def _read_ahead(files: Iterable[ChainFile]) -> None:
    """Begin to fetch files of a bucket that are decoded next, so that no record waits for a request of its own."""
    budget = _MAX_AHEAD_BYTES
    for file in files:
        if (read_ahead := getattr(file.source, "read_ahead", None)) is None or budget <= 0:
            return
        assert file.source is not None
        budget -= file.source.size
        read_ahead()


def iter_chain(
    chain: Iterable[ChainFile],
    *,
    wanted: Collection[str] | None = None,
    threads: int | None = None,
    max_bytes: int | None = None,
) -> Iterator[tuple[ChainFile, DecodedFile]]:
    """Every file of a chain with its content, keyframe first; raises as `decode_chain` does.

    Args:
        wanted: ids of the files whose values are wanted: digests of these show whether the files before were the right
            ones, so that no other digest of values is compared; None: all, and every digest is compared.
    """
    reference: Reference | None = None
    allowance, is_trusted = Allowance(max_bytes), wanted is not None
    for file in chain:
        options: dict[str, Any] = {"with_values": wanted is None or file.id in wanted, "trust_base": is_trusted}
        decode = partial(decode_records, reference=reference, threads=threads, allowance=allowance, **options)
        decoded = file.read(decode)
        reference = decoded.reference
        yield file, decoded


def iter_checkpoints(
    storage: Storage, manifests: Iterable[Manifest], *, steps: Collection[int] | None = None, threads: int | None = None
) -> Iterator[tuple[Manifest, DecodedFile]]:
    """Decode checkpoints of a store, each chain once from its keyframe on; raises as `decode_chain` does.

    Args:
        storage: that of the store.
        manifests: of its checkpoints.
        steps: yield these alone, and decode no chain that has none of them; None: all.
        threads: native threads; None: every core.
    """
    by_id = {manifest.id: manifest for manifest in manifests}
    base_ids = {base.id for manifest in by_id.values() for base in manifest.bases}
    pending = {manifest.id for manifest in by_id.values() if steps is None or manifest.step in steps}
    for last in sorted(by_id.values(), key=lambda manifest: manifest.step):
        if last.id in base_ids or pending.isdisjoint(link.id for link in chain_links(last)):
            continue
        for file, decoded in iter_chain(store_chain(storage, last), wanted=pending, threads=threads):
            if file.id in pending:
                pending.remove(file.id)
                yield by_id[file.id], decoded


def decode_directory(
    directory: AnyDirectory, rank: int = 0, *, threads: int | None = None, max_bytes: int | None = None
) -> DecodedFile:
    """Decode one payload of a framework's directory.

    Raises:
        NotFoundError: there is no manifest, or no payload of this rank.
        ChainError, FormatError, StorageError: as `decode_chain`.
    """

    def decode(manifest: DirectoryManifest) -> DecodedFile:
        payloads = manifest.payloads
        if not 0 <= rank < len(payloads):
            found, expected = f"no payload of rank {rank}", f"a rank below {len(payloads)}"
            raise NotFoundError(str(directory), found=found, expected=expected, do="pass one of its ranks")
        return decode_payload(directory, payloads[rank], threads=threads, max_bytes=max_bytes)

    return use_current(lambda: read_directory_manifest(directory), decode, manifest_identity)


def decode_payload(
    directory: AnyDirectory, payload: Payload, *, threads: int | None = None, max_bytes: int | None = None
) -> DecodedFile:
    """Decode a payload of a framework's directory whose manifest has been read; raises as `decode_chain` does."""
    return decode_chain(directory_chain(directory, payload), threads=threads, max_bytes=max_bytes)


class ChainLeaves:
    """The leaves of a checkpoint, by the names of `named_leaves`. Its files are read when some leaves are.

    Args:
        chain: the files, keyframe first.

    Attributes:
        leaves: what there is, in the order of the state.
        tree: the state's structure.

    Raises:
        ChainError, FormatError, StorageError: as `decode_chain`.
    """

    def __init__(self, chain: Iterable[ChainFile]) -> None:
        files = []
        for file in chain:
            reader = file.read_header()
            infos = {info.name: info for head in reader.records for info in head.infos}
            files.append(replace(file, header=reader) if len(infos) <= MAX_KEPT_TENSORS else file)
        self._files = tuple(files)
        self._where, self.tree = reader.where, reader.tree
        self._trees = list_leaves(self.tree, self._where)
        self.leaves: Mapping[str, LeafInfo] = {
            name: LeafInfo(infos[leaf.tensor].nbytes if leaf.tensor in infos else 0, leaf.is_array)
            for name, leaf in self._trees.items()
        }

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        """The values of some leaves; only what they need is decoded.

        Raises:
            ChainError, FormatError, StorageError: as `decode_chain`.
        """
        chosen = {name: self._trees[name] for name in names}
        stored = frozenset(leaf.tensor for leaf in chosen.values() if leaf.tensor)

        def select(tree: JSON, where: str) -> SelectedLeaves:
            return SelectedLeaves([leaf.tree for leaf in chosen.values()], stored, (), is_empty=not chosen)

        decoded = decode_chain(self._files, select=select)
        tensors, max_bytes = decoded.reference.tensors, decoded.max_copy_bytes
        return dict(zip(names, unflatten(decoded.tree, tensors, where=self._where, max_bytes=max_bytes), strict=True))
