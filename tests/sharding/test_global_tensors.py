"""Boxes of tensors, and statistics of the whole tensors from those of boxes."""

from __future__ import annotations

import pytest
import torch
from helpers.adam_states import normal
from helpers.sharded_states import Ranks, box_of, columns, cut, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.codec.lattice import Lattice, as_matrix, matrix_shape, scale_counts
from shrinkpoint.errors import MismatchError, PolicyError, StateError
from shrinkpoint.sharding.collectives import LocalCollectives, make_collectives
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors, ShardLayout, ShardSpec
from shrinkpoint.tensors.flat_state import FlatState, flatten


def sums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    matrix = as_matrix(tensor).double()
    return matrix.sum(1), matrix.sum(0)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, and where a box that is not empty begins in it, and its sizes."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return shape, starts, tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True))


def lattice(shape: tuple[int, ...], seed: int = 0) -> Lattice:
    generator = torch.Generator().manual_seed(1)
    nrows, ncolumns = scale_counts("linear", shape)
    sides_of = [torch.randint(-40, 40, (n,), generator=generator).to(torch.int16) for n in (nrows, ncolumns)]
    return Lattice("linear", sides_of[0], sides_of[1], seed=seed)


def steps(one: Lattice, shape: tuple[int, ...]) -> Tensor:
    return one.scales().expand(matrix_shape(shape)).reshape(shape)


@given(boxes())
def test_a_box_has_the_steps_that_its_places_have_in_the_whole(box):
    shape, starts, sizes = box
    whole = lattice(shape)
    part = ShardSpec("a", shape, starts).slice_lattice(whole, sizes)
    assert (part.rows.numel(), part.columns.numel()) == scale_counts("linear", sizes)
    if scale_counts("linear", sizes)[1] > 1 or scale_counts("linear", shape)[1] == 1:
        assert torch.equal(steps(part, sizes), box_of(steps(whole, shape), starts, sizes))
    else:  # one row, whose steps must be alike: their geometric mean, to within half an eighth of an octave
        mean = box_of(steps(whole, shape), starts, sizes).log2().mean()
        assert abs(float(steps(part, sizes).log2().mean() - mean)) <= 0.5 / 8 + 1e-5


@given(boxes(), st.integers(0, (1 << 32) - 1))
def test_whole_rows_have_the_dither_of_the_whole(box, seed):
    shape, (start, *_), (size, *_) = box
    sizes, starts = (size, *shape[1:]), (start, *(0 for _ in shape[1:]))
    part = ShardSpec("a", shape, starts).dither_seed(seed, sizes)
    every = Lattice("linear", torch.zeros(1), torch.zeros(1), seed=seed).dither(matrix_shape(shape))
    mine = Lattice("linear", torch.zeros(1), torch.zeros(1), seed=part).dither(matrix_shape(sizes))
    if seed == 0:
        assert part == 0
    elif part != 1:  # the one seed that stands for none, too
        assert torch.equal(mine.reshape(sizes), box_of(every.reshape(shape), starts, sizes))


@pytest.mark.parametrize("offsets", [(0,), (0, 0, 0), (-1, 0), (3, 0), (0, 4)])
def test_a_box_that_is_not_within_its_tensor_is_refused(offsets):
    flat = flatten({"a.weight": torch.zeros(2, 2)})
    (name,) = flat.tensors
    with pytest.raises(StateError, match="a shard within"):
        GlobalTensors(flat, ShardLayout({name: ShardSpec("a", (4, 5), offsets)}, LocalCollectives()))


def parts_of(x: Tensor, width: int, cutter: object) -> list[tuple[FlatState, ShardLayout]]:
    return [(one.flat, one.places) for one in cut(flatten({"a.weight": x}), width, cutter)]


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.sampled_from([rows, columns]),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=40)
def test_sums_of_boxes_are_those_of_the_whole(shape, cutter, width):
    x = normal(*shape, seed=3)
    parts = parts_of(x, width, cutter)

    def work(rank, collectives):
        flat, places = parts[rank]
        return GlobalTensors(flat, ShardLayout(places, collectives)).marginals(
            flat.tensors, lambda name: sums(flat.tensors[name])
        )

    found = Ranks(width).all(work)
    (margins,) = found[0].values()
    assert margins.mean == pytest.approx(float(x.double().mean()), rel=1e-5, abs=1e-6)
    wanted = as_matrix(x).double()
    for axis in (1, 0):
        if wanted.shape[0] > 1:
            assert torch.allclose(margins.mean_along(axis), wanted.mean(axis), atol=1e-6)
    for other in found[1:]:
        (same,) = other.values()
        assert same.total == margins.total
        assert torch.equal(same.row_sums, margins.row_sums)
        assert torch.equal(same.column_sums, margins.column_sums)


