"""Decides what a scheme does with a state while the caller's model is at hand; the state may be written later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import PlanningScheme, Scheme
from shrinkpoint.schemes.evaluate import ModelEvaluator, iter_modules
from shrinkpoint.schemes.search.scheme import SearchScheme
from shrinkpoint.tensors.flat_state import FlatState


def require_single_process(scheme: Scheme, caller: str) -> None:
    """Raise if a scheme would wait for other processes that never use it.

    Args:
        caller: the name of the caller, for the message.

    Raises:
        PolicyError: the scheme shares its trials with a group of replicas.
    """
    if isinstance(scheme, SearchScheme) and scheme.shares_trials:
        found, do = f"{scheme!r} with a group of replicas", "leave group= away"
        raise PolicyError(caller, found=found, expected="a scheme for the one process that saves", do=do)


def make_plan(
    scheme: Scheme, state: FlatState, reference: Reference | None, objects: Mapping[str, Any], model: str = "model"
) -> Scheme | None:
    """The scheme that writes this state: a plan if the scheme plans, else the scheme itself.

    Args:
        reference: the tensors of the previous checkpoint; None if there are none.
        objects: the live objects behind the state, by their name in it.
        model: name of the object that the scheme evaluates.

    Returns:
        None if another process writes.

    Raises:
        PolicyError: the scheme evaluates a model, and there is none; or the evaluation failed.
    """
    if not isinstance(scheme, PlanningScheme):
        return scheme
    evaluator, evaluate = None, scheme.evaluate
    if evaluate is not None and model not in objects:
        found, do = "a save without it", f"pass {model}=, which {scheme!r} evaluates"
        raise PolicyError(model, found=found, expected="the model", do=do)
    if evaluate is not None or [*iter_modules(objects.get(model))]:
        evaluator = ModelEvaluator(state, evaluate, objects[model], f"{model}/")
    plan = scheme.plan(state, reference, evaluator)
    return plan if scheme.is_writer else None
