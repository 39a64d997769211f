"""Compares points of lattices that are chosen on a device with those of native code, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias

import pytest
import torch
from helpers.kernel_bits import edge_values, kernels_on
from helpers.stand_in_device import on_host
from helpers.strategies import bits
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.lattice import Lattice, LatticeTensor, as_matrix
from shrinkpoint.codec.reference import Reference
from shrinkpoint.quantize.lattice import (
    ErrorWeights,
    PowerZones,
    quantize_second_moment,
    quantize_to_lattice,
    quantize_with_errors,
)
from shrinkpoint.quantize.statistics import second_moment_sums, value_sums
from shrinkpoint.schemes import QuantizationPlan
from shrinkpoint.tensors.flat_state import flatten

SHAPES = [(1,), (1, 1), (3000,), (1, 70), (70, 5), (3, 1030), (3, 2, 3, 3), (1, 0), (260, 17)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARAMETERS = 4
"""Of the states of `trained`."""
CASES = [(0, 0, 0.5), (0, 0, 0.6), (0x9E3779B9, -21, 0.6)]
"""Seeds, exponents and hysteresis of weights: steps of 1 without dither, where values may lie between two points."""
BROKEN = [("m", torch.nan), ("v", torch.nan), ("v", torch.inf), ("v", -torch.inf), ("v", -1.0), ("m", -1.0), ("", 0.0)]
"""Where one value of the moments is broken, if any is, and by what."""
Place: TypeAlias = Callable[[Tensor], Tensor]
"""Brings a tensor to a device."""
There: TypeAlias = Callable[[], AbstractContextManager[object]]
"""What is entered while something is computed on the device."""


def finite(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Values of many magnitudes, denormal ones and zeros of either sign among them."""
    return (
        edge_values(max(1, torch.Size(shape).numel()), seed)[: torch.Size(shape).numel()].nan_to_num(1.25).view(shape)
    )


def lattice_of(spacing: Any, shape: tuple[int, ...], at: int, *, seed: int = 0, step: int = 1) -> Lattice:
    rows, columns = as_matrix(torch.zeros(shape)).shape
    one = rows == 1 or spacing == "relative"
    sides = (torch.arange(count) % 7 - 3 for count in (rows, 1 if one else columns))
    by_row, by_column = (side.to(torch.int16) for side in sides)
    return Lattice(spacing, by_row + at, by_column * (not one), step, seed)


def held(codes: Tensor) -> Tensor:
    """Codes in host memory, whichever device they are on."""
    return on_host(codes).cpu()


def same_points(found: LatticeTensor | None, expected: LatticeTensor | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        codes = held(found.codes)
        assert codes.dtype == expected.codes.dtype and torch.equal(codes, expected.codes)


def near(found: Tensor | None, expected: Tensor | None) -> None:
    """Sums of float64 may be added up in another order."""
    assert (found is None) == (expected is None)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0, equal_nan=True)


