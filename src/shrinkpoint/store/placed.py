"""Decoded tensors on the device that a caller names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from shrinkpoint.errors import PolicyError

Device: TypeAlias = str | torch.device | None


def placed(tensors: Mapping[str, torch.Tensor], device: Device, *, copy: bool) -> dict[str, torch.Tensor]:
    """Tensors on a device, the CPU where none is named.

    Raises:
        PolicyError: the device is not there, or is full.
    """
    try:
        return {name: tensor.to(device or "cpu", copy=copy) for name, tensor in tensors.items()}
    except (AssertionError, RuntimeError, TypeError) as error:  # torch has no error of its own for "no such device"
        do = "name a device that is here, or make room on it"
        raise PolicyError(
            f"device {device!r}", found=str(error)[:200], expected="a place for the state", do=do
        ) from error
