"""Triton kernels for tensors on a CUDA or ROCm device: the bits of native code, in few launches.

`run_kernels` is the only entrance. It imports Triton when a tensor of such a device is handed over, and not before.
Builds of torch for CUDA and ROCm bring Triton along. Without Triton, with `SHRINKPOINT_TRITON=0`, or after a kernel
failed, the caller computes with torch operations, which give the same bits.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch

from shrinkpoint.errors import warn_user

T = TypeVar("T")
SWITCH = "SHRINKPOINT_TRITON"
"""The environment variable that turns kernels off if it is "0"."""
DEVICE_TYPES = ("cuda",)
"""Types of devices that kernels run on; torch calls devices of ROCm "cuda" too. Tests interpret kernels on "cpu"."""
_failures: list[Exception] = []


def kernels_for(device: torch.device) -> ModuleType | None:
    """The module of kernels if they run on this device, else None."""
    return _load_kernels() if device.type in DEVICE_TYPES and not _failures else None


@cache
def _load_kernels() -> ModuleType | None:
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return importlib.import_module("shrinkpoint.device.kernels")
    except ImportError:
        return None


def run_kernels(device: torch.device, work: Callable[[Any], T | None]) -> T | None:
    """Call `work` with the module of kernels; None if torch operations must do it on this device.

    A kernel that cannot be compiled or launched ends no run: a warning says so once, and no kernel is tried again.
    """
    kernels = kernels_for(device)
    if kernels is None:
        return None
    try:
        return work(kernels)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's own, a missing compiler's or the driver's
        _give_up(error)
        return None


def _give_up(error: Exception) -> None:
    _failures.append(error)
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    advice = f"torch operations replace kernels, with the same bits, but slower. Set {SWITCH}=0 to turn kernels off"
    warn_user(f"a Triton kernel failed ({reason}): {advice}", RuntimeWarning)
