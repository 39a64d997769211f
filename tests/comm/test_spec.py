"""Compressors and feedbacks as words: every word comes back, and nonsense is refused."""

from __future__ import annotations

import re

import pytest
from helpers.comm_links import STATEFUL, STATELESS
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.comm import (
    AQSGD,
    EF,
    BlockFloat,
    Cast,
    Compressor,
    EFMixed,
    ErrorFeedback,
    Hadamard,
    Identity,
    LowRank,
    MomentSteps,
    NormalFloat,
    RandomK,
    SameIndices,
    TopK,
    Uniform,
    parse,
)
from shrinkpoint.errors import PolicyError

WORDS = [*STATELESS, *STATEFUL, "h256(h16(q4:32))", "same", "same:q8:64", "top0.01", "top100", "top10:h64(q4:64)"]


def test_a_spec_round_trips():
    for word in WORDS:
        parsed = parse(word)
        assert str(parsed) == word and parse(str(parsed)) == parsed
        assert isinstance(parsed, ErrorFeedback) == (word in STATEFUL) and isinstance(parsed, Compressor) != isinstance(
            parsed, ErrorFeedback
        )


SETTINGS = {
    "exact": Identity(),
    "bf16": Cast("bf16"),
    "q4": Uniform(4),
    "q4:64": Uniform(4, 64),
    "q4:row": Uniform(4, "row"),
    "q1:channel:dither": Uniform(1, "channel", dither=True),
    "n3:64": NormalFloat(3),
    "n2:256": NormalFloat(2, 256),
    "block4:32": BlockFloat(4),
    "block8:16": BlockFloat(8, 16),
    "top10": TopK(0.1),
    "top2.5:tensor": TopK(0.025, per="tensor"),
    "top1.5625:4096:q2:64": TopK(1 / 64, Uniform(2, 64), 4096),
    "top33.33333333333333:bf16": TopK(1 / 3, "bf16"),
    "rand10": RandomK(0.1),
    "rand2.5:scaled:seed7:bf16": RandomK(0.025, "bf16", True, 7),
    "same": SameIndices(),
    "same:q4:64": SameIndices(Uniform(4, 64)),
    "h64(q4:64)": Hadamard(Uniform(4, 64)),
    "h256>5(q4:64)": Hadamard(Uniform(4, 64), 256, outlier_threshold=5),
    "h16(h64(exact))": Hadamard(Hadamard(Identity()), 16),
    "ef(top10:bf16)": EF(TopK(0.1, values="bf16")),
    "ef(top10, decay=0.95)": EF(TopK(0.1), decay=0.95),
    "efmixed(top10, share=0.25)": EFMixed(TopK(0.1), share=0.25),
    "aq(q2:64, warmup=7, dtype=bf16)": AQSGD(Uniform(2, 64), warmup=7, dtype="bf16"),
    "lowrank4": LowRank(4),
    "lowrank4(q8:64)": LowRank(4, Uniform(8, 64)),
    "v0.7": MomentSteps(),
    "v0.25(n3:64)": MomentSteps(0.25, NormalFloat(3, 64)),
}


def test_a_spec_says_every_setting_and_is_read_back():
    for word, setting in SETTINGS.items():
        assert str(setting) == word and parse(word) == setting


def test_defaults_and_spaces_may_be_written_or_left_out():
    assert parse("block4") == BlockFloat(4) and parse(" top10 ") == TopK(0.1)
    assert parse("lowrank4(exact)") == LowRank(4) and parse("ef(top10,decay=0.95)") == parse("ef(top10, decay=0.95)")
    assert parse("aq(q4:64,warmup=3,dtype=bf16,folder=/a, b)") == AQSGD(
        Uniform(4, 64), warmup=3, dtype="bf16", folder="/a, b"
    )


def test_a_folder_may_have_any_name():
    how = AQSGD(Uniform(2, 64), warmup=3, most_bytes=100, folder="/data/runs (new), folder=x\n")
    assert parse(str(how)) == how


@given(st.floats(1e-6, 1.0))
def test_a_share_comes_back_exactly(share):
    how = TopK(share)
    assert parse(str(how)) == how


