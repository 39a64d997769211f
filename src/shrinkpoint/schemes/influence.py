"""Records which weights an evaluation reads, and which of them its answer is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TO_NUMBER = torch.ops.aten._local_scalar_dense.default
_PRODUCTS = (torch.ops.aten.mul, torch.ops.aten.mul_)


class InfluenceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows weights through torch's operations, up to the numbers that a program takes out of tensors.

    Data flow is no proof that a weight matters: a factor of zero is recognized where it is one number. What runs in
    other threads, in compiled code or in numpy is not seen, so that a weight may have an influence that is not.

    Args:
        weights: tensors of each weight, by name.
    """

    def __init__(self, weights: Mapping[str, Iterable[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = [*weights]
        self._sources, self._shared = dict[int, int](), 0
        for bit, tensors in enumerate(weights.values()):
            for address in {storage.data_ptr() for storage in _storages([*tensors])} - {0}:  # 0: an empty shard
                others = self._sources.get(address, 0)
                self._sources[address] = others | 1 << bit
                self._shared |= self._sources[address] if others else 0
        self._read, self._answer = 0, -1
        # Of each storage that was written, the weights that it depends on. The reference keeps its key unique.
        self._written = dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights = 0
        for storage in _storages((args, kwargs)):
            source = self._sources.get(storage.data_ptr(), 0)
            _, written = self._written.get(storage._cdata, (None, source))
            weights |= written
            self._read |= source
        is_zero = func.overloadpacket in _PRODUCTS and any(map(_is_zero, args))
        result = func(*args, **(kwargs or {}))
        if func is _TO_NUMBER and weights:
            self._answer &= weights
        for storage in _storages(result):
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._written[reference.cdata] = reference, 0 if is_zero else weights
        return result

    @property
    def read_names(self) -> frozenset[str]:
        """Names of the weights that an operation has read."""
        return self._names_of(self._read)

    @property
    def influential_names(self) -> frozenset[str]:
        """Names of the weights that all numbers were computed from which depend on any weight.

        Without those that share their memory with another weight, such as parts of a flat buffer.
        """
        return self._names_of(self._answer & ~self._shared if self._answer > 0 else 0)

    def _names_of(self, bits: int) -> frozenset[str]:
        return frozenset(name for bit, name in enumerate(self._names) if bits >> bit & 1)


def _storages(nest: Any) -> Iterator[torch.UntypedStorage]:
    """Storages of the tensors of a nest, but for sparse and other tensors that have none."""
    for leaf in tree_leaves(nest):
        if isinstance(leaf, Tensor):
            with suppress(NotImplementedError, RuntimeError):
                yield local_shard(leaf).untyped_storage()


def local_shard(tensor: Any) -> Tensor:
    """This rank's shard of a parameter."""
    local: Tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return local


def _is_zero(factor: Any) -> bool:
    """True if a factor is one number, and zero."""
    return bool(factor == 0) if not isinstance(factor, Tensor) or factor.dim() == 0 else False
