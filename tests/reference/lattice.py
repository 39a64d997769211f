"""What the native core does with points, operation by operation, in whole tensors of torch.

But for roots: those of torch on the CPU are not the same on every machine.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.codec.lattice import MAX_LATTICE_CODE, STEPS_PER_OCTAVE, ZERO_CODE, Lattice, exp2_eighths

ESCAPE = -128
OFFSETS, CLASSES, QUARTERS = 16, 8, 12


def values(lattice: Lattice, codes: Tensor, squares: Tensor | None = None) -> Tensor:
    """Of a matrix of codes."""
    if lattice.spacing == "log":
        made = exp2_eighths(lattice.exponents() + lattice.step * codes.to(torch.int32))
        return made.masked_fill(codes == ZERO_CODE, 0.0)
    return (codes.to(torch.float32) + lattice.dither(_shape(codes))) * steps(lattice, squares)


def steps(lattice: Lattice, squares: Tensor | None) -> Tensor:
    return lattice.scales() if squares is None else lattice.scales() * torch.from_numpy(np.sqrt(squares.numpy()))


def guess(
    lattice: Lattice, shape: tuple[int, int], parent: Tensor | None, squares: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes, int32, and contexts, uint8, of a matrix."""
    if lattice.spacing == "log":
        codes, contexts = _nearest_power(lattice, shape, parent)
    else:
        codes, offsets = _nearest(lattice, shape, parent, squares)
        contexts = offsets * CLASSES + _classes(lattice, shape)
    return codes, contexts.to(torch.uint8)


def _nearest(
    lattice: Lattice, shape: tuple[int, int], parent: Tensor | None, squares: Tensor | None
) -> tuple[Tensor, Tensor]:
    u = lattice.dither(shape)
    at = torch.zeros(shape) - u if parent is None else parent.to(torch.float32) / steps(lattice, squares) - u
    at = torch.nan_to_num(at, 0.0, 0.0, 0.0).clamp(-MAX_LATTICE_CODE, MAX_LATTICE_CODE)
    codes = at.round()
    rest = at - codes
    offsets = ((rest + 0.5) * OFFSETS).to(torch.int32).clamp(0, OFFSETS - 1)
    return codes.to(torch.int32), offsets.masked_fill(rest.abs() < 1 / 64, OFFSETS)


def _nearest_power(lattice: Lattice, shape: tuple[int, int], parent: Tensor | None) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(shape, dtype=torch.int32)
    if parent is None:
        return zeros, zeros
    bits = parent.to(torch.float32).contiguous().view(torch.int32)
    beyond = (bits >> 20) - 127 * STEPS_PER_OCTAVE - lattice.exponents()
    quarters = torch.div(beyond * 4, lattice.step, rounding_mode="floor").clamp(-QUARTERS, QUARTERS - 1) + QUARTERS
    return zeros.masked_fill(bits == 0, ZERO_CODE), quarters.masked_fill(bits == 0, 2 * QUARTERS)


def _classes(lattice: Lattice, shape: tuple[int, int]) -> Tensor:
    rows, columns = (
        one - torch.div(one.sum(), max(1, one.numel()), rounding_mode="floor")
        for one in (lattice.rows.to(torch.int32), lattice.columns.to(torch.int32))
    )
    here = ((rows[:, None] + columns[None, :]) >> 2) + CLASSES // 2
    return here.clamp(0, CLASSES - 1).expand(shape)


def tokens(codes: Tensor, guesses: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, uint8, and escapes, int32."""
    apart = codes.to(torch.int32) - guesses
    large = apart.abs() > -ESCAPE - 1
    told = apart.masked_fill(large, ESCAPE) + contexts.to(torch.int32)
    return (told & 255).to(torch.uint8), apart[large]


def points(found: Tensor, contexts: Tensor, guesses: Tensor, escapes: Tensor) -> Tensor:
    """The codes, int16."""
    apart = ((found.to(torch.int32) - contexts.to(torch.int32) + 128) & 255) - 128
    large = apart == ESCAPE
    apart[large] = escapes
    return (guesses + apart).to(torch.int16)


def nearest(
    lattice: Lattice, at: Tensor, squares: Tensor | None = None, before: Tensor | None = None, hold: float = 0.5
) -> tuple[Tensor, bool]:
    """The codes, int16, of a matrix of values; and whether codes reach so far."""
    position = at.to(torch.float32) / steps(lattice, squares) - lattice.dither(_shape(at))
    fits = bool((position > -MAX_LATTICE_CODE).all() and (position < MAX_LATTICE_CODE).all())
    codes = position.round()
    if before is not None and hold > 0.5:
        old = before.to(torch.float32)
        codes = torch.where((position - old).abs() <= hold, old, codes)
    return (codes.to(torch.int16) if fits else torch.zeros(_shape(at), dtype=torch.int16)), fits


def _shape(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.shape[1]
