"""A delta takes little more than the entropy of what changed, and much less than positions and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shrinkpoint.storage import MemoryStorage
from shrinkpoint.sync import Publisher


@pytest.mark.parametrize("move", [1e-6, 1e-5])
def test_a_step_of_fine_tuning_takes_little_more_than_the_entropy_of_the_changes(move: float):
    generator = torch.Generator().manual_seed(0)
    masters = 0.03 * torch.randn(1000, 1000, generator=generator)
    moved = masters + move * torch.randn(1000, 1000, generator=generator)
    before, after = ({"w": tensor.bfloat16()} for tensor in (masters, moved))
    with Publisher(MemoryStorage()) as publisher:
        publisher.publish(before)
        size = publisher.publish(after).delta_bytes
    old, new = (state["w"].reshape(-1).view(torch.int16).numpy().astype(np.int32) for state in (before, after))
    exponents, differences = old >> 7 & 255, np.clip(np.abs(new) - np.abs(old), -99, 99)
    counts = np.unique(np.stack([exponents, differences]), axis=1, return_counts=True)
    totals = np.bincount(exponents)[counts[0][0]]
    entropy = float(-(counts[1] * np.log2(counts[1] / totals)).sum()) / 8
    assert size is not None and size < 1.15 * entropy + 1000
    assert size < 6 * np.count_nonzero(old != new) / 4
