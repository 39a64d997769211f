"""A damaged or forged record gives an error of our tree or the right values: never wrong ones, never a crash."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from helpers.codebooks import moved, symbols_of
from helpers.recipe_values import RECIPE_VALUES, RUN_FIELDS
from helpers.round_trip import Loop, Written, stages, write
from helpers.strategies import bits

from shrinkpoint._native import xxh3_128
from shrinkpoint.codec.codebook_record import CODERS, CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.record import coding_context, decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError, CorruptError, FormatError, TruncatedError
from shrinkpoint.tensors.info import EncodedRecord, Role, TensorInfo

JUNK: list[Any] = [
    *RECIPE_VALUES,
    *(3, 9, 23, 31, 63, 64, 10**30, -(2**63), 1e300),
    *("square", "moment1", "__class__", "LEVEL", "F32"),
    [float("inf")] * 4,
    {"tokens": "delta"},
    {"run": {"tokens": "codes"}},
    {"packed": 5},
    {"packed": 0},
    {"lzma": 6},
    {"cyclic": [9, True, True]},
    {"cyclic": [256, False, True]},
    {"cyclic": [1, False, False]},
]


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


@cache
def lossy() -> tuple[dict[str, CodebookTensor], list[tuple[EncodedRecord, dict[str, torch.Tensor]]]]:
    """The parent's symbols, and records of codes in every form: with and without a parent, moments and members; and of
    differences and under other codes, those of `UNDER`."""
    bins = {"a": 60, "b": 60, "c": 60, "pushed": 6}
    shapes = {"a": (40, 30), "b": (500,), "c": (2, 2), "pushed": (50, 60)}
    before = {name: symbols_of(shapes[name], bins[name], seed=1, exact=torch.float32) for name in shapes}
    now = {name: moved(one, share=0.3) for name, one in before.items()}
    values = {name: one.dequantize(torch.float32) for name, one in now.items()}
    *infos, pushed = (TensorInfo(name, shape, "F32") for name, shape in shapes.items())
    held = Reference({name: one.dequantize(torch.float32) for name, one in before.items()}, before)
    steps = (before["pushed"].codes.int() - now["pushed"].codes.int()).float()
    decoded = {"m": steps - 0.1, "v": torch.ones(50, 60)}
    material = CodebookInput(
        "pushed",
        (pushed,),
        (values["pushed"],),
        (now["pushed"],),
        coding_context((pushed,), 1, None, [("m", "v")], decoded),
        ((0, 1),),
        held,
    )
    out = [(encode_codebook_record(material, threads=1), decoded)]
    several = [info.name for info in infos]
    for reference in (None, held):
        members = tuple(values[name] for name in several), tuple(now[name] for name in several)
        material = CodebookInput("~several", tuple(infos), *members, reference=reference)
        out += [(encode_codebook_record(material, coders=(coder,), threads=1), {}) for coder in CODERS]
    out += [(encode_codebook_record(replace(material, reference=None), coders=("lzma",), threads=1), {})]
    for residual, coder in ((False, "context"), (True, "rearranged"), (True, "lzma")):
        one, base = replace(now["pushed"], residual=residual), held.tensors["pushed"]
        material = CodebookInput(
            "under",
            (pushed,),
            (one.dequantize(torch.float32, base),),
            (one,),
            reference=held if residual else None,
            context_codes=(before["pushed"].codes,),
            context_ordinals=(1,),
        )
        tensors = {"m": steps, UNDER: base} if coder != "lzma" else {}
        out += [(encode_codebook_record(material, coders=(coder,), threads=1), tensors)]
    return before, out


UNDER = "others"
"""A tensor of the same file whose codes are context."""


def read(
    record: EncodedRecord,
    decoded: dict[str, torch.Tensor],
    reference: Reference | None = None,
    *,
    where: str = "record",
) -> Reference:
    return decode(record, decoded, reference, quantized={UNDER: lossy()[0]["pushed"]}, where=where, threads=1)


@cache
def parent() -> Reference:
    """What all records were made against."""
    held, before = delta().parent, lossy()[0]
    assert held is not None
    values = {name: one.dequantize(torch.float32) for name, one in before.items()}
    return Reference({**held.tensors, **values}, before)


def records() -> list[tuple[EncodedRecord, dict[str, torch.Tensor]]]:
    return [*stages(delta()), *lossy()[1]]


def right(record: EncodedRecord, decoded: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bits(x) for name, x in read(record, decoded, parent()).tensors.items()}


def hold(record: EncodedRecord, decoded: dict[str, torch.Tensor], expected: dict[str, bytes]) -> type | None:
    """Decode; the error's type, or None where the right values came."""
    try:
        found = read(record, decoded, parent()).tensors
    except (FormatError, ChainError) as error:
        return type(error)
    assert {name: bits(x) for name, x in found.items()} == expected, record.recipe
    return None


