"""Positions come back from as many bytes as a formula says, and bytes that are no positions are refused."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.strategies import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint.comm.compressors.index_coding import IndexCode, index_code
from shrinkpoint.errors import MismatchError

CHOSEN = st.integers(1, 700).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1)))


def ordered(places: set[int]) -> Tensor:
    return torch.tensor(sorted(places), dtype=torch.int64)


def all_codes(n: int, k: int) -> list[IndexCode]:
    """Every code that there is, the best or not."""
    full = max(1, (n - 1).bit_length())
    splits = [("split", w, (k * w + 7) // 8 + (k + (n - 1 >> w) + 7) // 8) for w in range(1, full + 1)]
    found = [("bitmap", 1, (n + 7) // 8), ("packed", full, (k * full + 7) // 8), *splits]
    return [IndexCode(form, n, k, width, size) for form, width, size in found]


@settings(deadline=None, max_examples=75)
@given(CHOSEN)
def test_positions_come_back_from_the_same_bytes_by_both_ways_of_computing(drawn):
    n, chosen = drawn
    places = ordered(chosen)
    code = index_code(n, len(chosen))
    data = code.encode(places)
    assert data.numel() == code.size and bits(data) == bits(code.encode_torch(places))
    assert torch.equal(code.decode(data), places) and torch.equal(code.decode_torch(data), places)


@settings(deadline=None, max_examples=30)
@given(CHOSEN)
def test_every_form_and_width_reads_what_it_wrote(drawn):
    n, chosen = drawn
    places = ordered(chosen)
    for code in all_codes(n, len(chosen)):
        data = code.encode(places)
        assert bits(data) == bits(code.encode_torch(places))
        assert torch.equal(code.decode(data), places) and torch.equal(code.decode_torch(data), places)


@settings(deadline=None, max_examples=75)
@given(CHOSEN, st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), min_size=1, max_size=4), st.data())
def test_damaged_bytes_are_other_positions_or_refused_by_both_alike(drawn, damage, data):
    n, chosen = drawn
    code = data.draw(st.sampled_from(all_codes(n, len(chosen))))
    wrong = code.encode(ordered(chosen))
    for place, change in damage:
        wrong[place % code.size] ^= change
    answers = []
    for decode in (code.decode, code.decode_torch):
        try:
            answers.append(decode(wrong).tolist())
        except MismatchError:
            answers.append(None)
    assert answers[0] == answers[1]
    if answers[0] is not None:
        assert answers[0] == sorted(set(answers[0])) and len(answers[0]) == len(chosen)
        assert answers[0][0] >= 0 and answers[0][-1] < n


@pytest.mark.parametrize("fill", [0, 255])
def test_bytes_of_too_few_or_too_many_positions_are_refused(fill):
    for form, width, size in (("bitmap", 1, 128), ("split", 3, 58), ("packed", 10, 150)):
        code = IndexCode(form, 1024, {"split": 100}.get(form, 120), width, size if form != "split" else 38 + 29)
        data = torch.full((code.size,), fill, dtype=torch.uint8)
        for decode in (code.decode, code.decode_torch):
            with pytest.raises(MismatchError, match=f"expected {code.k} ascending positions below 1024"):
                decode(data)


def test_another_number_of_bytes_is_refused():
    code = index_code(1000, 100)
    data = code.encode(torch.arange(100))
    for wrong in (data[:-1], torch.cat([data, data[:1]]), data[:0]):
        with pytest.raises(MismatchError, match=f"{wrong.numel()} bytes; expected 100 ascending"):
            code.decode(wrong)


def test_positions_out_of_order_or_range_are_not_written():
    for wrong in ([3, 2, 5], [1, 1, 2], [-1, 2, 3], [1, 2, 100]):
        for code in all_codes(100, 3):
            with pytest.raises(MismatchError):
                code.encode(torch.tensor(wrong))


def test_the_shortest_code_is_used():
    for n in (1, 2, 9, 100, 1000, 65536):
        for k in {1, 2, n // 50, n // 10, n // 2, n - 1} - {0, n}:
            if 0 < k < n:
                assert index_code(n, k).size == min(code.size for code in all_codes(n, k))
        assert index_code(n, n).size == 0


def test_positions_of_large_tensors_come_back():
    n = (1 << 41) + 5
    for k in (1, 2, 40):
        places = torch.arange(k) * (n // k - 3) + 2
        places[-1] = n - 1
        code = index_code(n, k)
        data = code.encode(places)
        assert code.form in ("packed", "split") and bits(data) == bits(code.encode_torch(places))
        assert torch.equal(code.decode(data), places) and torch.equal(code.decode_torch(data), places)


def test_bits_for_each_position_are_those_of_the_table_and_near_the_entropy():
    n = 65536
    rows = [line.split() for line in (IndexCode.__doc__ or "").splitlines() if "%  " in line]
    assert [row[0] for row in rows] == ["50%", "30%", "20%", "10%", "5%", "2%"]
    for row in rows:
        k = math.ceil(n * int(row[0][:-1]) / 100)
        code = index_code(n, k)
        found = code.size * 8 / k
        entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k
        assert row[1] == code.form and row[-1] == f"{found:.2f}" and entropy < found < entropy + 0.65
        assert code.form == "bitmap" or row[2] == str(code.width)
