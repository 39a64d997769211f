"""Any symbols come back as they were, and their values with them, whatever they were coded by and against."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.codebooks import ALL_CODERS, ANY_BINS, alike, most_bins, moved, symbols, symbols_of
from helpers.parameters import each_value
from helpers.strategies import bits, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.codec.codebook_record import CODERS, CodebookInput, encode_codebook_record
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import MAX_CHUNK, CodingContext
from shrinkpoint.codec.record import decode
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import ChainError
from shrinkpoint.tensors.dtypes import torch_dtype
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

DTYPES = ("F32", "BF16", "F16")
EXACT = (torch.bfloat16, torch.float32)


def stored(encoded: EncodedRecord) -> int:
    return sum(memoryview(part).nbytes for part in encoded.parts.values())


def values_of(named: dict[str, CodebookTensor], dtype: str) -> dict[str, torch.Tensor]:
    return {name: one.dequantize(torch_dtype(dtype)) for name, one in named.items()}


def held(named: dict[str, CodebookTensor], dtype: str = "F32") -> Reference:
    return Reference(values_of(named, dtype), named)


def coded(
    named: dict[str, CodebookTensor], dtype: str = "F32", parent: Reference | None = None, **options
) -> EncodedRecord:
    infos = tuple(TensorInfo(name, tuple(one.codes.shape), dtype) for name, one in named.items())
    tensors = tuple(values_of(named, dtype).values())
    material = CodebookInput("record", infos, tensors, tuple(named.values()), reference=parent)
    return through_json(encode_codebook_record(material, threads=1, **options))


def through_json(encoded: EncodedRecord) -> EncodedRecord:
    return replace(encoded, recipe=json.loads(json.dumps(encoded.recipe)))


def come_back(
    named: dict[str, CodebookTensor], dtype: str = "F32", parent: Reference | None = None, **options
) -> EncodedRecord:
    encoded = coded(named, dtype, parent, **options)
    back = decode(encoded, {}, parent, threads=1)
    assert back.tensors.keys() == named.keys() == back.quantized.keys()
    for name, one in named.items():
        assert alike(back.quantized[name], one)
        assert bits(back.tensors[name]) == bits(one.dequantize(torch_dtype(dtype)))
        assert back.tensors[name].dtype == torch_dtype(dtype)
    return encoded


@st.composite
def records(draw: st.DrawFn) -> tuple[dict[str, CodebookTensor], dict[str, CodebookTensor] | None, str]:
    """One to three members, and the parent's symbols of the same names: none, or with any number of bins."""
    first, exact = draw(st.integers(0, 2)), draw(st.sampled_from(EXACT))
    before_first = draw(st.integers(0, 2))
    bins, before_bins = (min(draw(ANY_BINS), most_bins(one)) for one in (first, before_first))
    shaped = draw(st.lists(shapes(), min_size=1, max_size=3))
    now = {str(i): draw(symbols(shape, bins, first, exact)) for i, shape in enumerate(shaped)}
    before = {str(i): draw(symbols(shape, before_bins, before_first, exact)) for i, shape in enumerate(shaped)}
    kind = draw(st.sampled_from(["alone", "other", "moved", "equal"]))
    if kind == "moved":
        before = {name: moved(one, seed=draw(st.integers(0, 9))) for name, one in now.items()}
    return now, {"alone": None, "equal": now}.get(kind, before), draw(st.sampled_from(DTYPES))


@pytest.mark.parametrize("coder", [*ALL_CODERS, "all"])
def test_any_symbols_come_back_through_any_coder(coder):
    @settings(deadline=None, max_examples=25)
    @given(records())
    def holds(case):
        now, before, dtype = case
        parent = None if before is None else held(before, dtype)
        encoded = come_back(now, dtype, parent, coders=ALL_CODERS if coder == "all" else (coder,))
        assert (encoded.base is None) == (before is None)

    holds()


@pytest.mark.parametrize("coder", ALL_CODERS)
def test_the_first_and_last_code_of_a_chunk_come_back(coder):
    for count in [0, 1, MAX_CHUNK, MAX_CHUNK + 1]:
        now = symbols_of((count,), 5, seed=3)
        for one in (now, symbols_of((count,), 5, special=0, spread=0)):
            come_back({"w": one}, coders=(coder,))
            come_back({"w": one}, parent=held({"w": moved(one)}), coders=(coder,))


