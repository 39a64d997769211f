"""The lossless scheme, the default, and the one that writes a quantized checkpoint again without further loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shrinkpoint import validate
from shrinkpoint.codec.coder import MAX_CHUNK
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.reference import QuantizedTensor, Reference, lattice_sources
from shrinkpoint.schemes.base import QuantizedState, SpecMixin
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True, repr=False)
class Lossless(SpecMixin, RecordEncodingMixin):
    """Encodes every tensor bit-exact.

    Args:
        chunk: number of values that are coded together; smaller chunks make partial reads cheaper and files larger.

    Raises:
        PolicyError: `chunk` is out of range.
    """

    id: ClassVar[str] = "lossless"
    chunk: int = MAX_CHUNK

    def __post_init__(self) -> None:
        validate.check_int("chunk", self.chunk, maximum=MAX_CHUNK)

    @property
    def arguments(self) -> dict[str, object]:
        return {"chunk": self.chunk}

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Return the state unchanged."""
        return QuantizedState(state)


@dataclass(frozen=True)
class Recode(RecordEncodingMixin):
    """Writes a checkpoint again with its values and codes unchanged.

    Codes of residuals are dropped, since they refer to another parent; such tensors are written as exact values.

    Attributes:
        quantized: name of a tensor -> its codes and codebook or lattice.
        loss: the `loss` of the original manifest.
        id: of the scheme that first wrote the checkpoint.
    """

    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict, repr=False)
    loss: JSON = None
    id: str = "again"

    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Return the state unchanged, with the codes that still describe its values."""
        valid = {
            name: tensor
            for name, tensor in self.quantized.items()
            if name in state.infos and _is_still_valid(name, tensor, state, self.quantized)
        }
        return QuantizedState(state, valid, self.loss)


def _is_still_valid(
    name: str, quantized_tensor: QuantizedTensor, state: FlatState, quantized: Mapping[str, QuantizedTensor]
) -> bool:
    """True if a tensor's values still follow from its codes, without the previous checkpoint."""
    if not isinstance(quantized_tensor, LatticeTensor):
        return not quantized_tensor.residual
    if not quantized_tensor.relative_to:
        return True
    tensor, relative_to = state.tensors[name], state.tensors.get(quantized_tensor.relative_to)
    is_lattice = isinstance(quantized.get(quantized_tensor.relative_to), LatticeTensor)
    if relative_to is None or not is_lattice or relative_to.shape != tensor.shape:
        return False  # the tensor that it is relative to has changed
    sources = lattice_sources(state.tensors, (name, quantized_tensor.relative_to))
    if len(sources) == 2 and all(source.quantized is quantized[key] for key, source in sources.items()):
        return True  # as both were decoded
    values = quantized_tensor.dequantize(tensor.dtype, relative_to)
    return bool((tensor_bytes(values) == tensor_bytes(tensor)).all())
