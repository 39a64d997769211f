"""The text task: a byte-level GPT, pre-trained once on Wikipedia, fine-tuned on Shakespeare, cut after three blocks."""

from __future__ import annotations

import gzip
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.studies.wire.task import Drawn, Task, epochs_of
from lab.studies.workloads import Batch, Course, Stream, cosine
from lab.studies.workloads.text import loss_of
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

SHAPE = GPTConfig(layers=4, width=128, heads=4, context=128, dropout=0.0)
STEPS, PEAK, BATCH = 2000, 2e-3, 16
"""Of the pre-training."""
WINDOWS, EPOCHS, FINE_PEAK = 1200, 4, 5e-4
"""Of the fine-tuning: as many epochs as the paper's."""


def _read(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8)


@lru_cache
def texts(data: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes: to pre-train on, to fine-tune on, held out."""
    general = torch.cat([_read(data / "wikitext2" / f"{part}.txt.gz") for part in ("test", "valid")])
    plays = _read(data / "tinyshakespeare" / "input.txt.gz")
    cut = int(0.9 * len(plays))
    return general, plays[:cut], plays[cut:]


def windows(text: Tensor, starts: Tensor, context: int) -> Batch:
    """Inputs and targets, int64 of shape (starts, context)."""
    found = text[starts[:, None] + torch.arange(context + 1)].long()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def spread(text: Tensor, context: int, count: int) -> Batch:
    """Windows, evenly spaced."""
    return windows(text, torch.linspace(0, len(text) - context - 2, count).long(), context)


def optimized(model: GPT, peak: float, warmup: int, steps: int, floor: float) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=peak, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(warmup, steps, floor))


def pretrained(data: Path, cache: Path, shape: GPTConfig, steps: int) -> dict[str, Tensor]:
    """The weights that all runs start from; trained if the cache has them not. They do not depend on a run's seed."""
    size = f"{shape.layers}x{shape.width}x{shape.heads}x{shape.context}"
    name = f"gpt-{size}-{steps}x{BATCH}-{PEAK}.pt"
    if not (cache / name).exists():
        state = pretrain(texts(data)[0], shape, steps)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            torch.save(state, file)
        Path(file.name).replace(cache / name)
    found: dict[str, Tensor] = torch.load(cache / name, weights_only=True)
    return found


def pretrain(text: Tensor, shape: GPTConfig, steps: int) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, generator = GPT(shape), torch.Generator().manual_seed(0)
        optimizer, scheduler = optimized(model, PEAK, 50, steps, 0.1)
        for step in range(steps):
            starts = torch.randint(len(text) - shape.context - 1, (BATCH,), generator=generator)
            loss = model(*windows(text, starts, shape.context))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 200 == 199:
                print(f"          pre-training, step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    return model.state_dict()


def task(data: Path, cache: Path, *, quick: bool = False) -> Task:
    """AdamW (betas 0.9/0.95, weight decay 0.1), clip 1, 20 steps of warm-up to 5e-4, a cosine to a tenth of it.

    The windows of an epoch do not overlap and come back in each of the epochs, in another order.
    """
    shape, steps, count, epochs = SHAPE, STEPS, WINDOWS, EPOCHS
    if quick:
        shape, steps, count, epochs = GPTConfig(layers=4, width=32, heads=2, context=32, dropout=0.0), 20, 64, 2
    start = pretrained(data, cache, shape, steps)
    _, train, rest = texts(data)
    inputs, targets = spread(train, shape.context, count)
    held_out = spread(rest, shape.context, 32 if quick else 512)
    chosen, total = epochs_of(count, BATCH), epochs * (count // BATCH)

    def build(seed: int) -> Course:
        model = GPT(shape)
        model.load_state_dict(start)
        optimizer, scheduler = optimized(model, FINE_PEAK, 20, total, 0.1)

        def draw(_: torch.Generator, number: int) -> Drawn:
            ids = chosen(seed, number)
            return inputs[ids], targets[ids], ids

        return Course(model, optimizer, scheduler, Stream(draw, seed))

    facts = {"parameters": sum(p.numel() for p in GPT(shape).parameters()), "batch": BATCH, "samples": count}
    after = tuple(f"blocks.{at}" for at in range(3))
    return Task(
        "text",
        "loss",
        False,
        after,
        total,
        epochs,
        build,
        lambda model, drawn: model(drawn[0], drawn[1]),
        lambda model: loss_of(model, held_out),
        clip=1.0,
        facts={**facts, "context": shape.context},
    )
