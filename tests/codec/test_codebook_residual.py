"""Differences to the parent's values, and codes under those of other tensors: they come back, or nothing does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.codebooks import ALL_CODERS, ANY_BINS, alike, most_bins, moved, symbols, symbols_of
from helpers.lattice_records import same_reference
from helpers.strategies import FLOATS, bits, from_bytes, shapes, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shrinkpoint._native import xxh3_128
from shrinkpoint.codec.codebook_record import CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.parallel import MIN_SHARED_DECODING, decode_all
from shrinkpoint.codec.record import coding_context, decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError, CorruptError
from shrinkpoint.tensors.dtypes import dtype_name, torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

EXACT = (torch.bfloat16, torch.float32)


def made(
    named: Mapping[str, CodebookTensor],
    dtype: str,
    parent: Reference | None = None,
    *,
    under: Sequence[Tensor] = (),
    ordinals: Sequence[int] = (),
    moments: Mapping[str, Tensor] | None = None,
    coders: Sequence[str] = ALL_CODERS,
) -> tuple[EncodedRecord, dict[str, Tensor]]:
    """A record of these symbols as a reader meets it, and the tensors that it must give."""
    infos = tuple(TensorInfo(name, tuple(one.codes.shape), dtype) for name, one in named.items())
    held = {} if parent is None else parent.tensors
    values = {name: one.dequantize(torch_dtype(dtype), held.get(name)) for name, one in named.items()}
    pairs = [("m", "v")] * len(infos) if moments else []
    known = coding_context(infos, 1, None, pairs, moments or {})
    material = CodebookInput(
        "record",
        infos,
        tuple(values.values()),
        tuple(named.values()),
        known,
        ((0, 1),) * len(pairs),
        parent,
        tuple(under),
        tuple(ordinals),
    )
    encoded = encode_codebook_record(material, coders=coders, threads=1)
    return replace(encoded, recipe=json.loads(json.dumps(encoded.recipe))), values


def comes_back(found: Reference, named: Mapping[str, CodebookTensor], values: Mapping[str, Tensor]) -> None:
    assert found.tensors.keys() == found.quantized.keys() == named.keys()
    for name, one in named.items():
        assert alike(found.quantized[name], one)
        assert bits(found.tensors[name]) == bits(values[name])
        assert found.tensors[name].dtype == values[name].dtype


def size_of(record: EncodedRecord) -> int:
    return len(record.parts["symbols"])


# differences


@st.composite
def residuals(draw: st.DrawFn) -> tuple[dict[str, CodebookTensor], dict[str, Tensor], str]:
    """Differences of one to three members, and the parent's values: any bits, nan and -0.0 among them."""
    first, exact, dtype = draw(st.integers(0, 2)), draw(st.sampled_from(EXACT)), draw(st.sampled_from(FLOATS))
    bins = min(draw(ANY_BINS), most_bins(first))
    now, before = {}, {}
    for i, shape in enumerate(draw(st.lists(shapes(), min_size=1, max_size=3))):
        one = draw(symbols(shape, bins, first, exact))
        if draw(st.booleans()):  # a difference of nothing, in the middle of the others
            one = replace(one, centers=one.centers.where(one.centers.abs() > 0.01, 0.0))
        now[str(i)] = replace(one, residual=True)
        before[str(i)] = draw(tensors((dtype,), st.just(shape), ("dense",)))
    return now, before, dtype


@pytest.mark.parametrize("coder", [*ALL_CODERS, "all"])
def test_differences_to_any_values_come_back_through_any_coder(coder):
    @settings(deadline=None, max_examples=15)
    @given(residuals())
    def holds(case):
        now, before, dtype = case
        parent = Reference(before)
        encoded, values = made(now, dtype, parent, coders=ALL_CODERS if coder == "all" else (coder,))
        assert encoded.recipe["residual"] is True and "base" not in encoded.recipe
        assert encoded.base == xxh3_128(b"".join(bits(x) for x in before.values()))
        comes_back(decode(encoded, {}, parent, threads=1), now, values)

    holds()


