"""What a lossy scheme does with an optimizer's state.

Of an Adam state two thirds are moments, so a scheme that shrinks weights alone ends near 1.5x whatever it does to them
(arXiv 2406.11257 makes the point). What else is done is therefore a mode of its own, and every report has two ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.log_levels import quantize_log
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

Mode = Literal["exact", "reset", "lossy"]
"""exact: bit for bit. reset: a restore begins with fresh moments. lossy: moments on 254 logarithmic levels."""

_MOMENTS = (Role.MOMENT1, Role.MOMENT2)


def check_mode(mode: str) -> Mode:
    """Raises `PolicyError` for a mode nobody knows."""
    known: Mode = validate.check_choice("optimizer", mode, get_args(Mode))
    return known


def zeroed_moments(state: FlatState) -> Iterator[tuple[str, Tensor]]:
    """Every moment, and the step counters beside them, as they are before the first step: zero.

    With the counter goes Adam's bias correction, without which zero moments would make the first steps too long.
    """
    moments = [name for name, info in state.infos.items() if info.role in _MOMENTS]
    homes = {name.rpartition("/")[0] for name in moments}
    counters = [f"{home}/step" for home in homes if f"{home}/step" in state.tensors]
    for name in (*moments, *counters):
        yield name, torch.zeros_like(state.tensors[name], device="cpu", memory_format=torch.contiguous_format)


def quantize_moments(state: FlatState) -> Iterator[tuple[str, CodebookTensor]]:
    """Symbols of the moments that are large enough and finite; the others stay exact."""
    for name, info in state.infos.items():
        x = state.tensors[name]
        if is_quantizable_moment(info.role, x) and x.numel() >= MIN_WEIGHT_NUMEL and bool(x.isfinite().all()):
            yield name, quantize_log(x, signed=info.role is Role.MOMENT1)


def is_quantizable_moment(role: Role, x: Tensor) -> bool:
    """Whether a tensor is a moment that levels can stand for."""
    return role in _MOMENTS and x.dtype in (torch.float32, torch.bfloat16)
