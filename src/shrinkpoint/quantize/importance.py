"""How much a weight matters: by its size, or by what the loss would change without it.

Both metrics are those of arXiv 2306.11800, section on quantization.
"""

from __future__ import annotations

import torch
from torch import Tensor


def magnitude(weights: Tensor) -> Tensor:
    """`|w|`, float32: what there is without gradients, and what ranks well near convergence."""
    return weights.detach().to(torch.float32).abs()


def sensitivity(weights: Tensor, gradients: Tensor) -> Tensor:
    """`|g * w|`, float32: the first term of the Taylor series of the loss for a weight that goes to zero.

    Ranks well early in training; where gradients vanish it says little. A common factor of all gradients (a loss scale)
    changes no rank. The product is taken first and its size after, of signed gradients.

    Args:
        gradients: of the shape of `weights`, on any device, such as `Gradients.mean` holds.

    Returns:
        On the device of `weights`.
    """
    signed = gradients.detach().to(device=weights.device, dtype=torch.float32)
    return signed.mul(weights.detach().to(torch.float32)).abs_()
