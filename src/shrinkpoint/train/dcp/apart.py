"""Whether boxes of a tensor overlap: a planner believes that they do not, and would read one value twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_PAIRS = 1 << 10
"""So many boxes are compared each with each, where no plane separates them; no layout of torch's comes near that."""
_LEVELS = 64


def check_apart(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> None:
    """Raises ValueError where two boxes with something in them overlap, or are too entangled to tell.

    Boxes are parted where a plane separates them, again and again: those of shards always can be.

    Args:
        offsets, sizes: of each box, all of as many axes; below 2**62.
    """
    filled = [at for at, one in enumerate(sizes) if all(one)]
    if len(filled) < 2:
        return
    starts = np.array([offsets[at] for at in filled], np.int64)
    ends = starts + np.array([sizes[at] for at in filled], np.int64)
    left = [np.arange(len(filled))]
    for _ in range(_LEVELS):
        left = [part for one in left for part in _parted(starts, ends, one) if part.size > 1]
        if not left:
            return
    raise ValueError("boxes that no planes separate")


def _parted(starts: NDArray[np.int64], ends: NDArray[np.int64], boxes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Boxes in groups with planes between them; none where it is known that they do not overlap."""
    for axis in range(starts.shape[1]):
        order = boxes[np.argsort(starts[boxes, axis], kind="stable")]
        reach = np.maximum.accumulate(ends[order, axis])
        cuts = np.flatnonzero(starts[order[1:], axis] >= reach[:-1]) + 1
        if cuts.size:
            return np.split(order, cuts)
    if boxes.size > _PAIRS:
        raise ValueError(f"{boxes.size} boxes that no plane separates")
    first, last = starts[boxes], ends[boxes]
    common = np.minimum(last[:, None], last[None]) > np.maximum(first[:, None], first[None])
    if int(common.all(2).sum()) > boxes.size:  # each is where it is
        raise ValueError("boxes that overlap")
    return []
