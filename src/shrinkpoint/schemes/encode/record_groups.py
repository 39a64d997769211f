"""Plans which tensors share a record, the moments that are their coding context, and the order of the records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from shrinkpoint._native import xxh3_128
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.coder import num_numbers, num_taps
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.recipe import MAX_TAPS
from shrinkpoint.codec.reference import QuantizedTensor, Reference, lattice_sources, tensor_rows
from shrinkpoint.guard import no_gc
from shrinkpoint.quantize.statistics import entropy_bits
from shrinkpoint.tensors.compare import same_bits, same_tensors
from shrinkpoint.tensors.dtypes import as_bits, joined_bytes, materialize, tensor_bytes, torch_dtype
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import DTYPES, OptimizerInfo, Role, TensorInfo

MAX_SHARED_NUMEL = 1 << 16
"""Number of values below which a tensor shares a record: its own entropy-coding tables would cost more."""
MAX_BUNDLE_NUMEL = 1 << 20
"""Number of values after which a shared record is full: decoding one small tensor decodes its whole record."""
MAX_DIGEST_BYTES = 1 << 16
"""Bytes up to which whole tensors are hashed to find copies; of larger ones, only the first values."""
_SAMPLED_CODES = 1 << 12
_CONTEXT_GAIN = 1.4  # Bits of a difference without its context for each bit with it, about
_MAX_KEY_BYTES = 256  # Bytes up to which they are compared themselves
_MOMENT2, _MOMENTS = Role.MOMENT2, (Role.MOMENT1, Role.MOMENT2)
_ROLE_ORDER = {Role.MOMENT1: 0, Role.MOMENT2: 1, Role.MASTER: 2}  # contexts before the tensors they are context for
_Key = tuple[object, ...]  # Tensors with equal keys share a record


class ContextMap:
    """Maps each tensor to its moments and to what is known about its optimizer.

    Args:
        state: the state to be encoded.
        excluded: names of tensors that are decoded after all coded ones, so that they cannot be context.
    """

    def __init__(self, state: FlatState, excluded: Collection[str]) -> None:
        self._state = state
        self._excluded = excluded
        self._moments: dict[str, tuple[str, str] | None] = {}
        self._info_by_moment2 = {
            optimizer.moment2: optimizer for optimizer in state.optimizer_info.values() if optimizer.moment2 is not None
        }

    def optimizer_info(self, info: TensorInfo) -> OptimizerInfo | None:
        """Return what is known about the optimizer of a parameter, or of the parameter of a second moment."""
        if info.role is _MOMENT2:
            return self._info_by_moment2.get(info.name)
        return self._state.optimizer_info.get(info.name)

    def moments(self, info: TensorInfo) -> tuple[str, str] | None:
        """Return the names of the two moments that are context for a tensor, or None.

        For a parameter these are its first and second moment; for a second moment, the first moment twice.
        """
        if info.name not in self._moments:
            self._moments[info.name] = self._find_moments(info)
        return self._moments[info.name]

    def _find_moments(self, info: TensorInfo) -> tuple[str, str] | None:
        optimizer = self.optimizer_info(info)
        if optimizer is None or optimizer.moment1 is None:
            return None
        second = optimizer.moment1 if info.role is _MOMENT2 else optimizer.moment2
        if second is None or not self._is_valid_context(optimizer.moment1, info):
            return None
        is_valid = second == optimizer.moment1 or self._is_valid_context(second, info)
        return (optimizer.moment1, second) if is_valid else None

    def _is_valid_context(self, name: str, info: TensorInfo) -> bool:
        """True if a tensor can be context for another one: a moment of equal shape that is decoded first."""
        moment = self._state.infos.get(name)
        if moment is None or name in self._excluded or name == info.name or moment.shape != info.shape:
            return False
        is_earlier = moment.role in _MOMENTS and moment.role is not info.role
        # Only 32-bit floats are predicted, from 32-bit moments: rounding 64-bit ones depends on the machine's settings.
        is_exact = moment.dtype != "F64" or info.dtype == "F64"
        return is_earlier and is_exact and DTYPES[moment.dtype].kind == "float"


@dataclass(frozen=True)
class RecordGroup:
    """Tensors that are coded together in one record."""

    infos: tuple[TensorInfo, ...]  # of one dtype and role
    taps: int  # number of positions of the trailing axes that are coded one after another
    # True if the parent holds all of them. "codes" then have the parent's codes as context, or are residuals to its
    # values; "points" have its values as context.
    has_reference: bool
    moments: tuple[tuple[str, str], ...]  # (first, second) moment of each tensor; () if a tensor has none
    # What is coded: "values", "codes" (of a codebook) or "points" (codes on a lattice).
    kind: Literal["values", "codes", "points"] = "values"
    # For each tensor, the name of the tensor whose codes are context for its codes, or that its points are relative to;
    # () if there is none.
    context_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordPlan:
    """A partition of the tensors of a state by how they are encoded."""

    unchanged: list[TensorInfo]  # tensors that equal the parent's
    groups: list[RecordGroup]  # tensors to be coded, contexts first
    # Tensors with the name of another tensor that they equal, perhaps after a cast.
    copies: list[tuple[TensorInfo, str]]
    contexts: ContextMap  # the moments of the tensors to be coded


@no_gc()  # which would visit the many objects that are created here
def plan_records(
    state: FlatState,
    reference: Reference | None,
    quantized: Mapping[str, QuantizedTensor],
    separate: Collection[str] = (),
) -> RecordPlan:
    """Sort the tensors of a state into unchanged ones, copies and groups to be coded.

    Args:
        reference: the parent's decoded tensors; None: there is no parent.
        quantized: name of a quantized tensor -> its codes and codebook or lattice.
        separate: names of tensors on lattices that share no record with others.
    """
    shared = set[str]() if reference is None else reference.shared_names(state.infos.values())
    same = set[str]() if reference is None else _unchanged_names(shared, state, reference, quantized)
    unchanged = [info for info in state.infos.values() if info.name in same]
    changed = [info for info in state.infos.values() if info.name not in same]
    copies = _find_copies([info for info in changed if info.name not in quantized], state, quantized)
    copied = {info.name for info, _ in copies}
    contexts = ContextMap(state, copied)
    to_code = [info for info in changed if info.name not in copied]
    exact = [info for info in to_code if info.name not in quantized]
    quantized = {info.name: quantized[info.name] for info in to_code if info.name in quantized}
    codebook_infos = [info for info in to_code if isinstance(quantized.get(info.name), CodebookTensor)]
    lattice_infos = [info for info in to_code if isinstance(quantized.get(info.name), LatticeTensor)]

    def make_key(info: TensorInfo) -> _Key:
        has_reference = info.name in shared
        has_moments = bool(contexts.moments(info))
        # Tensors without values have neither rows nor columns, and are stored as they are.
        return (info.dtype, info.role, _group_taps(info), has_reference, has_moments, not info.nbytes)

    groups = [
        RecordGroup(
            tuple(members), _group_taps(members[0]), bool(key[3]), tuple(filter(None, map(contexts.moments, members)))
        )
        for key, members in _bundle(sorted(exact, key=_role_order), make_key)
    ]
    groups += _codebook_groups(codebook_infos, contexts, reference, shared, quantized)
    apart = [info for info in lattice_infos if info.name in separate]
    for members in ([info for info in lattice_infos if info.name not in separate], apart):
        groups += _lattice_groups(members, reference, shared, quantized)
    depths = {name: _dependency_depth(name, quantized) for name in quantized}
    groups.sort(key=lambda group: _sort_key(group, depths))
    return RecordPlan(unchanged, _contexts_first(groups), copies, contexts)


# unchanged tensors


def _unchanged_names(
    shared: Collection[str], state: FlatState, reference: Reference, quantized: Mapping[str, QuantizedTensor]
) -> set[str]:
    """The names of the tensors that equal the parent's, of those that have the same layout there."""
    out, candidates, pair = set[str](), list[str](), (state.tensors, reference.tensors)
    sources = [lattice_sources(tensors, shared) for tensors in pair]  # the codes that values are made from
    for name in shared:
        codes = quantized.get(name)
        if codes is not None and not (isinstance(codes, CodebookTensor) and codes.residual):
            # A reader keeps the codes for the next delta, so they must be equal; where they are, values mostly are.
            parent_codes = reference.quantized.get(name)
            if parent_codes is None or not _have_equal_codes(codes, parent_codes):
                continue
            if all(name in held and not held[name].quantized.relative_to for held in sources):
                out.add(name)
                continue
        # Decoding more than the first row is mostly needless
        if name not in sources[1] or same_bits(*[tensor_rows(tensors, name, slice(1)) for tensors in pair]):
            candidates.append(name)
    return out | same_tensors(candidates, *pair)


