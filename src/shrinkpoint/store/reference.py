"""The reference of a writer: what the next delta is made against, and how much of the weights' progress it holds.

Right after a restore the weights lie exactly on the values a quantizer chose. A save that follows soon may find most of
them still nearest to the same values, and write down that nothing has changed: restored again and again, training then
goes nowhere although every single checkpoint is within its threshold (docs/schemes.md measures it)."""

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
"""Below this, a checkpoint is worth a warning."""


@torch.no_grad()
def retained_fraction(
    parent_weights: Mapping[str, Tensor],
    parent_stored: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
) -> float | None:
    """`<w'_t - w'_(t-1), w_t - w_(t-1)> / |w_t - w_(t-1)|^2` over all tensors that were quantized at both times.

    1 where all of the progress is kept, 0 where nothing is; above 1 where a checkpoint catches up with what the one
    before had missed.

    Where weights have gone more than ten times as far as they are large (a spike that was rolled back), the step counts
    as one from zero: what matters is how much of the present weights is there.

    Args:
        before, now: the weights w as they were in training, by name.
        before_kept, now_kept: the same as the checkpoints have them (w').

    Returns:
        None where nothing can be compared or nothing has moved.
    """
    kept = moved = 0.0
    for name, after in weights.items():
        if name not in parent_weights or parent_weights[name].shape != after.shape:
            continue
        weight = after.to("cpu", torch.float32)
        step = weight - parent_weights[name].to(torch.float32)
        written = stored[name].to("cpu", torch.float32) - parent_stored[name].to(torch.float32)
        if _dot(step, step) > 100 * _dot(weight, weight) > 0:
            step, written = weight, stored[name].to("cpu", torch.float32)
        kept += _dot(written, step)
        moved += _dot(step, step)
    return kept / moved if moved > 0 and math.isfinite(kept) and math.isfinite(moved) else None


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))


M = TypeVar("M")


class ReferenceCache(Generic[M]):
    """What a reader gets of the last checkpoint that was committed or loaded, and which one that was.

    What a scheme did not touch decodes to what it was given, so what was given can be held. The tensors are private:
    nothing that a caller can reach shares their memory.

    Attributes:
        manifest: the checkpoint; None: nothing is held.
        originals: of the tensors that were quantized, the values before that; after a load, what was loaded.
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
        """Hold nothing: the next save is a keyframe."""
        self.manifest, self._tensors, self._symbols, self.originals = None, {}, {}, {}

    def adopt(self, manifest: M, reference: Reference, originals: Mapping[str, Tensor] | None = None) -> None:
        """Hold these tensors themselves, which nobody else will write to."""
        self.manifest = None  # until all of it is here: an interrupt may come at any line
        self._tensors, self._symbols = dict(reference.tensors), dict(reference.quantized)
        given = reference.tensors if originals is None else originals
        self.originals = {name: given[name] for name in reference.quantized if name in given}
        self.manifest = manifest

    def copy(self, manifest: M, reference: Reference, originals: Mapping[str, Tensor]) -> None:
        """Hold a copy of these tensors, in the buffers at hand where they fit; hold nothing if memory runs out.

        A checkpoint that is committed stays so: failing to remember it only makes the next one a keyframe. What a
        scheme put in the place of an original is nobody else's and needs no copy; its original does.
        """
        buffers, old = self._tensors, self.originals
        self.drop()
        quantized = reference.quantized
        try:
            kept = {name: _copy_into(old.pop(name, None), originals[name]) for name in quantized if name in originals}
            made = {name for name in kept if _has_own_memory(reference.tensors[name], originals[name])}
            tensors = {
                name: tensor if name in made else _copy_into(buffers.pop(name, None), tensor)
                for name, tensor in reference.tensors.items()
            }
        except (MemoryError, RuntimeError):  # torch reports an allocation that failed as a RuntimeError
            return
        self.adopt(manifest, Reference(tensors, quantized), kept)

    def retained_progress(self, state: FlatState, stored: Reference) -> float | None:
        """How much of the progress since what is held was written; see `progress.retention`.

        Args:
            state: the state as it was in training.
            stored: as a reader gets it.
        """
        if self.manifest is None:
            return None
        names = [name for name in stored.quantized if state.infos[name].role not in (Role.MOMENT1, Role.MOMENT2)]
        now, kept = {name: state.tensors[name] for name in names}, self._tensors
        before = {**kept, **self.originals}  # what was exact has no original beside it
        return retained_fraction(before, kept, now, stored.tensors)


def as_delta_base(reference: Reference | None, *, base: bool) -> Reference | None:
    """The same, as what a delta can be made against, or not."""
    return None if reference is None else replace(reference, is_base=base)


def warn_low_retention(retention: float | None) -> None:
    """Warn where a checkpoint holds too little of the progress since the one before."""
    if retention is not None and retention < MIN_RETENTION:
        text = (
            f"this checkpoint holds {retention:.0%} of the progress since the one before: the rest "
            f"was rounded away, and "
            "is lost if training is restored from it. Save less often, or lose less"
        )
        warnings.warn(text, LossWarning, stacklevel=3)


def _has_own_memory(tensor: Tensor, original: Tensor) -> bool:
    """Not so where nothing was lost any more: the state lies on the values of the checkpoint before."""
    return tensor.data_ptr() != original.data_ptr()


def _copy_into(buffer: Tensor | None, tensor: Tensor) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = empty(tuple(tensor.shape), tensor.dtype)
    return buffer.copy_(tensor.detach())
