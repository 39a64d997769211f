"""A damaged or forged record gives an error of our tree or the right values: never wrong ones, never a crash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from coded import Loop, Written, stages, write
from strategies import bits

from shrinkpoint.codec import Reference, decode
from shrinkpoint.errors import ChainError, CorruptError, FormatError, TruncatedError
from shrinkpoint.record import Encoded, Role, TensorInfo

JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 9, 23, 31, 63, 64, 255, 256, 4095, 4096, 2**31, 2**32, 2**64, 10**30, -(2**63),
    0.0, 1.5, 1e300, float("inf"), "", "level", "delta", "planes", "none", "base", "tap", "adam", "square", "moment1",
    "__class__", "LEVEL", [], [[]], [0], [[0, 0, 1]], [[0, 1, 3]], [[0, 0, 1 << 20]], [[5, -1, 6]], [1.0] * 4,
    [float("inf")] * 4, {}, {"tokens": "delta"},
]  # fmt: skip
RUN_FIELDS = [
    "tokens", "predictor", "companion", "moments", "factors", "fine", "shift", "sign", "bias", "top", "parameters",
    "chunk", "more",
]  # fmt: skip


@cache
def delta() -> Written:
    """A delta one step after its parent, with a record of every kind."""
    loop = Loop()
    before, after = loop.steps(3), loop.steps(1)
    generator = torch.Generator().manual_seed(7)
    image = torch.randn(40, 30, 1, 1, generator=generator) * (1 + 1e-3 * torch.randn(40, 30, 3, 3, generator=generator))
    for state, n in ((before, 0), (after, 1)):
        state["frozen"], state["counts"] = torch.arange(300.0), torch.arange(n, 2000 + n)
        state["images"] = {"x.weight": image[: 38 + 2 * n]}
        state["mask"] = torch.arange(4000) % (3 + n) == 0
        state["noise"] = torch.randint(0, 256, (500,), generator=generator, dtype=torch.uint8)
        state["half"] = {name: x.bfloat16() for name, x in state["model"].items()}
    return write(after, write(before))


def records() -> list[tuple[Encoded, dict[str, torch.Tensor]]]:
    return list(stages(delta()))


def right(record: Encoded, decoded: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bits(x) for name, x in decode(record, decoded, delta().parent, threads=1).tensors.items()}


def hold(record: Encoded, decoded: dict[str, torch.Tensor], expected: dict[str, bytes]) -> type | None:
    """Decode; the error's type, or None where the right values came."""
    try:
        found = decode(record, decoded, delta().parent, threads=1).tensors
    except (FormatError, ChainError) as error:
        return type(error)
    assert {name: bits(x) for name, x in found.items()} == expected, record.recipe
    return None


def test_the_records_under_test_are_of_every_kind():
    recipes = [record.recipe for record, _ in records()]
    kinds = {recipe["kind"] for recipe in recipes}
    runs = [run for recipe in recipes for run in recipe.get("runs", [])]
    assert kinds == {"plain", "same", "copy", "coded"}
    assert {run["tokens"] for run in runs} == {"level", "delta", "planes"}
    assert {"adam", "square", "base"} <= {run.get("predictor") for run in runs}
    assert any(recipe.get("taps", 1) > 1 for recipe in recipes)


def forged(recipe: Any) -> Iterator[Any]:
    """The recipe with each of its fields replaced by each piece of junk."""
    yield from JUNK
    for key in ("kind", "runs", "taps", "base", "moments", "of", "more"):
        yield from ({**recipe, key: junk} for junk in JUNK)
    for index in range(len(recipe.get("runs", []))):
        for key in RUN_FIELDS:
            for junk in JUNK:
                runs = [dict(run) for run in recipe["runs"]]
                runs[index][key] = junk
                yield {**recipe, "runs": runs}


def test_forged_recipes_are_refused_or_harmless():
    for record, decoded in records():
        expected = right(record, decoded)
        refused = [hold(replace(record, recipe=recipe), decoded, expected) for recipe in forged(record.recipe)]
        assert refused.count(None) < len(refused) / 2