def weights_of(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """Weights of all magnitudes, of one magnitude, halfway between points, at the ends of codes, and broken ones."""
    numel = torch.Size(shape).numel()
    yield finite(shape).to(dtype).nan_to_num()
    yield torch.randn(shape, generator=torch.Generator().manual_seed(numel)).to(dtype)
    ends = torch.tensor([0.5, 1.5, -2.5, 127.5, -128.5, 0.0, -0.0, 126.5]).repeat(numel // 8 + 1)[:numel].view(shape)
    yield ends.to(dtype)
    yield (ends * 64).to(dtype)
    for value in (torch.nan, -torch.inf, 32765.5, 32766.0):
        broken = ends.to(dtype, copy=True)
        broken.view(-1)[-1:] = value
        yield broken


def check_weights(shape: tuple[int, ...], dtype: torch.dtype, place: Place, there: There) -> None:
    """Weights, with and without what they may have beside them."""
    slopes, squares = as_matrix(finite(shape, 1)) * 2.0**-100, as_matrix(finite(shape, 2) * 2.0**-100).abs().bfloat16()
    for index, (weight, (seed, at, hysteresis)) in enumerate(product(weights_of(shape, dtype), CASES)):
        lattice = lattice_of("linear", shape, at, seed=seed)
        lattice = lattice if at else replace(lattice, rows=lattice.rows * 0)
        previous = torch.zeros(shape, dtype=torch.int16) if at else torch.ones(shape, dtype=torch.int8)
        beside: dict[str, Any] = {"previous_codes": previous, "hysteresis": hysteresis}
        gained = {**beside, "origin": previous - 2, "gain": 1 - at / 64}
        with kernels_on():
            plain = quantize_to_lattice(weight, lattice, **beside)
            summed = quantize_with_errors(weight, lattice, ErrorWeights(slopes, squares), **gained)
        with there():
            weights = ErrorWeights(place(slopes), place(squares))
            if index % 3 == 0:
                same_points(quantize_to_lattice(place(weight), lattice, **beside), plain)
            found = quantize_with_errors(place(weight), lattice, weights, **gained)
        same_points(found and found[0], summed and summed[0])
        if found and summed:
            other = DTYPES[index // 3 % 3]
            with kernels_on():
                expected = summed[0].dequantize(other)
            with there():
                values = found[0].dequantize(other)
            assert bits(held(values)) == bits(expected)
            assert found[1] == pytest.approx(summed[1], rel=1e-9, abs=1e-30)


def check_moments(shape: tuple[int, ...], dtype: torch.dtype, place: Place, there: There) -> None:
    """Second moments and first ones, with and without a parent, and the sums of both."""
    v = finite(shape, 3).abs().mul(2.0**-40).to(dtype)
    m = (v.float().sqrt() * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    m.view(-1)[5::64], m.view(-1)[::7] = 1e-30, 0.0
    for first in (m, None):
        with kernels_on():
            sums = second_moment_sums(as_matrix(v), None if first is None else as_matrix(first))
        with there():
            found = second_moment_sums(place(as_matrix(v)), None if first is None else place(as_matrix(first)))
        assert found[:2] == sums[:2] == (True, False)
        assert all(map(torch.equal, (*found.logs, *found.counts), (*sums.logs, *sums.counts)))
        for side in range(2):
            near(found.values[side], sums.values[side])
        with there():  # a vector alone has no sums by column
            totals = second_moment_sums(
                place(v.view(-1)), None if first is None else place(first.view(-1)), by_column=False
            )
        assert not totals.logs.columns.numel() and totals.logs.rows.tolist() == [float(sums.logs.rows.sum())]
        near(totals.values.rows, sums.values.rows.sum().view(1))
        for step, at in ((40, -60), (4, 900))[: 1 if first is None else 2]:
            lattice = lattice_of("log", shape, at, step=step)
            parent = quantize_second_moment(v * 3, m, lattice_of("log", shape, 3 - at // 2, step=8), PowerZones(0.5))[0]
            for zones, before in ((PowerZones(0.6), None), (PowerZones(0.5, 0.5, 0.8), parent)):
                with kernels_on():
                    points, relative = quantize_second_moment(v, first, lattice, zones, before)
                with there():
                    moments = place(v), None if first is None else place(first)
                    other, other_sums = quantize_second_moment(*moments, lattice, zones, before)
                same_points(other, points)
                near(other_sums, relative if v.numel() else other_sums)
            check_firsts(m, points, dtype, place, there)


def check_firsts(m: Tensor, second: LatticeTensor, dtype: torch.dtype, place: Place, there: There) -> None:
    """First moments relative to the roots of second ones."""
    for at, seed in ((8, 5), (400, 0)):
        lattice = lattice_of("relative", tuple(m.shape), at, seed=seed)
        options: dict[str, Any] = {"relative_to": "v", "second_dtype": dtype}
        with kernels_on():
            expected = quantize_to_lattice(m, lattice, second_moment=second, **options)
        with there():
            placed = replace(second, codes=place(second.codes))
            same_points(quantize_to_lattice(place(m), lattice, second_moment=placed, **options), expected)


def check_sums(place: Place, there: There) -> None:
    """What is not finite or below zero is found wherever it is; magnitudes, means and deviations of values."""
    for index, (shape, (where, value)) in enumerate(product([(1,), (33, 130)], BROKEN)):
        dtype = DTYPES[index % 2]
        m, v = finite(shape).to(dtype).nan_to_num(), finite(shape).abs().to(dtype).nan_to_num()
        v.view(-1)[-1], m.view(-1)[-1] = value if where == "v" else -0.0, value if where == "m" else 1.0
        with kernels_on():
            expected, values = second_moment_sums(v, m), value_sums(v)
        with there():
            found, others = second_moment_sums(place(v), place(m)), value_sums(place(v))
        is_finite = where == "" or value == -1.0
        assert found[:2] == expected[:2] == (is_finite, where == "v" and value < 0)
        assert others.max_magnitude == pytest.approx(values.max_magnitude, rel=0, nan_ok=True)
        if is_finite:
            assert (others.mean, others.std, others.count) == pytest.approx((values.mean, values.std, values.count))


def trained(saves: int, make: Callable[..., torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """States of a small training: matrices, a kernel, biases, and an embedding some rows of which rest."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 48), (1030, 6), (3, 2, 20), (64,)]
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = make(parameters, lr=0.02)
    for _ in range(saves):
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator) * parameter.detach().abs()
            parameters[1].grad[500:] = 0.0  # type: ignore[index]
            optimizer.step()
        yield {"model": {f"{i}.weight": x for i, x in enumerate(parameters)}, "optimizer": optimizer.state_dict()}


def adam(parameters: list[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr)


def sgd(parameters: list[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def plans(
    saves: int, place: Place, there: There, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> list[QuantizationPlan]:
    """The plans of a chain of Fisher whose states are on a device; each save's parent is decoded in host memory."""
    scheme, reference, out = sp.Fisher(**options or {"relative_error": 0.3}), None, []
    for state in trained(saves, make):
        flat = flatten(state)
        moved = {name: place(x) if x.numel() > 1 else x for name, x in flat.tensors.items()}
        with warnings.catch_warnings(), there():
            warnings.simplefilter("ignore")
            plan = scheme.plan(replace(flat, tensors=moved), reference)
        points = {n: replace(x, codes=held(x.codes)) for n, x in plan.quantized.items() if isinstance(x, LatticeTensor)}
        plan = replace(plan, quantized=points)
        tensors = {name: x.clone() for name, x in flat.tensors.items()}
        decoded = plan.quantize(replace(flat, tensors=tensors), reference)
        reference = Reference(dict(decoded.state.tensors), decoded.quantized, tensors)
        out.append(plan)
    return out


def check_plans(
    saves: int, place: Place, there: There, make: Callable[..., torch.optim.Optimizer] = adam, **options: Any
) -> None:
    with kernels_on():
        expected = plans(saves, lambda x: x, kernels_on, make, options)
    found = plans(saves, place, there, make, options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.quantized.keys() == theirs.quantized.keys() and len(theirs.quantized) >= 2 * PARAMETERS - 1
        for name, points in theirs.quantized.items():
            other = ours.quantized[name]
            assert isinstance(other, LatticeTensor) and isinstance(points, LatticeTensor)
            assert other.has_equal_codes(points), name
    gains = [x.gain for x in expected[-1].quantized.values() if isinstance(x, LatticeTensor)]
    assert make is sgd or max(gains) > 1