@pytest.mark.parametrize("threshold", [0.0, 5e-324, 1e-7, 2.5, 1e5, 1e20, 1.7e308])
def test_a_threshold_comes_back_exactly(threshold):
    how = Hadamard(Uniform(4, 64), outlier_threshold=threshold)
    assert parse(str(how)) == how


@pytest.mark.parametrize(
    "word",
    [
        "q" + "9" * 5000,
        "q" + "9" * 700,
        "rand10:seed" + "9" * 5000,
        "lowrank" + "9" * 5000,
        "top10:" + "9" * 5000,
        "top1e" + "9" * 5000,
        "aq(q4:64, warmup=" + "9" * 5000 + ")",
        "h64(" * 2000 + "q4:64" + ")" * 2000,
        "h64(" * 900 + "q4:64" + ")" * 900,
        "top10:" * 2000 + "bf16",
        "x" * 100_000,
    ],
    ids=lambda word: f"{word[:12]}, {len(word)}",
)
def test_a_spec_that_is_too_long_or_too_deep_is_refused(word):
    with pytest.raises(PolicyError, match="expected at most 8192 characters") as raised:
        parse(word)
    assert len(str(raised.value)) < 500


def test_a_folder_may_have_a_long_name_and_any_brackets():
    how = AQSGD(Uniform(2, 64), folder="/" + "/".join(["(:" * 100 + "9" * 50] * 16))
    assert parse(str(how)) == how


def test_invalid_arguments_are_refused():
    for word in [
        "",
        "q",
        "q0",
        "q9",
        "q4:",
        "q4:0",
        "q4:rows",
        "q4 :64",
        "n5:64",
        "block4:x",
        "top",
        "top0",
        "top101",
        "top10:fp8",
        "top-3",
        "rand",
        "h7(q4:64)",
        "h64(q4:64",
        "h64()",
        "ef",
        "ef()",
        "ef(ef(top10))",
        "ef(top10, decay=1.5)",
        "ef(top10, decay=-1)",
        "ef(top10, share=0.5)",
        "top10:0",
        "ef21(aq(q2:64))",
        "efmixed(q4:64)",
        "efmixed(top10, share=1)",
        "aq(q2:64, warm=3)",
        "aq(q2:64, warmup=-1)",
        "aq(q2:64, dtype=int8)",
        "aq(q2:64, most_bytes=0)",
        "lowrank",
        "lowrank0",
        "lowrank1025",
        "lowrank4()",
        "lowrank-1",
        "v",
        "v0",
        "v5",
        "v-1",
        "vnan",
        "v0.7:64",
        "v0.7(ef(q4:64))",
        "powersgd",
        "Q4",
    ]:
        with pytest.raises(PolicyError):
            parse(word)


def test_an_invalid_spec_is_refused_with_examples():
    with pytest.raises(PolicyError, match=r"spec 'quantize'.*q4:64.*top10"):
        parse("quantize")


@pytest.mark.parametrize("word", ["ef(ef21(top10))", "h64(ef(q4))", "lowrank4(ef(q4:64))", "ef(lowrank4)"])
def test_a_memory_inside_of_another_word_is_refused_as_what_it_is(word):
    with pytest.raises(PolicyError, match=r"a (feedback|low rank); expected a compressor without a memory"):
        parse(word)


@pytest.mark.parametrize(("word", "spec"), [("Q4:64", "q4:64"), ("q4 :64", "q4:64"), ("EF(TOP10)", "ef(top10)")])
def test_a_spec_with_capitals_or_spaces_is_refused_with_the_one_that_was_meant(word, spec):
    with pytest.raises(PolicyError, match=re.escape(f"Did you mean {spec}?")):
        parse(word)


@pytest.mark.parametrize("value", [None, 4, b"q4:64", Uniform(4, 64), ["q4:64"]])
def test_what_is_no_text_is_refused_by_its_type(value):
    with pytest.raises(PolicyError, match='expected a spec as text, such as "q4:64"'):
        parse(value)
