"""What was *done* to the tensors of one record: stored, and all a reader needs besides the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES
from shrinkpoint.codec.coder import CoderConfig
from shrinkpoint.codec.lattice import SPACINGS, Spacing
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.names import short_repr


@dataclass(frozen=True)
class PlainRecipe:
    """The bytes as they are."""


@dataclass(frozen=True)
class SameRecipe:
    """Equal to the parent's tensors of the same names."""


@dataclass(frozen=True)
class CopyRecipe:
    """Equal to earlier tensors of this file, after a cast to this dtype where theirs is another."""

    sources: tuple[int, ...]


@dataclass(frozen=True)
class CodedRecipe:
    """Entropy-coded numbers.

    Attributes:
        runs: one for each tap; the last serves all taps that follow.
        taps: values at each position of the trailing axes that are coded after each other (1: as they stand).
        base: the parent's tensors of the same names are known.
        moments: the ordinals, among the tensors of this file, of each member's (first, second) moment; () for none.
            A lone first moment, context of a second one, has the form (first, first).
    """

    runs: tuple[CoderConfig, ...]
    taps: int = 1
    base: bool = False
    moments: tuple[tuple[int, int], ...] = field(default=())


@dataclass(frozen=True)
class BitPacked:
    """Codes of `bits` bits, 1 to 8."""

    bits: int


@dataclass(frozen=True)
class CyclicDelta:
    """The differences to the parent's codes, entropy-coded as arXiv 2306.11800 does it.

    Attributes:
        modulus: of the differences; the larger of the two numbers of codes.
        rearranged: they are grouped by the parent's code.
        runs: they are run-length coded.
    """

    modulus: int
    rearranged: bool
    runs: bool


@dataclass(frozen=True)
class LzmaCodes:
    """As `Packed`, and then LZMA, as the authors of arXiv 2406.11257 do it."""

    bits: int


CodesRecipe: TypeAlias = CoderConfig | BitPacked | CyclicDelta | LzmaCodes


@dataclass(frozen=True)
class CodebookRecipe:
    """A quantizer's codes, and what they stand for (`codec.CodebookTensor`).

    Attributes:
        bins: centers of each member.
        first: the code of the first center.
        codes: how the codes are coded.
        centers: how the centers are coded; None: as they are.
        exact: dtype of the values that are kept as they are, F32 or BF16.
        exacts: how they are coded; None: as they are.
        base: the parent's codes and values of the same tensors are known.
        moments: as in `CodedRecipe`.
        residual: the parent's values of the same tensors are known, and centers and zeros are differences to them.
        contexts: the ordinals, among the tensors of this file, of those whose codes take the place of the parent's.
    """

    bins: int
    first: int
    codes: CodesRecipe
    centers: CoderConfig | None = None
    exact: str = "BF16"
    exacts: CoderConfig | None = None
    base: bool = False
    moments: tuple[tuple[int, int], ...] = field(default=())
    residual: bool = False
    contexts: tuple[int, ...] = field(default=())


@dataclass(frozen=True)
class LatticeRecipe:
    """Points of lattices (`codec.Lattice`).

    Attributes:
        spacing: of the lattices.
        run: how the differences to the guessed points are coded.
        step: of the law "log".
        base: the parent's values of the same tensors are known.
        inherited: the lattices are the parent's.
        relative_to: of the law "relative", the ordinals, among the tensors of this file, of those they are relative to.
    """

    spacing: Spacing
    run: CoderConfig
    step: int = 1
    base: bool = False
    inherited: bool = False
    relative_to: tuple[int, ...] = field(default=())


Recipe: TypeAlias = PlainRecipe | SameRecipe | CopyRecipe | CodedRecipe | CodebookRecipe | LatticeRecipe


def to_json(recipe: Recipe) -> JSON:
    match recipe:
        case PlainRecipe():
            return {"kind": "plain"}
        case SameRecipe():
            return {"kind": "same"}
        case CopyRecipe(of):
            return {"kind": "copy", "of": _ranges_to_json(of)}
        case CodedRecipe(runs, taps, base, moments):
            out: dict[str, JSON] = {"kind": "coded", "runs": [run.to_json() for run in runs]}
            if taps != 1:
                out["taps"] = taps
            if base:
                out["base"] = True
            if moments:
                out["moments"] = _pairs_to_json(moments)
            return out
        case CodebookRecipe():
            return _codebook_to_json(recipe)
        case LatticeRecipe(law, run, step, base, inherited, others):
            out = {"kind": "gridded", "law": law, "run": run.to_json()}
            if step != 1:
                out["step"] = step
            if base:
                out["base"] = True
            if inherited:
                out["inherited"] = True
            if others:
                out["others"] = _ranges_to_json(others)
            return out


