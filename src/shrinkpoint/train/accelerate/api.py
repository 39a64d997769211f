"""Functions on an Accelerator; the first call attaches the `AcceleratorCheckpointer` that all of them use."""

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
UNSET: Any = type("Unset", (), {"__repr__": lambda self: "..."})()
"""Default of settings that a call does not change."""


def record_gradients(
    accelerator: Accelerator,
    *,
    index: int = 0,
    save_interval: int | None = None,
    batches: int = 50,
    beta: float = 0.9,
    paper: bool | None = None,
    squares: bool = False,
) -> GradientRecorder:
    """Return a gradient recorder of a prepared model, attached to its prepared optimizer.

    Args:
        index: of the model and its optimizer, in the order in which they were prepared.
        save_interval, batches, beta, paper, squares: of `GradientRecorder`.

    Raises:
        PolicyError: no such model is prepared, or an argument is out of range.
    """
    validate.check_int("index", index, minimum=0, do="take 0, the first")
    num_models, num_optimizers = len(accelerator._models), len(accelerator._optimizers)
    if index >= min(num_models, num_optimizers):
        raise PolicyError(
            "gradients",
            found=f"{num_models} models and {num_optimizers} optimizers",
            expected=f"at least {index + 1}",
            do="call accelerator.prepare first",
        )
    model = prepared_state.unwrap_model(accelerator._models[index])
    recorder = GradientRecorder(
        model, save_interval=save_interval, batches=batches, beta=beta, paper=paper, squares=squares
    )
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
    """Save as `AcceleratorCheckpointer.save_state` does.

    Args:
        output_dir, step, metrics, note, keyframe: of `AcceleratorCheckpointer.save_state`.
        scheme, keyframe_every, background, threads: of `AcceleratorCheckpointer`. Give them in the first call only, or
            the same ones in every call; make a scheme once, before the loop.

    Raises:
        PolicyError: the settings differ from those of an earlier call, or one is out of range.
        StateError, StorageError: as `AcceleratorCheckpointer.save_state`.
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
    """Load as `AcceleratorCheckpointer.load_state` does.

    Args:
        input_dir, strict: of `AcceleratorCheckpointer.load_state`.
        scheme, keyframe_every, background, threads: as for `save_state`.

    Raises:
        PolicyError: the settings differ from those of an earlier call, or one is out of range.
        NotFoundError, MismatchError, ChainError, FormatError, StorageError: as `AcceleratorCheckpointer.load_state`.
    """
    settings = _set_options(scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads)
    return _checkpointer_of(accelerator, settings).load_state(input_dir, strict=strict)


def wait(accelerator: Accelerator) -> SaveReport | None:
    """Wait for the last background save, as `AcceleratorCheckpointer.wait` does; call it before a program ends."""
    return _checkpointer_of(accelerator, {}).wait()


def _set_options(**settings: object) -> dict[str, Any]:
    """The settings that a call gives."""
    return {name: value for name, value in settings.items() if value is not UNSET}


def _checkpointer_of(accelerator: Accelerator, settings: dict[str, Any]) -> AcceleratorCheckpointer:
    """The checkpointer that is attached to an accelerator; settings may be given until the first save.

    Raises:
        PolicyError: the settings differ from those of an earlier call.
    """
    attached, attached_settings = vars(accelerator).get(_ATTRIBUTE, (None, {}))
    if attached is not None and (not settings or settings == attached_settings):
        return attached  # type: ignore[no-any-return]
    if attached is not None and (attached_settings or attached.has_saved):
        raise PolicyError(
            "settings",
            found=f"{settings}",
            expected=f"{attached_settings}, as in the call before",
            do="make a scheme once, before the loop, or use an AcceleratorCheckpointer of your own",
        )
    checkpointer = AcceleratorCheckpointer(accelerator, **settings)
    if attached is not None:
        checkpointer.take_over(attached)
    setattr(accelerator, _ATTRIBUTE, (checkpointer, settings))
    return checkpointer
