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
    """Settings of a `ShrinkTrainer`; the defaults are lossless.

    Attributes:
        scheme: "lossless"; another name, also with settings, such as 'inshrinkerator(threshold="1%")'; a scheme; or a
            factory of schemes, such as `sp.Fisher` or `functools.partial(sp.Fisher, budget="1%")`.
        evaluate: metric of the Trainer's own evaluation, such as "eval_loss", that the scheme evaluates trial values
            with. Whether higher is better follows `greater_is_better` if it is `metric_for_best_model`, else its name.
        batches: number of batches of the evaluation dataset for one evaluation; None: all.
        gradients: record gradients for the scheme, over the steps before each save.
        keyframe_every: greatest number of checkpoints in a chain; None: unlimited.
        background: write checkpoints while training continues, one at a time: a save that comes too early waits.
            Older checkpoints are deleted only once the new one is complete.
        threads: native threads for coding; None: all cores.

    Raises:
        PolicyError: an argument is out of range, or `evaluate` or `gradients` is given with a finished scheme.
    """

    scheme: str | Scheme | Callable[..., Scheme] = "lossless"
    evaluate: str | None = None
    batches: int | None = 8
    gradients: bool = False
    keyframe_every: int | None = 20
    background: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        is_instance = not isinstance(self.scheme, str) and not callable(self.scheme)
        if is_instance:
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
        if is_instance and (self.evaluate is not None or self.gradients):
            raise PolicyError(
                "ShrinkConfig, scheme",
                found=f"{self.scheme!r}, which is made already",
                expected="a factory that takes evaluate= or gradients=",
                do="pass its class, or a functools.partial of it",
            )

    @property
    def is_default(self) -> bool:
        """Whether every setting has its default."""
        return self == ShrinkConfig()

    def make_recorder(self, model: nn.Module, save_interval: int | None) -> GradientRecorder | None:
        """Return a recorder of the model's gradients, or None unless `gradients` is set.

        Args:
            save_interval: number of optimizer steps between two saves; None: not fixed.
        """
        if not self.gradients:
            return None
        factory = scheme_factory(self.scheme) if isinstance(self.scheme, str) else self.scheme
        scheme_class = factory.func if isinstance(factory, partial) else factory
        squares = not isinstance(scheme_class, type) or issubclass(scheme_class, Fisher)
        return GradientRecorder(model, save_interval=save_interval, squares=squares)

    def make_checkpointer(
        self, evaluate: Callable[[Any], Any] | None, higher_is_better: bool, recorder: GradientRecorder | None
    ) -> Checkpointer:
        """Return a checkpointer with a new scheme.

        Args:
            evaluate: passed to the scheme, unless None.
            higher_is_better: whether `evaluate` returns a score rather than a loss.
            recorder: passed to the scheme, unless None.

        Raises:
            PolicyError: the scheme does not take `evaluate` or `gradients`, or needs one that is missing.
        """
        options: dict[str, Any] = {}
        if evaluate is not None:
            options |= {"evaluate": evaluate, "higher_is_better": higher_is_better}
        if recorder is not None:
            options["gradients"] = recorder
        return Checkpointer(
            scheme=self._make_scheme(options),
            keyframe_every=self.keyframe_every,
            background=self.background,
            threads=self.threads,
        )

    def _make_scheme(self, options: dict[str, Any]) -> Scheme:
        factory = scheme_factory(self.scheme) if isinstance(self.scheme, str) else self.scheme
        if not callable(factory):
            return factory
        try:
            return factory(**options)
        except TypeError as error:
            names = " and ".join(sorted({"evaluate", "gradients"} & options.keys())) or "no arguments"
            raise PolicyError(
                "ShrinkConfig, scheme",
                found=f"one that does not take {names} ({error})",
                expected="a factory of schemes",
                do=f"choose another one, or leave {names} out",
            ) from error


def check_config(shrink: Any) -> ShrinkConfig:
    """Return `shrink` if it is a `ShrinkConfig`.

    Raises:
        PolicyError: it is something else.
    """
    config: ShrinkConfig = check_instance(
        "shrink",
        shrink,
        ShrinkConfig,
        expected="settings, a ShrinkConfig(...)",
        do='write shrink=ShrinkConfig(scheme="fisher(relative_error=.3)")',
    )
    return config
