"""Promise: the benchmark of lossless sizes and speeds measures ours beside a rival, on a small training."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import pytest
import torch

from benchmarks.lossless import run as lossless


def test_every_stream_has_our_size_a_rivals_and_an_entropy() -> None:
    old, new = _checkpoints()
    streams = lossless.study(lossless.Series("small", [old], {"1": [(old, new)]}), [_zlib()])
    alone, later = ["W fp32", "W bf16", "m", "v", "W + m + v"], ["W fp32", "W bf16", "W + m + v"]
    assert sorted(streams) == sorted([*alone, *(f"{name}, 1 later" for name in later)])
    for name, stream in streams.items():
        assert stream["raw"] > 0 and stream["rivals"]["zlib"] > 0 and stream["entropy"] > 0, name
        mine = lossless.report.ours(stream)
        # headers take up to a fifth of states as small as this
        assert mine is not None and mine > 0.8, name
    ratios = {name: lossless.report.ours(stream) for name, stream in streams.items()}
    assert ratios["W fp32, 1 later"] > 2 * ratios["W fp32"]


def test_speeds_are_of_ours_and_of_the_rivals_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    rival = _zlib()
    monkeypatch.setattr(lossless.compressors, "installed", lambda threads=1: [rival] if threads == 1 else [])
    threads = torch.get_num_threads()
    try:
        found = lossless.speeds(*_checkpoints(), repeats=1)
    finally:
        torch.set_num_threads(threads)
    assert "zlib" in found["1"] and "zlib" not in found["2"]
    for name in ("ours: W, core alone", "ours: W in one piece", "ours: W", "ours: W + m + v delta"):
        assert all(found[count][name][way]["cpu"] > 0 for count in ("1", "2") for way in ("encode", "decode"))


def _checkpoints() -> list[Any]:
    """Two steps of a small network with AdamW, after some others."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer, found = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95)), []
    for step in range(1, 12):
        optimizer.zero_grad()
        net(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        if step > 9:
            model, moments = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
            found.append(lossless.Checkpoint(f"{step}", {"model": model, "optimizer": moments, "step": step}))
    return found


def _zlib() -> Any:
    """A compressor that every Python has, as the benchmark calls its rivals."""

    class Zlib(lossless.Rival):
        package, name = "pip", "zlib"

        def prepare(self, array: Any) -> Any:
            return array.tobytes()

        def pack(self, prepared: Any) -> bytes:
            return zlib.compress(prepared)

        def unpack(self, packed: bytes) -> Any:
            return zlib.decompress(packed)

    return Zlib()
