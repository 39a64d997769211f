"""Recipes survive JSON, and JSON that is no recipe is refused."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.codec.coder import MAX_CHUNK, CoderConfig
from shrinkpoint.codec.recipe import (
    MAX_LATTICE_STEP,
    MAX_MEMBERS,
    MAX_REFILLS,
    MAX_TAPS,
    BitPacked,
    CodebookRecipe,
    CodedRecipe,
    CopyRecipe,
    CyclicDelta,
    LatticeRecipe,
    LzmaCodes,
    PlainRecipe,
    RecipeParser,
    SameRecipe,
    TwisterRecipe,
    from_json,
    to_json,
)
from shrinkpoint.codec.recipe import ordinals as ordinals_of
from shrinkpoint.tensors.info import JSON

ordinals = st.lists(st.integers(0, 2**40), max_size=8).map(tuple) | st.builds(
    lambda first, step, count: tuple(range(first, first + step * count, step)),
    st.integers(0, 99),
    st.integers(1, 9),
    st.integers(0, 50),
)
runs = st.builds(
    CoderConfig,
    tokens=st.sampled_from(["level", "delta", "planes", "codes"]),
    predictor=st.sampled_from(["none", "base", "tap", "adam", "square"]),
    companion=st.sampled_from(["none", "base", "moment1"]),
    moments=st.booleans(),
    factors=st.booleans(),
    sign=st.booleans(),
    fine=st.integers(0, 52),
    shift=st.integers(0, 52),
    bias=st.integers(-4096, 4096),
    top=st.integers(0, 4095),
    parameters=st.just(()) | st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 4),
    chunk=st.integers(1, MAX_CHUNK),
)


def max_ordinal_of(data: JSON) -> int:
    return max(ordinals_of(from_json(data)), default=-1)


@st.composite
def coded(draw: st.DrawFn) -> CodedRecipe:
    taps = draw(st.integers(1, MAX_TAPS))
    first = draw(ordinals)
    second = draw(st.permutations(first)) if first else ()
    many = tuple(draw(st.lists(runs, min_size=1, max_size=min(taps, 3))))
    return CodedRecipe(many, taps, draw(st.booleans()), tuple(zip(first, second, strict=True)))


codes = st.one_of(
    runs,
    st.builds(BitPacked, st.integers(1, 8)),
    st.builds(LzmaCodes, st.integers(1, 8)),
    st.builds(CyclicDelta, st.integers(1, 256), st.booleans(), st.booleans()),
)


@st.composite
def quantized(draw: st.DrawFn) -> CodebookRecipe:
    first = draw(st.integers(0, 2))
    moments = tuple((n, n + 1) for n in draw(ordinals))
    how = draw(codes)
    elsewhere = isinstance(how, CyclicDelta) or (isinstance(how, CoderConfig) and how.needs_base)
    under = draw(ordinals) if elsewhere else ()
    base = not under and draw(st.booleans())
    return CodebookRecipe(
        draw(st.integers(1, 256 - first)),
        first,
        how,
        draw(st.none() | runs),
        draw(st.sampled_from(["F32", "BF16"])),
        draw(st.none() | runs),
        base,
        moments,
        not base and draw(st.booleans()),
        under,
    )


@st.composite
def gridded(draw: st.DrawFn) -> LatticeRecipe:
    law = draw(st.sampled_from(["linear", "relative", "log"]))
    run = CoderConfig("codes", predictor="base", top=draw(st.integers(0, 255)), chunk=draw(st.integers(1, MAX_CHUNK)))
    base = draw(st.booleans())
    others = draw(ordinals.filter(len)) if law == "relative" else ()
    step = draw(st.integers(1, MAX_LATTICE_STEP)) if law == "log" else 1
    inherited, moved = draw(st.sampled_from([(False, False), (True, False), (False, True)])) if base else (False, False)
    axes = (
        ()
        if inherited or moved
        else draw(st.lists(st.integers(1, 9), max_size=3).filter(lambda x: max(x, default=2) > 1))
    )
    return LatticeRecipe(law, run, step, base, inherited, others, moved=moved, axes=tuple(axes))


@settings(deadline=None, max_examples=60)
@given(
    st.one_of(
        st.just(PlainRecipe()),
        st.just(SameRecipe()),
        st.builds(CopyRecipe, ordinals),
        coded(),
        quantized(),
        gridded(),
        st.builds(TwisterRecipe, st.lists(st.integers(0, MAX_REFILLS), max_size=4).map(tuple)),
    )
)
def test_a_recipe_survives_json(recipe):
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


def test_ordinals_of_consecutive_tensors_cost_no_more_than_a_few():
    many = tuple((2 * i, 2 * i + 1) for i in range(10_000))
    assert len(json.dumps(to_json(CodedRecipe((CoderConfig("level"),), moments=many)))) < 120


def test_a_quantized_recipe_says_only_what_is_not_usual():
    assert to_json(CodebookRecipe(16, 2, BitPacked(5))) == {
        "kind": "quantized",
        "bins": 16,
        "first": 2,
        "codes": {"packed": 5},
    }
    how = CodebookRecipe(
        4, 0, CyclicDelta(6, True, False), CoderConfig("level"), "F32", CoderConfig("delta"), True, ((3, 4), (5, 6))
    )
    assert to_json(how) == {
        "kind": "quantized",
        "bins": 4,
        "first": 0,
        "codes": {"cyclic": [6, True, False]},
        "centers": {"tokens": "level"},
        "exact": "F32",
        "exacts": {"tokens": "delta"},
        "base": True,
        "moments": [[[3, 2, 2]], [[4, 2, 2]]],
    }
    assert max_ordinal_of(to_json(how)) == 6 and max_ordinal_of(to_json(CodebookRecipe(4, 0, BitPacked(2)))) == -1
    how = CodebookRecipe(15, 2, CoderConfig("codes", "base"), residual=True, contexts=(4, 5, 6, 9))
    assert to_json(how) == {
        "kind": "quantized",
        "bins": 15,
        "first": 2,
        "codes": {"run": {"tokens": "codes", "predictor": "base"}},
        "residual": True,
        "under": [[4, 1, 3], [9, 0, 1]],
    }
    assert max_ordinal_of(to_json(how)) == 9
    assert to_json(CodebookRecipe(15, 2, LzmaCodes(4)))["codes"] == {"lzma": 4}


def test_a_gridded_recipe_says_only_what_is_not_usual():
    run = CoderConfig("codes", predictor="base", top=135)
    usual = {"kind": "gridded", "law": "linear", "run": {"tokens": "codes", "predictor": "base", "top": 135}}
    assert to_json(LatticeRecipe("linear", run)) == usual and max_ordinal_of(usual) == -1
    assert to_json(LatticeRecipe("linear", run, base=True)) == {**usual, "base": True}
    assert to_json(LatticeRecipe("linear", run, base=True, inherited=True)) == {
        **usual,
        "base": True,
        "inherited": True,
    }
    assert to_json(LatticeRecipe("log", run, 24)) == {**usual, "law": "log", "step": 24}
    relative = to_json(LatticeRecipe("relative", run, relative_to=(4, 5, 6, 9)))
    assert relative == {**usual, "law": "relative", "others": [[4, 1, 3], [9, 0, 1]]} and max_ordinal_of(relative) == 9


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["level", "base"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


POINTS = {"kind": "gridded", "law": "linear", "run": {"tokens": "codes", "predictor": "base"}}
QUANTIZED = {"kind": "quantized", "bins": 16, "first": 2, "codes": {"packed": 5}}
DELTA = {**QUANTIZED, "codes": {"cyclic": [18, True, True]}}


@settings(deadline=None, max_examples=60)
@given(
    junk,
    st.sampled_from(
        [
            "kind",
            "runs",
            "taps",
            "base",
            "moments",
            "of",
            "bins",
            "first",
            "codes",
            "exact",
            "exacts",
            "residual",
            "under",
            "law",
            "run",
            "step",
            "inherited",
            "moved",
            "axes",
            "others",
            "more",
        ]
    ),
    st.data(),
)
def test_json_that_is_no_recipe_raises_nothing_but_value_errors(value, key, data):
    good = data.draw(
        st.sampled_from(
            [
                {"kind": "plain"},
                {"kind": "copy", "of": []},
                to_json(CodedRecipe((CoderConfig("level"),))),
                QUANTIZED,
                DELTA,
            ]
        )
    )
    for hostile in (value, {**good, key: value}):
        with suppress(ValueError):
            from_json(hostile)


def test_what_no_encoder_writes_is_refused():
    for recipe in [
        None,
        [],
        "plain",
        {},
        {"kind": "Plain"},
        {"kind": "plain", "more": 1},
        {"kind": "same", "base": True},
        {"kind": "copy"},
        {"kind": "copy", "of": [1]},
        {"kind": "copy", "of": [[0, 1]]},
        {"kind": "copy", "of": [[0, 0, 0]]},
        {"kind": "copy", "of": [[-1, 0, 1]]},
        {"kind": "copy", "of": [[0, -1, 2]]},
        {"kind": "copy", "of": [[0, 0, 1.0]]},
        {"kind": "copy", "of": [[0, 0, True]]},
        {"kind": "copy", "of": [[0, 1, MAX_MEMBERS + 1]]},
        {"kind": "copy", "of": [[0, 1, MAX_MEMBERS], [0, 1, 1]]},
        {"kind": "coded", "runs": []},
        {"kind": "coded", "runs": [{}]},
        {"kind": "coded", "runs": [None]},
        {"kind": "coded", "runs": [{"tokens": "level"}] * 2},
        {"kind": "coded", "runs": [{"tokens": "level"}], "taps": 0},
        {"kind": "coded", "runs": [{"tokens": "level"}], "taps": MAX_TAPS + 1},
        {"kind": "coded", "runs": [{"tokens": "level"}], "taps": True},
        {"kind": "coded", "runs": [{"tokens": "level"}], "base": 1},
        {"kind": "coded", "runs": [{"tokens": "level"}], "moments": 3},
        {"kind": "coded", "runs": [{"tokens": "level"}], "moments": None},
        {"kind": "coded", "runs": [{"tokens": "level"}], "moments": [[[0, 0, 1]]]},
        {"kind": "coded", "runs": [{"tokens": "level"}], "moments": [[[0, 0, 1]], []]},
        {"kind": "coded", "runs": [{"tokens": "level", "chunk": 0}]},
        {"kind": "coded", "runs": [{"tokens": "level", "chunk": MAX_CHUNK + 1}]},
        {"kind": "coded", "runs": [{"tokens": "level", "fine": -1}]},
        {"kind": "coded", "runs": [{"tokens": "level", "fine": 1.0}]},
        {"kind": "coded", "runs": [{"tokens": "level", "sign": 1}]},
        {"kind": "coded", "runs": [{"tokens": "level", "bias": 1 << 20}]},
        {"kind": "coded", "runs": [{"tokens": "level", "top": 1 << 12}]},
        {"kind": "coded", "runs": [{"tokens": "level", "parameters": [1.0]}]},
        {"kind": "coded", "runs": [{"tokens": "level", "parameters": [1, 2, 3, 4]}]},
        {"kind": "coded", "runs": [{"tokens": "level", "unknown": 0}]},
        {"kind": "quantized"},
        {**QUANTIZED, "more": 1},
        {**QUANTIZED, "runs": []},
        {**QUANTIZED, "taps": 1},
        {**QUANTIZED, "bins": 0},
        {**QUANTIZED, "bins": True},
        {**QUANTIZED, "bins": 255},
        {**QUANTIZED, "first": 3},
        {**QUANTIZED, "first": -1},
        {**QUANTIZED, "first": False},
        {**QUANTIZED, "codes": {}},
        {**QUANTIZED, "codes": {"packed": 0}},
        {**QUANTIZED, "codes": {"packed": 9}},
        {**QUANTIZED, "codes": {"packed": True}},
        {**QUANTIZED, "codes": {"packed": 5, "run": {"tokens": "codes"}}},
        {**QUANTIZED, "codes": {"run": None}},
        {**QUANTIZED, "codes": {"cyclic": [18, True]}},
        {**QUANTIZED, "codes": {"cyclic": [0, True, True]}},
        {**QUANTIZED, "codes": {"cyclic": [257, True, True]}},
        {**QUANTIZED, "codes": {"cyclic": [True, True, True]}},
        {**QUANTIZED, "codes": {"cyclic": [18, 1, True]}},
        {**QUANTIZED, "codes": {"other": 1}},
        {**QUANTIZED, "centers": 1},
        {**QUANTIZED, "exacts": []},
        {**QUANTIZED, "exact": "F16"},
        {**QUANTIZED, "base": 1},
        {**QUANTIZED, "moments": 3},
        {**QUANTIZED, "codes": {"lzma": 0}},
        {**QUANTIZED, "codes": {"lzma": 9}},
        {**QUANTIZED, "codes": {"lzma": True}},
        {**QUANTIZED, "codes": {"lzma": 5, "packed": 5}},
        {**QUANTIZED, "residual": 1},
        {**QUANTIZED, "residual": True, "base": True},
        {**DELTA, "base": True, "under": [[0, 0, 1]]},
        {**DELTA, "under": []},
        {**DELTA, "under": 0},
        {**QUANTIZED, "under": [[0, 0, 1]]},
        {**QUANTIZED, "codes": {"run": {"tokens": "codes"}}, "under": [[0, 0, 1]]},
        {"kind": "gridded"},
        {"kind": "gridded", "law": "linear"},
        {"kind": "gridded", "run": POINTS["run"]},
        {**POINTS, "more": 1},
        {**POINTS, "moments": []},
        {**POINTS, "law": "LOG"},
        {**POINTS, "law": 1},
        {**POINTS, "run": None},
        {**POINTS, "run": {"tokens": "codes"}},
        {**POINTS, "run": {"tokens": "level"}},
        {**POINTS, "run": {"tokens": "delta", "predictor": "base"}},
        {**POINTS, "run": {**POINTS["run"], "moments": True}},
        {**POINTS, "run": {**POINTS["run"], "top": -1}},
        {**POINTS, "step": 2},
        {**POINTS, "law": "log", "step": 0},
        {**POINTS, "law": "log", "step": True},
        {**POINTS, "law": "log", "step": MAX_LATTICE_STEP + 1},
        {**POINTS, "base": 1},
        {**POINTS, "inherited": True},
        {**POINTS, "base": True, "inherited": 1},
        {**POINTS, "base": False, "inherited": True},
        {**POINTS, "moved": True},
        *({**POINTS, "axes": axes} for axes in (2, [], [1], [0, 2], [True, 2], [2.0], [[2]], None, "2")),
        {**POINTS, "base": True, "inherited": True, "axes": [2]},
        {**POINTS, "base": True, "moved": True, "axes": [2]},
        {**POINTS, "base": True, "moved": 1},
        {**POINTS, "base": True, "inherited": True, "moved": True},
        {**POINTS, "others": [[0, 0, 1]]},
        {**POINTS, "others": []},
        {**POINTS, "law": "log", "others": [[0, 0, 1]]},
        {**POINTS, "law": "relative"},
        {**POINTS, "law": "relative", "others": []},
        {**POINTS, "law": "relative", "others": 1},
        {"kind": "coded", "runs": [{"tokens": "level"}], "law": "linear"},
        {"kind": "coded", "runs": [{"tokens": "level"}], "residual": True},
        {"kind": "coded", "runs": [{"tokens": "level"}], "under": [[0, 0, 1]]},
    ]:
        with pytest.raises(ValueError):
            from_json(recipe)


def test_a_parser_gives_what_from_json_does_for_each_number_of_tensors() -> None:
    parse, copies = RecipeParser(), {"kind": "copy", "of": [[4, 1, 3]]}
    assert parse(copies, 3) == parse(copies, 4) == from_json(copies)
    assert parse(copies, 3) is parse(copies, 3)
    for _ in range(2):
        assert parse.parse_valid(copies, 2) is None
        with pytest.raises(ValueError, match="3 ordinals for 2 tensors"):
            parse(copies, 2)
