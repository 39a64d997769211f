"""The compressor interface, and the compressors that quantize nothing: `Identity` and `Cast`.

A tensor becomes a message whose size is known before it is sent, and a message a tensor again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.layout import DTYPE_BY_NAME, fill_tensor, is_known_finite, view_dtype
from shrinkpoint.errors import MismatchError


@dataclass(frozen=True)
class SharedSteps:
    """Steps that both ends compute for the values of a message: `factor` times `roots`."""

    roots: Tensor = field(repr=False)  # one for each value: float32, 1-d, contiguous, on the CPU, finite and positive
    factor: float  # of all roots; positive
    digest: int  # 32 bits of a digest of roots and factor. Both ends compare the digests.


@dataclass(frozen=True)
class CompressorContext:
    """The facts about a message that both ends know besides its compressor.

    Attributes:
        key: different for all messages of a link, below 2^32; the seed of noise and of random indices.
        indices: flat indices that an earlier message of the other direction carried; int64, 1-d, ascending.
        steps: for `StepCodes`.
    """

    key: int = 0
    indices: Tensor | None = field(default=None, repr=False, compare=False)
    steps: SharedSteps | None = field(default=None, repr=False, compare=False)


NO_CONTEXT = CompressorContext()


class Compressor(ABC):
    """Encodes a tensor as a message and decodes it. Subclasses are frozen dataclasses: equal settings compare equal.

    A message is a 1-d uint8 tensor on the device of the encoded tensor. Its size follows from the shape, the dtype and
    the context alone, so that a receiver can post its buffer before anything was sent. Arithmetic is float32, each
    operation rounded once, whatever the dtype: native code, torch operations and kernels give the same bits.

    A value that is not finite is never hidden: the group, block or sample that it belongs to decodes to nan or inf.
    """

    @property
    def has_kernels(self) -> bool:
        """True if `encode_rows` and `decode_rows` have kernels for some device."""
        return False

    @property
    @abstractmethod
    def spec(self) -> str:
        """The compressor as text, which `shrinkpoint.comm.parse` reads back."""

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        """The size in bytes of the message of a tensor of this shape and dtype."""

    @abstractmethod
    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        """Encode a tensor: floating point, of any shape and strides; it is not changed.

        Returns:
            The message: uint8, 1-d, contiguous, of `wire_bytes(tensor.shape, tensor.dtype, context)` bytes, on the
            device of the tensor.
        """

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        """Decode a message into `out`, of the shape and dtype of the encoded tensor and of any strides; return it.

        Raises:
            MismatchError: the message does not have the size that `out` requires.
        """

    def encode_rows(
        self, rows: Sequence[Tensor], contexts: Sequence[CompressorContext], nonfinite: Tensor | None = None
    ) -> Tensor | None:
        """Encode tensors of one shape and dtype in a few launches, whatever their number, if their device has kernels.

        Args:
            nonfinite: int64 without axes, on the device; the number of values that are not finite is added to it.

        Returns:
            The messages, padded with zeros to multiples of 16 bytes: uint8, shape (rows, padded size). None if the
            rows must be encoded one by one.
        """
        return None

    def decode_rows(
        self, wires: Sequence[Tensor], outs: Sequence[Tensor], contexts: Sequence[CompressorContext]
    ) -> bool:
        """Decode messages of tensors of one shape and dtype in a few launches; False if nothing was decoded."""
        return False

    def proves_finite(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT
    ) -> bool:
        """True if a message on a CPU shows, at little cost, that all values of the tensor were finite."""
        return False

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor | None:
        """Return the flat indices that a message carries: int64, 1-d, ascending; None for all of them.

        Args:
            context: that of the message; random indices follow from its key.
        """
        return None

    def __str__(self) -> str:
        return self.spec

    def check_message(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        """Return the message, contiguous, if `out` can be filled from it.

        Raises:
            MismatchError: it has another dtype or size.
        """
        size = self.wire_bytes(out.shape, out.dtype, context)
        check_wire_size(
            f"compressor {self.spec}", wire, out, size, "give both ends the same compressor, shape and dtype"
        )
        return wire.contiguous()


def check_wire_size(where: str, wire: Tensor, out: Tensor, size: int, advice: str) -> None:
    """Raise a MismatchError if a message for `out` is not uint8, 1-d, of `size` bytes."""
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != size:
        problem, expected = f"a message of {wire.numel()} x {wire.dtype}", f"{size} bytes for {tuple(out.shape)}"
        raise MismatchError(where, found=problem, expected=expected, do=advice)


def check_compressor(where: str, compressor: object) -> None:
    """Raise a PolicyError if an argument is not a compressor, but its spec, for example."""
    advice = f"write comm.parse({compressor!r})" if isinstance(compressor, str) else "make one: Uniform(4, group=64)"
    validate.check_instance(f"{where}, compressor", compressor, Compressor, expected="a compressor", do=advice)


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends the bytes of the tensor in row-major order: lossless, down to the payload of a nan."""

    @property
    def spec(self) -> str:
        return "exact"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return math.prod(shape) * dtype.itemsize

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        values = view_dtype(self.check_message(wire, out, context), out.dtype)
        out.detach().copy_(values.view(out.shape))
        return out


@dataclass(frozen=True)
class Cast(Compressor):
    """Rounds each value to the nearest one of another dtype: infinite in "fp16" from 65520 on.

    Raises:
        PolicyError: another dtype was named.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        validate.check_choice("dtype", self.dtype, ("bf16", "fp16"))

    @property
    def spec(self) -> str:
        return self.dtype

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return 2 * math.prod(shape)

    def encode(self, tensor: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        narrow = tensor.detach().to(DTYPE_BY_NAME[self.dtype], copy=True, memory_format=torch.contiguous_format)
        return narrow.view(-1).view(torch.uint8)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        values = view_dtype(self.check_message(wire, out, context), DTYPE_BY_NAME[self.dtype])
        if out.dtype in (values.dtype, torch.float32, torch.float64):
            out.detach().copy_(values.view(out.shape))
            return out
        return fill_tensor(out, values.to(torch.float32))

    def proves_finite(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT
    ) -> bool:
        return is_known_finite(view_dtype(wire, DTYPE_BY_NAME[self.dtype]))
