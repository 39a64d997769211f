"""Records which weights an evaluation reads, and which of them its answer is computed from."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_TO_NUMBER = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
_FACTORS = {
    **dict.fromkeys(("mul", "multiply", "mm", "bmm", "mv", "dot", "vdot", "matmul", "linear"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addcmul"), (1, 2)),
}
"""Positions of arguments that are multiplied."""
_IGNORED = frozenset({"zero", "fill", "normal", "uniform", "random", "exponential", "set", "resize"})
"""Operations that pass over the values of their tensors, beside `zeros_like` and `new_zeros`."""
_JOINS = frozenset({"cat", "stack", "where", "masked_fill", "index_add", "scatter_add", "constant_pad_nd"})
"""Operations that compute some elements from one argument and some from another."""
_OVERWRITES = frozenset({"index_put", "index_copy", "scatter", "scatter_reduce", "masked_scatter", "slice_scatter"})
"""Operations that replace elements of the first argument."""
_SELECTED = """index index_select gather take masked_select max min amax amin aminmax argmax argmin topk sort
argsort median kthvalue mode nonzero nll_loss_forward nll_loss2d_forward nll_loss nll_loss_nd
cross_entropy_loss tril triu"""
_SELECTIONS = frozenset(_SELECTED.split())  # Operations that pass over elements
_MAX_WRITTEN = 4096
_COMPILED_MODULES = "torch._inductor.runtime.compile_tasks."
"""The prefix of modules that torch.compile has written, which compute unseen, and in memory that was used before."""


class _Origin(NamedTuple):
    """Weights that a tensor is computed from, as bits."""

    may: int = 0  # those that elements may depend on
    some: int = 0  # those that at least one of its elements depends on
    each: int = 0  # those that each of its elements depends on

    @property
    def of_part(self) -> _Origin:
        """The origin of an unknown part of the elements."""
        return _Origin(self.may, self.each, self.each)

    @property
    def of_sum(self) -> _Origin:
        """The origin of what is computed from all elements."""
        return _Origin(self.may, self.some, self.some)


_NO_ORIGIN = _Origin()


class _Rule(NamedTuple):
    """The rule by which an operation passes origins on."""

    name: str  # without namespace, overload and the "_" of an operation in place
    is_known: bool  # False for operations of other libraries
    written: tuple[tuple[int, str], ...] = ()  # position and name of each argument that is changed
    outputs: frozenset[str] = frozenset()  # names of the arguments that are only written
    may_be_view: bool = False  # the result may share memory with an argument


class InfluenceRecorder(TorchDispatchMode):
    """Follows weights through torch's operations, up to the numbers that a program takes out of tensors.

    A weight is lost on the way where its elements may be passed over: in a part of joined tensors, or behind a factor
    that has zeros. What runs in other threads, in code that torch.compile wrote, or in numpy is not seen.

    Args:
        weights: tensors of each weight, by name.
    """

    supports_higher_order_operators = True

    def __init__(self, weights: Mapping[str, Iterable[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = [*weights]
        self._sources, self._shared = dict[int, int](), 0
        for bit, tensors in enumerate(weights.values()):
            storages = filter(None, map(_storage, tensors))
            for address in {storage.data_ptr() for storage in storages} - {0}:  # 0: an empty shard
                others = self._sources.get(address, 0)
                self._sources[address] = others | 1 << bit
                self._shared |= self._sources[address] if others else 0
        self._read, self._used = 0, -1
        self._numbers = _Numbers()
        # Of each storage that was written, its origin. The reference keeps its key unique.
        self._written = dict[int, tuple[StorageWeakRef, _Origin]]()
        self._max_written = _MAX_WRITTEN

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, so that torch goes on to run, and to compile, what is compiled; else it would never do so again."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _rule_of(func)
        origin = self._origin_of_result(rule, args, kwargs)  # before the operation, which may write to its arguments
        result = func(*args, **kwargs)
        if func not in _TO_NUMBER:
            self._note_results(rule, args, kwargs, result, origin)
        elif origin.may:
            self._numbers.add(result, origin.some)
        return result

    def note_answer(self, answer: float) -> None:
        """Take the answer that an evaluation has returned: it counts only where it was computed from numbers."""
        is_unseen = any(name.startswith(_COMPILED_MODULES) for name in [*sys.modules])
        self._used &= 0 if is_unseen else self._numbers.origin_of(answer)
        self._numbers = _Numbers()

    @property
    def read_names(self) -> frozenset[str]:
        """Names of the weights that an operation has read."""
        return self._names_of(self._read)

    @property
    def influential_names(self) -> frozenset[str]:
        """Names of the weights that all answers were computed from.

        Without those that share their memory with another weight, such as parts of a flat buffer.
        """
        return self._names_of(self._used & ~self._shared if self._used > 0 else 0)

    def _names_of(self, bits: int) -> frozenset[str]:
        return frozenset(name for bit, name in enumerate(self._names) if bits >> bit & 1)

    def _origin(self, tensor: Tensor) -> _Origin:
        storage = _storage(tensor)
        if storage is None or not tensor.numel():
            return _NO_ORIGIN
        origin = self._origin_of_storage(storage)
        return origin if origin.some == origin.each or _covers(tensor, storage) else origin.of_part

    def _origin_of_storage(self, storage: torch.UntypedStorage) -> _Origin:
        source = self._sources.get(storage.data_ptr(), 0)
        self._read |= source
        written = self._written.get(storage._cdata)
        return _Origin(source, source, source) if written is None else written[1]

    def _origin_of_result(self, rule: _Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Origin:
        operands = [*args, *(value for name, value in kwargs.items() if name not in rule.outputs)]
        if rule.name == "to" or rule.name.endswith("_as"):
            operands = operands[:1]  # another tensor says which shape or dtype
        if rule.name in _IGNORED or rule.name.endswith("_like") or rule.name.startswith("new_"):
            return _NO_ORIGIN
        origins = {i: self._origin(x) for i, x in enumerate(operands) if isinstance(x, Tensor)}
        listed = [self._origin(x) for x in _tensors([x for x in operands if not isinstance(x, Tensor)]) if x.numel()]
        everything = _union([*origins.values(), *listed])
        if not everything.may:
            return _NO_ORIGIN
        with suppress(Exception):  # a tensor of another kind, whose values cannot be looked at
            if rule.name in ("where", "masked_fill"):
                return _join([x for x in _chosen(rule.name, operands, origins) if x.may])
            if rule.name == "copy":
                return origins.get(1, _NO_ORIGIN)
            if rule.name in _JOINS:
                return _join([*origins.values(), *listed, *[_NO_ORIGIN] * (rule.name == "constant_pad_nd")])
            if listed and not rule.name.startswith("index"):  # each result may be computed from one of the tensors
                return _join([*origins.values(), *listed]).of_part
            if rule.name in _OVERWRITES:
                return _join([_Origin(everything.may), *(x.of_part for i, x in origins.items() if i > 0)])
            total = _union([*_of_factors(rule.name, operands, origins), *listed])
            return total if rule.is_known and rule.name not in _SELECTIONS else total.of_part
        return _Origin(everything.may)

    def _note_results(
        self, rule: _Rule, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, origin: _Origin
    ) -> None:
        """Note the origin of what an operation has written: arguments, and new tensors."""
        changed = [args[i] if i < len(args) else kwargs.get(name) for i, name in rule.written]
        if isinstance(result, list) or any(isinstance(x, list | tuple) for x in changed):
            origin = origin.of_part
        for tensor in _tensors(changed):
            if (storage := _storage(tensor)) is not None:
                old = self._origin_of_storage(storage)
                if rule.name == "copy" or rule.name in _IGNORED:
                    old = _Origin(old.may)  # the rest may be replaced next
                self._note(storage, origin if _covers(tensor, storage) else _join([old, origin]))
        if rule.is_known and not origin.may:
            return
        for tensor in _tensors(result):
            if (storage := _storage(tensor)) is not None and not (
                rule.may_be_view and (storage._cdata in self._written or storage.data_ptr() in self._sources)
            ):
                is_single = tensor.numel() == 1 and rule.name not in _JOINS
                self._note(storage, origin.of_sum if is_single else origin)

    def _note(self, storage: torch.UntypedStorage, origin: _Origin) -> None:
        if len(self._written) >= self._max_written:
            entries = self._written.items()
            self._written = {key: x for key, x in entries if not x[0].expired()}
            self._max_written = max(_MAX_WRITTEN, 2 * len(self._written))
        reference = StorageWeakRef(storage)
        self._written[reference.cdata] = reference, origin


class _Numbers:
    """Numbers that an evaluation has taken out of tensors that depend on weights."""

    def __init__(self) -> None:
        self._sum, self._count, self._last = 0.0, 0, (math.nan, 0)
        self._common = -1

    def add(self, number: Any, weights: int) -> None:
        if isinstance(number, int | float) and not isinstance(number, bool):  # which is no more than a check
            self._common &= weights
            self._sum, self._count, self._last = self._sum + number, self._count + 1, (number, weights)

    def origin_of(self, answer: float) -> int:
        """The weights that an answer was computed from.

        It is the last number, their sum by a count of examples, or their mean with a smaller last batch. Otherwise
        nothing is known: numpy may have computed it, and numbers only have been logged.
        """
        last, weights = self._last
        if last == answer:
            return weights
        if not (self._count and math.isfinite(self._sum) and math.isfinite(answer) and answer):
            return 0
        divisor = self._sum / answer
        is_share = 0.5 < divisor < math.inf and abs(divisor - round(divisor)) <= 1e-9 * max(1.0, min(divisor, 1e3))
        means = [(self._sum - last) / max(1, self._count - 1), self._sum / self._count]
        is_ragged = self._count > 1 and min(means) <= answer <= max(means)
        return self._common if is_share or is_ragged else 0


@cache
def _rule_of(func: Any) -> _Rule:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _Rule("", False)
    namespace, name = schema.name.split("::")
    written = [(i, x) for i, x in enumerate(schema.arguments) if x.alias_info is not None and x.alias_info.is_write]
    outputs = frozenset(x.name for _, x in written if x.kwarg_only)
    is_known, may_be_view = namespace == "aten", any(x.alias_info is not None for x in schema.returns)
    return _Rule(name.rstrip("_"), is_known, tuple((i, x.name) for i, x in written), outputs, may_be_view)


def _union(origins: Iterable[_Origin]) -> _Origin:
    """The origin of elements of which each is computed from all of several tensors."""
    may = some = each = 0
    for origin in origins:
        may, some, each = may | origin.may, some | origin.some, each | origin.each
    return _Origin(may, some, each)


def _join(origins: Sequence[_Origin]) -> _Origin:
    """The origin of elements of which each is computed from one of several tensors."""
    each = -1
    for origin in origins:
        each &= origin.each
    return _union(origins)._replace(each=each if origins else 0)


def _chosen(name: str, operands: Sequence[Any], origins: Mapping[int, _Origin]) -> list[_Origin]:
    """Origins of the two arguments that an operation takes elements from, where it takes any."""
    mask, first, second = (0, 1, 2) if name == "where" else (1, 2, 0)
    taken = _local(operands[mask])
    indices = [first] * bool(taken.any()) + [second] * (not bool(taken.all()))
    return [origins[i] for i in indices if i in origins]


def _of_factors(name: str, operands: Sequence[Any], origins: Mapping[int, _Origin]) -> list[_Origin]:
    """Origins of arguments, but for what a product with zeros may leave out."""
    factors, kept = _FACTORS.get(name, ()), dict(origins)
    is_elementwise = name in ("mul", "multiply")
    for i, other in zip(factors, reversed(factors), strict=True):
        factor = _local(operands[other])
        if i not in kept or not (is_elementwise or kept[i].some != kept[i].each):
            continue
        if is_elementwise and not (factor.any() if isinstance(factor, Tensor) else factor):
            return [_Origin(origin.may) for origin in origins.values()]
        if not (factor.all() if isinstance(factor, Tensor) else factor):
            kept[i] = kept[i]._replace(each=0) if is_elementwise and kept[i].some == kept[i].each else kept[i].of_part
    return [*kept.values()]


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from _tensors(part)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None for sparse and other tensors that have none, and without values."""
    local = _local(tensor)
    filled = getattr(local, "elem", local)  # what a collective still fills has another tensor in it
    try:
        storage: torch.UntypedStorage = filled.untyped_storage()
        if storage.device.type == "meta":
            return None
        storage.data_ptr()  # an error for a tensor that consists of others
    except (NotImplementedError, RuntimeError):
        return None
    return storage


def _covers(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    local = _local(tensor)
    sizes = [size for size, stride in zip(local.shape, local.stride(), strict=True) if stride]
    return bool(math.prod(sizes) * local.element_size() >= storage.nbytes())


def _local(tensor: Any) -> Any:
    is_plain = type(tensor) in (Tensor, nn.Parameter)  # the fast path
    return tensor.to_local() if not is_plain and hasattr(tensor, "to_local") else tensor


def local_shard(tensor: Any) -> Tensor:
    """This rank's shard of a parameter."""
    local: Tensor = _local(tensor).detach()
    return local
