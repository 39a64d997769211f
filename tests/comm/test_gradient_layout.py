"""Which gradient values are sent together, whatever DDP's buckets are."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shrinkpoint.comm.gradient_layout import PARAMETER_ALIGN, GradientCollector, GradientLayout, is_dense
from shrinkpoint.errors import PolicyError


def named(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{at}", nn.Parameter(torch.zeros(size, dtype=dtype))) for at, size in enumerate(sizes)]


def gradients_of(parameters: list[tuple[str, nn.Parameter]]) -> dict[int, torch.Tensor]:
    values = torch.arange(1.0, 1 + sum(p.numel() for _, p in parameters))
    parts = values.split([p.numel() for _, p in parameters])
    return {id(p): part.clone() for (_, p), part in zip(parameters, parts, strict=True)}


@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=12),
    segment_numel=st.integers(1, 900),
    min_numel=st.integers(0, 100),
    order=st.randoms(use_true_random=False),
)
def test_every_value_is_in_one_segment_and_comes_back_in_whatever_order_gradients_come(
    sizes, segment_numel, min_numel, order
):
    parameters = named(*sizes)
    layout = GradientLayout(parameters, min_numel, segment_numel)
    assert all(segment.numel <= segment_numel + PARAMETER_ALIGN for segment in layout.segments)
    collector, gradients = GradientCollector(layout), gradients_of(parameters)
    before = {key: gradient.clone() for key, gradient in gradients.items()}
    segments = {}
    for _, parameter in order.sample(parameters, len(parameters)):
        for filled in collector.add(parameter, gradients[id(parameter)]):
            flat = torch.full((filled.segment.numel + 5,), torch.nan)
            filled.copy_to(flat)
            segments[filled.segment.index] = flat
            filled.copy_from(-flat)
    assert sorted(segments) == [segment.index for segment in layout.segments]
    assert collector.end_step() == []
    assert all(torch.equal(gradients[key], -value) for key, value in before.items())
    sent = torch.cat([flat[flat != 0] for flat in segments.values()] or [torch.empty(0)])
    assert sorted(sent.tolist()) == sorted(torch.cat([*before.values()]).tolist())


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    order=st.permutations(range(6)),
    gap=st.integers(0, 1),
    count=st.integers(1, 5),
)
def test_rows_are_the_values_of_a_segment_and_their_averages_come_back_whatever_lies_where(sizes, order, gap, count):
    parameters = named(*sizes)
    collector = GradientCollector(GradientLayout(parameters, 0, 1 << 20))
    # a buffer with the gradients in another order, and with a gap or without
    buffer, end, filled = torch.arange(1.0, 2000.0), 0, None
    places = [place for place in order if place < len(sizes)]
    gradients = {}
    for place in places:
        gradients[place] = buffer[end : end + sizes[place]]
        end += sizes[place] + gap
    for place, gradient in gradients.items():
        filled = next(collector.add(parameters[place][1], gradient), filled)
    length = -(-filled.segment.numel // count)
    scratch = torch.full((count, length), torch.nan)
    expected, before = torch.full((count * length,), torch.nan), {at: one.clone() for at, one in gradients.items()}
    filled.copy_to(expected)
    rows = filled.read_rows(scratch)
    assert torch.equal(torch.cat(rows), expected)
    filled.write_rows(
        scratch, lambda targets: [target.copy_(row.neg()) for target, row in zip(targets, rows, strict=True)]
    )
    assert all(torch.equal(gradient, -before[at]) for at, gradient in gradients.items())


def test_a_row_within_gradients_that_follow_each_other_in_memory_is_not_copied():
    parameters = named(128, 64, 256)
    buffer = torch.arange(1.0, 449.0)
    collector = GradientCollector(GradientLayout(parameters, 0, 1 << 20))
    last, middle, first = buffer[:256], buffer[256:320], buffer[320:]  # as a backward pass gives them
    [filled] = [
        one
        for (_, parameter), gradient in zip(parameters, (first, middle, last), strict=True)
        for one in collector.add(parameter, gradient)
    ]
    scratch = torch.zeros(7, 64)
    rows = filled.read_rows(scratch)
    assert [row.data_ptr() for row in rows] == [buffer[64 * at :].data_ptr() for at in range(7)]
    rows = filled.read_rows(torch.zeros(2, 256))  # the second one goes beyond the end
    assert rows[0].data_ptr() == buffer.data_ptr() and torch.equal(rows[1][192:], torch.zeros(64))


def test_small_parameters_and_other_dtypes_have_segments_of_their_own():
    parameters = [*named(100, 1000), ("half", nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)))]
    layout = GradientLayout(parameters, 200, 1 << 20)
    places = {name: [segment.is_exact for segment, _ in layout.pieces(p)] for name, p in parameters}
    assert places == {"p0": [True], "p1": [False], "half": [False]}
    assert len(layout.segments) == 3


def test_the_digest_tells_layouts_apart():
    layouts = [named(64, 128), named(128, 64), named(64, 128, 1)]
    digests = [GradientLayout(parameters, 0, 100).digest() for parameters in layouts]
    digests += [GradientLayout(named(64, 128), 0, 200).digest(), GradientLayout(named(64, 128), 65, 100).digest()]
    assert len(set(digests)) == 5
    assert GradientLayout(named(64, 128), 0, 100).digest() == digests[0]


def test_what_is_missing_or_unknown_is_named():
    parameters = named(10, 20)
    collector = GradientCollector(GradientLayout(parameters, 0, 100))
    list(collector.add(parameters[0][1], torch.zeros(10)))
    assert collector.end_step() == ["p1"]
    with pytest.raises(PolicyError, match=r"shape \(7,\)"):
        list(collector.add(nn.Parameter(torch.zeros(7)), torch.zeros(7)))


@pytest.mark.parametrize("shape", [(), (3,), (1, 5, 1), (2, 3, 4), (0, 5), (4, 3, 1, 1), (4, 3, 5, 5)])
def test_tensors_that_fill_their_memory_are_dense_in_any_order_of_axes(shape):
    tensor = torch.zeros(shape)
    assert all(is_dense(tensor.permute(axes)) for axes in itertools.permutations(range(len(shape))))
    assert len(shape) < 4 or is_dense(tensor.to(memory_format=torch.channels_last))


def test_tensors_with_gaps_or_with_values_that_share_memory_are_not_dense():
    whole = torch.zeros(4, 6)
    assert not any(
        is_dense(part) for part in (whole[:, :3], whole[0, ::2], whole.t()[:3], torch.zeros(3, 1).expand(3, 2))
    )
