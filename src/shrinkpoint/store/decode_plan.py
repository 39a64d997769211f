"""Opens a chain, and plans and runs the decoding of a range of bytes of one tensor, with a cache of decoded chunks.

The plan is made from the last file to the keyframe and run in the opposite order. A node is a record of a file. It is
decoded in ranges where its recipe allows that, and everything it depends on is in earlier nodes. So all requests to a
node are known before it is decoded, and each range is decoded once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import Bytes, num_numbers
from shrinkpoint.codec.decoder import (
    ByteRange,
    DecodedRange,
    DecodeInputs,
    QuantizerParams,
    RecordDecoder,
    RecordView,
    concat,
    decode_errors,
)
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.record import decode, record_decoder, required_tensors
from shrinkpoint.codec.reference import Reference, as_decoded
from shrinkpoint.container import FileReader, RecordHead
from shrinkpoint.errors import VERIFY_ADVICE, ChainError, NotFoundError, PolicyError
from shrinkpoint.storage import Source
from shrinkpoint.store.chain import check_parent
from shrinkpoint.store.checkpoint_file import Allowance
from shrinkpoint.store.file_place import AnyPlace, FilePlace, place_file
from shrinkpoint.tensors.dtypes import tensor_bytes, tensor_from_bytes
from shrinkpoint.tensors.info import ITEMSIZE, TensorInfo

Node: TypeAlias = tuple[int, int]  # Index of a file in the chain, and index of a record in that file
Ints: TypeAlias = NDArray[np.int64]

WHOLE = -1  # Stands for the whole record in place of a chunk's index


class PartialFile:
    """One file of a chain, open for reading in part.

    Attributes:
        reader: its header.
        infos: its tensors by name, in their order.
        records: by name of a tensor, the index of the record that holds it.
    """

    def __init__(self, source: Source, where: str) -> None:
        self._source = source
        self.reader = FileReader(source, where)
        heads = self.reader.records
        self._infos = [info for head in heads for info in head.infos]
        self._first_tensor = [0, *accumulate(len(head.infos) for head in heads)]
        self.infos: Mapping[str, TensorInfo] = {info.name: info for info in self._infos}
        self.records = {info.name: index for index, head in enumerate(heads) for info in head.infos}

    def head(self, index: int) -> RecordHead:
        return self.reader.records[index]

    def describe(self, index: int) -> str:
        """The name of a record in messages."""
        return f"{self.reader.where}: {self.head(index).label}"

    def is_same(self, index: int) -> bool:
        """True if a record only states that its tensors have not changed since the parent."""
        return bool(self.head(index).recipe == {"kind": "same"})

    def tensors_before(self, index: int) -> list[str]:
        """The tensors of the records before this one."""
        return [info.name for info in self._infos[: self._first_tensor[index]]]

    def record_view(self, index: int, parent: PartialFile | None) -> RecordView:
        """A record for partial decoding; `parent` is the file before in the chain."""
        head = self.head(index)

        def earlier_tensor(ordinal: int) -> TensorInfo:
            if not 0 <= ordinal < self._first_tensor[index]:
                raise LookupError(f"tensor {ordinal} is not one of an earlier record")
            return self._infos[ordinal]

        read = partial(self.reader.read_part, head)
        sizes = {part: entry.size for part, entry in head.parts.items()}
        parents = {} if parent is None else parent.infos
        return RecordView(head.infos, head.recipe, sizes, read, earlier_tensor, parents.get)

    def close(self) -> None:
        self._source.close()


def open_chain(paths: Sequence[AnyPlace], max_bytes: int | None = None) -> list[PartialFile]:
    """Open the files of a chain, keyframe first, and verify that each was made against the one before.

    Raises:
        PolicyError: `paths` is empty.
        NotFoundError: the last file does not exist.
        ChainError: another one does not, or is not the one its child was made against.
        FormatError: a header is damaged.
        StorageError: reading failed.
    """
    if not paths:
        do = "pass the bases, keyframe first, then the file itself"
        raise PolicyError("chain", found="no file", expected="at least one", do=do)
    files: list[PartialFile] = []
    allowance = Allowance(max_bytes)
    try:
        for path in paths:
            files.append(_open_file(place_file(path), files[-1] if files else None, last=path is paths[-1]))
            reader = files[-1].reader
            allowance.admit(reader.where, reader.size, sum(info.nbytes for info in files[-1].infos.values()))
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _open_file(place: FilePlace, base: PartialFile | None, *, last: bool) -> PartialFile:
    try:
        source = place.open()
    except NotFoundError as error:
        if last:
            raise
        expected = "a file that a later one of its chain depends on"
        raise ChainError(str(place), found="no such file", expected=expected, do=VERIFY_ADVICE) from error
    try:
        file = PartialFile(source, str(place))
        check_parent(file.reader, None if base is None else base.reader)
    except BaseException:
        source.close()
        raise
    return file


class Cache:
    """Least-recently-used cache of decoded chunks and records.

    Attributes:
        limit: in bytes.
        views, decoders, quantizers: what is small and constant of each record that was opened; not counted.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.views: dict[Node, RecordView] = {}
        self.decoders: dict[Node, RecordDecoder | None] = {}
        self.quantizers: dict[Node, Mapping[str, QuantizerParams]] = {}
        self._entries: OrderedDict[tuple[Node, int], DecodedRange | Reference] = OrderedDict()
        self._bytes = 0

    def get(self, node: Node, chunk: int) -> DecodedRange | Reference | None:
        entry = self._entries.get((node, chunk))
        if entry is not None:
            self._entries.move_to_end((node, chunk))
        return entry

    def put(self, node: Node, chunk: int, value: DecodedRange | Reference) -> None:
        size = entry_bytes(value)
        if size > self.limit or (node, chunk) in self._entries:
            return
        self._entries[node, chunk] = value
        self._bytes += size
        while self._bytes > self.limit:
            self._bytes -= entry_bytes(self._entries.popitem(last=False)[1])

    def clear(self) -> None:
        for table in (self._entries, self.views, self.decoders, self.quantizers):
            table.clear()
        self._bytes = 0


