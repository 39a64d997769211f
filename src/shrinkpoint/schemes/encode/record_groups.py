"""Plans which tensors of a state share a record, and the order of the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shrinkpoint._native import xxh3_128
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import NUMBER_FORMATS
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.pack import num_numbers, num_taps
from shrinkpoint.codec.recipe import MAX_TAPS
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.schemes.encode.contexts import ContextMap
from shrinkpoint.tensors.dtypes import as_bits, materialize, tensor_bytes, torch_dtype
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role, TensorInfo

MAX_SHARED_NUMEL = 1 << 16
"""Numbers below which a tensor shares a record: on its own it would not pay for its tables."""
MAX_BUNDLE_NUMEL = 1 << 20
"""Numbers after which a shared record is full: one small tensor must not cost the decoding of a large model."""
MAX_DIGEST_BYTES = 1 << 16
"""Bytes up to which a tensor is told from others by all of it; many larger ones would take longer than coding them."""

_ROLE_ORDER = [Role.MOMENT1, Role.MOMENT2, Role.MASTER]  # contexts before what is coded under them


@dataclass(frozen=True)
class RecordGroup:
    """Tensors to be coded together.

    Attributes:
        infos: of one dtype and role.
        taps: positions of the trailing axes that are coded after each other.
        has_reference: the parent holds them all.
        moments: (first, second) moment of each; () where a member has none.
        kind: what is coded: their "values"; their "codes", where `has_reference` those of the parent being the
            context, or its
            values what they are differences to; or their "points", where `has_reference` beside its values.
        context_names: of each, the name of the tensor whose codes are context for its own, or that its points are
            relative to;
            () for none.
    """

    infos: tuple[TensorInfo, ...]
    taps: int
    has_reference: bool
    moments: tuple[tuple[str, str], ...]
    kind: Literal["values", "codes", "points"] = "values"
    context_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordPlan:
    """A state's tensors by what is done with them.

    Attributes:
        unchanged: equal to the parent's.
        groups: to be coded, contexts first.
        copies: equal, after a cast at most, to the tensor that is named.
    """

    unchanged: list[TensorInfo]
    groups: list[RecordGroup]
    copies: list[tuple[TensorInfo, str]]


def plan_records(state: FlatState, reference: Reference | None, quantized: Mapping[str, QuantizedTensor]) -> RecordPlan:
    """Sort a state's tensors into references, copies and groups to be coded; `quantized` are of those quantized."""
    same: list[TensorInfo] = []
    rest: list[TensorInfo] = []
    for info in state.infos.values():
        (same if _is_unchanged(info, state, reference, quantized.get(info.name)) else rest).append(info)
    copies = _find_copies([info for info in rest if info.name not in quantized], state, quantized)
    copied = {info.name for info, _ in copies}
    links = ContextMap(state, copied)
    rest = [info for info in rest if info.name not in copied]
    groups = _value_groups([info for info in rest if info.name not in quantized], links, reference, state)
    quantized = {info.name: quantized[info.name] for info in rest if info.name in quantized}
    chosen = [info for info in rest if info.name in quantized]
    codes = _code_groups(
        [one for one in chosen if isinstance(quantized[one.name], CodebookTensor)], links, reference, state, quantized
    )
    codes += _lattice_groups(
        [one for one in chosen if isinstance(quantized[one.name], LatticeTensor)], reference, state, quantized
    )
    depths = {name: _dependency_depth(name, quantized) for name in quantized}
    return RecordPlan(same, sorted(groups + codes, key=lambda group: _sort_key(group, depths)), copies)


def _parent_tensor(info: TensorInfo, state: FlatState, reference: Reference | None) -> Tensor | None:
    """The parent's tensor of this name, shape and dtype."""
    if reference is None:
        return None
    return reference.get_like(info.name, info.shape, state.tensors[info.name].dtype)


def _sort_key(group: RecordGroup, depths: Mapping[str, int]) -> tuple[int, int]:
    """Contexts before what is coded under them."""
    names = [info.name for info in group.infos] + [name for pair in group.moments for name in pair]
    return max(depths.get(name, 0) for name in names), _role_order(group.infos[0])


def _dependency_depth(name: str, quantized: Mapping[str, QuantizedTensor]) -> int:
    """How many tensors' codes must be there before those of this one."""
    depth = 0
    while (other := _required_tensor(quantized[name])) in quantized and quantized[other].codes.shape == quantized[
        name
    ].codes.shape:
        name, depth = other, depth + 1
        if depth > len(quantized):
            raise ValueError(f"codes of {name!r} under themselves")
    return depth


def _required_tensor(quantized_tensor: QuantizedTensor) -> str:
    """The tensor of the same file without which there is no decoding this one."""
    return (
        quantized_tensor.context_name if isinstance(quantized_tensor, CodebookTensor) else quantized_tensor.relative_to
    )


