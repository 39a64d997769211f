"""Operators and feedbacks as words, and back."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shrinkpoint import arguments
from shrinkpoint.errors import PolicyError

if TYPE_CHECKING:
    from shrinkpoint.comm.feedback.base import Feedback
    from shrinkpoint.comm.operators.base import Operator

_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_SHAPES = """exact | bf16 | fp16 | q4 | q4:64 | q4:row | q4:channel | q4:64:dither | n3:64 | block4:32 | top10 | \
top10:bf16 | top10:q4:64 | top10:tensor | same | rand10 | h64(q4:64) | ef(..) | efmixed(..) | ef21(..) | aq(..)"""


def parse(text: str) -> Operator | Feedback:
    """The operator or feedback that a word stands for: what `str` makes of one.

    ======================  ============================================================================================
    exact, bf16, fp16       the bytes as they are; rounded to 16 bits
    q4, q4:64, q4:row,      4 bits (1 to 8) between the least and the largest value: of all, of 64 values each, of
    q4:channel              each row (the last axis), of each channel; with ":dither" noise that is taken away again
    n3:64                   3 bits (1 to 4), points placed for a normal distribution, a scale for each 64 values
    block4:32               4 bits (2 to 8), an exponent for each 32 values
    h64(q4:64)              rotated in blocks of 64 first; "h64>5(..)" only blocks with outliers
    top10, top10:bf16,      the 10 % largest of each sample, with fp32, fp16 or bf16 values or another operator's;
    top10:q4:64             with ":tensor" of the tensor
    same, same:bf16         backward: at the places of the forward message
    rand10                  10 % at random places
    ef(..), efmixed(..),    with error feedback; "aq(q2:64, warmup=2, dtype=bf16)" by sample
    ef21(..), aq(..)
    ======================  ============================================================================================

    Raises:
        PolicyError: it is none, or a number in it is out of range.
    """
    stripped = arguments.text("spec", text, do='write "q4:64"').strip()
    for pattern, make in _FEEDBACKS:
        found = re.fullmatch(pattern, stripped, re.DOTALL)
        if found:
            feedback: Feedback = make(found)
            return feedback
    return operator(stripped)


def made(how: Operator | Feedback | str) -> Operator | Feedback:
    """What was given as itself or as its word.

    Raises:
        PolicyError: the word is none, or it is something else altogether.
    """
    if isinstance(how, str):
        return parse(how)
    from shrinkpoint.comm.feedback.base import Feedback
    from shrinkpoint.comm.operators.base import Operator

    expected = 'an operator, a feedback, or the spec of one, such as "q4:64"'
    do = "make one: Uniform(4, group=64)" if isinstance(how, type) else 'write "q4:64", or None to compress nothing'
    found: Operator | Feedback = arguments.kind("how", how, (Operator, Feedback), expected=expected, do=do)
    return found


def operator(text: str) -> Operator:
    """The same, of operators alone.

    Raises:
        PolicyError: it is none.
    """
    for pattern, make in _OPERATORS:
        found = re.fullmatch(pattern, text.strip())
        if found:
            chosen: Operator = make(found)
            return chosen
    raise PolicyError(f"spec {text!r}", found="no operator and no feedback", expected=f"one of {_SHAPES}")


def _home(where: str, name: str) -> Any:
    return getattr(importlib.import_module(f"shrinkpoint.comm.{where}"), name)


def _uniform(found: re.Match[str]) -> Any:
    group, kind = found["group"], _home("operators.uniform", "Uniform")
    size = int(group) if group and group.isdigit() else group
    return kind(int(found["bits"]), **_given(group=size, dither=bool(found["dither"]) or None))


def _rotated(found: re.Match[str]) -> Any:
    above = None if found["above"] is None else float(found["above"])
    kind = _home("operators.rotated", "Rotated")
    return kind(operator(found["inner"]), **_given(block=_integer(found["block"]), above=above))


def _normal(found: re.Match[str]) -> Any:
    return _home("operators.normal", "Normal")(int(found["bits"]), **_given(group=_integer(found["group"])))


def _block_float(found: re.Match[str]) -> Any:
    return _home("operators.blockfloat", "BlockFloat")(int(found["bits"]), **_given(block=_integer(found["block"])))


def _top(found: re.Match[str]) -> Any:
    per = "tensor" if found["tensor"] else None
    kind = _home("operators.topk", "TopK")
    return kind(_share(found["share"]), **_given(values=_values(found["values"]), per=per))


def _random(found: re.Match[str]) -> Any:
    kind = _home("operators.randomk", "RandomK")
    given = _given(values=_values(found["values"]), scaled=bool(found["scaled"]) or None, seed=_integer(found["seed"]))
    return kind(_share(found["share"]), **given)


def _same(found: re.Match[str]) -> Any:
    return _home("operators.same", "SameIndices")(**_given(values=_values(found["values"])))


def _share(percent: str) -> float:
    mantissa, _, exponent = percent.partition("e")
    return float(f"{mantissa}e{int(exponent or 0) - 2}")  # by way of text: the float next to what was written


def _values(text: str | None) -> Any:
    return text if text in (None, "fp32", "fp16", "bf16") else operator(text)


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _mixed(found: re.Match[str]) -> Any:
    share = None if found["part"] is None else float(found["part"])
    return _home("feedback.mixed", "EFMixed")(operator(found["inner"]), **_given(share=share))


def _aqsgd(found: re.Match[str]) -> Any:
    inner, *options = found["inner"].split(", ")
    given = dict(option.partition("=")[::2] for option in options)
    unknown = given.keys() - {"warmup", "dtype", "most_bytes"}
    numbers = [value for name, value in given.items() if name != "dtype"]
    if unknown or not all(re.fullmatch(r"\d+", value) for value in numbers):
        expected = "warmup=, dtype=, most_bytes= and folder= after the operator, in that order"
        raise PolicyError(f"spec {found[0]!r}", found=", ".join(options), expected=expected)
    typed = {name: value if name == "dtype" else int(value) for name, value in given.items()}
    return _home("feedback.aqsgd", "AQSGD")(operator(inner), **typed, **_given(folder=found["folder"]))


_Made = tuple[str, Callable[[re.Match[str]], Any]]
_VALUES = r"(?::(?P<values>.+))?"
_OPERATORS: tuple[_Made, ...] = (
    ("exact", lambda found: _home("operators.exact", "Exact")()),
    ("bf16|fp16", lambda found: _home("operators.cast", "Cast")(found[0])),
    (r"q(?P<bits>\d+)(?::(?P<group>\d+|row|channel))?(?P<dither>:dither)?", _uniform),
    (r"n(?P<bits>\d+)(?::(?P<group>\d+))?", _normal),
    (r"block(?P<bits>\d+)(?::(?P<block>\d+))?", _block_float),
    (rf"h(?P<block>\d+)(?:>(?P<above>{_NUMBER}))?\((?P<inner>.*)\)", _rotated),
    (rf"top(?P<share>{_NUMBER})(?P<tensor>:tensor)?{_VALUES}", _top),
    (rf"rand(?P<share>{_NUMBER})(?P<scaled>:scaled)?(?::seed(?P<seed>\d+))?{_VALUES}", _random),
    (rf"same{_VALUES}", _same),
)
_FEEDBACKS: tuple[_Made, ...] = (
    (r"ef\((?P<inner>.*)\)", lambda found: _home("feedback.ef", "EF")(operator(found["inner"]))),
    (r"ef21\((?P<inner>.*)\)", lambda found: _home("feedback.ef21", "EF21")(operator(found["inner"]))),
    (rf"efmixed\((?P<inner>.*?)(?:, share=(?P<part>{_NUMBER}))?\)", _mixed),
    (r"aq\((?P<inner>.*?)(?:, folder=(?P<folder>.*))?\)", _aqsgd),
)
