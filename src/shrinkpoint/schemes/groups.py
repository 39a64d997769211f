"""Which tensors of a state share a record, and in what order the records stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shrinkpoint._native import xxh3_128
from shrinkpoint.codec import NUMBERS, Origin, Points, Reference, Symbols
from shrinkpoint.codec.arrange import numbers, taps_of
from shrinkpoint.codec.quantize import bits_of
from shrinkpoint.codec.recipe import MAX_TAPS
from shrinkpoint.record import Role, TensorInfo
from shrinkpoint.schemes.links import Links
from shrinkpoint.state import FlatState, torch_dtype
from shrinkpoint.state.dtypes import raw, resolve

SMALL = 1 << 16
"""Numbers below which a tensor shares a record: on its own it would not pay for its tables."""
BUNDLE = 1 << 20
"""Numbers after which a shared record is full: one small tensor must not cost the decoding of a large model."""
DIGESTED = 1 << 16
"""Bytes up to which a tensor is told from others by all of it; many larger ones would take longer than coding them."""

_ORDER = [Role.MOMENT1, Role.MOMENT2, Role.MASTER]  # contexts before what is coded under them


@dataclass(frozen=True)
class Group:
    """Tensors to be coded together.

    Attributes:
        infos: of one dtype and role.
        taps: positions of the trailing axes that are coded after each other.
        based: the parent holds them all.
        moments: (first, second) moment of each; () where a member has none.
        kind: what is coded: their "values"; their "codes", where `based` those of the parent being the context, or its
            values what they are differences to; or their "points", where `based` beside its values.
        under: of each, the name of the tensor whose codes are context for its own, or that its points are relative to;
            () for none.
    """

    infos: tuple[TensorInfo, ...]
    taps: int
    based: bool
    moments: tuple[tuple[str, str], ...]
    kind: Literal["values", "codes", "points"] = "values"
    under: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """A state's tensors by what is done with them.

    Attributes:
        same: equal to the parent's.
        groups: to be coded, contexts first.
        copies: equal, after a cast at most, to the tensor that is named.
    """

    same: list[TensorInfo]
    groups: list[Group]
    copies: list[tuple[TensorInfo, str]]


def partition(flat: FlatState, reference: Reference | None, symbols: Mapping[str, Origin]) -> Partition:
    """Sort a state's tensors into references, copies and groups to be coded; `symbols` are of those quantized."""
    same: list[TensorInfo] = []
    rest: list[TensorInfo] = []
    for info in flat.infos.values():
        (same if _unchanged(info, flat, reference, symbols.get(info.name)) else rest).append(info)
    copies = _copies([info for info in rest if info.name not in symbols], flat, symbols)
    copied = {info.name for info, _ in copies}
    links = Links(flat, copied)
    rest = [info for info in rest if info.name not in copied]
    groups = _groups([info for info in rest if info.name not in symbols], links, reference, flat)
    symbols = {info.name: symbols[info.name] for info in rest if info.name in symbols}
    chosen = [info for info in rest if info.name in symbols]
    codes = _code_groups(
        [one for one in chosen if isinstance(symbols[one.name], Symbols)], links, reference, flat, symbols
    )
    codes += _point_groups([one for one in chosen if isinstance(symbols[one.name], Points)], reference, flat, symbols)
    depths = {name: _depth(name, symbols) for name in symbols}
    return Partition(same, sorted(groups + codes, key=lambda group: _when(group, depths)), copies)


def _held(info: TensorInfo, flat: FlatState, reference: Reference | None) -> Tensor | None:
    """The parent's tensor of this name, shape and dtype."""
    if reference is None:
        return None
    return reference.matching(info.name, info.shape, flat.tensors[info.name].dtype)


def _when(group: Group, depths: Mapping[str, int]) -> tuple[int, int]:
    """Contexts before what is coded under them."""
    names = [info.name for info in group.infos] + [name for pair in group.moments for name in pair]
    return max(depths.get(name, 0) for name in names), _place(group.infos[0])


def _depth(name: str, symbols: Mapping[str, Origin]) -> int:
    """How many tensors' codes must be there before those of this one."""
    depth = 0
    while (other := _needed(symbols[name])) in symbols and symbols[other].codes.shape == symbols[name].codes.shape:
        name, depth = other, depth + 1
        if depth > len(symbols):
            raise ValueError(f"codes of {name!r} under themselves")
    return depth


def _needed(origin: Origin) -> str:
    """The tensor of the same file without which there is no decoding this one."""
    return origin.under if isinstance(origin, Symbols) else origin.other


