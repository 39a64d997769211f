"""Where a scheme decides while the model is the caller's; what it decides can be written beside the loop."""

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
    """Make sure that a scheme waits for no other process, where only one comes to it.

    Args:
        caller: asks, for the message.

    Raises:
        PolicyError: replicas share its trials.
    """
    if isinstance(scheme, SearchScheme) and scheme.shares_trials:
        found, do = f"{scheme!r} with a group of replicas", "leave group= away"
        raise PolicyError(caller, found=found, expected="a scheme for the one process that saves", do=do)


def make_plan(
    scheme: Scheme, state: FlatState, reference: Reference | None, objects: Mapping[str, Any], model: str = "model"
) -> Scheme | None:
    """The scheme for this state; None: another process writes it.

    Args:
        reference: what is held of the checkpoint before; None: nothing.
        objects: the live objects behind the state, by their name in it.
        model: which of them is measured.

    Raises:
        PolicyError: the scheme measures a model, and there is none; or what it measures with failed.
    """
    if not isinstance(scheme, PlanningScheme):
        return scheme
    target, evaluate = None, scheme.evaluate
    if evaluate is not None and model not in objects:
        found, do = "a save without it", f"pass {model}=, which {scheme!r} evaluates"
        raise PolicyError(model, found=found, expected="the model", do=do)
    if evaluate is not None or [*iter_modules(objects.get(model))]:
        target = ModelEvaluator(state, evaluate, objects[model], f"{model}/")
    decided = scheme.plan(state, reference, target)
    return decided if scheme.is_writer else None
