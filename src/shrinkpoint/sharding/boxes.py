"""Boxes in a tensor that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MAX_PAIRWISE = 1 << 10
"""Maximum number of boxes without a separating plane that are compared pairwise; torch's layouts have far fewer."""
_MAX_SPLITS = 64


def check_disjoint(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if two boxes that are not empty overlap, or if that cannot be decided quickly.

    Boxes are split by separating planes recursively, which always succeeds for shards.

    Args:
        offsets, sizes: of each box, all with the same number of axes; below 2**62.
    """
    nonempty = [index for index, shape in enumerate(sizes) if all(shape)]
    if len(nonempty) < 2:
        return
    starts = np.array([offsets[index] for index in nonempty], np.int64)
    ends = starts + np.array([sizes[index] for index in nonempty], np.int64)
    groups = [np.arange(len(nonempty))]
    for _ in range(_MAX_SPLITS):
        groups = [part for group in groups for part in _split_by_plane(starts, ends, group) if part.size > 1]
        if not groups:
            return
    raise ValueError("boxes that no planes separate")


def _split_by_plane(
    starts: NDArray[np.int64], ends: NDArray[np.int64], boxes: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Groups of boxes with planes between them; none if a pairwise comparison shows that the boxes do not overlap."""
    for axis in range(starts.shape[1]):
        order = boxes[np.argsort(starts[boxes, axis], kind="stable")]
        max_ends = np.maximum.accumulate(ends[order, axis])
        cuts = np.flatnonzero(starts[order[1:], axis] >= max_ends[:-1]) + 1
        if cuts.size:
            return np.split(order, cuts)
    if boxes.size > _MAX_PAIRWISE:
        raise ValueError(f"{boxes.size} boxes that no plane separates")
    box_starts, box_ends = starts[boxes], ends[boxes]
    common = np.minimum(box_ends[:, None], box_ends[None]) > np.maximum(box_starts[:, None], box_starts[None])
    if int(common.all(2).sum()) > boxes.size:  # each box overlaps itself
        raise ValueError("boxes that overlap")
    return []
