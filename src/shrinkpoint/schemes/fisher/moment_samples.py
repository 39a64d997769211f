"""Tells which first moments have hardly changed since the last save, from a few of their values."""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.optimizers import MomentKind

MIN_LATTICE_NUMEL = 16
"""Values of a tensor below which it is not quantized."""
FIRST_KINDS = (
    MomentKind.GRADIENT_MEAN,
    MomentKind.MOMENTUM,
    MomentKind.ORTHOGONALIZED,
    MomentKind.SIGN,
    MomentKind.SCALED,
)
MIN_RESTING_SHARE = 0.75
"""The least share of unchanged values of a moment that keeps its dither: changed ones then take about three times the
bits."""
_SAMPLE_VALUES = 256


class MomentSamples:
    """Some values of each first moment at the last save, which tell what has not changed since.

    A wrong answer costs bytes, no correctness: of a save that failed the next one knows no more than its samples.
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def update(self, state: FlatState) -> set[str]:
        """Take samples of a state; return the first moments most values of which are those of the samples before."""
        names, parts = [], []
        for name, kind in state.moment_kinds.items():
            moment = state.tensors[name]
            if kind in FIRST_KINDS and moment.is_contiguous() and moment.numel() >= MIN_LATTICE_NUMEL:
                names.append(name)
                parts.append(moment.detach().view(-1)[:: -(-moment.numel() // _SAMPLE_VALUES)])
        before, self._values = self._values, dict(zip(names, _copy_together(parts), strict=True))
        return {
            name
            for name, values in self._values.items()
            if (old := before.get(name)) is not None
            and old.shape == values.shape
            and int((old == values).sum()) >= MIN_RESTING_SHARE * old.numel()
        }


def _copy_together(parts: list[Tensor]) -> list[Tensor]:
    """Copies of small vectors in host memory, float32; those of one device in one transfer."""
    out: list[Tensor] = [torch.empty(0)] * len(parts)
    for device in {part.device for part in parts}:
        places = [i for i, part in enumerate(parts) if part.device == device]
        joined = torch.cat([parts[i].to(torch.float32) for i in places]).cpu()
        for i, values in zip(places, torch.split(joined, [parts[i].numel() for i in places]), strict=True):
            out[i] = values
    return out