def by_the_document(one: CodebookTensor, base: Tensor) -> Tensor:
    """docs/format.md again, a value at a time, in numpy."""
    dtype = dtype_name(base.dtype)
    centers = [np.float32(0)] * one.first_code + [np.float32(center) for center in one.centers.tolist()]
    exact = iter(one.exact.to(base.dtype))
    out = base.clone().reshape(-1)
    for i, (code, old) in enumerate(zip(one.codes.reshape(-1).tolist(), base.reshape(-1), strict=True)):
        if one.first_code and code == one.first_code - 1:
            out[i] = next(exact)
        elif centers[code] != 0:
            with np.errstate(all="ignore"):
                total = np.float32(old.to(torch.float32).item()) + centers[code]
                assert isinstance(total, np.float32)
                new = rounded(total, dtype)
            if new.isfinite():
                out[i] = new
    return out.reshape(base.shape)


def rounded(total: np.float32, dtype: str) -> Tensor:
    """To the nearest, ties to even."""
    if dtype != "BF16":
        name = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
        return torch.from_numpy(np.array(total.astype(name)))
    word = int(total.view(np.uint32))
    if not np.isfinite(total):
        return torch.tensor(float("nan")).bfloat16()
    word = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return from_bytes(word.to_bytes(2, "little"), "BF16", ())


@settings(deadline=None, max_examples=80)
@given(residuals())
def test_a_difference_is_added_as_the_document_says(case):
    now, before, dtype = case
    for name, one in now.items():
        assert bits(one.dequantize(torch_dtype(dtype), before[name])) == bits(by_the_document(one, before[name]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_sum_of_finite_values_is_infinite_and_no_nan_changes(dtype):
    most = float(torch.finfo(torch_dtype(dtype if dtype != "F64" else "F32")).max)
    base = torch.tensor([most, -most, torch.nan, torch.inf, most]).to(torch_dtype(dtype))
    codes, far = torch.tensor([3, 2, 3, 2, 2]).to(torch.uint8), 0.9 * most
    one = CodebookTensor(codes, torch.tensor([-far, far]), torch.empty(0), residual=True)
    found = one.dequantize(base.dtype, base)
    assert bits(found[:4]) == bits(base[:4])
    assert 0.09 * most < found[4] < 0.11 * most


@pytest.mark.parametrize("exact", EXACT)
def test_exact_values_near_the_parent_s_are_smaller_under_them(exact):
    random = torch.Generator().manual_seed(1)
    base = torch.randn(20_000, generator=random)
    near = (base * (1 + 1e-4 * torch.randn(20_000, generator=random))).to(exact)
    one = CodebookTensor(torch.zeros(20_000, dtype=torch.uint8), torch.zeros(1), near, first_code=1, residual=True)
    encoded, values = made({"w": one}, "F32", Reference({"w": base}))
    assert encoded.recipe["exacts"]["predictor"] == "base"
    far, _ = made({"w": one}, "F32", Reference({"w": torch.ones(20_000)}))
    assert size_of(encoded) < 0.8 * size_of(far)
    comes_back(decode(encoded, {}, Reference({"w": base})), {"w": one}, values)


def test_only_the_parent_s_values_count_and_not_what_they_were_made_from():
    before = {"a": symbols_of((20, 30), 6), "b": symbols_of((5,), 9, seed=2)}
    values = {name: one.dequantize(torch.float32) for name, one in before.items()}
    now = {name: replace(symbols_of(tuple(x.shape), 7, seed=4), residual=True) for name, x in values.items()}
    parents = [
        Reference(values),
        Reference(values, before),
        Reference(values, {"a": before["a"]}),
        Reference({**values, "c": torch.ones(3)}, {name: replace(one, residual=True) for name, one in before.items()}),
    ]
    encoded, expected = made(now, "F32", parents[0])
    for parent in parents:
        assert made(now, "F32", parent)[0] == encoded
        comes_back(decode(encoded, {}, parent), now, expected)


def test_a_parent_with_other_values_or_without_a_tensor_is_a_chain_error():
    base = {"a": torch.randn(20, 30), "b": torch.randn(5)}
    now = {name: replace(symbols_of(tuple(x.shape), 7), residual=True) for name, x in base.items()}
    encoded, _ = made(now, "F32", Reference(base))
    wrong = [
        None,
        Reference({}),
        Reference({"a": base["a"]}),
        Reference({**base, "b": base["b"] * (1 + 1e-6)}),
        Reference({**base, "b": torch.full((5,), torch.nan)}),
        Reference({**base, "a": base["a"].reshape(30, 20)}),
        Reference({**base, "a": base["a"].bfloat16()}),
        Reference({"a": base["a"].flip(0), "b": base["b"]}),
    ]
    for parent in wrong:
        with pytest.raises(ChainError, match=encoded.base):
            decode(encoded, {}, parent)


def test_differences_without_a_parent_are_not_written():
    base = torch.randn(20, 30)
    one = replace(symbols_of((20, 30), 7), residual=True)
    infos = (TensorInfo("w", (20, 30), "F32"),)
    for parent in (None, Reference({}), Reference({"w": base.half()}), Reference({"w": base[:19]})):
        with pytest.raises(ValueError, match="a parent that is missing"):
            encode_codebook_record(
                CodebookInput("w", infos, (one.dequantize(torch.float32, base),), (one,), reference=parent)
            )
    with pytest.raises(ValueError, match="other values"):
        wrong = (one.dequantize(torch.float32, base + 1),)
        encode_codebook_record(CodebookInput("w", infos, wrong, (one,), reference=Reference({"w": base})))


def test_codes_of_differences_are_nobody_s_context():
    before = symbols_of((40, 50), 6)
    values = before.dequantize(torch.float32)
    as_differences = Reference({"w": values}, {"w": replace(before, residual=True)})
    now = {"w": moved(before)}
    assert made(now, "F32", as_differences)[0] == made(now, "F32", None)[0]
    encoded, _ = made(now, "F32", Reference({"w": values}, {"w": before}))
    with pytest.raises(ChainError, match="not quantized"):
        decode(encoded, {}, as_differences)


# codes under others


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, CodebookTensor], dict[str, CodebookTensor], bool]:
    """Symbols, those of other tensors of the same shapes, and whether the first are differences."""
    first, other_first = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    bins, other_bins = (min(draw(ANY_BINS), most_bins(one)) for one in (first, other_first))
    shaped = draw(st.lists(shapes(), min_size=1, max_size=3))
    residual = draw(st.booleans())
    now = {str(i): replace(draw(symbols(s, bins, first, EXACT[0])), residual=residual) for i, s in enumerate(shaped)}
    others = {f"other {i}": draw(symbols(s, other_bins, other_first, EXACT[1])) for i, s in enumerate(shaped)}
    return now, others, draw(st.booleans())