def _have_equal_codes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    if isinstance(a, LatticeTensor) and isinstance(b, LatticeTensor):
        return a.has_equal_codes(b)
    if isinstance(a, LatticeTensor) or isinstance(b, LatticeTensor):
        return False
    if (a.first_code, a.bins, a.exact.dtype, a.exact.shape) != (b.first_code, b.bins, b.exact.dtype, b.exact.shape):
        return False
    return all(same_bits(x, y) for x, y in ((a.codes, b.codes), (a.centers, b.centers), (a.exact, b.exact)))


# copies


def _find_copies(
    infos: Sequence[TensorInfo], state: FlatState, quantized: Mapping[str, QuantizedTensor]
) -> list[tuple[TensorInfo, str]]:
    """Tensors that repeat an earlier one, and narrow floats that are a cast of a 32-bit one of the same shape."""
    names_by_content: dict[_Key, list[str]] = {}
    casts = _CastIndex(info for info in infos if info.dtype in ("BF16", "F16"))
    layouts = {(info.dtype, info.shape) for info in infos if info.nbytes}
    for name in quantized:
        info = state.infos[name]
        if (info.dtype, info.shape) in layouts or casts.may_hold(info):
            tensor = state.tensors[name]
            names_by_content.setdefault(_content_key(info, tensor), []).append(name)
            casts.add(info, tensor)
    copies = []
    contents = _small_contents(infos, state)
    for info in sorted(infos, key=lambda info: info.dtype != "F32"):  # sources of casts first
        tensor, content = state.tensors[info.name], contents.get(info.name)
        if content is None and info.nbytes == 0:
            continue
        key = _content_key(info, tensor) if content is None else (info.dtype, info.shape, content)
        candidates = names_by_content.setdefault(key, [])
        is_key = content is not None  # candidates have the same content
        source = next((name for name in candidates if is_key or same_bits(state.tensors[name], tensor)), None)
        if source is None and casts.has_narrow:
            wide = casts.sources(info, tensor)
            source = next((name for name in wide if _is_exact_cast(tensor, state.tensors[name])), None)
        if source is not None:
            copies.append((info, source))
            continue
        candidates.append(info.name)
        if casts.has_narrow:
            casts.add(info, tensor)
    return copies


