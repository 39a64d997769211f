"""What can be measured: something that turns checkpoints into bytes and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from shrinkpoint.harness.series import Series
from shrinkpoint.record import JSON


@dataclass(frozen=True)
class Returned:
    """One checkpoint, as it came back.

    Attributes:
        step: of the series.
        keyframe: it needs no other checkpoint.
        stored: bytes of all of it.
        roles: bytes by role, where the system tells them apart.
        tensors: by the names that `state.flatten` gives.
        state: the nest, as it was given.
        encode: seconds, without those spent in the user's evaluation.
        decode: seconds.
        searched: seconds spent in the user's evaluation.
        peak: bytes by which memory rose at most while it was encoded; None: unknown here.
        retention: of the weights' progress; None: not measured.
        choice: what a search chose.
    """

    step: int
    keyframe: bool
    stored: int
    roles: Mapping[str, int]
    tensors: Mapping[str, Tensor] = field(repr=False)
    state: Any = field(repr=False)
    encode: float
    decode: float
    searched: float = 0.0
    peak: int | None = None
    retention: float | None = None
    choice: JSON = None


class System(Protocol):
    """A scheme of ours, or a rival."""

    @property
    def name(self) -> str: ...

    def run(self, series: Series) -> Iterator[Returned]:
        """Every checkpoint of a series in its order, each written as the one after the one before it."""
        ...