def entry_bytes(value: DecodedRange | Reference) -> int:
    """Memory that a cache entry takes, in bytes."""
    if isinstance(value, DecodedRange):
        return value.nbytes
    codebooks = sum(tensor.codes.nbytes for tensor in value.codebook_tensors.values())
    return as_decoded(value.tensors).nbytes + codebooks


@dataclass
class DecodeNode:
    """The state of one record in a plan."""

    where: str  # the record, for messages
    view: RecordView  # the record
    # Begin and end of the requested bytes of its stream, an array of each per request.
    requested: list[tuple[Ints, Ints]] = field(default_factory=list)
    strict: bool = False  # check everything, as when the record is decoded as a whole
    needs_quantizers: bool = False  # the quantizer parameters of its tensors are requested
    decoder: RecordDecoder | None = None  # decodes a part of it; None: it is decoded as a whole
    # (begin, end) of the ranges to decode, in units of the decoder.
    undecoded: list[tuple[int, int]] = field(default_factory=list)
    # (first unit, decoded values from there on), by rising unit.
    ranges: list[tuple[int, DecodedRange]] = field(default_factory=list)
    full_record: Reference | None = None  # the content of a record that was decoded as a whole
    dependencies: set[Node] = field(default_factory=set)  # the nodes it depends on

    def requested_ranges(self) -> list[tuple[int, int]]:
        """Disjoint ranges of units that consist of whole chunks and cover the requested bytes of the stream."""
        assert self.decoder is not None
        chunk, count, size = self.decoder.chunk, self.decoder.count, self.decoder.unit * self.decoder.chunk
        if not self.requested:
            return []
        starts, stops = (np.concatenate(ends) for ends in zip(*self.requested, strict=True))
        is_nonempty = stops > starts
        lows, highs = starts[is_nonempty] // size, -(-stops[is_nonempty] // size)
        if not lows.size:
            return []
        order = np.argsort(lows, kind="stable")
        lows, highs = lows[order], np.maximum.accumulate(highs[order])
        gaps = np.flatnonzero(lows[1:] > highs[:-1] + self.decoder.merge_gap) + 1
        return [
            (int(low[0]) * chunk, min(int(high[-1]) * chunk, count))
            for low, high in zip(np.split(lows, gaps), np.split(highs, gaps), strict=True)
        ]

    def read(self, name: str, start: int, stop: int, *, codes: bool = False) -> Bytes:
        """Decoded bytes of a tensor's values, or of its codes."""
        if self.full_record is not None:
            if not codes:
                return tensor_bytes(self.full_record.tensors[name])[start:stop]
            origin = self.full_record.quantized.get(name)
            if not isinstance(origin, CodebookTensor):
                raise self._no_codes_error(name)
            return tensor_bytes(origin.codes)[start:stop]
        assert self.decoder is not None
        unit, offset = self.decoder.unit, self.view.offsets[name]
        if codes:
            unit, offset = 1, offset // unit
        parts, last = [], -(-(offset + stop) // unit)
        index = bisect_right(self.ranges, (offset + start) // unit, key=lambda decoded: decoded[0]) - 1
        for first, block in islice(self.ranges, max(index, 0), None):
            if first >= last:
                break
            array = block.codes if codes else block.values
            if array is None:
                raise self._no_codes_error(name)
            begin = max(0, offset + start - first * unit)
            end = offset + stop - first * unit
            if begin < min(end, array.nbytes):
                parts.append(array[begin:end])
        return concat(parts) if parts else np.empty(0, np.uint8)

    def _no_codes_error(self, name: str) -> ChainError:
        return ChainError(self.where, found=f"tensor {name!r}, which has no codes", do=VERIFY_ADVICE)


class DecodePlan:
    """Decodes ranges of bytes of one tensor of the last file.

    Args:
        chain: the files, keyframe first.
        cache: shared by successive plans for the same chain.
        threads: native threads.
    """

    def __init__(self, chain: Sequence[PartialFile], cache: Cache, threads: int) -> None:
        self._chain, self._cache, self._threads = chain, cache, threads
        self._nodes: dict[Node, DecodeNode] = {}
        self._heap: list[Node] = []
        self.numbers_decoded = 0  # numbers decoded so far, in all files

    def values(self, name: str, starts: Ints, size: int, *, strict: bool) -> list[tuple[int, Bytes]]:
        """Decode the ranges of `size` bytes of a tensor from each of `starts`, which ascend.

        Args:
            strict: compare all digests on the way; for a whole tensor.

        Returns:
            (offset in the tensor, bytes from there on); each requested range is inside one of them.
        """
        node, _ = self._require(len(self._chain) - 1, name, starts, starts + size, strict=strict)
        for dependency in self._order(node):
            self._decode(dependency)
        step = self._nodes[node]
        if step.full_record is not None:
            return [(0, tensor_bytes(step.full_record.tensors[name]))]
        assert step.decoder is not None
        offset, nbytes = step.view.offsets[name], self._chain[node[0]].infos[name].nbytes
        out = []
        for lo, hi in step.requested_ranges():
            start = max(0, lo * step.decoder.unit - offset)
            stop = min(nbytes, hi * step.decoder.unit - offset)
            out.append((start, step.read(name, start, stop)))
        return out

    # planning, from the last file to the keyframe

    def _order(self, last: Node) -> Iterator[Node]:
        """Yields the nodes in the order of decoding; frees the content of a node after its last use."""
        order = []
        while self._heap:
            file, record = heapq.heappop(self._heap)
            node = (-file, -record)
            order.append(node)
            with decode_errors(self._where(node)):
                self._plan(node)
        uses = Counter(dependency for node in order for dependency in self._nodes[node].dependencies)
        uses[last] += 1
        for node in reversed(order):
            yield node
            for dependency in self._nodes[node].dependencies:
                uses[dependency] -= 1
                if uses[dependency] == 0:
                    self._nodes[dependency].ranges, self._nodes[dependency].full_record = [], None

    def _where(self, node: Node) -> str:
        return self._chain[node[0]].describe(node[1])

    def _resolve(self, file: int, name: str) -> Node:
        """The record that holds a tensor's values: that of an ancestor, where they have not changed since."""
        info = self._chain[file].infos[name]
        while self._chain[file].is_same(self._chain[file].records[name]):
            where, file = self._where((file, self._chain[file].records[name])), file - 1
            self._check_parent(file, info, where)
        return file, self._chain[file].records[name]

    def _check_parent(self, file: int, info: TensorInfo, where: str) -> None:
        if file < 0:
            raise ChainError(where, found="a delta without its base", do=VERIFY_ADVICE)
        parent = self._chain[file].infos.get(info.name)
        if parent is None or (parent.shape, parent.dtype) != (info.shape, info.dtype):
            message = f"a base without tensor {info.name!r} of shape {list(info.shape)} and {info.dtype}"
            raise ChainError(where, found=message, do=VERIFY_ADVICE)

    def _node(self, node: Node) -> DecodeNode:
        if node not in self._nodes:
            view = self._cache.views.get(node)
            if view is None:
                view = self._chain[node[0]].record_view(node[1], self._chain[node[0] - 1] if node[0] else None)
                self._cache.views[node] = view
            self._nodes[node] = DecodeNode(self._where(node), view)
            heapq.heappush(self._heap, (-node[0], -node[1]))
        return self._nodes[node]

    def _require(
        self, file: int, name: str, starts: Ints, stops: Ints, *, strict: bool = False, codes: bool = False
    ) -> tuple[Node, DecodeNode]:
        """Request bytes of a tensor's values, or of its codes."""
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
        entry = self._cache.get(node, WHOLE)
        if isinstance(entry, Reference):
            step.full_record = entry
            return
        copied = isinstance(step.view.recipe, dict) and step.view.recipe.get("kind") == "copy"
        if copied or not step.strict:
            if node not in self._cache.decoders:
                decoder = record_decoder(step.view)
                self._cache.decoders[node] = decoder if decoder.splittable else None
            step.decoder = self._cache.decoders[node]
        if step.decoder is None:
            step.strict = True
            for own, name in required_tensors(step.view):
                infos = self._chain[node[0]].infos
                span = ByteRange(own, name, 0, infos[name].nbytes)
                step.dependencies.add(self._require_range(node, span, strict=True))
        else:
            self._plan_ranges(node, step, step.decoder)

    def _plan_ranges(self, node: Node, step: DecodeNode, decoder: RecordDecoder) -> None:
        for lo, hi in step.requested_ranges():
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
        self, node: Node, step: DecodeNode, decoder: RecordDecoder, lo: int, hi: int
    ) -> list[tuple[int, int]]:
        """The parts of a range that must be decoded; chunks in the cache are used."""
        if not decoder.cacheable:
            return [(lo, hi)]
        out: list[tuple[int, int]] = []
        for start in range(lo, hi, decoder.chunk):
            stop = min(start + decoder.chunk, hi)
            entry = self._cache.get(node, start // decoder.chunk)
            if isinstance(entry, DecodedRange):
                step.ranges.append((start, entry))
            elif out and out[-1][1] == start:
                out[-1] = (out[-1][0], stop)
            else:
                out.append((start, stop))
        return out

    # decoding, from the keyframe on

    def _decode(self, node: Node) -> None:
        step = self._nodes[node]
        if step.full_record is not None:
            return
        with decode_errors(step.where):
            if step.decoder is None:
                self._decode_full_record(node, step)
            else:
                self._decode_ranges(node, step, step.decoder)

    def _decode_ranges(self, node: Node, step: DecodeNode, decoder: RecordDecoder) -> None:
        def supply(spans: Sequence[ByteRange]) -> Bytes:
            files = [node[0] if span.same_file else node[0] - 1 for span in spans]
            others = [self._nodes[self._resolve(file, span.name)] for file, span in zip(files, spans, strict=True)]
            reads = zip(others, spans, strict=True)
            return concat([other.read(span.name, span.start, span.stop, codes=span.codes) for other, span in reads])

        inputs = DecodeInputs(supply, lambda name: self._quantizer(node[0] - 1, name), self._threads)
        if node not in self._cache.quantizers and (step.undecoded or step.needs_quantizers):
            self._cache.quantizers[node] = decoder.quantizer_params(inputs.fetch_params)
        for lo, hi in step.undecoded:
            block = decoder.decode_range(lo, hi, inputs)
            step.ranges.append((lo, block))
            if decoder.cacheable:
                self.numbers_decoded += sum(num_numbers(info) for info in step.view.infos) * (hi - lo) // decoder.count
                self._cache_chunks(node, decoder, lo, hi, block)
        step.ranges.sort(key=lambda decoded: decoded[0])

    def _cache_chunks(self, node: Node, decoder: RecordDecoder, lo: int, hi: int, block: DecodedRange) -> None:
        each = max(1, block.nbytes // max(1, (hi - lo)))
        first = max(lo, hi - self._cache.limit // each // decoder.chunk * decoder.chunk)  # what the cache can hold
        for start in range(lo, hi, decoder.chunk):
            if start >= first:
                part = slice(start - lo, min(start + decoder.chunk, hi) - lo)
                values = block.values[part.start * decoder.unit : part.stop * decoder.unit].copy()
                codes = None if block.codes is None else block.codes[part].copy()
                self._cache.put(node, start // decoder.chunk, DecodedRange(values, codes))

    def _decode_full_record(self, node: Node, step: DecodeNode) -> None:
        file = self._chain[node[0]]
        encoded = file.reader.read(file.head(node[1]))
        required = required_tensors(step.view)
        own = self._reference(node[0], [name for is_own, name in required if is_own])
        parent = self._reference(node[0] - 1, [name for is_own, name in required if not is_own]) if node[0] else None
        decoded = LazyTensors(file.tensors_before(node[1]), own.tensors)
        where = file.reader.where
        step.full_record = decode(encoded, decoded, parent, quantized=own.quantized, where=where, threads=self._threads)
        self.numbers_decoded += sum(num_numbers(info) for info in step.view.infos)
        self._cache.put(node, WHOLE, step.full_record)

    def _reference(self, file: int, names: Sequence[str]) -> Reference:
        """Complete tensors of a file, with their codes where these were quantized."""
        tensors, quantized = {}, {}
        for name in names:
            node = self._resolve(file, name)
            record = self._nodes[node].full_record
            if record is None:
                info = self._chain[file].infos[name]
                tensors[name] = tensor_from_bytes(self._nodes[node].read(name, 0, info.nbytes), info)
                continue
            tensors[name] = record.tensors[name]
            if name in record.quantized:
                quantized[name] = record.quantized[name]
        return Reference(tensors, quantized)

    def _quantizer(self, file: int, name: str) -> QuantizerParams:
        node = self._resolve(file, name)
        record = self._nodes[node].full_record
        params = self._cache.quantizers[node].get(name) if record is None else record.quantized.get(name)
        if params is None:
            found = f"tensor {name!r}, which is not quantized"
            raise ChainError(self._chain[file].reader.where, found=found, do=VERIFY_ADVICE)
        return params.lattice if isinstance(params, LatticeTensor) else params


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of all earlier records by name; only those that were decoded can be read."""

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self._names, self._tensors = names, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
