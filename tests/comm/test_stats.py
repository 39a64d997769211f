"""What a link says of itself is what happened."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.comm_links import STATEFUL, STATELESS, cross, ends

from shrinkpoint.comm import LinkStats, parse


def test_bytes_and_messages_are_counted_at_both_ends():
    sender, receiver = ends("bf16")
    for rows in (3, 5):
        cross(sender, receiver, torch.ones(rows, 10))
    for ledger in (sender.stats, receiver.stats):
        assert (ledger.messages, ledger.raw_bytes, ledger.wire_bytes, ledger.ratio) == (2, 320, 160, 2.0)
    assert sender.stats.encode_seconds > 0 == sender.stats.decode_seconds
    assert receiver.stats.decode_seconds > 0 == receiver.stats.encode_seconds


def test_the_error_is_that_of_the_sampled_messages():
    sender, receiver = ends("top50:tensor", sample_every=2)
    for number in range(5):
        x = torch.tensor([3.0, 4.0]) if number % 2 == 0 else torch.tensor([0.0, 1.0])
        cross(sender, receiver, x)
    assert sender.stats.relative_error == pytest.approx(3 / 5)
    assert receiver.stats.relative_error is None
    silent, other = ends("top50", sample_every=0)
    cross(silent, other, torch.ones(4))
    assert silent.stats.relative_error is None


def test_messages_that_are_not_finite_or_all_zero_do_not_spoil_the_error():
    sender, receiver = ends("top50:tensor", sample_every=1)
    for x in ([3.0, 4.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]):
        cross(sender, receiver, torch.tensor(x))
    assert sender.stats.relative_error == pytest.approx(3 / 5)
    assert sender.stats.nonfinite == 2


@pytest.mark.parametrize("spec", [*STATELESS, *(spec for spec in STATEFUL if not spec.startswith("aq"))])
def test_values_that_are_not_finite_are_counted_in_every_message(spec):
    for dtype in [torch.float32, torch.bfloat16, torch.float64]:
        sender, receiver = ends(spec)
        for count in (0, 3, 0, 70, 1):  # but for the first these messages are not sampled
            x = torch.linspace(-2, 3, 260).view(2, 130).to(dtype)
            x.view(-1)[::3][:count] = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(30)[:count].to(dtype)
            before = sender.stats.nonfinite
            cross(sender, receiver, x)
            assert sender.stats.nonfinite - before == count


@pytest.mark.parametrize("spec", ["q4:64", "q4", "q3:row:dither", "n4:64", "block4:32", "h64(q4:64)", "top10"])
def test_finite_values_are_proven_so_by_the_message(spec):
    compressor, x = parse(spec), torch.linspace(-2, 3, 260).view(2, 130)
    assert compressor.proves_finite(compressor.encode(x), x.shape, x.dtype)


def test_large_finite_values_are_not_counted():
    sender, receiver = ends("q4:64")
    cross(sender, receiver, torch.tensor([3e38, -3e38]).repeat(64))  # their range exceeds float32: they decode to nan
    assert sender.stats.nonfinite == 0


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 7.11), (torch.bfloat16, 3.56), (torch.float64, 14.22)])
def test_the_ratio_is_of_the_bytes_that_the_tensor_has_in_its_dtype(dtype, ratio):
    sender, receiver = ends("q4:64")
    cross(sender, receiver, torch.linspace(-1, 1, 1 << 14).to(dtype))
    assert sender.stats.ratio == receiver.stats.ratio == pytest.approx(ratio, abs=0.01)


def test_an_empty_account():
    ledger = LinkStats()
    assert ledger.ratio == 1 and ledger.relative_error is None and ledger.nonfinite == 0


def test_it_is_json_and_both_ends_make_one():
    sender, receiver = ends("q4:64", sample_every=1)
    cross(sender, receiver, torch.arange(64.0))
    both = sender.stats.merged_with(receiver.stats)
    assert both.encode_seconds == sender.stats.encode_seconds and both.decode_seconds == receiver.stats.decode_seconds
    assert both.messages == 1 and sender.stats.decode_seconds == 0
    words = json.loads(json.dumps(both.as_dict()))
    assert words["ratio"] == both.ratio and words["relative_error"] == both.relative_error > 0
