"""Values with a gain come back bit for bit, whatever their origin is counted from, and no reader takes a wrong one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.lattice_records import DTYPES, Made, codes_of, comes_back, grid, lattice_of, made, members, nearest
from helpers.parameters import each_value
from helpers.strategies import bits
from reference import lattice_record as reference
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, LatticeTensor
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError, CorruptError, TruncatedError
from shrinkpoint.tensors.dtypes import torch_dtype

SHAPE = (60, 40)


def reference_of(named: dict[str, LatticeTensor], dtype: str = "F32") -> Reference:
    return Reference({name: one.dequantize(torch_dtype(dtype)) for name, one in named.items()}, named)


def moved(points: LatticeTensor, gain: float, *, random: int, by: int = 1) -> LatticeTensor:
    """The next checkpoint on the same lattice: an eighth of the codes have moved."""
    generator = torch.Generator().manual_seed(random)
    steps = torch.randint(-by, by + 1, points.codes.shape, generator=generator)
    steps *= torch.rand(points.codes.shape, generator=generator) < 1 / 8
    return replace(points, codes=points.codes + steps.to(points.codes.dtype), origin=points.first_codes, gain=gain)


def keyframe(seed: int = 9, kind: str = "near") -> dict[str, LatticeTensor]:
    lattices = {"a": lattice_of("linear", SHAPE, seed=seed), "b": lattice_of("linear", (500,), seed=seed, random=3)}
    return {name: LatticeTensor(codes_of("linear", (60, 40) if name == "a" else (500,), kind), lattice).narrow()
            for name, lattice in lattices.items()}  # fmt: off


def by_the_document(one: Made, origins: dict[str, Tensor]) -> dict[str, Tensor]:
    found = reference.decode(one.encoded.recipe, bytes(one.encoded.parts["points"]), members(one))
    out = {}
    for (lattice, codes), (name, points) in zip(found, one.points.items(), strict=True):
        origin = origins[name].long().reshape(codes.shape).numpy()
        values = lattice.values(codes, None, origin)
        out[name] = torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(points.codes.shape)
    return out


@pytest.mark.parametrize(("overwrites", "dtype"), each_value([False, True], DTYPES))
def test_a_chain_with_gains_comes_back_from_what_a_reader_decoded(dtype, overwrites):
    points, written, decoded = keyframe(), None, None
    for i, gains in enumerate([(1.0, 1.0), (1.5, 1.0), (1.25, 1 / 16), (16.0, 2.0)]):
        if i:
            points = {name: moved(one, gain, random=i) for (name, one), gain in zip(points.items(), gains, strict=True)}
        one = made(points, dtype, written)
        assert one.encoded.recipe.get("gains", False) is bool(i) and set(one.encoded.parts) == {"points"}
        found = decode(one.encoded, {}, decoded, overwrite_base=overwrites)
        comes_back(found, one)
        written, decoded = reference_of(points, dtype), found


def test_values_are_those_that_the_document_says():
    before = keyframe()
    parent = reference_of(before)
    for dtype in DTYPES:
        one = made({n: moved(x, 1.375, random=5) for n, x in before.items()}, dtype, reference_of(before, dtype))
        if dtype == "F32":
            one = made({n: moved(x, 1.375, random=5) for n, x in before.items()}, dtype, parent)
        points = {name: before[name].dequantize(torch.float32) for name in before}
        told = replace(one, parent=Reference(points, before))  # the parent's points predict, in F32
        values = by_the_document(told, {name: x.codes for name, x in before.items()})
        for name, expected in values.items():
            assert bits(expected.to(torch_dtype(dtype))) == bits(one.values[name])


@pytest.mark.parametrize(
    ("kind", "parent"), each_value(["near", "far"], ["none", "another lattice", "another origin", "values"])
)
def test_an_origin_that_is_not_the_parent_s_is_stored(parent, kind):
    now = {n: moved(x, 1.5, random=2) for n, x in keyframe(kind=kind).items()} if kind == "near" else {
        n: LatticeTensor(x.codes, x.lattice, origin=codes_of("linear", tuple(x.codes.shape), "far", random=8), gain=2.0)
        for n, x in keyframe(kind=kind).items()
    }  # fmt: off
    parents = {
        "none": None,
        "another lattice": reference_of(keyframe(seed=4)),
        "another origin": reference_of({n: replace(x, origin=None, gain=1.0) for n, x in now.items()}),
        "values": Reference({n: torch.randn(x.codes.shape) for n, x in now.items()}),
    }
    one = made(now, "F32", parents[parent])
    assert one.encoded.recipe["origin"] is True
    comes_back(decode(one.encoded, {}, parents[parent], threads=2), one)
    found = reference.decode(one.encoded.recipe, bytes(one.encoded.parts["points"]), members(one))
    origins = reference.origins(bytes(one.encoded.parts["origin"]), [codes for _, codes in found])
    for (lattice, codes), origin, points in zip(found, origins, now.values(), strict=True):
        assert origin.reshape(-1).tolist() == points.first_codes.reshape(-1).tolist()
        values = torch.from_numpy(lattice.values(codes, None, origin)).reshape(points.codes.shape)
        assert bits(values) == bits(points.dequantize(torch.float32))


def test_without_a_gain_and_with_a_gain_of_one_values_are_the_points():
    before = keyframe()["a"]
    now = moved(before, 1.0, random=1)
    assert bits(now.dequantize(torch.float32)) == bits(now.points().dequantize(torch.float32))
    assert bits(replace(now, gain=1.5).dequantize(torch.float32)) != bits(now.points().dequantize(torch.float32))
    some = slice(3, None, 7)
    assert bits(replace(now, gain=1.5).dequantize_rows(some, torch.float32)) == bits(
        replace(now, gain=1.5).dequantize(torch.float32)[some]
    )
    assert grid(now.lattice) == grid(before.lattice)


def test_what_follows_without_gains_is_predicted_by_the_values_and_begins_anew():
    gained = {n: moved(x, 1.5, random=1) for n, x in keyframe().items()}
    values = {n: x.dequantize(torch.float32) + 0.01 for n, x in gained.items()}
    for lattices in (gained, keyframe(seed=77)):
        now = {n: nearest(x, lattices[n].lattice) for n, x in values.items()}
        one = made(now, "F32", reference_of(gained))
        found = decode(one.encoded, {}, reference_of(gained))
        comes_back(found, one)
        assert found.quantized["a"].origin is None and found.quantized["a"].gain == 1


def test_a_chain_is_coded_between_points_so_that_what_has_not_moved_costs_nothing():
    before = keyframe()
    same = {n: replace(x, origin=x.codes, gain=1.7) for n, x in before.items()}
    one = made(same, "F32", reference_of(before))
    again = made({n: replace(x, gain=1.3) for n, x in same.items()}, "F32", reference_of(same))
    assert max(one.nbytes, again.nbytes) < 180


@pytest.mark.parametrize("gain", [float("nan"), float("inf"), 0.0, -1.5, 1e30, 1 / 17, 16.5])
def test_a_gain_out_of_range_is_neither_written_nor_read(gain):
    before = keyframe()
    one = made({n: moved(x, 1.5, random=1) for n, x in before.items()}, "F32", reference_of(before))
    with pytest.raises(ValueError, match="gain"):
        made({n: moved(x, gain, random=1) for n, x in before.items()}, "F32", reference_of(before))
    part = bytearray(one.encoded.parts["points"])
    part[28:32] = np.float32(gain).tobytes()  # behind the sizes and two seeds
    with pytest.raises(CorruptError, match="gains out of range"):
        decode(replace(one.encoded, parts={"points": bytes(part)}), {}, reference_of(before))


def test_a_parent_without_the_lattice_or_with_another_origin_is_refused():
    before = keyframe()
    one = made({n: moved(x, 1.5, random=1) for n, x in before.items()}, "F32", reference_of(before))
    values = reference_of(before).tensors
    other = {n: replace(x, codes=x.codes.roll(1)) for n, x in before.items()}
    for parent in (
        None,
        Reference(values),
        reference_of(keyframe(seed=5)),
        reference_of(other),
        reference_of({n: replace(x, origin=other[n].codes, gain=1.5) for n, x in before.items()}),
    ):
        with pytest.raises((ChainError, CorruptError)):
            decode(one.encoded, {}, parent)


def test_a_forged_recipe_or_origin_is_refused():
    now = {n: moved(x, 1.5, random=2) for n, x in keyframe().items()}
    one = made(now)
    recipe, parts = one.encoded.recipe, one.encoded.parts
    forged = [
        {**recipe, "gains": 1},
        {**recipe, "origin": "yes"},
        {**recipe, "law": "log"},
        {key: value for key, value in recipe.items() if key != "gains"},
        {key: value for key, value in recipe.items() if key != "origin"},
    ]
    for other in forged:
        with pytest.raises(CorruptError):
            decode(replace(one.encoded, recipe=other), {}, None)
    stored = bytes(parts["origin"])
    for origin in (b"", stored[:7], stored[:-40]):
        with pytest.raises((CorruptError, TruncatedError)):
            decode(replace(one.encoded, parts={**parts, "origin": origin}), {}, None)
    with pytest.raises(CorruptError):
        decode(replace(one.encoded, parts={"points": parts["points"]}), {}, None)
    far = {n: replace(x, origin=torch.full_like(x.codes, MAX_LATTICE_CODE, dtype=torch.int16)) for n, x in now.items()}
    comes_back(decode(made(far).encoded, {}, None), made(far))
    beyond = bytes(made(far).encoded.parts["origin"]).replace(
        np.int32(MAX_LATTICE_CODE).tobytes(), np.int32(2**31 - 1).tobytes()
    )
    with pytest.raises(CorruptError, match="too far out"):
        decode(replace(made(far).encoded, parts={**made(far).encoded.parts, "origin": beyond}), {}, None)


def test_tensors_with_and_without_an_origin_do_not_share_a_record():
    before = keyframe()
    with pytest.raises(ValueError, match="with and without an origin"):
        made({"a": moved(before["a"], 1.5, random=1), "b": before["b"]}, "F32", reference_of(before))
    with pytest.raises(ValueError, match="origin of another shape"):
        made({"a": replace(before["a"], origin=before["b"].codes)}, "F32", None)
