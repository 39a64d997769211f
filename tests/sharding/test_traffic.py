"""What crosses between ranks: it grows with the rows and columns of the tensors, and not with the number of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from helpers.sharded_states import Ranks, other, saved, whole
from helpers.small_state import assert_agreed

import shrinkpoint as sp
from shrinkpoint.codec.lattice import matrix_shape
from shrinkpoint.schemes import Scheme
from shrinkpoint.tensors.flat_state import FlatState, flatten

MANY = 16
MAX_GROWTH = 5
MAX_BYTES_PER_TENSOR = 2048
SIZE = 128
BINS = {"bins": 16, "embedding_bins": 16, "prune": 0.1, "protect": 0.005}
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "fisher": lambda: sp.Fisher(relative_error=0.2),
    "lc-checkpoint": sp.LCCheckpoint,
    "inshrinkerator": lambda: sp.Inshrinkerator(config=BINS),
}


@functools.cache
def gpt_states() -> tuple[FlatState, FlatState]:
    """Two checkpoints of weights like those of a GPT of two layers, with Adam's moments."""
    shapes = {"wte.weight": (500, SIZE), "wpe.weight": (64, SIZE), "norm.weight": (SIZE,)}
    for layer in range(2):
        shapes |= {
            f"blocks.{layer}.{name}": shape
            for name, shape in {
                "norm.weight": (SIZE,),
                "qkv.weight": (3 * SIZE, SIZE),
                "qkv.bias": (3 * SIZE,),
                "out.weight": (SIZE, SIZE),
                "up.weight": (4 * SIZE, SIZE),
                "down.weight": (SIZE, 4 * SIZE),
            }.items()
        }
    generator = torch.Generator().manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(*s, generator=generator) / 16) for name, s in shapes.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    states = []
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) / 100
        optimizer.step()
        model = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        moments = {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in parameters.items()}
        groups = [{**optimizer.param_groups[0], "params": list(range(len(moments)))}]
        state = {"state": dict(enumerate(moments.values())), "param_groups": groups}
        states.append(flatten({"model": model, "optimizer": state}))
    return states[0], states[1]


def sum_rows_and_columns(flat: FlatState) -> int:
    return sum(sum(matrix_shape(tuple(x.shape))) for x in flat.tensors.values() if x.dim())


@pytest.mark.parametrize("name", SCHEMES)
def test_the_bytes_that_a_rank_receives_do_not_grow_with_the_number_of_ranks(name):
    """Two ranks keep half of all reports at home, so that from there to many the bytes about double.

    The rest of the growth are headers of small messages, which a state of this size has little else than.
    """
    (flat, _), received = gpt_states(), dict[int, int]()
    for width in (1, 2, MANY):
        ranks = Ranks(width)
        checkpoints = saved(SCHEMES[name], gpt_states(), width, ranks=ranks)
        received[width] = max(*ranks.received, *ranks.sent)
        assert_agreed(checkpoints)
        if width == 1:
            expected = whole(SCHEMES[name](), gpt_states())
            assert [other(a, b) for a, b in zip(expected, checkpoints, strict=True)] == [[], []]
    assert received[1] == 0
    assert received[MANY] < MAX_GROWTH * received[2]
    assert received[MANY] / 2 < 2 * 8 * sum_rows_and_columns(flat) + MAX_BYTES_PER_TENSOR * len(flat.tensors)