def _is_unchanged(
    info: TensorInfo, state: FlatState, reference: Reference | None, quantized_tensor: QuantizedTensor | None
) -> bool:
    old = _parent_tensor(info, state, reference)
    if old is None or reference is None or not _bits_equal(state.tensors[info.name], old):
        return False
    before = reference.quantized.get(info.name)  # a reader goes on with these, so they must be what this state has
    if quantized_tensor is None or (isinstance(quantized_tensor, CodebookTensor) and quantized_tensor.residual):
        return True
    return before is not None and _have_equal_codes(quantized_tensor, before)


def _have_equal_codes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    if isinstance(a, LatticeTensor) or isinstance(b, LatticeTensor):
        return (
            isinstance(a, LatticeTensor)
            and isinstance(b, LatticeTensor)
            and a.lattice == b.lattice
            and _bits_equal(a.codes, b.codes)
        )
    if (a.first_code, a.bins, a.exact.dtype, a.exact.shape) != (b.first_code, b.bins, b.exact.dtype, b.exact.shape):
        return False
    return all(_bits_equal(x, y) for x, y in ((a.codes, b.codes), (a.centers, b.centers), (a.exact, b.exact)))


def _bits_equal(x: Tensor, y: Tensor) -> bool:
    """Bit by bit, so that NaN equals itself and -0 does not equal 0; a differing start decides at once."""
    a, b = tensor_bytes(x), tensor_bytes(y)
    head = slice(0, 4096)
    return bool((a[head] == b[head]).all()) and torch.equal(torch.from_numpy(a), torch.from_numpy(b))


def _find_copies(
    infos: Iterable[TensorInfo], state: FlatState, quantized: Mapping[str, QuantizedTensor]
) -> list[tuple[TensorInfo, str]]:
    """Tensors that repeat an earlier one, and narrow floats that are a cast of a 32-bit one of the same shape."""
    infos = list(infos)
    seen: dict[tuple[object, ...], list[str]] = {}
    casts = _CastIndex(info for info in infos if info.dtype in ("BF16", "F16"))
    for name in quantized:
        info, x = state.infos[name], state.tensors[name]
        seen.setdefault(_content_key(info, x), []).append(name)
        casts.add(info, x)
    out = []
    for info in sorted(infos, key=lambda info: info.dtype != "F32"):  # what is cast from comes first
        x = state.tensors[info.name]
        if info.nbytes == 0:
            continue
        alike = seen.setdefault(_content_key(info, x), [])
        source = _first_match(alike, lambda name, x=x: _bits_equal(state.tensors[name], x)) if alike else None  # type: ignore[misc]
        if source is None and (wide := casts.sources(info, x)):
            source = _first_match(wide, lambda name, x=x: _is_exact_cast(x, state.tensors[name]))  # type: ignore[misc]
        if source is not None:
            out.append((info, source))
            continue
        alike.append(info.name)
        casts.add(info, x)
    return out


def _content_key(info: TensorInfo, x: Tensor) -> tuple[object, ...]:
    """What equal tensors have in common, and no others of a few bytes."""
    if x.is_contiguous():
        head = tensor_bytes(x) if info.nbytes <= MAX_DIGEST_BYTES else tensor_bytes(x)[: 64 * x.element_size()]
        return (info.dtype, info.shape, head.tobytes() if head.nbytes <= 256 else xxh3_128(head))
    first = as_bits(materialize(x)).reshape(-1)[:64]  # as integers: torch warns of complex32 when it has to copy some
    return (info.dtype, info.shape, tensor_bytes(first).tobytes())


class _CastIndex:
    """32-bit tensors by what their first values are as narrow floats: with each one compared with each, many cost the
    square of their number.

    Args:
        narrow: the tensors that may be casts.
    """

    def __init__(self, narrow: Iterable[TensorInfo]) -> None:
        self._dtypes: dict[tuple[int, ...], set[torch.dtype]] = {}
        for info in narrow:
            self._dtypes.setdefault(info.shape, set()).add(torch_dtype(info.dtype))
        self._names: dict[tuple[object, ...], list[str]] = {}

    def add(self, info: TensorInfo, x: Tensor) -> None:
        """A tensor that others may be casts of."""
        if info.dtype == "F32":
            for dtype in self._dtypes.get(info.shape, ()):
                self._names.setdefault(self._content_key(info, x, dtype), []).append(info.name)

    def sources(self, info: TensorInfo, x: Tensor) -> list[str]:
        """The names of those that a tensor may be a cast of."""
        dtype = torch_dtype(info.dtype)
        if dtype not in self._dtypes.get(info.shape, ()):
            return []
        return self._names.get(self._content_key(info, x, dtype), [])

    def _content_key(self, info: TensorInfo, x: Tensor, dtype: torch.dtype) -> tuple[object, ...]:
        return (dtype, info.shape, tensor_bytes(x.reshape(-1)[:64].to(dtype)).tobytes())


def _is_exact_cast(x: Tensor, source: Tensor) -> bool:
    flat, wide = x.reshape(-1), source.reshape(-1)
    head = slice(0, 1024)
    if not _bits_equal(flat[head], wide[head].to(x.dtype)) or not _bits_equal(x, source.to(x.dtype)):
        return False
    return not bool(source.isnan().any())  # what becomes of a nan differs between machines


