"""Maps each tensor to the moments used as its coding context."""

from __future__ import annotations

from collections.abc import Collection

from shrinkpoint.codec.pack import is_codable_float
from shrinkpoint.tensors.flat_state import FlatState, OptimizerInfo
from shrinkpoint.tensors.info import Role, TensorInfo


class ContextMap:
    """Moments and optimizer facts by tensor.

    Args:
        state: the state.
        excluded: tensors that a decoder gets only after all coded ones, so that they can be nobody's context.
    """

    def __init__(self, state: FlatState, excluded: Collection[str]) -> None:
        self._state = state
        self._excluded = excluded
        self._owners = {facts.moment2: facts for facts in state.optimizer_info.values() if facts.moment2 is not None}

    def optimizer_info(self, info: TensorInfo) -> OptimizerInfo | None:
        """What the optimizer knows about a parameter, or about the parameter of a second moment."""
        return self._owners.get(info.name) if info.role is Role.MOMENT2 else self._state.optimizer_info.get(info.name)

    def moments(self, info: TensorInfo) -> tuple[str, str] | None:
        """The moments that are context for a tensor: both for a parameter, the first one twice for a second moment."""
        facts = self.optimizer_info(info)
        if facts is None or facts.moment1 is None:
            return None
        second = facts.moment1 if info.role is Role.MOMENT2 else facts.moment2
        if (
            second is None
            or not self._is_valid_context(facts.moment1, info)
            or not self._is_valid_context(second, info)
        ):
            return None
        return facts.moment1, second

    def _is_valid_context(self, name: str, info: TensorInfo) -> bool:
        moment = self._state.infos.get(name)
        if moment is None or name in self._excluded or name == info.name or moment.shape != info.shape:
            return False
        earlier = moment.role in (Role.MOMENT1, Role.MOMENT2) and moment.role is not info.role
        # Only 32-bit floats are predicted, from 32-bit moments: rounding 64-bit ones depends on the machine's settings.
        exact = moment.dtype != "F64" or info.dtype == "F64"
        return earlier and exact and is_codable_float(self._state.tensors[name])
