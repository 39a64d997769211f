"""A small language model in two processes, with compressed activations and gradients between them.

    torchrun --nproc-per-node 2 examples/pipeline.py

The text is the source of Python's own standard library. It takes some seconds on two cores.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shrinkpoint.comm import compress_pipeline

STEPS, BATCH, MICRO_BATCHES, CONTEXT, WIDTH, STAGES = 60, 16, 4, 64, 128, 2
CPU = torch.device("cpu")


class Block(nn.Module):
    """Attention to what came before, and a layer of its own for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.queries(self.before(x)).chunk(3, 2)]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.feed(self.after(x))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.bytes(x) + self.positions.weight


def text() -> Tensor:
    """The first files of the standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("gloo")
    rank, data = dist.get_rank(), text()
    torch.manual_seed(rank)
    first, last = (
        nn.Sequential(Embedding(), Block()),
        nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)),
    )
    module = (first, last)[rank]
    schedule = Schedule1F1B(PipelineStage(module, rank, STAGES, CPU), MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)

    wire = compress_pipeline(schedule, forward="q4:64", backward="q4:64")  # all there is to it

    batches = torch.Generator().manual_seed(7)  # the same batches in both processes
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1), generator=batches)
        rows = data[starts + torch.arange(CONTEXT + 1)]
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(rows[:, :-1])
        else:
            schedule.step(target=rows[:, 1:], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and step % 20 == 0:
            print(f"step {step:3}: loss {torch.stack(losses).mean().item():.3f} nats a byte", flush=True)
    dist.barrier()
    for name, ledger in wire.link_stats().items() if rank == 0 else ():
        print(
            f"link {name:10}: {ledger.raw_bytes:,} bytes became {ledger.wire_bytes:,}, {ledger.ratio:.1f} times fewer"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
