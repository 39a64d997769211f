"""Limits of a writer's chains: the time of a restore, and the bytes that a chain holds. No torch.

A base stays on the disk as long as a delta needs it, whether retention wants it or not. With `Keep(last=1)`, a keyframe
of 0.78 of the state's bytes and a delta of 0.76 would hold 1.54 times the bytes of the one checkpoint that is kept. So
a chain may have the bytes of a plain checkpoint for each of its checkpoints that stays for good, and what the others
that are kept are sure to save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shrinkpoint.store.chain import chain_links
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.retention import Keep

MAX_CHAIN_STATES = 4
"""A chain ends where its files have this many times the bytes of the state: a restore reads all of them."""
MIN_CHAIN_BYTES = 64 << 20
"""Bytes up to which a chain does not end for the time of a restore: they are read at once, whatever the state's."""
_MAX_WAIT = 16


@dataclass(frozen=True)
class ChainBytes:
    """The files of a chain.

    Attributes:
        sizes: bytes of each file, keyframe first.
        raw_bytes: of the tensors of the state that was saved last.
        steps: of its checkpoints, as far as they are known.
    """

    sizes: tuple[int, ...]
    raw_bytes: int
    steps: tuple[int, ...] = ()

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> ChainBytes:
        """The chain of a checkpoint of a store."""
        links = chain_links(manifest)
        return cls(tuple(link.size for link in links), manifest.raw_bytes, tuple(link.step for link in links))


class ChainLimit:
    """Decides for one writer whether the next checkpoint is a delta.

    A delta's size is known only once it is written. Where the last one was too large for its chain, keyframes are
    written without trying, after each attempt that fails twice as many as before, up to 16.

    Args:
        keyframe_every: the greatest number of files; None: neither number nor bytes to read end a chain.

    Attributes:
        keep: the rules by which the caller deletes checkpoints; None: it keeps all, or nobody knows.
    """

    def __init__(self, keyframe_every: int | None) -> None:
        self._keyframe_every = keyframe_every
        self.keep: Keep | None = None
        self._delta_ratio: float | None = None  # bytes of the last delta for each byte of its state; None: not known
        self._wait = self._waited = 0  # keyframes between two attempts, and those since the last one

    def allows_delta(self, chain: ChainBytes) -> bool:
        """True if a delta may be written behind a chain."""
        total, every = sum(chain.sizes), self._keyframe_every
        max_read = max(MAX_CHAIN_STATES * chain.raw_bytes, MIN_CHAIN_BYTES)
        if every is not None and (len(chain.sizes) >= every or total >= max_read):
            return False
        is_due = self._delta_ratio is None or self._waited >= self._wait
        size = 0.0 if self._delta_ratio is None or is_due else self._delta_ratio * chain.raw_bytes
        return total + size <= _allowance(self.keep, chain, size)

    def accepts_delta(self, chain: ChainBytes, size: int, raw_bytes: int) -> bool:
        """True if a delta that has been written may stay; else a keyframe takes its place.

        Args:
            chain: without the delta.
            size, raw_bytes: of the delta and of its state.
        """
        self._delta_ratio = size / max(raw_bytes, 1)
        is_accepted = sum(chain.sizes) + size <= _allowance(self.keep, chain, size, raw_bytes)
        self._wait = 0 if is_accepted else min(max(1, 2 * self._wait), _MAX_WAIT)
        self._waited = 0
        return is_accepted

    def note_keyframe(self) -> None:
        """Count a keyframe that was written."""
        self._waited += 1


def _allowance(keep: Keep | None, chain: ChainBytes, size: float, raw_bytes: int | None = None) -> float:
    """Bytes that a chain may have with a delta of `size` bytes.

    The files of later checkpoints are taken to be larger than those of this chain, half-way up to the whole state.
    """
    if keep is None or keep.keeps_all:
        return math.inf
    plain = chain.raw_bytes if raw_bytes is None else min(chain.raw_bytes, raw_bytes)
    permanent = 0 if keep.every is None else sum(step % keep.every == 0 for step in chain.steps)
    saving = 0.0
    if keep.last is not None and keep.every is None and keep.best is None and keep.within is None:
        saving = (keep.last - 1) * max(0.0, plain - max(*chain.sizes, size)) / 2
    return (permanent + 1) * plain + saving
