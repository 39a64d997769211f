"""Checkpoints as others write them, and files that would run something if they were unpickled."""

from __future__ import annotations

import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shrinkpoint.tensors.compare import same_bits


def training(step: int) -> dict[str, Any]:
    """A state as a training script saves it: a model, its optimizer, random generators, plain values."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(step // 10):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    numpy, python = np.random.RandomState(step), random.Random(step)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "numpy": numpy.get_state(), "python": python.getstate()},
        "step": step,
        "losses": [1.0, float("nan"), float("inf")],
        "best": (np.float32(0.5), None),
        "half": torch.randn(7).bfloat16(),
    }


def run_of_files(folder: Path, steps: tuple[int, ...] = (10, 20, 30)) -> Path:
    """A directory with a torch file a step."""
    folder.mkdir(parents=True)
    for step in steps:
        torch.save(training(step), folder / f"step-{step}.pt")
    return folder


class Malice:
    """Pickled, it makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def malice(path: Path, mark: Path) -> Path:
    """A torch file that makes the file `mark` if it is really unpickled."""
    torch.save({"weight": torch.ones(3), "extra": Malice(mark)}, path)
    return path


def forged(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    """A torch file whose pickle says something else."""
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(target, "w") as made:
        for name in given.namelist():
            data = given.read(name)
            if name.endswith("data.pkl"):
                assert old in data
                data = data.replace(old, new)
            made.writestr(name, data)
    return target


def same(a: Any, b: Any) -> bool:
    """Two nests of the same kinds, keys and values, tensors and arrays bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return alike and same_bits(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
