"""The GPT workload: the demo's byte-level model, smaller, on a text."""

from __future__ import annotations

import gzip
import sys
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from lab.studies.workloads import Batch, Course, Stream, Workload, cosine, evaluating
from shrinkpoint_lab.demo.workload import GPT, GPTConfig, stdlib_text

HELD_OUT = 0.1
PEAK = 2e-3


@lru_cache
def text(data: Path) -> tuple[str, Tensor]:
    """tiny-shakespeare, or Python's standard library where the data are not here; as bytes, with its name."""
    path = data / "tinyshakespeare" / "input.txt.gz"
    if path.exists():
        name, content = "tinyshakespeare", gzip.decompress(path.read_bytes())
    else:  # said, since figures on one text mean nothing beside those on the other
        name, content = "stdlib", _modules()
        print(f"{path} is not there: the text is Python's standard library", file=sys.stderr)
    return name, torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _modules() -> bytes:
    return stdlib_text()[:4_000_000]


SHAPE = GPTConfig(layers=4, width=192, heads=6, context=64, dropout=0.0)
LARGE = GPTConfig(layers=6, width=384, heads=6, context=64, dropout=0.0)
"""10.8 M parameters."""


def gpt(data: Path, *, shape: GPTConfig = SHAPE, peak: float = PEAK, quick: bool = False) -> Workload:
    """AdamW (betas 0.9/0.95, weight decay 0.1), clip 1, 20 steps of warm-up to `peak`, a cosine to a tenth of it."""
    name, whole = text(data)
    steps, interval, size = 640, 16, 16
    if quick:
        shape, steps, interval, size = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0), 48, 6, 8
    cut = int(len(whole) * (1 - HELD_OUT))
    train, held = whole[:cut], whole[cut:]
    seen = windows(held[: len(held) // 2], shape.context, 16 if quick else 128)
    unseen = windows(held[len(held) // 2 :], shape.context, 32 if quick else 768)

    def build(seed: int) -> Course:
        model = GPT(shape)
        optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=peak, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(20, steps, 0.1))
        return Course(model, optimizer, scheduler, Stream(lambda g, _: drawn(train, size, shape.context, g), seed))

    parameters = sum(p.numel() for p in GPT(shape).parameters())
    facts = {"text": name, "parameters": parameters, "batch": size, "context": shape.context}
    return Workload(
        "gpt",
        "loss",
        False,
        steps,
        interval,
        build,
        lambda model, batch: model(*batch),
        lambda model: loss_of(model, seen),
        lambda model: loss_of(model, unseen),
        clip=1.0,
        facts=facts,
    )


def loss_of(model: nn.Module, windows: Batch, size: int = 64) -> float:
    """Mean cross-entropy in nats, over all windows."""
    with evaluating(model):
        parts = [model(x, y).item() for x, y in zip(*(side.split(size) for side in windows), strict=True)]
    weights = [len(x) for x in windows[0].split(size)]
    return sum(part * weight for part, weight in zip(parts, weights, strict=True)) / sum(weights)


def drawn(text: Tensor, size: int, context: int, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(text) - context - 1, (size,), generator=generator)
    return _at(text, starts, context)


def windows(text: Tensor, context: int, count: int) -> Batch:
    """`count` windows, evenly spaced."""
    return _at(text, torch.linspace(0, len(text) - context - 2, count).long(), context)


def _at(text: Tensor, starts: Tensor, context: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
