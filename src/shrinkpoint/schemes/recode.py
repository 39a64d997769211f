"""Re-encodes a checkpoint that is quantized already, without losing more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class Recode(RecordEncodingMixin):
    """Loses nothing more: values stay as they are, and so do the symbols they were made from.

    But for symbols of differences: they are to another parent, and no later checkpoint looks at them.

    Attributes:
        quantized: of the tensors that were quantized, by name.
        loss: what was lost when they were.
        id: of the scheme that wrote it first.
    """

    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict, repr=False)
    loss: JSON = None
    id: str = "again"

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """All of it; see `schemes.Scheme`."""
        held = {
            name: one
            for name, one in self.quantized.items()
            if name in state.infos and _is_still_valid(name, one, state, self.quantized)
        }
        return QuantizedState(state, held, self.loss)


def _is_still_valid(
    name: str, quantized_tensor: QuantizedTensor, state: FlatState, quantized: Mapping[str, QuantizedTensor]
) -> bool:
    """Whether a value is still what its symbols say, so that they can be written without the checkpoint before."""
    if not isinstance(quantized_tensor, LatticeTensor):
        return not quantized_tensor.residual
    if not quantized_tensor.relative_to:
        return True
    x, other = state.tensors[name], state.tensors.get(quantized_tensor.relative_to)
    if (
        other is None
        or not isinstance(quantized.get(quantized_tensor.relative_to), LatticeTensor)
        or other.shape != x.shape
    ):
        return False  # what it was relative to has changed since
    return bool((tensor_bytes(quantized_tensor.dequantize(x.dtype, other)) == tensor_bytes(x)).all())
