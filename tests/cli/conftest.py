"""A real store, and two ways to run the real command: inside this process, and as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_line import Outcome, invoke
from helpers.timeouts import PATIENCE

from shrinkpoint.cli.app import app
from shrinkpoint.store import Store

STEPS = (10, 20, 30, 40)  # keyframe, delta, delta, keyframe


def state(step: int) -> dict:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(step // 10):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return {
        "model": {name: tensor.detach() for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "frozen": torch.arange(4096, dtype=torch.float32),
        "extra": {"epoch": step // 20, "order": np.arange(7), "scale": np.float32(0.5), "best": float("inf")},
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    where = tmp_path / "run"
    with Store(where, keyframe_every=3) as opened:
        for step in STEPS:
            opened.save(step, state(step), metrics={"val_loss": 2.0 - abs(step - 20) / -100})
    return where


@pytest.fixture
def run():
    """run(*arguments, columns=80, env={}) -> Outcome, inside this process."""
    return partial(invoke, app)


def child(*arguments: object, python: tuple[str, ...] = ("-m", "shrinkpoint"), **env: str) -> Outcome:
    """The command as a process of its own."""
    done = subprocess.run(
        [sys.executable, *python, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "SHRINKPOINT_TRACEBACK": "", **env},
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(name="child")
def _child():
    return child


@pytest.fixture(name="state_at")
def _state_at():
    return state


@pytest.fixture
def payload(store: Path):
    """payload(step) -> path of its file."""
    return lambda step: store / f"step-{step:09d}" / "rank-00000.safetensors"


def flip(path: Path, at: int = -100) -> None:
    """Damage one byte; the file becomes a new one, as copies and bad disks make it, so that hard links stay whole."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.fixture(name="flip")
def _flip():
    return flip
