"""Which kind of coder serves tensors of one kind: chosen on the first of them, and held for some saves of a chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from shrinkpoint.codec.coder import CoderConfig
from shrinkpoint.schemes.encode.record_groups import RecordGroup

GroupKind: TypeAlias = tuple[object, ...]
"""What groups have in common that share a choice: dtype, role, shape, taps, and the kind of context."""
ConfigKind: TypeAlias = tuple[object, ...]
"""The fields of a configuration that are chosen by measuring; all others follow from the numbers."""


@dataclass(frozen=True)
class CoderChoice:
    """How a record was coded smallest.

    Attributes:
        taps: as in `recipe.CodedRecipe`.
        configs: the kind of the configuration of each tap; the last one serves all later taps.
        ratio: coded bytes by bytes of the numbers where this was chosen.
    """

    taps: int
    configs: tuple[ConfigKind, ...]
    ratio: float


def config_kind(config: CoderConfig) -> ConfigKind:
    """Return the fields of a configuration that are chosen by measuring."""
    return config.tokens, config.predictor, config.companion, config.moments, config.factors


def group_kind(group: RecordGroup) -> GroupKind:
    """Return what a group has in common with those that share its choice. One of several tensors shares with none."""
    info = group.infos[0]
    members = info.shape if len(group.infos) == 1 else (info.name, len(group.infos))
    return info.dtype, info.role, members, group.taps, group.has_reference, bool(group.moments)


class ChainChoices:
    """The choices that hold now: made by the first delta of a chain, and again by its 2nd, 4th, 8th, ...

    What codes smallest changes most at the beginning of a run: twenty steps after its start the levels of second
    moments do, and soon the square of the gradient, which the first moments tell, takes 15 % less. A choice costs a
    measurement, so it is made ever less often.
    """

    def __init__(self) -> None:
        self.by_kind: dict[GroupKind, CoderChoice] = {}
        self._num_deltas = 0

    def begin_save(self, *, is_delta: bool) -> None:
        """Count a save of the chain, or begin a new chain; drop the choices that are to be made again."""
        self._num_deltas = self._num_deltas + 1 if is_delta else 0
        if self._num_deltas & (self._num_deltas - 1) == 0:
            self.by_kind.clear()


class SaveChoices:
    """The choices for one save: those of the chain so far, and one for each kind that is new.

    The first group of a kind chooses and the others wait, whatever thread they are in: so the same bytes are written
    with any number of threads. Groups must be started in their order.

    Args:
        chain: the choices of the chain; changed in place.
        groups: the groups of values of this save, in their order.
    """

    def __init__(self, chain: dict[GroupKind, CoderChoice], groups: Sequence[RecordGroup]) -> None:
        self._chain, self._before = chain, dict(chain)
        self._first: dict[GroupKind, str] = {}
        for group in groups:
            self._first.setdefault(group_kind(group), group.infos[0].name)
        self._chosen: dict[GroupKind, Future[CoderChoice | None]] = {
            kind: Future() for kind in self._first if kind not in chain
        }

    def get(self, group: RecordGroup, choose: Callable[[], CoderChoice | None]) -> CoderChoice | None:
        """Return the choice for a group, made by `choose` if the group is the first of a new kind."""
        kind = group_kind(group)
        if kind in self._before:
            return self._before[kind]
        if self._first[kind] != group.infos[0].name:
            return self._chosen[kind].result()
        choice: CoderChoice | None = None
        try:
            choice = choose()
        finally:
            self._chosen[kind].set_result(choice)
        if choice is not None:
            self._chain[kind] = choice
        return choice

    def reject(self, group: RecordGroup) -> None:
        """Forget a choice of an earlier save that serves a group badly: the next save chooses again."""
        kind = group_kind(group)
        if kind in self._before:
            self._chain.pop(kind, None)
