"""The systems that the studies compare, by name: how each is made from a threshold and a quality."""

from __future__ import annotations

from typing import Any

import shrinkpoint as sp
from shrinkpoint.schemes.inshrinkerator.scheme import SPACE
from shrinkpoint.schemes.registry import scheme_factory
from shrinkpoint.schemes.search.space import Axis, Space
from shrinkpoint_lab.bench.systems import SYSTEMS as ALL

SYSTEMS = {"inshrinkerator": "Inshrinkerator", "qd": "QD", "cnr": "CNR", "gobo": "GOBO"}
"""Name here to name in shrinkpoint; "lossless" and "none" need no search."""
WIDER = "inshrinkerator wider"
"""With fewer bins than the paper's space has: for models that bear more than its coarsest setting."""
WIDER_SPACE = Space(
    tuple(
        Axis(axis.name, {"bins": (2, 3), "embedding_bins": (4, 8)}.get(axis.name, ()) + axis.values)
        for axis in SPACE.axes
    ),
    SPACE.variants,
)


ENDS = tuple(f"{name} {end}" for name in SYSTEMS for end in ("coarsest", "finest"))
"""A scheme at one end of its space of settings: nothing is searched, and the threshold does not matter."""
FISHER = "fisher"


def available(system: str) -> bool:
    return system not in SYSTEMS or hasattr(sp, SYSTEMS[system])


def at_end(system: str, optimizer: str) -> Any:
    """The scheme of one of `ENDS`."""
    name, _, end = system.rpartition(" ")
    kind = getattr(sp, SYSTEMS[name])
    space: Space = SPACE if name == "inshrinkerator" else kind.space
    point = space.points(space.variants[0])[0 if end == "coarsest" else -1]
    return kind(config=space.settings(point), optimizer=optimizer)


def scheme(system: str, **arguments: Any) -> Any:
    """A scheme, or its name where there is nothing to set: one of `SYSTEMS`, or of the harness, without a threshold.

    Args:
        arguments: threshold, evaluate, higher_is_better, optimizer, and gradients and paper, which only
            Inshrinkerator has.
    """
    if system == FISHER:
        budget = f"{100 * arguments['threshold']:g}%"
        return sp.Fisher(budget=budget, **{name: arguments[name] for name in ("evaluate", "higher_is_better")})
    if system.startswith("fisher(relative_error="):
        return sp.Fisher(relative_error=float(system[len("fisher(relative_error=") : -1]))
    if system in ENDS:
        return at_end(system, arguments.get("optimizer", "exact"))
    if system == WIDER:
        return sp.Inshrinkerator(space=WIDER_SPACE, **arguments)
    if system not in SYSTEMS:
        return scheme_factory(system)() if system in ALL else "lossless"
    if system != "inshrinkerator":
        arguments = {name: value for name, value in arguments.items() if name not in ("gradients", "paper")}
    return getattr(sp, SYSTEMS[system])(**arguments)


def recorder(system: str, model: Any, interval: int) -> Any:
    """A recorder of gradients where the system ranks by sensitivity, else None."""
    if system != "inshrinkerator" or not hasattr(sp, "GradientRecorder"):
        return None
    return sp.train.GradientRecorder(model, save_interval=interval, batches=50)
