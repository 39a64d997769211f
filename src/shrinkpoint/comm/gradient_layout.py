"""Layout of a model's gradients in segments, each encoded and sent as one, however DDP's buckets are made."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from shrinkpoint.errors import PolicyError

SEGMENT_NUMEL = 1 << 20
"""A segment has at most about this number of values: fewer cost more time each, more wait longer for the first hop."""
PARAMETER_ALIGN = 64
"""The gradient of a parameter starts at a multiple of this number, so that groups of a power of two have one owner."""


@dataclass(frozen=True)
class Piece:
    """A run of values of one gradient in a segment."""

    start: int  # the position of the first value in the flat gradient
    offset: int  # its position in the segment
    numel: int  # the number of values


@dataclass(frozen=True)
class Segment:
    """A part of the gradients that is encoded as one tensor."""

    index: int  # its place in the layout
    numel: int  # the number of values, with the zeros between gradients
    num_pieces: int  # the number of runs of values that it consists of
    is_exact: bool  # True if it is sent uncompressed
    device: torch.device  # of the gradients

    @property
    def name(self) -> str:
        return str(self.index)


class SegmentValues(ABC):
    """The values of a segment, which are read before they are averaged and written afterwards."""

    segment: Segment  # the segment that has them

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype in which they are averaged."""

    @abstractmethod
    def copy_to(self, flat: Tensor) -> None:
        """Fill a 1-d tensor, which may be longer than the segment; what is no value of it becomes 0."""

    @abstractmethod
    def copy_from(self, flat: Tensor) -> None:
        """Take the averaged values from a 1-d tensor."""

    def read_rows(self, rows: Tensor) -> list[Tensor]:
        """The values as rows of equal length: those of `rows`, which are filled, zeros behind, or views of gradients.

        Args:
            rows: contiguous, of shape (number, length), in the dtype of the values.
        """
        self.copy_to(rows.view(-1))
        return list(rows.unbind())

    def write_rows(self, rows: Tensor, fill: Callable[[Sequence[Tensor]], None]) -> None:
        """Call `fill` with rows as those of `read_rows`, which it fills with averaged values, and take these."""
        fill(rows.unbind())
        self.copy_from(rows.view(-1))


@dataclass
class FilledSegment(SegmentValues):
    """A segment with the runs of values it consists of: views of DDP's buckets."""

    segment: Segment
    runs: list[tuple[Tensor, Piece]] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.runs[0][0].dtype

    def copy_to(self, flat: Tensor) -> None:
        self._read(flat, 0)

    def copy_from(self, flat: Tensor) -> None:
        self._write(flat, 0)

    def read_rows(self, rows: Tensor) -> list[Tensor]:
        found = []
        for index, row in enumerate(rows):
            view = self._view(index * row.numel(), row.numel())
            if view is None:
                self._read(row, index * row.numel())
            found.append(row if view is None else view)
        return found

    def write_rows(self, rows: Tensor, fill: Callable[[Sequence[Tensor]], None]) -> None:
        views = [self._view(index * row.numel(), row.numel()) for index, row in enumerate(rows)]
        fill([row if view is None else view for row, view in zip(rows, views, strict=True)])
        for index, (row, view) in enumerate(zip(rows, views, strict=True)):
            if view is None:
                self._write(row, index * row.numel())

    @cached_property
    def _spans(self) -> list[tuple[int, Tensor]]:
        """The values in their order, and the place of each first one: runs that follow each other in memory are one."""
        spans: list[tuple[int, Tensor]] = []
        for run, piece in sorted(self.runs, key=lambda pair: pair[1].offset):
            if spans:
                offset, last = spans[-1]
                is_same_memory = last.untyped_storage().data_ptr() == run.untyped_storage().data_ptr()
                ends = offset + last.numel(), last.storage_offset() + last.numel()
                if is_same_memory and ends == (piece.offset, run.storage_offset()):
                    joined = last.as_strided((last.numel() + run.numel(),), (1,), last.storage_offset())
                    spans[-1] = offset, joined
                    continue
            spans.append((piece.offset, run))
        return spans

    def _parts(self, begin: int, numel: int) -> list[tuple[int, Tensor]]:
        """The spans of so many values from a place of the segment on, cut to these, each with its place among them."""
        parts, end = [], begin + numel
        first = bisect_right(self._spans, begin, key=lambda span: span[0]) - 1
        for index in range(max(first, 0), len(self._spans)):
            offset, span = self._spans[index]
            if offset >= end:
                break
            if offset + span.numel() > begin:
                parts.append((max(offset - begin, 0), span[max(begin - offset, 0) : end - offset]))
        return parts

    def _read(self, target: Tensor, begin: int) -> None:
        parts = self._parts(begin, target.numel())
        if sum(part.numel() for _, part in parts) < target.numel():
            target.zero_()
        for place, part in parts:
            target[place : place + part.numel()].copy_(part)

    def _write(self, source: Tensor, begin: int) -> None:
        for place, part in self._parts(begin, source.numel()):
            part.copy_(source[place : place + part.numel()])

    def _view(self, begin: int, numel: int) -> Tensor | None:
        """A view of so many values from a place of the segment on; None if they do not follow each other in memory."""
        parts = self._parts(begin, numel)
        return parts[0][1] if len(parts) == 1 and parts[0][1].numel() == numel else None