def _unchanged(info: TensorInfo, flat: FlatState, reference: Reference | None, symbols: Origin | None) -> bool:
    old = _held(info, flat, reference)
    if old is None or reference is None or not _equal(flat.tensors[info.name], old):
        return False
    before = reference.symbols.get(info.name)  # a reader goes on with these, so they must be what this state has
    if symbols is None or (isinstance(symbols, Symbols) and symbols.residual):
        return True
    return before is not None and _alike(symbols, before)


def _alike(a: Origin, b: Origin) -> bool:
    if isinstance(a, Points) or isinstance(b, Points):
        return isinstance(a, Points) and isinstance(b, Points) and a.lattice == b.lattice and _equal(a.codes, b.codes)
    if (a.first, a.bins, a.exact.dtype, a.exact.shape) != (b.first, b.bins, b.exact.dtype, b.exact.shape):
        return False
    return all(_equal(x, y) for x, y in ((a.codes, b.codes), (a.centers, b.centers), (a.exact, b.exact)))


def _equal(x: Tensor, y: Tensor) -> bool:
    """Bit by bit, so that NaN equals itself and -0 does not equal 0; a differing start decides at once."""
    a, b = bits_of(x), bits_of(y)
    head = slice(0, 4096)
    return bool((a[head] == b[head]).all()) and torch.equal(torch.from_numpy(a), torch.from_numpy(b))


def _copies(
    infos: Iterable[TensorInfo], flat: FlatState, symbols: Mapping[str, Origin]
) -> list[tuple[TensorInfo, str]]:
    """Tensors that repeat an earlier one, and narrow floats that are a cast of a 32-bit one of the same shape."""
    infos = list(infos)
    seen: dict[tuple[object, ...], list[str]] = {}
    casts = _Casts(info for info in infos if info.dtype in ("BF16", "F16"))
    for name in symbols:
        info, x = flat.infos[name], flat.tensors[name]
        seen.setdefault(_key(info, x), []).append(name)
        casts.add(info, x)
    out = []
    for info in sorted(infos, key=lambda info: info.dtype != "F32"):  # what is cast from comes first
        x = flat.tensors[info.name]
        if info.nbytes == 0:
            continue
        alike = seen.setdefault(_key(info, x), [])
        source = _first(alike, lambda name, x=x: _equal(flat.tensors[name], x)) if alike else None  # type: ignore[misc]
        if source is None and (wide := casts.sources(info, x)):
            source = _first(wide, lambda name, x=x: _is_cast(x, flat.tensors[name]))  # type: ignore[misc]
        if source is not None:
            out.append((info, source))
            continue
        alike.append(info.name)
        casts.add(info, x)
    return out


def _key(info: TensorInfo, x: Tensor) -> tuple[object, ...]:
    """What equal tensors have in common, and no others of a few bytes."""
    if x.is_contiguous():
        head = bits_of(x) if info.nbytes <= DIGESTED else bits_of(x)[: 64 * x.element_size()]
        return (info.dtype, info.shape, head.tobytes() if head.nbytes <= 256 else xxh3_128(head))
    first = raw(resolve(x)).reshape(-1)[:64]  # as integers: torch warns of complex32 when it has to copy some
    return (info.dtype, info.shape, bits_of(first).tobytes())


class _Casts:
    """32-bit tensors by what their first values are as narrow floats: with each one compared with each, many cost the
    square of their number.

    Args:
        narrow: the tensors that may be casts.
    """

    def __init__(self, narrow: Iterable[TensorInfo]) -> None:
        self._dtypes: dict[tuple[int, ...], set[torch.dtype]] = {}
        for info in narrow:
            self._dtypes.setdefault(info.shape, set()).add(torch_dtype(info.dtype))
        self._names: dict[tuple[object, ...], list[str]] = {}

    def add(self, info: TensorInfo, x: Tensor) -> None:
        """A tensor that others may be casts of."""
        if info.dtype == "F32":
            for dtype in self._dtypes.get(info.shape, ()):
                self._names.setdefault(self._key(info, x, dtype), []).append(info.name)

    def sources(self, info: TensorInfo, x: Tensor) -> list[str]:
        """The names of those that a tensor may be a cast of."""
        dtype = torch_dtype(info.dtype)
        if dtype not in self._dtypes.get(info.shape, ()):
            return []
        return self._names.get(self._key(info, x, dtype), [])

    def _key(self, info: TensorInfo, x: Tensor, dtype: torch.dtype) -> tuple[object, ...]:
        return (dtype, info.shape, bits_of(x.reshape(-1)[:64].to(dtype)).tobytes())


