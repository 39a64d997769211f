"""The text form of compressors and feedbacks: parsing of specs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shrinkpoint import validate
from shrinkpoint.comm.aqsgd import AQSGD
from shrinkpoint.comm.compressors.base import Cast, Compressor, Identity
from shrinkpoint.comm.compressors.hadamard import Hadamard
from shrinkpoint.comm.compressors.quantizers import BlockFloat, NormalFloat, Uniform
from shrinkpoint.comm.compressors.sparse import RandomK, SameIndices, TopK
from shrinkpoint.comm.error_feedback import EF, EF21, EFMixed, ErrorFeedback
from shrinkpoint.comm.low_rank import LowRank
from shrinkpoint.comm.moment_steps import MomentSteps
from shrinkpoint.errors import PolicyError

_SPEC_EXAMPLES = """exact | bf16 | fp16 | q4 | q4:64 | q4:row | q4:channel | q4:64:dither | n3:64 | block4:32 | \
top10 | top10:bf16 | top10:q4:64 | top10:tensor | top1.5625:4096:q2:64 | same | rand10 | h64(q4:64) | \
ef(..) | efmixed(..) | ef21(..) | aq(..) | lowrank4 | lowrank4(q8:64) | v0.7 | v0.7(q4:64)"""
_MAX_CHARS = 1 << 13  # Characters of a spec: a path, such as folder= has, takes 4096 at most
_MAX_DIGITS = 400
"""Digits that follow each other. The smallest share takes 326; Python may be set to read no more than 640."""
_MAX_PARTS = 32
"""Brackets and colons of a spec, and so the compressors within each other: each takes some frames of Python's stack."""


def parse(text: str) -> Compressor | ErrorFeedback | LowRank | MomentSteps:
    """Parse the spec of a compressor, a feedback, a low rank or moment steps, which `str` of one returns.

    ======================  ============================================================================================
    exact, bf16, fp16       uncompressed; rounded to 16 bits
    q4, q4:64, q4:row,      4 bits (1 to 8) between the smallest and the largest value: of all, of 64 values each, of
    q4:channel              each row (the last axis), of each channel; with ":dither" subtractive dither
    n3:64                   3 bits (1 to 4), levels for a normal distribution, a scale for each 64 values
    block4:32               4 bits (2 to 8), an exponent for each 32 values
    h64(q4:64)              rotated in blocks of 64 first; "h64>5(..)" only blocks with outliers
    top10, top10:bf16,      the 10% largest of each sample, with fp32, fp16 or bf16 values or through a compressor;
    top10:q4:64             with ":tensor" of the tensor, with ":4096" of each 4096 values
    same, same:bf16         backward: at the indices of the forward message
    rand10                  10% at random indices
    ef(..), efmixed(..),    with error feedback, "ef(.., decay=0.95)"; "aq(q2:64, warmup=2, dtype=bf16)" by sample
    ef21(..), aq(..)
    lowrank4,               gradients of matrices as factors of rank 4, through a compressor if there is one: for
    lowrank4(q8:64)         `compress_ddp`
    v0.7, v0.7(q4:64)       multiples of 0.7 roots of Adam's second moment, entropy-coded: for `compress_ddp` with the
                            optimizer; through the compressor where there is no second moment
    ======================  ============================================================================================

    Raises:
        PolicyError: the text is not a spec, or a number in it is out of range.
    """
    if not isinstance(text, str):
        is_parsed = isinstance(text, (Compressor, ErrorFeedback, LowRank, MomentSteps))
        advice = "use it as it is: it is one already" if is_parsed else 'write "q4:64", or "exact" for no compression'
        raise validate.argument_error("spec", text, 'a spec as text, such as "q4:64"', advice)
    num_parts = sum(map(text.partition("folder=")[0].count, "(:"))
    if len(text) > _MAX_CHARS or num_parts > _MAX_PARTS or re.search(rf"\d{{{_MAX_DIGITS + 1}}}", text):
        expected = f"at most {_MAX_CHARS} characters, {_MAX_PARTS} brackets and colons, and numbers of few digits"
        raise validate.argument_error("spec", text, expected, 'write a short one, such as "q4:64"')
    stripped = text.strip()
    parsed: ErrorFeedback | LowRank | MomentSteps | None = _match_rule(_FEEDBACKS + _LOW_RANKS + _STEPS, stripped)
    return parse_compressor(stripped) if parsed is None else parsed


def as_compressor(compressor: Compressor | ErrorFeedback | LowRank | MomentSteps | str) -> Compressor | ErrorFeedback:
    """Return a compressor or feedback, parsing it if it is a spec; a PolicyError if it is neither."""
    if isinstance(compressor, str):
        compressor = parse(compressor)
    if isinstance(compressor, LowRank | MomentSteps):
        advice = "pass it to compress_ddp, or pass a compressor here"
        found = "a low rank" if isinstance(compressor, LowRank) else "moment steps"
        raise PolicyError(f"compressor {compressor}", found=found, expected="a compressor or feedback", do=advice)
    expected = 'a compressor, a feedback, or the spec of one, such as "q4:64"'
    is_class = isinstance(compressor, type)
    advice = "make one: Uniform(4, group=64)" if is_class else 'write "q4:64", or "exact" to compress nothing'
    kinds = (Compressor, ErrorFeedback)
    instance: Compressor | ErrorFeedback = validate.check_instance(
        "compressor", compressor, kinds, expected=expected, do=advice
    )
    return instance


