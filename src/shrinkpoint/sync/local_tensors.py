"""The part of a live model's tensors that this process has: plain tensors whole, of DTensors its own shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, StateError
from shrinkpoint.tensors.tree import unsupported_feature
from shrinkpoint.tensors.wrappers import unwrapped

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

AnyModel: TypeAlias = nn.Module | Mapping[str, Tensor]
"""A module, or its `state_dict()`."""
Sizes: TypeAlias = tuple[int, ...]


class Piece(NamedTuple):
    """A box of a global tensor."""

    offsets: Sizes  # Index of its first value in the global tensor, for each axis
    tensor: Tensor  # Its values

    @property
    def sizes(self) -> Sizes:
        return tuple(self.tensor.shape)

    def overlap(self, offsets: Sizes, sizes: Sizes) -> tuple[Sizes, Sizes] | None:
        """Offsets and sizes of what this box has in common with another one; None if that is nothing."""
        starts = tuple(map(max, self.offsets, offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, offsets, sizes, strict=True))
        common = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return (starts, common) if all(size > 0 for size in common) else None

    def view(self, offsets: Sizes, sizes: Sizes) -> Tensor:
        """The values of a box within this one."""
        return _narrow(self.tensor, [a - b for a, b in zip(offsets, self.offsets, strict=True)], sizes)


@dataclass(frozen=True)
class LocalTensor:
    """This process's share of one tensor of a model."""

    shape: Sizes  # Of the global tensor
    tensor: Tensor  # The memory of this process
    pieces: tuple[Piece, ...]  # Views of it, which are boxes of the global tensor; nearly always one
    owner: Tensor | None = None  # The DTensor that it is the shard of; None of a plain tensor

    @classmethod
    def whole(cls, tensor: Tensor) -> LocalTensor:
        shape = tuple(tensor.shape)
        return cls(shape, tensor, (Piece((0,) * len(shape), tensor),))

    @property
    def memory(self) -> tuple[object, ...] | None:
        """Equal for tensors that are the same memory; None without values."""
        tensor = self.tensor
        return (tensor.device, tensor.data_ptr(), *tensor.shape, *tensor.stride()) if tensor.numel() else None


def local_tensors(model: AnyModel, where: str = "model", *, is_sharded: bool = False) -> dict[str, LocalTensor]:
    """The tensors of a module's `state_dict()` by name, which share the module's memory.

    What DistributedDataParallel, DataParallel and torch.compile put around a module is taken off.

    Args:
        is_sharded: DTensors are allowed: the ranks that have the other shards take part.

    Raises:
        PolicyError: neither a module nor a mapping.
        StateError: a value is no plain tensor, such as the extra state of a module or a nested tensor; a DTensor that
            is not allowed; a name that is no string.
    """
    expected, do = "a module, or its state_dict()", "pass the model"
    validate.check_instance(where, model, (nn.Module, Mapping), expected=expected, do=do)
    tensors = _state_dict(unwrapped(model)) if isinstance(model, nn.Module) else model
    local: dict[str, LocalTensor] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            label = f"{where}[{name!r}]"
            if not isinstance(name, str):
                do = "pass the model, or its state_dict()"
                raise StateError(where, found=f"the name {name!r:.60}", expected="a string", do=do)
            if type(tensor) in (Tensor, nn.Parameter):
                if not tensor.is_meta and (found := unsupported_feature(tensor)):
                    raise StateError(label, found=found, expected="a dense tensor", do="convert it, or leave it out")
                local[name] = LocalTensor.whole(tensor.detach())
                continue
            if not _is_dtensor(tensor):
                found, do = validate.type_name(tensor), "leave out what is no tensor"
                raise StateError(label, found=found, expected="a torch.Tensor", do=do)
            if not is_sharded:
                do = "pass ranks=, the process group of all ranks with a shard, on each of them"
                raise StateError(label, found="a DTensor", expected="a plain torch.Tensor without ranks=", do=do)
            local[name] = _local_shard(tensor, label)
    return local