def test_the_records_under_test_are_of_every_kind():
    recipes = [record.recipe for record, _ in records()]
    kinds = {recipe["kind"] for recipe in recipes}
    runs = [run for recipe in recipes for run in recipe.get("runs", [])]
    assert kinds == {"plain", "same", "copy", "coded", "quantized"}
    assert {run["tokens"] for run in runs} == {"level", "delta", "planes"}
    assert {"adam", "square", "base"} <= {run.get("predictor") for run in runs}
    assert any(recipe.get("taps", 1) > 1 for recipe in recipes)
    codes = [recipe["codes"] for recipe in recipes if recipe["kind"] == "quantized"]
    assert {key for one in codes for key in one} == {"run", "packed", "cyclic", "lzma"}
    others = [(recipe.get("residual", False), "under" in recipe) for recipe in recipes if recipe["kind"] == "quantized"]
    assert {*others} == {(False, False), (False, True), (True, False), (True, True)}
    assert {run.get("moments", False) for one in codes for run in one.values() if isinstance(run, dict)} == {
        True,
        False,
    }
    assert {tuple(one["cyclic"][1:]) for one in codes if "cyclic" in one} == {(1, 1), (0, 1), (0, 0)}
    inner = [recipe[key]["tokens"] for recipe in recipes for key in ("centers", "exacts") if recipe.get(key)]
    assert {*inner} == {"level", "delta"}


def forged(recipe: Any) -> Iterator[Any]:
    """The recipe with each of its fields replaced by each piece of junk."""
    yield from JUNK
    own = ("bins", "first", "codes", "centers", "exact", "exacts", "residual", "under")
    own = own if recipe["kind"] == "quantized" else ()
    for key in ("kind", "runs", "taps", "base", "moments", "of", "more", *own):
        yield from ({**recipe, key: junk} for junk in JUNK)
    for key in ("centers", "exacts"):
        for field in RUN_FIELDS if recipe.get(key) else ():
            yield from ({**recipe, key: {**recipe[key], field: junk}} for junk in JUNK)
    for kind, how in recipe.get("codes", {}).items():
        for field in RUN_FIELDS if kind == "run" else ():
            yield from ({**recipe, "codes": {"run": {**how, field: junk}}} for junk in JUNK)
        for index in range(3 if kind == "cyclic" else 0):
            yield from ({**recipe, "codes": {kind: [*how[:index], junk, *how[index + 1 :]]}} for junk in JUNK)
    for index in range(len(recipe.get("runs", []))):
        for key in RUN_FIELDS:
            for junk in JUNK:
                runs = [dict(run) for run in recipe["runs"]]
                runs[index][key] = junk
                yield {**recipe, "runs": runs}


def test_forged_recipes_are_refused_or_harmless():
    """Every third of each record, beginning elsewhere in the next record."""
    for number, (record, decoded) in enumerate(records()):
        expected, recipes = right(record, decoded), islice(forged(record.recipe), number % 3, None, 3)
        refused = [hold(replace(record, recipe=recipe), decoded, expected) for recipe in recipes]
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
                    read(replace(record, parts=parts), decoded, parent())


def test_a_record_whose_context_is_missing_is_refused():
    for record, decoded in records():
        expected = right(record, decoded)
        needy = any(key in record.recipe for key in ("moments", "of", "under"))
        assert hold(record, {}, expected) == (CorruptError if needy else None)


def test_forged_shapes_and_dtypes_are_refused_without_taking_memory_for_them():
    for record, decoded in records():
        info = record.infos[0]
        for shape in ((), (0,), (1 << 40,), (1 << 20, 1 << 20), (1, *info.shape), (*info.shape, 3), info.shape[::-1]):
            for dtype in ("F32", "U8", "C128", "F4_X2", info.dtype):
                other = TensorInfo(info.name, shape, dtype, Role.OTHER)
                if (shape, dtype) != (info.shape, info.dtype):
                    try:
                        read(replace(record, infos=(other, *record.infos[1:])), decoded, parent())
                    except (FormatError, ChainError):
                        continue
                    assert record.recipe == {"kind": "plain"} or other.nbytes == info.nbytes, (record.name, other)


def test_a_shape_that_no_bytes_so_few_could_have_is_refused_before_memory_is_taken_for_it():
    for record, decoded in lossy()[1]:
        for shape in ((1 << 24,), (1 << 31, 3), (1 << 62,), (1 << 31, 0, 1 << 31)):
            info = TensorInfo(record.infos[0].name, shape, "F32")
            tracemalloc.start()
            try:
                with pytest.raises((FormatError, ChainError)):  # as many members as centers, so that codes are reached
                    read(replace(record, infos=(info, *record.infos[1:]), base=None), decoded, parent())
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
            finally:
                tracemalloc.stop()


