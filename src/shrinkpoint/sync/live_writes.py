"""Writes into the tensors of a live model, in place: all of them or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shrinkpoint.errors import MismatchError
from shrinkpoint.sync.local_tensors import LocalTensor, Piece, Sizes
from shrinkpoint.tensors.dtypes import as_bits
from shrinkpoint.tensors.tree import num_reached
from shrinkpoint.tensors.wrappers import match_state_keys

_MAX_SPARSE_SHARE = 16
"""A box is written value by value where at most one in so many has changed; else whole, which is faster then."""
_DO = "build the model as the trainer does, with the same names, shapes and dtypes"


@dataclass(frozen=True)
class VersionTensor:
    """A tensor of a version.

    Attributes:
        dtype, shape: of the global tensor.
        pieces: those that this process holds, on the CPU: all that overlap its share of the model.
    """

    dtype: torch.dtype
    shape: Sizes
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class TensorWrite:
    """The new values of a box of a tensor, and its old ones.

    Attributes:
        target: the live memory, as integers.
        index: which of its values change, an index for each axis; None: it is written whole.
        new, old: these values.
    """

    target: Tensor
    index: tuple[Tensor, ...] | None
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
            self.target.index_put_(self.index, values)


def plan_writes(
    live: Mapping[str, LocalTensor],
    new: Mapping[str, VersionTensor],
    where: str,
    known: Mapping[str, VersionTensor] | None = None,
    names: Collection[str] = (),
) -> list[TensorWrite]:
    """Plan the writes that give a model the values of a new version; nothing is written yet.

    Args:
        live: the model's tensors by name.
        new: the version's.
        where: what is published, for messages.
        known: the values that tensors of the model are known to have, by the model's names. Such a tensor is not
            compared on its device: the values that differ from the new ones are found here, and they alone are sent.
        names: of the tensors of all ranks; none: those of `live`.

    Raises:
        MismatchError: names, shapes, dtypes or ties differ.
    """
    known, names = known or {}, names or live.keys()
    new = match_state_keys(new, dict.fromkeys(names))
    missing, extra = sorted({*names}.difference(new)), sorted({*new}.difference(names))
    if missing or extra:
        kinds = (missing, "that are not published"), (extra, "that the model lacks")
        texts = (f"{len(some)} tensors {what}, such as {some[0]!r}" for some, what in kinds if some)
        raise MismatchError(where, found="; ".join(texts), expected="the same names", do=_DO)
    writes: list[TensorWrite] = []
    planned: dict[tuple[object, ...], str] = {}
    with torch.no_grad(), _inference_mode(live.values()):
        for name, local in live.items():
            _check_layout(name, local, new[name], where)
            key = local.memory or (name,)
            if planned.setdefault(key, name) == name:
                writes.extend(_plan_tensor(local, new[name], known.get(name)))
            elif not _are_equal(local, new[name], new[planned[key]]):
                found = f"different values for {name!r} and {planned[key]!r}"
                raise MismatchError(where, found=found, expected="the same values, as the model ties them", do=_DO)
        _check_apart(live, where)
    return writes


def write_all(
    live: Mapping[str, LocalTensor],
    writes: Sequence[TensorWrite],
    run: Callable[[Callable[[], None]], object] = lambda write: write(),
) -> float:
    """Write everything; where that is interrupted, what was written gets its old values back.

    Args:
        run: calls a function that writes on all ranks of a sharded model, and raises if it raises on one of them.

    Returns:
        the seconds for which the model was neither the old version nor the new.
    """
    began = time.perf_counter()
    begun: list[TensorWrite] = []

    def write() -> None:
        for tensor_write in writes:
            begun.append(tensor_write)
            tensor_write.write()
        _wait_for(live.values())

    with torch.no_grad(), _inference_mode(live.values()):
        try:
            run(write)
        except BaseException:
            for tensor_write in begun:
                tensor_write.roll_back()
            _wait_for(live.values())
            raise
    return time.perf_counter() - began


def _regions(local: LocalTensor, new: VersionTensor) -> Iterator[tuple[Tensor, Piece, tuple[Sizes, Sizes]]]:
    """The regions that this process's share has in common with each piece: the live values, the piece, and the box."""
    for mine in local.pieces:
        for piece in new.pieces:
            box = piece.overlap(mine.offsets, mine.sizes)
            if box is not None:
                yield mine.view(*box), piece, box


