"""Importance of weights: magnitude, and sensitivity of the loss.

Both metrics are those of arXiv 2306.11800, section on quantization.
"""

from __future__ import annotations

import torch
from torch import Tensor


def magnitude(weights: Tensor) -> Tensor:
    """Return `|w|`, float32. Needs no gradients, and ranks weights well near convergence."""
    return weights.detach().to(torch.float32).abs()


def sensitivity(weights: Tensor, gradients: Tensor) -> Tensor:
    """Return `|g * w|`: the first-order change of the loss if a weight is set to zero.

    Ranks weights well early in training; where gradients vanish it says little. A common factor of all gradients (a
    loss scale) changes no rank.

    Args:
        weights: floats of any dtype and shape.
        gradients: signed mean gradients, of the shape of `weights`, on any device.

    Returns:
        float32, on the device of `weights`.
    """
    signed = gradients.detach().to(device=weights.device, dtype=torch.float32)
    return signed.mul(weights.detach().to(torch.float32)).abs_()
