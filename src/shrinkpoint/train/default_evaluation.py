"""Measures the loss where a user has named a scheme and no function for it: in the way of the framework that trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.evaluate import Reading, call_evaluate, iter_modules
from shrinkpoint.schemes.registry import lacks_evaluation, scheme_factory


class LossSource(NamedTuple):
    """One way to measure a model's loss."""

    reading: Callable[[Any], Reading]  # measures a model
    describe: Callable[[], str]  # says what is measured, in words


class DefaultEvaluation:
    """The `evaluate` of a scheme that a framework's part of this package has made from its name.

    The first source that answers is used for the rest of the run. What fails is reported in the reading and never
    raised: the scheme then warns, and the checkpoint is exact.

    Args:
        sources: ways to measure, the best first.
        advice: what to do where it is not known which model is saved.

    Attributes:
        unknown: the reading where it is not.
    """

    def __init__(self, sources: Sequence[LossSource], *, advice: str = "pass the model to the save") -> None:
        self._sources = [*sources]
        self.unknown = Reading(math.nan, failure=f"it is not known which model is saved: {advice}")
        self._source: LossSource | None = None

    @property
    def description(self) -> str:
        """Description of the examples that are measured."""
        return "" if self._source is None else self._source.describe()

    def __call__(self, model: Any) -> float:
        """The loss of a model; nan if it cannot be measured."""
        return self.reading(model).value

    def reading(self, model: Any) -> Reading:
        """The loss of a model."""
        if next(iter_modules(model), None) is None:
            return self.unknown
        failures: list[str] = []
        for source in self._sources if self._source is None else [self._source]:
            try:
                reading = call_evaluate(source.reading, model)
            except Exception as error:
                cause = error.__cause__ or error
                failures.append(f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__)
                continue
            if not reading.failure:
                self._source = source
                return reading
            failures.append(reading.failure)
        return Reading(math.nan, failure="; ".join(failures))


def add_evaluation(scheme: str | Scheme, evaluate: DefaultEvaluation) -> str | Scheme:
    """A scheme as it was given; of a name that asks for a share of a loss, the scheme that `evaluate` measures for.

    Raises:
        PolicyError: a text that is no scheme.
    """
    if not isinstance(scheme, str) or not lacks_evaluation(factory := scheme_factory(scheme)):
        return scheme
    return factory(evaluate=evaluate)
