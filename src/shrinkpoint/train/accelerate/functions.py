"""The short way: what is kept between two calls is kept with the Accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from shrinkpoint import arguments
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes import Scheme
from shrinkpoint.store import SaveReport
from shrinkpoint.train.accelerate import contents
from shrinkpoint.train.accelerate.shrink import Resumed, Shrink
from shrinkpoint.train.gradients import Gradients

_NAME = "_shrinkpoint"
UNSAID: Any = type("Unsaid", (), {"__repr__": lambda self: "..."})()
"""In place of a setting that a call leaves as it is."""


def gradients(
    accelerator: Accelerator, *, which: int = 0, every: int | None = None, batches: int = 50, beta: float = 0.9,
    paper: bool | None = None, squares: bool = False,
) -> Gradients:  # fmt: skip
    """A recorder of the gradients of a prepared model, attached to its prepared optimizer.

    Args:
        which: of the models and optimizers, in the order in which they were prepared.
        every, batches, beta, paper, squares: of `Gradients`.

    Raises:
        PolicyError: nothing is prepared, or an argument that makes no sense.
    """
    arguments.whole("which", which, least=0, do="take 0, the first")
    if not max(0, which + 1) <= min(len(accelerator._models), len(accelerator._optimizers)):
        found = f"{len(accelerator._models)} models and {len(accelerator._optimizers)} optimizers"
        raise PolicyError(
            "gradients", found=found, expected=f"at least {which + 1}", do="call accelerator.prepare first"
        )
    model = contents.bare(accelerator._models[which])
    recorder = Gradients(model, every=every, batches=batches, beta=beta, paper=paper, squares=squares)
    return recorder.attach(accelerator._optimizers[which].optimizer)


def save_state(
    accelerator: Accelerator,
    output_dir: str | Path | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    note: str = "",
    keyframe: bool = False,
    scheme: str | Scheme = UNSAID,
    keyframe_every: int | None = UNSAID,
    background: bool = UNSAID,
    threads: int | None = UNSAID,
) -> SaveReport | None:
    """`Shrink.save_state` of the accelerator's own Shrink, which the first call makes.

    Args:
        scheme, keyframe_every, background, threads: of `Shrink`: the same in every call, or none but in the first. A
            scheme is made once, before the loop.

    Raises:
        PolicyError: other settings than before, or one that makes no sense.
    """
    settings = _said(scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads)
    return _own(accelerator, settings).save_state(output_dir, step=step, metrics=metrics, note=note, keyframe=keyframe)


def load_state(
    accelerator: Accelerator, input_dir: str | Path | None = None, *, strict: bool = True,
    scheme: str | Scheme = UNSAID, keyframe_every: int | None = UNSAID, background: bool = UNSAID,
    threads: int | None = UNSAID,
) -> Resumed:  # fmt: skip
    """`Shrink.load_state` of the accelerator's own Shrink; settings as in `save_state`, before it or after."""
    settings = _said(scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads)
    return _own(accelerator, settings).load_state(input_dir, strict=strict)


def wait(accelerator: Accelerator) -> SaveReport | None:
    """`Shrink.wait` of the accelerator's own Shrink: before a program ends that saves in the background."""
    return _own(accelerator, {}).wait()


def _said(**settings: object) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not UNSAID}


def _own(accelerator: Accelerator, settings: dict[str, Any]) -> Shrink:
    """The Shrink that an accelerator keeps.

    Raises:
        PolicyError: other settings than before.
    """
    held = vars(accelerator).get(_NAME)
    if held is None:
        shrink = Shrink(accelerator, **settings)
    elif not settings or settings == held[1]:
        return held[0]  # type: ignore[no-any-return]
    elif held[1] or held[0].saved:
        found, do = f"{settings}", "make a scheme once, before the loop, or hold a Shrink of your own"
        raise PolicyError("settings", found=found, expected=f"{held[1]}, as in the call before", do=do)
    else:
        shrink = Shrink(accelerator, **settings)
        shrink.go_on_from(held[0])
    setattr(accelerator, _NAME, (shrink, settings))
    return shrink
