"""Golden checkpoints in folders of a framework's own: one process's, and those of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from helpers.fingerprint import fingerprint
from helpers.round_trip import Loop
from helpers.strategies import difference

from shrinkpoint.train import Checkpointer
from shrinkpoint.train.dcp import Writer, load


def write_folders(place: Path) -> dict[str, dict[str, str]]:
    """A chain of three, of which the first has been deleted; fingerprints by folder."""
    expected, loop = {}, Loop(width=4)
    with Checkpointer(keyframe_every=3) as trail:
        for step in (1, 2, 3):
            state = loop.steps(1)
            trail.save(place / f"checkpoint-{step}", state, step=step, metrics={"loss": float("nan")}, extra={"a": [1]})
            expected[f"checkpoint-{step}"] = fingerprint(state)
        trail.discard(place / "checkpoint-1")
    del expected["checkpoint-1"]
    return expected


def write_shards(place: Path) -> dict[str, dict[str, str]]:
    """Two checkpoints of one rank, with values that are no tensors; fingerprints by folder."""
    expected, loop = {}, Loop(width=4)
    for step in (1, 2):
        model = loop.steps(1)["model"]
        state = {"model": model, "more": {"epoch": step, "names": ["a", "b"], "scalar": torch.tensor(step)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is one process
            dcp.save(state, storage_writer=Writer(place / f"step-{step}"), no_dist=True)
        read = load(place / f"step-{step}")
        assert difference(read, state) is None
        expected[f"step-{step}"] = fingerprint(read)
    return expected
