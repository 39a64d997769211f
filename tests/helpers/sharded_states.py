"""States cut into boxes for several ranks, and ranks that are threads: what they gather really crosses between them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers.timeouts import PATIENCE
from torch import Tensor

from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes import QuantizedState, Scheme
from shrinkpoint.schemes.evaluate import ShardedModelEvaluator
from shrinkpoint.schemes.planner import plan_shards
from shrinkpoint.sharding.collectives import Collectives
from shrinkpoint.sharding.global_tensors import ShardLayout, ShardSpec
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, OptimizerInfo

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""
Cutter = Callable[[tuple[int, ...], int, int], Box]
"""The box of a rank, of a shape and so many ranks."""


class ThreadCollectives(Collectives):
    """The collectives of one of several threads, which counts what crosses between them."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        super().__init__()
        self._ranks, self.rank, self.world_size = ranks, rank, ranks.width

    def exchange(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        ranks = self._ranks
        ranks.board[self.rank] = messages
        ranks.barrier.wait(PATIENCE)
        received = [sent[self.rank] for sent in ranks.board]
        ranks.barrier.wait(PATIENCE)
        ranks.rounds[self.rank] += 1
        ranks.sent[self.rank] += sum(map(len, messages)) - len(messages[self.rank])
        ranks.received[self.rank] += sum(map(len, received)) - len(messages[self.rank])
        return received


class Ranks:
    """Threads that stand for ranks: their messages are pickled.

    Attributes:
        rounds, sent, received: by rank, how often it exchanged messages, and their bytes.
    """

    def __init__(self, width: int) -> None:
        self.width, self.barrier = width, threading.Barrier(width)
        self.board: list[Sequence[bytes]] = [()] * width
        self.rounds, self.sent, self.received = ([0] * width for _ in range(3))

    def run(self, work: Callable[[int, Collectives], Any]) -> list[Any]:
        """What `work` returned, or raised, on each rank."""
        out: list[Any] = [None] * self.width

        def run_rank(rank: int) -> None:
            try:
                out[rank] = work(rank, ThreadCollectives(self, rank))
            except Exception as error:
                out[rank] = error

        workers = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.width)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return out

    def all(self, work: Callable[[int, Collectives], Any]) -> list[Any]:
        """What `work` returned on each rank; what one raised is raised here."""
        out = self.run(work)
        for result in out:
            if isinstance(result, Exception):
                raise result
        return out


