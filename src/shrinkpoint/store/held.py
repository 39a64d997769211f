"""The reference a store holds: what the next delta is made against."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shrinkpoint.codec import Reference
from shrinkpoint.state import empty
from shrinkpoint.store.manifest import Manifest


class Held:
    """The decoded tensors of the last checkpoint that was committed or loaded, and which one that was.

    A lossless scheme decodes to what it was given, so what was given can be held. The tensors are private: nothing that
    a caller can reach shares their memory.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self._tensors: dict[str, Tensor] = {}

    @property
    def reference(self) -> Reference:
        return Reference(self._tensors)

    def drop(self) -> None:
        """Hold nothing: the next save is a keyframe."""
        self.manifest, self._tensors = None, {}

    def adopt(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Hold these tensors themselves, which nobody else will write to."""
        self.manifest, self._tensors = manifest, dict(tensors)

    def copy(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Hold a copy of these tensors, in the buffers at hand where they fit; hold nothing if memory runs out.

        A checkpoint that is committed stays so: failing to remember it only makes the next one a keyframe.
        """
        buffers, self.manifest, self._tensors = self._tensors, None, {}
        try:
            copies = {name: _copied(buffers.pop(name, None), tensor) for name, tensor in tensors.items()}
        except (MemoryError, RuntimeError):  # torch reports an allocation that failed as a RuntimeError
            return
        self.adopt(manifest, copies)


def _copied(buffer: Tensor | None, tensor: Tensor) -> Tensor:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = empty(tuple(tensor.shape), tensor.dtype)
    return buffer.copy_(tensor.detach())