def _is_cast(x: Tensor, source: Tensor) -> bool:
    flat, wide = x.reshape(-1), source.reshape(-1)
    head = slice(0, 1024)
    if not _equal(flat[head], wide[head].to(x.dtype)) or not _equal(x, source.to(x.dtype)):
        return False
    return not bool(source.isnan().any())  # what becomes of a nan differs between machines


def _first(names: list[str], holds: Callable[[str], bool]) -> str | None:
    return next((name for name in names if holds(name)), None)


def _groups(infos: list[TensorInfo], links: Links, reference: Reference | None, flat: FlatState) -> list[Group]:
    bundles: dict[tuple[object, ...], list[TensorInfo]] = {}
    filled: dict[tuple[object, ...], int] = {}
    for info in sorted(infos, key=_place):
        based = _held(info, flat, reference) is not None
        empty = not numbers(info)  # such a one has neither rows nor columns, and is stored as it is
        key: tuple[object, ...] = (info.dtype, info.role, _taps(info), based, bool(links.moments(info)), empty)
        if numbers(info) >= SMALL:
            key = (*key, info.name)
        elif filled.get(key, 0) + numbers(info) > BUNDLE:
            bundles[(*key, len(bundles))] = bundles.pop(key)
            filled[key] = 0
        bundles.setdefault(key, []).append(info)
        filled[key] = filled.get(key, 0) + numbers(info)
    return [
        Group(tuple(members), _taps(members[0]), bool(key[3]), _moments(members, links))
        for key, members in bundles.items()
    ]


def _place(info: TensorInfo) -> int:
    return _ORDER.index(info.role) if info.role in _ORDER else len(_ORDER)


def _code_groups(
    infos: list[TensorInfo], links: Links, reference: Reference | None, flat: FlatState, symbols: Mapping[str, Origin]
) -> list[Group]:
    """As `_groups`, of tensors that are quantized: those in a record have equally many centers.

    Args:
        symbols: of these tensors and no others, so that contexts are codes of this file.
    """
    bundles: dict[tuple[object, ...], list[TensorInfo]] = {}
    for info in infos:
        one = symbols[info.name]
        assert isinstance(one, Symbols)
        held = reference is not None and _held(info, flat, reference) is not None
        depth = _depth(info.name, symbols)
        based = held and reference is not None and (one.residual or (not depth and reference.has_codes(info.name)))
        moments = info.role is not Role.MOMENT2 and _come_before(links.moments(info), symbols)
        alone = info.name if info.numel >= SMALL else ""
        key = (based, moments, depth, info.dtype, info.role, one.bins, one.first, one.exact.dtype, one.residual, alone)
        bundles.setdefault(key, []).append(info)
    return [
        Group(
            tuple(members), 1, bool(key[0]), _moments(members, links) if key[1] else (), kind="codes",
            under=tuple(_needed(symbols[info.name]) for info in members) if key[2] else (),
        )
        for key, members in bundles.items()
    ]  # fmt: skip


def _point_groups(
    infos: list[TensorInfo], reference: Reference | None, flat: FlatState, symbols: Mapping[str, Origin]
) -> list[Group]:
    """As `_groups`, of tensors that are points: those in a record have lattices of one kind."""
    bundles: dict[tuple[object, ...], list[TensorInfo]] = {}
    for info in infos:
        one = symbols[info.name]
        assert isinstance(one, Points)
        # What is relative to another tensor is rounded anew each time: the points before say nothing of these.
        based = not one.other and reference is not None and _held(info, flat, reference) is not None
        before = reference.symbols.get(info.name) if based and reference is not None else None
        kept = isinstance(before, Points) and before.lattice == one.lattice
        alone = info.name if info.numel >= SMALL else ""
        key = (based, one.lattice.law, one.lattice.step, info.dtype, info.role, bool(one.other), kept, alone)
        bundles.setdefault(key, []).append(info)
    return [
        Group(
            tuple(members), 1, bool(key[0]), (), kind="points",
            under=tuple(_needed(symbols[info.name]) for info in members) if key[5] else (),
        )
        for key, members in bundles.items()
    ]  # fmt: skip


def _come_before(moments: tuple[str, str] | None, symbols: Mapping[str, Origin]) -> bool:
    """Whether there are moments, and these do not wait for other codes themselves."""
    return moments is not None and not any(name in symbols and _needed(symbols[name]) for name in moments)


def _moments(infos: list[TensorInfo], links: Links) -> tuple[tuple[str, str], ...]:
    return tuple(filter(None, map(links.moments, infos)))


def _taps(info: TensorInfo) -> int:
    taps = taps_of(info)
    return taps if 1 < taps <= MAX_TAPS and NUMBERS[info.dtype].is_float and not info.dtype.startswith("C") else 1
