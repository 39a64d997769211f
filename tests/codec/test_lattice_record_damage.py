"""A damaged or forged record of points gives an error of our tree or the right values; no lie costs memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers.lattice_records import MOST_CODE, Made, codes_of, lattice_of, made, points_of, squares
from helpers.parameters import each_value
from helpers.recipe_values import RECIPE_VALUES, RUN_FIELDS
from helpers.strategies import bits

from shrinkpoint.codec.lattice import Lattice, LatticeTensor
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError, CorruptError, FormatError, TruncatedError
from shrinkpoint.tensors.info import TensorInfo

SIZES = struct.Struct("<IQII")
"""Bytes of the lattices, of the codes and of their side, and how many escapes; a part begins with them."""
JUNK: list[Any] = [
    *RECIPE_VALUES,
    *(7, 8, 24, 127, 128, 135, 136, 1024, 1025),  # ends of the fields of a lattice
    *("linear", "relative", "log", "LOG", "codes"),
    {"tokens": "codes", "predictor": "base"},
    *([1, 1, 1], [2, 2, 1], [2, 2, 2], [3, 2, 1], [2], [0, 2, 1], [2.0, 2, 1]),  # axes
]


def with_a_row_moved(points: LatticeTensor) -> LatticeTensor:
    rows = points.lattice.rows.clone()
    rows[-1] += 3
    return replace(points, lattice=replace(points.lattice, rows=rows))


@cache
def records() -> dict[str, Made]:
    """Of every law: alone, on a parent of its own lattices and of others, with several members, and with escapes."""
    shapes = {"a": (20, 30), "b": (70,), "c": ()}
    out = {}
    for law, step in (("linear", 1), ("log", 24)):
        before, now = (
            {name: points_of(law, shape, random=n, step=step, at=-40) for name, shape in shapes.items()} for n in (1, 2)
        )
        kept = {
            name: replace(one, lattice=replace(before[name].lattice, seed=0 if law == "log" else 5))
            for name, one in now.items()
        }
        parent = Reference({name: one.dequantize(torch.float32) for name, one in before.items()}, before)
        out |= {f"{law} alone": made(now), f"{law} on others": made(now, parent=Reference(parent.tensors))}
        out |= {f"{law} inherited": made(kept, parent=parent)}
        out |= {f"{law} moved": made({name: with_a_row_moved(one) for name, one in kept.items()}, parent=parent)}
    relative = {name: points_of("relative", shapes[name], seed=3) for name in "ab"}
    out["relative"] = made(relative, others=[squares(shapes[name], random=1) for name in "ab"])
    lattice = Lattice("linear", torch.tensor([0, 500, -400, 3], dtype=torch.int16), torch.zeros(9, dtype=torch.int16))
    stacked = {name: points_of("linear", (3, 4, 20), random=n, axes=2) for n, name in enumerate("ab")}
    out["stacked"] = made({**stacked, "c": points_of("linear", (30,))})
    out["escapes"] = made({"w": LatticeTensor(codes_of("linear", (4, 9), "far"), lattice)}, "BF16")
    return out


def hold(one: Made, **changed: Any) -> type | None:
    """Decode; the error's type, or None where the right values came."""
    try:
        found = decode(replace(one.encoded, **changed), one.decoded, one.parent, threads=1).tensors
    except (FormatError, ChainError) as error:
        return type(error)
    assert {name: bits(x) for name, x in found.items()} == {name: bits(x) for name, x in one.values.items()}, changed
    return None


def refusal(one: Made, data: bytes) -> type:
    """The error of a record with these bytes, whose digest a forger could have made to fit."""
    with pytest.raises(FormatError) as caught:
        decode(replace(one.encoded, parts={"points": data}), one.decoded, one.parent, threads=1)
    assert "digest" not in str(caught.value)
    return caught.type


def part(one: Made) -> bytes:
    return bytes(one.encoded.parts["points"])


def test_the_records_under_test_are_of_every_kind():
    recipes = {name: one.encoded.recipe for name, one in records().items()}
    said = {
        name: (one["law"], *filter(one.get, ("base", "inherited", "moved", "axes"))) for name, one in recipes.items()
    }
    assert said == {
        "linear alone": ("linear",),
        "linear on others": ("linear", "base"),
        "linear inherited": ("linear", "base", "inherited"),
        "linear moved": ("linear", "base", "moved"),
        "log alone": ("log",),
        "log on others": ("log", "base"),
        "log inherited": ("log", "base", "inherited"),
        "log moved": ("log", "base", "moved"),
        "relative": ("relative",),
        "stacked": ("linear", "axes"),
        "escapes": ("linear",),
    }
    assert all(hold(one) is None for one in records().values())
    assert SIZES.unpack(part(records()["escapes"])[:20])[3] > 30


