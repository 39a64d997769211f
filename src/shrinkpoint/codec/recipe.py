"""Recipes: how the tensors of one record were encoded, and their JSON form in the file.

The keys of the JSON are part of the format, and differ from the names of the fields in places: "gridded" is a
`LatticeRecipe`, "quantized" a `CodebookRecipe`, "law" is `spacing`, "others" `relative_to`, "under" `contexts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from shrinkpoint.codec.codebook_tensor import MAX_CODES, RESERVED_CODES
from shrinkpoint.codec.coder import MAX_CHUNK, CoderConfig
from shrinkpoint.codec.lattice import SPACINGS, Spacing
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.names import short_repr

MAX_MEMBERS = 1 << 20  # Largest number of tensors in one record
MAX_LATTICE_STEP = 1 << 10  # Largest `LatticeRecipe.step`, in eighths of an octave
MAX_REFILLS = 1 << 10  # Largest number of refills of a generator
MAX_TAPS = 64  # Largest number of taps; larger trailing axes are not a convolution kernel


@dataclass(frozen=True)
class PlainRecipe:
    """Uncompressed bytes."""


@dataclass(frozen=True)
class SameRecipe:
    """Equal to the parent's tensors of the same names."""


@dataclass(frozen=True)
class CopyRecipe:
    """Equal to earlier tensors of the same file, cast where the dtypes differ."""

    sources: tuple[int, ...]  # the ordinals of those tensors, one for each member


@dataclass(frozen=True)
class CodedRecipe:
    """Entropy-coded numbers."""

    runs: tuple[CoderConfig, ...]  # the coder's configuration for each tap; the last serves all taps that follow
    taps: int = 1  # number of positions of the axes after the second that are coded one after the other; 1: row-major
    base: bool = False  # True if the parent's tensors of the same names are used
    # The ordinals, in the file, of each member's (first, second) moment; () for none. A first moment alone, the context
    # of a second one, has the form (first, first).
    moments: tuple[tuple[int, int], ...] = field(default=())


@dataclass(frozen=True)
class BitPacked:
    """Codes of a fixed width of `bits` bits, 1 to 8."""

    bits: int


@dataclass(frozen=True)
class CyclicDelta:
    """Cyclic differences to the parent's codes, coded as in arXiv 2306.11800."""

    modulus: int  # modulus of the differences, the larger of the two numbers of codes
    rearranged: bool  # True if they are grouped by the parent's code
    runs: bool  # True if they are run-length coded


@dataclass(frozen=True)
class LzmaCodes:
    """Codes of a fixed width of `bits` bits, compressed with LZMA as in arXiv 2406.11257."""

    bits: int


CodesRecipe: TypeAlias = CoderConfig | BitPacked | CyclicDelta | LzmaCodes


@dataclass(frozen=True)
class CodebookRecipe:
    """Codebook tensors (`CodebookTensor`)."""

    bins: int  # number of centers of each member
    first: int  # the code of the first center
    codes: CodesRecipe  # how the codes are coded
    centers: CoderConfig | None = None  # how the centers are coded; None: uncompressed
    exact: str = "BF16"  # dtype of the exact values, "F32" or "BF16"
    exacts: CoderConfig | None = None  # how the exact values are coded; None: uncompressed
    base: bool = False  # True if the parent's codes and values of the same tensors are used
    moments: tuple[tuple[int, int], ...] = field(default=())  # as in `CodedRecipe`
    residual: bool = False  # True if centers and zeros are differences to the parent's values of the same tensors
    # The ordinals, in the file, of the tensors whose codes are context in place of the parent's; () for none.
    contexts: tuple[int, ...] = field(default=())


@dataclass(frozen=True)
class LatticeRecipe:
    """Lattice tensors (`LatticeTensor`)."""

    spacing: Spacing  # spacing of the lattices
    run: CoderConfig  # how the differences to the predicted codes are coded
    step: int = 1  # step of the spacing "log"; else 1
    base: bool = False  # True if the parent's values of the same tensors are used
    inherited: bool = False  # True if rows and columns of the lattices are those of the parent
    # With spacing "relative", the ordinals, in the file, of the second moments; else ().
    relative_to: tuple[int, ...] = field(default=())
    gains: bool = False  # True if each tensor has a gain and an origin; with spacing "linear" only
    # True if the origins are stored. If not, they are the parent's, whose codes are on the same lattices.
    origin: bool = False
    moved: bool = False  # True if they are stored as differences to those of the parent
    # How many leading axes of each tensor are the rows of its matrix; (): the first one of all, or, of lattices that
    # are inherited or moved, as many as in the parent.
    axes: tuple[int, ...] = field(default=())