@pytest.mark.parametrize(("exact", "dtype"), each_value(EXACT, DTYPES))
def test_all_pruned_all_protected_and_none_protected_come_back(dtype, exact):
    shape, centers = (30, 40), torch.tensor([-1.0, 1.0])
    pruned = CodebookTensor(torch.zeros(shape, dtype=torch.uint8), centers, torch.empty(0, dtype=exact))
    values = torch.randn(1200, generator=torch.Generator().manual_seed(1)).to(exact)
    protected = CodebookTensor(torch.ones(shape, dtype=torch.uint8), centers, values)
    none = CodebookTensor(torch.full(shape, 2, dtype=torch.uint8), centers, torch.empty(0, dtype=exact))
    for one in (pruned, protected, none):
        for parent in (None, *(held({"w": other}, dtype) for other in (pruned, protected, none))):
            come_back({"w": one}, dtype, parent)


@pytest.mark.parametrize("exact", EXACT)
def test_exact_values_keep_every_bit_they_have(exact):
    special = [0.0, -0.0, 1e-45, -1e-40, 3.3e38, -3.3e38, 1.17549435e-38, 1.0]
    values = torch.tensor(special * 40).to(exact)
    one = CodebookTensor(torch.ones(values.numel(), dtype=torch.uint8), torch.tensor([0.5]), values)
    for dtype in DTYPES:
        come_back({"w": one}, dtype)
        come_back({"w": one}, dtype, held({"w": one}, dtype))


def test_centers_may_be_denormal_huge_equal_and_of_either_zero():
    centers = torch.tensor([-3.4e38, -1e-45, -0.0, 0.0, 0.0, 1e-45, 3.4e38])
    one = CodebookTensor(torch.arange(9).to(torch.uint8), centers, torch.tensor([7.0]).bfloat16())
    come_back({"w": one})
    come_back({"w": one}, parent=held({"w": replace(one, centers=centers / 2)}))


def test_a_record_is_smaller_under_a_parent_like_it():
    before = symbols_of((200, 300), 16)
    now = moved(before, share=0.02)
    alone, delta = come_back({"w": now}), come_back({"w": now}, parent=held({"w": before}))
    assert stored(delta) < 0.4 * stored(alone) < 0.4 * 200 * 300
    again = come_back({"w": now}, parent=held({"w": now}))
    assert stored(again) < 1500


def test_the_smallest_of_the_allowed_forms_is_taken():
    before = symbols_of((200, 300), 16)
    now, parent = {"w": moved(before)}, held({"w": before})
    sizes = {coder: stored(come_back(now, parent=parent, coders=(coder,))) for coder in CODERS}
    assert stored(come_back(now, parent=parent)) == min(sizes.values())
    assert stored(come_back(now, parent=parent, coders=("huffman", "packed"))) == min(sizes["huffman"], sizes["packed"])


def test_each_stage_of_the_paper_helps_where_some_bins_are_left_more_often_than_others():
    before = symbols_of((200, 300), 16)
    now = moved(before, share=0.3)
    now = replace(now, codes=torch.where(before.codes % 5 == 4, now.codes, before.codes))
    stages = ("rearranged", "runs", "huffman", "packed")
    sizes = [stored(come_back({"w": now}, parent=held({"w": before}), coders=(coder,))) for coder in stages]
    assert sizes == sorted(sizes) and len({*sizes}) == 4


def test_a_parent_that_has_other_codes_or_none_is_none():
    now = {"a": symbols_of((4, 5), 3), "b": symbols_of((7,), 3)}
    parents = [
        held({"a": now["a"]}),  # b is new
        held({**now, "b": symbols_of((7, 1), 3)}),  # b had another shape
        held(now, "BF16"),  # and another dtype
        Reference(values_of(now, "F32")),  # and was not quantized
        Reference({}, {}),
    ]
    for parent in parents:
        encoded = come_back(now, parent=parent)
        assert encoded.base is None and "base" not in encoded.recipe


def test_moments_make_codes_smaller_where_they_say_which_way_a_weight_goes():
    random = torch.Generator().manual_seed(5)
    before = symbols_of((300, 300), 16, special=0)
    m, v = torch.randn(300, 300, generator=random) * 1e-3, torch.full((300, 300), 1e-7)
    steps = (m < -0.0012).long() - (m > 0.0012).long()
    codes = (before.codes.long() + steps).clamp(2, 17).to(torch.uint8)
    now = CodebookTensor(codes, before.centers, before.exact)
    info = TensorInfo("w", (300, 300), "F32")
    known = CodingContext(moment1=m.reshape(-1).numpy().view("u1"), moment2=v.reshape(-1).numpy().view("u1"))
    parent, tensors = held({"w": before}), (now.dequantize(torch.float32),)
    material = CodebookInput("w", (info,), tensors, (now,), known, ((0, 1),), parent)
    encoded = through_json(encode_codebook_record(material, threads=1))
    assert encoded.recipe["moments"] == [[[0, 0, 1]], [[1, 0, 1]]]
    assert stored(encoded) < 0.7 * stored(come_back({"w": now}, parent=parent))
    back = decode(encoded, {"m": m, "v": v}, parent, threads=2)
    assert alike(back.quantized["w"], now)


