"""How the bits of a dtype are laid out, as far as coding cares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """One number of a tensor: a complex value is two, a pair of 4-bit floats is one.

    Attributes:
        width: bits.
        mantissa: explicit mantissa bits of a float whose exponent is coded; 0 for everything else.
    """

    width: int
    mantissa: int = 0

    @property
    def bytes(self) -> int:
        return self.width // 8

    @property
    def is_float(self) -> bool:
        return self.mantissa > 0

    @property
    def has_float_exponent(self) -> bool:
        """Whether its exponent is that of a 32-bit float, so that the two can be compared."""
        return self.width - self.mantissa == 9


_BYTE = Number(8)
NUMBERS: dict[str, Number] = {
    "F64": Number(64, 52), "F32": Number(32, 23), "F16": Number(16, 10), "BF16": Number(16, 7),
    "C128": Number(64, 52), "C64": Number(32, 23), "C32": Number(16, 10),
    "I64": Number(64), "U64": Number(64), "I32": Number(32), "U32": Number(32), "I16": Number(16), "U16": Number(16),
    "I8": _BYTE, "U8": _BYTE, "BOOL": _BYTE, "F4_X2": _BYTE,
    "F8_E4M3": _BYTE, "F8_E5M2": _BYTE, "F8_E4M3FNUZ": _BYTE, "F8_E5M2FNUZ": _BYTE, "F8_E8M0": _BYTE,
}  # fmt: skip
"""The numbers of every dtype in `record.ITEMSIZE`."""
