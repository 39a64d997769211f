"""Tables of large records are made from a sample of their tiles; what the sample lacks still comes back bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference.cases import RUNS, Case, make

from shrinkpoint import _native

SAMPLED = {name: run for name, run in RUNS.items() if run.tokens in ("level", "delta")}
COUNT = 3 * 65536 + 1001  # every third tile is in the sample
TILE = 2048
each_run = pytest.mark.parametrize("run", SAMPLED.values(), ids=SAMPLED)


def with_outliers(case: Case, places: list[int], seed: int = 0) -> Case:
    """The same case with arbitrary bits at some places."""
    run, values = case.run, case.values.copy()
    bits = np.frombuffer(np.random.default_rng(seed).bytes(8 * len(places)), np.uint64)
    mask = (1 << (run.width - (0 if run.sign else 1))) - 1
    values[places] = (bits & np.uint64(mask)).astype(values.dtype) >> run.shift << run.shift
    return replace(case, values=values)


def assert_comes_back(case: Case) -> tuple[bytes, bytes]:
    side, codes = case.encode()
    np.testing.assert_array_equal(case.decode(side, codes), case.values)
    return side, codes


@each_run
def test_numbers_unlike_all_of_the_sample_come_back(run: Any) -> None:
    case = make(7, replace(run, chunk=50_000), COUNT)
    unsampled: NDArray[np.int64] = TILE + np.arange(0, TILE, 7)
    for places in ([TILE], [COUNT - 1], unsampled.tolist()):
        assert_comes_back(with_outliers(case, list(places)))


@each_run
def test_a_sample_of_one_number_comes_back(run: Any) -> None:
    case = make(8, run, COUNT, "constant")
    assert_comes_back(with_outliers(case, [TILE + 3, 2 * TILE + 5]))
    zeros = replace(case, values=np.zeros_like(case.values))
    assert_comes_back(zeros)
    assert_comes_back(with_outliers(zeros, [TILE + 3, COUNT - 1]))


@each_run
def test_threads_and_instruction_sets_change_no_byte(run: Any) -> None:
    case = with_outliers(make(9, replace(run, chunk=30_000), COUNT), [TILE + 1, 5 * TILE, COUNT - 2])
    alone = assert_comes_back(case)
    for threads in (2, 5):
        assert case.encode(threads=threads) == alone
    for most in (0, 1):
        _native._use_simd(most)
        assert case.encode() == alone


@each_run
def test_a_sample_costs_less_than_a_thousandth(run: Any) -> None:
    case = make(10, replace(run, chunk=COUNT), COUNT, moments=True)
    few = replace(case, values=case.values[: COUNT // 3], known=_first(case, COUNT // 3))
    sampled = sum(map(len, case.encode()))
    counted = sum(map(len, few.encode()))  # fewer than two samples: tables are made from all
    assert sampled < 3 * counted * 1.001 + 600


def _first(case: Case, count: int) -> Any:
    known = case.known
    fields = ("base", "moment1", "moment2", "moment1_base", "hint")
    return replace(known, **{name: None if (a := getattr(known, name)) is None else a[:count] for name in fields})


@pytest.mark.parametrize("threads", [1, 4])
def test_a_bit_that_is_not_stored_is_found_in_any_chunk(threads: int) -> None:
    for run, bits in ((replace(RUNS["level 64"], chunk=1000), 1 << 63), (replace(RUNS["delta 32"], chunk=1000), 1)):
        case = make(11, run, 70_001)
        for place in (0, 35_000, 70_000):
            values = case.values.copy()
            values[place] |= values.dtype.type(bits)
            with pytest.raises(_native.DropsBits, match="drops bits"):
                replace(case, values=values).encode(threads=threads)


def test_threads_that_wait_for_one_that_fails_pass_its_error_on() -> None:
    """Over and over: they wake up before it has told."""
    case = make(11, replace(RUNS["delta 32"], chunk=10), 200)
    values = case.values.copy()
    values[0] |= values.dtype.type(1)
    wrong = replace(case, values=values)
    for _ in range(2000):
        with pytest.raises(_native.DropsBits):
            wrong.encode(threads=4)
