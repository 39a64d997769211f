"""Compares kernels of `shrinkpoint.device` with native code, bit for bit: interpreted on a CPU, or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from helpers.strategies import bits
from torch import Tensor

import shrinkpoint.device
from shrinkpoint.comm import Compressor, CompressorContext, parse

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = (
    torch.nan,
    torch.inf,
    -torch.inf,
    -0.0,
    0.0,
    1e-45,
    -1e-40,
    3e38,
    -3e38,
    1e-38,
    2.0**-111,
    2.0**-126,
    65504.0,
)


@contextmanager
def kernels_on(*types: str) -> Iterator[None]:
    """Let kernels run on devices of these types alone."""
    before = shrinkpoint.device.DEVICE_TYPES
    shrinkpoint.device.DEVICE_TYPES = types
    try:
        yield
    finally:
        shrinkpoint.device.DEVICE_TYPES = before


def compressor_of(spec: str) -> Compressor:
    compressor = parse(spec)
    assert isinstance(compressor, Compressor)
    return compressor


def edge_values(numel: int, seed: int = 0) -> Tensor:
    """Stretches of 64 values: random at many magnitudes, constant, zeros, and each special value among others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values *= torch.exp2(torch.randint(-140, 100, (-(-numel // 64),), generator=generator).float()).repeat_interleave(
        64
    )[:numel]
    for index, start in enumerate(range(0, numel, 64)):
        kind, stretch = index % 19, values[start : start + 64]
        if kind < len(SPECIAL):
            stretch[(7 * index) % len(stretch)] = SPECIAL[kind]
        elif kind == 13:
            stretch.zero_()
        elif kind == 14:
            stretch.fill_(-0.0)
        elif kind == 15:
            stretch.fill_(0.1)
        elif kind == 16:
            stretch[len(stretch) // 2] = 1e4 * stretch.abs().max()
        elif kind == 17:
            stretch.normal_(generator=generator)
        elif kind == 18:  # a range whose step is just above a bfloat16
            stretch.zero_()[-1] = 1 + 2.0**-23
    return values


def some_rows(count: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Rows of edge values in one tensor, each row rotated by some stretches against the one before it."""
    values = edge_values(torch.Size(shape).numel(), seed)
    return list(torch.stack([values.roll(640 * row).view(shape) for row in range(count)]).to(dtype).unbind())


def check_rows(spec: str, rows: Sequence[Tensor], device: str = "cpu") -> None:
    """Assert that kernels encode and decode rows to the bits of native code, and count values that are not finite."""
    compressor = compressor_of(spec)
    contexts = [CompressorContext(key=(3 * row + 1) * 0x9E3779B1 & 0xFFFFFFFF) for row in range(len(rows))]
    with kernels_on():
        native = [compressor.encode(row, context) for row, context in zip(rows, contexts, strict=True)]
    there = [row.to(device) if device != "cpu" else row for row in rows]
    counter = torch.ones((), dtype=torch.int64, device=device)
    with kernels_on(device):
        wires = compressor.encode_rows(there, contexts, counter)
    assert wires is not None and wires.shape[1] % 16 == 0
    size = native[0].numel()
    for row, wire in enumerate(native):
        assert bits(wires[row, :size]) == bits(wire), f"{spec}: row {row} has another message"
    assert not wires[:, size:].any()
    assert int(counter) == 1 + sum(int(row.isfinite().logical_not().sum()) for row in rows)
    odd = [torch.cat([wire.new_zeros(1), wire])[1:] for wire in wires[:, :size]]  # at odd addresses
    check_decoding(compressor, [wires[:, :size].unbind(), odd][len(rows) % 2], native, rows, contexts, device)


def check_decoding(
    compressor: Compressor,
    wires: Sequence[Tensor],
    native: Sequence[Tensor],
    rows: Sequence[Tensor],
    contexts: Sequence[CompressorContext],
    device: str,
) -> None:
    outs = [torch.empty_like(row, device=device).fill_(7) for row in rows]
    with kernels_on(device):
        assert compressor.decode_rows(wires, outs, contexts)
    for row, out in enumerate(outs):
        with kernels_on():
            expected = compressor.decode(native[row], torch.empty_like(rows[row]), contexts[row])
        assert bits(out) == bits(expected), f"{compressor.spec}: row {row} decodes to other values"
