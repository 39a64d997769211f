"""A training loop as a user writes it: `python -m shrinkpoint_lab.demo.train --store runs/mine --steps 200`.

After a crash, start the same command again: it resumes from the newest intact checkpoint of the store. The lines that
use this library have `sp.` or `manager` in them: one makes the manager, one restores, one saves, one closes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import shrinkpoint as sp
from shrinkpoint.tensors.rng import get_rng_state
from shrinkpoint_lab.demo.digests import state_digests
from shrinkpoint_lab.demo.workload import GPT, Batches, GPTConfig, stdlib_text

WARMUP = 20


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shrinkpoint_lab.demo.train", description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--keyframe-every", type=int, default=20, help="checkpoints between two keyframes")
    parser.add_argument("--background", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--context", type=int, default=GPTConfig.context)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads; sums depend on their number")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--final", type=Path, help="also write the last state here, with torch.save")
    parser.add_argument("--disturb-at", type=int, help="change one bit of a weight after this step")
    return parser.parse_args(argv)


def seed_everything(seed: int, threads: int) -> None:
    """Seeds every random generator, and makes torch deterministic."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(args: argparse.Namespace) -> None:
    """Trains from the newest checkpoint in the store, or from the start, to the last step."""
    seed_everything(args.seed, args.threads)
    model = GPT(GPTConfig(layers=args.layers, width=args.width, context=args.context))
    optimizer = AdamW(model.param_groups(weight_decay=0.1), lr=1e-3, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    batches = Batches(stdlib_text(), size=args.batch, context=args.context, seed=args.seed)

    manager = sp.CheckpointManager(args.store, keyframe_every=args.keyframe_every, background=args.background)
    restored = manager.restore(model=model, optimizer=optimizer, scheduler=scheduler)
    if restored:
        batches.load_state_dict(restored.extra["batches"])
    first = restored.step + 1 if restored else 1
    state = state_digests(live_state(model, optimizer, scheduler, batches)) if restored else None
    skipped = [f"step {item.step}: {item.reason}" for item in restored.skipped] if restored else []
    emit_event("start", step=first, skipped=skipped, restored=state)

    for step in range(first, args.steps + 1):
        loss = model(*batches.draw())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step == args.disturb_at:
            flip_bit(model.token.weight)
        state = state_digests(live_state(model, optimizer, scheduler, batches))
        emit_event("step", step=step, loss=loss.item(), state=state)
        if step % args.every == 0 or step == args.steps:
            began = time.perf_counter()
            manager.save(
                step,
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                extra={"batches": batches.state_dict()},
                metrics={"loss": loss.item()},
            )
            emit_event("save", step=step, stall=time.perf_counter() - began)
    manager.close()
    if args.final:
        torch.save(without_arrays(live_state(model, optimizer, scheduler, batches)), args.final)


def live_state(model: GPT, optimizer: AdamW, scheduler: LambdaLR, batches: Batches) -> dict[str, Any]:
    """Everything that the next steps depend on, under the names that a checkpoint has for it."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "extra": {"batches": batches.state_dict()},
        "rng": get_rng_state(),
    }


def without_arrays(nest: Any) -> Any:
    """The same nest with tensors in place of arrays, which `torch.load(weights_only=True)` does not read."""
    if isinstance(nest, dict):
        return {key: without_arrays(value) for key, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(map(without_arrays, nest))
    return torch.from_numpy(nest.astype(np.int64)) if isinstance(nest, np.ndarray) else nest


def flip_bit(weight: Tensor) -> None:
    """Changes a bit of the first value, in the middle of its fraction, as a machine may whose training is not
    deterministic. The lowest bit may come back by the rounding of later steps, on one processor and not on another."""
    with torch.no_grad():
        weight.view(torch.int32).view(-1)[0] ^= 1 << 12


def emit_event(event: str, **fields: Any) -> None:
    """Prints an event as a line of JSON for the process that started this one."""
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    train(parse_arguments())