@pytest.mark.parametrize(
    ("side", "codes", "centers", "match"),
    [
        (b"", b"\0\0", [1.0], ""),
        (b"\0", b"\0\0", [1.0], "side"),
        (b"", b"\0\x80", [1.0], "beyond the last center"),
        (b"", b"\0\0", [1.0, 0.5], "do not rise"),
        (b"", b"\0\0", [1.0, float("inf")], "not finite"),
    ],
)
def test_codes_and_centers_that_no_writer_writes_are_refused(
    side: bytes, codes: bytes, centers: list[float], match: str
):
    info, digest = TensorInfo("w", (16,), "F32"), xxh3_128(torch.ones(16).numpy().tobytes())
    stored = torch.tensor(centers).numpy().tobytes()
    symbols = struct.pack("<IQQ", len(side), len(codes), len(stored)) + side + codes + stored
    recipe = {"kind": "quantized", "bins": len(centers), "first": 0, "codes": {"packed": 1}}
    record = EncodedRecord("w", (info,), recipe, {"symbols": symbols}, digest)
    if not match:
        assert torch.equal(decode(record, {}, None).tensors["w"], torch.ones(16))
    else:
        with pytest.raises(CorruptError, match=match):
            decode(record, {}, None)


def test_padding_of_cyclic_codes_that_is_not_zero_is_refused():
    one = CodebookTensor(torch.zeros(300, dtype=torch.uint8), torch.tensor([1.0]), torch.empty(0).bfloat16(), 0)
    info = TensorInfo("w", (300,), "F32")
    record = encode_codebook_record(
        CodebookInput("w", (info,), (torch.ones(300),), (one,)), coders=("runs",), threads=1
    )
    data = bytearray(record.parts["symbols"])
    assert struct.unpack("<IQQ", data[:20])[:2] == (0, 28) and not any(data[44:48])
    data[47] = 1
    with pytest.raises(CorruptError, match="padding is not zero"):
        decode(replace(record, parts={"symbols": bytes(data)}), {}, None)


def test_only_floats_of_16_bits_or_more_are_quantized():
    one = symbols_of((300,), 5)
    values = one.dequantize(torch.float32)
    record = encode_codebook_record(CodebookInput("w", (TensorInfo("w", (300,), "F32"),), (values,), (one,)), threads=1)
    for dtype in ("I32", "U8", "F8_E4M3", "C64", "F4_X2", "BOOL"):
        with pytest.raises(CorruptError, match="not floats"):
            decode(replace(record, infos=(TensorInfo("w", (300,), dtype),)), {}, None)


def test_a_missing_or_wrong_parent_is_a_chain_error():
    held = parent()
    changed = Reference(
        {name: x + 1 if x.dtype != torch.bool else ~x for name, x in held.tensors.items()}, held.quantized
    )
    renamed = Reference({f"{name}!": x for name, x in held.tensors.items()}, held.quantized)
    reshaped = Reference({name: x.reshape(-1, 1) for name, x in held.tensors.items()}, held.quantized)
    retyped = Reference({name: x.to(torch.float64) for name, x in held.tensors.items()}, held.quantized)
    needy = [(record, decoded) for record, decoded in records() if record.base is not None]
    assert len(needy) > 4
    for record, decoded in needy:
        for wrong in (None, Reference({}), changed, renamed, reshaped, retyped):
            with pytest.raises(ChainError) as caught:
                read(record, decoded, wrong)
            assert record.base in caught.value.message


def test_records_without_a_base_need_no_parent():
    for record, decoded in records():
        if record.base is None and record.recipe["kind"] != "same":
            assert {name: bits(x) for name, x in read(record, decoded).tensors.items()} == right(record, decoded)


def test_a_copy_is_cast_only_as_a_writer_casts():
    source = {"a": torch.arange(8.0), "c": torch.ones(8, dtype=torch.complex64), "i": torch.arange(8)}
    for ordinal, dtype in [(0, "I64"), (0, "F64"), (1, "F32"), (2, "F32"), (0, "F4_X2"), (0, "BOOL"), (3, "F32")]:
        record = EncodedRecord(
            "x", (TensorInfo("x", (8,), dtype),), {"kind": "copy", "of": [[ordinal, 0, 1]]}, {}, "0" * 32
        )
        with pytest.raises(CorruptError):
            decode(record, source, None)


def test_errors_name_the_file_and_the_record():
    for record, decoded in records():
        if record.parts:
            part = next(iter(record.parts))
            with pytest.raises((CorruptError, TruncatedError)) as caught:
                read(replace(record, parts={**record.parts, part: b""}), decoded, parent(), where="a.file")
            assert "a.file" in caught.value.where and record.name in caught.value.where and caught.value.do
