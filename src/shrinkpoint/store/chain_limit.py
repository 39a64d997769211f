"""Limits of a writer's chains: for the time of a restore, and for the bytes that retention holds. No torch.

A base stays on the disk as long as a delta needs it, whether retention wants it or not. With `Keep(last=1)`, a keyframe
of 0.78 of the state's bytes and a delta of 0.76 would hold 1.54 times the bytes of the one checkpoint that is kept. So
the sizes of the files that were written decide how long chains are, and whether what an ended chain leaves behind is
written again, as deltas against newer checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shrinkpoint.store.manifest import DirectoryManifest, Manifest
from shrinkpoint.store.retention import Keep, PrunePlan, ReversedShares

MAX_CHAIN_STATES = 4
"""A chain ends where its files have this many times the bytes of the state: a restore reads all of them."""
MIN_CHAIN_BYTES = 64 << 20
"""Bytes up to which a chain does not end for the time of a restore: they are read at once, whatever the state's."""
DISK_TOLERANCE = 1.05
"""A way to write that holds up to this many times the fewest bytes is taken if it writes clearly less."""
WRITE_GAIN = 0.8  # Clearly less is up to this many times the bytes
_REPEAT_SHARE = 0.02  # Bytes of a delta without a change, at most, beside those of its keyframe
# Bytes of a delta against a newer checkpoint for each byte of one against an older, at most: in most runs, in all
_LIKELY_REVERSE, _LARGEST_REVERSE = 1.25, 2
_MAX_SPACING = 64
_MAX_WAIT = 16


@dataclass(frozen=True)
class ChainBytes:
    """The files of a chain."""

    sizes: tuple[int, ...]  # bytes of each file, keyframe first
    raw_bytes: int  # of the tensors of the state that was saved last
    steps: tuple[int, ...] = ()  # of its checkpoints, as far as they are known

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> ChainBytes:
        """The chain of a checkpoint of a store."""
        (own,) = manifest.payloads
        sizes = (*(base.size for base in manifest.bases), own.size)
        return cls(sizes, own.raw_bytes, (*(base.step for base in manifest.bases), manifest.step))


@dataclass(frozen=True)
class FileSizes:
    """Sizes of the files of a run, in bytes."""

    # `keyframe`, `delta`: of a checkpoint, in either form.
    keyframe: float
    delta: float
    plain: float  # of a checkpoint of `torch.save`
    # Of a checkpoint as a delta against a newer one, in the mean and at most; None: not known yet, and so taken for
    # `delta`, and for twice that where it must not be too large.
    reverse: float | None = None
    largest_reverse: float | None = None


@dataclass(frozen=True)
class Spacing:
    """A way to write the checkpoints of a run."""

    every: int  # number of checkpoints in a chain; 1: keyframes alone
    # When a chain has ended, the checkpoints of it that are kept are written again, each as a delta against the next
    # newer one, so that the chain's files can go.
    reverse: bool
    # `disk`, `most`: bytes that retention holds, on the average over a chain and at most.
    disk: float
    most: float
    written: float  # bytes that are written for each checkpoint, those that are written again included


_NOTHING_IS_DELETED = Spacing(_MAX_SPACING, False, 0, 0, 0)


def choose_spacing(
    sizes: FileSizes, kept: int, longest: int, *, can_reverse: bool, alone: bool = False, best: int = 0
) -> Spacing:
    """The way to write that holds the fewest bytes, or writes less and holds hardly more.

    No way is considered that at any time would hold more bytes than plain checkpoints, of which there is one more while
    a checkpoint is saved.

    Args:
        kept: number of checkpoints that retention keeps: the newest ones, and `best` others.
        longest: greatest number of checkpoints in a chain.
        can_reverse: whether checkpoints may be written again.
        alone: a chain may stay for a single checkpoint, which other rules keep.
        best: number of those that stay because they are the best, for as long as they are; some may be newest ones.
    """
    least = max(kept - best, best)  # checkpoints that are kept at any time
    lengths, most = range(2, min(longest, _MAX_SPACING) + 1), least * sizes.plain
    ways = [Spacing(1, False, kept * sizes.keyframe, kept * sizes.keyframe, sizes.keyframe)]
    forward = (way for every in lengths if (way := _forward(sizes, kept, every, best)).most <= most)
    ways += (way for way in forward if not alone or way.every * way.written <= sizes.plain)
    if can_reverse and kept > 1:
        reverse = [way for every in lengths for way in _reverse(sizes, kept, least, every) if way.most <= most]
        # After a shorter chain, checkpoints are written again that were written again before
        ways += [way for way in reverse if way.every >= kept] or (reverse if best else [])
    smallest = min(ways, key=lambda way: way.disk)
    fastest = min((way for way in ways if way.disk <= DISK_TOLERANCE * smallest.disk), key=lambda way: way.written)
    return fastest if fastest.written <= WRITE_GAIN * smallest.written else smallest


