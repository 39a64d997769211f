"""Any points come back as they were, and their values with them, whatever they were coded against."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.lattice_records import (
    DTYPES,
    LAWS,
    MOST_CODE,
    NOTHING,
    SHAPES,
    alike,
    cases,
    codes_of,
    comes_back,
    lattice_of,
    made,
    nearest,
    points_of,
    squares,
    untouched,
)
from helpers.parameters import each_value
from helpers.strategies import bits
from hypothesis import given, settings
from reference import lattice_record as reference

from shrinkpoint._native import xxh3_128
from shrinkpoint.codec.coder import MAX_CHUNK
from shrinkpoint.codec.lattice import Lattice, LatticeTensor
from shrinkpoint.codec.lattice_record import LatticeInput, encode_lattice_record
from shrinkpoint.codec.parallel import MIN_SHARED_DECODING, decode_all
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError, CorruptError
from shrinkpoint.tensors.dtypes import torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

HEAD = 20
"""Bytes of the sizes that a part begins with."""


def described(encoded: EncodedRecord) -> int:
    """Bytes of the lattices."""
    return int.from_bytes(encoded.parts["points"][:4], "little")


def escapes(encoded: EncodedRecord) -> int:
    return int.from_bytes(encoded.parts["points"][16:20], "little")


def held(named: dict[str, LatticeTensor], dtype: str = "F32", other: torch.Tensor | None = None) -> Reference:
    return Reference({name: one.dequantize(torch_dtype(dtype), other) for name, one in named.items()}, named)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_any_points_come_back_and_nothing_is_touched(one):
    before = untouched(one.points, one.values, one.decoded, one.parent or {})
    found = decode(one.encoded, one.decoded, one.parent, threads=1)
    comes_back(found, one)
    assert untouched(one.points, one.values, one.decoded, one.parent or {}) == before


@pytest.mark.parametrize("law", LAWS)
def test_one_thread_and_many_write_the_same_bytes_of_several_chunks(law):
    shape = (3, MAX_CHUNK // 2)
    before, now = (points_of(law, shape, random=random, seed=random) for random in (1, 2))
    now = replace(now, lattice=replace(before.lattice, seed=0 if law == "log" else 7))
    others = [squares(shape)] if law == "relative" else []
    for parent in (None, held({"w": before}, other=squares(shape) if others else None)):
        one, many = (made({"w": now}, "F32", parent, others=others, threads=threads) for threads in (1, 3))
        assert one.encoded == many.encoded
        comes_back(decode(many.encoded, many.decoded, parent, threads=3), one)


@pytest.mark.parametrize("count", [0, 1, 2, MAX_CHUNK - 1, MAX_CHUNK, MAX_CHUNK + 1])
def test_the_first_and_last_point_of_a_chunk_come_back(count):
    for parent in (None, held({"w": points_of("linear", (count,), random=1)})):
        one = made({"w": points_of("linear", (count,), seed=3)}, "F32", parent)
        comes_back(decode(one.encoded, {}, parent), one)


# escapes


@pytest.mark.parametrize("far", [126, 127, 128, 129, 255, 256, MOST_CODE])
def test_points_further_from_the_guess_than_a_byte_reaches_come_back(far):
    codes = torch.tensor([0, far, -far, 1, 0, far - 1, 1 - far], dtype=torch.int16)
    lattice = lattice_of("linear", (7,), spread=0)
    one = made({"w": LatticeTensor(codes, lattice)})
    assert escapes(one.encoded) == sum(abs(code) > 127 for code in codes.tolist())
    comes_back(decode(one.encoded, {}, None), one)
    before = LatticeTensor(codes.negative(), lattice)
    one = made({"w": LatticeTensor(codes, lattice)}, parent=held({"w": before}))  # twice as far
    assert escapes(one.encoded) == sum(2 * abs(code) > 127 for code in codes.tolist())
    comes_back(decode(one.encoded, {}, one.parent), one)


def test_zeros_among_powers_of_two_and_powers_where_zeros_were_come_back():
    lattice = lattice_of("log", (4,), step=24)
    now, before = (
        LatticeTensor(torch.tensor(c, dtype=torch.int16), lattice) for c in ([NOTHING, 9, 0, 3], [5, NOTHING, 0, 3])
    )
    one = made({"w": now}, parent=held({"w": before}))
    assert escapes(one.encoded) == 1  # from nothing to 9
    comes_back(decode(one.encoded, {}, one.parent), one)


@pytest.mark.parametrize("jump", [127, 128, 129, 480, 960])
def test_steps_that_differ_by_more_than_a_byte_reaches_come_back(jump):
    rows, columns = torch.tensor([0, jump, 0, -jump, 0]), torch.tensor([0, 0, 0])
    for one in (Lattice("linear", rows.short(), columns.short()), Lattice("log", rows.short(), columns.short(), 5)):
        record = made({"w": LatticeTensor(codes_of(one.spacing, (5, 3)), one)})
        comes_back(decode(record.encoded, {}, None), record)


# what the parent is for


def noisy(shape: tuple[int, ...] = (200, 300)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def test_inherited_steps_cost_nothing_and_one_that_has_moved_next_to_nothing():
    x = noisy()
    lattice = lattice_of("linear", (200, 300), at=-50, spread=30)
    before = held({"w": nearest(x, lattice)})
    for seed in (0, 9):
        now = nearest(x * 1.01, replace(lattice, seed=seed))
        one = made({"w": now}, parent=before)
        assert one.encoded.recipe["inherited"] is True and described(one.encoded) == 4
        comes_back(decode(one.encoded, {}, before), one)
    moved = replace(lattice, rows=lattice.rows + (torch.arange(200) == 77).short())
    one = made({"w": nearest(x * 1.01, moved)}, parent=before)
    assert one.encoded.recipe["moved"] is True and described(one.encoded) < 80
    comes_back(decode(one.encoded, {}, before), one)


def test_what_has_not_moved_costs_hardly_anything_and_what_has_costs_what_has():
    x, lattice = noisy(), lattice_of("linear", (200, 300), at=-50)
    before = held({"w": nearest(x, lattice)})
    still, moved = (made({"w": nearest(x + d, lattice)}, parent=before) for d in (0.0, 0.1 * lattice.scales()))
    alone = made({"w": nearest(x, lattice)})
    assert still.nbytes < 300 < moved.nbytes < 0.4 * alone.nbytes


def test_a_value_between_two_points_tells_less_than_one_near_a_point():
    """As after a restore: another dither, and the values that a reader has lie anywhere between its points."""
    x, lattice = noisy(), lattice_of("linear", (200, 300), at=-50, seed=1)
    before = nearest(x, lattice)
    shaken = torch.randn(200, 300, generator=torch.Generator().manual_seed(4))
    moved = before.dequantize(torch.float32) + 0.02 * lattice.scales() * shaken
    other = replace(lattice, seed=2)
    alone, delta, same = (
        made({"w": nearest(moved, one)}, parent=parent)
        for one, parent in ((other, None), (other, held({"w": before})), (lattice, held({"w": before})))
    )
    assert same.nbytes < 0.5 * delta.nbytes and delta.nbytes < 0.4 * alone.nbytes


def test_powers_of_two_cost_less_under_the_parent_s():
    shape = (200, 300)
    before, chance = points_of("log", shape, step=24), torch.rand(shape, generator=torch.Generator().manual_seed(1))
    now = replace(before, codes=torch.where(chance < 0.05, 1, before.codes).short())
    alone, delta = made({"w": now}), made({"w": now}, parent=held({"w": before}))
    assert delta.nbytes < 0.6 * alone.nbytes
    comes_back(decode(delta.encoded, {}, delta.parent), delta)


@pytest.mark.parametrize("law", LAWS)
def test_only_the_parent_s_values_count_and_never_its_codes(law):
    shape = (40, 50)
    others = [squares(shape)] if law == "relative" else []
    other = others[0] if others else None
    before, now = (points_of(law, shape, random=random) for random in (1, 2))
    now = replace(now, lattice=replace(before.lattice, seed=0 if law == "log" else 5))
    values = before.dequantize(torch.float32, other)
    liars = [before, replace(before, codes=before.codes.flip(0)), replace(before, codes=before.codes * 0)]
    parents = [Reference({"w": values}, {"w": one}) for one in liars]
    records = [made({"w": now}, "F32", parent, others=others) for parent in parents]
    assert records[0].encoded == records[1].encoded == records[2].encoded
    for parent in parents:
        comes_back(decode(records[0].encoded, records[0].decoded, parent), records[0])
    plain = made({"w": now}, "F32", Reference({"w": values}), others=others)
    assert "inherited" not in plain.encoded.recipe
    head, same = described(plain.encoded), described(records[0].encoded)
    after = [one.encoded.parts["points"][HEAD + n :] for one, n in ((plain, head), (records[0], same))]
    assert after[0] == after[1]
    for parent in (*parents, Reference({"w": values})):
        comes_back(decode(plain.encoded, plain.decoded, parent), plain)


def test_a_base_digest_is_that_of_the_values_after_the_steps_where_these_are_taken_from_the_parent():
    before = {"a": points_of("linear", (4, 5)), "b": points_of("linear", (7,), random=3)}
    parent = held(before)
    values = b"".join(bits(x) for x in parent.tensors.values())
    steps = b"".join(bits(side) for one in before.values() for side in (one.lattice.rows, one.lattice.columns))
    now = {name: replace(one, codes=one.codes + 1) for name, one in before.items()}
    assert made(now, parent=parent).encoded.base == xxh3_128(steps + values)
    others = {name: replace(one, lattice=replace(one.lattice, rows=one.lattice.rows + 1)) for name, one in now.items()}
    assert made(others, parent=parent).encoded.base == xxh3_128(steps + values)
    other_parent = Reference(parent.tensors)  # which has values alone
    assert made(others, parent=other_parent).encoded.base == xxh3_128(values)
    assert made(now).encoded.base is None


def test_another_parent_is_a_chain_error():
    before = {"a": points_of("linear", (4, 5)), "b": points_of("linear", (7,), random=3)}
    parent = held(before)
    wrong = [
        None,
        Reference({}),
        Reference({"a": parent.tensors["a"]}, before),
        held(before, "BF16"),
        Reference({**parent.tensors, "b": parent.tensors["b"] + 1e-6}, before),
        Reference({**parent.tensors, "b": parent.tensors["b"].negative()}, before),
        Reference({**parent.tensors, "b": torch.full((7,), torch.nan)}, before),
        Reference({**parent.tensors, "a": parent.tensors["a"].reshape(5, 4)}, before),
    ]
    finer = replace(before["a"], lattice=replace(before["a"].lattice, rows=before["a"].lattice.rows + 1))
    sharing = [
        Reference(parent.tensors),
        Reference(parent.tensors, {"a": before["a"]}),
        Reference(parent.tensors, {**before, "a": finer}),
    ]
    inherits = made({name: replace(one, codes=one.codes + 1) for name, one in before.items()}, parent=parent)
    finer_points = {"a": finer, "b": replace(before["b"], lattice=lattice_of("linear", (7,), at=9))}
    moves, brings = made(finer_points, parent=parent), made(finer_points, parent=Reference(parent.tensors))
    assert moves.encoded.recipe.get("moved") and not brings.encoded.recipe.get("moved")
    for record, parents in ((inherits, wrong + sharing), (moves, wrong + sharing), (brings, wrong)):
        for one in parents:
            with pytest.raises(ChainError, match=str(record.encoded.base)):
                decode(record.encoded, {}, one)
    for one in sharing:
        comes_back(decode(brings.encoded, {}, one), brings)


def test_steps_of_another_law_are_not_inherited_and_no_forger_makes_them_so():
    before = points_of("linear", (4, 5))
    now = LatticeTensor(codes_of("log", (4, 5)), Lattice("log", before.lattice.rows, before.lattice.columns))
    one = made({"w": now}, parent=held({"w": before}))
    assert "inherited" not in one.encoded.recipe
    comes_back(decode(one.encoded, {}, one.parent), one)
    good = made({"w": replace(before, codes=before.codes + 1)}, parent=one.parent)
    with pytest.raises(CorruptError):
        decode(replace(good.encoded, recipe={**good.encoded.recipe, "law": "log"}), {}, one.parent)


@pytest.mark.parametrize(("law", "dtype"), each_value(["linear", "log"], DTYPES))
def test_a_parent_of_any_values_is_a_parent(law, dtype):
    special = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 3.3e38, -3.3e38, 1e-45, -1e-40, 6e4, 1 / 3, -1.0]
    values = torch.tensor(special).double().to(torch_dtype(dtype)).repeat(5).reshape(6, 10)
    for at in (-900, 0, 900):
        now = points_of(law, (6, 10), seed=4, at=at)
        one = made({"w": now}, dtype, Reference({"w": values}))
        comes_back(decode(one.encoded, {}, one.parent), one)


# relative to another tensor


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_s_records_wait_for_the_tensors_they_are_relative_to(threads):
    second = made({"v": points_of("log", (40, 50), at=-200, step=24)})
    first = made({"m": points_of("relative", (40, 50), seed=1)}, others=[second.values["v"]])
    records = [replace(one.encoded, name=name) for name, one in (("v", second), ("m", first))]
    heads = [(record.recipe, 1, MIN_SHARED_DECODING) for record in records]
    found = decode_all(heads, records.__getitem__, None, threads=threads)
    assert [*found.tensors] == ["v", "m"]
    for name, one in (("v", second), ("m", first)):
        assert bits(found.tensors[name]) == bits(one.values[name])
        assert alike(found.quantized[name], one.points[name])  # type: ignore[arg-type]
    for ordinal in (1, 2):  # itself, and one that does not come
        forged = [records[0], replace(records[1], recipe={**records[1].recipe, "others": [[ordinal, 0, 1]]})]
        with pytest.raises(CorruptError):
            decode_all(
                [(one.recipe, 1, MIN_SHARED_DECODING) for one in forged], forged.__getitem__, None, threads=threads
            )


def test_what_points_are_relative_to_must_be_there_and_fit():
    v = squares((40, 50))
    one = made({"m": points_of("relative", (40, 50), seed=1)}, others=[v])
    decoded = {
        "half": v.half(),
        "good": v,
        "double": v.double(),
        "flat": v.flatten(),
        "turned": v.reshape(50, 40),
        "whole": torch.ones(40, 50, dtype=torch.int32),
        "wrong": v * 2,
    }
    good = replace(one.encoded, recipe={**one.encoded.recipe, "others": [[1, 0, 1]]})
    assert bits(decode(good, decoded, None).tensors["m"]) == bits(one.values["m"])
    for others in ([[n, 0, 1]] for n in (0, 2, 3, 4, 5, 6, 7, 1 << 40)):
        with pytest.raises(CorruptError):
            decode(replace(good, recipe={**good.recipe, "others": others}), decoded, None)
    for others in ([[1, 0, 2]], [[1, 5, 2]], [], None):
        with pytest.raises(CorruptError):
            decode(replace(good, recipe={**good.recipe, "others": others}), decoded, None)


def test_a_first_moment_is_zero_where_the_second_one_is_and_never_infinite():
    v = squares((40, 50)) * (torch.arange(40) % 3 > 0)[:, None]
    one = made({"m": points_of("relative", (40, 50), "far", seed=1)}, others=[v])
    found = decode(one.encoded, one.decoded, None).tensors["m"]
    assert bool((found[v == 0] == 0).all()) and bool((found[v > 0] != 0).all()) and bool(found.isfinite().all())


# what is never written


def pointed(one: LatticeTensor, x: torch.Tensor, others: tuple[torch.Tensor, ...] = ()) -> LatticeInput:
    info = TensorInfo("w", tuple(x.shape), "F32")
    return LatticeInput("w", (info,), (x,), (one,), None, others, tuple(range(len(others))))


def test_what_no_reader_would_take_is_not_written():
    good = points_of("linear", (20, 30))
    lattice, x = good.lattice, good.dequantize(torch.float32)
    encode_lattice_record(pointed(good, x))
    row = torch.zeros(20, dtype=torch.int16)
    wrong = [
        replace(good, codes=good.codes.reshape(30, 20)),
        replace(good, codes=good.codes[:19]),
        replace(good, codes=torch.full((20, 30), MOST_CODE + 1, dtype=torch.int16)),
        replace(good, codes=torch.full((20, 30), -(2**15), dtype=torch.int16)),
        replace(good, codes=good.codes + 1),
        replace(good, lattice=replace(lattice, rows=lattice.rows[1:])),
        replace(good, lattice=replace(lattice, columns=lattice.columns[:1])),
        replace(good, lattice=replace(lattice, seed=1)),
        replace(good, lattice=replace(lattice, rows=row + 961)),
        replace(good, lattice=replace(lattice, rows=row - 950)),
        replace(good, lattice=replace(lattice, spacing="log")),
        replace(good, lattice=replace(lattice, spacing="relative", columns=lattice.columns[:1])),
    ]
    for one in wrong:
        with pytest.raises(ValueError, match="lattice tensor"):
            encode_lattice_record(pointed(one, x))
    with pytest.raises(ValueError, match="relative"):
        encode_lattice_record(pointed(good, x, (squares((20, 30)),)))
    with pytest.raises(ValueError, match="other values"):
        encode_lattice_record(pointed(good, x + 1))


def test_points_of_several_kinds_are_not_written_as_one_record():
    shape, infos = (20, 30), tuple(TensorInfo(name, (20, 30), "F32") for name in "ab")
    good = points_of("log", shape, step=8)
    for other in (points_of("log", shape, step=9), points_of("linear", shape)):
        tensors = (good.dequantize(torch.float32), other.dequantize(torch.float32))
        with pytest.raises(ValueError, match="several spacings"):
            encode_lattice_record(LatticeInput("~ab", infos, tensors, (good, other)))


def test_every_shape_has_the_steps_that_the_document_says():
    for law in LAWS:
        for shape in SHAPES:
            rows, columns = reference.spans(law, shape)
            lattice = Lattice(law, torch.zeros(rows).short(), torch.zeros(columns).short())  # type: ignore[arg-type]
            others = [torch.ones(shape)] if law == "relative" else []
            made({"w": LatticeTensor(torch.zeros(shape).short(), lattice)}, others=others)
            for wrong in (
                replace(lattice, rows=torch.zeros(rows + 1).short()),
                replace(lattice, columns=torch.zeros(columns + 1).short()),
            ):
                with pytest.raises((ValueError, RuntimeError)):
                    made({"w": LatticeTensor(torch.zeros(shape).short(), wrong)}, others=others)


def test_powers_of_two_with_a_dither_are_not_written():
    good = points_of("log", (20, 30))
    with pytest.raises(ValueError, match="lattice tensor"):
        encode_lattice_record(
            pointed(replace(good, lattice=replace(good.lattice, seed=1)), good.dequantize(torch.float32))
        )


def test_a_record_without_values_comes_back():
    for law in ("linear", "log"):
        named = {name: points_of(law, shape) for name, shape in (("a", (0,)), ("b", (3, 0, 2)))}
        for parent in (None, held(named)):
            one = made(named, parent=parent)
            comes_back(decode(one.encoded, {}, parent), one)


def test_two_tensors_may_be_relative_to_the_same_one_and_none_to_too_many():
    v = squares((4, 5))
    one = made({name: points_of("relative", (4, 5), random=n) for n, name in enumerate("ab")}, others=[v, v])
    shared = replace(one.encoded, recipe={**one.encoded.recipe, "others": [[0, 0, 2]]})
    found = decode(shared, {"v": v}, None)
    assert {name: bits(x) for name, x in found.tensors.items()} == {name: bits(x) for name, x in one.values.items()}
    lone = made({"m": points_of("relative", (4, 5))}, others=[v])
    with pytest.raises(CorruptError):
        decode(replace(lone.encoded, recipe={**lone.encoded.recipe, "others": [[0, 0, 2]]}), {"v": v}, None)
