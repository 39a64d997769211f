"""Averages of low-rank gradients beside the backward pass: of first factors, then of second ones.

`MatrixLayout` says which gradients are sent as factors, and where these are in segments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.background_allreduce import AllReduceFor, BackgroundAllReduce, StreamAllReduce
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce, check_hops
from shrinkpoint.comm.gradient_layout import (
    FilledSegment,
    GradientLayout,
    Piece,
    Segment,
    SegmentValues,
    align_numel,
    is_dense,
)
from shrinkpoint.comm.low_rank import LowRank, orthonormal_rows, start_rows, subtract_product, unit_rows
from shrinkpoint.comm.state_check import check_entries, check_mapping, part_error


@dataclass(frozen=True)
class Matrix:
    """A gradient that is sent as factors."""

    name: str  # of the parameter
    # `rows`, `columns`: its shape as its values lie in memory.
    rows: int
    columns: int
    # `left`, `right`: where the first and the second factor are in the segments of factors: transposed, (rank, values).
    left: Piece
    right: Piece


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices whose factors are sent together."""

    matrices: dict[int, Matrix]  # by the place of their gradients in the segment
    # `left`, `right`: the segments of first and of second factors.
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
                self.names[id(parameter)], self._dtypes[id(parameter)] = name, parameter.dtype
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


class MatrixMemory:
    """The memory of one matrix between steps at this rank, and its factors in the step under way.

    Attributes:
        residual: what was not sent yet, and during a step the gradient with it: float32, (rows, columns).
        right: the rows of the last right factor at length 1: float32, (rank, columns).
    """

    def __init__(self, matrix: Matrix, rank: int, device: torch.device) -> None:
        self.residual = torch.zeros(matrix.rows, matrix.columns, dtype=torch.float32, device=device)
        self._start = start_rows(rank, matrix.columns, zlib.crc32(matrix.name.encode())).to(device)
        self.right = self._start
        self._left = self._start  # until the first step

    def first_factor(self, gradient: Tensor) -> Tensor:
        """Add the gradient to the residual, and return this rank's left factor: (rank, rows)."""
        self.residual.add_(gradient.view_as(self.residual))
        return self.right @ self.residual.t()

    def set_left(self, average: Tensor) -> None:
        """Make the rows of the average left factor orthonormal."""
        self._left = orthonormal_rows(average)

    def second_factor(self) -> Tensor:
        """This rank's right factor: (rank, columns)."""
        return self._left @ self.residual

    def fill(self, gradient: Tensor, average: Tensor) -> None:
        """Write the average gradient, with the average right factor, and keep what is left to send."""
        subtract_product(self._left, average, self.residual, gradient.view_as(self.residual))
        self.right = unit_rows(average, self._start)

    def load(self, residual: Tensor, right: Tensor) -> None:
        """Restore both tensors from copies of these."""
        self.residual, self.right = (saved.detach().to(self.residual.device, copy=True) for saved in (residual, right))


