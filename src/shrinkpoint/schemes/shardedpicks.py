"""Which tensors a lossy scheme may quantize, decided for whole tensors of which several ranks have boxes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shrinkpoint.schemes.select import WEIGHT_DTYPES, TensorSelection, is_cast, max_abs
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role


@dataclass(frozen=True)
class Picked:
    """What was picked.

    Attributes:
        picks: this rank's part of it, without boxes that have no values; `refused` are titles.
        titles: of all whole tensors that were picked.
    """

    picks: TensorSelection
    titles: tuple[str, ...]


def picked(
    wholes: GlobalTensors,
    flat: FlatState,
    alive: Collection[str] | None,
    *,
    smallest: int,
    axes: int,
    owned: Collection[str] | None = None,
) -> Picked:
    """As `Picks.of` and `Picks.folded`, of whole tensors; a collective.

    A copy is one where each of its boxes has the box of the other tensor beside it, on the same rank, and is a copy of
    it.

    Args:
        owned: names of what an optimizer knows; None: nothing is folded.
    """
    wanted = {
        name: flat.tensors[name]
        for name, info in flat.infos.items()
        if _is_weight(name, info.role, alive) and _fits(wholes, name, flat.tensors[name], smallest, axes)
    }
    told = wholes.gather_by_tensor({name: _note(wholes, name, wanted, alive, owned) for name in wanted})
    titles, casts, refused = _decided({title: told[title] for title in wholes.shapes if title in told})
    filled = {name: x for name, x in wanted.items() if x.numel()}
    beside = {
        name: wholes.colocated_name(name, casts[wholes.global_name(name)])
        for name in filled
        if wholes.global_name(name) in casts
    }
    picks = TensorSelection(
        {name: x for name, x in filled.items() if wholes.global_name(name) in titles},
        {name: other for name, other in beside.items() if other is not None},
        refused,
    )
    return Picked(picks, titles)


@dataclass(frozen=True)
class _Note:
    """What a rank says of a box.

    Attributes:
        ours: it counts even if it is nobody's master.
        finite: all its values are.
        wide: of 32 bits.
        owned: an optimizer knows it.
        masters, twins: titles of those it is a cast of, and of those that an optimizer knows and it is a copy of; None:
            it has no values.
    """

    ours: bool
    finite: bool
    wide: bool
    owned: bool
    masters: tuple[str, ...] | None
    twins: tuple[str, ...] | None


def _note(
    wholes: GlobalTensors,
    name: str,
    wanted: Mapping[str, Tensor],
    alive: Collection[str] | None,
    owned: Collection[str] | None,
) -> _Note:
    x, wide = wanted[name], wanted[name].element_size() == 4
    ours, finite = alive is None or name in alive, math.isfinite(max_abs(x))
    masters: tuple[str, ...] | None = None
    twins: tuple[str, ...] | None = None
    if x.numel():
        others = [one for one in wanted if one != name and wholes.is_colocated(name, one)]
        masters = () if wide else _titles(wholes, x, [one for one in others if wanted[one].element_size() == 4], wanted)
        known = [one for one in others if owned is not None and one in owned and wanted[one].dtype == x.dtype]
        twins = _titles(wholes, x, known, wanted) if owned is not None and name not in owned else ()
    return _Note(ours, finite, wide, owned is not None and name in owned, masters, twins)


def _titles(wholes: GlobalTensors, x: Tensor, others: Iterable[str], wanted: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(wholes.global_name(one) for one in others if is_cast(x, wanted[one]))


def _decided(told: Mapping[str, Sequence[_Note]]) -> tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]:
    """Titles of what is picked, what follows which of them, and what is refused."""
    finite = [title for title, notes in told.items() if all(one.finite for one in notes)]
    wide = {title for title in finite if told[title][0].wide}
    casts: dict[str, str] = {}
    for title in finite:
        master = _common([one.masters for one in told[title]], wide)
        if master is not None and title not in wide:
            casts[title] = master
    ours = {title for title, notes in told.items() if any(one.ours for one in notes)} | {*casts.values()}
    titles = [title for title in finite if title in ours and title not in casts]
    twins: dict[str, str] = {}
    known = {title for title in titles if any(one.owned for one in told[title])}
    for title in titles:
        twin = None if title in known else _common([one.twins for one in told[title]], known)
        if twin is not None:
            twins[title] = twin
    refused = tuple(title for title in told if title in ours and title not in finite)
    return tuple(title for title in titles if title not in twins), casts | twins, refused


def _common(found: Iterable[tuple[str, ...] | None], allowed: Collection[str]) -> str | None:
    """The first that all boxes with values name."""
    lists = [one for one in found if one is not None]
    if not lists:
        return None
    return next((one for one in lists[0] if one in allowed and all(one in other for other in lists)), None)


def _is_weight(name: str, role: Role, alive: Collection[str] | None) -> bool:
    return role is Role.MASTER or (role is Role.PARAMETER if alive is None else name in alive)


def _fits(wholes: GlobalTensors, name: str, x: Tensor, smallest: int, axes: int) -> bool:
    return x.dtype in WEIGHT_DTYPES and x.dim() >= axes and wholes.local_shards[name].spec.global_numel >= smallest
