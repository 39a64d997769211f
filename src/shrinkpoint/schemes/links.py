"""Which tensors of a state tell something about which others."""

from __future__ import annotations

from collections.abc import Collection

from shrinkpoint.codec.arrange import has_floats
from shrinkpoint.record import Role, TensorInfo
from shrinkpoint.state import AdamFacts, FlatState


class Links:
    """Moments and optimizer facts by tensor.

    Args:
        flat: the state.
        late: tensors that a decoder gets only after all coded ones, so that they can be nobody's context.
    """

    def __init__(self, flat: FlatState, late: Collection[str]) -> None:
        self._flat = flat
        self._late = late
        self._owners = {facts.moment2: facts for facts in flat.optim.values() if facts.moment2 is not None}

    def facts(self, info: TensorInfo) -> AdamFacts | None:
        """What the optimizer knows about a parameter, or about the parameter of a second moment."""
        return self._owners.get(info.name) if info.role is Role.MOMENT2 else self._flat.optim.get(info.name)

    def moments(self, info: TensorInfo) -> tuple[str, str] | None:
        """The moments that are context for a tensor: both for a parameter, the first one twice for a second moment."""
        facts = self.facts(info)
        if facts is None or facts.moment1 is None:
            return None
        second = facts.moment1 if info.role is Role.MOMENT2 else facts.moment2
        if second is None or not self._serves(facts.moment1, info) or not self._serves(second, info):
            return None
        return facts.moment1, second

    def _serves(self, name: str, info: TensorInfo) -> bool:
        moment = self._flat.infos.get(name)
        if moment is None or name in self._late or name == info.name or moment.shape != info.shape:
            return False
        earlier = moment.role in (Role.MOMENT1, Role.MOMENT2) and moment.role is not info.role
        # Only 32-bit floats are predicted, from 32-bit moments: rounding 64-bit ones depends on the machine's settings.
        exact = moment.dtype != "F64" or info.dtype == "F64"
        return earlier and exact and has_floats(self._flat.tensors[name])