def _codebook_to_json(recipe: CodebookRecipe) -> JSON:
    out: dict[str, JSON] = {"kind": "quantized", "bins": recipe.bins, "first": recipe.first}
    match recipe.codes:
        case CoderConfig() as run:
            out["codes"] = {"run": run.to_json()}
        case BitPacked(bits):
            out["codes"] = {"packed": bits}
        case CyclicDelta(modulus, rearranged, runs):
            out["codes"] = {"cyclic": [modulus, rearranged, runs]}
        case LzmaCodes(bits):
            out["codes"] = {"lzma": bits}
    if recipe.centers is not None:
        out["centers"] = recipe.centers.to_json()
    if recipe.exact != "BF16":
        out["exact"] = recipe.exact
    if recipe.exacts is not None:
        out["exacts"] = recipe.exacts.to_json()
    if recipe.base:
        out["base"] = True
    if recipe.moments:
        out["moments"] = _pairs_to_json(recipe.moments)
    if recipe.residual:
        out["residual"] = True
    if recipe.contexts:
        out["under"] = _ranges_to_json(recipe.contexts)
    return out


def max_ordinal(data: JSON, members: int | None = None) -> int:
    """The largest ordinal that a recipe refers to, -1 for none; of a malformed recipe, anything."""
    try:
        recipe = from_json(data, members)
    except ValueError:
        return -1
    match recipe:
        case CopyRecipe(of):
            return max(of, default=-1)
        case CodedRecipe(moments=moments):
            return max((max(pair) for pair in moments), default=-1)
        case CodebookRecipe(moments=moments, contexts=under):
            return max((*under, *(max(pair) for pair in moments)), default=-1)
        case LatticeRecipe(relative_to=others):
            return max(others, default=-1)
    return -1


def from_json(data: JSON, members: int | None = None) -> Recipe:
    """What a recipe says.

    Args:
        members: tensors of the record; where it is known, ordinals are counted before they are listed.

    Raises:
        ValueError: no encoder writes it.
    """
    if not isinstance(data, dict):
        raise ValueError("a recipe is not an object")
    _check_ordinals(data, MAX_MEMBERS if members is None else members)
    rest = {key: value for key, value in data.items() if key != "kind"}
    match data.get("kind"), rest:
        case "plain", {**extra} if not extra:
            return PlainRecipe()
        case "same", {**extra} if not extra:
            return SameRecipe()
        case "copy", {"of": list(of), **extra} if not extra:
            return CopyRecipe(_ordinals_from_json(of))
        case "coded", {"runs": list(runs), **extra} if extra.keys() <= {"taps", "base", "moments"}:
            return _coded_from_json(runs, **extra)
        case "quantized", {"bins": int(bins), "first": int(first), "codes": dict(codes), **extra} if extra.keys() <= {
            "centers",
            "exact",
            "exacts",
            "base",
            "moments",
            "residual",
            "under",
        }:
            return _codebook_from_json(bins, first, codes, **extra)
        case "gridded", {"law": str(law), "run": dict(run), **extra} if extra.keys() <= {
            "step",
            "base",
            "inherited",
            "others",
        }:
            return _lattice_from_json(law, run, **extra)
    raise ValueError(f"unknown recipe {short_repr(data, 80)}")


def _coded_from_json(runs: list[JSON], taps: JSON = 1, base: JSON = False, moments: JSON = ()) -> CodedRecipe:
    if type(taps) is not int or not 1 <= taps <= MAX_TAPS or type(base) is not bool or not 1 <= len(runs) <= taps:
        raise ValueError("a coded recipe has taps, base or runs out of range")
    return CodedRecipe(tuple(CoderConfig.from_json(run) for run in runs), taps, base, _pairs_from_json(moments))


def _codebook_from_json(
    bins: int,
    first: int,
    codes: dict[str, JSON],
    centers: JSON = None,
    exact: JSON = "BF16",
    exacts: JSON = None,
    base: JSON = False,
    moments: JSON = (),
    residual: JSON = False,
    under: JSON = (),
) -> CodebookRecipe:
    if type(bins) is not int or type(first) is not int or not 0 <= first <= RESERVED_CODES or bins < 1:
        raise ValueError("a quantized recipe has bins or first out of range")
    if first + bins > MAX_CODES or exact not in ("F32", "BF16") or type(base) is not bool:
        raise ValueError("a quantized recipe has more codes than there are, or exact values of another dtype")
    how = _codes_from_json(codes)
    if type(residual) is not bool or (base and residual):
        raise ValueError("a quantized recipe has a residual that is neither, or codes of a parent besides")
    if under != () and (base or under == [] or not _uses_context(how)):
        raise ValueError("a quantized recipe has codes under others that it does not need")
    return CodebookRecipe(
        bins,
        first,
        how,
        None if centers is None else CoderConfig.from_json(centers),
        exact,
        None if exacts is None else CoderConfig.from_json(exacts),
        base,
        _pairs_from_json(moments),
        residual,
        () if under == () else _ordinals_from_json(under),
    )


