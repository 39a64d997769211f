"""Settings of a `ShrinkTrainer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.fisher.scheme import Fisher
from shrinkpoint.schemes.registry import get_scheme, scheme_factory
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.validate import (
    check_bool,
    check_instance,
    check_keyframe_every,
    check_optional_int,
    check_str,
    check_threads,
)


@dataclass(frozen=True)
class ShrinkConfig:
    """Settings of a `ShrinkTrainer`; as they are, nothing is lost.

    Attributes:
        scheme: "lossless"; another name, also with settings, such as 'inshrinkerator(threshold="1%")'; a scheme that is
            made already; or what makes one, such as `sp.Fisher` or `functools.partial(sp.Fisher, budget="1%")`.
        evaluate: a metric of the Trainer's own evaluation, such as "eval_loss": the scheme measures with it. Whether
            more of it is better is what `greater_is_better` says where it is `metric_for_best_model`, else its name.
        batches: how many batches of the evaluation dataset one measurement takes; None: all.
        gradients: record gradients for the scheme: of the steps before each save.
        keyframe_every: each chain has at most this many checkpoints; None: no bound.
        background: training goes on while a checkpoint is written. One at a time: a save that comes too early waits.
            Older checkpoints are deleted only once the new one is whole.
        threads: native threads for coding; None: every core.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    scheme: str | Scheme | Callable[..., Scheme] = "lossless"
    evaluate: str | None = None
    batches: int | None = 8
    gradients: bool = False
    keyframe_every: int | None = 20
    background: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        made = not isinstance(self.scheme, str) and not callable(self.scheme)
        if made:
            get_scheme(self.scheme)
        elif isinstance(self.scheme, str):
            scheme_factory(self.scheme)
        if self.evaluate is not None:
            check_str("evaluate", self.evaluate, do='name a metric of the evaluation, such as "eval_loss"')
        check_optional_int("batches", self.batches, none_meaning="for all")
        check_keyframe_every(self.keyframe_every)
        check_threads(self.threads)
        for name in ("gradients", "background"):
            check_bool(name, getattr(self, name))
        if made and (self.evaluate is not None or self.gradients):
            found, do = f"{self.scheme!r}, which is made already", "pass its class, or a functools.partial of it"
            raise PolicyError("Shrink, scheme", found=found, expected="what can be told how to measure", do=do)

    @property
    def is_default(self) -> bool:
        """Whether nothing was asked for."""
        return self == ShrinkConfig()

    def make_recorder(self, model: nn.Module, save_interval: int | None) -> GradientRecorder | None:
        """A recorder of gradients, where one is asked for.

        Args:
            save_interval: optimizer steps from save to save; None: nobody knows.
        """
        if not self.gradients:
            return None
        make = scheme_factory(self.scheme) if isinstance(self.scheme, str) else self.scheme
        made = make.func if isinstance(make, partial) else make
        squares = not isinstance(made, type) or issubclass(made, Fisher)
        return GradientRecorder(model, save_interval=save_interval, squares=squares)

    def make_checkpointer(
        self, evaluate: Callable[[Any], Any] | None, higher_is_better: bool, recorder: GradientRecorder | None
    ) -> Checkpointer:
        """What writes, and the scheme it writes with.

        Args:
            evaluate: measures the model.
            higher_is_better: it returns a score.

        Raises:
            PolicyError: the scheme cannot do what is asked for, or needs what is not.
        """
        given: dict[str, Any] = {}
        if evaluate is not None:
            given |= {"evaluate": evaluate, "higher_is_better": higher_is_better}
        if recorder is not None:
            given["gradients"] = recorder
        return Checkpointer(
            scheme=self._make_scheme(given),
            keyframe_every=self.keyframe_every,
            background=self.background,
            threads=self.threads,
        )

    def _make_scheme(self, options: dict[str, Any]) -> Scheme:
        make = scheme_factory(self.scheme) if isinstance(self.scheme, str) else self.scheme
        if not callable(make):
            return make
        try:
            return make(**options)
        except TypeError as error:
            asked = " and ".join(sorted({"evaluate", "gradients"} & options.keys())) or "no arguments"
            found, do = f"one that does not take {asked} ({error})", "choose another one, or ask for less"
            raise PolicyError("Shrink, scheme", found=found, expected="a maker of schemes", do=do) from error


def check_config(shrink: Any) -> ShrinkConfig:
    """Settings of a trainer.

    Raises:
        PolicyError: it is something else.
    """
    expected, do = "settings, a Shrink(...)", 'write shrink=Shrink(scheme="fisher(relative_error=.3)")'
    settings: ShrinkConfig = check_instance("shrink", shrink, ShrinkConfig, expected=expected, do=do)
    return settings