def test_flipped_bits_are_found():
    """`decode` on its own, without the container's digests; a flip that changes no value may pass."""
    chance = random.Random(0)
    for record, decoded in records():
        expected = right(record, decoded)
        for part, data in record.parts.items():
            places = range(8 * len(data)) if len(data) < 40 else chance.sample(range(8 * len(data)), 150)
            for place in places:
                damaged = bytearray(data)
                damaged[place // 8] ^= 1 << place % 8
                hold(replace(record, parts={**record.parts, part: bytes(damaged)}), decoded, expected)


def test_shortened_and_lengthened_parts_are_refused():
    for record, decoded in records():
        for part, data in record.parts.items():
            whole = bytes(data)
            for length in {*range(min(len(whole), 60)), len(whole) // 2, *range(max(0, len(whole) - 40), len(whole))}:
                cut = replace(record, parts={**record.parts, part: whole[:length]})
                assert hold(cut, decoded, {}) is not None, (record.name, part, length)
            assert hold(replace(record, parts={**record.parts, part: whole + b"\0"}), decoded, {}) is not None


def test_a_record_without_its_parts_is_corrupt():
    for record, decoded in records():
        if record.parts:
            for parts in ({}, {"other": b""}):
                with pytest.raises(CorruptError):
                    decode(replace(record, parts=parts), decoded, delta().parent)


def test_a_record_whose_context_is_missing_is_refused():
    for record, decoded in records():
        expected = right(record, decoded)
        needy = "moments" in record.recipe or "of" in record.recipe
        assert hold(record, {}, expected) == (CorruptError if needy else None)


def test_forged_shapes_and_dtypes_are_refused_without_taking_memory_for_them():
    for record, decoded in records():
        info = record.infos[0]
        for shape in ((), (0,), (1 << 40,), (1 << 20, 1 << 20), (1, *info.shape), (*info.shape, 3), info.shape[::-1]):
            for dtype in ("F32", "U8", "C128", "F4_X2", info.dtype):
                other = TensorInfo(info.name, shape, dtype, Role.OTHER)
                if (shape, dtype) != (info.shape, info.dtype):
                    try:
                        decode(replace(record, infos=(other, *record.infos[1:])), decoded, delta().parent)
                    except (FormatError, ChainError):
                        continue
                    assert record.recipe == {"kind": "plain"} or other.nbytes == info.nbytes, (record.name, other)


def test_a_missing_or_wrong_parent_is_a_chain_error():
    parent = delta().parent
    assert parent is not None
    moved = Reference({name: x + 1 if x.dtype != torch.bool else ~x for name, x in parent.tensors.items()})
    renamed = Reference({f"{name}!": x for name, x in parent.tensors.items()})
    reshaped = Reference({name: x.reshape(-1, 1) for name, x in parent.tensors.items()})
    retyped = Reference({name: x.to(torch.float64) for name, x in parent.tensors.items()})
    needy = [(record, decoded) for record, decoded in records() if record.base is not None]
    assert len(needy) > 4
    for record, decoded in needy:
        for wrong in (None, Reference({}), moved, renamed, reshaped, retyped):
            with pytest.raises(ChainError) as caught:
                decode(record, decoded, wrong)
            assert record.base in caught.value.message


def test_records_without_a_base_need_no_parent():
    for record, decoded in records():
        if record.base is None and record.recipe["kind"] != "same":
            assert {name: bits(x) for name, x in decode(record, decoded, None).tensors.items()} == right(record, decoded)


def test_a_copy_is_cast_only_as_a_writer_casts():
    source = {"a": torch.arange(8.0), "c": torch.ones(8, dtype=torch.complex64), "i": torch.arange(8)}
    for ordinal, dtype in [(0, "I64"), (0, "F64"), (1, "F32"), (2, "F32"), (0, "F4_X2"), (0, "BOOL"), (3, "F32")]:
        record = Encoded("x", (TensorInfo("x", (8,), dtype),), {"kind": "copy", "of": [[ordinal, 0, 1]]}, {}, "0" * 32)
        with pytest.raises(CorruptError):
            decode(record, source, None)


def test_errors_name_the_file_and_the_record():
    for record, decoded in records():
        if record.parts:
            part = next(iter(record.parts))
            with pytest.raises((CorruptError, TruncatedError)) as caught:
                decode(replace(record, parts={**record.parts, part: b""}), decoded, delta().parent, where="a.file")
            assert "a.file" in caught.value.where and record.name in caught.value.where and caught.value.do
