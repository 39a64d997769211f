"""Functions on an Accelerator: each uses the `AcceleratorCheckpointer` that its first call attaches to the
Accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.store import SaveReport
from shrinkpoint.train.accelerate import prepared_state
from shrinkpoint.train.accelerate.accelerator_checkpointer import AcceleratorCheckpointer
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.restore_result import RestoreResult

_ATTRIBUTE = "_shrinkpoint"
UNSET: Any = type("Unsaid", (), {"__repr__": lambda self: "..."})()
"""In place of a setting that a call leaves as it is."""


def record_gradients(
    accelerator: Accelerator,
    *,
    index: int = 0,
    every: int | None = None,
    batches: int = 50,
    beta: float = 0.9,
    paper: bool | None = None,
    squares: bool = False,
) -> GradientRecorder:
    """A recorder of the gradients of a prepared model, attached to its prepared optimizer.

    Args:
        index: of the models and optimizers, in the order in which they were prepared.
        every, batches, beta, paper, squares: of `GradientRecorder`.

    Raises:
        PolicyError: nothing is prepared, or an argument that makes no sense.
    """
    validate.check_int("which", index, minimum=0, do="take 0, the first")
    if not max(0, index + 1) <= min(len(accelerator._models), len(accelerator._optimizers)):
        found = f"{len(accelerator._models)} models and {len(accelerator._optimizers)} optimizers"
        raise PolicyError(
            "gradients", found=found, expected=f"at least {index + 1}", do="call accelerator.prepare first"
        )
    model = prepared_state.unwrap_model(accelerator._models[index])
    recorder = GradientRecorder(model, save_interval=every, batches=batches, beta=beta, paper=paper, squares=squares)
    return recorder.attach(accelerator._optimizers[index].optimizer)


def save_state(
    accelerator: Accelerator,
    output_dir: str | Path | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    note: str = "",
    keyframe: bool = False,
    scheme: str | Scheme = UNSET,
    keyframe_every: int | None = UNSET,
    background: bool = UNSET,
    threads: int | None = UNSET,
) -> SaveReport | None:
    """`Shrink.save_state` of the accelerator's own Shrink, which the first call makes.

    Args:
        scheme, keyframe_every, background, threads: of `Shrink`: the same in every call, or none but in the first. A
            scheme is made once, before the loop.

    Raises:
        PolicyError: other settings than before, or one that makes no sense.
    """
    settings = _set_options(scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads)
    return _checkpointer_of(accelerator, settings).save_state(
        output_dir, step=step, metrics=metrics, note=note, keyframe=keyframe
    )


def load_state(
    accelerator: Accelerator,
    input_dir: str | Path | None = None,
    *,
    strict: bool = True,
    scheme: str | Scheme = UNSET,
    keyframe_every: int | None = UNSET,
    background: bool = UNSET,
    threads: int | None = UNSET,
) -> RestoreResult[int | None]:
    """`Shrink.load_state` of the accelerator's own Shrink; settings as in `save_state`, before it or after."""
    settings = _set_options(scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads)
    return _checkpointer_of(accelerator, settings).load_state(input_dir, strict=strict)


def wait(accelerator: Accelerator) -> SaveReport | None:
    """`Shrink.wait` of the accelerator's own Shrink: before a program ends that saves in the background."""
    return _checkpointer_of(accelerator, {}).wait()


def _set_options(**settings: object) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not UNSET}


def _checkpointer_of(accelerator: Accelerator, settings: dict[str, Any]) -> AcceleratorCheckpointer:
    """The Shrink that an accelerator keeps.

    Raises:
        PolicyError: other settings than before.
    """
    held = vars(accelerator).get(_ATTRIBUTE)
    if held is None:
        shrink = AcceleratorCheckpointer(accelerator, **settings)
    elif not settings or settings == held[1]:
        return held[0]  # type: ignore[no-any-return]
    elif held[1] or held[0].has_saved:
        found, do = f"{settings}", "make a scheme once, before the loop, or hold a Shrink of your own"
        raise PolicyError("settings", found=found, expected=f"{held[1]}, as in the call before", do=do)
    else:
        shrink = AcceleratorCheckpointer(accelerator, **settings)
        shrink.take_over(held[0])
    setattr(accelerator, _ATTRIBUTE, (shrink, settings))
    return shrink
