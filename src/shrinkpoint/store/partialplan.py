"""What must be decoded of a chain for some bytes of one tensor: found from the last file down, done from the first up.

A node is a record of a file. It is decoded in pieces where it can be, and everything that it needs lies in earlier
nodes. So when the plan comes to a node, all that anyone needs of it is known, and each piece is decoded once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shrinkpoint.codec import Points, Reference, Symbols, decode
from shrinkpoint.codec.arrange import numbers
from shrinkpoint.codec.partial import Block, Opened, Origin, Pieces, Span, joined
from shrinkpoint.codec.pieces import needed_whole, pieces_of
from shrinkpoint.codec.quantize import bits_of, from_bits
from shrinkpoint.codec.refusing import refusing
from shrinkpoint.codec.run import Bytes
from shrinkpoint.errors import ChainError
from shrinkpoint.record import ITEMSIZE, TensorInfo
from shrinkpoint.store.partialcache import WHOLE, Cache, Node
from shrinkpoint.store.partialfile import ChainFile

Ints: TypeAlias = NDArray[np.int64]


@dataclass
class _Step:
    """What a plan knows of a node.

    Attributes:
        wanted: where the bytes of its stream begin and end that others need.
        strict: everything about it is to be checked, as when it is decoded as a whole.
        origins: what its tensors were made from is needed.
        pieces: how it is decoded in part; None: as a whole.
        missing: ranges to decode.
        blocks: (first unit, what the stream is from there on), what was decoded.
        whole: the same, of a record that was decoded as a whole.
        needs: the nodes it needs.
    """

    opened: Opened
    wanted: list[tuple[Ints, Ints]] = field(default_factory=list)
    strict: bool = False
    origins: bool = False
    pieces: Pieces | None = None
    missing: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[tuple[int, Block]] = field(default_factory=list)
    whole: Reference | None = None
    needs: set[Node] = field(default_factory=set)


class Plan:
    """Some bytes of one tensor of the last file.

    Attributes:
        decoded: numbers that were decoded for it.
    """

    def __init__(self, chain: Sequence[ChainFile], cache: Cache, threads: int) -> None:
        self._chain, self._cache, self._threads = chain, cache, threads
        self._steps: dict[Node, _Step] = {}
        self._heap: list[Node] = []
        self.decoded = 0

    def values(self, name: str, starts: Ints, size: int, *, strict: bool) -> list[tuple[int, Bytes]]:
        """Bytes of a tensor that cover the ranges of `size` bytes from each of `starts`, which ascend.

        Args:
            strict: of a whole tensor: all digests on the way are compared.

        Returns:
            (byte of the tensor, bytes from there on); each range lies in one of them.
        """
        node, _ = self._want(len(self._chain) - 1, name, starts, starts + size, strict=strict)
        for one in self._run(node):
            self._do(one)
        step = self._steps[node]
        if step.whole is not None:
            return [(0, bits_of(step.whole.tensors[name]))]
        assert step.pieces is not None
        offset, nbytes = step.opened.offsets[name], self._chain[node[0]].infos[name].nbytes
        out = []
        for lo, hi in self._cover(step, step.wanted):
            start = max(0, lo * step.pieces.unit - offset)
            stop = min(nbytes, hi * step.pieces.unit - offset)
            out.append((start, self._bytes(node, name, start, stop)))
        return out

    # what is needed, from the last file down

    def _run(self, last: Node) -> Iterator[Node]:
        """The nodes to decode, in their order; what nobody needs any more is dropped in between."""
        order = []
        while self._heap:
            node = heapq.heappop(self._heap)
            at = (-node[0], -node[1])
            order.append(at)
            with refusing(self._where(at)):
                self._plan(at)
        users = Counter(need for at in order for need in self._steps[at].needs)
        users[last] += 1
        for at in reversed(order):
            yield at
            for need in self._steps[at].needs:
                users[need] -= 1
                if users[need] == 0:
                    self._steps[need].blocks, self._steps[need].whole = [], None

    def _where(self, node: Node) -> str:
        return self._chain[node[0]].where(node[1])

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

    def _step(self, node: Node) -> _Step:
        if node not in self._steps:
            self._steps[node] = _Step(self._opened(node))
            heapq.heappush(self._heap, (-node[0], -node[1]))
        return self._steps[node]

    def _opened(self, node: Node) -> Opened:
        held = self._cache.opened.get(node)
        if held is None:
            held = self._chain[node[0]].opened(node[1], self._chain[node[0] - 1] if node[0] else None)
            self._cache.opened[node] = held
        return held

    def _pieces(self, node: Node, opened: Opened) -> Pieces | None:
        if node not in self._cache.pieces:
            self._cache.pieces[node] = pieces_of(opened)
        return self._cache.pieces[node]

    def _want(
        self, file: int, name: str, starts: Ints, stops: Ints, *, strict: bool = False, codes: bool = False
    ) -> tuple[Node, _Step]:
        """Note that bytes of a tensor's values (or of its codes) are needed."""
        node = self._resolve(file, name)
        step = self._step(node)
        scale = ITEMSIZE[self._chain[node[0]].infos[name].dtype] if codes else 1
        offset = step.opened.offsets[name]
        step.wanted.append((offset + starts * scale, offset + stops * scale))
        step.strict |= strict
        return node, step

    def _want_span(self, user: Node, span: Span, *, strict: bool) -> Node:
        file = user[0] if span.own else user[0] - 1
        if not span.own:
            info = self._chain[user[0]].infos[span.name]
            self._check_parent(file, info, self._where(user))
        ends = np.array([[span.start], [span.stop]], np.int64)
        return self._want(file, span.name, ends[0], ends[1], strict=strict, codes=span.codes)[0]

    def _plan(self, node: Node) -> None:
        step = self._steps[node]
        held = self._cache.get(node, WHOLE)
        if isinstance(held, Reference):
            step.whole = held
            return
        copied = isinstance(step.opened.recipe, dict) and step.opened.recipe.get("kind") == "copy"
        step.pieces = self._pieces(node, step.opened) if copied or not step.strict else None
        if step.pieces is None:
            step.strict = True
            self._plan_whole(node, step)
        else:
            self._plan_pieces(node, step, step.pieces)

    def _plan_whole(self, node: Node, step: _Step) -> None:
        for own, name in needed_whole(step.opened):
            infos = self._chain[node[0]].infos
            span = Span(own, name, 0, infos[name].nbytes)
            step.needs.add(self._want_span(node, span, strict=True))

    def _plan_pieces(self, node: Node, step: _Step, pieces: Pieces) -> None:
        for lo, hi in self._cover(step, step.wanted):
            step.missing += self._uncached(node, step, pieces, lo, hi)
        for lo, hi in step.missing:
            for span in pieces.needs(lo, hi):
                step.needs.add(self._want_span(node, span, strict=step.strict))
        if node in self._cache.origins or not (step.missing or step.origins):
            return
        for name in pieces.ancestors():
            self._check_parent(node[0] - 1, self._chain[node[0]].infos[name], self._where(node))
            other = self._resolve(node[0] - 1, name)
            self._step(other).origins = True
            step.needs.add(other)

    def _uncached(self, node: Node, step: _Step, pieces: Pieces, lo: int, hi: int) -> list[tuple[int, int]]:
        """The parts of a range that are to be decoded; what the cache has of it is taken."""
        if not pieces.coded:
            return [(lo, hi)]
        out: list[tuple[int, int]] = []
        for start in range(lo, hi, pieces.chunk):
            stop = min(start + pieces.chunk, hi)
            held = self._cache.get(node, start // pieces.chunk)
            if isinstance(held, Block):
                step.blocks.append((start, held))
            elif out and out[-1][1] == start:
                out[-1] = (out[-1][0], stop)
            else:
                out.append((start, stop))
        return out

    def _cover(self, step: _Step, wanted: Sequence[tuple[Ints, Ints]]) -> list[tuple[int, int]]:
        """Ranges of units, apart from each other, that whole chunks have and that cover bytes of the stream."""
        assert step.pieces is not None
        size = step.pieces.unit * step.pieces.chunk
        starts = np.concatenate([one[0] for one in wanted]) if wanted else np.empty(0, np.int64)
        stops = np.concatenate([one[1] for one in wanted]) if wanted else np.empty(0, np.int64)
        some = stops > starts
        lows, highs = starts[some] // size, -(-stops[some] // size)
        order = np.argsort(lows, kind="stable")
        lows, highs = lows[order], np.maximum.accumulate(highs[order]) if order.size else highs
        apart = np.flatnonzero(lows[1:] > highs[:-1] + step.pieces.near) + 1
        chunk, count = step.pieces.chunk, step.pieces.count
        return [
            (int(part[0][0]) * chunk, min(int(part[1][-1]) * chunk, count))
            for part in zip(np.split(lows, apart), np.split(highs, apart), strict=True)
            if part[0].size
        ]

    # and done, from the first file up

    def _do(self, node: Node) -> None:
        step = self._steps[node]
        if step.whole is not None:
            return
        with refusing(self._where(node)):
            if step.pieces is None:
                self._decode_whole(node, step)
            else:
                self._decode_pieces(node, step, step.pieces)

    def _decode_pieces(self, node: Node, step: _Step, pieces: Pieces) -> None:
        if node not in self._cache.origins and (step.missing or step.origins):
            self._cache.origins[node] = pieces.origins(lambda name: self._origin(node[0] - 1, name))

        def supply(span: Span) -> Bytes:
            other = self._resolve(node[0] if span.own else node[0] - 1, span.name)
            return self._bytes(other, span.name, span.start, span.stop, codes=span.codes)

        for lo, hi in step.missing:
            block = pieces.decode(lo, hi, supply, self._threads)
            step.blocks.append((lo, block))
            if pieces.coded:
                self.decoded += sum(numbers(info) for info in step.opened.infos) * (hi - lo) // pieces.count
                self._keep(node, pieces, lo, hi, block)
        step.blocks.sort(key=lambda one: one[0])

    def _keep(self, node: Node, pieces: Pieces, lo: int, hi: int, block: Block) -> None:
        each = max(1, block.nbytes // max(1, (hi - lo)))
        first = max(lo, hi - self._cache.limit // each // pieces.chunk * pieces.chunk)  # no more than it can hold
        for start in range(lo, hi, pieces.chunk):
            if start >= first:
                part = slice(start - lo, min(start + pieces.chunk, hi) - lo)
                values = block.values[part.start * pieces.unit : part.stop * pieces.unit].copy()
                codes = None if block.codes is None else block.codes[part].copy()
                self._cache.put(node, start // pieces.chunk, Block(values, codes))

    def _decode_whole(self, node: Node, step: _Step) -> None:
        file = self._chain[node[0]]
        encoded = file.reader.read(file.head(node[1]))
        needed = needed_whole(step.opened)
        own = self._reference(node[0], [name for mine, name in needed if mine])
        parent = self._reference(node[0] - 1, [name for mine, name in needed if not mine]) if node[0] else None
        decoded = _Some(file.earlier(node[1]), own.tensors)
        where = file.reader.where
        step.whole = decode(encoded, decoded, parent, symbols=own.symbols, where=where, threads=self._threads)
        self.decoded += sum(numbers(info) for info in step.opened.infos)
        self._cache.put(node, WHOLE, step.whole)

    def _reference(self, file: int, names: Sequence[str]) -> Reference:
        """Whole tensors of a file, and what they were made from."""
        tensors, symbols = {}, {}
        for name in names:
            node = self._resolve(file, name)
            whole = self._steps[node].whole
            if whole is None:
                info = self._chain[file].infos[name]
                tensors[name] = from_bits(self._bytes(node, name, 0, info.nbytes), info)
                continue
            tensors[name] = whole.tensors[name]
            if name in whole.symbols:
                symbols[name] = whole.symbols[name]
        return Reference(tensors, symbols)

    def _origin(self, file: int, name: str) -> Origin:
        node = self._resolve(file, name)
        whole = self._steps[node].whole
        held = self._cache.origins[node].get(name) if whole is None else whole.symbols.get(name)
        if held is None:
            raise ChainError(self._chain[file].reader.where, found=f"tensor {name!r}, which no quantizer made")
        return held.lattice if isinstance(held, Points) else held

    def _bytes(self, node: Node, name: str, start: int, stop: int, *, codes: bool = False) -> Bytes:
        """Bytes of a tensor's values, or of its codes, that have been decoded."""
        step = self._steps[node]
        if step.whole is not None:
            origin = step.whole.symbols.get(name)
            if codes and not isinstance(origin, Symbols):
                raise ChainError(self._where(node), found=f"tensor {name!r}, which has no codes")
            return bits_of(origin.codes if codes and isinstance(origin, Symbols) else step.whole.tensors[name])[
                start:stop
            ]
        assert step.pieces is not None
        unit, offset = 1 if codes else step.pieces.unit, step.opened.offsets[name]
        offset = offset // step.pieces.unit if codes else offset
        parts, last = [], -(-(offset + stop) // unit)
        at = bisect_right(step.blocks, (offset + start) // unit, key=lambda one: one[0]) - 1
        for first, block in islice(step.blocks, max(at, 0), None):
            if first >= last:
                break
            array = block.codes if codes else block.values
            if array is None:
                raise ChainError(self._where(node), found=f"tensor {name!r}, which has no codes")
            begin = max(0, offset + start - first * unit)
            end = offset + stop - first * unit
            if begin < min(end, array.nbytes):
                parts.append(array[begin:end])
        return joined(parts) if parts else np.empty(0, np.uint8)


class _Some(Mapping[str, Tensor]):
    """The tensors of all earlier records by name, of which only those at hand can be had."""

    def __init__(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        self._names, self._tensors = names, tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
