"""Short arrays inside a record (centers, protected values): coded where that gains, else as they are."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from shrinkpoint import _native
from shrinkpoint.codec.number import Number
from shrinkpoint.codec.run import Bytes, Known, Run

_SIZES = struct.Struct("<I")  # bytes of the side; the codes are the rest
_MARGIN = 8


def encode_inner(number: Number, values: Bytes, base: Bytes | None) -> tuple[Run | None, bytes]:
    """(run, bytes) of an array of floats; the run is None where the bytes are the values themselves.

    Args:
        base: as many numbers that the decoder holds and that the values are close to; None: there are none.
    """
    best: tuple[Run | None, bytes] = (None, values.tobytes())
    if values.nbytes:
        for run in _candidates(number, values, base):
            side, codes = run.encode(number, values, Known(base=base), 1)
            stored = _SIZES.pack(side.nbytes) + side.tobytes() + codes.tobytes()
            best = min(best, (run, stored), key=lambda pair: len(pair[1]))
    return best


def decode_inner(number: Number, run: Run | None, data: Bytes, out: Bytes, base: Bytes | None) -> None:
    """Fill `out`.

    Raises:
        ValueError, struct.error, _native.Corrupt, _native.Truncated: the bytes are at fault.
    """
    if run is None:
        if data.nbytes != out.nbytes:
            raise ValueError(f"{data.nbytes} bytes of an inner array that has {out.nbytes}")
        out[:] = data
        return
    (side,) = _SIZES.unpack(data[: _SIZES.size].tobytes())
    if run.needs_base and base is None:
        raise ValueError("an inner array needs a base and has none")
    if side > data.nbytes - _SIZES.size:
        raise _native.Truncated("an inner array ends too early")
    start = _SIZES.size
    run.decode(number, data[start : start + side], data[start + side :], out, Known(base=base), 1)


def _candidates(number: Number, values: Bytes, base: Bytes | None) -> Iterator[Run]:
    fine = min(2, number.mantissa)
    words = values.view(f"u{number.bytes}") & ((1 << (number.width - 1)) - 1)
    yield Run("level", fine=fine, bias=(int(words.max()) >> (number.mantissa - fine)) + _MARGIN - 126)
    if base is not None:
        top = int((base.view(f"u{number.bytes}") & ((1 << (number.width - 1)) - 1)).max()) >> number.mantissa
        yield Run("delta", predictor="base", top=top)
