"""The protocol of schemes, what quantization returns, and how a scheme is spelled as text."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from shrinkpoint import validate
from shrinkpoint.codec.reference import QuantizedTensor, Reference, RowSample
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, EncodedRecord


@dataclass(frozen=True)
class QuantizedState:
    """A state after the lossy part of a scheme; everything after that is exact.

    Attributes:
        state: the state with every value as a reader will get it.
        quantized: of the tensors that were quantized, what their values were made from.
        loss: what was lost, as plain data for the manifest; None: nothing.
        exact: why tensors of floats stay exact, by name, where a scheme loses something of others.
        sampled_rows: rows of the quantized weights on which progress is measured, by name; without an entry, of which
            there are enough.
        samples: rows of quantized weights as they were before, by name, where the state that was quantized lacks them.
        keyframe: no delta must be made of it, although there is a checkpoint for one to stand on.
        copies: names of quantized weights that are copies of a model's, which a report counts by themselves.
    """

    state: FlatState
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    loss: JSON = None
    keyframe: bool = False
    exact: Mapping[str, str] = field(default_factory=dict, repr=False)
    sampled_rows: Mapping[str, slice] = field(default_factory=dict, repr=False)
    samples: Mapping[str, RowSample] = field(default_factory=dict, repr=False)
    copies: frozenset[str] = frozenset()


class Scheme(Protocol):
    """A named policy for a whole state. Readers never need it: a recipe says all that decoding needs."""

    @property
    def id(self) -> str:
        """The name in manifests."""
        ...

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Lose what the scheme loses. Never changes the tensors of `state`.

        Args:
            reference: the parent's decoded tensors; None: there is none.
        """
        ...

    def encode(
        self,
        state: FlatState,
        reference: Reference | None,
        *,
        quantized: Mapping[str, QuantizedTensor] | None = None,
        threads: int | None = None,
    ) -> Iterator[EncodedRecord]:
        """Yield the records of what `quantize` kept, each after those whose values it needs as context.

        Args:
            reference: the parent's decoded tensors; None makes every record stand alone.
            threads: native threads; None uses every core.
        """
        ...


def resume_scheme(scheme: object, loss: JSON, lossy_restores: int = 0) -> None:
    """Tells a scheme that has a method `resume` that a run goes on from a checkpoint; see `Planner.resume`."""
    resume = getattr(scheme, "resume", None)
    if resume is not None:
        resume(loss, lossy_restores)


MAX_SEED = (1 << 32) - 1


class SpecMixin:
    """A scheme whose `repr` is its name with the settings that differ from their defaults.

    What is no plain value, such as `evaluate`, stands between < and >: it has no spelling that could be read again.
    """

    id: ClassVar[str]

    @property
    def arguments(self) -> Mapping[str, object]:
        """Arguments of the constructor by name, without those that change nothing that is written."""
        raise NotImplementedError

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self)).parameters
        # A subclass may take fewer arguments than its base.
        arguments = {name: value for name, value in self.arguments.items() if name in parameters}
        changed = {name: value for name, value in arguments.items() if not _is_default(value, parameters[name].default)}
        settings = ", ".join(f"{name}={format_value(value)}" for name, value in changed.items())
        return f"{self.id}({settings})" if settings else self.id


def format_value(value: object) -> str:
    """A setting as it is read again, or what it is between < and >.

    >>> format_value("1%"), format_value({"bins": 8}), format_value(len), format_value(object())
    ('"1%"', '{"bins": 8}', '<len>', '<object>')
    """
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{format_value(key)}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    name = getattr(value, "__name__", None)
    return f"<{name if isinstance(name, str) else type(value).__name__}>"


def finite_or_text(value: Any) -> Any:
    """A value for JSON: nan and infinities become texts."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_seed(seed: Any) -> int:
    """A seed as generators take it; raises PolicyError if it is none."""
    return validate.check_int("seed", seed, minimum=0, maximum=MAX_SEED, do="pass 0")


def check_recorder(where: str, value: Any, attribute: str) -> Any:
    """A recorder of gradients, or None.

    Args:
        attribute: the attribute that is read of it.

    Raises:
        PolicyError: it is something else.
    """
    if value is None or not (isinstance(value, type) or callable(getattr(value, attribute, len))):
        return value
    expected = "a recorder such as shrinkpoint.train.GradientRecorder(model)"
    raise validate.argument_error(where, value, expected, "make one, and attach it")


def _is_default(value: object, default: object) -> bool:
    """True if nothing was said; never `==` of objects that may give anything, such as tensors."""
    plain = str | bool | int | float
    if isinstance(value, plain) and isinstance(default, plain):
        return type(value) is type(default) and value == default
    return value is default
