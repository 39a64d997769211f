"""Reads the leaves of a checkpoint some at a time, so that a state need not fit into memory to be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shrinkpoint.store.chain import ChainFile
from shrinkpoint.store.decode import MAX_KEPT_TENSORS, decode_chain
from shrinkpoint.tensors.compare import LeafInfo
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.tree_selection import SelectedLeaves, list_leaves


class ChainLeaves:
    """The leaves of a checkpoint, by the names of `named_leaves`. Its files are read when some leaves are.

    Args:
        chain: the files, keyframe first.
        threads: native threads; None: every core.

    Attributes:
        leaves: what there is, in the order of the state.
        tree: the state's structure.

    Raises:
        ChainError, FormatError, StorageError: as `decode_chain`.
    """

    def __init__(self, chain: Iterable[ChainFile], *, threads: int | None = None) -> None:
        files = []
        for file in chain:
            reader = file.read_header()
            infos = {info.name: info for head in reader.records for info in head.infos}
            files.append(replace(file, header=reader) if len(infos) <= MAX_KEPT_TENSORS else file)
        self._files, self._threads = tuple(files), threads
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

        decoded = decode_chain(self._files, select=select, threads=self._threads)
        tensors, max_bytes = decoded.reference.tensors, decoded.max_copy_bytes
        return dict(zip(names, unflatten(decoded.tree, tensors, where=self._where, max_bytes=max_bytes), strict=True))
