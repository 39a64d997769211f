"""Layout of gradients of which some are sent as low-rank factors: these matrices are whole, all others in segments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shrinkpoint.comm.gradient_layout import GradientLayout, Piece, Segment, align_numel, is_dense
from shrinkpoint.comm.low_rank import LowRank


@dataclass(frozen=True)
class Matrix:
    """A gradient that is sent as factors.

    Attributes:
        name: of the parameter.
        rows, columns: its shape as its values lie in memory.
        left, right: where the first and the second factor are in the segments of factors: transposed, (rank, values).
    """

    name: str
    rows: int
    columns: int
    left: Piece
    right: Piece


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices whose factors are sent together.

    Attributes:
        matrices: by the place of their gradients in the segment.
        left, right: the segments of first and of second factors.
    """

    matrices: dict[int, Matrix]
    left: Segment
    right: Segment


class MatrixLayout(GradientLayout):
    """Assigns gradients to segments as `GradientLayout`, but leaves those whole that are sent as factors.

    A segment of matrices is not sent itself: its `groups` entry has those that are.

    Args:
        low_rank: says which matrices are sent as factors; complex ones are not.
        min_numel, segment_numel: as `GradientLayout`; a segment of matrices has more values if one alone has more.

    Attributes:
        groups: the matrices of a segment, by its index.
        factor_segments: what is sent of all matrices.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], low_rank: LowRank, min_numel: int, segment_numel: int
    ) -> None:
        named = list(parameters)
        shapes = {name: _matrix_shape(p) for name, p in named if p.numel() >= min_numel and not p.is_complex()}
        shapes = {name: shape for name, shape in shapes.items() if low_rank.fits(*shape)}
        super().__init__([(name, p) for name, p in named if name not in shapes], min_numel, segment_numel)
        self.groups: dict[int, MatrixGroup] = {}
        queues: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name, parameter in reversed(named):
            if name in shapes:
                self._add_name(name, parameter)
                queues.setdefault((parameter.device, parameter.dtype), []).append((name, parameter))
        batches = [batch for members in queues.values() for batch in _batches(members, segment_numel)]
        first_right = len(self.segments) + len(batches)
        for place, batch in enumerate(batches):
            self._add_group(batch, shapes, low_rank.rank, first_right + place)
        self.factor_segments = [segment for group in self.groups.values() for segment in (group.left, group.right)]

    def digest(self) -> str:
        return f"{super().digest()} of {len(self.factor_segments)} segments of factors"

    def _add_group(
        self, members: list[tuple[str, Tensor]], shapes: dict[str, tuple[int, int]], rank: int, right_index: int
    ) -> None:
        index, device, offset, ends = len(self.segments), members[0][1].device, 0, [0, 0]
        matrices = {}
        for name, parameter in members:
            self._pieces[id(parameter)] = [(index, Piece(0, offset, parameter.numel()))]
            pieces = [Piece(0, end, rank * numel) for end, numel in zip(ends, shapes[name], strict=True)]
            matrices[offset] = Matrix(name, *shapes[name], *pieces)
            ends = [piece.offset + align_numel(piece.numel) for piece in pieces]
            offset += parameter.numel()
        self.segments.append(Segment(index, offset, len(members), False, device))
        places = zip((index, right_index), ends, strict=True)
        factors = [Segment(place, numel, len(members), False, device) for place, numel in places]
        self.groups[index] = MatrixGroup(matrices, *factors)


def _batches(members: list[tuple[str, Tensor]], segment_numel: int) -> list[list[tuple[str, Tensor]]]:
    """Cut a list of parameters into batches of at most a number of values, or of one parameter."""
    batches: list[list[tuple[str, Tensor]]] = []
    room = 0
    for name, parameter in members:
        if not batches or parameter.numel() > room:
            batches.append([])
            room = segment_numel
        batches[-1].append((name, parameter))
        room -= parameter.numel()
    return batches


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Rows and columns of a gradient in DDP's buckets, where dense ones lie in memory as their parameters do.

    Rows are those of the axis whose neighbours are furthest apart, which is the first of a contiguous tensor.
    """
    if parameter.dim() < 2 or not parameter.numel():
        return 0, 0
    axis = max(range(parameter.dim()), key=parameter.stride) if is_dense(parameter) else 0
    return parameter.shape[axis], parameter.numel() // parameter.shape[axis]
