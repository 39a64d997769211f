"""Coder configurations that predict values with one step of Adam.

A step of Adam is a function of the parent's weights and of the moments that a checkpoint holds anyway. Between
checkpoints one step apart, the decoder can therefore compute weights and second moments up to rounding. The native core
repeats torch's float32 operations; the factors below are rounded from the same doubles as torch's.
"""

from __future__ import annotations

import math

from shrinkpoint.codec.coder import CoderConfig
from shrinkpoint.tensors.info import OptimizerInfo


def step_config(info: OptimizerInfo, top: int) -> CoderConfig | None:
    """Return the configuration that predicts W_t from W_(t-1), m_t and v_t; None if hyperparameters are missing.

    Args:
        info: step, learning rate, betas, eps and weight decay of the parameter.
        top: largest exponent of the parent's values.
    """
    if info.step is None or info.lr is None or info.beta1 is None or info.beta2 is None or info.eps is None:
        return None
    if info.step < 1 or not 0 <= info.beta1 < 1 or not 0 <= info.beta2 < 1:
        return None
    decay = 1.0 - info.lr * (info.weight_decay or 0.0) if info.decoupled else 1.0
    size = info.lr / (1.0 - info.beta1**info.step)
    correction = math.sqrt(1.0 - info.beta2**info.step)
    return CoderConfig(
        "delta", predictor="adam", moments=True, top=top, parameters=(decay, -size, correction, info.eps)
    )


def square_config(info: OptimizerInfo) -> CoderConfig | None:
    """Return the configuration that predicts v_t from v_(t-1), m_t and m_(t-1); None if the betas are missing."""
    if info.beta1 is None or info.beta2 is None or not 0 <= info.beta1 < 1 or not 0 <= info.beta2 < 1:
        return None
    parameters = (info.beta1, info.beta2, 1.0 - info.beta1, 1.0 - info.beta2)
    return CoderConfig("delta", predictor="square", top=0, parameters=parameters)
