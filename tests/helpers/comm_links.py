"""Two ends of a link, and batches that cross it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.comm import Compressor, ErrorFeedback, Link, MessageContext

STATELESS = [
    "exact",
    "bf16",
    "fp16",
    "q4",
    "q3:64",
    "q8:row",
    "q4:channel",
    "q2:16:dither",
    "n3:64",
    "block4:32",
    "h64(q4:64)",
    "h16>5(q4:64)",
    "top10",
    "top10:bf16",
    "top10:tensor:q4:64",
    "top10:16:q4:64",
    "rand10",
    "rand10:scaled:seed7:bf16",
]
STATEFUL = [
    "ef(top10)",
    "ef(q2:64)",
    "ef(top10, decay=0.95)",
    "efmixed(top10)",
    "efmixed(rand20, share=0.25)",
    "ef21(top10)",
    "ef21(q2:16:dither)",
    "aq(q2:64)",
    "aq(top10, warmup=3, dtype=bf16)",
    "aq(q2:64, warmup=0)",
    "aq(q2:64:dither, dtype=fp32, most_bytes=2000)",
]


def ends(compressor: Compressor | ErrorFeedback | str, **options: Any) -> tuple[Link, Link]:
    return Link(compressor, **options), Link(compressor, **options)


def cross(sender: Link, receiver: Link, x: Tensor, context: MessageContext | None = None) -> Tensor:
    """What comes out; the receiver is told the ids by the message alone."""
    context = context or MessageContext()
    size = receiver.wire_bytes(x.shape, x.dtype, context)
    wire = sender.pack(x, context)
    assert wire.dtype == torch.uint8 and wire.shape == (size,) and wire.is_contiguous() and wire.device == x.device
    return receiver.unpack(
        wire,
        torch.empty_like(x),
        MessageContext(context.slot, context.tensor, context.training, indices=context.indices),
    )


def batches(
    count: int,
    *,
    seed: int = 0,
    rows: int = 6,
    columns: int = 23,
    samples: int = 20,
    slots: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Iterator[tuple[Tensor, MessageContext]]:
    """Samples that come back a little changed; the last batch of every few has fewer rows, as many as chance wants."""
    noise = torch.Generator().manual_seed(seed)
    sample_rows = torch.randn(samples, columns, generator=noise)
    for index in range(count):
        size = rows if index % 5 < 4 else int(torch.randint(1, rows + 1, (), generator=noise))
        ids = torch.randperm(samples, generator=noise)[:size]
        x = sample_rows[ids] + 0.05 * torch.randn(size, columns, generator=noise)
        yield x.to(device, dtype), MessageContext(slot=index % slots, ids=ids)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; nan is nan."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    )