@pytest.mark.parametrize("coder", [*ALL_CODERS, "all"])
def test_codes_under_any_others_come_back_through_any_coder(coder):
    @settings(deadline=None, max_examples=15)
    @given(pairs())
    def holds(case):
        now, others, with_parent = case
        base = Reference({name: torch.ones(one.codes.shape) for name, one in now.items()})
        parent = base if with_parent or now["0"].residual else None
        under = [one.codes for one in others.values()]
        coders = ALL_CODERS if coder == "all" else (coder,)
        encoded, values = made(now, "F32", parent, under=under, ordinals=range(len(under)), coders=coders)
        how = encoded.recipe["codes"]
        elsewhere = "cyclic" in how or how.get("run", {}).get("predictor") == "base"
        assert ("under" in encoded.recipe) == elsewhere and "base" not in encoded.recipe
        decoded = {name: one.dequantize(torch.float32) for name, one in others.items()}
        comes_back(decode(encoded, decoded, base, quantized=others, threads=1), now, values)
        if not now["0"].residual:
            comes_back(decode(encoded, decoded, None, quantized=others, threads=1), now, values)

    holds()


def test_codes_are_smaller_under_those_that_say_where_nothing_is():
    """As moments are, pruned where the residual is."""
    random = torch.Generator().manual_seed(3)
    there = torch.rand(200, 300, generator=random) < 0.1
    codes = [torch.where(there, torch.randint(2, 17, (200, 300), generator=random), 0).byte() for _ in range(2)]
    one, other = (CodebookTensor(one, torch.linspace(-1, 1, 15), torch.empty(0)) for one in codes)
    alone, _ = made({"w": one}, "F32")
    under, values = made({"w": one}, "F32", under=[other.codes], ordinals=[0])
    assert size_of(under) < 0.6 * size_of(alone)
    assert under.recipe["under"] == [[0, 0, 1]] and under.base is None
    found = decode(under, {"o": other.dequantize(torch.float32)}, None, quantized={"o": other})
    assert found.quantized["w"].context_name == "o"  # so that a file that is written again is as small
    comes_back(found, {"w": one}, values)


