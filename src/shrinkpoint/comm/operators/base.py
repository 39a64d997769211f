"""What every operator is: a tensor as a message of a size known before it is sent, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint import arguments
from shrinkpoint.errors import MismatchError


@dataclass(frozen=True)
class Context:
    """What both ends know of a message besides its operator.

    Attributes:
        key: no two messages of a link share it; noise and random places follow from it. Below 2^32.
        places: flat positions that an earlier message of the other direction carried; int64, 1-d, ascending.
    """

    key: int = 0
    places: Tensor | None = field(default=None, repr=False, compare=False)


PLAIN = Context()


class Operator(ABC):
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
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, context: Context = PLAIN) -> int:
        """The size of the message of a tensor of this shape."""

    @abstractmethod
    def encode(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        """The message.

        Args:
            x: floating point, of any shape and strides; it is not changed.

        Returns:
            uint8, 1-d, contiguous, `wire_bytes(x.shape, x.dtype, context)` of them, on x's device.
        """

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
        """Fill `out`, of the shape and dtype of what was encoded and of any strides, and return it.

        Raises:
            MismatchError: the message has not the size that `out` asks for.
        """

    def places(self, wire: Tensor, shape: Sequence[int], context: Context = PLAIN) -> Tensor | None:
        """Which flat positions a message carries; int64, ascending. None: all of them.

        Args:
            context: the message's; random places follow from its key.
        """
        return None

    def __str__(self) -> str:
        return self.spec

    def checked(self, wire: Tensor, out: Tensor, context: Context = PLAIN) -> Tensor:
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


def check_operator(where: str, operator: object) -> None:
    """Refuse what is no operator, such as its spec.

    Raises:
        PolicyError: it is none.
    """
    do = f"write comm.parse({operator!r})" if isinstance(operator, str) else "make one: Uniform(4, group=64)"
    arguments.kind(f"{where}, operator", operator, Operator, expected="an operator", do=do)