def _plan_tensor(local: LocalTensor, new: VersionTensor, known: VersionTensor | None) -> Iterator[TensorWrite]:
    held = {} if known is None else {piece.offsets: piece for piece in known.pieces}
    for target, piece, box in _regions(local, new):
        old = held.get(piece.offsets)
        if old is not None and old.sizes == piece.sizes:
            if old.tensor.data_ptr() == piece.tensor.data_ptr():
                continue  # a delta keeps the memory of tensors that did not change
            write = _plan_write(target, piece.view(*box), old.view(*box))
        else:
            write = _plan_write(target, piece.view(*box), None)
        if write is not None:
            yield write


def _plan_write(target: Tensor, new: Tensor, old: Tensor | None) -> TensorWrite | None:
    """The write of one box; None if it has these bits already.

    Args:
        old: the values that the target has, beside the new ones; None: they are compared on the target's device.
    """
    device, target, new = target.device, as_bits(target), as_bits(new)
    new = new.to(device) if old is None else new
    old = target if old is None else as_bits(old)
    if target.is_contiguous():  # one index for each value in place of one for each axis
        target, new, old = target.view(-1), new.reshape(-1), old.reshape(-1)
    changed = old != new
    count = int(changed.count_nonzero())
    if count == 0:
        return None
    if count * _MAX_SPARSE_SHARE > target.numel():
        return TensorWrite(target, None, new.to(device), target.clone())
    index = changed.nonzero(as_tuple=True)
    values, index = new[index].to(device), tuple(axis.to(device) for axis in index)
    return TensorWrite(target, index, values, target[index])


def _are_equal(local: LocalTensor, first: VersionTensor, second: VersionTensor) -> bool:
    """True if a share of the model has the same bits in two tensors of a version."""
    others = [*_regions(local, second)]
    for target, piece, (offsets, _sizes) in _regions(local, first):
        for _, other, box in others:
            common = Piece(offsets, target).overlap(*box)
            if common and not torch.equal(as_bits(piece.view(*common)), as_bits(other.view(*common))):
                return False
    return True


def _wait_for(tensors: Iterable[LocalTensor]) -> None:
    """Wait until what was enqueued on CUDA devices is done."""
    for device in {local.tensor.device for local in tensors if local.tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _inference_mode(tensors: Collection[LocalTensor]) -> torch.inference_mode:
    """Tensors that were made in inference mode can be written to in it alone."""
    return torch.inference_mode(any(local.tensor.is_inference() for local in tensors))


def _check_layout(name: str, local: LocalTensor, new: VersionTensor, where: str) -> None:
    target = local.tensor
    if local.shape != new.shape or target.dtype != new.dtype:
        found = f"{name!r} of shape {list(new.shape)} and {new.dtype}"
        expected = f"{list(local.shape)} and {target.dtype}, as in the model"
        raise MismatchError(where, found=found, expected=expected, do=_DO)
    is_lazy = target.is_conj() or target.is_neg()
    if target.is_meta or is_lazy or num_reached(target) < target.numel():
        do = "put resolve_conj() or clone() of it into the model" if is_lazy else "allocate the model first"
        found = f"a model whose {name!r} is a view" if is_lazy else f"a model whose {name!r} has no memory of its own"
        raise MismatchError(where, found=found, expected="tensors that can be written to", do=do)


def _check_apart(live: Mapping[str, LocalTensor], where: str) -> None:
    """Raise if the memory of tensors overlaps otherwise than whole."""
    ranges: dict[tuple[object, ...], tuple[int, int, str]] = {}
    for name, tensor in ((name, local.tensor) for name, local in live.items()):
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
                raise MismatchError(where, found=found, expected="tensors that share all of it, or none", do=_DO)