def _small_contents(infos: Sequence[TensorInfo], state: FlatState) -> dict[str, bytes]:
    """The bytes of all small tensors, by name; copied together, not with some calls for each."""
    small: dict[str, list[TensorInfo]] = {}
    for info in infos:
        if 0 < info.nbytes <= _MAX_KEY_BYTES and state.tensors[info.name].is_contiguous():
            small.setdefault(info.dtype, []).append(info)
    contents = {}
    for members in small.values():
        joined, start = joined_bytes([state.tensors[info.name] for info in members]).tobytes(), 0
        for info in members:
            end = start + info.nbytes
            contents[info.name], start = joined[start:end], end
    return contents


def _content_key(info: TensorInfo, tensor: Tensor) -> _Key:
    """A key that equal tensors share; it covers all bytes of small tensors, and the first ones of large tensors."""
    if tensor.is_contiguous():
        content = tensor_bytes(tensor)
        if info.nbytes > MAX_DIGEST_BYTES:
            content = content[: 64 * tensor.element_size()]
        return (info.dtype, info.shape, content.tobytes() if content.nbytes <= _MAX_KEY_BYTES else xxh3_128(content))
    first = as_bits(materialize(tensor)).reshape(-1)[:64]  # integers: torch warns when it copies complex32
    return (info.dtype, info.shape, tensor_bytes(first).tobytes())


