"""The tensors of a live model by name: copied to be published, and written in place, all of them or none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, StateError
from shrinkpoint.tensors.dtypes import as_bits, dtype_name, empty
from shrinkpoint.tensors.flat_state import FlatState, copy_tensors, flatten
from shrinkpoint.tensors.memory import wait_for_devices
from shrinkpoint.tensors.shared_storage import num_reached
from shrinkpoint.tensors.wrappers import match_state_keys, unwrapped

AnyModel: TypeAlias = nn.Module | Mapping[str, Tensor]
"""A module, or its `state_dict()`."""
_CAST_FROM = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MAX_SPARSE_SHARE = 16
"""A tensor is written value by value where at most one in so many has changed; else whole, which is faster then."""
_DO = "build the model as the trainer does, with the same names, shapes and dtypes"


def model_tensors(model: AnyModel, where: str = "model") -> dict[str, Tensor]:
    """The tensors of a module's `state_dict()` by name, which share the module's memory.

    What DistributedDataParallel, DataParallel and torch.compile put around a module is taken off.

    Raises:
        PolicyError: neither a module nor a mapping.
        StateError: a value is not a plain tensor, such as a DTensor or the extra state of a module.
    """
    expected, do = "a module, or its state_dict()", "pass the model"
    validate.check_instance(where, model, (nn.Module, Mapping), expected=expected, do=do)
    tensors = unwrapped(model).state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in tensors.items():
        if not isinstance(name, str) or type(tensor) not in (Tensor, nn.Parameter):
            do = "publish plain tensors: of a sharded model, its full state dict on one rank"
            raise StateError(f"{where}[{name!r}]", found=validate.type_name(tensor), expected="a torch.Tensor", do=do)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def check_own_memory(model: AnyModel, tensors: Mapping[str, Tensor]) -> None:
    """Make sure that writing to the tensors of a module changes the module.

    Raises:
        MismatchError: its `state_dict()` has copies, as that of a quantized module or of one with hooks may.
    """
    if not isinstance(model, nn.Module):
        return
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            found, expected = f"a copy of {name!r} in the model's state_dict()", "its parameters and buffers themselves"
            do = "pass a dict of the tensors that are to be written, by their published names"
            raise MismatchError("model", found=found, expected=expected, do=do)


def capture(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, reuse: Mapping[str, Tensor] | None = None
) -> FlatState:
    """A copy of tensors in CPU memory of its own, tied ones once.

    Args:
        dtype: what floating-point tensors of 16 bits and more are cast to; None: nothing is cast.
        reuse: tensors that are no longer needed, whose memory is overwritten where it fits.

    Raises:
        StateError: a tensor cannot be stored.
    """
    state, old = flatten(dict(tensors)), reuse or {}
    casts = {name for name, x in state.tensors.items() if x.dtype in _CAST_FROM and dtype not in (None, x.dtype)}
    copies = copy_tensors({name: tensor for name, tensor in state.tensors.items() if name not in casts}, old)
    infos = dict(state.infos)
    with torch.no_grad():
        for name in casts:
            assert dtype is not None
            source, target = state.tensors[name], old.get(name)
            if target is None or target.dtype != dtype or target.shape != source.shape:
                target = empty(tuple(source.shape), dtype, pin=source.is_cuda)
            copies[name] = target.copy_(source)
            infos[name] = replace(infos[name], dtype=dtype_name(dtype))
    wait_for_devices(state.tensors.values())
    return replace(state, tensors={name: copies[name] for name in state.tensors}, infos=infos)


@dataclass(frozen=True)
class TensorWrite:
    """The new values of one tensor, and its old ones.

    Attributes:
        target: the live tensor, as integers.
        index: which of its values change, in row-major order; None: it is written whole.
        new, old: these values.
    """

    target: Tensor
    index: Tensor | None
    new: Tensor
    old: Tensor

    def write(self) -> None:
        self._set(self.new)

    def roll_back(self) -> None:
        self._set(self.old)

    def _set(self, values: Tensor) -> None:
        if self.index is None:
            self.target.copy_(values)
        else:
            self.target.view(-1).index_copy_(0, self.index, values)

    @property
    def num_changed(self) -> int:
        return self.new.numel()


def plan_writes(live: Mapping[str, Tensor], new: Mapping[str, Tensor], where: str) -> list[TensorWrite]:
    """Plan the writes that give a model the values of a new version; nothing is written yet.

    Args:
        live: the model's tensors by name.
        new: the version's, on the CPU.
        where: what is published, for messages.

    Raises:
        MismatchError: names, shapes, dtypes or ties differ.
    """
    new = match_state_keys(new, live)  # wrappers around parts of either model are taken off
    _check_same_names(live, new, where)
    writes: dict[tuple[object, ...], tuple[str, TensorWrite | None]] = {}
    with torch.no_grad(), _inference_mode(live.values()):
        for name, target in live.items():
            _check_layout(name, target, new[name], where)
            shape = tuple(target.shape), target.stride()
            key = (target.device, target.data_ptr(), *shape) if target.numel() else (name,)
            if key not in writes:
                writes[key] = name, _plan_write(target, new[name])
            elif not torch.equal(as_bits(new[name]), as_bits(new[writes[key][0]])):
                found = f"different values for {name!r} and {writes[key][0]!r}"
                raise MismatchError(where, found=found, expected="the same ones: the model ties them", do=_DO)
        _check_apart(live, where)
    return [write for _, write in writes.values() if write is not None]


def write_all(live: Mapping[str, Tensor], writes: Sequence[TensorWrite]) -> float:
    """Write everything; where that is interrupted, what was written gets its old values back.

    Returns:
        the seconds for which the model was neither the old version nor the new.
    """
    began = time.perf_counter()
    begun: list[TensorWrite] = []
    with torch.no_grad(), _inference_mode(live.values()):
        try:
            for write in writes:
                begun.append(write)
                write.write()
            _wait_for(live)
        except BaseException:
            for write in begun:
                write.roll_back()
            _wait_for(live)
            raise
    return time.perf_counter() - began


def _plan_write(target: Tensor, new: Tensor) -> TensorWrite | None:
    """The write of one tensor; None if it has these bits already."""
    target, new = as_bits(target), as_bits(new)
    if not target.is_contiguous():
        new = new.to(target.device)
        return None if torch.equal(target, new) else TensorWrite(target, None, new, target.clone())
    new = new.to(target.device).reshape(-1)
    flat = target.view(-1)
    changed = flat != new
    count = int(changed.count_nonzero())
    if count == 0:
        return None
    if count * _MAX_SPARSE_SHARE > flat.numel():
        return TensorWrite(flat, None, new, flat.clone())
    index = changed.nonzero().view(-1)
    return TensorWrite(flat, index, new[index], flat[index])


def _wait_for(live: Mapping[str, Tensor]) -> None:
    """Wait until what was enqueued on CUDA devices is done."""
    for device in {tensor.device for tensor in live.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _inference_mode(tensors: Iterable[Tensor]) -> torch.inference_mode:
    """Tensors that were made in inference mode can be written to in it alone."""
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))


def _check_same_names(live: Mapping[str, Tensor], new: Mapping[str, Tensor], where: str) -> None:
    missing, extra = sorted(live.keys() - new.keys()), sorted(new.keys() - live.keys())
    if not missing and not extra:
        return
    found = "; ".join(
        f"{len(names)} tensors {what}, such as {names[0]!r}"
        for names, what in ((missing, "that are not published"), (extra, "that the model lacks"))
        if names
    )
    raise MismatchError(where, found=found, expected="the same names", do=_DO)


def _check_layout(name: str, target: Tensor, new: Tensor, where: str) -> None:
    if target.shape != new.shape or target.dtype != new.dtype:
        found = f"{name!r} of shape {list(new.shape)} and {new.dtype}"
        expected = f"{list(target.shape)} and {target.dtype}, as in the model"
        raise MismatchError(where, found=found, expected=expected, do=_DO)
    axes = zip(target.shape, target.stride(), strict=True)
    if target.is_meta or any(stride == 0 and size > 1 for size, stride in axes):
        found, do = f"a model whose {name!r} has no memory of its own", "allocate the model first"
        raise MismatchError(where, found=found, expected="tensors that can be written to", do=do)


def _check_apart(live: Mapping[str, Tensor], where: str) -> None:
    """Raise if the memory of tensors overlaps otherwise than whole."""
    ranges: dict[tuple[object, ...], tuple[int, int, str]] = {}
    for name, tensor in live.items():
        if tensor.numel():
            begin = tensor.data_ptr()
            end = begin + num_reached(tensor) * tensor.element_size()
            ranges[(tensor.device, begin, end, tuple(tensor.shape), tensor.stride())] = begin, end, name
    spans: dict[object, list[tuple[int, int, str]]] = {}
    for key, span in ranges.items():
        spans.setdefault(key[0], []).append(span)
    for members in spans.values():
        for (_, end, name), (begin, _, other) in pairwise(sorted(members)):
            if begin < end:
                found = f"a model whose {name!r} and {other!r} share a part of their memory"
                raise MismatchError(where, found=found, expected="tensors that are apart, or tied whole", do=_DO)
