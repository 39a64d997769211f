"""The largest workload: a byte-level GPT of 31.7 M parameters on wikitext, which computes in bfloat16."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor, nn

from lab.studies.workloads import Batch, Course, Stream, Workload, cosine
from lab.studies.workloads.text import drawn, loss_of, windows
from shrinkpoint_lab.demo.workload import GPT, GPTConfig, stdlib_text

SHAPE = GPTConfig(layers=10, width=512, heads=8, context=128, dropout=0.0)
TOY = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0)
STEPS, BATCH, PEAK, WARMUP = 2000, 16, 6e-4, 100


def texts(data: Path) -> tuple[str, Tensor, Tensor]:
    """The name, the text to train on and the one that is held out, as bytes.

    Of wikitext-2 these are the test and the validation part, as its training part is not among the data; where neither
    is, parts of Python's standard library stand in.
    """
    paths = [data / "wikitext2" / f"{part}.txt.gz" for part in ("test", "valid")]
    if all(path.exists() for path in paths):
        name, parts = "wikitext2", [gzip.decompress(path.read_bytes()) for path in paths]
    else:
        text = stdlib_text()[:2_400_000]
        name, parts = "stdlib", [text[: len(text) // 2], text[len(text) // 2 :]]
    train, held = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return name, train, held


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy in nats; products of matrices in bfloat16, weights and their gradients in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = model(*batch)
    return out


def wikitext(data: Path, *, quick: bool = False) -> Workload:
    """AdamW (betas 0.9/0.95, weight decay 0.1), clip 1, 100 steps of warm-up to 6e-4, a cosine to a tenth of it.

    `evaluate` and `test` compute in float32, on 64 and 256 windows of 128 bytes that have nothing in common.
    """
    name, train, held = texts(data)
    shape, steps, size = (TOY, 20, 4) if quick else (SHAPE, STEPS, BATCH)
    half = len(held) // 2
    seen = windows(held[:half], shape.context, 16 if quick else 64)
    unseen = windows(held[half:], shape.context, 32 if quick else 256)

    def build(seed: int) -> Course:
        torch.manual_seed(seed)
        model = GPT(shape)
        optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=PEAK, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(WARMUP, steps, 0.1))
        return Course(model, optimizer, scheduler, Stream(lambda g, _: drawn(train, size, shape.context, g), seed))

    return Workload(
        "wikitext",
        "loss",
        False,
        steps,
        100,
        build,
        loss,
        lambda model: loss_of(model, seen, 32),
        lambda model: loss_of(model, unseen, 32),
        clip=1.0,
        facts={"text": name, "parameters": sum(p.numel() for p in GPT(shape).parameters()), "batch": size},
    )
