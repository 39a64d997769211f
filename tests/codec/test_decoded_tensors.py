"""Tensors that are held as codes: what they decode to, in whole and in rows, and how little of it is held."""

from __future__ import annotations

import pytest
import torch
from helpers.lattice_records import points_of

from shrinkpoint.codec.lattice import as_matrix
from shrinkpoint.codec.reference import (
    CastSource,
    DecodedTensors,
    LatticeSource,
    Reference,
    RowSample,
    tensor_layout,
    tensor_rows,
)

ROWS = [slice(None), slice(0), slice(1), slice(2, None, 3), slice(1, 4), slice(0, None, 100)]


def state(shape: tuple[int, ...] = (7, 5)) -> DecodedTensors:
    """Second and first moments, a weight, its cast, and a tensor that is held as it is."""
    sources = {
        "v": LatticeSource(points_of("log", shape, at=-160, step=5).narrow(), torch.float32),
        "m": LatticeSource(points_of("relative", shape, seed=3).narrow(), torch.float32),
        "w": LatticeSource(points_of("linear", shape, "far", seed=5), torch.bfloat16),
        "low": CastSource("m", torch.bfloat16),
        "x": torch.arange(6.0).reshape(2, 3),
    }
    return DecodedTensors(sources)


def expected() -> dict[str, torch.Tensor]:
    v = points_of("log", (7, 5), at=-160, step=5).dequantize(torch.float32)
    m = points_of("relative", (7, 5), seed=3).dequantize(torch.float32, v)
    w = points_of("linear", (7, 5), "far", seed=5).dequantize(torch.bfloat16)
    return {"v": v, "m": m, "w": w, "low": m.to(torch.bfloat16), "x": torch.arange(6.0).reshape(2, 3)}


def test_values_are_decoded_when_they_are_asked_for() -> None:
    tensors = state()
    assert [*tensors] == tensors.names == ["v", "m", "w", "low", "x"]
    for name, values in expected().items():
        assert torch.equal(tensors[name], values)
        assert tensor_layout(tensors, name) == (tuple(values.shape), values.dtype)
    assert tensors.nbytes == 35 + 35 + 70 + 24


@pytest.mark.parametrize("name", ["v", "m", "w", "low", "x"])
def test_some_rows_are_those_of_all_values(name: str) -> None:
    for rows in ROWS:
        assert torch.equal(tensor_rows(state(), name, rows), as_matrix(expected()[name])[rows])


def test_a_subset_needs_nothing_that_is_not_in_it() -> None:
    for names in (["m"], ["low"], ["v", "m"], ["m", "low"]):
        part = state().subset(names)
        assert [*part] == names
        assert all(torch.equal(part[name], expected()[name]) for name in names)


def test_values_that_were_decoded_are_not_held_for_ever() -> None:
    points = points_of("linear", (7, 5)).narrow()
    values = points.dequantize(torch.float32)
    tensors = DecodedTensors({"w": LatticeSource(points, torch.float32, values)})
    assert tensors["w"] is values and tensors.nbytes == 5 * 35
    lean = tensors.without_values()
    assert lean.nbytes == 35 and torch.equal(lean["w"], values)


def test_original_rows_are_a_sample_all_values_or_those_that_were_decoded() -> None:
    decoded, rows = state(), slice(1, None, 2)
    sample = RowSample((7, 5), rows, torch.ones(3, 5))
    for originals, values in (
        ({"w": sample}, torch.ones(3, 5)),
        ({"w": torch.full((7, 5), 2.0)}, torch.full((3, 5), 2.0)),
        (decoded, expected()["w"][rows]),
    ):
        found = Reference(decoded, originals=originals).original_rows("w", (7, 5), rows)
        assert found is not None and torch.equal(found, values)
        assert Reference(decoded, originals=originals).original_rows("w", (5, 7), rows) is None
    assert Reference(decoded, originals={"w": sample}).original_rows("w", (7, 5), slice(None)) is None
    assert Reference(decoded).original_rows("w", (7, 5), rows) is None
