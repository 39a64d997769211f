"""A quantization plan for one state: codes are chosen, and applying them is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shrinkpoint.codec.code_streams import CODERS
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.schemes import optimizer_state
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.select import exact_reasons
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON


@dataclass(frozen=True)
class QuantizationPlan(RecordEncodingMixin):
    """A plan for one state: its quantized tensors are chosen; applying and encoding them is exact.

    Attributes:
        id: of the scheme that chose them.
        quantized: the quantized tensors by name, on the CPU.
        cast_sources: name of a narrower copy -> name of the weight it is a cast of.
        optimizer: mode for the optimizer's moments.
        coders: coders that codes may be coded with.
        loss: for the manifest: what was tried, measured and chosen.
        values: decoded tensors that were computed already, by name; on the CPU.
        keyframe: see `QuantizedState`.
        min_size: how many values and axes a quantized weight has at least; None if this rank lacks parts of the state,
            and so cannot tell why tensors stay exact.
    """

    id: str
    quantized: Mapping[str, QuantizedTensor] = field(repr=False)
    cast_sources: Mapping[str, str] = field(default_factory=dict)
    optimizer: optimizer_state.Mode = "exact"
    coders: Sequence[str] = CODERS
    loss: JSON = None
    values: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    keyframe: bool = False
    min_size: tuple[int, int] | None = None

    @torch.no_grad()
    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Replace values by the chosen ones; `state` is the state that was planned for, or a copy of it."""
        changed: dict[str, Tensor] = {}
        if self.optimizer == "reset":
            changed.update(optimizer_state.zeroed_moments(state))
        for name, quantized in sorted(
            self.quantized.items(), key=lambda item: isinstance(item[1], LatticeTensor) and bool(item[1].relative_to)
        ):
            values = self.values.get(name)
            if values is None:
                second_moments = _reference_values(quantized, name, changed, reference)
                values = quantized.dequantize(state.tensors[name].dtype, second_moments)
            changed[name] = values
        for name, source in self.cast_sources.items():
            if source in changed:
                changed[name] = changed[source].to(state.tensors[name].dtype)
        tensors = {name: changed.get(name, tensor) for name, tensor in state.tensors.items()}
        exact = {} if self.min_size is None else exact_reasons(state, changed, self._nonfinite, *self.min_size)
        return QuantizedState(replace(state, tensors=tensors), dict(self.quantized), self.loss, self.keyframe, exact)

    @property
    def _nonfinite(self) -> list[str]:
        names = self.loss.get("left_out") if isinstance(self.loss, dict) else None
        return names if isinstance(names, list) else []


def _reference_values(
    quantized_tensor: QuantizedTensor, name: str, changed: Mapping[str, Tensor], reference: Reference | None
) -> Tensor | None:
    """The values that the decoded ones depend on: those of the parent, or of a tensor that was decoded before."""
    if isinstance(quantized_tensor, LatticeTensor):
        return changed[quantized_tensor.relative_to] if quantized_tensor.relative_to else None
    return reference.tensors[name] if quantized_tensor.residual and reference is not None else None
