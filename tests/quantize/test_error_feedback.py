"""Rounding with error feedback: the native solver against plain torch, and what it does to a layer's outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.lattice import Lattice, as_matrix
from shrinkpoint.quantize.lattice import feedback_factor, quantize_to_lattice, quantize_with_feedback

SHAPES = [(70, 33), (5, 2), (130, 66), (1, 9)]


def moments_of(columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    mixing = torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mixing
    return inputs.T @ inputs / len(inputs)


def case(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Lattice, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    exponents = [torch.randint(-8, 8, (n,), generator=generator, dtype=torch.int16) for n in (rows, columns)]
    factor = feedback_factor(moments_of(columns))
    assert factor is not None
    return torch.randn(rows, columns, generator=generator), Lattice("linear", *exponents, seed=seed), factor


def errors_to_columns(factor: Tensor) -> Tensor:
    """What column k, a row, gets of the errors of the columns before it, in float64; zeros elsewhere."""
    upper = factor.double().triu()
    return (upper / upper.diagonal()[:, None]).flip(0, 1).tril(-1)


def reference_codes(weight: Tensor, lattice: Lattice, factor: Tensor) -> Tensor:
    """The recursion of LDLQ in float64."""
    weight, factor = weight.double(), errors_to_columns(factor)
    steps = lattice.scales().double().expand(weight.shape)
    dither = torch.as_tensor(lattice.dither((weight.shape[0], weight.shape[1]))).double().expand(weight.shape)
    codes, errors = torch.zeros_like(weight), torch.zeros_like(weight)
    for k in range(weight.shape[1]):
        fed_back = weight[:, k] + errors[:, :k] @ factor[k, :k]
        codes[:, k] = (fed_back / steps[:, k] - dither[:, k]).round()
        errors[:, k] = weight[:, k] - (codes[:, k] + dither[:, k]) * steps[:, k]
    return codes


@pytest.mark.parametrize(("seed", "shape"), each_value([0, 7], SHAPES))
def test_codes_are_those_of_the_recursion_in_float64(shape: tuple[int, int], seed: int):
    weight, lattice, factor = case(*shape, seed)
    points = quantize_with_feedback(weight, lattice, factor)
    assert points is not None
    differ = points.codes != reference_codes(weight, lattice, factor)
    assert float(differ.float().mean()) < 0.002  # a tie may fall to either side


def test_threads_and_instruction_sets_give_the_same_codes():
    weight, lattice, factor = case(130, 66, 5)
    widest = _native._use_simd(2)
    try:
        runs = []
        for level in range(widest + 1):
            _native._use_simd(level)
            for threads in (1, 3):
                points = quantize_with_feedback(weight, lattice, factor, threads=threads)
                assert points is not None
                runs.append(points.codes)
    finally:
        _native._use_simd(widest)
    assert all(torch.equal(codes, runs[0]) for codes in runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_feedback_halves_the_error_of_the_outputs(dtype: torch.dtype):
    weight, lattice, factor = case(130, 66)
    weight = weight.to(dtype)
    moments = moments_of(66).double()

    def output_error(points: object) -> float:
        errors = as_matrix(points.dequantize(torch.float32)).double() - weight.double()  # type: ignore[attr-defined]
        return float(torch.trace(errors @ moments @ errors.T))

    with_feedback = output_error(quantize_with_feedback(weight, lattice, factor))
    assert with_feedback < 0.6 * output_error(quantize_to_lattice(weight, lattice))


def test_the_factor_is_the_one_of_a_decomposition_in_float64():
    moments = moments_of(40).double()
    factor = feedback_factor(moments)
    assert factor is not None
    damped = moments / moments.diagonal().mean() + 0.03 * torch.eye(40, dtype=torch.float64)
    unit = errors_to_columns(factor).T + torch.eye(40, dtype=torch.float64)
    inverse = torch.linalg.inv(unit)
    diagonal = inverse @ damped @ inverse.T  # D of (U + I) D (U + I)'
    assert float((diagonal - diagonal.diagonal().diag()).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "moments",
    [
        torch.zeros(4, 4),
        torch.full((4, 4), torch.nan),
        -torch.eye(4),
        torch.empty(0, 0),
        torch.tensor([[1.0, 9], [9, 1]]),
    ],
    ids=["dead", "nan", "negative", "empty", "indefinite"],
)
def test_moments_without_a_factor_give_none(moments: Tensor):
    assert feedback_factor(moments) is None


def test_dead_inputs_are_rounded_to_the_nearest():
    moments = moments_of(12)
    moments[3], moments[:, 3] = 0.0, 0.0
    factor = feedback_factor(moments)
    assert factor is not None
    fed_back = errors_to_columns(factor)
    assert not fed_back[3].any() and not fed_back[:, 3].any()


def test_values_beyond_all_codes_give_none():
    weight, lattice, factor = case(5, 2)
    assert quantize_with_feedback(weight * 1e6, lattice, factor) is None


def test_the_native_core_refuses_arrays_of_other_sizes():
    weight, lattice, factor = case(5, 2)
    native, codes = lattice.to_native((5, 2)), np.zeros(20, np.uint8)
    values, factors = (x.numpy().reshape(-1).view(np.uint8) for x in (weight, factor))
    for arguments in ((values[4:], factors, codes), (values, factors[4:], codes), (values, factors, codes[2:])):
        with pytest.raises(ValueError):
            _native.quantize_with_feedback(native, *arguments)
    with pytest.raises(ValueError, match="2 columns"):
        quantize_with_feedback(weight, lattice, torch.zeros(3, 3))
