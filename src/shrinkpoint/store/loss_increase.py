"""Rise of the loss by a checkpoint, parsed from a manifest's `loss`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shrinkpoint.tensors.info import JSON

NOT_MEASURED = "not measured"
MIN_SHOWN_REST = 1e-4  # The least rise left by restores, relative to the loss, that is worth a word


@dataclass(frozen=True)
class LossIncrease:
    """The increase of the loss, or the fall of a score, where a checkpoint is restored.

    Attributes:
        is_lossy: a restore gives other values than were saved.
        is_measured: True if the increase was measured; True where nothing was lost.
        value: relative to the loss before the save: 0.01 is 1%; 0 if no weight changed; None if unknown.
        interval: 95% confidence interval of `value` on other examples of the same kind; None if unknown.
        predicted: what the scheme expected of an increase that was not measured, in nats; None if it expected nothing.
        restored: what earlier restores have left of their increases, as the scheme estimates; relative like `value`.
    """

    is_lossy: bool = False
    is_measured: bool = True
    value: float | None = None
    interval: tuple[float, float] | None = None
    predicted: float | None = None
    restored: float = 0.0

    @property
    def restored_text(self) -> str:
        """What earlier restores have left, in words; "" if they have left nothing."""
        return f"remaining rise of the loss about {100 * self.restored:.2g}%" if self.restored >= MIN_SHOWN_REST else ""

    @classmethod
    def from_loss(cls, loss: JSON) -> LossIncrease:
        """Parse the `loss` of a manifest, which may be any JSON, also one of a release without the key `measured`."""
        if not isinstance(loss, dict) or loss.get("chosen") is None:
            return cls()
        value, scale = _relative_increase(loss)
        restored = (_number(loss.get("restored_rise")) or 0.0) / _loss_scale(loss)
        measured = loss.get("measured", value is not None) is True
        if measured and value is None and _keeps_weights(loss["chosen"]):
            value, scale = 0.0, 1.0
        if not measured:
            return cls(True, False, predicted=_predicted_increase(loss), restored=restored)
        if scale is None:
            return cls(True)
        ends = loss.get("interval")
        low, high = (_number(end) for end in ends) if isinstance(ends, list) and len(ends) == 2 else (None, None)
        interval = None if low is None or high is None else (low / scale, high / scale)
        return cls(True, True, None if value is None else _number(value / scale), interval, restored=restored)

    def __str__(self) -> str:
        if not self.is_lossy:
            return ""
        if self.predicted is not None:
            return f"{NOT_MEASURED}, predicted {self.predicted:+.2g} nats"
        if self.value is None:
            return "measured" if self.is_measured else NOT_MEASURED
        text = _percent(self.value)
        return text if self.interval is None else f"{text} ({' to '.join(map(_percent, self.interval))})"


def _relative_increase(loss: Mapping[str, JSON]) -> tuple[float | None, float | None]:
    """The increase that a scheme reported, and the loss that it is relative to; None for what is unknown."""
    if "degradation" in loss:
        return _number(loss["degradation"]), 1.0
    value, scale = _number(loss.get("rise")), _loss_scale(loss)
    if value == 0:
        return value, 1.0
    return value, None if math.isinf(scale) else scale


def _loss_scale(loss: Mapping[str, JSON]) -> float:
    """The loss that rises are relative to; infinite if it is unknown."""
    quality = _number(loss.get("quality"))
    return math.inf if quality is None else abs(quality) or 1.0


def _predicted_increase(loss: Mapping[str, JSON]) -> float | None:
    """The increase that the scheme `fisher` predicted of what it chose."""
    chosen, tried = loss["chosen"], loss.get("tried")
    step = _number(chosen.get("step_in_deviations")) if isinstance(chosen, dict) else None
    if step is None or not isinstance(tried, list):
        return None
    trials = [trial for trial in tried if isinstance(trial, dict) and _number(trial.get("step")) == step]
    return _number(trials[-1].get("curvature")) if trials else None


def _percent(share: float) -> str:
    """
    >>> _percent(0.00317), _percent(-0.2), _percent(0.0)
    ('+0.32%', '-20%', '0%')
    """
    if share == 0:
        return "0%"
    return f"{100 * share:+.2g}%" if abs(share) < 1 else f"{100 * share:+.0f}%"


def _keeps_weights(chosen: JSON) -> bool:
    """True if all weights are exact, and only optimizer moments are quantized."""
    return isinstance(chosen, dict) and "step_in_deviations" in chosen and chosen["step_in_deviations"] is None


def _number(value: JSON) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
