"""Records decoded side by side: the same tensors in the same order as one by one, and the same refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.round_trip import Loop, write
from helpers.strategies import bits, difference
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint._native import xxh3_128
from shrinkpoint.codec.parallel import decode_all
from shrinkpoint.errors import CorruptError, FormatError
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

Case = list[tuple[Any, list[str], list[int]]]  # recipe, names of tensors, ordinals of the tensors it needs


def record(recipe: Any, names: Sequence[str], value: int) -> EncodedRecord:
    data = b"".join(torch.full((3,), float(value)).numpy().tobytes() for _ in names)
    infos = tuple(TensorInfo(name, (3,), "F32") for name in names)
    return EncodedRecord(f"~{names[0]}", infos, recipe, {"values": data}, xxh3_128(data))


def decoded(records: Sequence[EncodedRecord], threads: int) -> dict[str, torch.Tensor]:
    recipes = [(one.recipe, len(one.infos), 12 * len(one.infos)) for one in records]
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
@pytest.mark.parametrize(
    "recipe",
    [
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
    ],
    ids=str,
)
def test_forged_recipes_are_refused_whatever_the_threads(recipe, threads):
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