class _CastIndex:
    """Finds 32-bit tensors that a narrow tensor may be a cast of, by their first values.

    Comparing all pairs would take time quadratic in the number of tensors.

    Args:
        narrow: the tensors that may be casts.
    """

    def __init__(self, narrow: Iterable[TensorInfo]) -> None:
        self._dtypes: dict[tuple[int, ...], set[torch.dtype]] = {}
        for info in narrow:
            self._dtypes.setdefault(info.shape, set()).add(torch_dtype(info.dtype))
        self._names: dict[_Key, list[str]] = {}
        self.has_narrow = bool(self._dtypes)  # any tensor may be a cast

    def may_hold(self, info: TensorInfo) -> bool:
        """True if some narrow tensor has the shape of this one."""
        return info.dtype == "F32" and info.shape in self._dtypes

    def add(self, info: TensorInfo, tensor: Tensor) -> None:
        if info.dtype == "F32":
            for dtype in self._dtypes.get(info.shape, ()):
                self._names.setdefault(self._cast_key(info, tensor, dtype), []).append(info.name)

    def sources(self, info: TensorInfo, tensor: Tensor) -> list[str]:
        """Return the names of the tensors that a tensor may be a cast of."""
        dtypes = self._dtypes.get(info.shape)
        dtype = torch_dtype(info.dtype) if dtypes else None
        if not dtypes or dtype not in dtypes:
            return []
        return self._names.get(self._cast_key(info, tensor, dtype), [])

    def _cast_key(self, info: TensorInfo, tensor: Tensor, dtype: torch.dtype) -> _Key:
        return (dtype, info.shape, tensor_bytes(tensor.reshape(-1)[:64].to(dtype)).tobytes())


def _is_exact_cast(tensor: Tensor, source: Tensor) -> bool:
    head, source_head = tensor.reshape(-1)[:1024], source.reshape(-1)[:1024]
    if not (same_bits(head, source_head.to(tensor.dtype)) and same_bits(tensor, source.to(tensor.dtype))):
        return False
    return not bool(source.isnan().any())  # casts of NaN differ between machines


# groups


def _bundle(
    infos: Sequence[TensorInfo], make_key: Callable[[TensorInfo], _Key]
) -> Iterator[tuple[_Key, list[TensorInfo]]]:
    """Yield the tensors of each record, with their key: a large tensor alone, small ones together until it is full."""
    bundles: dict[_Key, list[TensorInfo]] = {}
    bundle_numel: dict[_Key, int] = {}
    for info, numel in zip(infos, [num_numbers(info) for info in infos], strict=True):
        key = make_key(info)
        if numel >= MAX_SHARED_NUMEL:
            key = (*key, info.name)
        elif bundle_numel.get(key, 0) + numel > MAX_BUNDLE_NUMEL:
            bundles[(*key, len(bundles))] = bundles.pop(key)
            bundle_numel[key] = 0
        bundles.setdefault(key, []).append(info)
        bundle_numel[key] = bundle_numel.get(key, 0) + numel
    yield from bundles.items()


def _codebook_groups(
    infos: list[TensorInfo],
    contexts: ContextMap,
    reference: Reference | None,
    shared: Collection[str],
    quantized: Mapping[str, QuantizedTensor],
) -> list[RecordGroup]:
    """Group tensors with codebooks: of one dtype, role and kind of context, and with equally many centers."""

    def make_key(info: TensorInfo) -> _Key:
        tensor = quantized[info.name]
        assert isinstance(tensor, CodebookTensor)
        depth = _dependency_depth(info.name, quantized)
        has_reference = False
        if reference is not None and info.name in shared:
            has_reference = tensor.residual or (not depth and reference.has_codes(info.name))
        moments = () if info.role is Role.MOMENT2 else contexts.moments(info) or ()
        has_moments = bool(moments) and not any(n in quantized and _required_tensor(quantized[n]) for n in moments)
        codebook = (tensor.bins, tensor.first_code, tensor.exact.dtype, tensor.residual)
        return (has_reference, has_moments, depth, info.dtype, info.role, *codebook)

    return [
        RecordGroup(
            tuple(members),
            1,
            bool(key[0]),
            tuple(filter(None, map(contexts.moments, members))) if key[1] else (),
            kind="codes",
            context_names=_context_names(members, quantized) if key[2] else (),
        )
        for key, members in _bundle(infos, make_key)
    ]


