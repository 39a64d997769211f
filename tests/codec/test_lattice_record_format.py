"""docs/format.md is enough to read points: a slow reader written from that page finds those that were written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.lattice_records import (
    LAWS,
    cases,
    codes_of,
    comes_back,
    grid,
    lattice_of,
    made,
    members,
    squares,
    told_by_contexts,
)
from hypothesis import given, settings
from reference import lattice_record as reference

from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import Reference


@settings(deadline=None, max_examples=60)
@given(cases())
def test_a_reader_written_from_the_document_finds_the_same_points(one):
    found = reference.decode(one.encoded.recipe, one.encoded.parts["points"], members(one))
    for (lattice, codes), points in zip(found, one.points.values(), strict=True):
        assert lattice == grid(points.lattice)
        assert codes.reshape(-1).tolist() == points.codes.reshape(-1).tolist()


@pytest.mark.parametrize("law", LAWS)
def test_every_context_is_the_one_that_the_document_says(law):
    for kind in ["alone", "anywhere", "near its points", "on its points"]:
        shape, others = (50, 60), [squares((50, 60))] if law == "relative" else []
        lattice = lattice_of(law, shape, seed=3, step=24, at=-40, spread=40)
        if law != "log":
            lattice = replace(lattice, rows=lattice.rows + 7)
        points = LatticeTensor(codes_of(law, shape, random=1), lattice)
        at = points.dequantize(torch.float32, others[0] if others else None)
        steps = at.abs() if law == "log" else lattice.scales(others[0] if others else None).expand(shape)
        random = torch.Generator().manual_seed(2)
        away = {"anywhere": 1.0, "near its points": 1 / 40, "on its points": 0.0}.get(kind, 0.0)
        if law == "log":
            values = at * torch.exp2(away * 12 * torch.randn(shape, generator=random))
        else:
            values = at + away * steps * (torch.rand(shape, generator=random) - 0.5)
        parent = None if kind == "alone" else Reference({"w": values})
        one = told_by_contexts(made({"w": points}, "F32", parent, others=others))
        ((found, codes),) = reference.decode(one.encoded.recipe, one.encoded.parts["points"], members(one))
        assert found == grid(one.points["w"].lattice)
        assert codes.reshape(-1).tolist() == one.points["w"].codes.reshape(-1).tolist()
        assert one.nbytes < 3000  # a fifth of what they would cost without contexts
        comes_back(decode(one.encoded, one.decoded, one.parent), one)