def _first_match(names: list[str], predicate: Callable[[str], bool]) -> str | None:
    return next((name for name in names if predicate(name)), None)


def _value_groups(
    infos: list[TensorInfo], contexts: ContextMap, reference: Reference | None, state: FlatState
) -> list[RecordGroup]:
    bundles: dict[tuple[object, ...], list[TensorInfo]] = {}
    filled: dict[tuple[object, ...], int] = {}
    for info in sorted(infos, key=_role_order):
        based = _parent_tensor(info, state, reference) is not None
        empty = not num_numbers(info)  # such a one has neither rows nor columns, and is stored as it is
        key: tuple[object, ...] = (info.dtype, info.role, _group_taps(info), based, bool(contexts.moments(info)), empty)
        if num_numbers(info) >= MAX_SHARED_NUMEL:
            key = (*key, info.name)
        elif filled.get(key, 0) + num_numbers(info) > MAX_BUNDLE_NUMEL:
            bundles[(*key, len(bundles))] = bundles.pop(key)
            filled[key] = 0
        bundles.setdefault(key, []).append(info)
        filled[key] = filled.get(key, 0) + num_numbers(info)
    return [
        RecordGroup(tuple(members), _group_taps(members[0]), bool(key[3]), _moment_names(members, contexts))
        for key, members in bundles.items()
    ]


def _role_order(info: TensorInfo) -> int:
    return _ROLE_ORDER.index(info.role) if info.role in _ROLE_ORDER else len(_ROLE_ORDER)


def _code_groups(
    infos: list[TensorInfo],
    contexts: ContextMap,
    reference: Reference | None,
    state: FlatState,
    quantized: Mapping[str, QuantizedTensor],
) -> list[RecordGroup]:
    """As `_groups`, of tensors that are quantized: those in a record have equally many centers.

    Args:
        quantized: of these tensors and no others, so that contexts are codes of this file.
    """
    bundles: dict[tuple[object, ...], list[TensorInfo]] = {}
    for info in infos:
        one = quantized[info.name]
        assert isinstance(one, CodebookTensor)
        held = reference is not None and _parent_tensor(info, state, reference) is not None
        depth = _dependency_depth(info.name, quantized)
        based = held and reference is not None and (one.residual or (not depth and reference.has_codes(info.name)))
        moments = info.role is not Role.MOMENT2 and _are_independent(contexts.moments(info), quantized)
        alone = info.name if info.numel >= MAX_SHARED_NUMEL else ""
        key = (
            based,
            moments,
            depth,
            info.dtype,
            info.role,
            one.bins,
            one.first_code,
            one.exact.dtype,
            one.residual,
            alone,
        )
        bundles.setdefault(key, []).append(info)
    return [
        RecordGroup(
            tuple(members),
            1,
            bool(key[0]),
            _moment_names(members, contexts) if key[1] else (),
            kind="codes",
            context_names=tuple(_required_tensor(quantized[info.name]) for info in members) if key[2] else (),
        )
        for key, members in bundles.items()
    ]


def _lattice_groups(
    infos: list[TensorInfo], reference: Reference | None, state: FlatState, quantized: Mapping[str, QuantizedTensor]
) -> list[RecordGroup]:
    """As `_groups`, of tensors that are points: those in a record have lattices of one kind."""
    bundles: dict[tuple[object, ...], list[TensorInfo]] = {}
    for info in infos:
        one = quantized[info.name]
        assert isinstance(one, LatticeTensor)
        # What is relative to another tensor is rounded anew each time: the points before say nothing of these.
        based = not one.relative_to and reference is not None and _parent_tensor(info, state, reference) is not None
        before = reference.quantized.get(info.name) if based and reference is not None else None
        kept = isinstance(before, LatticeTensor) and before.lattice == one.lattice
        alone = info.name if info.numel >= MAX_SHARED_NUMEL else ""
        key = (based, one.lattice.spacing, one.lattice.step, info.dtype, info.role, bool(one.relative_to), kept, alone)
        bundles.setdefault(key, []).append(info)
    return [
        RecordGroup(
            tuple(members),
            1,
            bool(key[0]),
            (),
            kind="points",
            context_names=tuple(_required_tensor(quantized[info.name]) for info in members) if key[5] else (),
        )
        for key, members in bundles.items()
    ]


def _are_independent(moments: tuple[str, str] | None, quantized: Mapping[str, QuantizedTensor]) -> bool:
    """Whether there are moments, and these do not wait for other codes themselves."""
    return moments is not None and not any(name in quantized and _required_tensor(quantized[name]) for name in moments)


def _moment_names(infos: list[TensorInfo], contexts: ContextMap) -> tuple[tuple[str, str], ...]:
    return tuple(filter(None, map(contexts.moments, infos)))


def _group_taps(info: TensorInfo) -> int:
    taps = num_taps(info)
    return (
        taps if 1 < taps <= MAX_TAPS and NUMBER_FORMATS[info.dtype].is_float and not info.dtype.startswith("C") else 1
    )
