"""Lets a scheme evaluate a live model before a state is written, and undoes what an evaluation changes.

A scheme that measures nothing plans beside the loop, on the copy of the state that is written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.evaluate import ModelEvaluator, iter_modules
from shrinkpoint.schemes.plan import QuantizationPlan, plan_within_memory
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.tensors.flat_state import FlatState, can_copy_on_devices
from shrinkpoint.train.default_evaluation import DefaultEvaluation

_CONTAINER_TYPES = (list, dict, set, deque, defaultdict, OrderedDict, Counter)


class SavePlan(NamedTuple):
    """Plan for writing one state."""

    scheme: Scheme  # writes the state, or a copy of it, unless there is `plan_copy`
    # Plans for a copy of the state, beside the loop, where the copy is.
    plan_copy: Callable[[FlatState], Scheme] | None = None

    def scheme_for(self, copy: FlatState) -> Scheme:
        """The scheme that writes a copy of the state, or the state."""
        return self.scheme if self.plan_copy is None else self.plan_copy(copy)


_MAX_NESTED = 64  # The members of a longer list are not recorded: it holds many values of one kind, such as data


def require_single_process(scheme: Scheme, caller: str) -> None:
    """Raise if a scheme would wait for other processes that never use it.

    Args:
        caller: the name of the caller, for the message.

    Raises:
        PolicyError: the scheme shares its trials with a group of replicas.
    """
    if isinstance(scheme, Planner) and scheme.shares_trials:
        found, do = f"{scheme!r} with a group of replicas", "leave group= away"
        raise PolicyError(caller, found=found, expected="a scheme for the one process that saves", do=do)


def make_save_plan(
    scheme: Scheme,
    state: FlatState,
    reference: Reference | None,
    objects: Mapping[str, Any],
    model: str = "model",
    *,
    defer: bool,
) -> SavePlan | None:
    """Plan how a state is written: by a quantization plan if the scheme plans, else by the scheme itself.

    A state is planned for on a copy, beside the loop, if nothing is measured and there is memory for the copy where the
    state is; else at once. On an accelerator that is done there, so that codes cross to the host and not values.

    Args:
        reference: the tensors of the previous checkpoint; None if there are none.
        objects: the live objects behind the state, by their name in it.
        model: name of the object that the scheme evaluates.
        defer: the state is written in another thread while training goes on.

    Returns:
        None if another process writes.

    Raises:
        PolicyError: the scheme evaluates a model, and there is none; or the evaluation failed.
    """
    if not isinstance(scheme, Planner):
        return SavePlan(scheme)
    evaluator, evaluate = None, scheme.evaluate
    if evaluate is not None and model not in objects and not isinstance(evaluate, DefaultEvaluation):
        found, do = "a save without it", f"pass {model}=, which {scheme!r} evaluates"
        raise PolicyError(model, found=found, expected="the model", do=do)
    if (evaluate is not None and model in objects) or [*iter_modules(objects.get(model))]:
        evaluator = ModelEvaluator(state, evaluate, objects[model], f"{model}/")
    if defer and not scheme.needs_live_model and can_copy_on_devices(state):
        if evaluator is not None:
            evaluator.recordings = scheme.recordings()
        return SavePlan(scheme, partial(_plan, scheme, reference, evaluator, stays_on_cpu=True))
    plan = _plan(scheme, reference, evaluator, state, stays_on_cpu=not defer)
    return SavePlan(plan) if scheme.is_writer else None


def _plan(
    scheme: Any, reference: Reference | None, evaluator: ModelEvaluator | None, state: FlatState, *, stays_on_cpu: bool
) -> Scheme:
    """Plan a state, with the sampled rows that the writer needs after the state has changed or its copy is freed.

    Args:
        stays_on_cpu: a state in host memory is the one that is written.
    """

    def plan(values: FlatState) -> Scheme:
        made: Scheme = scheme.plan(values, reference, evaluator)
        stays = state.is_on_cpu and stays_on_cpu
        return made if stays or not isinstance(made, QuantizationPlan) else made.with_samples(values)

    return plan_within_memory(plan, state, scheme)


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