@dataclass(frozen=True)
class TwisterRecipe:
    """States of Mersenne Twisters that follow from the parent's."""

    refills: tuple[int, ...]  # how often the words of each member have been refilled since


_CODED_KEYS = {"taps", "base", "moments"}
_CODEBOOK_KEYS = {"centers", "exact", "exacts", "base", "moments", "residual", "under"}
_LATTICE_KEYS = {"step", "base", "inherited", "others", "gains", "origin", "moved", "axes"}
"""Optional keys of the JSON by kind of recipe."""

Recipe: TypeAlias = PlainRecipe | SameRecipe | CopyRecipe | CodedRecipe | CodebookRecipe | LatticeRecipe | TwisterRecipe


def to_json(recipe: Recipe) -> JSON:
    """Return the stored form of a recipe; default values are left out."""
    required: dict[str, JSON]
    optional: dict[str, JSON] = {}
    match recipe:
        case PlainRecipe():
            required = {"kind": "plain"}
        case SameRecipe():
            required = {"kind": "same"}
        case TwisterRecipe(refills):
            required = {"kind": "twister", "refills": [*refills]}
        case CopyRecipe(sources):
            required = {"kind": "copy", "of": _ranges_to_json(sources)}
        case CodedRecipe(runs, taps, base, moments):
            required = {"kind": "coded", "runs": [_run_to_json(run) for run in runs]}
            optional = {"taps": taps if taps > 1 else None, "base": base, "moments": _pairs_to_json(moments)}
        case CodebookRecipe(bins, first, codes, centers, exact, exacts):
            required = {"kind": "quantized", "bins": bins, "first": first, "codes": _codes_to_json(codes)}
            optional = {
                "centers": None if centers is None else _run_to_json(centers),
                "exact": exact if exact != "BF16" else None,
                "exacts": None if exacts is None else _run_to_json(exacts),
                "base": recipe.base,
                "moments": _pairs_to_json(recipe.moments),
                "residual": recipe.residual,
                "under": _ranges_to_json(recipe.contexts),
            }
        case LatticeRecipe(spacing, run, step, base, inherited, relative_to, gains, origin, moved, axes):
            required = {"kind": "gridded", "law": spacing, "run": _run_to_json(run)}
            optional = {
                "step": step if step > 1 else None,
                "base": base,
                "inherited": inherited,
                "moved": moved,
                "axes": [*axes],
                "others": _ranges_to_json(relative_to),
                "gains": gains,
                "origin": origin,
            }
    return required | {key: value for key, value in optional.items() if value}


def _codes_to_json(codes: CodesRecipe) -> JSON:
    match codes:
        case CoderConfig() as run:
            return {"run": _run_to_json(run)}
        case BitPacked(bits):
            return {"packed": bits}
        case CyclicDelta(modulus, rearranged, runs):
            return {"cyclic": [modulus, rearranged, runs]}
        case LzmaCodes(bits):
            return {"lzma": bits}


def ordinals(recipe: Recipe) -> list[int]:
    """Return the ordinals of all earlier tensors of the file that a recipe refers to."""
    match recipe:
        case CopyRecipe(sources):
            return [*sources]
        case CodedRecipe(moments=moments):
            return [ordinal for pair in moments for ordinal in pair]
        case CodebookRecipe(moments=moments, contexts=contexts):
            return [*contexts, *(ordinal for pair in moments for ordinal in pair)]
        case LatticeRecipe(relative_to=second_moments):
            return [*second_moments]
    return []


class RecipeParser:
    """Parses the recipes of a file as `from_json` does, each once: many records share one."""

    def __init__(self) -> None:
        self._parsed: dict[tuple[int, int], tuple[JSON, Recipe]] = {}  # holds the JSON, so that its id stays its own

    def __call__(self, data: JSON, members: int) -> Recipe:
        parsed = self._parsed.get((id(data), members))
        if parsed is None:
            parsed = self._parsed[id(data), members] = (data, from_json(data, members))
        return parsed[1]

    def parse_valid(self, data: JSON, members: int) -> Recipe | None:
        """Parse a recipe; None if it is malformed, which the record's decoder reports."""
        try:
            return self(data, members)
        except ValueError:
            return None