def test_others_and_moments_together_are_context():
    random = torch.Generator().manual_seed(5)
    m, v = torch.randn(300, 300, generator=random) * 1e-3, torch.full((300, 300), 1e-7)
    other = symbols_of((300, 300), 3, special=0.9)
    codes = torch.where(other.codes == 0, 0, torch.where(m < 0, 2, 3)).byte()
    one = CodebookTensor(codes, torch.tensor([-1.0, 1.0]), torch.empty(0), residual=True)
    parent, moments = Reference({"w": torch.zeros(300, 300)}), {"m": m, "v": v}
    options = {"under": [other.codes], "ordinals": [2]}
    both, values = made({"w": one}, "F32", parent, moments=moments, **options)
    assert {"under", "moments", "residual"} <= both.recipe.keys()
    for less in (options, {"moments": moments}):
        assert size_of(both) < 0.7 * size_of(made({"w": one}, "F32", parent, **less)[0])
    decoded = {**moments, "o": other.dequantize(torch.float32)}
    comes_back(decode(both, decoded, parent, quantized={"o": other}), {"w": one}, values)


def test_codes_under_what_is_not_there_or_does_not_fit_are_refused():
    other = symbols_of((40, 50), 6)
    named = {"w": moved(other)}
    encoded, values = made(named, "F32", under=[other.codes], ordinals=[1], coders=("context",))
    decoded = {
        "plain": torch.ones(40, 50),
        "good": other.dequantize(torch.float32),
        "flat": other.dequantize(torch.float32).flatten(),
        "turned": other.dequantize(torch.float32).reshape(50, 40),
        "wrong": other.dequantize(torch.float32),
    }
    symbols = {
        "good": other,
        "flat": replace(other, codes=other.codes.flatten()),
        "turned": replace(other, codes=other.codes.reshape(50, 40)),
        "wrong": replace(other, codes=other.codes.flip(0)),
    }
    comes_back(decode(encoded, decoded, None, quantized=symbols), named, values)

    def refused(under: object, decoded: dict[str, Tensor] = decoded, **options: object) -> None:
        with pytest.raises(CorruptError):
            decode(replace(encoded, recipe={**encoded.recipe, "under": under}), decoded, None, **options)

    for ordinal in (0, 2, 3, 4, 5, 1 << 40):  # not quantized, of other shapes, with other codes, its own, beyond all
        refused([[ordinal, 0, 1]], quantized=symbols)
    for under in ([[1, 0, 2]], [[1, 1, 2]], []):  # too many, too few
        refused(under, quantized=symbols)
    refused([[1, 0, 1]])
    refused([[1, 0, 1]], {}, quantized=symbols)
    without = {key: value for key, value in encoded.recipe.items() if key != "under"}
    with pytest.raises(CorruptError):
        decode(replace(encoded, recipe=without), decoded, None, quantized=symbols)


def test_a_context_whose_codes_do_not_fit_is_not_written():
    other = symbols_of((40, 50), 6)
    infos, one = (TensorInfo("w", (40, 50), "F32"),), moved(other)
    for under, ordinals in (((other.codes.flatten(),), (0,)), ((other.codes,) * 2, (0, 1)), ((other.codes,), ())):
        with pytest.raises(ValueError, match="other shapes"):
            values = (one.dequantize(torch.float32),)
            encode_codebook_record(
                CodebookInput("w", infos, values, (one,), context_codes=under, context_ordinals=ordinals)
            )


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_s_records_wait_for_the_codes_they_are_under(threads):
    first = symbols_of((40, 50), 6)
    chain = [first, moved(first, seed=1), moved(first, seed=2)]
    records, values = [], []
    for i, one in enumerate(chain):
        under = {"under": [chain[i - 1].codes], "ordinals": [i - 1]} if i else {}
        record, held = made({str(i): one}, "F32", coders=("context",), **under)
        records.append(replace(record, name=str(i)))
        values.append(held[str(i)])
    heads = [(record.recipe, 1, MIN_SHARED_DECODING) for record in records]
    found = decode_all(heads, records.__getitem__, None, threads=threads)
    expected = Reference({str(i): x for i, x in enumerate(values)}, {str(i): x for i, x in enumerate(chain)})
    assert same_reference(found, expected)
    for ordinal in (1, 2):  # itself, and one that comes later
        recipe = {**records[1].recipe, "under": [[ordinal, 0, 1]]}
        forged = [records[0], replace(records[1], recipe=recipe), records[2]]
        heads = [(record.recipe, 1, MIN_SHARED_DECODING) for record in forged]
        with pytest.raises(CorruptError):
            decode_all(heads, forged.__getitem__, None, threads=threads)
