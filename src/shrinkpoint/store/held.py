"""The reference a store holds: what the next delta is made against."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from torch import Tensor

from shrinkpoint.codec import Origin, Reference
from shrinkpoint.errors import LossWarning
from shrinkpoint.record import Role
from shrinkpoint.state import FlatState, empty
from shrinkpoint.store.progress import ENOUGH, retention

M = TypeVar("M")


class Held(Generic[M]):
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
        self._symbols: dict[str, Origin] = {}

    @property
    def reference(self) -> Reference:
        return Reference(self._tensors, self._symbols, self.originals)

    def drop(self) -> None:
        """Hold nothing: the next save is a keyframe."""
        self.manifest, self._tensors, self._symbols, self.originals = None, {}, {}, {}

    def adopt(self, manifest: M, reference: Reference, originals: Mapping[str, Tensor] | None = None) -> None:
        """Hold these tensors themselves, which nobody else will write to."""
        self.manifest = None  # until all of it is here: an interrupt may come at any line
        self._tensors, self._symbols = dict(reference.tensors), dict(reference.symbols)
        given = reference.tensors if originals is None else originals
        self.originals = {name: given[name] for name in reference.symbols if name in given}
        self.manifest = manifest

    def copy(self, manifest: M, reference: Reference, originals: Mapping[str, Tensor]) -> None:
        """Hold a copy of these tensors, in the buffers at hand where they fit; hold nothing if memory runs out.

        A checkpoint that is committed stays so: failing to remember it only makes the next one a keyframe. What a
        scheme put in the place of an original is nobody else's and needs no copy; its original does.
        """
        buffers, old = self._tensors, self.originals
        self.drop()
        quantized = reference.symbols
        try:
            kept = {name: _copied(old.pop(name, None), originals[name]) for name in quantized if name in originals}
            made = {name for name in kept if _apart(reference.tensors[name], originals[name])}
            tensors = {
                name: tensor if name in made else _copied(buffers.pop(name, None), tensor)
                for name, tensor in reference.tensors.items()
            }
        except (MemoryError, RuntimeError):  # torch reports an allocation that failed as a RuntimeError
            return
        self.adopt(manifest, Reference(tensors, quantized), kept)

    def progress(self, flat: FlatState, written: Reference) -> float | None:
        """How much of the progress since what is held was written; see `progress.retention`.

        Args:
            flat: the state as it was in training.
            written: as a reader gets it.
        """
        if self.manifest is None:
            return None
        names = [name for name in written.symbols if flat.infos[name].role not in (Role.MOMENT1, Role.MOMENT2)]
        now, kept = {name: flat.tensors[name] for name in names}, self._tensors
        before = {**kept, **self.originals}  # what was exact has no original beside it
        return retention(before, kept, now, written.tensors)


def as_base(reference: Reference | None, *, base: bool) -> Reference | None:
    """The same, as what a delta can be made against, or not."""
    return None if reference is None else replace(reference, base=base)


def warn_of(kept: float | None) -> None:
    """Warn where a checkpoint holds too little of the progress since the one before."""
    if kept is not None and kept < ENOUGH:
        text = (
            f"this checkpoint holds {kept:.0%} of the progress since the one before: the rest was rounded away, and "
            "is lost if training is restored from it. Save less often, or lose less"
        )
        warnings.warn(text, LossWarning, stacklevel=3)


def _apart(tensor: Tensor, original: Tensor) -> bool:
    """Not so where nothing was lost any more: the state lies on the values of the checkpoint before."""
    return tensor.data_ptr() != original.data_ptr()


def _copied(buffer: Tensor | None, tensor: Tensor) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = empty(tuple(tensor.shape), tensor.dtype)
    return buffer.copy_(tensor.detach())
