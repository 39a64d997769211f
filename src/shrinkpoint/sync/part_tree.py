"""The state that a part of a version holds: pieces of tensors, and the shape, dtype and ties of every tensor.

A part is an ordinary checkpoint file of the state

    {"tensors": [[name, dtype, shape], ...], "ties": [[name, other name], ...], "pieces": {name: {"4,0": tensor}}}

The first two are the same in all parts. The key of a piece has its offsets, which its record has as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from shrinkpoint.container.metadata import RecordHead
from shrinkpoint.container.strict_json import expect_type
from shrinkpoint.errors import ChainError, StateError
from shrinkpoint.guard import read_guard
from shrinkpoint.sharding.global_tensors import check_disjoint
from shrinkpoint.sync.local_tensors import Piece, Sizes
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, TensorInfo
from shrinkpoint.tensors.names import tensor_name
from shrinkpoint.tensors.tree import TreeEncoder

_DO = "publish a keyframe"


class TensorSpec(NamedTuple):
    """Dtype, as files name it, and shape of a global tensor."""

    dtype: str
    shape: Sizes


class PieceSpec(NamedTuple):
    """A box of a tensor that a part stores.

    Attributes:
        part: index of the part.
        stored_name: the name of the tensor in the file.
        offsets, sizes: of the box.
    """

    part: int
    stored_name: str
    offsets: Sizes
    sizes: Sizes

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class VersionLayout:
    """The tensors of a version, and which part has which pieces.

    Attributes:
        tensors: by name; tied ones under each of their names.
        ties: the name under which the pieces of a tied tensor are, by its other names.
        pieces: by name, without ties.
        trees: of the parts: a delta has the same ones.
    """

    tensors: Mapping[str, TensorSpec] = field(repr=False)
    ties: Mapping[str, str] = field(repr=False)
    pieces: Mapping[str, Sequence[PieceSpec]] = field(repr=False)
    trees: Sequence[JSON] = field(repr=False)

    def pieces_of(self, name: str) -> Sequence[PieceSpec]:
        return self.pieces.get(self.ties.get(name, name), ())


def part_state(
    tensors: Mapping[str, TensorSpec], ties: Mapping[str, str], pieces: Mapping[str, Sequence[Piece]]
) -> FlatState:
    """The state of one part; its tensors are views of the caller's memory, in the dtypes that they have there.

    Raises:
        StateError: a name that no file can have.
    """
    nest = {name: {_key(piece.offsets): piece.tensor for piece in boxes} for name, boxes in pieces.items()}
    rows = [[name, spec.dtype, [*spec.shape]] for name, spec in tensors.items()]
    encoder = TreeEncoder()
    tree = encoder.encode({"tensors": rows, "ties": [[*tie] for tie in ties.items()], "pieces": nest})
    offsets = [piece.offsets for boxes in pieces.values() for piece in boxes]
    stored: dict[str, Tensor] = {}
    infos: dict[str, TensorInfo] = {}
    for leaf, start in zip(encoder.leaves, offsets, strict=True):
        name = tensor_name(leaf.path)
        leaf.reference[:] = []
        stored[name] = leaf.tensor
        infos[name] = TensorInfo(name, tuple(leaf.tensor.shape), dtype_name(leaf.tensor.dtype), offsets=start)
    if not isinstance(tree["pieces"], dict) or "$d" in tree["pieces"] or len(stored) < len(offsets):
        found, expected = "names that begin with $ or are alike", "names of parameters"
        raise StateError("model", found=found, expected=expected, do="rename them in the state dict")
    return FlatState(tree, stored, infos, {})


def read_layout(parts: Sequence[tuple[JSON, Sequence[RecordHead]]], where: str) -> VersionLayout:
    """The layout of a version, from the tree and the records of each part.

    Raises:
        ChainError: the parts do not belong together, or lack values.
        CorruptError: no release writes such a part.
    """
    with read_guard(where):
        tensors = dict(map(_spec_from_json, _rows(parts[0][0], "tensors")))
        ties = {str(name): str(other) for name, other in _rows(parts[0][0], "ties")}
        if not ties.keys() | set(ties.values()) <= tensors.keys() or ties.keys() & set(ties.values()):
            raise ValueError("ties to no tensor")
        pieces: dict[str, list[PieceSpec]] = {}
        for index, (tree, records) in enumerate(parts):
            if any(tree[key] != parts[0][0][key] for key in ("tensors", "ties")):
                found, expected = f"part {index} of another model than part 0", "parts of one version"
                raise ChainError(where, found=found, expected=expected, do=_DO)
            infos = {info.name: info for head in records for info in head.infos}
            for name, boxes in expect_type(tree["pieces"], dict, where, "the pieces").items():
                specs = [_piece_spec(index, tensor_name(("pieces", name, key)), tensors[name], infos) for key in boxes]
                pieces.setdefault(name, []).extend(specs)
    for name, spec in tensors.items():
        _check_complete(name, spec, pieces.get(ties.get(name, name), []), where)
    return VersionLayout(tensors, ties, pieces, [tree for tree, _ in parts])


def _check_complete(name: str, spec: TensorSpec, pieces: Sequence[PieceSpec], where: str) -> None:
    count = sum(piece.numel for piece in pieces)
    try:
        check_disjoint([piece.offsets for piece in pieces], [piece.sizes for piece in pieces])
    except ValueError:
        count = -1
    if count != math.prod(spec.shape):
        found = f"pieces of {name!r} that overlap" if count < 0 else f"{count} values of {name!r}"
        raise ChainError(where, found=found, expected=f"all {math.prod(spec.shape)} values once", do=_DO)


def _rows(tree: JSON, key: str) -> list[JSON]:
    rows: list[JSON] = expect_type(tree[key], list, key, "a list")
    return rows


def _spec_from_json(row: JSON) -> tuple[str, TensorSpec]:
    name, dtype, shape = row
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise ValueError(f"a shape {shape!r:.40}")
    return str(name), TensorSpec(str(dtype), tuple(shape))


def _piece_spec(part: int, stored_name: str, spec: TensorSpec, infos: Mapping[str, TensorInfo]) -> PieceSpec:
    info = infos[stored_name]
    offsets = info.offsets if info.offsets is not None else ()
    if info.dtype != spec.dtype or not len(offsets) == len(info.shape) == len(spec.shape):
        raise ValueError(f"the piece {stored_name!r:.60} of another tensor")
    if any(a + n > m for a, n, m in zip(offsets, info.shape, spec.shape, strict=True)):
        raise ValueError(f"the piece {stored_name!r:.60} beyond its tensor")
    return PieceSpec(part, stored_name, offsets, info.shape)


def _key(offsets: Sizes) -> str:
    """The offsets as text, such as "4,0"; of a scalar "0"."""
    return ",".join(map(str, offsets)) or "0"