@given(st.integers(1, 200), st.integers(1, 4), st.integers(0, 9), st.sampled_from([0, 1e-42, 1e-3, 1.0, 1e30]))
@settings(deadline=None, max_examples=40)
def test_medians_and_the_largest_are_exact(count, width, seed, scale):
    x = normal(count, seed=seed) * scale
    x[:: seed + 2] = x[0]  # ties
    parts = parts_of(x, width, rows)
    (name,) = flatten({"a.weight": x}).tensors
    most = min(count, 1 + seed * count // 20)

    def work(rank, collectives):
        flat, places = parts[rank]
        stats = GlobalStats(GlobalTensors(flat, ShardLayout(places, collectives)))
        magnitudes = flat.tensors[name].abs().reshape(-1)
        counts = collectives.all_gather(magnitudes.numel())
        among = stats.count_among_largest(magnitudes, most, counts)
        return stats.median_magnitudes(flat.tensors)[name], int((magnitudes > least).sum()), among

    least = float(x.abs().sort(descending=True).values[most - 1])
    medians, above, among = zip(*Ranks(width).all(work), strict=True)
    assert set(medians) == {float(x.abs().median())} and sum(among) == most
    assert all(map(int.__le__, above, among))


def test_shards_sample_the_rows_that_the_whole_does():
    sampled = []
    for start, stop in ((0, 3), (3, 21), (21, 22), (22, 50)):
        part = ShardSpec("a", (50, 10), (start, 0))
        sampled += range(50)[start:stop][part.sampled_rows(125)]
    assert sampled == [*range(50)[ShardSpec("a", (50, 10), (0, 0)).sampled_rows(125)]] == [*range(0, 50, 4)]


@pytest.mark.parametrize(
    ("count", "flags", "found"),
    [(4, (True, True), True), (4, (True, False), False), (4, (True, None), False), (1, (True, False), True)],
)
def test_all_shards_of_a_tensor_that_have_values_are_to_be_flagged(count, flags, found):
    """None: a rank says nothing about its shard. One value lies on the first of two ranks."""
    parts = parts_of(normal(count), 2, rows)
    (name,) = parts[0][0].tensors

    def work(rank, collectives):
        flat, places = parts[rank]
        own = {} if flags[rank] is None else {name: flags[rank]}
        return GlobalTensors(flat, ShardLayout(places, collectives)).tensors_where_all(own)

    assert Ranks(2).all(work) == [{name} if found else set()] * 2


def test_what_two_ranks_have_twice_counts_once():
    x = normal(6, 5)
    (name,) = (flat := flatten({"a.weight": x})).tensors
    places = {name: ShardSpec(name, (6, 5), (0, 0))}

    def work(rank, collectives):
        wholes = GlobalTensors(flat, ShardLayout(places, collectives))
        assert (name in wholes.primary) == (rank == 0)
        return wholes.marginals([name], lambda _: sums(x))[name].mean

    assert Ranks(2).all(work) == [pytest.approx(float(x.mean()), rel=1e-6)] * 2


@pytest.mark.parametrize("second", [ShardSpec("a", (4, 6), (2, 0)), ShardSpec("a", (5, 5), (2, 0))])
def test_ranks_that_name_different_tensors_alike_are_told_so(second):
    places = [ShardSpec("a", (4, 5), (0, 0)), second]
    flats = [flatten({"w.weight": torch.zeros(2, 5)}), flatten({"w.weight": torch.zeros(2, 5)})]

    def work(rank, collectives):
        (name,) = flats[rank].tensors
        return GlobalTensors(flats[rank], ShardLayout({name: places[rank]}, collectives))

    errors = Ranks(2).run(work)
    assert all(isinstance(one, MismatchError) and "a" in str(one) for one in errors)


@pytest.mark.parametrize("error", [StateError("w", found="a nan", expected="none", do="look"), ZeroDivisionError("x")])
@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_one_rank_is_raised_by_all(error, late):
    def work(rank, collectives):
        def compute():
            collectives.all_gather(rank)
            if rank == 1 and not late:
                raise error
            collectives.reduce([("a", rank)], len)
            if rank == 1:
                raise error

        return collectives.run_all_or_raise(compute)

    first, mine, third = Ranks(3).run(work)
    assert mine is error
    kind = type(error) if isinstance(error, StateError) else PolicyError
    assert {type(first), type(third)} == {kind} and str(first) == str(third) and "rank 1" in str(first)
    assert ("a nan" if kind is StateError else "ZeroDivisionError: x") in str(first)


def test_without_a_group_a_process_gathers_alone():
    alone = make_collectives()
    assert alone.all_gather({"a": 1}) == [{"a": 1}]
    with pytest.raises(StateError, match="rank 0: w"):
        alone.all_gather(StateError("w", found="a nan", do="look there"))
