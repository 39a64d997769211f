"""Which step a file or directory of a run is of, by its name."""

from __future__ import annotations

import re

_LABELLED = re.compile(
    r"(?:^|[^a-z])(?:global[-_]?)?(step|checkpoint|ckpt|iteration|iter|it|update|epoch|ep)s?[-_=.]?0*(\d{1,15})(?!\d)",
    re.IGNORECASE,
)
_EPOCH = ("epoch", "ep")


def step_of(name: str) -> int | None:
    """The step that a name says; an epoch counts where nothing else does.

    >>> [step_of(n) for n in ("checkpoint-500", "epoch=0-step=10.ckpt", "model_epoch_8.pth", "step_000100.pt", "ck100")]
    [500, 10, 8, 100, None]
    >>> [step_of(n) for n in ("global_step7", "model-00001-of-00002.safetensors", "iter=0040", "12", "last.ckpt")]
    [7, None, 40, 12, None]
    """
    if name.isdecimal():
        return int(name) if len(name) <= 15 else None
    found = [(label.lower(), int(digits)) for label, digits in _LABELLED.findall(name)]
    steps = [number for label, number in found if label not in _EPOCH]
    epochs = [number for label, number in found if label in _EPOCH]
    return next(iter([*steps, *epochs]), None)
