"""Any chunks of a record are what they are in the whole record, given only what they say they need."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import lattice_records
from helpers.codebooks import ALL_CODERS, moved, symbols_of
from helpers.parameters import each_value
from helpers.partial_decode import Part, aligned, infos_of, stream
from helpers.round_trip import Loop, Written, nudged, stages, write
from helpers.strategies import tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint import Lossless
from shrinkpoint.codec.codebook_record import CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import MAX_CHUNK, NUMBER_FORMATS, CoderConfig, CodingContext, pack_tensors
from shrinkpoint.codec.decoder import ByteRange, decode_errors
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.record import RecordInput, coding_context, decode, encode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import FormatError
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

PLACES = st.integers(0, 1000)
SHAPES = st.sampled_from([(), (0,), (1,), (500,), (20, 30), (40, 0, 2), (6, 5, 3, 3)])
LARGE = (700, 1000)
"""More values than two chunks have, for what is always coded in the largest chunks."""


def holds(part: Part, start: int, stop: int) -> None:
    """A range of a record is that of the whole; ranges of no other tensor are asked for than it says."""
    whole = decode(part.encoded, part.decoded, part.parent, quantized=part.symbols, threads=1)
    pieces, expected = part.pieces(), stream(part.encoded, whole)
    assert pieces is not None and pieces.count * pieces.unit == len(expected)
    if pieces.count:
        lo, hi = aligned(pieces, start, stop)
        assert part.range(pieces, lo, hi) == expected[lo * pieces.unit : hi * pieces.unit]


def quantized(
    named: dict[str, CodebookTensor],
    dtype: torch.dtype = torch.float32,
    parent: Reference | None = None,
    **options: Any,
) -> EncodedRecord:
    held = {} if parent is None else parent.tensors
    values = {name: one.dequantize(dtype, held.get(name)) for name, one in named.items()}
    coders = options.pop("coders", ALL_CODERS)
    material = CodebookInput(
        "record",
        tuple(infos_of(values).values()),
        tuple(values.values()),
        tuple(named.values()),
        reference=parent,
        **options,
    )
    return encode_codebook_record(material, coders=coders, threads=1)


# numbers


@cache
def loop() -> list[Written]:
    """A keyframe and three deltas of a training loop, one step apart, in small chunks."""
    run, scheme, out = Loop(), Lossless(chunk=100), list[Written]()
    for _ in range(4):
        out.append(write(run.steps(1), out[-1] if out else None, scheme=scheme))
    return out


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), PLACES, PLACES)
def test_chunks_of_a_training_loop_are_those_of_the_whole(depth, start, stop):
    seen = set()
    for record, decoded in stages(loop()[depth]):
        holds(Part(record, decoded, loop()[depth].parent), start, stop)
        seen |= {(run["tokens"], run.get("predictor")) for run in record.recipe.get("runs", [])}
    assert seen >= ({("delta", "adam"), ("delta", "square")} if depth else {("level", None)})


@settings(deadline=None)
@given(st.lists(tensors(shape=SHAPES, layouts=("dense",)), min_size=1, max_size=5), st.integers(1, 99), PLACES, PLACES)
def test_chunks_of_any_tensors_are_those_of_the_whole(held, chunk, start, stop):
    scheme, names = Lossless(chunk=chunk), [f"{i}" for i in range(len(held))]
    before = write(dict(zip(names, held, strict=True)), scheme=scheme)
    after = write({name: nudged(x) for name, x in zip(names, held, strict=True)}, before, scheme=scheme)
    for written in (before, after):
        for record, decoded in stages(written):
            if record.recipe != {"kind": "same"}:
                holds(Part(record, decoded, written.parent), start, stop)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(["tap", "base"]), PLACES, PLACES)
def test_chunks_of_taps_are_those_of_the_whole_whatever_their_sizes(first, later, predictor, start, stop):
    generator = torch.Generator().manual_seed(first)
    base = {name: torch.randn(shape, generator=generator) for name, shape in (("a", (8, 5, 3, 3)), ("b", (4, 6, 9)))}
    now = {name: x + 0.01 * torch.randn(x.shape, generator=generator) for name, x in base.items()}
    infos, parent = tuple(infos_of(now).values()), Reference(base)
    runs = (
        CoderConfig("level", fine=2, factors=True, companion="base", chunk=first),
        CoderConfig("delta", predictor=predictor, top=130, chunk=later),
    )
    material = RecordInput("record", infos, 9, pack_tensors(infos, now, 9), coding_context(infos, 9, parent, (), {}))
    holds(Part(encode(material, runs, threads=1), {}, parent), start, stop)


def test_a_chunk_asks_for_its_own_range_of_everything_and_no_more():
    written = loop()[3]
    for record, decoded in stages(written):
        part = Part(record, decoded, written.parent)
        if record.recipe.get("kind") != "coded" or not record.recipe.get("base"):
            continue
        pieces = part.pieces()
        part.range(pieces, 100, 200)
        asked = set(part.asked)
        each = {
            kind: sum(span.stop - span.start for span in asked if _kind(span) == kind) for kind in map(_kind, asked)
        }
        assert len(each) in (3, 4) and set(each.values()) == {100 * 4}


def _kind(span: ByteRange) -> tuple[bool, str]:
    return span.same_file, span.name.rpartition("/")[2]


# codes and points


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["run", "packed"]), st.sampled_from([0, 2]), st.booleans(), PLACES, PLACES)
def test_chunks_of_codes_are_those_of_the_whole(form, first, based, start, stop):
    before = symbols_of(LARGE, 20, first, special=0.0, seed=1)
    held = Reference({"a": before.dequantize(torch.bfloat16)}, {"a": before})
    now = moved(before, share=0.2)
    coders = ("packed",) if form == "packed" else ("context",)
    encoded = quantized({"a": now}, torch.bfloat16, held if based else None, coders=coders)
    assert encoded.recipe["codes"].keys() == {form}
    holds(Part(encoded, {}, held if based else None), start, stop)


@pytest.mark.parametrize("start", [0, 400, 900])
def test_chunks_of_differences_and_of_codes_under_others_are_those_of_the_whole(start):
    random = torch.Generator().manual_seed(0)
    held = Reference({name: torch.randn(LARGE, generator=random) for name in "ab"})
    one = replace(symbols_of(LARGE, 12, 2, special=0.0), residual=True)
    codes = torch.where(torch.rand(LARGE, generator=random) < 0.1, one.codes, one.codes.clamp(max=5))
    encoded = quantized({"a": one}, parent=held, coders=("context",))
    holds(Part(encoded, {}, held), start, start + 50)
    other = replace(one, codes=codes)
    under = quantized({"b": other}, parent=held, coders=("context",), context_codes=(one.codes,), context_ordinals=(0,))
    assert under.recipe["under"] == [[0, 0, 1]]
    decoded = {"a": one.dequantize(torch.float32, held.tensors["a"])}
    holds(Part(under, decoded, held, {"a": one}), start, start + 50)


def test_chunks_of_codes_under_moments_are_those_of_the_whole():
    random = torch.Generator().manual_seed(9)
    before = symbols_of(LARGE, 6, 2, special=0.0)
    step = torch.randint(-1, 2, LARGE, generator=random)
    now = replace(before, codes=(before.codes.int() + step).clamp(2, 7).to(torch.uint8))
    decoded = {"m": -step.float() + 0.1 * torch.randn(LARGE, generator=random), "v": torch.ones(LARGE)}
    held = Reference({"a": before.dequantize(torch.float32)}, {"a": before})
    known = coding_context([TensorInfo("a", LARGE, "F32")], 1, None, [("m", "v")], decoded)
    encoded = quantized({"a": now}, parent=held, coders=("context",), context=known, moments=((0, 1),))
    assert encoded.recipe["moments"]
    holds(Part(encoded, decoded, held), 300, 500)


@settings(deadline=None)
@given(lattice_records.cases(), PLACES, PLACES)
def test_points_are_those_of_the_whole_where_none_is_an_escape(made, start, stop):
    part = Part(made.encoded, made.decoded, made.parent)
    escapes = int.from_bytes(bytes(made.encoded.parts["points"][16:20]), "little")
    if part.pieces() is None:
        assert escapes or not any(one.codes.numel() for one in made.points.values())
    else:
        holds(part, start, stop)


@pytest.mark.parametrize(("shape", "seeds"), each_value([(), (500,), (20, 30)], [(0, 7, 0), (7, 0, 7), (7, 9, 0)]))
def test_tensors_with_and_without_a_seed_share_a_record(seeds, shape):
    """What one of them was dithered by is no dither of the next."""
    points, before = (
        {
            str(i): lattice_records.points_of("linear", shape, "near", random=8 * i + when, seed=seed)
            for i, seed in enumerate(seeds if when else seeds[::-1])
        }
        for when in range(2)
    )
    held = Reference({name: x.dequantize(torch.float32) for name, x in before.items()}, before)
    made = lattice_records.made(points, "F32", held)
    lattice_records.comes_back(decode(made.encoded, {}, held, trust_base=True), made)
    part = Part(made.encoded, made.decoded, held)
    holds(part, 0, 1000)
    for place in range(0, 1000, 100):
        holds(part, place, place + 100)


@pytest.mark.parametrize("law", lattice_records.LAWS)
@pytest.mark.parametrize("shape", [LARGE, (700_000,), (700_000, 1)], ids=str)
def test_chunks_of_points_are_those_of_the_whole(law, shape):
    others = [lattice_records.squares(shape)] if law == "relative" else []
    lattice = lattice_records.lattice_of(law, shape, seed=0 if law == "log" else 7, step=24)
    before, now = (
        LatticeTensor(lattice_records.codes_of(law, shape, random=i, nothing=0.0), lattice) for i in range(2)
    )
    held = Reference({"a": before.dequantize(torch.bfloat16, *others)}, {"a": before})
    for parent in (None, held):
        made = lattice_records.made({"a": now}, "BF16", parent, others=others)
        part = Part(made.encoded, made.decoded, parent)
        for start in (0, 400, 999):
            holds(part, start, start + 1)
        assert part.pieces().chunk == MAX_CHUNK


def test_what_cannot_be_entered_in_the_middle_has_no_pieces():
    alone = symbols_of((400,), 20, 2, special=0.0)
    exact = symbols_of((400,), 20, 2, special=0.2)
    assert Part(quantized({"a": alone}, coders=("context",)), {}, None).pieces() is not None
    assert Part(quantized({"a": exact}, coders=("context",)), {}, None).pieces() is None
    for coder in ("runs", "lzma"):
        assert Part(quantized({"a": alone}, coders=(coder,)), {}, None).pieces() is None


# damage


@cache
def records() -> list[Part]:
    """One of each kind that has pieces."""
    written = loop()[2]
    out = [Part(record, decoded, written.parent) for record, decoded in stages(written)]
    one = symbols_of((400,), 20, 2, special=0.0)
    held = Reference({"a": one.dequantize(torch.float32)}, {"a": one})
    out.append(Part(quantized({"a": moved(one)}, parent=held, coders=("context",)), {}, held))
    out.append(Part(quantized({"a": one}, coders=("packed",)), {}, None))
    made = lattice_records.made({"a": lattice_records.points_of("linear", (20, 30), seed=3)}, "F32")
    out.append(Part(made.encoded, made.decoded, None))
    return [part for part in out if part.encoded.parts]


def survives(part: Part, lo: int, hi: int) -> None:
    """It is refused with an error of our tree, or gives as many bytes as it should."""
    try:
        with decode_errors("record"):
            pieces = part.pieces()
            if pieces is None or not pieces.count:
                return
            lo, hi = aligned(pieces, lo, hi)
            assert len(part.range(pieces, lo, hi)) == (hi - lo) * pieces.unit
    except FormatError:
        return


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_decode_to_something(data):
    part = data.draw(st.sampled_from(records()))
    name = data.draw(st.sampled_from(sorted(part.encoded.parts)))
    stored = bytearray(part.encoded.parts[name])
    for _ in range(data.draw(st.integers(1, 3))):
        if stored:
            stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.sampled_from([0, 1, 127, 255]))
    if data.draw(st.booleans()):
        del stored[data.draw(st.integers(0, len(stored))) :]
    damaged = replace(part.encoded, parts={**part.encoded.parts, name: bytes(stored)})
    survives(replace(part, encoded=damaged), data.draw(PLACES), data.draw(PLACES))


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 31, 1 << 31), (1 << 62,)], ids=str)
def test_shapes_beyond_the_bytes_are_refused_before_memory_is_taken(shape):
    for part in records():
        infos = tuple(replace(info, shape=shape) for info in part.encoded.infos)
        hostile = replace(part, encoded=replace(part.encoded, infos=infos))
        with pytest.raises(FormatError), decode_errors("record"):
            hostile.pieces()
            hostile.range(hostile.pieces(), 0, 1)


def test_chunks_beyond_the_record_are_refused():
    run, number, nothing = CoderConfig("planes", chunk=10), NUMBER_FORMATS["U8"], CodingContext()
    values = np.arange(35, dtype=np.uint8)
    side, codes = run.encode(number, values, nothing, 1)
    starts = [0, *np.cumsum(np.frombuffer(side[-16:].tobytes(), "<u4"))]
    for first in range(4):
        out = np.empty(min(10, 35 - 10 * first), np.uint8)
        stored = codes[starts[first] : starts[first + 1]]
        run.decode(number, side, stored, out, nothing, 1, count=35, first_chunk=first)
        assert out.tobytes() == values[10 * first : 10 * first + 10].tobytes()
    for count, first, size in ((35, 4, 5), (35, 3, 10), (35, 0, 7), (35, 2, 40), (1 << 60, 1 << 58, 10), (35, 0, 0)):
        with pytest.raises(ValueError):
            run.decode(number, side, codes, np.empty(size, np.uint8), nothing, 1, count=count, first_chunk=first)
