"""Writes the tensors of a new version into a live model's memory: all of them or none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shrinkpoint.errors import MismatchError
from shrinkpoint.tensors.dtypes import as_bits
from shrinkpoint.tensors.shared_storage import num_reached
from shrinkpoint.tensors.wrappers import match_state_keys

_MAX_SPARSE_SHARE = 16
"""A tensor is written value by value where at most one in so many has changed; else whole, which is faster then."""
_DO = "build the model as the trainer does, with the same names, shapes and dtypes"


@dataclass(frozen=True)
class TensorWrite:
    """What one tensor gets, and what it had.

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
    """What has to be written so that a model has the values of a new version; nothing is written yet.

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
            key = (
                (target.device, target.data_ptr(), tuple(target.shape), target.stride()) if target.numel() else (name,)
            )
            if key in writes:
                _check_tied(name, writes[key][0], new, where)
            else:
                writes[key] = name, _plan_write(target, new[name])
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
    """What one tensor gets; None if it has these bits already."""
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
    if target.is_meta or any(
        stride == 0 and size > 1 for size, stride in zip(target.shape, target.stride(), strict=True)
    ):
        found = f"a model whose {name!r} has no memory of its own"
        raise MismatchError(
            where, found=found, expected="tensors that can be written to", do="allocate the model first"
        )


def _check_tied(name: str, other: str, new: Mapping[str, Tensor], where: str) -> None:
    """Raise if two names of one memory are to get different values."""
    if not torch.equal(as_bits(new[name]), as_bits(new[other])):
        found = f"different values for {name!r} and {other!r}"
        raise MismatchError(where, found=found, expected="the same ones: the model ties them", do=_DO)


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