def _state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Its `state_dict()`, with the DTensors that are its parameters themselves: a copy does not count its changes."""
    tensors: dict[str, Tensor] = module.state_dict()
    own = dict(module.named_parameters(remove_duplicate=False)) if any(map(_is_dtensor, tensors.values())) else {}
    for name, parameter in own.items():
        if (
            name in tensors
            and _is_dtensor(parameter)
            and _storage_address(parameter) == _storage_address(tensors[name])
        ):
            tensors[name] = parameter
    return tensors


def check_own_memory(model: AnyModel, tensors: Mapping[str, LocalTensor]) -> None:
    """Make sure that writing to the tensors of a module changes the module.

    Raises:
        MismatchError: its `state_dict()` has copies, as that of a quantized module or of one with hooks may.
    """
    if not isinstance(model, nn.Module):
        return
    own = {_storage_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, local in tensors.items():
        if local.tensor.numel() and _storage_address(local.tensor) not in own:
            found, expected = f"a copy of {name!r} in the model's state_dict()", "its parameters and buffers themselves"
            do = "pass a dict of the tensors that are to be written, by their published names"
            raise MismatchError("model", found=found, expected=expected, do=do)


def _storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage, of a DTensor's shard."""
    with torch.no_grad():
        return (tensor.to_local() if _is_dtensor(tensor) else tensor).untyped_storage().data_ptr()


def _is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _local_shard(tensor: DTensor, where: str) -> LocalTensor:
    """This rank's shard of a DTensor. A strided one of uneven sizes may be several boxes."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not all(isinstance(placement, (Replicate, Shard, _StridedShard)) for placement in tensor.placements):
        do = "redistribute it first, such as tensor.redistribute(placements=[Replicate()])"
        raise StateError(where, found=f"the placements {tensor.placements}", expected="Shard or Replicate", do=do)
    local, shape = tensor.to_local().detach(), tuple(tensor.shape)
    if type(local) not in (Tensor, nn.Parameter):
        do = "publish plain values, dequantized"
        raise StateError(where, found=f"shards of {validate.type_name(local)}", expected="a torch.Tensor", do=do)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank has none of it
        return LocalTensor(shape, local, (), tensor)
    runs = [_runs(size, axis, tensor, coordinate) for axis, size in enumerate(shape)]
    if tuple(sum(length for _, length in axis) for axis in runs) != tuple(local.shape):
        found = f"a shard of shape {list(local.shape)}, which does not fit {tensor.placements} of {list(shape)}"
        expected, do = "a shard of torch's own layout", "make it with distribute_tensor"
        raise StateError(where, found=found, expected=expected, do=do)
    return LocalTensor(shape, local, tuple(_boxes(local, runs)) if local.numel() else (), tensor)


def _runs(size: int, axis: int, tensor: DTensor, coordinate: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and length of the runs of indices that this rank has of an axis: one, unless a strided shard is uneven."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    index = torch.arange(size)
    for mesh_dim, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == axis:
            factor: Any = getattr(placement, "split_factor", None)
            split: Any = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
            chunks, _ = split._split_tensor(index, tensor.device_mesh.size(mesh_dim), with_padding=False)
            index = chunks[coordinate[mesh_dim]]
    if not len(index):
        return []
    starts = [0, *(1 + int(position) for position in (index.diff() != 1).nonzero()), len(index)]
    return [(int(index[begin]), end - begin) for begin, end in pairwise(starts)]


def _boxes(local: Tensor, runs: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Piece]:
    """The boxes of a shard that has these runs of each axis."""
    axes = []
    for axis in runs:
        ends = [sum(length for _, length in axis[:count]) for count in range(len(axis))]
        axes.append([(start, length, begin) for (start, length), begin in zip(axis, ends, strict=True)])
    for box in product(*axes):
        view = _narrow(local, [begin for *_, begin in box], [length for _, length, _ in box])
        yield Piece(tuple(start for start, *_ in box), view)


def _narrow(tensor: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(axis, start, size)
    return tensor
