"""Saves and restores the random generators of Python, numpy and torch (CPU and CUDA)."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def get_rng_state() -> dict[str, Any]:
    """Return the states of all generators as a storable nest; draws no random numbers."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    # Only if CUDA is in use: querying initializes every device.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Set all generators to a state from `get_rng_state`; CUDA states beyond the present devices are ignored."""
    python = state["python"]
    random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["gauss"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(device_state, device)


_PYTHON = struct.Struct("<I?d")
"""Python's generator: the version, whether a normal number is left over, and that; words follow."""
_NUMPY = struct.Struct("<I?d")
"""numpy's MT19937: the position, whether a normal number is left over, and that; words follow."""


def rng_to_bytes() -> dict[str, bytes]:
    """The states of all generators as bytes by name; numpy's only if it is MT19937, its default."""
    state = get_rng_state()
    python, legacy = state["python"], state["numpy"]
    gauss = python["gauss"]
    result = {
        "rng/python": _PYTHON.pack(python["version"], gauss is not None, gauss or 0.0) + python["words"].tobytes()
    }
    if legacy["bit_generator"] == "MT19937":
        head = _NUMPY.pack(legacy["state"]["pos"], bool(legacy["has_gauss"]), legacy["gauss"])
        result["rng/numpy"] = head + legacy["state"]["key"].astype(np.uint32).tobytes()
    result["rng/torch"] = state["torch"].numpy().tobytes()
    devices = state.get("cuda", [])
    return result | {f"rng/cuda/{index}": device.numpy().tobytes() for index, device in enumerate(devices)}


def rng_from_bytes(parts: Mapping[str, bytes | memoryview]) -> None:
    """Set all generators to what `rng_to_bytes` returned."""
    python, legacy = bytes(parts["rng/python"]), bytes(parts.get("rng/numpy", b""))
    version, has_gauss, gauss = _PYTHON.unpack_from(python)
    words = np.frombuffer(python, np.uint32, offset=_PYTHON.size)
    state: dict[str, Any] = {
        "python": {"version": version, "words": words, "gauss": gauss if has_gauss else None},
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.frombuffer(bytearray(parts["rng/torch"]), dtype=torch.uint8),
    }
    if legacy:
        pos, has_gauss, gauss = _NUMPY.unpack_from(legacy)
        key = np.frombuffer(legacy, np.uint32, offset=_NUMPY.size)
        own = {"key": key, "pos": pos}
        state["numpy"] = {"bit_generator": "MT19937", "state": own, "has_gauss": int(has_gauss), "gauss": gauss}
    cuda = [name for name in parts if name.startswith("rng/cuda/")]
    if cuda:
        numbered = sorted(cuda, key=lambda name: int(name.rpartition("/")[2]))
        state["cuda"] = [torch.frombuffer(bytearray(parts[name]), dtype=torch.uint8) for name in numbered]
    set_rng_state(state)