def parse_compressor(text: str) -> Compressor:
    """Parse the spec of a compressor without feedback; a PolicyError if the text is not such a spec."""
    compressor: Compressor | None = _match_rule(_COMPRESSORS, text.strip())
    if compressor is None:
        for name, rules in (("a feedback", _FEEDBACKS), ("a low rank", _LOW_RANKS), ("moment steps", _STEPS)):
            if any(re.fullmatch(pattern, text.strip()) for pattern, _ in rules):
                advice = "write the compressor without what is around it"
                raise PolicyError(f"spec {text!r}", found=name, expected="a compressor without a memory", do=advice)
        problem, expected = "no compressor and no feedback", f"one of {_SPEC_EXAMPLES}"
        advice, plain = "write one of these", "".join(text.lower().split())
        if plain != text:
            with suppress(PolicyError):
                advice = f"did you mean {parse(plain)}?"
        raise PolicyError(f"spec {text!r}", found=problem, expected=expected, do=advice)
    return compressor


_Rule = tuple[str, Callable[..., Any]]
"""A pattern, and what makes the object that it stands for from its groups (`_CONVERSIONS`)."""


def _match_rule(rules: tuple[_Rule, ...], text: str) -> Any:
    """Make the object that the first rule which matches stands for; None if no rule matches."""
    for pattern, make in rules:
        match = re.fullmatch(pattern, text)
        if match:
            found = {name: value for name, value in match.groupdict().items() if value is not None}
            return make(**{name: _CONVERSIONS[name](value) for name, value in found.items()})
    return None


def _share(percent: str) -> float:
    mantissa, _, exponent = percent.partition("e")
    return float(f"{mantissa}e{int(exponent or 0) - 2}")  # by way of text: the float next to what was written


def _efmixed(compressor: Compressor, fraction: float | None = None) -> EFMixed:
    return EFMixed(compressor) if fraction is None else EFMixed(compressor, fraction)


def _aqsgd(text: str, inner: str, folder: str | None = None) -> AQSGD:
    spec, *options = re.split(r",\s*", inner)
    named = dict(option.partition("=")[::2] for option in options)
    unknown = named.keys() - {"warmup", "dtype", "most_bytes"}
    numbers = [value for name, value in named.items() if name != "dtype"]
    if unknown or not all(re.fullmatch(r"\d+", value) for value in numbers):
        expected = "warmup=, dtype=, most_bytes= and folder= after the compressor, in that order"
        found, do = ", ".join(options), 'write e.g. "aq(q4:64, warmup=1)"'
        raise PolicyError(f"spec {text!r}", found=found, expected=expected, do=do)
    typed: dict[str, Any] = {name: value if name == "dtype" else int(value) for name, value in named.items()}
    return AQSGD(parse_compressor(spec), **typed, folder=folder)


_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_VALUES = r"(?::(?P<values>.+))?"
_CONVERSIONS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("bits", "block", "rank", "seed"), int),
    **dict.fromkeys(("decay", "fraction", "outlier_threshold", "step"), float),
    **dict.fromkeys(("dither", "scaled"), bool),
    **dict.fromkeys(("dtype", "folder", "inner", "text"), str),
    **dict.fromkeys(("group", "per"), lambda text: int(text) if text.isdigit() else text),
    "compressor": parse_compressor,
    "share": _share,
    "values": lambda text: text if text in ("fp32", "fp16", "bf16") else parse_compressor(text),
}
"""Converts the text of each group of a pattern to an argument."""
_COMPRESSORS: tuple[_Rule, ...] = (
    (r"exact", Identity),
    (r"(?P<dtype>bf16|fp16)", Cast),
    (r"q(?P<bits>\d+)(?::(?P<group>\d+|row|channel))?(?P<dither>:dither)?", Uniform),
    (r"n(?P<bits>\d+)(?::(?P<group>\d+))?", NormalFloat),
    (r"block(?P<bits>\d+)(?::(?P<block>\d+))?", BlockFloat),
    (rf"h(?P<block>\d+)(?:>(?P<outlier_threshold>{_NUMBER}))?\((?P<compressor>.*)\)", Hadamard),
    (rf"top(?P<share>{_NUMBER})(?::(?P<per>tensor|\d+))?{_VALUES}", TopK),
    (rf"rand(?P<share>{_NUMBER})(?P<scaled>:scaled)?(?::seed(?P<seed>\d+))?{_VALUES}", RandomK),
    (rf"same{_VALUES}", SameIndices),
)
_FEEDBACKS: tuple[_Rule, ...] = (
    (rf"(?s)ef\((?P<compressor>.*?)(?:,\s*decay=(?P<decay>{_NUMBER}))?\)", EF),
    (r"(?s)ef21\((?P<compressor>.*)\)", EF21),
    (rf"(?s)efmixed\((?P<compressor>.*?)(?:,\s*share=(?P<fraction>{_NUMBER}))?\)", _efmixed),
    (r"(?s)(?P<text>aq\((?P<inner>.*?)(?:,\s*folder=(?P<folder>.*))?\))", _aqsgd),
)
_LOW_RANKS: tuple[_Rule, ...] = ((r"(?s)lowrank(?P<rank>\d+)(?:\((?P<compressor>.*)\))?", LowRank),)
_STEPS: tuple[_Rule, ...] = ((rf"(?s)v(?P<step>{_NUMBER})(?:\((?P<compressor>.*)\))?", MomentSteps),)