class GradientLayout:
    """Assigns the gradients of parameters to segments.

    It follows from the parameters alone. DDP changes its buckets after the first backward pass: with a layout of its
    own a message has the same groups in the first step, in all others, and in the first one after a restart.
    Gradients are laid out from the last parameter to the first, as backward passes mostly compute them.

    Args:
        parameters: name and parameter of all gradients.
        min_numel: gradients with fewer values are sent uncompressed, in segments of their own.
        segment_numel: the size of segments.

    Attributes:
        segments: all segments, by index.
        names: the name of each parameter by its `id`.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], min_numel: int, segment_numel: int) -> None:
        self.segments: list[Segment] = []
        self._pieces: dict[int, list[tuple[int, Piece]]] = {}
        self.names: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        groups: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
        for name, parameter in reversed(list(parameters)):
            self.names[id(parameter)], self._dtypes[id(parameter)] = name, parameter.dtype
            is_exact = parameter.numel() < min_numel
            groups.setdefault((parameter.device, parameter.dtype, is_exact), []).append(parameter)
        for (device, _, is_exact), members in groups.items():
            self._lay_out(members, device, is_exact, segment_numel)

    def pieces(self, parameter: Tensor) -> list[tuple[Segment, Piece]]:
        """The pieces of a parameter's gradient, and the segments that they belong to.

        Raises:
            PolicyError: the parameter was not given to the layout.
        """
        if id(parameter) not in self._pieces:
            problem, advice = f"a gradient of shape {tuple(parameter.shape)}", "do not change requires_grad later"
            raise PolicyError("gradients", found=problem, expected="a parameter known from the start", do=advice)
        return [(self.segments[index], piece) for index, piece in self._pieces[id(parameter)]]

    def digest(self) -> str:
        """A digest of names, dtypes, sizes and places: 16 hex digits; equal on ranks that have the same layout."""
        text = "\n".join(f"{name} {self._dtypes[key]} {self._pieces[key]}" for key, name in self.names.items())
        return hashlib.sha256(f"{self.segments}\n{text}".encode()).hexdigest()[:16]

    def _lay_out(self, members: list[Tensor], device: torch.device, is_exact: bool, segment_numel: int) -> None:
        """Append the segments of gradients of one dtype: of equal sizes, except for the last one."""
        sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in members]
        total = sum(align_numel(size) for size in sizes)
        if not total:
            self._pieces.update({id(parameter): [] for parameter in members})
            return
        count = -(-total // segment_numel)
        length = align_numel(-(-total // count))
        first, counts, end = len(self.segments), [0] * -(-total // length), 0
        for parameter, size in zip(members, sizes, strict=True):
            pieces = [(first + at, piece) for at, piece in _cut(end, size, length)]
            self._pieces[id(parameter)] = pieces
            for index, _ in pieces:
                counts[index - first] += 1
            end += align_numel(size)
        lengths = [min(length, total - at * length) for at in range(len(counts))]
        places = enumerate(zip(lengths, counts, strict=True), first)
        self.segments += [Segment(index, numel, pieces, is_exact, device) for index, (numel, pieces) in places]


class GradientCollector:
    """Collects the gradients of one step as they come, and yields the segments that are complete."""

    def __init__(self, layout: GradientLayout) -> None:
        self._layout = layout
        self._filled: dict[int, FilledSegment] = {}
        self._found: set[int] = set()

    def add(self, parameter: Tensor, gradient: Tensor) -> Iterator[FilledSegment]:
        """Add a flat gradient, and yield the segments that it completes."""
        self._found.add(id(parameter))
        for segment, piece in self._layout.pieces(parameter):
            filled = self._filled.setdefault(segment.index, FilledSegment(segment))
            filled.runs.append((gradient[piece.start : piece.start + piece.numel], piece))
            if len(filled.runs) == segment.num_pieces:
                yield self._filled.pop(segment.index)

    def end_step(self) -> list[str]:
        """Begin the next step; return the names of parameters whose gradients are missing in this one."""
        missing = [name for key, name in self._layout.names.items() if key not in self._found]
        self._found.clear()
        self._filled.clear()
        return missing


def align_numel(numel: int) -> int:
    """The next multiple of `PARAMETER_ALIGN`."""
    return numel + -numel % PARAMETER_ALIGN


def is_dense(tensor: Tensor) -> bool:
    """True if values fill their memory, in whatever order of axes: DDP's buckets keep that order for the gradient."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != end:
            return False
        end *= size
    return True


def _cut(begin: int, numel: int, length: int) -> Iterator[tuple[int, Piece]]:
    """Cut a run of values that begins at a place of all segments together: index of a segment, and piece."""
    start = 0
    while start < numel:
        index, offset = divmod(begin + start, length)
        size = min(numel - start, length - offset)
        yield index, Piece(start, offset, size)
        start += size
