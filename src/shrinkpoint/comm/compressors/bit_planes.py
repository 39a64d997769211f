"""Packing of codes of 1 to 8 bits as planes of 4, 2 and 1 bits, without strided access.

Codes are padded with zeros to tiles of 64. The planes lie one after another, from the low bits up: 7 bits are a plane
of 4, one of 2 and one of 1; 8 bits are one plane of bytes. A plane of p bits has 8 p bytes of each tile: byte j holds
the codes j, j + 8 p, j + 16 p, ... of the tile, from its low bits up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shrinkpoint import _native

TILE = 64


def plane_widths(bits: int) -> tuple[int, ...]:
    """The bits of each plane that codes of `bits` bits are split into, from the low bits up."""
    return (8,) if bits == 8 else tuple(width for width in (4, 2, 1) if bits & width)


def packed_bytes(count: int, bits: int) -> int:
    """The size in bytes of `count` packed codes."""
    return -(-count // TILE) * (TILE // 8) * bits


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes as planes.

    Args:
        codes: uint8, 1-d, each below 2^bits.
        bits: 1 to 8.

    Returns:
        uint8, 1-d, of `packed_bytes(codes.numel(), bits)` bytes.
    """
    if codes.device.type != "cpu":
        return _pack_planes_torch(codes, bits)
    out = torch.empty(packed_bytes(codes.numel(), bits), dtype=torch.uint8, device="cpu")
    _native.pack_planes(codes.contiguous().numpy(), bits, out.numpy())
    return out


def unpack_planes(data: Tensor, count: int, bits: int) -> Tensor:
    """Unpack the first `count` codes of what `pack_planes` returned: uint8, 1-d."""
    if data.device.type != "cpu":
        return _unpack_planes_torch(data, count, bits)
    out = torch.empty(count, dtype=torch.uint8, device="cpu")
    _native.unpack_planes(data.contiguous().numpy(), bits, out.numpy())
    return out


def _pack_planes_torch(codes: Tensor, bits: int) -> Tensor:
    missing = -codes.numel() % TILE
    if missing:
        codes = torch.cat([codes, codes.new_zeros(missing)])
    planes, shift = [], 0
    for width in plane_widths(bits):
        planes.append(_codes_to_plane(codes >> shift, width))
        shift += width
    return torch.cat(planes)


def _unpack_planes_torch(data: Tensor, count: int, bits: int) -> Tensor:
    tiles = -(-count // TILE)
    out = data.new_zeros(tiles * TILE)
    start = shift = 0
    for width in plane_widths(bits):
        end = start + tiles * TILE // 8 * width
        out |= _plane_to_codes(data[start:end], width) << shift
        start, shift = end, shift + width
    return out[:count]


def _codes_to_plane(codes: Tensor, width: int) -> Tensor:
    if width == 8:
        return codes
    parts = (codes & ((1 << width) - 1)).view(-1, 8 // width, 8 * width)
    out = parts[:, 0].clone()
    for i in range(1, 8 // width):
        out |= parts[:, i] << (width * i)
    return out.view(-1)


def _plane_to_codes(plane: Tensor, width: int) -> Tensor:
    if width == 8:
        return plane
    whole = plane.view(-1, 8 * width)
    parts = [whole >> (width * i) & ((1 << width) - 1) for i in range(8 // width)]
    return torch.stack(parts, 1).view(-1)
