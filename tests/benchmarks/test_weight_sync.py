"""Promise: the rivals of weight sync code what really changed, and every version that is timed is compared."""

from __future__ import annotations

import importlib
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers.paths import REPOSITORY

pytest.importorskip("zstandard")


@pytest.fixture(scope="module")
def weight_sync() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        return importlib.import_module("weight_sync")


def test_varints_can_be_read_again(weight_sync: ModuleType) -> None:
    numbers = np.array([0, 1, 127, 128, 300, 16383, 16384, 2**31 - 1])
    read, shift, number = [], 0, 0
    for byte in weight_sync.varints(numbers):
        number, shift = number | (byte & 127) << shift, shift + 7
        if byte < 128:
            read.append(number)
            shift = number = 0
    assert read == numbers.tolist()


def test_a_row_has_every_method_and_the_times_of_both_ends(weight_sync: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(300, 300, generator=generator)
    versions = [{"w": (masters * (1 + 1e-4 * step)).bfloat16(), "b": torch.zeros(5).bfloat16()} for step in range(4)]
    row = weight_sync.measure(versions)
    changed = [(old["w"] != new["w"]).sum().item() for old, new in pairwise(versions)]
    assert row["index + value"] == pytest.approx(6 * sum(changed) / 3)
    assert row["changed"] == pytest.approx(sum(changed) / 3 / 90005)
    assert 0 < row["shrinkpoint"] < row["index, value, zstd"] and row["versions"] == 3
    assert all(row[name] > 0 for name in row if name.endswith("_seconds") and row[name] is not None)
