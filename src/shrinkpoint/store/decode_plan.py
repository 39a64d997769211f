"""What must be decoded of a chain for some bytes of one tensor, and the cache of what was decoded before.

The plan is made from the last file down and carried out from the first up. A node is a record of a file. It is decoded
in ranges where it can be, and everything that it needs lies in earlier nodes. So when the plan comes to a node, all
that is needed of it is known, and each range is decoded once."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import Bytes
from shrinkpoint.codec.errors import decode_errors
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.pack import num_numbers
from shrinkpoint.codec.partial.dispatch import partial_decoder, required_tensors
from shrinkpoint.codec.partial.interface import (
    ByteRange,
    DecodedRange,
    PartialDecoder,
    QuantizerParams,
    RecordView,
    concat,
)
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError
from shrinkpoint.store.partial_file import PartialFile
from shrinkpoint.tensors.dtypes import tensor_bytes, tensor_from_bytes
from shrinkpoint.tensors.info import ITEMSIZE, TensorInfo

Node: TypeAlias = tuple[int, int]
"""A file of the chain, and a record of it, by their places."""
Key: TypeAlias = tuple[Node, int]

WHOLE = -1
"""In place of a piece's number."""


class Cache:
    """What was decoded last, within a bound of bytes.

    Attributes:
        opened, pieces, origins: of the records that were met, what is little and does not change.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.views: dict[Node, RecordView] = {}
        self.decoders: dict[Node, PartialDecoder | None] = {}
        self.quantizers: dict[Node, Mapping[str, QuantizerParams]] = {}
        self._entries: OrderedDict[Key, DecodedRange | Reference] = OrderedDict()
        self._bytes = 0

    def get(self, node: Node, chunk: int) -> DecodedRange | Reference | None:
        found = self._entries.get((node, chunk))
        if found is not None:
            self._entries.move_to_end((node, chunk))
        return found

    def put(self, node: Node, chunk: int, value: DecodedRange | Reference) -> None:
        size = entry_bytes(value)
        if size > self.limit or (node, chunk) in self._entries:
            return
        self._entries[node, chunk] = value
        self._bytes += size
        while self._bytes > self.limit:
            self._bytes -= entry_bytes(self._entries.popitem(last=False)[1])

    def clear(self) -> None:
        for one in (self._entries, self.views, self.decoders, self.quantizers):
            one.clear()
        self._bytes = 0


def entry_bytes(value: DecodedRange | Reference) -> int:
    if isinstance(value, DecodedRange):
        return value.nbytes
    origins = [one.codes for one in value.quantized.values()]
    return sum(tensor.nbytes for tensor in (*value.tensors.values(), *origins))


Ints: TypeAlias = NDArray[np.int64]


@dataclass
class DecodeNode:
    """What a plan knows of a node.

    Attributes:
        requested: where the bytes of its stream begin and end that others need.
        strict: everything about it is to be checked, as when it is decoded as a whole.
        needs_quantizers: what its tensors were made from is needed.
        decoder: how it is decoded in part; None: as a whole.
        undecoded: ranges to decode.
        ranges: (first unit, what the stream is from there on), what was decoded.
        full_record: the same, of a record that was decoded as a whole.
        dependencies: the nodes it needs.
    """

    view: RecordView
    requested: list[tuple[Ints, Ints]] = field(default_factory=list)
    strict: bool = False
    needs_quantizers: bool = False
    decoder: PartialDecoder | None = None
    undecoded: list[tuple[int, int]] = field(default_factory=list)
    ranges: list[tuple[int, DecodedRange]] = field(default_factory=list)
    full_record: Reference | None = None
    dependencies: set[Node] = field(default_factory=set)


class DecodePlan:
    """Some bytes of one tensor of the last file.

    Attributes:
        numbers_decoded: numbers that were decoded for it.
    """

    def __init__(self, chain: Sequence[PartialFile], cache: Cache, threads: int) -> None:
        self._chain, self._cache, self._threads = chain, cache, threads
        self._nodes: dict[Node, DecodeNode] = {}
        self._heap: list[Node] = []
        self.numbers_decoded = 0

    def values(self, name: str, starts: Ints, size: int, *, strict: bool) -> list[tuple[int, Bytes]]:
        """Bytes of a tensor that cover the ranges of `size` bytes from each of `starts`, which ascend.

        Args:
            strict: of a whole tensor: all digests on the way are compared.

        Returns:
            (byte of the tensor, bytes from there on); each range lies in one of them.
        """
        node, _ = self._require(len(self._chain) - 1, name, starts, starts + size, strict=strict)
        for one in self._order(node):
            self._decode(one)
        step = self._nodes[node]
        if step.full_record is not None:
            return [(0, tensor_bytes(step.full_record.tensors[name]))]
        assert step.decoder is not None
        offset, nbytes = step.view.offsets[name], self._chain[node[0]].infos[name].nbytes
        out = []
        for lo, hi in self._cover(step, step.requested):
            start = max(0, lo * step.decoder.unit - offset)
            stop = min(nbytes, hi * step.decoder.unit - offset)
            out.append((start, self._bytes(node, name, start, stop)))
        return out

    # what is needed, from the last file down

    def _order(self, last: Node) -> Iterator[Node]:
        """The nodes to decode, in their order; what nobody needs any more is dropped in between."""
        order = []
        while self._heap:
            node = heapq.heappop(self._heap)
            at = (-node[0], -node[1])
            order.append(at)
            with decode_errors(self._where(at)):
                self._plan(at)
        users = Counter(need for at in order for need in self._nodes[at].dependencies)
        users[last] += 1
        for at in reversed(order):
            yield at
            for need in self._nodes[at].dependencies:
                users[need] -= 1
                if users[need] == 0:
                    self._nodes[need].ranges, self._nodes[need].full_record = [], None

    def _where(self, node: Node) -> str:
        return self._chain[node[0]].describe(node[1])

    def _resolve(self, file: int, name: str) -> Node:
        """The record that has a tensor's values: those that have not changed are the parent's."""
        info = self._chain[file].infos[name]
        while self._chain[file].is_same(self._chain[file].records[name]):
            where, file = self._where((file, self._chain[file].records[name])), file - 1
            self._check_parent(file, info, where)
        return file, self._chain[file].records[name]

    def _check_parent(self, file: int, info: TensorInfo, where: str) -> None:
        do = "give the checkpoint this one was made against"
        if file < 0:
            raise ChainError(where, found="a delta without its parent", do=do)
        found = self._chain[file].infos.get(info.name)
        if found is None or (found.shape, found.dtype) != (info.shape, info.dtype):
            what = f"a parent without tensor {info.name!r} of shape {list(info.shape)} and {info.dtype}"
            raise ChainError(where, found=what, do=do)

    def _node(self, node: Node) -> DecodeNode:
        if node not in self._nodes:
            self._nodes[node] = DecodeNode(self._view(node))
            heapq.heappush(self._heap, (-node[0], -node[1]))
        return self._nodes[node]

    def _view(self, node: Node) -> RecordView:
        held = self._cache.views.get(node)
        if held is None:
            held = self._chain[node[0]].record_view(node[1], self._chain[node[0] - 1] if node[0] else None)
            self._cache.views[node] = held
        return held

    def _decoder(self, node: Node, opened: RecordView) -> PartialDecoder | None:
        if node not in self._cache.decoders:
            self._cache.decoders[node] = partial_decoder(opened)
        return self._cache.decoders[node]

    def _require(
        self, file: int, name: str, starts: Ints, stops: Ints, *, strict: bool = False, codes: bool = False
    ) -> tuple[Node, DecodeNode]:
        """Note that bytes of a tensor's values (or of its codes) are needed."""
        node = self._resolve(file, name)
        step = self._node(node)
        scale = ITEMSIZE[self._chain[node[0]].infos[name].dtype] if codes else 1
        offset = step.view.offsets[name]
        step.requested.append((offset + starts * scale, offset + stops * scale))
        step.strict |= strict
        return node, step

    def _require_range(self, user: Node, span: ByteRange, *, strict: bool) -> Node:
        file = user[0] if span.same_file else user[0] - 1
        if not span.same_file:
            info = self._chain[user[0]].infos[span.name]
            self._check_parent(file, info, self._where(user))
        ends = np.array([[span.start], [span.stop]], np.int64)
        return self._require(file, span.name, ends[0], ends[1], strict=strict, codes=span.codes)[0]

    def _plan(self, node: Node) -> None:
        step = self._nodes[node]
        held = self._cache.get(node, WHOLE)
        if isinstance(held, Reference):
            step.full_record = held
            return
        copied = isinstance(step.view.recipe, dict) and step.view.recipe.get("kind") == "copy"
        step.decoder = self._decoder(node, step.view) if copied or not step.strict else None
        if step.decoder is None:
            step.strict = True
            self._plan_full_record(node, step)
        else:
            self._plan_ranges(node, step, step.decoder)

    def _plan_full_record(self, node: Node, step: DecodeNode) -> None:
        for own, name in required_tensors(step.view):
            infos = self._chain[node[0]].infos
            span = ByteRange(own, name, 0, infos[name].nbytes)
            step.dependencies.add(self._require_range(node, span, strict=True))

    def _plan_ranges(self, node: Node, step: DecodeNode, decoder: PartialDecoder) -> None:
        for lo, hi in self._cover(step, step.requested):
            step.undecoded += self._uncached(node, step, decoder, lo, hi)
        for lo, hi in step.undecoded:
            for span in decoder.required_ranges(lo, hi):
                step.dependencies.add(self._require_range(node, span, strict=step.strict))
        if node in self._cache.quantizers or not (step.undecoded or step.needs_quantizers):
            return
        for name in decoder.required_parents():
            self._check_parent(node[0] - 1, self._chain[node[0]].infos[name], self._where(node))
            other = self._resolve(node[0] - 1, name)
            self._node(other).needs_quantizers = True
            step.dependencies.add(other)

    def _uncached(
        self, node: Node, step: DecodeNode, decoder: PartialDecoder, lo: int, hi: int
    ) -> list[tuple[int, int]]:
        """The parts of a range that are to be decoded; what the cache has of it is taken."""
        if not decoder.cacheable:
            return [(lo, hi)]
        out: list[tuple[int, int]] = []
        for start in range(lo, hi, decoder.chunk):
            stop = min(start + decoder.chunk, hi)
            held = self._cache.get(node, start // decoder.chunk)
            if isinstance(held, DecodedRange):
                step.ranges.append((start, held))
            elif out and out[-1][1] == start:
                out[-1] = (out[-1][0], stop)
            else:
                out.append((start, stop))
        return out

    def _cover(self, step: DecodeNode, requested: Sequence[tuple[Ints, Ints]]) -> list[tuple[int, int]]:
        """Ranges of units, apart from each other, that whole chunks have and that cover bytes of the stream."""
        assert step.decoder is not None
        size = step.decoder.unit * step.decoder.chunk
        starts = np.concatenate([one[0] for one in requested]) if requested else np.empty(0, np.int64)
        stops = np.concatenate([one[1] for one in requested]) if requested else np.empty(0, np.int64)
        some = stops > starts
        lows, highs = starts[some] // size, -(-stops[some] // size)
        order = np.argsort(lows, kind="stable")
        lows, highs = lows[order], np.maximum.accumulate(highs[order]) if order.size else highs
        apart = np.flatnonzero(lows[1:] > highs[:-1] + step.decoder.merge_gap) + 1
        chunk, count = step.decoder.chunk, step.decoder.count
        return [
            (int(part[0][0]) * chunk, min(int(part[1][-1]) * chunk, count))
            for part in zip(np.split(lows, apart), np.split(highs, apart), strict=True)
            if part[0].size
        ]

    # and done, from the first file up

    def _decode(self, node: Node) -> None:
        step = self._nodes[node]
        if step.full_record is not None:
            return
        with decode_errors(self._where(node)):
            if step.decoder is None:
                self._decode_full_record(node, step)
            else:
                self._decode_ranges(node, step, step.decoder)

    def _decode_ranges(self, node: Node, step: DecodeNode, decoder: PartialDecoder) -> None:
        if node not in self._cache.quantizers and (step.undecoded or step.needs_quantizers):
            self._cache.quantizers[node] = decoder.quantizer_params(lambda name: self._quantizer(node[0] - 1, name))

        def supply(span: ByteRange) -> Bytes:
            other = self._resolve(node[0] if span.same_file else node[0] - 1, span.name)
            return self._bytes(other, span.name, span.start, span.stop, codes=span.codes)

        for lo, hi in step.undecoded:
            block = decoder.decode(lo, hi, supply, self._threads)
            step.ranges.append((lo, block))
            if decoder.cacheable:
                self.numbers_decoded += sum(num_numbers(info) for info in step.view.infos) * (hi - lo) // decoder.count
                self._cache_chunks(node, decoder, lo, hi, block)
        step.ranges.sort(key=lambda one: one[0])

    def _cache_chunks(self, node: Node, decoder: PartialDecoder, lo: int, hi: int, block: DecodedRange) -> None:
        each = max(1, block.nbytes // max(1, (hi - lo)))
        first = max(lo, hi - self._cache.limit // each // decoder.chunk * decoder.chunk)  # no more than it can hold
        for start in range(lo, hi, decoder.chunk):
            if start >= first:
                part = slice(start - lo, min(start + decoder.chunk, hi) - lo)
                values = block.values[part.start * decoder.unit : part.stop * decoder.unit].copy()
                codes = None if block.codes is None else block.codes[part].copy()
                self._cache.put(node, start // decoder.chunk, DecodedRange(values, codes))

    def _decode_full_record(self, node: Node, step: DecodeNode) -> None:
        file = self._chain[node[0]]
        encoded = file.reader.read(file.head(node[1]))
        needed = required_tensors(step.view)
        own = self._reference(node[0], [name for mine, name in needed if mine])
        parent = self._reference(node[0] - 1, [name for mine, name in needed if not mine]) if node[0] else None
        decoded = LazyTensors(file.tensors_before(node[1]), own.tensors)
        where = file.reader.where
        step.full_record = decode(encoded, decoded, parent, quantized=own.quantized, where=where, threads=self._threads)
        self.numbers_decoded += sum(num_numbers(info) for info in step.view.infos)
        self._cache.put(node, WHOLE, step.full_record)

    def _reference(self, file: int, names: Sequence[str]) -> Reference:
        """Whole tensors of a file, and what they were made from."""
        tensors, symbols = {}, {}
        for name in names:
            node = self._resolve(file, name)
            whole = self._nodes[node].full_record
            if whole is None:
                info = self._chain[file].infos[name]
                tensors[name] = tensor_from_bytes(self._bytes(node, name, 0, info.nbytes), info)
                continue
            tensors[name] = whole.tensors[name]
            if name in whole.quantized:
                symbols[name] = whole.quantized[name]
        return Reference(tensors, symbols)

    def _quantizer(self, file: int, name: str) -> QuantizerParams:
        node = self._resolve(file, name)
        whole = self._nodes[node].full_record
        held = self._cache.quantizers[node].get(name) if whole is None else whole.quantized.get(name)
        if held is None:
            raise ChainError(self._chain[file].reader.where, found=f"tensor {name!r}, which no quantizer made")
        return held.lattice if isinstance(held, LatticeTensor) else held

    def _bytes(self, node: Node, name: str, start: int, stop: int, *, codes: bool = False) -> Bytes:
        """Bytes of a tensor's values, or of its codes, that have been decoded."""
        step = self._nodes[node]
        if step.full_record is not None:
            origin = step.full_record.quantized.get(name)
            if codes and not isinstance(origin, CodebookTensor):
                raise ChainError(self._where(node), found=f"tensor {name!r}, which has no codes")
            return tensor_bytes(
                origin.codes if codes and isinstance(origin, CodebookTensor) else step.full_record.tensors[name]
            )[start:stop]
        assert step.decoder is not None
        unit, offset = 1 if codes else step.decoder.unit, step.view.offsets[name]
        offset = offset // step.decoder.unit if codes else offset
        parts, last = [], -(-(offset + stop) // unit)
        at = bisect_right(step.ranges, (offset + start) // unit, key=lambda one: one[0]) - 1
        for first, block in islice(step.ranges, max(at, 0), None):
            if first >= last:
                break
            array = block.codes if codes else block.values
            if array is None:
                raise ChainError(self._where(node), found=f"tensor {name!r}, which has no codes")
            begin = max(0, offset + start - first * unit)
            end = offset + stop - first * unit
            if begin < min(end, array.nbytes):
                parts.append(array[begin:end])
        return concat(parts) if parts else np.empty(0, np.uint8)


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of all earlier records by name, of which only those at hand can be had."""

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self._names, self._tensors = names, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
