"""What to keep. Pure: a rule and manifests go in, a decision with its reasons comes out."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.store import chain
from shrinkpoint.store.manifest import Manifest

NO_METRIC = "Keep(metric=)"
"""Where an error is when "the best" means nothing."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints to keep; each rule that is given adds to what is kept.

    The newest checkpoint is always kept, for a run resumes from it, and so is every base of something kept.
    A `Keep()` without a rule keeps everything.

    Attributes:
        last: this many of the newest.
        every: those whose step is a multiple of this.
        best: this many with the best `metric`; checkpoints without it, or with nan, do not compete, and go unless
            another rule keeps them. Where no checkpoint has it, nothing is deleted: pruning is an error, and a manager
            warns, once.
        metric: the name under which the loop reported it.
        mode: "min" or "max".
        within: those younger than this, a timedelta or a text such as "90s", "12h", "7d", "2w".

    Raises:
        PolicyError: a number below 1, a mode or a span that means nothing.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    within: timedelta | str | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None:
                validate.check_int(f"Keep({name}=)", value, do=f"leave {name} out to do without")
        validate.check_str("Keep(metric=)", self.metric, do="name what the loop reports")
        validate.check_choice("Keep(mode=)", self.mode, ("min", "max"))
        if self.span is not None and self.span <= timedelta(0):
            raise PolicyError("Keep(within=)", found=repr(self.within), expected="a positive span", do="say e.g. '7d'")

    @property
    def span(self) -> timedelta | None:
        """`within` as a timedelta."""
        if self.within is None or isinstance(self.within, timedelta):
            return self.within
        match = _SPAN.fullmatch(self.within.strip()) if isinstance(self.within, str) else None
        try:
            return timedelta(**{_UNITS[match[2]]: float(match[1])}) if match else timedelta(0)
        except OverflowError:
            return timedelta.max

    @property
    def keeps_all(self) -> bool:
        return self.last is None and self.every is None and self.best is None and self.within is None


def check_keep(keep: object) -> Keep | None:
    """A rule, or None for none.

    Raises:
        PolicyError: it is something else.
    """
    if keep is None or isinstance(keep, Keep):
        return keep
    do = f"write shrinkpoint.Keep(last={keep})" if type(keep) is int and keep > 0 else "write shrinkpoint.Keep(last=3)"
    raise validate.argument_error("keep", keep, "a Keep, or None to keep all", do)


@dataclass(frozen=True)
class RetentionDecision:
    """Steps to keep, steps to drop, both rising, and for each step the sentences that say why."""

    keep: tuple[int, ...]
    drop: tuple[int, ...]
    reasons: dict[int, tuple[str, ...]] = field(default_factory=dict)


def check_metric(manifests: Iterable[Manifest], keep: Keep) -> None:
    """Make sure that "the best" means something.

    Args:
        manifests: of the checkpoints that are not forgotten.

    Raises:
        PolicyError: there are checkpoints, and none has a number for the metric; `where` is `NO_METRIC`.
    """
    shown = [*manifests]
    if keep.best is None or not shown or any(_has_metric(one, keep) for one in shown):
        return
    names = sorted({name for one in shown for name, value in one.metrics.items() if not math.isnan(value)})
    found = f"{keep.metric!r}, which no checkpoint has" + (
        " but as nan" if any(keep.metric in one.metrics for one in shown) else ""
    )
    expected = "one of " + ", ".join(map(repr, names[:8])) if names else "checkpoints that were saved with metrics="
    do = "name the metric that the loop saves, or leave best out; nothing was deleted"
    raise PolicyError(NO_METRIC, found=found, expected=expected, do=do)


def apply_policy(
    manifests: Iterable[Manifest], keep: Keep, now: datetime, *, forgotten: Collection[int] = frozenset()
) -> RetentionDecision:
    """Apply `keep`.

    Args:
        manifests: every checkpoint of the store, the forgotten too.
        now: aware; what `within` counts back from.
        forgotten: steps that are hidden: no rule keeps them, but they may be bases of something kept.

    Raises:
        PolicyError: `now` has no time zone.
    """
    if now.tzinfo is None:
        raise PolicyError(
            "now", found="a time without a zone", expected="an aware datetime", do="use datetime.now(timezone.utc)"
        )
    known = {manifest.step: manifest for manifest in manifests}
    reasons: dict[int, list[str]] = {step: [] for step in sorted(known)}
    shown = [known[step] for step in reasons if step not in forgotten]
    for step, reason in _rule_matches(shown, keep, now):
        reasons[step].append(reason)
    for step in [step for step, why in reasons.items() if why]:
        for base in chain.ancestors(known, step):
            reasons[base].append(f"base of step {step}")
    kept = tuple(step for step, why in reasons.items() if why)
    for step, why in reasons.items():
        if not why:
            why.append("forgotten, and no base of anything kept" if step in forgotten else "no rule keeps it")
    return RetentionDecision(
        kept, tuple(step for step in reasons if step not in kept), {step: tuple(why) for step, why in reasons.items()}
    )


def _rule_matches(shown: list[Manifest], keep: Keep, now: datetime) -> Iterable[tuple[int, str]]:
    """(step, reason) for each rule that wants a step; `shown` rises by step."""
    if keep.keeps_all:
        yield from ((one.step, "no rule is given, so everything is kept") for one in shown)
        return
    if shown:
        yield shown[-1].step, "newest: a run resumes from it"
    if keep.last is not None:
        yield from ((one.step, f"one of the last {keep.last}") for one in shown[-keep.last :])
    if keep.every is not None:
        yield from ((one.step, f"a multiple of {keep.every}") for one in shown if one.step % keep.every == 0)
    if keep.best is not None:
        yield from _best_matches(shown, keep, keep.best)
    if keep.span is not None:
        yield from ((one.step, f"younger than {keep.within}") for one in shown if now - one.created_at <= keep.span)


def _has_metric(manifest: Manifest, keep: Keep) -> bool:
    return not math.isnan(manifest.metrics.get(keep.metric, math.nan))


def _best_matches(shown: list[Manifest], keep: Keep, count: int) -> Iterable[tuple[int, str]]:
    sign = 1.0 if keep.mode == "min" else -1.0
    rated = [one for one in shown if _has_metric(one, keep)]
    rated.sort(key=lambda one: (sign * one.metrics[keep.metric], -one.step))  # of equals the newer one
    for place, one in enumerate(rated[:count], 1):
        yield one.step, f"{keep.metric} {one.metrics[keep.metric]:.6g} is number {place} of the best {count}"