def _forward(sizes: FileSizes, kept: int, every: int, best: int) -> Spacing:
    """Chains of which all files stay until none of their checkpoints is kept; each of the best may need one alone."""
    older, chain = kept - best - 1, sizes.keyframe + (every - 1) * sizes.delta
    # Behind the newest chain there are c of them, and c - 1 once that has as many checkpoints as the oldest has kept.
    # Over a chain, they are older / every on the average.
    chains = -(-older // every)
    last = min(every, older - (chains - 1) * every) - 1 if older else 0
    most = max(
        chains * chain + last * sizes.delta,
        -(-max(0, older - every + 1) // every) * chain + (every - 1) * sizes.delta,
        chain + (older - 1) * sizes.keyframe,  # should deltas become too large
    )
    mean = (older / every + best) * chain + (every - 1) / 2 * sizes.delta
    return Spacing(every, False, sizes.keyframe + mean, sizes.keyframe + most, chain / every)


def _reverse(sizes: FileSizes, kept: int, least: int, every: int) -> Iterator[Spacing]:
    """Chains of which only a keyframe, and deltas against it in both directions, stay; none if that takes too much."""
    older, chain = kept - 1, sizes.keyframe + (every - 1) * sizes.delta
    if sizes.reverse is None or sizes.largest_reverse is None:
        reverse, larger = sizes.delta, min(_LIKELY_REVERSE * sizes.delta, sizes.keyframe)
        largest = min(_LARGEST_REVERSE * sizes.delta, sizes.keyframe)
    else:
        largest = sizes.largest_reverse
        reverse = larger = largest if least < kept else sizes.reverse  # the best may be the large ones
    if least < kept:  # the best, all of which may stay while the next chain grows
        again, mean, most = least, older * reverse, (least - 1) * larger + (every - 1) * sizes.delta
    else:
        larger, again, mean = reverse, older, older * kept / (2 * every) * reverse
        most = max(older * reverse, (every - 1) * sizes.delta)
    # They are written again one by one, the newest first; after each the delta that it was goes
    peak = chain + sizes.keyframe + largest + max(0.0, (again - 1) * (largest - sizes.delta))
    if peak <= (least + 1) * sizes.plain and (older + 1) / 2 * larger < chain:
        mean += (every - 1) / 2 * sizes.delta
        written = (chain + older * reverse) / every
        yield Spacing(every, True, sizes.keyframe + mean, sizes.keyframe + most, written)


class ChainLimit:
    """Decides for one writer whether the next checkpoint is a delta.

    A delta's size is known only once it is written. Where the last one was too large for its chain, keyframes are
    written without trying, after each attempt that fails twice as many as before, up to 16.

    Args:
        keyframe_every: the greatest number of files; None: neither number nor bytes to read end a chain.

    Attributes:
        can_reverse: whether the caller writes checkpoints of this many bytes of tensors again, where `wants_reverse`
            says so; None: never.
        keep: the rules by which the caller deletes checkpoints; None: it keeps all, or nobody knows.
        kept: number of checkpoints that the rules selected last.
        repeats: the next checkpoint is of the step that was saved last, so that a delta has next to no bytes.
    """

    def __init__(self, keyframe_every: int | None) -> None:
        self._keyframe_every = keyframe_every
        self.can_reverse: Callable[[int], bool] | None = None
        self.keep: Keep | None = None
        self.kept = 1
        self.repeats = False
        self._delta_ratio: float | None = None  # bytes of the last delta for each byte of its state; None: not known
        # Of what became deltas against newer ones, for each byte of a delta at that time; None: nothing did
        self._reverse_ratios: ReversedShares | None = None
        # The last chain holds deltas only because it is to be written again; None: an earlier process may have begun it
        self._counts_on_reverse: bool | None = None
        self._is_reversed = False  # what is kept of older chains has become deltas against the last keyframe
        self._repeated = 0  # deltas of the last chain without a change
        self._keyframes, self._has_delta = 0, False  # keyframes alone before the last chain, its own included
        self._wait = self._waited = 0  # keyframes between two attempts, and those since the last one

    def allows_delta(self, chain: ChainBytes) -> bool:
        """True if a delta may be written behind a chain."""
        total, every = sum(chain.sizes), self._keyframe_every
        max_read = max(MAX_CHAIN_STATES * chain.raw_bytes, MIN_CHAIN_BYTES)
        if every is not None and (len(chain.sizes) >= every or total >= max_read):
            return False
        if self.repeats or self._delta_ratio is None or self._waited >= self._wait > 0:
            return True
        return self._way(chain, self._delta_ratio * chain.raw_bytes, chain.raw_bytes) is not None

    def accepts_delta(self, chain: ChainBytes, size: int, raw_bytes: int) -> bool:
        """True if a delta that has been written may stay; else a keyframe takes its place.

        Args:
            chain: without the delta.
            size, raw_bytes: of the delta and of its state.
        """
        if self.repeats and size <= _REPEAT_SHARE * chain.sizes[0]:
            self._repeated += 1
            return True  # which says nothing about deltas to come
        self._delta_ratio = size / max(raw_bytes, 1)
        way = self._way(chain, size, raw_bytes)
        self._has_delta = way is not None
        if way is not None and way.reverse:
            self._counts_on_reverse = True
        elif len(chain.sizes) == 1:
            self._counts_on_reverse = False
        shortest = ChainBytes(chain.sizes[:1], chain.raw_bytes)
        is_possible = way is not None or self._way(shortest, size, raw_bytes) is not None
        self._wait = 0 if is_possible else min(max(1, 2 * self._wait), _MAX_WAIT)
        self._waited = 0
        return way is not None

    def note_keyframe(self) -> None:
        """Count a keyframe that was written."""
        self._waited, self._repeated = self._waited + 1, 0
        self._keyframes, self._has_delta = 1 if self._has_delta else self._keyframes + 1, False

    def note_pruned(self, plan: PrunePlan) -> None:
        """Note how many checkpoints are kept, and how large those are that became deltas against newer ones."""
        self.kept = len({*plan.keep} - {*plan.bases})
        self.note_reversed(plan.reversed_shares)

    def note_reversed(self, shares: ReversedShares | None) -> None:
        """Note the `reversed_shares` of checkpoints that were written again."""
        if shares is not None and self._delta_ratio:
            self._reverse_ratios = ReversedShares(*(share / self._delta_ratio for share in shares))

    def wants_reverse(self, keyframe: DirectoryManifest) -> bool:
        """True if what is kept of older chains is to be written again after a keyframe."""
        if self.keep is None or self.keep.moments_last or keyframe.depth:
            return False
        plain, delta, counts = keyframe.raw_bytes, self._delta_ratio, self._counts_on_reverse
        if counts is None:  # one of the best may outlive what it becomes a delta against
            counts = self._keyframe_every != 1 and self.keep.best is None and self.keep.every is None
        # Whatever has changed since the chain began, or the best would still need the keyframe before
        if (counts and self._waited == 1) or (self._is_reversed and self.keep.best):
            self._is_reversed = self.can_reverse is not None and self.can_reverse(plain)
        else:
            self._is_reversed = delta is not None and self._spacing(keyframe.stored_bytes, delta * plain, plain).reverse
        return self._is_reversed

    def _way(self, chain: ChainBytes, size: float, raw_bytes: int) -> Spacing | None:
        """The best way to write where a delta of `size` bytes follows a chain; None: it would hold more than that."""
        if self.keep is None or self.keep.keeps_all:
            return _NOTHING_IS_DELETED
        if self.keep.best and self._keyframes > 1 and sum(chain.sizes) + size > raw_bytes:
            return None  # the best may be keyframes of any size
        way = self._spacing(chain.sizes[0], max([size, *chain.sizes[1:]]), min(chain.raw_bytes, raw_bytes))
        permanent = sum(map(self.keep.is_permanent, chain.steps))
        passing = len(chain.sizes) - permanent - self._repeated  # which do not stay for good
        return way if passing < way.every else None

    def _spacing(self, keyframe: float, delta: float, plain: int) -> Spacing:
        assert self.keep is not None
        sizes = FileSizes(keyframe, delta, plain, *(ratio * delta for ratio in self._reverse_ratios or ()))
        can_reverse = self.keep.moments_last is None and self.can_reverse is not None and self.can_reverse(plain)
        longest = _MAX_SPACING if self._keyframe_every is None else self._keyframe_every
        alone, best = self.keep.every is not None or self.keep.best is not None, self.keep.best or 0
        return choose_spacing(sizes, self._kept, longest, can_reverse=can_reverse, alone=alone, best=best)

    @property
    def _kept(self) -> int:
        """Number of checkpoints that the rules select once the run is long enough, but for those that stay for good."""
        assert self.keep is not None
        number = (self.keep.last or 1) + (self.keep.best or 0)
        return number if self.keep.within is None else max(number, self.kept)
