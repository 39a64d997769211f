"""The layout of messages with one scale or exponent for each group, and the grid of the kernels that code them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shrinkpoint.device.launch import BLOCK
from shrinkpoint.device.rows import Rows


@dataclass(frozen=True)
class GroupWire:
    """The layout of a message: heads of groups, then bit planes of codes."""

    numel: int  # The number of values
    group: int  # The number of values of a group: a power of two, 16 to 4096
    bits: int  # Of a code
    head_bytes: int  # Of a group
    centers: tuple[float, ...] = ()  # Magnitudes that codes of `NormalFloat` decode to, exact in float32

    @property
    def groups(self) -> int:
        return -(-self.numel // self.group)

    @property
    def size(self) -> int:
        return self.head_bytes * self.groups + -(-self.numel // 64) * 8 * self.bits

    @property
    def block(self) -> int:
        return max(self.group, BLOCK)

    def grid(self, rows: Rows) -> tuple[int, int]:
        return -(-self.numel // self.block), rows.count

    def options(self) -> dict[str, Any]:
        return {"BITS": self.bits, "LOG_GROUP": self.group.bit_length() - 1, "BLOCK": self.block}

    def decode_arguments(self, wires: Rows, outs: Rows) -> tuple[Tensor | int, ...]:
        return wires.first, outs.first, wires.stride, wires.hole, outs.stride, outs.hole, self.numel
