"""Some rows of a tensor on a lattice: their values, and what hysteresis would write of their movement."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import Lattice, LatticeTensor, as_matrix
from shrinkpoint.codec.reference import DecodedTensors, LatticeSource, all_tensor_rows
from shrinkpoint.quantize.lattice import are_near_first_points, movement_sums, quantize_to_lattice
from shrinkpoint.quantize.statistics import float_bits, log2_units, second_moment_sums
from shrinkpoint.schemes.fisher.moment_lattices import second_exponents
from shrinkpoint.tensors.dtypes import tensor_bytes

SHAPES = [(1, 5000), (5000, 1), (64, 40), (7, 2049), (33, 3, 5), (40,)]
ROWS = [slice(0, None, 1), slice(1, None, 3), slice(0, 4), slice(2, 2)]


def random_points(shape: tuple[int, ...], spacing: str, seed: int) -> LatticeTensor:
    generator = torch.Generator().manual_seed(len(shape))
    rows, columns = as_matrix(torch.empty(shape)).shape
    sides = torch.randint(-9, 9, (rows,), generator=generator).short(), torch.zeros(1, dtype=torch.int16)
    if rows > 1 and spacing != "relative":
        sides = sides[0], torch.randint(-9, 9, (columns,), generator=generator).short()
    codes = torch.randint(-99, 99, shape, generator=generator).to(torch.int8)
    return LatticeTensor(codes, Lattice(spacing, *sides, seed=seed))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "shape"), each_value([torch.float32, torch.bfloat16], [*SHAPES, (), (0, 4)]))
def test_rows_have_the_values_they_have_in_the_whole_tensor(shape, dtype):
    for spacing, seed in [("linear", 0), ("linear", 7), ("log", 0), ("relative", 9)]:
        for rows in ROWS:
            points = random_points(shape, spacing, seed)
            squares = torch.rand(shape) if spacing == "relative" else None
            whole = as_matrix(points.dequantize(dtype, squares))
            some = points.dequantize_rows(rows, dtype, None if squares is None else as_matrix(squares)[rows])
            assert torch.equal(some, whole[rows]) and some.dtype == dtype


@pytest.mark.parametrize(
    "runs",
    [
        {"first": 1, "length": 8, "stride": 8, "count": 8},  # one position beyond
        {"first": 0, "length": 8, "stride": 1 << 63, "count": 3},
        {"first": 0, "length": 8, "stride": 0, "count": 1 << 61},  # as many bytes as fit into 64 bits
        {"first": 0, "length": 0, "stride": 8, "count": 1 << 40},
        {"first": 65, "length": 1, "stride": 1, "count": 1},
        {"first": 0, "length": 65, "stride": 65, "count": 1},
    ],
)
def test_rows_beyond_the_tensor_are_refused(runs):
    points = random_points((8, 8), "linear", 0)
    native, codes = points.lattice.to_native((8, 8)), tensor_bytes(points.codes)
    out = np.zeros(4 * runs["length"] * runs["count"] % (1 << 64) % 4096, np.uint8)
    with pytest.raises(ValueError, match="beyond"):
        _native.lattice_run_values(native, codes, out, **runs)
    values = tensor_bytes(points.codes.float())
    with pytest.raises(ValueError, match="beyond"):
        _native.movement_sums(native, codes, codes, values, values, values, max_hysteresis=0.75, levels=4, **runs)
    with pytest.raises(ValueError, match="beyond"):
        _native.near_points(native, codes, values, max_steps=0.5, **runs)


def test_rows_need_as_many_values_as_they_have():
    points = random_points((8, 8), "linear", 0)
    native, codes, rows = points.lattice.to_native((8, 8)), tensor_bytes(points.codes), {"first": 0, "stride": 16}
    with pytest.raises(ValueError, match="values"):
        _native.lattice_run_values(native, codes, np.zeros(4, np.uint8), length=8, count=2, **rows)
    with pytest.raises(ValueError, match="start"):
        arrays = np.zeros(64, np.uint8), np.zeros(60, np.uint8), np.zeros(64, np.uint8)
        _native.movement_sums(native, codes, codes, *arrays, max_hysteresis=0.75, levels=4, length=8, count=2, **rows)
    with pytest.raises(ValueError, match="values"):
        _native.near_points(native, codes, np.zeros(60, np.uint8), max_steps=0.5, length=8, count=2, **rows)


@pytest.mark.parametrize(("max_hysteresis", "levels"), [(0.5, 4), (0.75, 0), (0.75, 1 << 13), (float("nan"), 4)])
def test_a_hysteresis_without_a_range_is_refused(max_hysteresis, levels):
    x = torch.ones(4, 4)
    with pytest.raises(ValueError, match="hysteresis"):
        movement_sums(x, random_points((4, 4), "linear", 0), (x, x), range(4), max_hysteresis, levels)


def movement_written(weight: Tensor, points: LatticeTensor, original: Tensor, hysteresis: float) -> float:
    """Written times training's movement, with the points that a hysteresis leaves."""
    quantized = quantize_to_lattice(weight, points.lattice, previous_codes=points.codes, hysteresis=hysteresis)
    assert quantized is not None
    moved = quantized.dequantize(torch.float64) - points.dequantize(torch.float64)
    return float((moved * (weight - original).double()).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("far", [0.3, 4.0])
def test_sums_by_level_are_what_each_hysteresis_writes(dtype, far):
    generator = torch.Generator().manual_seed(3)
    original = torch.randn(300, 70, generator=generator).to(dtype)
    rows = torch.randint(-20, -10, (300,), generator=generator).short()
    columns = torch.randint(-3, 3, (70,), generator=generator).short()
    lattice = Lattice("linear", rows, columns)
    points = quantize_to_lattice(original, lattice)
    assert points is not None
    steps = lattice.scales()
    weight = (original.float() + far * steps * torch.randn(300, 70, generator=generator)).to(dtype)
    first = torch.randint(-5, 5, points.codes.shape, generator=generator).to(torch.int8)
    points = replace(points, origin=first, gain=1.5)  # sums are those of the points, without the gain
    decoded, origin = (
        replace(points.points(), codes=codes).dequantize(torch.float32) for codes in (points.codes, first)
    )
    sums = movement_sums(weight, points, (original, weight), range(300), 0.75, 8)
    squared, before, *written = sums[:11]
    assert not any(sums[11:])  # since now
    movement = weight.float() - original.float()
    assert squared == pytest.approx(float(movement.double().square().sum()), rel=1e-9)
    assert before == pytest.approx(float((movement.double() * (decoded - origin).double()).sum()), rel=1e-9)
    offsets = (weight.float() - decoded) / steps
    parts = (offsets.round() * steps * movement).double()
    for level in range(9):
        expected = float(parts[offsets.abs() > 0.5 + level / 32].sum())
        assert written[level] == pytest.approx(expected, rel=1e-9)
        if dtype == torch.float32 and level > 0:  # narrow values may lie at a threshold, and half a step is even
            expected = movement_written(weight, points.points(), original, 0.5 + level / 32)
            assert written[level] == pytest.approx(expected, rel=1e-4)
    some = slice(5, None, 7)
    part = movement_sums(weight[some], points, (original[some], weight[some] / 2), range(300)[some], 0.75, 8)
    lattice = replace(lattice, rows=lattice.rows[some])
    alone = LatticeTensor(points.codes[some].contiguous(), lattice, origin=first[some].contiguous(), gain=1.5)
    whole = movement_sums(weight[some], alone, (original[some], weight[some] / 2), range(len(alone.codes)), 0.75, 8)
    assert part == whole


def test_sums_do_not_depend_on_instructions():
    generator = torch.Generator().manual_seed(1)
    weight, earlier = (torch.randn(50, 900, generator=generator) for _ in range(2))
    points = random_points((50, 900), "linear", 3)
    points = replace(points, origin=points.codes.flip(0).contiguous())
    widest = _native._use_simd(2)
    try:
        results = []
        for level in (0, 1, 2):
            _native._use_simd(level)
            results.append(movement_sums(weight, points, (earlier, -earlier), range(50), 0.75, 64))
    finally:
        _native._use_simd(widest)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "rows"), each_value(SHAPES, ROWS))
