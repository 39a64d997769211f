"""Error feedback with one buffer for each micro-batch slot and tensor: EF, EF21 and EF-mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.comm.compressors.base import Compressor, CompressorContext, check_compressor
from shrinkpoint.comm.feedback.base import (
    ErrorFeedback,
    FeedbackState,
    MessageInfo,
    PackedMessage,
    decode_float32,
    work_dtype,
    zero_nonfinite_,
)
from shrinkpoint.errors import MismatchError, PolicyError


class FeedbackBuffers:
    """Made when they are first needed, of zeros.

    Attributes:
        restarts: how many were made anew because the shape had changed.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def get(self, info: MessageInfo, like: Tensor) -> Tensor:
        """The buffer of a turn, to be changed in place; of the shape and on the device of `like`.

        A batch with fewer rows than the buffer has uses its first ones. Any other new shape begins a new buffer.
        """
        kept = self._buffers.get(info.key)
        if kept is None or not _shape_fits(kept.shape, like.shape):
            self.restarts += kept is not None
            kept = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        elif kept.device != like.device:
            kept = kept.to(like.device)
        self._buffers[info.key] = kept
        return kept[: like.shape[0]] if like.dim() else kept

    def state_dict(self) -> dict[str, Any]:
        return {f"{slot}.{tensor}": kept for (slot, tensor), kept in self._buffers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = {}
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                raise MismatchError(f"feedback, buffer {name}", found=repr(tensor)[:80], expected="a float32 tensor")
            slot, _, which = name.partition(".")
            kept[int(slot), int(which)] = tensor.detach().clone()
        self._buffers = kept

    def shared_tensors(self) -> list[Tensor]:
        return [self._buffers[key].cpu() for key in sorted(self._buffers)]


def _shape_fits(buffer_shape: torch.Size, shape: torch.Size) -> bool:
    if buffer_shape == shape:
        return True
    return len(buffer_shape) == len(shape) > 0 and buffer_shape[1:] == shape[1:] and buffer_shape[0] > shape[0]


@dataclass(frozen=True)
class EF(ErrorFeedback):
    """Error feedback (arXiv 1809.07599; arXiv 2401.07788, section on error feedback).

    Sent is `c = C(x + e)`, and then `e <- x + e - c`, c being what the other end holds after rounding to x's dtype.
    The sender alone remembers: e, one of each micro-batch slot, so what a sample lost goes to the next sample there.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        check_compressor("EF", self.compressor)

    @property
    def spec(self) -> str:
        return f"ef({self.compressor.spec})"

    def new_state(self) -> FeedbackState:
        return EFState(self.compressor)


class ResidualState(FeedbackState):
    """A sender keeps residuals, a receiver keeps nothing."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._residuals = FeedbackBuffers()

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return self._residuals.restarts

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self._residuals.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals.load_state_dict(state["residual"])


class EFState(ResidualState):
    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        return self._compressor.wire_bytes(shape, work_dtype(dtype), info.context)

    def pack(self, x: Tensor, info: MessageInfo) -> PackedMessage:
        residual = self._residuals.get(info, x)
        residual += x
        wire = self._compressor.encode(residual.to(work_dtype(x.dtype)), info.context)
        seen = decode_float32(self._compressor, wire, x, info.context).to(x.dtype)
        zero_nonfinite_(residual.sub_(seen))
        return PackedMessage(wire, seen)

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return out.copy_(decode_float32(self._compressor, wire, out, info.context))

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        return self._compressor.indices(wire, shape, info.context)


@dataclass(frozen=True)
class EF21(ErrorFeedback):
    """EF21 (arXiv 2106.05203): `g <- g + C(x - g)`; the other end uses g.

    Both ends remember g, one of each micro-batch slot, and compute it from decoded messages alone.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        check_compressor("EF21", self.compressor)

    @property
    def spec(self) -> str:
        return f"ef21({self.compressor.spec})"

    def new_state(self) -> FeedbackState:
        return EF21State(self.compressor)


class EF21State(FeedbackState):
    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._reference = FeedbackBuffers()

    @property
    def restarts(self) -> int:  # type: ignore[override]
        return self._reference.restarts

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        return self._compressor.wire_bytes(shape, work_dtype(dtype), info.context)

    def pack(self, x: Tensor, info: MessageInfo) -> PackedMessage:
        reference = self._reference.get(info, x)
        wire = self._compressor.encode((x.to(torch.float32) - reference).to(work_dtype(x.dtype)), info.context)
        return PackedMessage(wire, self._update_reference(reference, wire, x, info).to(x.dtype))

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return out.copy_(self._update_reference(self._reference.get(info, out), wire, out, info))

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        return self._compressor.indices(wire, shape, info.context)

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self._reference.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reference.load_state_dict(state["reference"])

    def shared_tensors(self) -> list[Tensor]:
        return self._reference.shared_tensors()

    def _update_reference(self, reference: Tensor, wire: Tensor, like: Tensor, info: MessageInfo) -> Tensor:
        made = decode_float32(self._compressor, wire, like, info.context).add_(reference)
        zero_nonfinite_(reference.copy_(made))
        return made


_RESIDUAL_KEY = 0x5BD1E995  # an odd number, so that the two halves of a message have different keys


@dataclass(frozen=True)
class EFMixed(ErrorFeedback):
    """Half of the entries from the tensor, half from what was lost (arXiv 2401.07788 names it and does not define it).

    Sent are `a = C1(x)` and `b = C2(e)`; the other end uses `a + b`, and then `e <- (x - a) + (e - b)`. C1 has `share`
    of the operator's entries and C2 the others, so that a message has about the size of a plain one, and old losses
    cannot crowd out what is large now. The sender alone remembers.

    Args:
        compressor: one that keeps a share of the entries: TopK or RandomK. For others no half of a message is defined.
        share: of the entries that the tensor itself gets, between 0 and 1.

    Raises:
        PolicyError: another operator, or a share out of range.
    """

    compressor: Compressor
    share: float = 0.5

    def __post_init__(self) -> None:
        check_compressor("EFMixed", self.compressor)
        if not isinstance(getattr(self.compressor, "share", None), float):
            expected, do = "an operator that keeps a share of the entries", 'use TopK or RandomK, or "ef(...)"'
            raise PolicyError("EFMixed", found=self.compressor.spec, expected=expected, do=do)
        if not 0 < self.share < 1:
            raise PolicyError("EFMixed, share", found=f"{self.share}", expected="a number between 0 and 1")

    @property
    def spec(self) -> str:
        options = "" if self.share == 0.5 else f", share={self.share!r}"
        return f"efmixed({self.compressor.spec}{options})"

    def new_state(self) -> FeedbackState:
        operator: Any = self.compressor
        whole, part = (
            Decimal(repr(one)) for one in (operator.share, self.share)
        )  # .2 x .75 is .15, and not a bit more
        fresh, old = float(whole * part), float(whole * (1 - part))
        return EFMixedState(replace(operator, share=fresh), replace(operator, share=old))


class EFMixedState(ResidualState):
    def __init__(self, compressor: Compressor, residual_compressor: Compressor) -> None:
        super().__init__(compressor)
        self._residual_compressor = residual_compressor

    def wire_bytes(self, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> int:
        old = self._residual_compressor.wire_bytes(shape, work_dtype(dtype), _residual_context(info.context))
        return self._compressor.wire_bytes(shape, work_dtype(dtype), info.context) + old

    def pack(self, x: Tensor, info: MessageInfo) -> PackedMessage:
        residual, kind = self._residuals.get(info, x), work_dtype(x.dtype)
        fresh = self._compressor.encode(x.to(kind), info.context)
        wire = torch.cat((fresh, self._residual_compressor.encode(residual.to(kind), _residual_context(info.context))))
        seen = self._decode_sum(wire, x, info).to(x.dtype)
        zero_nonfinite_(residual.add_(x).sub_(seen))
        return PackedMessage(wire, seen)

    def unpack(self, wire: Tensor, out: Tensor, info: MessageInfo) -> Tensor:
        return out.copy_(self._decode_sum(wire, out, info))

    def indices(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo) -> Tensor | None:
        fresh, old = self._split_message(wire, shape, dtype, info)
        ours = self._compressor.indices(fresh, shape, info.context)
        theirs = self._residual_compressor.indices(old, shape, _residual_context(info.context))
        return None if ours is None or theirs is None else torch.unique(torch.cat((ours, theirs)))

    def _decode_sum(self, wire: Tensor, like: Tensor, info: MessageInfo) -> Tensor:
        fresh, old = self._split_message(wire, like.shape, like.dtype, info)
        made = decode_float32(self._compressor, fresh, like, info.context)
        return made.add_(decode_float32(self._residual_compressor, old, like, _residual_context(info.context)))

    def _split_message(
        self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, info: MessageInfo
    ) -> tuple[Tensor, Tensor]:
        size = self._compressor.wire_bytes(shape, work_dtype(dtype), info.context)
        return wire[:size], wire[size:].clone()  # a message begins where its memory does: operators may view it


def _residual_context(context: CompressorContext) -> CompressorContext:
    return replace(context, key=(context.key + _RESIDUAL_KEY) & 0xFFFFFFFF)
