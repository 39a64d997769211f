"""Factors of gradients: orthonormal rows, their product, which matrices are sent as factors, and where factors lie."""

from __future__ import annotations

import pytest
import torch
from helpers.parameters import each_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shrinkpoint.comm import Link, LowRank
from shrinkpoint.comm.gradient_layout import PARAMETER_ALIGN, FilledSegment, GradientCollector, Piece
from shrinkpoint.comm.low_rank import orthonormal_rows, start_rows, subtract_product, unit_rows
from shrinkpoint.comm.low_rank_allreduce import Matrix, MatrixLayout, MatrixMemory
from shrinkpoint.errors import PolicyError


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_low_rank_is_refused_where_there_are_no_gradients_of_matrices():
    with pytest.raises(PolicyError, match="compress_ddp"):
        Link("lowrank4")
    with pytest.raises(PolicyError, match="compress_ddp"):
        Link(LowRank(4))


@pytest.mark.parametrize(("rank", "values"), [(1, 1), (1, 7), (4, 4), (4, 333), (8, 1000)])
def test_rows_are_orthonormal_and_span_what_they_spanned(rank, values):
    for scale in [1e-30, 1.0, 1e30]:
        rows = scale * drawn(rank, values)
        basis = orthonormal_rows(rows).double()
        assert torch.allclose(basis @ basis.t(), torch.eye(rank, dtype=torch.float64), atol=1e-6)
        for count in range(1, rank + 1):  # of the first rows, too
            inside = rows[:count].double() @ basis[:count].t() @ basis[:count]
            assert torch.allclose(inside, rows[:count].double(), rtol=0, atol=1e-6 * scale * values**0.5)


def test_nearly_dependent_rows_are_orthonormal_all_the_same():
    row = drawn(200)
    rows = torch.stack((row, row + 1e-5 * drawn(200, seed=1), row + 1e-5 * drawn(200, seed=2)))
    basis = orthonormal_rows(rows).double()
    assert torch.allclose(basis @ basis.t(), torch.eye(3, dtype=torch.float64), atol=1e-6)


def test_a_row_that_earlier_ones_span_becomes_zero():
    rows = torch.stack((drawn(50), torch.zeros(50), 2 * drawn(50), drawn(50, seed=1)))
    norms = torch.linalg.vector_norm(orthonormal_rows(rows), dim=1)
    assert torch.allclose(norms, torch.tensor([1.0, 0.0, 0.0, 1.0]), atol=1e-6)


@pytest.mark.parametrize(("place", "value"), each_value([0, 1, 2], [float("nan"), float("inf"), -float("inf")]))
def test_a_value_that_is_not_finite_is_in_every_product(place, value):
    rows = drawn(3, 40)
    rows[place, 5] = value
    basis = orthonormal_rows(rows)
    assert basis[:place].isfinite().all() and basis[place:].isnan().all()
    out, residual = torch.empty(40, 9), drawn(40, 9)
    subtract_product(basis, drawn(3, 9), residual, out)
    assert out.isnan().all() and not residual.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("rank", "rows", "columns"), [(1, 7, 5), (4, 333, 200), (16, 512, 1031)])
def test_a_gpu_gets_the_bits_of_a_cpu(rank, rows, columns):
    left, right, residual = drawn(rank, rows), drawn(rank, columns, seed=1), drawn(rows, columns, seed=2)
    results = []
    for device in ("cpu", "cuda"):
        basis, left_over = orthonormal_rows(left.to(device)), residual.to(device, copy=True)
        out = torch.empty_like(left_over)
        subtract_product(basis, right.to(device), left_over, out)
        results.append([tensor.cpu() for tensor in (basis, left_over, out)])
    assert all(torch.equal(cpu, gpu) for cpu, gpu in zip(*results, strict=True))


