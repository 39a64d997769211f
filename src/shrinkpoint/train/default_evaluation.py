"""Measures the loss where a user has named a scheme and no function for it: in the way of the framework that trains.

An `AttributeSnapshot` undoes what an evaluation changes.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        unknown: the reading of a model that is not known.
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


_CONTAINER_TYPES = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
_MAX_NESTED = 64  # The members of a longer list are not recorded: it holds many values of one kind, such as data


class AttributeSnapshot:
    """The values of objects' attributes, and the contents of the containers among them, at one moment.

    Tensors are not copied. Restoring does not delete attributes that were added since.

    Args:
        owners: objects with a `__dict__`.
        exclude: names of attributes that are neither recorded nor restored.
    """

    def __init__(self, owners: Iterable[Any], *, exclude: Iterable[str] = ()) -> None:
        excluded = {*exclude}
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        for owner in owners:
            recorded = {name: value for name, value in vars(owner).items() if name not in excluded}
            self._attributes.append((vars(owner), recorded))
        for _, recorded in self._attributes:
            for value in recorded.values():
                self._record_containers(value)

    def restore(self) -> None:
        """Give every attribute and container its recorded value. May be called several times."""
        for live, recorded in self._attributes:
            live.update({name: value for name, value in recorded.items() if live.get(name, self) is not value})
        for container, copy in self._containers.values():
            pairs = zip(_iter_items(container), _iter_items(copy), strict=True)
            if not (len(container) == len(copy) and all(item is recorded for item, recorded in pairs)):
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(copy)

    def _record_containers(self, obj: Any) -> None:
        if type(obj) not in (*_CONTAINER_TYPES, tuple) or id(obj) in self._containers:
            return
        if type(obj) is not tuple:
            self._containers[id(obj)] = (obj, obj.copy())
        if isinstance(obj, dict) or len(obj) <= _MAX_NESTED:
            for member in obj.values() if isinstance(obj, dict) else obj:
                self._record_containers(member)


def _iter_items(container: Any) -> Iterator[Any]:
    if not isinstance(container, dict):
        return iter(container)
    return (part for pair in container.items() for part in pair)
