"""One float32 tensor for each slot and tensor of a link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.comm.feedback.base import Turn
from shrinkpoint.errors import MismatchError


class Buffers:
    """Made when they are first needed, of zeros.

    Attributes:
        restarts: how many were made anew because the shape had changed.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._kept: dict[tuple[int, int], Tensor] = {}

    def at(self, turn: Turn, like: Tensor) -> Tensor:
        """The buffer of a turn, to be changed in place; of the shape and on the device of `like`.

        A batch with fewer rows than the buffer has uses its first ones. Any other new shape begins a new buffer.
        """
        kept = self._kept.get(turn.key)
        if kept is None or not _fits(kept.shape, like.shape):
            self.restarts += kept is not None
            kept = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        elif kept.device != like.device:
            kept = kept.to(like.device)
        self._kept[turn.key] = kept
        return kept[: like.shape[0]] if like.dim() else kept

    def state_dict(self) -> dict[str, Any]:
        return {f"{slot}.{tensor}": kept for (slot, tensor), kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = {}
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                raise MismatchError(f"feedback, buffer {name}", found=repr(tensor)[:80], expected="a float32 tensor")
            slot, _, which = name.partition(".")
            kept[int(slot), int(which)] = tensor.detach().clone()
        self._kept = kept

    def shared(self) -> list[Tensor]:
        return [self._kept[key].cpu() for key in sorted(self._kept)]


def _fits(kept: torch.Size, shape: torch.Size) -> bool:
    if kept == shape:
        return True
    return len(kept) == len(shape) > 0 and kept[1:] == shape[1:] and kept[0] > shape[0]