def from_json(data: JSON, members: int | None = None) -> Recipe:
    """Parse and validate a stored recipe.

    Args:
        members: number of tensors of the record; if given, a recipe with more ordinals is refused before they are
            listed.

    Raises:
        ValueError: no encoder writes such a recipe.
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
        case "copy", {"of": list(sources), **extra} if not extra:
            return CopyRecipe(_ordinals_from_json(sources))
        case "twister", {"refills": list(refills), **extra} if not extra:
            if not all(type(count) is int and 0 <= count <= MAX_REFILLS for count in refills):
                raise ValueError("a twister recipe has refills out of range")
            return TwisterRecipe(tuple(refills))
        case "coded", {"runs": list(runs), **extra} if extra.keys() <= _CODED_KEYS:
            return _coded_from_json(runs, **extra)
        case "quantized", {"bins": int(bins), "first": int(first), "codes": dict(codes), **extra} if (
            extra.keys() <= _CODEBOOK_KEYS
        ):
            return _codebook_from_json(bins, first, codes, **extra)
        case "gridded", {"law": str(law), "run": dict(run), **extra} if extra.keys() <= _LATTICE_KEYS:
            return _lattice_from_json(law, run, **extra)
    raise ValueError(f"unknown recipe {short_repr(data, 80)}")


def _coded_from_json(runs: list[JSON], taps: JSON = 1, base: JSON = False, moments: JSON = ()) -> CodedRecipe:
    if type(taps) is not int or not 1 <= taps <= MAX_TAPS or type(base) is not bool or not 1 <= len(runs) <= taps:
        raise ValueError("a coded recipe has taps, base or runs out of range")
    return CodedRecipe(tuple(_run_from_json(run) for run in runs), taps, base, _pairs_from_json(moments))


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
    codes_recipe = _codes_from_json(codes)
    if type(residual) is not bool or (base and residual):
        raise ValueError("a quantized recipe has a residual that is not a bool, or the parent's codes as well")
    if under != () and (base or under == [] or not uses_context(codes_recipe)):
        raise ValueError("a quantized recipe names context codes that it does not use")
    return CodebookRecipe(
        bins,
        first,
        codes_recipe,
        None if centers is None else _run_from_json(centers),
        exact,
        None if exacts is None else _run_from_json(exacts),
        base,
        _pairs_from_json(moments),
        residual,
        () if under == () else _ordinals_from_json(under),
    )


def _are_axes(axes: JSON) -> bool:
    are_numbers = isinstance(axes, list) and 0 < len(axes) <= MAX_MEMBERS and all(type(n) is int for n in axes)
    return are_numbers and min(axes) >= 1 and max(axes) > 1


def _lattice_from_json(
    law: str,
    run: dict[str, JSON],
    step: JSON = 1,
    base: JSON = False,
    inherited: JSON = False,
    others: JSON = (),
    gains: JSON = False,
    origin: JSON = False,
    moved: JSON = False,
    axes: JSON = (),
) -> LatticeRecipe:
    spacing = next((spacing for spacing in SPACINGS if spacing == law), None)
    max_step = MAX_LATTICE_STEP if spacing == "log" else 1
    if spacing is None or type(step) is not int or not 1 <= step <= max_step:
        raise ValueError("a gridded recipe has an unknown law, or a step out of range")
    if type(base) is not bool or type(inherited) is not bool or (inherited and not base):
        raise ValueError("a gridded recipe inherits lattices without a base")
    if type(moved) is not bool or (moved and (inherited or not base)):
        raise ValueError("a gridded recipe moves lattices that it has not, or that it inherits")
    if axes != () and (inherited or moved or not _are_axes(axes)):
        raise ValueError("a gridded recipe has axes that are no numbers of axes, or those of its parent's lattices")
    if (spacing == "relative") != (others != ()) or others == []:
        raise ValueError("a gridded recipe lacks the second moments of its law, or has some without need")
    config = _run_from_json(run)
    if config.tokens != "codes" or config.predictor != "base" or config.moments:
        raise ValueError("a gridded recipe with a coder that lattices do not use")
    if type(gains) is not bool or type(origin) is not bool or (gains and spacing != "linear"):
        raise ValueError("a gridded recipe has gains or an origin out of range, or of another law")
    if (gains and not (origin or inherited)) or (origin and not gains):
        raise ValueError("a gridded recipe has gains without an origin, or an origin without gains")
    ordinals = () if others == () else _ordinals_from_json(others)
    return LatticeRecipe(spacing, config, step, base, inherited, ordinals, gains, origin, moved, tuple(axes))


def uses_context(codes: CodesRecipe) -> bool:
    """True if these codes are coded under other codes."""
    return isinstance(codes, CyclicDelta) or (isinstance(codes, CoderConfig) and codes.needs_base)


def _codes_from_json(data: dict[str, JSON]) -> CodesRecipe:
    match data:
        case {"run": run, **rest} if not rest:
            return _run_from_json(run)
        case {"packed": bits, **rest} if not rest and type(bits) is int and 1 <= bits <= 8:
            return BitPacked(bits)
        case {"lzma": bits, **rest} if not rest and type(bits) is int and 1 <= bits <= 8:
            return LzmaCodes(bits)
        case {"cyclic": [modulus, rearranged, runs], **rest} if (
            not rest and type(modulus) is int and 0 < modulus <= MAX_CODES and {type(rearranged), type(runs)} == {bool}
        ):
            return CyclicDelta(modulus, rearranged, runs)
    raise ValueError(f"a quantized recipe has codes of an unknown kind {short_repr(data, 80)}")


_RUN_TYPES = {field_.name: type(field_.default) for field_ in fields(CoderConfig)[1:]} | {"tokens": str}


def _run_to_json(run: CoderConfig) -> JSON:
    """Return the fields that differ from their defaults; defaults are left out to keep headers small."""
    out: dict[str, JSON] = {"tokens": run.tokens}
    for field_ in fields(run)[1:]:
        value = getattr(run, field_.name)
        if value != field_.default:
            out[field_.name] = list(value) if isinstance(value, tuple) else value
    return out


def _run_from_json(data: JSON) -> CoderConfig:
    """Parse the stored fields; the native core checks their combination.

    Raises:
        ValueError: a field is unknown, of another type or out of range.
    """
    if not isinstance(data, dict) or "tokens" not in data:
        raise ValueError("a run is not an object, or has no tokens")
    for name, value in data.items():
        kind = list if name == "parameters" else _RUN_TYPES.get(name)
        if kind is None or type(value) is not kind:
            raise ValueError(f"a run has {name}={value!r}")
    run = CoderConfig(**{**data, "parameters": tuple(data.get("parameters", ()))})
    small = all(0 <= n < 1 << 12 for n in (run.fine, run.shift, run.top)) and abs(run.bias) < 1 << 20
    if not small or not 0 < run.chunk <= MAX_CHUNK or not all(type(p) is float for p in run.parameters):
        raise ValueError("a run has a number out of range")
    if len(run.parameters) not in (0, 4):
        raise ValueError("a run lacks some of its parameters")
    return run


def _pairs_to_json(moments: Sequence[tuple[int, int]]) -> JSON:
    return [_ranges_to_json([pair[i] for pair in moments]) for i in range(2)] if moments else []


def _pairs_from_json(moments: JSON) -> tuple[tuple[int, int], ...]:
    if not isinstance(moments, list | tuple):
        raise ValueError("a recipe has moments that are not a list")
    sides = [_ordinals_from_json(side) for side in moments] or [(), ()]
    if len(sides) != 2 or len(sides[0]) != len(sides[1]):
        raise ValueError("a recipe has moments that are not pairs")
    return tuple(zip(*sides, strict=True))


def _ranges_to_json(ordinals: Sequence[int]) -> JSON:
    """Return [first, step, count] of every arithmetic sequence: moments of consecutive parameters are consecutive."""
    out: list[list[int]] = []
    for ordinal in ordinals:
        if out and (out[-1][2] == 1 or ordinal == out[-1][0] + out[-1][1] * out[-1][2]):
            out[-1][1] = ordinal - out[-1][0] if out[-1][2] == 1 else out[-1][1]
            out[-1][2] += 1
        else:
            out.append([ordinal, 0, 1])
    return out


def _check_ordinals(data: dict[str, JSON], members: int) -> None:
    """Raise ValueError if ranges list more ordinals than there are members: a range of few bytes can have a million."""
    moments = data.get("moments")
    sides = [data.get("of"), data.get("under"), data.get("others"), *(moments if isinstance(moments, list) else ())]
    for side in sides:
        ranges = side if isinstance(side, list) else ()
        counts = [item[2] for item in ranges if isinstance(item, list) and len(item) == 3 and type(item[2]) is int]
        if sum(counts) > members:
            raise ValueError(f"a recipe has {sum(counts)} ordinals for {members} tensors")


def _ordinals_from_json(data: JSON) -> tuple[int, ...]:
    if not isinstance(data, list) or len(data) > MAX_MEMBERS:
        raise ValueError("a recipe has ordinals that are not a list of ranges")
    out: list[int] = []
    for item in data:
        if not isinstance(item, list) or len(item) != 3 or not all(type(n) is int for n in item):
            raise ValueError("a recipe has a range that is not three whole numbers")
        first, step, count = item
        if not 0 < count <= MAX_MEMBERS - len(out) or first < 0 or first + step * (count - 1) < 0:
            raise ValueError("a recipe has a range that is out of range")
        out.extend(first + step * i for i in range(count))
    return tuple(out)