class _Factors(SegmentValues):
    """The factors of a group of matrices as the values of a segment."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        parts: Sequence[tuple[Piece, Callable[[], Tensor], Callable[[Tensor], None]]],
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self.segment, self._rank, self._parts, self._on_done = segment, rank, parts, on_done

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def copy_to(self, flat: Tensor) -> None:
        flat.zero_()
        for piece, compute, _ in self._parts:
            flat[piece.offset : piece.offset + piece.numel].view(self._rank, -1).copy_(compute())

    def copy_from(self, flat: Tensor) -> None:
        for piece, _, use in self._parts:
            use(flat[piece.offset : piece.offset + piece.numel].view(self._rank, -1))
        if self._on_done is not None:
            self._on_done()


class LowRankState:
    """The memories of all matrices of a layout at this rank, and what averages their right factors.

    Attributes:
        spec: of the low rank.
        layout: of the gradients.
        all_reduce: for right factors.
    """

    def __init__(self, low_rank: LowRank, layout: MatrixLayout, all_reduce: CompressedAllReduce) -> None:
        self.spec, self.layout, self.all_reduce, self._rank = low_rank.spec, layout, all_reduce, low_rank.rank
        self._memories = {
            matrix.name: MatrixMemory(matrix, low_rank.rank, group.left.device)
            for group in layout.groups.values()
            for matrix in group.matrices.values()
        }

    def first_factors(self, filled: FilledSegment, on_done: Callable[[], None]) -> SegmentValues:
        """The left factors of a segment of matrices, as values to be averaged."""
        group = self.layout.groups[filled.segment.index]
        parts = [
            (matrix.left, partial(memory.first_factor, run), memory.set_left)
            for matrix, memory, run in self._runs(filled, group)
        ]
        return _Factors(group.left, self._rank, parts, on_done)

    def second_factors(self, filled: FilledSegment) -> SegmentValues:
        """The right factors of a segment of matrices, which fill it with the average gradient."""
        group = self.layout.groups[filled.segment.index]
        parts = [
            (matrix.right, memory.second_factor, partial(memory.fill, run))
            for matrix, memory, run in self._runs(filled, group)
        ]
        return _Factors(group.right, self._rank, parts)

    def state_dict(self) -> dict[str, Any]:
        """The memories of this rank by the names of parameters; tensors are not copied."""
        residuals = {name: memory.residual for name, memory in self._memories.items()}
        rights = {name: memory.right for name, memory in self._memories.items()}
        return {"residuals": residuals, "right": rights, "hops": self.all_reduce.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` of the same rank returned.

        Raises:
            MismatchError: it is something else, or of other matrices.
        """
        own = self.state_dict()
        check_entries("low rank", state, own)
        for kind in ("residuals", "right"):
            saved_tensors = check_mapping(f"low rank, {kind}", state[kind])
            check_entries(f"low rank, {kind}", saved_tensors, own[kind])
            for name, tensor in own[kind].items():
                saved, expected = saved_tensors[name], f"{tensor.dtype} {tuple(tensor.shape)}"
                found = validate.describe_value(saved)
                if isinstance(saved, Tensor):
                    found = f"{saved.dtype} {tuple(saved.shape)}"
                if found != expected:
                    raise part_error(f"low rank, {kind} of {name}", found, expected)
        check_hops("low rank", state["hops"])
        self.all_reduce.load_state_dict(state["hops"])  # which may still refuse it, so before the memories
        for name, memory in self._memories.items():
            memory.load(state["residuals"][name], state["right"][name])

    def _runs(self, filled: FilledSegment, group: MatrixGroup) -> list[tuple[Matrix, MatrixMemory, Tensor]]:
        matrices = [(group.matrices[piece.offset], run) for run, piece in filled.runs]
        return [(matrix, self._memories[matrix.name], run) for matrix, run in matrices]


class LowRankAllReduce(BackgroundAllReduce):
    """Averages segments of matrices in two exchanges, of left factors and of right ones, and all others in one.

    On gloo each exchange has threads of its own: an exchange of right factors waits for one of left factors on every
    rank, and if both took turns in the same threads, two ranks could wait for each other.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, all_reduce_for: AllReduceFor, state: LowRankState
    ) -> None:
        self._state, self._groups = state, state.layout.groups
        rights = {matrices.right.index for matrices in self._groups.values()}

        def choose(segment: Segment) -> CompressedAllReduce:
            return state.all_reduce if segment.index in rights else all_reduce_for(segment)

        self._left = BackgroundAllReduce.create(group, device, choose)
        is_stream = isinstance(self._left, StreamAllReduce)  # which keeps an order that all ranks share
        self._right = self._left if is_stream else BackgroundAllReduce.create(group, device, choose)

    def begin(self, segments: Sequence[Segment]) -> None:
        groups = [self._groups[segment.index] for segment in segments if segment.index in self._groups]
        plain = [segment for segment in segments if segment.index not in self._groups]
        self._left.begin(plain + [group.left for group in groups])
        self._right.begin([group.right for group in groups])

    def submit(self, values: SegmentValues) -> None:
        if values.segment.index not in self._groups:
            self._left.submit(values)
            return
        assert isinstance(values, FilledSegment)  # the factors of matrices are not submitted here
        second = self._state.second_factors(values)
        self._left.submit(self._state.first_factors(values, lambda: self._right.submit(second)))

    def wait(self) -> None:
        self._left.wait()  # when this is done, all right factors have been submitted
        self._right.wait()

    def close(self) -> None:
        self._left.close()
        self._right.close()
