"""Multiples of shared steps: what they lose, what is sent in float32, and messages that are damaged."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.parameters import each_value
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.comm import CompressorContext
from shrinkpoint.comm.compressors.base import SharedSteps
from shrinkpoint.comm.compressors.step_codes import (
    MAX_LEVEL,
    SMALLEST_ROOT,
    StepCodes,
    is_finite,
    message_level,
)
from shrinkpoint.errors import MismatchError, PolicyError

CODES = StepCodes(0.7)
SIZES = (1, 2, 63, 64, 1000, 70_000, 300_000)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def context(roots: Tensor, factor: float = 0.7, digest: int = 7) -> CompressorContext:
    return CompressorContext(steps=SharedSteps(roots, factor, digest))


def arrived(values: Tensor, steps: CompressorContext) -> Tensor:
    return CODES.decode(CODES.encode(values, steps), torch.empty_like(values), steps)


@pytest.mark.parametrize("numel", SIZES)
def test_error_is_at_most_half_a_step(numel):
    roots = normal(numel, 1).abs() + 0.01
    values = normal(numel) * roots
    loss = (arrived(values, context(roots)) - values).abs()
    assert bool((loss <= 0.35 * roots * (1 + 1e-5)).all())


def test_message_of_normal_values_has_the_bits_of_their_entropy():
    message = CODES.encode(normal(1 << 18), context(torch.ones(1 << 18)))
    assert 2.50 < 8 * message.numel() / (1 << 18) < 2.62  # the entropy is 2.56 bits
    assert message_level(message) == pytest.approx(1.12, abs=0.02)


@pytest.mark.parametrize("numel", SIZES)
def test_message_never_exceeds_the_size_that_a_receiver_posts(numel):
    for scale in (1e-3, 1.0, 40.0, 1e6, float("nan")):
        message = CODES.encode(normal(numel) * scale, context(torch.ones(numel)))
        assert message.numel() <= CODES.wire_bytes((numel,), torch.float32)


@pytest.mark.parametrize("outlier", [1e6, -1e30, float("inf"), float("-inf"), float("nan")])
def test_value_outside_of_the_codes_arrives_exactly(outlier):
    values, steps = normal(5000), context(torch.ones(5000))
    values[[17, 4321]] = outlier
    message = CODES.encode(values, steps)
    decoded = CODES.decode(message, torch.empty(5000), steps)
    assert bits(decoded[[17, 4321]]) == bits(values[[17, 4321]])
    assert message.numel() < 3000
    assert is_finite(message) == bool(values.isfinite().all())
    near = torch.ones(5000, dtype=torch.bool)
    near[[17, 4321]] = False
    assert float((decoded - values)[near].abs().max()) <= 0.351


def test_tensor_of_outliers_is_sent_in_float32():
    values, steps = normal(5000) * 65536, context(torch.ones(5000))
    assert bits(arrived(values, steps)) == bits(values)


def test_values_without_a_step_are_exact():
    roots = torch.full((40_000,), SMALLEST_ROOT)
    roots[20_000:] = 1.0
    values = normal(40_000)
    values[: 20_000 - 100] = 0.0
    steps = context(roots)
    message = CODES.encode(values, steps)
    decoded = CODES.decode(message, torch.empty(40_000), steps)
    assert bits(decoded[:20_000]) == bits(values[:20_000])
    assert message.numel() < 10_000
    # values of which nothing was known say nothing about the scale of the steps
    assert message_level(message) == pytest.approx(0.56, abs=0.02)
    assert message_level(CODES.encode(normal(64) * 1e9, context(torch.ones(64)))) == MAX_LEVEL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_get_the_float32_values_rounded_once(dtype):
    values, steps = normal(1000).to(dtype), context(torch.full((1000,), 0.3))
    wide = values.float()
    assert bits(arrived(values, steps)) == bits(arrived(wide, steps).to(dtype))


def test_decoding_ignores_what_is_behind_a_message():
    values, steps = normal(1000), context(torch.ones(1000))
    message = CODES.encode(values, steps)
    posted = torch.full((CODES.wire_bytes((1000,), torch.float32),), 255, dtype=torch.uint8)
    posted[: message.numel()] = message
    assert bits(CODES.decode(posted, torch.empty(1000), steps)) == bits(arrived(values, steps))


def test_other_steps_are_a_mismatch():
    message = CODES.encode(normal(100), context(torch.ones(100)))
    with pytest.raises(MismatchError, match="steps of another second moment"):
        CODES.decode(message, torch.empty(100), context(torch.ones(100), digest=8))


def test_without_steps_nothing_is_encoded():
    with pytest.raises(PolicyError, match="no steps"):
        CODES.encode(normal(10))
    with pytest.raises(PolicyError, match="9 steps for 10 values"):
        CODES.encode(normal(10), context(torch.ones(9)))


MESSAGES = {
    "codes": normal(3000),
    "outside": torch.cat([normal(2990), torch.full((10,), 1e5)]),
    "raw": normal(3000) * 1e6,
}


@pytest.mark.parametrize(("kind", "size"), each_value(list(MESSAGES), [0, 3, 23, 24, 40, 200]))
def test_truncated_message_is_a_mismatch(kind, size):
    steps = context(torch.ones(3000))
    message = CODES.encode(MESSAGES[kind], steps)
    with pytest.raises(MismatchError, match="compressor v, message"):
        CODES.decode(message[:size], torch.empty(3000), steps)


@settings(max_examples=300)
@given(st.sampled_from(list(MESSAGES)), st.integers(0, 1 << 30))
def test_damaged_message_is_a_mismatch_or_decodes_to_something(kind, seed):
    steps, chance = context(torch.ones(3000)), random.Random(seed)
    message = CODES.encode(MESSAGES[kind], steps).clone()
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(24 if chance.random() < 0.5 else message.numel())
        message[place] = chance.randrange(256)
    try:
        CODES.decode(message, torch.empty(3000), steps)
        message_level(message)
    except MismatchError:
        pass
