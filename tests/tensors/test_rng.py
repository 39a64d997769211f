"""Random numbers go on where they were, and saving draws none."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from shrinkpoint.storage import MemoryStorage
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.train import CheckpointManager


def draw() -> list[float]:
    gauss = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*gauss, *torch.randn(3).tolist(), *torch.rand(3).tolist()]


def test_all_generators_go_on_where_they_were() -> None:
    draw()  # leaves half a pair of normal numbers in the generators that make two at a time
    flat = flatten(get_rng_state())
    first = draw()
    set_rng_state(unflatten(json.loads(json.dumps(flat.tree)), flat.tensors))
    assert draw() == first


def test_saving_draws_no_random_numbers() -> None:
    state = get_rng_state()
    expected = draw()
    set_rng_state(state)
    with CheckpointManager(MemoryStorage()) as manager:
        manager.save(1, extra=torch.ones(3))
    assert draw() == expected


def test_generators_are_left_alone_on_request() -> None:
    with CheckpointManager(MemoryStorage()) as manager:
        manager.save(1)
        manager.save(2, rng=False)
        state = get_rng_state()
        first = draw()
        set_rng_state(state)
        manager.restore(1, rng=False)
        manager.restore(2)
        assert draw() == first