def test_one_thread_and_many_write_the_same_bytes():
    before = symbols_of((3, MAX_CHUNK), 9)
    now = moved(before)
    info = TensorInfo("w", (3, MAX_CHUNK), "F32")
    for parent in (None, held({"w": before})):
        material = CodebookInput("w", (info,), (now.dequantize(torch.float32),), (now,), reference=parent)
        one, many = (encode_codebook_record(material, threads=threads) for threads in (1, 3))
        assert one == many
        assert alike(decode(many, {}, parent, threads=3).quantized["w"], now)


def test_a_parent_with_other_codes_or_other_values_is_a_chain_error():
    before = symbols_of((20, 30), 6)
    encoded = coded({"w": moved(before)}, parent=held({"w": before}))
    wrong_codes = CodebookTensor(before.codes.flip(0), before.centers, before.exact)
    tensor = before.dequantize(torch.float32)
    parents = [
        None,
        held({"w": wrong_codes}),
        Reference({"w": tensor}, {"w": wrong_codes}),
        Reference({"w": tensor + 1}, {"w": before}),
        Reference({"w": tensor}),
        held({"w": before}, "F16"),
    ]
    for parent in parents:
        with pytest.raises(ChainError, match=encoded.base):
            decode(encoded, {}, parent)


def test_a_base_digest_is_that_of_the_codes_and_then_the_values():
    from shrinkpoint._native import xxh3_128

    before = {"a": symbols_of((20, 30), 6), "b": symbols_of((5,), 6, seed=2)}
    encoded = coded({name: moved(one) for name, one in before.items()}, parent=held(before))
    codes = b"".join(bits(one.codes) for one in before.values())
    values = b"".join(bits(one.dequantize(torch.float32)) for one in before.values())
    assert encoded.base == xxh3_128(codes + values)


def test_what_no_reader_would_take_is_not_written():
    good = symbols_of((20, 30), 6)
    info, tensors = TensorInfo("w", (20, 30), "F32"), (good.dequantize(torch.float32),)
    wrong = [
        CodebookTensor(good.codes, good.centers.flip(0), good.exact),
        CodebookTensor(good.codes, good.centers * torch.inf, good.exact),
        CodebookTensor(good.codes, good.centers + 1, good.exact),
        CodebookTensor(good.codes, torch.linspace(-1, 1, 255), good.exact),
        CodebookTensor(good.codes, good.centers, good.exact * 2),
        CodebookTensor(good.codes, good.centers, good.exact[:0]),
        CodebookTensor(good.codes, good.centers[:-1], good.exact),
        CodebookTensor(good.codes.reshape(30, 20), good.centers, good.exact),
    ]
    for one in wrong:
        with pytest.raises(ValueError, match="codebook tensor"):
            encode_codebook_record(CodebookInput("w", (info,), tensors, (one,)))


def test_symbols_of_several_kinds_are_not_written_as_one_record():
    shape, infos = (20, 30), tuple(TensorInfo(name, (20, 30), "F32") for name in "ab")
    good, values = symbols_of(shape, 6), torch.zeros(20, 30)
    others = [
        symbols_of(shape, 5),
        symbols_of(shape, 6, 1),
        symbols_of(shape, 6, exact=torch.float32),
        replace(good, residual=True),
    ]
    for other in others:
        parent = Reference({"a": values, "b": values})
        tensors = (good.dequantize(torch.float32), other.dequantize(torch.float32, values))
        with pytest.raises(ValueError, match="several kinds"):
            encode_codebook_record(CodebookInput("~ab", infos, tensors, (good, other), reference=parent))


def test_lzma_is_taken_only_on_request():
    one = {
        "w": CodebookTensor(
            torch.arange(200).to(torch.uint8).repeat(500), torch.linspace(-1, 1, 200), torch.empty(0), 0
        )
    }
    sizes = {coder: stored(come_back(one, coders=(coder,))) for coder in ALL_CODERS}
    assert min(sizes.values()) == sizes["lzma"] < 0.5 * stored(come_back(one))
    assert come_back(one, coders=("lzma",)).recipe["codes"] == {"lzma": 8}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_symbols_on_a_gpu_come_back_on_the_cpu():
    now = symbols_of((300, 40), 12)
    there = CodebookTensor(now.codes.cuda(), now.centers.cuda(), now.exact.cuda(), now.first_code)
    assert alike(there.cpu(), now)
    for dtype in DTYPES:
        assert bits(there.dequantize(torch_dtype(dtype))) == bits(now.dequantize(torch_dtype(dtype)))
    encoded = coded({"w": there})
    assert encoded == coded({"w": now})
    assert alike(decode(encoded, {}, None).quantized["w"], now)
