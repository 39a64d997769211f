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
