"""Whatever the size, the kind of numbers, the threads and the instruction set: the same bytes, and the numbers back."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from reference.cases import KINDS, RUNS, Case, cases, make
from reference.run import Run

from shrinkpoint import _native

each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def with_moments(run: Run) -> bool:
    return run.tokens == "codes" or (run.mantissa > 0 and run.tokens == "delta")


def round_trip(case: Case) -> tuple[bytes, bytes]:
    side, codes = case.encode()
    np.testing.assert_array_equal(case.decode(side, codes), case.values)
    return side, codes


@each_run
def test_every_size_comes_back(run: Run) -> None:
    for count in (*range(1, 71), *range(2047, 2050), *range(32767, 32770)):
        for chunk in (32, 64, 100, 262144) if count < 100 else (2000, 262144):
            round_trip(make(count, replace(run, chunk=chunk), count, hint=run.predictor == "base"))


@each_run
def test_every_kind_of_number_comes_back(run: Run) -> None:
    for kind in KINDS:
        round_trip(make(1, run, 5000, kind))


def test_a_chunk_of_the_largest_size_and_its_neighbours_come_back() -> None:
    for count in (262143, 262144, 262145):
        round_trip(make(count, RUNS["adam"], count))


@each_run
def test_threads_change_no_byte(run: Run) -> None:
    case = make(2, replace(run, chunk=5000), 64001)
    alone = case.encode(threads=1)
    for threads in (2, 3, 16):
        assert case.encode(threads=threads) == alone
        np.testing.assert_array_equal(case.decode(*alone, threads=threads), case.values)


@each_run
def test_instruction_sets_change_no_byte(run: Run) -> None:
    for kind in ["normal", "wild"]:
        case = make(3, replace(run, chunk=33000), 70001, kind, moments=with_moments(run))
        _native._use_simd(0)
        plain = case.encode()
        for most in (0, 1, 2):
            _native._use_simd(most)
            assert case.encode() == plain
            np.testing.assert_array_equal(case.decode(*plain), case.values)


@settings(deadline=None, max_examples=60)
@given(cases)
def test_instruction_sets_change_no_byte_of_small_records(case: Case) -> None:
    _native._use_simd(0)
    plain = case.encode()
    for most in (1, 2):
        _native._use_simd(most)
        assert case.encode() == plain
        np.testing.assert_array_equal(case.decode(*plain), case.values)


def test_factors_are_fitted_alike_by_every_instruction_set() -> None:
    case = replace(make(5, Run("level", 32, 23, fine=2, companion="moment1"), 65536 + 7), shapes=[(64, 1024), (1, 7)])
    written = []
    for most in (0, 1, 2):
        _native._use_simd(most)
        written.append(round_trip(case))
    assert written[0] == written[1] == written[2]


def test_a_measure_is_near_the_size() -> None:
    for run in RUNS.values():
        case = make(6, run, 50000)
        size = sum(len(part) for part in case.encode())
        assert _native.estimate_bits(case.model(), case.values, **case.arrays()) / 8 == pytest.approx(size, rel=0.02)


def test_other_threads_of_python_run_meanwhile() -> None:
    case = make(7, RUNS["square"], 1 << 20)
    model, arrays = case.model(), case.arrays()
    ticks, started, stop = [0], threading.Event(), threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            started.set()
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here on a thread runs only when another one lets go of the lock
    worker = threading.Thread(target=tick)
    try:
        worker.start()
        started.wait()
        before, out = ticks[0], np.zeros_like(case.values)
        for _ in range(100):  # a busy machine may give the other thread no processor meanwhile
            side, codes = _native.encode(model, case.values, **arrays)
            if ticks[0] - before > 10:
                break
        between = ticks[0]
        for _ in range(100):
            _native.decode(model, side, codes, out, **arrays)
            if ticks[0] - between > 10:
                break
        after = ticks[0]
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        worker.join()
    assert between - before > 10
    assert after - between > 10
