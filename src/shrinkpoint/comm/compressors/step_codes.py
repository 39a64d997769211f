"""The compressor that rounds values to multiples of steps which both ends know, and entropy-codes the multiples."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import _native
from shrinkpoint.codec.coder import BYTE_FORMAT, Bytes, CoderConfig, CodingContext
from shrinkpoint.comm.compressors.base import NO_CONTEXT, Compressor, CompressorContext, SharedSteps
from shrinkpoint.comm.compressors.layout import fill_tensor, flat_float32
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes

SMALLEST_ROOT = 2.0**-126  # The root of a value of which nothing is known. It is 0, or sent in float32.
MAX_LEVEL = 8.0  # The magnitude that larger codes count as in the mean of a message
_HEADER = struct.Struct("<IIIIIf")
_MAGIC = 0x76530000  # The upper half of the first field of a header
_IS_RAW, _IS_NOT_FINITE = 1, 2  # Bits of the lower half of that field
_ESCAPE = 127  # The magnitude of the code of a value that is sent in float32. Codes are from -126 to 126.
_OFFSET = 128  # Added to a code to make a byte of it, by `_native.step_round`
_MIN_NUMEL_PER_ESCAPE = 8  # With more escapes than one in this number of values, all values are sent in float32
_NO_PLACES = torch.empty(0, dtype=torch.int64, device="cpu")
_CODER = CoderConfig("codes")


@dataclass(frozen=True)
class StepCodes(Compressor):
    """Rounds each value to the nearest multiple of a step that both ends compute, so that no scales are sent.

    A message is a header, the multiples as bytes in rANS, and the values that are more than 126 steps from 0, or not
    finite, in float32. Where many values are, all are in float32. So the size of a message depends on the values;
    `wire_bytes` is the largest one.
    """

    step: float  # relative to the root of the second moment; for the spec alone

    @property
    def spec(self) -> str:
        return f"v{self.step:.12g}"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        """The largest size in bytes of the message of a tensor of this shape."""
        return _HEADER.size + 4 * math.prod(shape)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        """Encode a tensor as a message of at most `wire_bytes`; `context` has the steps."""
        steps, values = self._steps(tensor, context), flat_float32(tensor)
        symbols, roots = np.empty(len(values), np.uint8), tensor_bytes(steps.roots)
        magnitudes, num_outside = _native.step_round(
            tensor_bytes(values), roots, inverse=1 / steps.factor, codes=symbols
        )
        total, outside = float(magnitudes), _outside(symbols) if num_outside else _NO_PLACES
        if len(outside):  # without values of which nothing was known
            total -= MAX_LEVEL * int((steps.roots[outside] == SMALLEST_ROOT).sum())
        level, message = min(max(total / max(1, len(values)), 0.0), MAX_LEVEL), None
        if len(outside) * _MIN_NUMEL_PER_ESCAPE <= len(values):
            side, coded = _CODER.encode(BYTE_FORMAT, symbols, CodingContext(), 1)
            message = _Message(steps.digest, level, values[outside], side, coded)
        if message is None or message.size > self.wire_bytes(values.shape, values.dtype):
            message = _Message(steps.digest, level, values)
        return message.to_wire()

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        """Decode a message, behind which there may be more bytes, into `out`.

        Raises:
            MismatchError: the message is damaged, or of other steps.
        """
        steps = self._steps(out, context)
        message = _Message.from_wire(wire, out.numel())
        if message.digest != steps.digest:
            problem, expected = "a gradient in steps of another second moment", "the same steps on all ranks"
            advice = "load the same states of optimizer and gradients on all ranks, and change none on one rank alone"
            raise MismatchError("second moments", found=problem, expected=expected, do=advice)
        is_plain = out.dtype == torch.float32 and out.is_contiguous()
        values = out.detach().view(-1) if is_plain else torch.empty(out.numel(), dtype=torch.float32, device="cpu")
        message.decode(steps, values)
        return out if is_plain else fill_tensor(out, values)

    def proves_finite(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT
    ) -> bool:
        return is_finite(wire)

    def _steps(self, tensor: Tensor, context: CompressorContext) -> SharedSteps:
        steps = context.steps
        if steps is None or steps.roots.numel() != tensor.numel() or tensor.device.type != "cpu":
            found = "no steps" if steps is None else f"{steps.roots.numel()} steps for {tensor.numel()} values"
            advice = 'use compress_ddp(model, "v0.7", optimizer=optimizer), on a CPU'
            raise PolicyError(f"compressor {self.spec}", found=found, expected="a step for each value", do=advice)
        return steps


def message_level(wire: Tensor) -> float:
    """The mean magnitude of all codes of a message, of which larger ones count as 8, and those of no step as 0.

    Raises:
        MismatchError: the message is damaged.
    """
    level = _read_header(wire)[-1]
    if not 0 <= level <= MAX_LEVEL:
        raise _damaged(f"a mean code of {level}")
    return level


def is_finite(wire: Tensor) -> bool:
    """True if a message says that all its values are finite."""
    return not _read_header(wire)[0] & _IS_NOT_FINITE


def _outside(symbols: Bytes) -> Tensor:
    """The places of the values that are sent in float32."""
    return torch.from_numpy(np.flatnonzero((symbols == _OFFSET - _ESCAPE) | (symbols == _OFFSET + _ESCAPE)))


def _read_header(wire: Tensor) -> tuple[int, int, int, int, int, float]:
    """Flags, digest, size of the side data, of the codes, number of values in float32, and level."""
    data = tensor_bytes(wire)[: _HEADER.size]
    if data.nbytes < _HEADER.size:
        raise _damaged(f"{data.nbytes} bytes")
    flags, *others = _HEADER.unpack(data.tobytes())
    if flags & ~(_IS_RAW | _IS_NOT_FINITE) != _MAGIC:
        raise _damaged("bytes that no sender writes")
    return flags & 0xFFFF, *others


def _damaged(problem: str) -> MismatchError:
    expected, advice = "a message of codes", "compress with the same spec on all ranks, and check the network"
    return MismatchError("compressor v, message", found=problem, expected=expected, do=advice)


@dataclass(frozen=True)
class _Message:
    """A message in parts."""

    digest: int  # of the steps
    level: float  # the mean magnitude of codes
    outside: Tensor  # the values that are sent in float32, in their order
    # `side`, `coded`: the codes; None if all values are sent in float32.
    side: Bytes | None = None
    coded: Bytes | None = None

    @property
    def size(self) -> int:
        return _HEADER.size + sum(part.nbytes for part in (self.outside, self.side, self.coded) if part is not None)

    def to_wire(self) -> Tensor:
        is_finite = bool(self.outside.isfinite().all())
        flags = _MAGIC | _IS_RAW * (self.side is None) | _IS_NOT_FINITE * (not is_finite)
        side, coded = (np.empty(0, np.uint8) if part is None else part for part in (self.side, self.coded))
        header = _HEADER.pack(flags, self.digest, side.nbytes, coded.nbytes, len(self.outside), self.level)
        parts = np.frombuffer(header, np.uint8), tensor_bytes(self.outside.contiguous()), side, coded
        return torch.from_numpy(np.concatenate(parts))

    @staticmethod
    def from_wire(wire: Tensor, numel: int) -> _Message:
        """Read the parts of a message of so many values; a MismatchError if they cannot be such."""
        flags, digest, side_bytes, coded_bytes, num_outside, level = _read_header(wire)
        is_raw = bool(flags & _IS_RAW)
        ends = np.cumsum([_HEADER.size, 4 * num_outside, side_bytes, coded_bytes])
        data = tensor_bytes(wire.contiguous())
        if ends[-1] > data.nbytes or num_outside > numel or (is_raw and num_outside != numel):
            raise _damaged(f"{data.nbytes} bytes with {num_outside} of {numel} values in float32")
        outside = torch.from_numpy(np.frombuffer(bytearray(data[ends[0] : ends[1]]), np.float32))
        codes = () if is_raw else (data[ends[1] : ends[2]], data[ends[2] : ends[3]])
        return _Message(digest, level, outside, *codes)

    def decode(self, steps: SharedSteps, values: Tensor) -> None:
        """Fill a tensor, float32, 1-d and contiguous, with the values."""
        if self.side is None or self.coded is None:
            values.copy_(self.outside)
            return
        symbols = np.empty(values.numel(), np.uint8)
        try:
            _CODER.decode(BYTE_FORMAT, self.side, self.coded, symbols, CodingContext(), 1)
        except (_native.Corrupt, _native.Truncated, ValueError) as error:
            raise _damaged(f"codes that cannot be decoded ({error})") from error
        places = _outside(symbols) if len(self.outside) else _NO_PLACES
        if len(places) != len(self.outside):
            raise _damaged(f"{len(self.outside)} values for {len(places)} places")
        _native.step_multiply(symbols, tensor_bytes(steps.roots), factor=steps.factor, values=tensor_bytes(values))
        if len(places):
            values[places] = self.outside
