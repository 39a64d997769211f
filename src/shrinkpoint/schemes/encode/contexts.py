"""Maps each tensor to the moments used as its coding context."""

from __future__ import annotations

from collections.abc import Collection

from shrinkpoint.codec.pack import is_codable_float
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import OptimizerInfo, Role, TensorInfo


class ContextMap:
    """Maps each tensor to its moments and to what is known about its optimizer.

    Args:
        state: the state to be encoded.
        excluded: names of tensors that are decoded after all coded ones, so that they cannot be context.
    """

    def __init__(self, state: FlatState, excluded: Collection[str]) -> None:
        self._state = state
        self._excluded = excluded
        self._info_by_moment2 = {
            optimizer.moment2: optimizer for optimizer in state.optimizer_info.values() if optimizer.moment2 is not None
        }

    def optimizer_info(self, info: TensorInfo) -> OptimizerInfo | None:
        """Return what is known about the optimizer of a parameter, or of the parameter of a second moment."""
        if info.role is Role.MOMENT2:
            return self._info_by_moment2.get(info.name)
        return self._state.optimizer_info.get(info.name)

    def moments(self, info: TensorInfo) -> tuple[str, str] | None:
        """Return the names of the two moments that are context for a tensor, or None.

        For a parameter these are its first and second moment; for a second moment, the first moment twice.
        """
        optimizer = self.optimizer_info(info)
        if optimizer is None or optimizer.moment1 is None:
            return None
        second = optimizer.moment1 if info.role is Role.MOMENT2 else optimizer.moment2
        if second is None or not all(self._is_valid_context(name, info) for name in (optimizer.moment1, second)):
            return None
        return optimizer.moment1, second

    def _is_valid_context(self, name: str, info: TensorInfo) -> bool:
        """Whether a tensor can be context for another one: a moment of equal shape that is decoded first."""
        moment = self._state.infos.get(name)
        if moment is None or name in self._excluded or name == info.name or moment.shape != info.shape:
            return False
        is_earlier = moment.role in (Role.MOMENT1, Role.MOMENT2) and moment.role is not info.role
        # Only 32-bit floats are predicted, from 32-bit moments: rounding 64-bit ones depends on the machine's settings.
        is_exact = moment.dtype != "F64" or info.dtype == "F64"
        return is_earlier and is_exact and is_codable_float(self._state.tensors[name])