@settings(max_examples=30, deadline=None)
@given(rank=st.integers(1, 8), rows=st.integers(1, 80), columns=st.integers(1, 3000))
def test_the_product_is_written_and_subtracted(rank, rows, columns):
    left, right, residual = drawn(rank, rows), drawn(rank, columns, seed=1), drawn(rows, columns, seed=2)
    before, out = residual.clone(), torch.empty(rows, columns)
    subtract_product(left, right, residual, out)
    expected = torch.zeros(rows, columns)
    for a, b in zip(left, right, strict=True):  # in this order, each operation rounded once
        expected = expected + a[:, None] * b
    assert torch.equal(out, expected) and torch.equal(residual, before - out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_rounding_to_the_gradients_dtype_loses_stays_in_the_residual(dtype):
    residual, out = drawn(30, 40), torch.empty(30, 40, dtype=dtype)
    before = residual.clone()
    subtract_product(drawn(2, 30), drawn(2, 40), residual, out)
    assert torch.allclose(residual + out.float(), before, atol=1e-6)


def test_factors_are_float32_under_another_default_dtype():
    piece = Piece(0, 0, 0)
    torch.set_default_dtype(torch.float64)
    try:
        memory = MatrixMemory(Matrix("weight", 6, 5, piece, piece), 2, torch.device("cpu"))
        assert memory.first_factor(drawn(6, 5).to(torch.float32)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_rows_have_length_1_and_spare_ones_replace_zero_and_nan():
    spare, rows = start_rows(4, 30, seed=3), drawn(4, 30)
    rows[1], rows[2, 4], rows[3] = 0.0, float("nan"), rows[3] * 1e-38
    units = unit_rows(rows, spare)
    assert torch.allclose(torch.linalg.vector_norm(units, dim=1), torch.ones(4))
    assert torch.equal(units[1:3], spare[1:3]) and not torch.equal(units[0], spare[0])


def test_matrices_are_sent_as_factors_where_that_halves_them_at_least():
    assert LowRank(4).fits(16, 16) and not LowRank(4).fits(15, 16)
    assert not LowRank(1).fits(0, 10) and not LowRank(1).fits(1, 1000)


def parameters() -> list[tuple[str, nn.Parameter]]:
    shapes = {"a": (40, 60), "b": (60,), "conv": (16, 8, 3, 3), "empty": (0, 9), "small": (3, 3), "c": (50, 20)}
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    named.append(("turned", nn.Parameter(torch.zeros(30, 70).t())))
    named.append(("last", nn.Parameter(torch.zeros(16, 8, 3, 3).to(memory_format=torch.channels_last))))
    named.append(("brain", nn.Parameter(torch.zeros(30, 40, dtype=torch.bfloat16))))
    named.append(("complex", nn.Parameter(torch.zeros(30, 40, dtype=torch.complex64))))
    return named


@pytest.mark.parametrize("segment_numel", [1, 3000, 1 << 20])
def test_matrices_are_whole_and_factors_do_not_overlap(segment_numel):
    named = parameters()
    layout = MatrixLayout(named, LowRank(2), 0, segment_numel)
    shapes = {}
    for index, group in layout.groups.items():
        assert layout.segments[index].numel == sum(m.rows * m.columns for m in group.matrices.values())
        assert len(group.matrices) == 1 or layout.segments[index].numel <= segment_numel
        for side, sizes in (("left", "rows"), ("right", "columns")):
            end = 0
            for matrix in group.matrices.values():
                piece = getattr(matrix, side)
                assert piece.offset == end and piece.numel == 2 * getattr(matrix, sizes)
                end += piece.numel + -piece.numel % PARAMETER_ALIGN
            assert getattr(group, side).numel == end
        shapes |= {m.name: (m.rows, m.columns) for m in group.matrices.values()}
    expected = {"a": (40, 60), "c": (50, 20), "conv": (16, 72), "turned": (30, 70), "last": (16, 72), "brain": (30, 40)}
    assert shapes == expected
    sent = [s.index for s in layout.factor_segments] + [
        s.index for s in layout.segments if s.index not in layout.groups
    ]
    assert len(set(sent)) == len(sent)  # tags of messages follow from it


def test_every_gradient_completes_one_segment():
    named = parameters()
    layout = MatrixLayout(named, LowRank(2), 0, 3000)
    collector, filled = GradientCollector(layout), []
    for _, p in reversed(named):
        gradient = torch.zeros(p.numel() * (2 if p.is_complex() else 1))
        filled += collector.add(p, gradient)
    assert sorted(one.segment.index for one in filled) == [segment.index for segment in layout.segments]
    assert all(isinstance(one, FilledSegment) for one in filled) and collector.end_step() == []


def test_small_gradients_are_not_sent_as_factors_and_the_digest_is_of_the_layout():
    named = parameters()
    layout = MatrixLayout(named, LowRank(2), 2000, 3000)
    assert {m.name for g in layout.groups.values() for m in g.matrices.values()} == {"a", "turned"}
    digests = {MatrixLayout(named, LowRank(2), *numels).digest() for numels in ((0, 1), (0, 3000), (2000, 3000))}
    assert len(digests) == 3