def _is_predicted(moment: LatticeTensor, parent: LatticeTensor) -> bool:
    """True if the parent's points tell of those of a first moment without new dither; a sample of them decides.

    Rows that rest keep their codes, and so do large values for a few steps. What is rounded up or down by chance does
    not.
    """
    stride = max(1, moment.codes.numel() // _SAMPLED_CODES)
    own, before = (points.codes.reshape(-1)[::stride].to(torch.int64) for points in (moment, parent))
    histograms = (torch.bincount(codes.clamp(-128, 127) + 128) for codes in (own, own - before))
    alone, beside_parent = map(entropy_bits, histograms)
    return beside_parent <= _CONTEXT_GAIN * alone


def _lattice_groups(
    infos: list[TensorInfo],
    reference: Reference | None,
    shared: Collection[str],
    quantized: Mapping[str, QuantizedTensor],
) -> list[RecordGroup]:
    """Group tensors on lattices: of one dtype, role and kind of context, and on lattices of one kind."""

    def make_key(info: TensorInfo) -> _Key:
        tensor = quantized[info.name]
        assert isinstance(tensor, LatticeTensor)
        is_relative = bool(tensor.relative_to)
        parent = reference.quantized.get(info.name) if info.name in shared and reference is not None else None
        is_predicted = info.role is not Role.MOMENT1  # which forgets what it was, and has new dither in most saves
        if not is_predicted and isinstance(parent, LatticeTensor) and parent.lattice.seed == tensor.lattice.seed:
            is_predicted = _is_predicted(tensor, parent)
        has_reference = info.name in shared and is_predicted
        is_log = tensor.lattice.spacing == "log"  # whose exponents may differ from the parent's at next to no cost
        has_equal_lattice = isinstance(parent, LatticeTensor) and (is_log or parent.lattice == tensor.lattice)
        has_origin = tensor.origin is not None, tensor.has_origin_of(parent)
        lattice = (tensor.lattice.spacing, tensor.lattice.step, has_equal_lattice, *has_origin)
        return (has_reference, is_relative, *lattice, info.dtype, info.role)

    return [
        RecordGroup(
            tuple(members),
            1,
            bool(key[0]),
            (),
            kind="points",
            context_names=_context_names(members, quantized) if key[1] else (),
        )
        for key, members in _bundle(infos, make_key)
    ]


def _group_taps(info: TensorInfo) -> int:
    if len(info.shape) < 3:
        return 1
    taps, dtype = num_taps(info), DTYPES[info.dtype]
    return taps if 1 < taps <= MAX_TAPS and dtype.kind == "float" and dtype.mantissa else 1


def _context_names(infos: list[TensorInfo], quantized: Mapping[str, QuantizedTensor]) -> tuple[str, ...]:
    return tuple(_required_tensor(quantized[info.name]) for info in infos)


# order of groups


def _sort_key(group: RecordGroup, depths: Mapping[str, int]) -> tuple[int, int]:
    """Contexts before the tensors that they are context for."""
    names = [info.name for info in group.infos] + [name for pair in group.moments for name in pair]
    return max(depths.get(name, 0) for name in names), _role_order(group.infos[0])


def _contexts_first(groups: Sequence[RecordGroup]) -> list[RecordGroup]:
    """Move groups behind those that hold their contexts; the order stays as it is otherwise.

    Depths are not enough: a first moment whose second moment is the parent's depends on no codes of this file, but
    shares its record with others, which comes after the records that those depend on.

    Raises:
        ValueError: groups depend on each other.
    """
    numbers = {info.name: number for number, group in enumerate(groups) for info in group.infos}
    waiting = []
    for number, group in enumerate(groups):
        contexts = [*chain.from_iterable(group.moments), *group.context_names]
        waiting.append((group, {numbers[name] for name in contexts if name in numbers} - {number}))
    ordered: list[RecordGroup] = []
    done = set[int]()
    while waiting:
        ready = next((index for index, (_, contexts) in enumerate(waiting) if contexts <= done), None)
        if ready is None:
            raise ValueError("tensors are context for each other")
        group, _ = waiting.pop(ready)
        ordered.append(group)
        done.add(numbers[group.infos[0].name])
    return ordered


def _role_order(info: TensorInfo) -> int:
    return _ROLE_ORDER.get(info.role, len(_ROLE_ORDER))


def _dependency_depth(name: str, quantized: Mapping[str, QuantizedTensor]) -> int:
    """Number of tensors whose codes must be decoded, one after another, before those of a tensor.

    Raises:
        ValueError: a tensor depends on itself.
    """
    depth = 0
    while True:
        required = _required_tensor(quantized[name])
        if required not in quantized or quantized[required].codes.shape != quantized[name].codes.shape:
            return depth
        name, depth = required, depth + 1
        if depth > len(quantized):
            raise ValueError(f"codes of {name!r} are context for themselves")


def _required_tensor(quantized_tensor: QuantizedTensor) -> str:
    """The name of the tensor of the same file that is needed to decode this one; "" if there is none."""
    if isinstance(quantized_tensor, CodebookTensor):
        return quantized_tensor.context_name
    return quantized_tensor.relative_to
