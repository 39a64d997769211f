"""Records decoded side by side: the same tensors in the same order as one by one, and the same refusals."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.processes import run_forked
from helpers.round_trip import Loop, write
from helpers.strategies import bits, difference
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint._native import xxh3_128
from shrinkpoint.codec.parallel import (
    MAX_AHEAD_BYTES,
    MIN_PARALLEL_BYTES,
    MIN_SHARED_BYTES,
    MIN_SHARED_DECODING,
    decode_all,
    map_ordered,
    share_out,
)
from shrinkpoint.errors import CorruptError, FormatError
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

Case = list[tuple[Any, list[str], list[int]]]  # recipe, names of tensors, ordinals of the tensors it needs


def record(recipe: Any, names: Sequence[str], value: int) -> EncodedRecord:
    data = b"".join(torch.full((3,), float(value)).numpy().tobytes() for _ in names)
    infos = tuple(TensorInfo(name, (3,), "F32") for name in names)
    return EncodedRecord(f"~{names[0]}", infos, recipe, {"values": data}, xxh3_128(data))


def decoded(records: Sequence[EncodedRecord], threads: int) -> dict[str, torch.Tensor]:
    recipes = [(one.recipe, len(one.infos), MIN_SHARED_DECODING) for one in records]
    return decode_all(recipes, records.__getitem__, None, threads=threads).tensors


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(0, 30)), max_size=12))
def test_copies_of_any_earlier_tensor_decode_whatever_the_threads(plan):
    """Each step stores some tensors, or copies one that came before."""
    records: list[EncodedRecord] = []
    values: list[int] = []
    for index, (count, source) in enumerate(plan):
        if source is None or not values:
            records.append(record({"kind": "plain"}, [f"{index}.{i}" for i in range(count)], index))
            values += [index] * count
        else:
            ordinal = source % len(values)
            records.append(record({"kind": "copy", "of": [[ordinal, 0, 1]]}, [f"{index}.0"], values[ordinal]))
            values.append(values[ordinal])
    for threads in (1, 2, 4):
        found = decoded(records, threads)
        assert list(found) == [info.name for one in records for info in one.infos]
        assert [x[0].item() for x in found.values()] == values


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_forged_recipes_are_refused_whatever_the_threads(threads):
    for recipe in [
        None,
        3,
        [],
        {},
        {"kind": "copy"},
        {"kind": "copy", "of": None},
        {"kind": "copy", "of": [[0, 0, -1]]},
        {"kind": "copy", "of": [[1, 0, 1]]},
        {"kind": "copy", "of": [[2, 0, 1]]},
        {"kind": "copy", "of": [[10**30, 0, 1]]},
        {"kind": "copy", "of": []},
        {"kind": "coded"},
        {"kind": "coded", "runs": [{}]},
        {"kind": "coded", "runs": [{"tokens": "planes"}], "moments": 5},
        {"kind": "coded", "runs": [{"tokens": "planes"}], "moments": [[[0, 0, 1]], [[9, 0, 1]]]},
        {"kind": "coded", "runs": [{"tokens": "planes"}]},
        {"kind": "unknown"},
    ]:
        good = [record({"kind": "plain"}, [name], 1) for name in "ab"]
        with pytest.raises(FormatError):
            decoded([good[0], record(recipe, ["x"], 1), good[1]], threads)


def test_no_records_are_no_tensors():
    assert decoded([], 1) == decoded([], 2) == {}


def test_the_first_damaged_record_is_the_one_that_is_named():
    bad = [
        EncodedRecord(f"r{i}", (TensorInfo(f"r{i}", (3,), "F32"),), {"kind": "plain"}, {"values": bytes(12)}, "0" * 32)
        for i in range(9)
    ]
    for threads in (1, 2):
        with pytest.raises(CorruptError, match="r0"):
            decoded(bad, threads)


def test_a_state_decodes_the_same_and_each_tensor_into_memory_of_its_own():
    loop = Loop()
    before = write(loop.steps(3))
    state = loop.steps(1)
    state["model"] = {name: x.clone() for name, x in state["model"].items()}
    state["more"] = {f"{i}": torch.full((i,), float(i)) for i in range(40)}
    written = write(state, before, threads=2)
    assert written.data == write(state, before, threads=1).data
    for threads in (1, 2, 4):
        back = written.read(threads=threads)
        assert difference(state, back) is None
        tensors = [*back["model"].values(), *back["more"].values()]
        kept = [bits(x) for x in tensors]
        for i, x in enumerate(tensors):
            x.fill_(7)
            assert [bits(y) for y in tensors[i + 1 :]] == kept[i + 1 :]
            assert x.data_ptr() % x.element_size() == 0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_results_come_in_order_whatever_finishes_first(workers):
    def late_if_even(index: int, threads: int) -> int:
        time.sleep(0.02 * (index % 2 == 0))
        return index

    assert [*map_ordered(late_if_even, [MIN_SHARED_BYTES] * 12, workers)] == [*range(12)]
    assert [*map_ordered(late_if_even, [], workers)] == []


def test_large_results_that_nobody_takes_are_not_made_ahead():
    begun = []

    def begin(index: int, threads: int) -> int:
        begun.append(index)
        return index

    results = map_ordered(begin, [MAX_AHEAD_BYTES] * 20, 2)
    for taken in range(1, 6):
        assert next(results) == taken - 1
        time.sleep(0.02)
        assert len(begun) <= taken + 3
    results.close()
    assert len(begun) < 20


def test_an_error_is_raised_in_its_turn_and_ends_the_work():
    begun = []

    def fail(index: int, threads: int) -> int:
        begun.append(index)
        if index == 2:
            raise KeyError(index)
        return index

    taken = []
    with pytest.raises(KeyError, match="2"):
        for result in map_ordered(fail, [MAX_AHEAD_BYTES] * 30, 2):
            taken.append(result)
    assert taken == [0, 1] and len(begun) < 30


def test_a_record_gets_all_threads_where_others_cannot_occupy_them():
    large = MIN_PARALLEL_BYTES
    assert share_out([large] * 4, 2) == (True, [1, 1, 1, 2])
    assert share_out([large // 2] * 4, 4) == (True, [1, 1, 1, 1])
    assert share_out([2 * MAX_AHEAD_BYTES, *[large] * 30], 2)[1][0] == 2
    assert share_out([large] * 2, 1) == (False, [1, 1])


def test_one_thread_takes_small_records_and_codes_a_large_one_among_them_on_all():
    def code(index: int, threads: int) -> tuple[int, int, bool]:
        return index, threads, threading.get_ident() == here

    here, sizes = threading.get_ident(), [9, MIN_PARALLEL_BYTES, *[9] * 8]
    assert [*map_ordered(code, sizes, 2)] == [(index, 2 if index == 1 else 1, True) for index in range(10)]
    assert not any(alone for _, _, alone in map_ordered(code, [MIN_SHARED_BYTES] * 10, 2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_forked_processes_compute_on_several_threads() -> None:
    """torch replaces its thread pool after a fork, which goes wrong where several threads call it first."""
    code = """
        import os, threading, torch
        from shrinkpoint.codec.parallel import map_ordered

        def join(index, threads):
            barrier.wait()  # so that all threads call torch at once
            return torch.cat([values, values])

        torch.set_num_threads(2)
        values, barrier = torch.ones(100_000), threading.Barrier(8)
        failed = 0
        for _ in range(12):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    list(map_ordered(join, [4_000_000] * 8, 8))
                    code = 0
                finally:
                    os._exit(code)
            failed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
        print(failed)
    """
    assert run_forked(code).strip() == "0"