def rows(shape: tuple[int, ...], width: int, rank: int) -> Box:
    """As FSDP2 cuts: along the first axis, uneven, and perhaps nothing is left for the last ones."""
    step = -(-shape[0] // width)
    first = min(rank * step, shape[0])
    return (first, *(0 for _ in shape[1:])), (min(step, shape[0] - first), *shape[1:])


def columns(shape: tuple[int, ...], width: int, rank: int) -> Box:
    """As tensor parallelism may: along the second axis; vectors along the first."""
    if len(shape) < 2:
        return rows(shape, width, rank)
    (first, *_), (size, *_) = rows(shape[1:], width, rank)
    return (0, first, *(0 for _ in shape[2:])), (shape[0], size, *shape[2:])


def quarters(shape: tuple[int, ...], width: int, rank: int) -> Box:
    """Of four ranks: halves along both of the first axes, the upper ones the larger."""
    if len(shape) < 2:
        return rows(shape, width, rank)
    (first, *_), (nrows, *_) = rows(shape, 2, rank // 2)
    (_, second, *rest), (_, ncolumns, *sizes) = columns(shape, 2, rank % 2)
    return (first, second, *rest), (nrows, ncolumns, *sizes)


def box_of(x: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for axis, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        x = x.narrow(axis, start, size)
    return x


@dataclass
class Part:
    """What one rank has of a state."""

    flat: FlatState
    places: dict[str, ShardSpec]


def cut(flat: FlatState, width: int, cutter: Cutter = rows, lone: Mapping[str, int] | None = None) -> list[Part]:
    """A state's parts by rank; scalars are on the first one, and what `lone` gives a rank is whole there."""
    lone, out = lone or {}, []
    for rank in range(width):
        tensors, infos, places = {}, {}, {}
        for name, x in flat.tensors.items():
            shape = tuple(x.shape)
            is_whole = not shape or name in lone
            if is_whole and lone.get(name, 0) != rank:
                continue
            offsets, sizes = ((0,) * len(shape), shape) if is_whole else cutter(shape, width, rank)
            tensors[name], places[name] = box_of(x, offsets, sizes).contiguous(), ShardSpec(name, shape, offsets)
            infos[name] = replace(flat.infos[name], shape=sizes, offsets=offsets)
        optim = {name: _facts(one, tensors) for name, one in flat.optimizer_info.items() if name in tensors}
        kinds = {name: kind for name, kind in flat.moment_kinds.items() if name in tensors}
        out.append(Part(FlatState(flat.tree, tensors, infos, optim, kinds), places))
    return out


def _facts(facts: OptimizerInfo, tensors: Mapping[str, Tensor]) -> OptimizerInfo:
    names = facts.moment1, facts.moment2, facts.squares
    first, second, squares = (name if name in tensors else None for name in names)
    return replace(facts, moment1=first, moment2=second, squares=squares)


def joined(parts: Sequence[tuple[Mapping[str, Tensor], Mapping[str, ShardSpec]]]) -> dict[str, Tensor]:
    """The whole tensors again, of what ranks have; every value is there once."""
    out: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for tensors, places in parts:
        for name, x in tensors.items():
            place = places[name]
            whole = out.setdefault(place.global_name, torch.zeros(place.global_shape, dtype=x.dtype))
            box_of(whole, place.offsets, x.shape).copy_(x)
            filled[place.global_name] = filled.get(place.global_name, 0) + x.numel()
    assert all(filled[name] == math.prod(x.shape) for name, x in out.items())
    return out


@dataclass
class Saved:
    """What a checkpoint of a chain became.

    Attributes:
        tensors: whole ones, as a reader gets them.
        loss: of every rank, but for what took how long.
        kept: of every rank.
    """

    tensors: dict[str, Tensor]
    loss: list[JSON]
    kept: list[QuantizedState]


def after(kept: QuantizedState, flat: FlatState) -> Reference:
    """What a writer has of a checkpoint afterwards."""
    originals = {name: flat.tensors[name].clone() for name in kept.quantized}
    return Reference({name: x.cpu().clone() for name, x in kept.state.tensors.items()}, kept.quantized, originals)


def saved(
    make: Callable[[], Scheme],
    flats: Sequence[FlatState],
    width: int,
    cutter: Cutter = rows,
    *,
    lone: Mapping[str, int] | None = None,
    ranks: Ranks | None = None,
    target: Callable[[Part], ShardedModelEvaluator] | None = None,
) -> list[Saved]:
    """A chain of checkpoints of states, by ranks that each have a part."""
    parts = [cut(flat, width, cutter, lone) for flat in flats]

    def work(rank: int, collectives: Collectives) -> list[tuple[QuantizedState, JSON]]:
        scheme, reference, out = make(), None, []
        for mine in (one[rank] for one in parts):
            shards = ShardLayout(mine.places, collectives)
            made = plan_shards(scheme, mine.flat, reference, shards, None if target is None else target(mine))
            kept = made.quantize(mine.flat, reference)
            reference = after(kept, mine.flat)
            out.append((kept, timeless(kept.loss)))
        return out

    found = (ranks or Ranks(width)).all(work)
    return [
        Saved(
            joined([(one[i][0].state.tensors, parts[i][rank].places) for rank, one in enumerate(found)]),
            [one[i][1] for one in found],
            [one[i][0] for one in found],
        )
        for i in range(len(flats))
    ]


def whole(scheme: Scheme, flats: Sequence[FlatState]) -> list[Saved]:
    """The same by one process that has all of it, without any of this."""
    reference, out = None, []
    for flat in flats:
        kept = scheme.quantize(flat, reference)
        reference = after(kept, flat)
        out.append(Saved(dict(kept.state.tensors), [timeless(kept.loss)], [kept]))
    return out


def timeless(loss: JSON) -> JSON:
    """The same, without what took how long."""
    if isinstance(loss, list):
        return [timeless(one) for one in loss]
    return {k: timeless(v) for k, v in loss.items() if k != "seconds"} if isinstance(loss, dict) else loss


def other(a: Saved, b: Saved) -> list[str]:
    """Names of the tensors that differ, in any bit."""
    assert a.tensors.keys() == b.tensors.keys()
    return [
        name
        for name, x in a.tensors.items()
        if x.numel() and not torch.equal(x.reshape(-1).view(torch.uint8), b.tensors[name].reshape(-1).view(torch.uint8))
    ]