def test_every_truncation_is_an_error():
    for one in records().values():
        whole = part(one)
        for length in range(len(whole)):
            assert hold(one, parts={"points": whole[:length]}) in (TruncatedError, CorruptError), length
        assert hold(one, parts={"points": whole + b"\0"}) is not None
        for parts in ({}, {"other": whole}):
            assert hold(one, parts=parts) is CorruptError


def test_flipped_bits_are_found():
    """`decode` on its own, without the container's digests; a flip that changes no value may pass."""
    for one in records().values():
        chance = random.Random(0)
        data = part(one)
        places = [*range(8 * 40), *chance.sample(range(8 * 40, 8 * len(data)), min(150, 8 * (len(data) - 40)))]
        found = []
        for place in places:
            damaged = bytearray(data)
            damaged[place // 8] ^= 1 << place % 8
            found.append(hold(one, parts={"points": bytes(damaged)}))
        assert found.count(None) < len(found) / 4  # BF16 has no use for a large code's last bit


def test_bytes_of_junk_are_errors():
    for one in records().values():
        chance = random.Random(1)
        data = part(one)
        for _ in range(60):
            start, length = chance.randrange(len(data)), chance.randrange(1, 30)
            hold(one, parts={"points": data[:start] + chance.randbytes(length) + data[start + length :]})
            assert hold(one, parts={"points": data[:20] + chance.randbytes(len(data) - 20)}) is not None


def test_forged_sizes_are_refused():
    for one in records().values():
        sizes = SIZES.unpack(part(one)[: SIZES.size])
        for index in range(4):
            for forged in (0, 1, sizes[index] + 1, sizes[index] - 1, 2**31, 2**32 - 1):
                changed = [*sizes[:index], forged % 2**32, *sizes[index + 1 :]]
                data = SIZES.pack(*changed) + part(one)[SIZES.size :]
                if tuple(changed) != sizes:
                    assert hold(one, parts={"points": data}) is not None
        huge = SIZES.pack(sizes[0], 2**64 - 1, *sizes[2:]) + part(one)[SIZES.size :]
        assert hold(one, parts={"points": huge}) is TruncatedError
        shifted = SIZES.pack(sizes[0], sizes[1] - 4, sizes[2], sizes[3] + 1) + part(one)[SIZES.size :]
        assert hold(one, parts={"points": shifted}) is not None  # sizes that still add up


def forged(recipe: Any) -> Iterator[Any]:
    """The recipe with each of its fields replaced by each piece of junk."""
    yield from JUNK
    for key in (
        "kind",
        "law",
        "run",
        "step",
        "base",
        "inherited",
        "moved",
        "axes",
        "others",
        "more",
        "moments",
        "runs",
    ):
        yield from ({**recipe, key: junk} for junk in JUNK)
    for key in recipe.keys() - {"kind"}:
        yield {name: value for name, value in recipe.items() if name != key}
    for field in RUN_FIELDS:
        yield from ({**recipe, "run": {**recipe["run"], field: junk}} for junk in JUNK)


def test_forged_recipes_are_refused_or_harmless():
    for one in records().values():
        found = [hold(one, recipe=recipe) for recipe in forged(one.encoded.recipe)]
        assert found.count(None) < len(found) / 10


def test_forged_shapes_and_dtypes_are_refused():
    for one in records().values():
        info = one.encoded.infos[0]
        for shape in ((), (0,), (1 << 40,), (1 << 20, 1 << 20), (*info.shape, 3), info.shape[::-1], (1, *info.shape)):
            for dtype in ("F32", "BF16", "F16", "F64", "U8", "C64", "F8_E4M3", "F4_X2", "I32"):
                other = TensorInfo(info.name, shape, dtype)
                if (shape, dtype) != (info.shape, info.dtype):
                    assert hold_other(one, other), other


def hold_other(one: Made, info: TensorInfo) -> bool:
    """True if an error comes; or the same bytes as another shape, which the header's digest has to find."""
    record = replace(one.encoded, infos=(info, *one.encoded.infos[1:]))
    try:
        found = decode(record, one.decoded, one.parent).tensors[info.name]
    except (FormatError, ChainError):
        return True
    return bits(found) == bits(one.values[info.name]) and found.dtype == one.values[info.name].dtype


def test_only_floats_of_16_or_32_bits_have_points():
    for one in records().values():
        for dtype in ("F64", "I32", "U8", "F8_E4M3", "C64", "F4_X2", "BOOL"):
            infos = tuple(replace(info, dtype=dtype) for info in one.encoded.infos)
            with pytest.raises((CorruptError, ChainError)):
                decode(replace(one.encoded, infos=infos, base=None), one.decoded, one.parent)


@pytest.mark.parametrize(
    ("law", "shape"), each_value(["linear", "log", "relative"], [(1 << 24,), (1 << 31,), (1, 1 << 62), (1 << 62,)])
)
def test_a_shape_that_no_bytes_so_few_could_have_is_refused_before_memory_is_taken_for_it(law, shape):
    """Of a vector, whose lattice is as small as any."""
    one = made({"w": points_of(law, (64,), seed=1)}, others=[squares((64,))] if law == "relative" else [])
    info = TensorInfo("w", shape, "F32")
    decoded = {name: torch.ones(1).expand(shape) for name in one.decoded}
    tracemalloc.start()
    try:
        with pytest.raises(TruncatedError, match="too short"):
            decode(replace(one.encoded, infos=(info,)), decoded, None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_no_record_s_first_tensor_can_be_said_to_be_huge():
    """Whatever the recipe says of a parent: one of that shape there can be only if there is the memory for it."""
    for one in records().values():
        recipe = {key: value for key, value in one.encoded.recipe.items() if key not in ("base", "inherited", "moved")}
        for shape in [(1 << 24,), (1 << 31, 3), (3, 1 << 31), (1 << 31, 1 << 31), (1 << 62,)]:
            info = TensorInfo(one.encoded.infos[0].name, shape, "F32")
            for forged in (recipe, one.encoded.recipe):
                tracemalloc.start()
                try:
                    with pytest.raises((FormatError, ChainError)):
                        decode(replace(one.encoded, infos=(info,), base=None, recipe=forged), one.decoded, one.parent)
                    assert tracemalloc.get_traced_memory()[1] < 1 << 20
                finally:
                    tracemalloc.stop()


def test_many_rows_for_few_bytes_of_steps_are_refused_before_memory_is_taken_for_them():
    """Codes enough for the points, and lattices far too short for so many rows."""
    rows = 1 << 22
    few = made({"w": LatticeTensor(torch.zeros(8, 2, dtype=torch.int16), lattice_of("linear", (8, 2)))})
    sizes, data = SIZES.unpack(part(few)[: SIZES.size]), part(few)[SIZES.size :]
    steps, side, codes = data[: sizes[0]], data[sizes[0] :][: sizes[2]], bytes(28 * (2 * rows // 262144))
    forged = SIZES.pack(len(steps), len(codes), len(side), 0) + steps + side + codes
    info = TensorInfo("w", (rows, 2), "F32")
    tracemalloc.start()
    try:
        with pytest.raises(TruncatedError, match="lattices"):
            decode(replace(few.encoded, infos=(info,), parts={"points": forged}), {}, None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_points_that_are_too_far_out_are_refused():
    lattice = lattice_of("linear", (3,), spread=0)
    one = made({"w": LatticeTensor(torch.tensor([MOST_CODE, -MOST_CODE, 1], dtype=torch.int16), lattice)})
    data = part(one)
    assert struct.unpack("<2i", data[-8:]) == (MOST_CODE, -MOST_CODE)
    for far in (MOST_CODE + 1, 2**15, 2**16 + 1, 2**31 - 1, -(2**31), -MOST_CODE - 1):
        assert refusal(one, data[:-8] + struct.pack("<2i", far, -MOST_CODE)) is CorruptError


def test_escapes_that_are_too_few_or_too_many_are_refused():
    """Even where they would all be the same."""
    one = made({"w": LatticeTensor(torch.full((9,), 300, dtype=torch.int16), lattice_of("linear", (9,), spread=0))})
    data = part(one)
    sizes = SIZES.unpack(data[: SIZES.size])
    assert sizes[3] == 9
    for count in (0, 1, 8, 10):
        forged = SIZES.pack(*sizes[:3], count) + data[SIZES.size : -36] + struct.pack("<i", 300) * count
        assert refusal(one, forged) is CorruptError
    rows = torch.tensor([0, 300, 0], dtype=torch.int16)
    one = made(
        {"w": LatticeTensor(codes_of("linear", (3, 4)), Lattice("linear", rows, torch.zeros(4, dtype=torch.int16)))}
    )
    data = part(one)
    place, sizes = data.index(struct.pack("<2i", 300, -300)), SIZES.unpack(data[: SIZES.size])
    for count in (0, 1, 3):
        forged = bytearray(data[:place] + struct.pack("<i", 300) * count + data[place + 8 :])
        forged[: SIZES.size] = SIZES.pack(sizes[0] + 4 * (count - 2), *sizes[1:])
        forged[SIZES.size + 8 : SIZES.size + 12] = struct.pack("<I", count)
        assert refusal(one, bytes(forged)) is CorruptError


def test_a_dither_of_powers_of_two_is_refused():
    for name in ("log alone", "log on others", "log inherited"):
        one = records()[name]
        data = bytearray(part(one))
        assert data[SIZES.size : SIZES.size + 4] == bytes(4)
        data[SIZES.size + 2] = 1
        assert refusal(one, bytes(data)) is CorruptError


def test_bytes_behind_inherited_lattices_are_refused():
    one = records()["linear inherited"]
    data = part(one)
    sizes = SIZES.unpack(data[: SIZES.size])
    assert sizes[0] == 4 * 3
    for more in (b"\0", bytes(8), bytes(40)):
        end = SIZES.size + sizes[0]
        assert (
            refusal(one, SIZES.pack(sizes[0] + len(more), *sizes[1:]) + data[20:end] + more + data[end:])
            is CorruptError
        )
    short = SIZES.pack(sizes[0] - 4, *sizes[1:]) + data[20 : end - 4] + data[end:]
    assert refusal(one, short) is TruncatedError


def test_steps_out_of_range_are_refused():
    rows = torch.tensor([0, 900, 0], dtype=torch.int16)
    one = made(
        {"w": LatticeTensor(codes_of("linear", (3, 4)), Lattice("linear", rows, torch.zeros(4, dtype=torch.int16)))}
    )
    data = part(one)
    place = data.index(struct.pack("<i", 900))
    assert data[place + 4 : place + 8] == struct.pack("<i", -900)
    for up, down in ((961, -961), (-961, 961), (2**31 - 1, -900), (960, 0), (-(2**31), -(2**31))):
        forged = data[:place] + struct.pack("<2i", up, down) + data[place + 8 :]
        assert refusal(one, forged) is CorruptError
    both = torch.tensor([0, 480, 0], dtype=torch.int16), torch.tensor([0, 480, 480, 0], dtype=torch.int16)
    one = made({"w": LatticeTensor(codes_of("linear", (3, 4)), Lattice("linear", *both))})
    data = (
        part(one)
        .replace(struct.pack("<i", 480), struct.pack("<i", 481))
        .replace(struct.pack("<i", -480), struct.pack("<i", -481))
    )
    assert refusal(one, data) is CorruptError  # each in range, and not their sum


def test_a_missing_or_wrong_parent_is_a_chain_error():
    for one in records().values():
        if one.encoded.base is None:
            assert decode(one.encoded, one.decoded, None).tensors.keys() == one.values.keys()
            continue
        assert one.parent is not None
        tensors, symbols = one.parent.tensors, one.parent.quantized
        for wrong in (
            None,
            Reference({}),
            Reference({name: x + 1 for name, x in tensors.items()}, symbols),
            Reference({f"{name}!": x for name, x in tensors.items()}, symbols),
            Reference({name: x.reshape(-1, 1) for name, x in tensors.items()}, symbols),
            Reference({name: x.half() for name, x in tensors.items()}, symbols),
        ):
            with pytest.raises(ChainError) as caught:
                decode(one.encoded, {}, wrong)
            assert str(one.encoded.base) in caught.value.message


def test_errors_name_the_file_and_the_record():
    for one in records().values():
        with pytest.raises((CorruptError, TruncatedError)) as caught:
            decode(replace(one.encoded, parts={"points": b""}), one.decoded, one.parent, where="a.file")
        assert "a.file" in caught.value.where and "record" in caught.value.where and caught.value.do


def test_a_wrong_digest_is_found():
    for one in records().values():
        assert hold(one, digest="0" * 32) is CorruptError
