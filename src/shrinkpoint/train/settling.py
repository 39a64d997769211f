"""Where a scheme decides while the model is the caller's; what it decides can be written beside the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shrinkpoint.codec import Reference
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes import ModelTarget, Scheme, Searched, Settling, modules_of
from shrinkpoint.state import FlatState


def alone(scheme: Scheme, who: str) -> None:
    """Make sure that a scheme waits for no other process, where only one comes to it.

    Args:
        who: asks, for the message.

    Raises:
        PolicyError: replicas share its trials.
    """
    if isinstance(scheme, Searched) and scheme.shares:
        found, do = f"{scheme!r} with a group of replicas", "leave group= away"
        raise PolicyError(who, found=found, expected="a scheme for the one process that saves", do=do)


def settled(
    scheme: Scheme, flat: FlatState, reference: Reference | None, parts: Mapping[str, Any], model: str = "model"
) -> Scheme | None:
    """The scheme for this state; None: another process writes it.

    Args:
        reference: what is held of the checkpoint before; None: nothing.
        parts: the live objects behind the state, by their name in it.
        model: which of them is measured.

    Raises:
        PolicyError: the scheme measures a model, and there is none; or what it measures with failed.
    """
    if not isinstance(scheme, Settling):
        return scheme
    target, evaluate = None, scheme.evaluate
    if evaluate is not None and model not in parts:
        found, do = "a save without it", f"pass {model}=, which {scheme!r} evaluates"
        raise PolicyError(model, found=found, expected="the model", do=do)
    if evaluate is not None or [*modules_of(parts.get(model))]:
        target = ModelTarget(flat, evaluate, parts[model], f"{model}/")
    decided = scheme.settle(flat, reference, target)
    return decided if scheme.leads else None
