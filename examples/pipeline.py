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
    """A layer that attends to what came before, which also tells it where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        y: Tensor = self.layer(x, mask, is_causal=True)
        return y


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
    if rank == 0:
        module = nn.Sequential(nn.Embedding(256, WIDTH), Block())
    else:
        module = nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
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
    for name, stats in wire.link_stats().items() if rank == 0 else ():
        print(f"link {name:10}: {stats.raw_bytes:,} bytes became {stats.wire_bytes:,}, {stats.ratio:.1f}x fewer")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
