"""A training loop that survives kill -9: run it again, and it goes on from its newest checkpoint.

    python examples/plain_loop.py       # kill it at any moment, and run it again
    shrinkpoint report runs/plain       # ... and look at what was saved

It learns to guess the next byte of Python's own standard library, in some seconds. A checkpoint may raise the loss by
at most 1%, which is measured before it is written; without `scheme=` nothing is lost.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.train import AnySavePolicy, FixedIntervalPolicy, PreemptionCheckpointingPolicy

STEPS, SAVE_EVERY, BATCH, CONTEXT, WIDTH = 600, 20, 256, 16, 256


def read_text() -> Tensor:
    """The first files of the standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def draw(text: Tensor, seed: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """A batch that depends on its seed alone, so that a run that resumes sees the data it would have seen."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=torch.Generator().manual_seed(seed))
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, -1]


def main() -> None:
    torch.manual_seed(0)
    text = read_text()
    train_text, held_out = text[: -len(text) // 10], draw(text[-len(text) // 10 :], seed=0, size=8192)
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def evaluate(model: nn.Module) -> Tensor:
        """The loss of each held-out example; the same for the same weights."""
        return nn.functional.cross_entropy(model(held_out[0]), held_out[1], reduction="none")

    manager = sp.CheckpointManager(
        "runs/plain",
        scheme=sp.Fisher(budget="1%", evaluate=evaluate),
        keep=sp.Keep(last=2, every=100),
        save_decision_policy=AnySavePolicy([FixedIntervalPolicy(SAVE_EVERY), PreemptionCheckpointingPolicy()]),
    )
    with manager:
        restored = manager.restore(model=model, optimizer=optimizer)
        first = 1 if restored is None else restored.step + 1
        print("starts" if restored is None else f"resumes after step {restored.step}", flush=True)
        for step in range(first, STEPS + 1):
            inputs, targets = draw(train_text, seed=step)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if manager.should_save(step):
                report = manager.save(step, model=model, optimizer=optimizer, metrics={"loss": loss.item()})
                assert report is not None  # as it is in processes that do not write
                rise = report.loss_increase
                print(f"step {step}: loss {loss:.3f}, {report.ratio:.0f}x smaller, rise {rise:+.2%}", flush=True)
            if manager.reached_preemption:  # SIGTERM: what Slurm, Kubernetes and clouds send before they end a job
                print(f"told to end, saved step {step}")
                return


if __name__ == "__main__":
    main()
