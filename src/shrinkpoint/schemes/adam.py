"""The optimizer's own arithmetic as a prediction.

One step of Adam is a function of the parent's weights and of the moments that a checkpoint holds anyway; so between
checkpoints one step apart, weights and second moments follow from what the decoder knows, up to rounding. The native
core repeats torch's operations in float32; the factors below are rounded from the same doubles as torch's are.
"""

from __future__ import annotations

import math

from shrinkpoint.codec import Run
from shrinkpoint.state import AdamFacts


def step_run(facts: AdamFacts, top: int) -> Run | None:
    """W_t from W_(t-1), m_t and v_t; None where the facts do not suffice."""
    if facts.step is None or facts.lr is None or facts.beta1 is None or facts.beta2 is None or facts.eps is None:
        return None
    if facts.step < 1 or not 0 <= facts.beta1 < 1 or not 0 <= facts.beta2 < 1:
        return None
    decay = 1.0 - facts.lr * (facts.weight_decay or 0.0) if facts.decoupled else 1.0
    size = facts.lr / (1.0 - facts.beta1**facts.step)
    correction = math.sqrt(1.0 - facts.beta2**facts.step)
    return Run("delta", predictor="adam", moments=True, top=top, parameters=(decay, -size, correction, facts.eps))


def square_run(facts: AdamFacts) -> Run | None:
    """v_t from v_(t-1), m_t and m_(t-1); None where the facts do not suffice."""
    if facts.beta1 is None or facts.beta2 is None or not 0 <= facts.beta1 < 1 or not 0 <= facts.beta2 < 1:
        return None
    parameters = (facts.beta1, facts.beta2, 1.0 - facts.beta1, 1.0 - facts.beta2)
    return Run("delta", predictor="square", top=0, parameters=parameters)
