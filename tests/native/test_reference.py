"""The native core writes and reads what docs/format.md says: slow readers written from that page agree with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.parameters import each_value
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import bits, planes, record, tokens
from reference.cases import KINDS, RUNS, Case, cases, codes, deltas, levels, make, seeds
from reference.run import Run

from shrinkpoint import _native

several = settings(deadline=None, max_examples=30)


def agree(case: Case) -> None:
    side, codes = case.encode()
    values = case.values.tolist()
    assert record.decode(case.run, side, codes, len(values), case.known, case.shapes) == values
    np.testing.assert_array_equal(case.decode(side, codes), case.values)


@several
@given(cases)
def test_the_reference_decodes_what_native_encoded(case: Case) -> None:
    agree(case)


@several
@given(deltas())
def test_the_reference_decodes_deltas(case: Case) -> None:
    agree(case)


@several
@given(levels())
def test_the_reference_decodes_levels(case: Case) -> None:
    agree(case)


@several
@given(codes())
def test_the_reference_decodes_codes(case: Case) -> None:
    agree(case)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_reference_decodes_every_kind_of_number(run: Run) -> None:
    for kind in KINDS:
        with_moments = run.tokens == "codes" or (run.tokens == "delta" and run.mantissa > 0)
        for moments in (False, True) if with_moments else (False,):
            agree(make(9, replace(run, chunk=200), 500, kind, moments=moments))


WIDE = [
    make(1, Run("delta", 16, 7, predictor="base", top=125), 32801, hint=True),
    make(2, Run("level", 32, 23, companion="base", fine=2, bias=480), 32768),
    make(3, Run("planes", 32), 8200, "normal"),
    make(4, Run("codes", 8, predictor="base"), 32801, moments=True),
]


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.run.tokens)
def test_the_reference_decodes_32_lanes(case: Case) -> None:
    agree(case)


@several
@given(cases, seeds)
def test_native_decodes_what_the_reference_encoded(case: Case, seed: int) -> None:
    case = replace(case, shapes=None)
    check_native_reads_the_reference(case, seed)


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.run.tokens)
def test_native_decodes_32_lanes_of_the_reference(case: Case) -> None:
    check_native_reads_the_reference(case, 4)


def check_native_reads_the_reference(case: Case, seed: int) -> None:
    random = np.random.default_rng(seed)
    all_tables = [(random.multinomial(4096 - 256, random.dirichlet(np.ones(256))) + 1).tolist() for _ in range(3)]
    context_map = random.integers(0, 3, case.run.contexts(case.known)).tolist()
    side, codes = record.encode(case.run, case.values.tolist(), case.known, context_map, all_tables)
    np.testing.assert_array_equal(case.decode(side, codes), case.values)


def test_a_table_of_one_symbol_costs_nothing() -> None:
    case = make(1, Run("delta", 32, 23, predictor="base"), 500, "constant")
    case = replace(case, known=replace(case.known, base=case.values.tolist()))
    table = [4096] + [0] * 255
    side, codes = record.encode(case.run, case.values.tolist(), case.known, [0] * 512, [table])
    assert len(codes) == 4 + 16 + 8
    np.testing.assert_array_equal(case.decode(side, codes), case.values)
    assert case.encode()[1] == codes


@several
@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 32))
def test_packed_bits_equal_the_reference(fields: list[int], width: int) -> None:
    packed = _native.pack_bits(np.array(fields, np.uint32), width)
    assert packed.tobytes() == bits.pack(fields, width)
    unpacked = bits.unpack(packed.tobytes(), len(fields), width)
    assert _native.unpack_bits(packed, len(fields), width).tolist() == unpacked


@several
@given(st.binary(max_size=600), st.integers(1, 8))
def test_planes_equal_the_reference(data: bytes, width: int) -> None:
    data = data[: len(data) // width * width]
    split = _native.split_planes(data, width).tobytes()
    assert split == planes.split(data, width)
    assert _native.join_planes(split, width).tobytes() == planes.join(split, width) == data


@several
@given(deltas())
def test_hints_equal_the_reference(case: Case) -> None:
    case = replace(case, run=replace(case.run, shift=0))
    others = np.roll(case.values, 1)
    pairs = zip(case.values.tolist(), others.tolist(), strict=True)
    expected = [tokens.hint(case.run, a, b) for a, b in pairs]
    assert _native.difference_classes(case.model(), case.values, others).tolist() == expected


@pytest.mark.parametrize(("companion", "fine"), each_value(["none", "base"], [22, 40, 52]))
def test_levels_beyond_32_bits_are_no_small_ones(fine: int, companion: str) -> None:
    levels = [(high << 32) + low for high in (0, 1, 3, 512) for low in (1, 127, 200)]
    values = np.array([level << (52 - fine) for level in levels if level < 1 << (11 + fine)], np.uint64)
    case = make(1, Run("level", 64, 52, fine=fine, companion=companion), values.size)
    case = replace(case, values=values)
    agree(replace(case, known=replace(case.known, base=values.tolist() if companion == "base" else None)))
