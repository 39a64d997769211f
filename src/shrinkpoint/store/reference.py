"""The reference of a writer: what the next delta is made against, and how much of the weights' progress it holds.

Right after a restore the weights are exactly the values that a quantizer chose. In a save that follows soon, most of
them may still round to the same values, so that nothing is stored: with repeated restores training makes no progress
although every single checkpoint is within its threshold (docs/schemes.md measures it).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.errors import LossWarning
from shrinkpoint.tensors.dtypes import empty
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

MIN_RETENTION = 0.7
"""A checkpoint with a lower fraction raises a warning."""


@torch.no_grad()
def retained_fraction(
    parent_weights: Mapping[str, Tensor],
    parent_stored: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
) -> float | None:
    """Fraction of the weights' progress since the previous checkpoint that this checkpoint holds.

    `<w'_t - w'_(t-1), w_t - w_(t-1)> / |w_t - w_(t-1)|^2` over all tensors that were quantized at both times: 1 if all
    of the progress is stored, 0 if none is, above 1 if a checkpoint catches up with what the previous one missed.

    Where the step of the weights is more than ten times their own norm (a spike that was rolled back), it counts from
    zero: what matters then is how much of the present weights is stored.

    Args:
        parent_weights, weights: the weights w in training, by name, at the previous save and now.
        parent_stored, stored: the same as the checkpoints decode (w').

    Returns:
        None if nothing can be compared or nothing has changed.
    """
    stored_progress = progress = 0.0
    for name, tensor in weights.items():
        if name not in parent_weights or parent_weights[name].shape != tensor.shape:
            continue
        weight = tensor.to("cpu", torch.float32)
        step = weight - parent_weights[name].to(torch.float32)
        stored_step = stored[name].to("cpu", torch.float32) - parent_stored[name].to(torch.float32)
        if _dot(step, step) > 100 * _dot(weight, weight) > 0:
            step, stored_step = weight, stored[name].to("cpu", torch.float32)
        stored_progress += _dot(stored_step, step)
        progress += _dot(step, step)
    is_finite = math.isfinite(stored_progress) and math.isfinite(progress)
    return stored_progress / progress if progress > 0 and is_finite else None


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))


M = TypeVar("M")


class ReferenceCache(Generic[M]):
    """Holds the decoded tensors of the last checkpoint that was committed or loaded.

    A tensor that a scheme leaves exact decodes to the value it was given, so that value is held. No caller can reach
    the memory of these tensors.

    Attributes:
        manifest: the checkpoint; None if nothing is held.
        originals: values before quantization, by name, of the quantized tensors; after a load, the loaded values.
    """

    def __init__(self) -> None:
        self.manifest: M | None = None
        self.originals: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._symbols: dict[str, QuantizedTensor] = {}

    @property
    def reference(self) -> Reference:
        return Reference(self._tensors, self._symbols, self.originals)

    def drop(self) -> None:
        """Free the tensors: the next save is a keyframe."""
        self.manifest, self._tensors, self._symbols, self.originals = None, {}, {}, {}

    def adopt(self, manifest: M, reference: Reference, originals: Mapping[str, Tensor] | None = None) -> None:
        """Hold these tensors themselves; the caller no longer writes to them."""
        self.manifest = None  # until all is assigned: an interrupt may come at any line
        self._tensors, self._symbols = dict(reference.tensors), dict(reference.quantized)
        values = reference.tensors if originals is None else originals
        self.originals = {name: values[name] for name in reference.quantized if name in values}
        self.manifest = manifest

    def copy(self, manifest: M, reference: Reference, originals: Mapping[str, Tensor]) -> None:
        """Hold a copy of these tensors, in the present buffers where they fit; hold nothing if memory runs out.

        The checkpoint is committed already: without a reference the next one is a keyframe. Values that a scheme
        created are not shared with the caller and need no copy; their originals do.
        """
        buffers, old = self._tensors, self.originals
        self.drop()
        quantized = reference.quantized
        try:
            copies = {name: _copy_into(old.pop(name, None), originals[name]) for name in quantized if name in originals}
            private = {name for name in copies if _has_own_memory(reference.tensors[name], originals[name])}
            tensors = {
                name: tensor if name in private else _copy_into(buffers.pop(name, None), tensor)
                for name, tensor in reference.tensors.items()
            }
        except (MemoryError, RuntimeError):  # torch reports an allocation that failed as a RuntimeError
            return
        self.adopt(manifest, Reference(tensors, quantized), copies)

    def retained_progress(self, state: FlatState, stored: Reference) -> float | None:
        """The `retained_fraction` of the weights' progress since the checkpoint that is held.

        Args:
            state: the state in training.
            stored: the same as a reader decodes it.
        """
        if self.manifest is None:
            return None
        names = [name for name in stored.quantized if state.infos[name].role not in (Role.MOMENT1, Role.MOMENT2)]
        weights = {name: state.tensors[name] for name in names}
        parent_weights = {**self._tensors, **self.originals}  # exact tensors have no separate original
        return retained_fraction(parent_weights, self._tensors, weights, stored.tensors)


def as_delta_base(reference: Reference | None, *, base: bool) -> Reference | None:
    """A copy that is marked as the base of a delta, or as values to compare with only."""
    return None if reference is None else replace(reference, is_base=base)


def warn_low_retention(retention: float | None) -> None:
    """Warn if a checkpoint holds too little of the progress since the previous one."""
    if retention is not None and retention < MIN_RETENTION:
        text = (
            f"this checkpoint holds {retention:.0%} of the progress since the one before: the rest was rounded away, "
            "and is lost if training is restored from it. Save less often, or lose less"
        )
        warnings.warn(text, LossWarning, stacklevel=3)


def _has_own_memory(tensor: Tensor, original: Tensor) -> bool:
    """Whether a scheme created `tensor`; it is the original where nothing more was lost than in the previous save."""
    return tensor.data_ptr() != original.data_ptr()


def _copy_into(buffer: Tensor | None, tensor: Tensor) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = empty(tuple(tensor.shape), tensor.dtype)
    return buffer.copy_(tensor.detach())
