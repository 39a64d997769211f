"""Settings that every class takes which saves a training run, checked and explained once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shrinkpoint import validate
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.store.save_report import SaveReport

OnSave: TypeAlias = Callable[[SaveReport], object]  # Called with the report of a checkpoint that is committed


@dataclass(frozen=True)
class SaveSettings:
    """Settings of a run's saves. Each class that saves takes those that it supports as keyword arguments.

    Attributes:
        scheme: "lossless", a text with settings such as "fisher(relative_error=0.3)", or a scheme. A scheme that
            measures the loss evaluates the model during a save, before that returns.
        keyframe_every: greatest number of checkpoints in a chain, its keyframe included. A chain ends earlier where its
            files have four times the bytes of the state. None: no limit.
        background: a save returns as soon as the state is copied. The copy is written beside the loop, one at a time: a
            save that comes too early waits for the previous one.
        threads: native threads for coding; None: every core.
        max_bytes: how much memory the tensors of one checkpoint may take when it is loaded; None: as for
            `shrinkpoint.load`.
        on_save: called with the `SaveReport` of every checkpoint once it is committed, in the thread that wrote it: the
            thread of the save, or with `background` another one, while the loop goes on. An exception of `on_save`
            becomes a warning: the checkpoint is saved, and the run goes on.

    Raises:
        PolicyError: an unknown scheme, or a setting that is out of range; `where` is the name of the argument.
    """

    scheme: str | Scheme = "lossless"
    keyframe_every: int | None = 20
    background: bool = False
    threads: int | None = None
    max_bytes: int | None = None
    on_save: OnSave | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", get_scheme(self.scheme))
        validate.check_keyframe_every(self.keyframe_every)
        validate.check_bool("background", self.background)
        validate.check_threads(self.threads)
        validate.check_optional_int("max_bytes", self.max_bytes, none_meaning="for the default")
        validate.check_optional_callable("on_save", self.on_save, expected="a function of a SaveReport")
