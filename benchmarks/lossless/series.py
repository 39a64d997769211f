"""Real checkpoints to measure on: a GPT trained here, and published epochs of another model.

`python -m benchmarks.lossless.series` trains the demo's GPT (AdamW, betas 0.9/0.95, weight decay 0.1, cosine over 1000
steps, clip
1) for 700 steps and keeps steps b, b + 1, b + 10 and b + 100 for b = 100 and b = 600: one end of the learning-rate
schedule and the other. A file that exists is not made again.
"""

from __future__ import annotations

import argparse
import io
import lzma
import math
import os
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

BASES = (100, 600)
AHEAD = (1, 10, 100)
STEPS = 1000
BATCH = 8
PEAK = 1e-3


@dataclass(frozen=True)
class Checkpoint:
    """One saved training state.

    Attributes:
        state: {"model": state_dict, "optimizer": state_dict of one Adam, "step": int}.
    """

    name: str
    state: Mapping[str, Any] = field(repr=False)

    def weights(self) -> list[Tensor]:
        """The float32 parameters, tied ones once, in the optimizer's order; buffers left out."""
        seen: dict[int, Tensor] = {}
        for name, tensor in self.state["model"].items():
            if tensor.is_floating_point() and not name.endswith(("running_mean", "running_var")):
                seen.setdefault(tensor.data_ptr(), tensor)
        found = list(seen.values())
        shapes = [tuple(t.shape) for t in found]
        if shapes != [tuple(one["exp_avg"].shape) for one in self.state["optimizer"]["state"].values()]:
            raise ValueError(f"{self.name}: the optimizer's parameters are not the model's, in its order")
        return found

    def moments(self, key: str) -> list[Tensor]:
        return [one[key] for one in self.state["optimizer"]["state"].values()]

    @cached_property
    def tensors(self) -> dict[str, list[Array]]:
        """float32 arrays by stream: W, m, v."""
        found = {"W": self.weights(), "m": self.moments("exp_avg"), "v": self.moments("exp_avg_sq")}
        return {name: [t.detach().numpy() for t in tensors] for name, tensors in found.items()}

    def flat(self, stream: str) -> Array:
        return np.concatenate([t.ravel() for t in self.tensors[stream]])

    def half(self) -> Checkpoint:
        """The same state with its floating-point model cast to bfloat16; moments stay float32, ties stay ties."""
        cast: dict[int, Tensor] = {}
        model = {}
        for name, tensor in self.state["model"].items():
            whole = cast.setdefault(tensor.data_ptr(), tensor.bfloat16() if tensor.is_floating_point() else tensor)
            model[name] = whole
        return Checkpoint(self.name + " bf16", {**self.state, "model": model})


@dataclass(frozen=True)
class Series:
    """Checkpoints of one run.

    Attributes:
        keyframes: those measured on their own.
        pairs: by distance ("1", "10", "100", or "epoch"), the base and what came after it.
    """

    name: str
    keyframes: list[Checkpoint]
    pairs: dict[str, list[tuple[Checkpoint, Checkpoint]]]


def default_cache() -> Path:
    return Path(os.environ.get("SHRINKPOINT_SERIES") or Path(tempfile.gettempdir()) / "shrinkpoint-series")


def demo(cache: Path) -> list[Series]:
    """Both ends of the demo's schedule, trained now where the cache does not hold them."""
    paths = {step: cache / f"{step}.pt" for base in BASES for step in (base, *(base + k for k in AHEAD))}
    if not all(path.exists() for path in paths.values()):
        train(paths)
    found = {step: Checkpoint(f"step {step}", torch.load(path, weights_only=True)) for step, path in paths.items()}
    return [
        Series(f"demo, from step {base}", [found[base]], {str(k): [(found[base], found[base + k])] for k in AHEAD})
        for base in BASES
    ]


def train(paths: Mapping[int, Path]) -> None:
    """Train to the last of these steps and write each when it comes."""
    from shrinkpoint_lab.demo.workload import GPT, Batches, GPTConfig, stdlib_text

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    shape = GPTConfig()
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Batches(stdlib_text(), size=BATCH, context=shape.context, seed=0)
    for step in range(1, max(paths) + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(*batches.draw())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"training the series: step {step} of {max(paths)}, loss {loss.item():.3f}", flush=True)
        if step in paths:
            write(paths[step], {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


def learning_rate(step: int) -> float:
    """50 steps of warm-up, then a cosine from the peak to a tenth of it at step 1000."""
    return PEAK * min(1.0, step / 50) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))


def write(path: Path, state: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.rename(path)


def published(data: Path | None, every: int = 1) -> list[Series]:
    """Consecutive epochs of a small published model (README beside the data), or nothing where they are not.

    Args:
        data: the directory `series_ssl_adamw` or the one above it.
        every: take every n-th pair of epochs.
    """
    places = (data, data / "series_ssl_adamw") if data else ()
    files = [path for place in places for path in sorted(place.glob("epoch_*.pth.xz"))]
    if not files:
        print("series_ssl_adamw is not here (--data or SHRINKPOINT_DATA): skipped")
        return []
    pairs = list(pairwise(_epoch(path) for path in files))[::every]
    return [Series("series_ssl_adamw, epochs", [new for _, new in pairs], {"epoch": pairs})]


def _epoch(path: Path) -> Checkpoint:
    saved = torch.load(io.BytesIO(lzma.decompress(path.read_bytes())), map_location="cpu", weights_only=True)
    state = {"model": saved["model_state_dict"], "optimizer": saved["optimizer_state_dict"], "step": saved["epoch"]}
    return Checkpoint(path.name.split(".")[0].replace("_", " "), state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=default_cache())
    for one in demo(parser.parse_args().cache):
        print(one.name, *(pair[1].name for pairs in one.pairs.values() for pair in pairs))