def _lattice_from_json(
    law: str, run: dict[str, JSON], step: JSON = 1, base: JSON = False, inherited: JSON = False, others: JSON = ()
) -> LatticeRecipe:
    known = next((one for one in SPACINGS if one == law), None)
    if known is None or type(step) is not int or not 1 <= step <= MAX_LATTICE_STEP or (step != 1 and known != "log"):
        raise ValueError("a gridded recipe has a law that nobody knows, or a step out of range")
    if type(base) is not bool or type(inherited) is not bool or (inherited and not base):
        raise ValueError("a gridded recipe has lattices of a parent that it does not have")
    if (known == "relative") != (others != ()) or others == []:
        raise ValueError("a gridded recipe is relative to nothing, or has others besides")
    how = CoderConfig.from_json(run)
    if how.tokens != "codes" or how.predictor != "base" or how.moments:
        raise ValueError("a gridded recipe whose points are coded in another way")
    return LatticeRecipe(known, how, step, base, inherited, () if others == () else _ordinals_from_json(others))


def _uses_context(codes: CodesRecipe) -> bool:
    """Whether other codes are context of these."""
    return isinstance(codes, CyclicDelta) or (isinstance(codes, CoderConfig) and codes.needs_base)


def _codes_from_json(data: dict[str, JSON]) -> CodesRecipe:
    match data:
        case {"run": run, **rest} if not rest:
            return CoderConfig.from_json(run)
        case {"packed": bits, **rest} if not rest and type(bits) is int and 1 <= bits <= 8:
            return BitPacked(bits)
        case {"lzma": bits, **rest} if not rest and type(bits) is int and 1 <= bits <= 8:
            return LzmaCodes(bits)
        case {"cyclic": [modulus, rearranged, runs], **rest} if (
            not rest and type(modulus) is int and 0 < modulus <= MAX_CODES and {type(rearranged), type(runs)} == {bool}
        ):
            return CyclicDelta(modulus, rearranged, runs)
    raise ValueError(f"a quantized recipe has codes of an unknown kind {short_repr(data, 80)}")


def _pairs_to_json(moments: Sequence[tuple[int, int]]) -> JSON:
    return [_ranges_to_json([pair[i] for pair in moments]) for i in range(2)]


def _pairs_from_json(moments: JSON) -> tuple[tuple[int, int], ...]:
    if not isinstance(moments, list | tuple):
        raise ValueError("a recipe has moments that are no list")
    sides = [_ordinals_from_json(side) for side in moments] or [(), ()]
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        raise ValueError("a recipe has moments that are no pairs")
    return tuple(zip(*sides, strict=True))


def _ranges_to_json(ordinals: Sequence[int]) -> JSON:
    """[first, step, count] of every arithmetic run: the moments of consecutive parameters are consecutive."""
    out: list[list[int]] = []
    for ordinal in ordinals:
        if out and (out[-1][2] == 1 or ordinal == out[-1][0] + out[-1][1] * out[-1][2]):
            out[-1][1] = ordinal - out[-1][0] if out[-1][2] == 1 else out[-1][1]
            out[-1][2] += 1
        else:
            out.append([ordinal, 0, 1])
    return out


def _check_ordinals(data: dict[str, JSON], members: int) -> None:
    """A range takes a few bytes, and names a million tensors: there is one ordinal for each tensor of the record."""
    moments = data.get("moments")
    sides = [data.get("of"), data.get("under"), data.get("others"), *(moments if isinstance(moments, list) else ())]
    for side in sides:
        ranges = side if isinstance(side, list) else ()
        counts = [one[2] for one in ranges if isinstance(one, list) and len(one) == 3 and type(one[2]) is int]
        if sum(counts) > members:
            raise ValueError(f"a recipe has {sum(counts)} ordinals for {members} tensors")


def _ordinals_from_json(data: JSON) -> tuple[int, ...]:
    if not isinstance(data, list) or len(data) > MAX_MEMBERS:
        raise ValueError("a recipe has ordinals that are no list of ranges")
    out: list[int] = []
    for item in data:
        if not isinstance(item, list) or len(item) != 3 or not all(type(n) is int for n in item):
            raise ValueError("a recipe has a range that is not three whole numbers")
        first, step, count = item
        if not 0 < count <= MAX_MEMBERS - len(out) or first < 0 or first + step * (count - 1) < 0:
            raise ValueError("a recipe has a range that is out of range")
        out.extend(first + step * i for i in range(count))
    return tuple(out)


MAX_MEMBERS = 1 << 20
"""Tensors in one record."""
MAX_LATTICE_STEP = 1 << 10
"""Eighths of an octave."""
MAX_TAPS = 64
"""Above this, the trailing axes are no kernel but a matrix of their own."""
