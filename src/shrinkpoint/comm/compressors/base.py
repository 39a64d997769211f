"""The compressor interface: a tensor becomes a message whose size is known before it is sent, and back.

`Identity` is the compressor that loses nothing."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressors.layout import view_dtype
from shrinkpoint.errors import MismatchError


@dataclass(frozen=True)
class CompressorContext:
    """What both ends know of a message besides its operator.

    Attributes:
        key: no two messages of a link share it; noise and random places follow from it. Below 2^32.
        indices: flat positions that an earlier message of the other direction carried; int64, 1-d, ascending.
    """

    key: int = 0
    indices: Tensor | None = field(default=None, repr=False, compare=False)


NO_CONTEXT = CompressorContext()


class Compressor(ABC):
    """How one tensor crosses a wire. Subclasses are frozen dataclasses: equal settings are equal operators.

    A message is a 1-d uint8 tensor on the device of what it was made from. Its size follows from the shape, the dtype
    and the context alone, so that a receiver can post its buffer before anything was sent. Arithmetic is float32, each
    operation rounded once, whatever the dtype: native code on a CPU and torch operations elsewhere give the same bits.

    A value that is not finite is never lost: what a message says of its surroundings then is nan or infinite too.
    """

    @property
    @abstractmethod
    def spec(self) -> str:
        """The operator as a word; `shrinkpoint.comm.parse` reads it back."""

    @abstractmethod
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        """The size of the message of a tensor of this shape."""

    @abstractmethod
    def encode(self, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        """The message.

        Args:
            x: floating point, of any shape and strides; it is not changed.

        Returns:
            uint8, 1-d, contiguous, `wire_bytes(x.shape, x.dtype, context)` of them, on x's device.
        """

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        """Fill `out`, of the shape and dtype of what was encoded and of any strides, and return it.

        Raises:
            MismatchError: the message has not the size that `out` asks for.
        """

    def indices(self, wire: Tensor, shape: Sequence[int], context: CompressorContext = NO_CONTEXT) -> Tensor | None:
        """Which flat positions a message carries; int64, ascending. None: all of them.

        Args:
            context: the message's; random places follow from its key.
        """
        return None

    def __str__(self) -> str:
        return self.spec

    def check_message(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        """The message, if it is one that `out` can be filled from.

        Raises:
            MismatchError: it is not.
        """
        size = self.wire_bytes(out.shape, out.dtype, context)
        if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != size:
            found, expected = f"a message of {wire.numel()} x {wire.dtype}", f"{size} bytes for {tuple(out.shape)}"
            do = "give both ends the same operator, shape and dtype"
            raise MismatchError(f"operator {self.spec}", found=found, expected=expected, do=do)
        return wire.contiguous()


def check_compressor(where: str, compressor: object) -> None:
    """Refuse what is no operator, such as its spec.

    Raises:
        PolicyError: it is none.
    """
    do = f"write comm.parse({compressor!r})" if isinstance(compressor, str) else "make one: Uniform(4, group=64)"
    validate.check_instance(f"{where}, operator", compressor, Compressor, expected="an operator", do=do)


@dataclass(frozen=True)
class Identity(Compressor):
    """The tensor's own bytes, in row-major order: nothing is lost, not even the payload of a nan."""

    @property
    def spec(self) -> str:
        return "exact"

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: CompressorContext = NO_CONTEXT) -> int:
        return math.prod(shape) * dtype.itemsize

    def encode(self, x: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)

    def decode(self, wire: Tensor, out: Tensor, context: CompressorContext = NO_CONTEXT) -> Tensor:
        values = view_dtype(self.check_message(wire, out, context), out.dtype)
        out.detach().copy_(values.view(out.shape))
        return out