def test_rows_are_near_points_up_to_the_given_distance(dtype, shape, rows):
    first = random_points(shape, "linear", 5)
    points = replace(first, codes=(first.codes // 2).to(torch.int8), origin=first.codes, gain=2.0)
    steps = first.lattice.scales().expand(as_matrix(first.codes).shape)[rows]
    values = as_matrix(first.dequantize(torch.float32))[rows]
    indices = range(len(as_matrix(first.codes)))[rows]
    assert are_near_first_points(points, values.to(dtype), indices, 0.5)
    if values.numel():
        values = values.clone()
        values[-1, -1] += 3 * steps[-1, -1]
        assert not are_near_first_points(points, values.to(dtype), indices, 2.0)
        assert are_near_first_points(points, values.to(dtype), indices, 4.0)
        values[-1, -1] = float("nan")
        assert not are_near_first_points(points, values.to(dtype), indices, 4.0)


def test_a_lattice_that_has_been_used_can_be_copied():
    points = random_points((100, 100), "linear", 5)
    points.dequantize(torch.float32)
    assert copy.deepcopy(points.lattice) == points.lattice


@pytest.mark.parametrize("spacing", ["linear", "log"])
def test_rows_of_several_tensors_are_decoded_together(spacing):
    points = {f"{shape}": random_points(shape, spacing, 0) for shape in SHAPES}
    sources = {name: LatticeSource(tensor, torch.float32) for name, tensor in points.items()}
    tensors = DecodedTensors({**sources, "exact": torch.arange(6.0).reshape(3, 2)})
    for rows in ROWS:
        decoded = all_tensor_rows(tensors, dict.fromkeys(tensors, rows))
        assert decoded.keys() == {*tensors}
        assert all(torch.equal(x, as_matrix(tensors[name])[rows]) for name, x in decoded.items())
    run, width = points["(64, 40)"].runs(slice(0, 2))
    for size in (2 * width - 1, 2 * width + 1):
        with pytest.raises(ValueError, match="values: too"):
            _native.lattice_rows([run], torch.empty(size))


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_compared_and_hashed_as_they_decode(shape):
    points = random_points(shape, "linear", 5)
    values, count = points.dequantize(torch.float32), points.codes.numel()
    assert _native.digest([points.native_values()]) == _native.digest([values])
    assert points.starts_with(values, count) and points.starts_with(values, 2 * count)
    values.view(-1)[count // 2] = torch.nan
    assert points.starts_with(values, count // 2) and not points.starts_with(values, count // 2 + 1)


@pytest.mark.parametrize(("rows", "columns"), [(1, 50), (30, 40), (40, 1)])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_second_exponents_are_means_of_logarithms(rows, columns, share):
    generator = torch.Generator().manual_seed(rows)
    v = torch.rand((rows, columns), generator=generator).pow(9) * (torch.rand(rows, 1, generator=generator) > 0.2)
    v = v.where(torch.rand(v.shape, generator=generator) < share, torch.zeros(()))
    found = second_exponents(v.numel(), second_moment_sums(v))
    present, logs = v > 0, log2_units(float_bits(v)).double() * (v > 0)
    mean = logs.sum() / max(1, int(present.sum()))
    expected = []
    for axis, count in ((1, rows), (0, columns if rows > 1 else 1)):
        means = (logs.sum(axis) / present.sum(axis)).nan_to_num(float(mean))
        expected.append((means if axis else means - mean) / 512 if count > 1 else mean[None] / 512 * axis)
    low, quarter = -2 * 472 + 118, 118
    assert torch.equal(found[0], expected[0].round().clamp(low, 472).short())
    assert torch.equal(found[1], expected[1].round().clamp(-quarter, quarter).short())
