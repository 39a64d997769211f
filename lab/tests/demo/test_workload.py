"""Promise: the order of the data can be saved and restored, and every draw leaves its mark on one hash."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from shrinkpoint.errors import NotFoundError
from shrinkpoint_lab.demo.workload import Batches, stdlib_text

TEXT = bytes(range(256)) * 20


def batches(seed: int = 1) -> Batches:
    random.seed(seed)
    np.random.seed(seed)
    return Batches(TEXT, size=4, context=32, seed=seed)


def test_the_same_seeds_draw_the_same_batches() -> None:
    one = batches()
    first = [one.draw() for _ in range(3)]
    other = batches()
    for inputs, targets in first:
        again, targets_again = other.draw()
        assert torch.equal(inputs, again) and torch.equal(targets, targets_again)
    assert one.order == other.order


def test_a_restored_order_goes_on_as_if_nothing_had_happened() -> None:
    one = batches()
    one.draw()
    saved, python, numpy = one.state_dict(), random.getstate(), np.random.get_state()
    expected = one.draw()
    other = Batches(TEXT, size=4, context=32, seed=99)
    other.load_state_dict(saved)
    random.setstate(python)
    np.random.set_state(numpy)
    assert all(torch.equal(a, b) for a, b in zip(expected, other.draw(), strict=True))
    assert other.order == one.order


@pytest.mark.parametrize("source", ["positions", "length", "noise"])
def test_the_hash_sees_each_random_source(source: str) -> None:
    one = batches()
    one.draw()
    expected = one.order
    other = batches()
    {"positions": other.generator.seed, "length": lambda: random.seed(2), "noise": lambda: np.random.seed(2)}[source]()
    other.draw()
    assert other.order != expected


def test_the_hash_sees_the_text() -> None:
    """A corpus that changed between two runs is no difference of the training's."""
    one, other = batches(), Batches(TEXT[::-1], size=4, context=32, seed=1)
    random.seed(1)
    np.random.seed(1)
    one.draw()
    random.seed(1)
    np.random.seed(1)
    other.draw()
    assert one.order != other.order


def test_targets_are_the_inputs_a_byte_later() -> None:
    inputs, targets = batches().draw()
    kept = inputs[:, 1:] != 0
    assert 16 <= inputs.shape[1] <= 32
    assert torch.equal(inputs[:, 1:][kept], targets[:, :-1][kept])


def test_the_text_is_the_same_every_time_and_megabytes_long() -> None:
    assert stdlib_text() == stdlib_text()
    assert len(stdlib_text()) > 1_000_000


def test_a_python_without_its_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no Python source"):
        stdlib_text(tmp_path)
