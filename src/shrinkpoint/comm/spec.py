"""The text form of compressors and feedbacks: parsing of specs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError

if TYPE_CHECKING:
    from shrinkpoint.comm.compressors.base import Compressor
    from shrinkpoint.comm.error_feedback import ErrorFeedback

_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_SPEC_EXAMPLES = """exact | bf16 | fp16 | q4 | q4:64 | q4:row | q4:channel | q4:64:dither | n3:64 | block4:32 | \
top10 | top10:bf16 | top10:q4:64 | top10:tensor | same | rand10 | h64(q4:64) | ef(..) | efmixed(..) | \
ef21(..) | aq(..)"""


def parse(text: str) -> Compressor | ErrorFeedback:
    """Parse the spec of a compressor or feedback, which `str` of one returns.

    ======================  ============================================================================================
    exact, bf16, fp16       uncompressed; rounded to 16 bits
    q4, q4:64, q4:row,      4 bits (1 to 8) between the smallest and the largest value: of all, of 64 values each, of
    q4:channel              each row (the last axis), of each channel; with ":dither" subtractive dither
    n3:64                   3 bits (1 to 4), levels for a normal distribution, a scale for each 64 values
    block4:32               4 bits (2 to 8), an exponent for each 32 values
    h64(q4:64)              rotated in blocks of 64 first; "h64>5(..)" only blocks with outliers
    top10, top10:bf16,      the 10 % largest of each sample, with fp32, fp16 or bf16 values or through a compressor;
    top10:q4:64             with ":tensor" of the tensor
    same, same:bf16         backward: at the indices of the forward message
    rand10                  10 % at random indices
    ef(..), efmixed(..),    with error feedback; "aq(q2:64, warmup=2, dtype=bf16)" by sample
    ef21(..), aq(..)
    ======================  ============================================================================================

    Raises:
        PolicyError: the text is not a spec, or a number in it is out of range.
    """
    stripped = validate.check_str("spec", text, do='write "q4:64"').strip()
    for pattern, make in _FEEDBACKS:
        match = re.fullmatch(pattern, stripped, re.DOTALL)
        if match:
            feedback: ErrorFeedback = make(match)
            return feedback
    return parse_compressor(stripped)


def as_compressor(compressor: Compressor | ErrorFeedback | str) -> Compressor | ErrorFeedback:
    """Return a compressor or feedback, parsing it if it is a spec.

    Raises:
        PolicyError: the spec is invalid, or the argument is neither.
    """
    if isinstance(compressor, str):
        return parse(compressor)
    from shrinkpoint.comm.compressors.base import Compressor
    from shrinkpoint.comm.error_feedback import ErrorFeedback

    expected = 'a compressor, a feedback, or the spec of one, such as "q4:64"'
    advice = (
        "make one: Uniform(4, group=64)"
        if isinstance(compressor, type)
        else 'write "q4:64", or None to compress nothing'
    )
    instance: Compressor | ErrorFeedback = validate.check_instance(
        "compressor", compressor, (Compressor, ErrorFeedback), expected=expected, do=advice
    )
    return instance


def parse_compressor(text: str) -> Compressor:
    """Parse the spec of a compressor without feedback.

    Raises:
        PolicyError: the text is not such a spec.
    """
    for pattern, make in _COMPRESSORS:
        match = re.fullmatch(pattern, text.strip())
        if match:
            parsed: Compressor = make(match)
            return parsed
    raise PolicyError(f"spec {text!r}", found="no compressor and no feedback", expected=f"one of {_SPEC_EXAMPLES}")


def _lazy_class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"shrinkpoint.comm.{module}"), name)


def _uniform(match: re.Match[str]) -> Any:
    group, kind = match["group"], _lazy_class("compressors.quantizers", "Uniform")
    size = int(group) if group and group.isdigit() else group
    return kind(int(match["bits"]), **_without_none(group=size, dither=bool(match["dither"]) or None))


def _hadamard(match: re.Match[str]) -> Any:
    above = None if match["above"] is None else float(match["above"])
    kind = _lazy_class("compressors.hadamard", "Hadamard")
    return kind(
        parse_compressor(match["inner"]), **_without_none(block=_integer(match["block"]), outlier_threshold=above)
    )


def _normal_float(match: re.Match[str]) -> Any:
    return _lazy_class("compressors.quantizers", "NormalFloat")(
        int(match["bits"]), **_without_none(group=_integer(match["group"]))
    )


def _block_float(match: re.Match[str]) -> Any:
    return _lazy_class("compressors.quantizers", "BlockFloat")(
        int(match["bits"]), **_without_none(block=_integer(match["block"]))
    )


def _topk(match: re.Match[str]) -> Any:
    per = "tensor" if match["tensor"] else None
    kind = _lazy_class("compressors.sparse", "TopK")
    return kind(_share(match["share"]), **_without_none(values=_values(match["values"]), per=per))


def _randomk(match: re.Match[str]) -> Any:
    kind = _lazy_class("compressors.sparse", "RandomK")
    options = _without_none(
        values=_values(match["values"]), scaled=bool(match["scaled"]) or None, seed=_integer(match["seed"])
    )
    return kind(_share(match["share"]), **options)


def _same_indices(match: re.Match[str]) -> Any:
    return _lazy_class("compressors.sparse", "SameIndices")(**_without_none(values=_values(match["values"])))


def _share(percent: str) -> float:
    mantissa, _, exponent = percent.partition("e")
    return float(
        f"{mantissa}e{int(exponent or 0) - 2}"
    )  # through text: the float closest to the number that was written


def _values(text: str | None) -> Any:
    return text if text in (None, "fp32", "fp16", "bf16") else parse_compressor(text)


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text)


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _ef_mixed(match: re.Match[str]) -> Any:
    share = None if match["part"] is None else float(match["part"])
    return _lazy_class("error_feedback", "EFMixed")(parse_compressor(match["inner"]), **_without_none(share=share))


def _aqsgd(match: re.Match[str]) -> Any:
    inner, *options = match["inner"].split(", ")
    named = dict(option.partition("=")[::2] for option in options)
    unknown = named.keys() - {"warmup", "dtype", "most_bytes"}
    numbers = [value for name, value in named.items() if name != "dtype"]
    if unknown or not all(re.fullmatch(r"\d+", value) for value in numbers):
        expected = "warmup=, dtype=, most_bytes= and folder= after the compressor, in that order"
        raise PolicyError(f"spec {match[0]!r}", found=", ".join(options), expected=expected)
    typed = {name: value if name == "dtype" else int(value) for name, value in named.items()}
    return _lazy_class("aqsgd", "AQSGD")(parse_compressor(inner), **typed, **_without_none(folder=match["folder"]))


_SpecRule = tuple[str, Callable[[re.Match[str]], Any]]
_VALUES = r"(?::(?P<values>.+))?"
_COMPRESSORS: tuple[_SpecRule, ...] = (
    ("exact", lambda found: _lazy_class("compressors.base", "Identity")()),
    ("bf16|fp16", lambda found: _lazy_class("compressors.base", "Cast")(found[0])),
    (r"q(?P<bits>\d+)(?::(?P<group>\d+|row|channel))?(?P<dither>:dither)?", _uniform),
    (r"n(?P<bits>\d+)(?::(?P<group>\d+))?", _normal_float),
    (r"block(?P<bits>\d+)(?::(?P<block>\d+))?", _block_float),
    (rf"h(?P<block>\d+)(?:>(?P<above>{_NUMBER}))?\((?P<inner>.*)\)", _hadamard),
    (rf"top(?P<share>{_NUMBER})(?P<tensor>:tensor)?{_VALUES}", _topk),
    (rf"rand(?P<share>{_NUMBER})(?P<scaled>:scaled)?(?::seed(?P<seed>\d+))?{_VALUES}", _randomk),
    (rf"same{_VALUES}", _same_indices),
)
_FEEDBACKS: tuple[_SpecRule, ...] = (
    (
        r"ef\((?P<inner>.*)\)",
        lambda found: _lazy_class("error_feedback", "EF")(parse_compressor(found["inner"])),
    ),
    (
        r"ef21\((?P<inner>.*)\)",
        lambda found: _lazy_class("error_feedback", "EF21")(parse_compressor(found["inner"])),
    ),
    (rf"efmixed\((?P<inner>.*?)(?:, share=(?P<part>{_NUMBER}))?\)", _ef_mixed),
    (r"aq\((?P<inner>.*?)(?:, folder=(?P<folder>.*))?\)", _aqsgd),
)
