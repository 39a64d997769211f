"""What every scheme can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from shrinkpoint.codec import Origin, Reference
from shrinkpoint.record import JSON, Encoded
from shrinkpoint.state import FlatState


@dataclass(frozen=True)
class Kept:
    """What is left of a state once a scheme has lost what it loses; everything after that is exact.

    Attributes:
        flat: the state with every value as a reader will get it.
        symbols: of the tensors that were quantized, what their values were made from.
        loss: what was lost, as plain data for the manifest; None: nothing.
        exact: why tensors of floats stay exact, by name, where a scheme loses something of others.
        keyframe: no delta must be made of it, although there is a checkpoint for one to stand on.
    """

    flat: FlatState
    symbols: Mapping[str, Origin] = field(default_factory=dict)
    loss: JSON = None
    keyframe: bool = False
    exact: Mapping[str, str] = field(default_factory=dict, repr=False)


class Scheme(Protocol):
    """A named policy for a whole state. Readers never need it: a recipe says all that decoding needs."""

    @property
    def id(self) -> str:
        """What manifests and people call it."""
        ...

    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """Lose what the scheme loses. Never changes the tensors of `flat`.

        Args:
            reference: the parent's decoded tensors; None: there is none.
        """
        ...

    def encode(
        self,
        flat: FlatState,
        reference: Reference | None,
        *,
        symbols: Mapping[str, Origin] | None = None,
        threads: int | None = None,
    ) -> Iterator[Encoded]:
        """Yield the records of what `quantize` kept, each after those whose values it needs as context.

        Args:
            reference: the parent's decoded tensors; None makes every record stand alone.
            threads: native threads; None uses every core.
        """
        ...


@runtime_checkable
class Settling(Protocol):
    """A scheme that decides while the model is the caller's; what is decided can then be written beside the loop."""

    @property
    def evaluate(self) -> Callable[[Any], Any] | None:
        """What it measures a model with; None: it measures nothing."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes."""
        ...

    def together(self, compute: Callable[[], None]) -> None:
        """Do something on the process that leads; where it raises, all that take part do."""
        ...

    def settle(self, flat: FlatState, reference: Reference | None, target: Any = None) -> Scheme:
        """Decide for this state.

        Args:
            target: what to measure on (`target.Target`); None: on copies of the state.
        """
        ...


@runtime_checkable
class Resuming(Protocol):
    """A scheme that has to know when a run goes on from a checkpoint."""

    def resume(self, loss: JSON, generation: int = 0) -> None:
        """Go on from a checkpoint.

        Args:
            loss: of its manifest; whatever another scheme wrote there is passed over.
            generation: lossy restores behind the weights from now on.
        """
        ...
