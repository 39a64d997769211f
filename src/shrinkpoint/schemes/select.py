"""Selects the tensors of a state that are quantized, the same ones on every rank that has shards of them.

A tensor that equals the decoded parent checkpoint bit by bit keeps its codes: a restored weight that no training moves
(a frozen backbone, the base of an adapter) would gain an error with every restore if it were rounded again to another
grid or with another dither. For every other tensor that stays exact, the reason is given."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shrinkpoint import humanize
from shrinkpoint.codec.lattice import LatticeTensor, as_matrix
from shrinkpoint.codec.parallel import map_tensors
from shrinkpoint.codec.reference import QuantizedTensor, Reference, lattice_source, tensor_rows
from shrinkpoint.device.reads import copy_together
from shrinkpoint.errors import warn_user
from shrinkpoint.quantize.statistics import ValueSums, value_sums
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.dtypes import as_bits
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON, OptimizerInfo, Role, TensorInfo
from shrinkpoint.tensors.optimizers import MomentKind

MIN_WEIGHT_NUMEL = 4096
"""Weights with fewer values stay exact: little is to be gained, and they are the likelier to matter."""
_PROBE_VALUES = 256
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorSelection:
    """The weights of a state to be quantized, and the tensors that follow from them."""

    # By name; the state's own, on their devices. Of sharded weights, this rank's shards that have values.
    tensors: dict[str, Tensor] = field(repr=False)
    # By the name of a copy (narrower, or tied), the name of the selected tensor that it is a cast of.
    cast_sources: dict[str, str]
    # Global names of weights that would have been selected but hold a nan or an infinity.
    nonfinite: tuple[str, ...] = ()
    global_names: tuple[str, ...] = ()  # names of the selected weights of all ranks, in the same order on every rank
    # Of the values of local tensors that could have been selected, by name.
    sums: Mapping[str, ValueSums] = field(default_factory=dict, repr=False)

    def warn_exact(
        self, state: FlatState, reference: Reference | None, frozen: Collection[str], global_tensors: GlobalTensors
    ) -> None:
        """Warn of weights that stay exact: if all do; not finite, but for constants. A collective.

        Args:
            reference: the decoded parent checkpoint; None if there is none.
            frozen: local names of parameters that take no gradients: a constant, unless the parent has other values.
        """
        if not self.global_names:
            _warn_of_no_weights(state)
        if not self.nonfinite:
            return
        nonfinite = {name for name, global_name in global_tensors.global_names.items() if global_name in self.nonfinite}
        flags = {name: name in frozen and not _has_moved(name, state, reference) for name in nonfinite}
        constant = global_tensors.tensors_where_all(flags)
        if moving := [name for name in self.nonfinite if name not in constant]:
            names = humanize.names(moving)
            warn_user(f"weights with nan or infinite values stay exact: {names}. Check whether training has diverged")

    def warn_outside_model(self, state: FlatState, parameters: Collection[str]) -> None:
        """Warn of large weights that an optimizer trains and that stay exact, as no trial values reach them.

        Args:
            parameters: names of the model's own.
        """
        known = {*parameters, *self.tensors, *self.cast_sources}
        outside = [
            name
            for name, info in state.infos.items()
            if info.role is Role.PARAMETER and name in state.optimizer_info and name not in known
            if is_large_weight(state.tensors[name])
        ]
        if outside:
            text = f"trained weights that are not parameters of `model` stay exact: {humanize.names(outside)}"
            warn_user(f"{text}. Pass their modules as model=, with a state_dict that shares memory")

    def optimizer_info_of_masters(self, state: FlatState) -> dict[str, OptimizerInfo]:
        """The optimizer's facts by name, those of a narrow weight also under the name of its master copy."""
        out = {name: facts for name, facts in state.optimizer_info.items() if name not in self.cast_sources}
        for name, master in self.cast_sources.items():
            if name in state.optimizer_info:
                out.setdefault(master, state.optimizer_info[name])
        return out

    def exclude(self, names: Collection[str], global_tensors: GlobalTensors) -> TensorSelection:
        """The selection without some tensors; a cast of one of them remains a cast. A collective.

        Args:
            names: local names, on every rank those of its shards of the same global tensors.
        """
        excluded = global_tensors.union(names)
        tensors = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return replace(
            self, tensors=tensors, global_names=tuple(name for name in self.global_names if name not in excluded)
        )

    def with_casts(self, values: Mapping[str, Tensor], state: FlatState) -> dict[str, Tensor]:
        """The state's tensors that change when selected tensors get these values: these tensors and their casts."""
        out = dict(values)
        for name, source in self.cast_sources.items():
            if source in values:
                out[name] = values[source].to(state.tensors[name].dtype)
        return out


def select_tensors(
    state: FlatState,
    global_tensors: GlobalTensors,
    quantizable: Collection[str] | None = None,
    *,
    min_numel: int = MIN_WEIGHT_NUMEL,
    min_dims: int = 2,
    optimized_names: Collection[str] | None = None,
) -> TensorSelection:
    """Select the weights of a state that a lossy scheme may quantize; a collective.

    The default is weights with two dimensions or more and at least 4096 values (arXiv 2306.11800 leaves open which).
    Norms, biases, buffers, counters and 64-bit floats stay exact. If a 16-bit weight is a cast of a float32 master
    copy, the master is quantized and the weight follows. A sharded tensor is a cast if each of its shards has the same
    shard of the other tensor on its rank, and is a cast of that.

    Args:
        global_tensors: the tensors of `state` on all ranks.
        quantizable: the names of a model's own parameters, if known: nothing else is selected then, but for the
            masters of those.
        min_numel, min_dims: how many values and dimensions a (global) weight has at least.
        optimized_names: names of weights that an optimizer updates: copies of them follow them (a tied weight that is
            saved twice). None: copies are quantized by themselves.
    """
    candidates: dict[str, Tensor] = {}
    for name, info in state.infos.items():
        if info.role is Role.MASTER or (info.role is Role.PARAMETER if quantizable is None else name in quantizable):
            x = state.tensors[name]
            if x.dtype in WEIGHT_DTYPES and x.dim() >= min_dims and global_tensors.global_numel(name) >= min_numel:
                candidates[name] = x
    optimized = frozenset(optimized_names or ()).intersection(candidates)
    twins = {dtype: {n for n in optimized if candidates[n].dtype == dtype} for dtype in WEIGHT_DTYPES}
    float32 = {name for name, tensor in candidates.items() if tensor.dtype == torch.float32}
    colocated = _group_by_shard(global_tensors, candidates)

    def sources(name: str, allowed: Collection[str]) -> tuple[str, ...] | None:
        """Global names of those allowed of which a shard is a cast; None if it has no values."""
        tensor = candidates[name]
        if not tensor.numel() or name in allowed:
            return () if tensor.numel() else None
        others = [other for other in colocated[name] if other in allowed]
        return tuple(global_tensors.global_names[n] for n in others if is_cast(tensor, candidates[n]))

    sums = map_tensors(lambda name, threads: value_sums.together(candidates[name], threads), candidates)
    reports = global_tensors.reduce(
        {
            name: _ShardReport(
                is_quantizable=quantizable is None or name in quantizable,
                is_finite=math.isfinite(sums[name].max_magnitude),
                is_float32=name in float32,
                is_optimized=name in optimized,
                masters=sources(name, float32),
                tied=sources(name, twins[tensor.dtype]),
            )
            for name, tensor in candidates.items()
        },
        _merge_reports,
    )
    names, casts, nonfinite = _decide({name: reports[name] for name in global_tensors.shapes if name in reports})
    local = {name: tensor for name, tensor in candidates.items() if tensor.numel()}
    local_sources = {
        name: global_tensors.colocated_name(name, casts[global_tensors.global_names[name]])
        for name in local
        if global_tensors.global_names[name] in casts
    }
    selected = frozenset(names)
    return TensorSelection(
        {name: tensor for name, tensor in local.items() if global_tensors.global_names[name] in selected},
        {name: source for name, source in local_sources.items() if source is not None},
        nonfinite,
        names,
        sums,
    )


def _group_by_shard(global_tensors: GlobalTensors, names: Iterable[str]) -> dict[str, list[str]]:
    """For each local tensor those that are the same shard of global tensors of one shape, itself among them."""
    groups: dict[object, list[str]] = {}
    for name in names:
        shard = global_tensors.local_shards[name]
        groups.setdefault((shard.sizes, shard.spec.global_shape, shard.spec.offsets), []).append(name)
    return {name: group for group in groups.values() for name in group}


class _ShardReport(NamedTuple):
    """Report of a rank about its shard of a candidate."""

    is_quantizable: bool  # it may be selected even if it is no master copy
    is_finite: bool
    is_float32: bool
    is_optimized: bool
    # Global names of float32 tensors that the shard is a cast of; None if the shard has no values.
    masters: tuple[str, ...] | None
    # Global names of optimized tensors that the shard is a copy of; None if the shard has no values.
    tied: tuple[str, ...] | None


def _merge_reports(shards: Sequence[_ShardReport]) -> _ShardReport:
    return _ShardReport(
        is_quantizable=any(shard.is_quantizable for shard in shards),
        is_finite=all(shard.is_finite for shard in shards),
        is_float32=shards[0].is_float32,
        is_optimized=any(shard.is_optimized for shard in shards),
        masters=_common([shard.masters for shard in shards]),
        tied=_common([shard.tied for shard in shards]),
    )


def _common(reports: Iterable[tuple[str, ...] | None]) -> tuple[str, ...]:
    """The names that every shard with values reports, in the order of the first one."""
    first, *rest = [report for report in reports if report is not None] or [()]
    return tuple(name for name in first if all(name in names for names in rest))


def _decide(reports: Mapping[str, _ShardReport]) -> tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]:
    """Global names of what is selected, of the source of each cast and tied copy, and of what is not finite."""
    finite = [name for name, report in reports.items() if report.is_finite]
    float32 = {name for name in finite if reports[name].is_float32}
    casts: dict[str, str] = {}
    for name in finite:
        master = None if name in float32 else _first_allowed(reports[name].masters, float32)
        if master is not None:
            casts[name] = master
    selected = {name for name, report in reports.items() if report.is_quantizable} | {*casts.values()}
    names = [name for name in finite if name in selected and name not in casts]
    optimized = {name for name in names if reports[name].is_optimized}
    tied: dict[str, str] = {}
    for name in names:
        source = None if name in optimized else _first_allowed(reports[name].tied, optimized)
        if source is not None:
            tied[name] = source
    finite_names = frozenset(finite)
    nonfinite = tuple(name for name in reports if name in selected and name not in finite_names)
    return tuple(name for name in names if name not in tied), casts | tied, nonfinite


def _first_allowed(names: Iterable[str] | None, allowed: Collection[str]) -> str | None:
    return next((name for name in names or () if name in allowed), None)


def _warn_of_no_weights(state: FlatState) -> None:
    """Warn if a lossy scheme loses nothing, since weights have another dtype or no tensor is known to be a weight."""
    roles = {name: state.infos[name].role for name, tensor in state.tensors.items() if is_large_weight(tensor)}
    floats = {name: role for name, role in roles.items() if state.tensors[name].is_floating_point()}
    weights = [name for name, role in floats.items() if role in (Role.MASTER, Role.PARAMETER)]
    wide = [name for name in weights if state.tensors[name].dtype not in WEIGHT_DTYPES]
    others = [name for name, role in floats.items() if role is Role.OTHER]
    if wide:
        dtypes = ", ".join(sorted({str(state.tensors[name].dtype) for name in wide}))
        warn_user(
            f"all weights have a dtype that stays exact, so nothing is lossy ({dtypes}): "
            f"{humanize.names(wide)}. Save them in float32, bfloat16 or float16"
        )
    elif others and not weights:
        warn_user(
            f"no tensor is known to be a weight, so nothing is lossy: {humanize.names(others)}. "
            "Save them with their optimizer's state_dict, or under names such as head.weight"
        )


def is_large_weight(tensor: Tensor) -> bool:
    """True if a weight has the dimensions and values from which every scheme quantizes it."""
    return tensor.dim() >= 2 and tensor.numel() >= MIN_WEIGHT_NUMEL


def max_abs(tensor: Tensor) -> float:
    """The largest magnitude, 0 of an empty tensor; nan or inf if a value is. A tenth of the time of `isfinite`."""
    if tensor.numel() == 0:
        return 0.0
    if tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16):
        return value_sums(tensor).max_magnitude
    low, high = (float(end) for end in torch.aminmax(tensor.detach()))
    return math.nan if math.isnan(low) else max(-low, high)


def is_cast(tensor: Tensor, master: Tensor) -> bool:
    """True if `tensor` equals `master` cast to its dtype; both have the same shape.

    A few values are compared first: most layers of a model have the same shape, and each is compared with each.
    """
    head, master_head = (full.detach().reshape(-1)[:_PROBE_VALUES].cpu() for full in (tensor, master))
    return torch.equal(head, master_head.to(tensor.dtype)) and torch.equal(tensor.cpu(), master.to(tensor.dtype).cpu())


_HEAD_VALUES = 4096  # How many values are compared first: those of a tensor that trains differ there already


def unchanged_tensors(
    names: Iterable[str], state: FlatState, reference: Reference | None, global_tensors: GlobalTensors
) -> dict[str, QuantizedTensor]:
    """Codes of tensors that equal the decoded parent checkpoint bit by bit, with all their shards; a collective.

    A tensor that the parent has exactly, or as a difference to its own parent, has no codes that could be written
    again. Neither has a tensor whose codes are relative to those of another tensor that has changed.

    Args:
        names: of tensors of `state`, on every rank its shards of the same global tensors.
        reference: the decoded parent checkpoint; None if there is none.

    Returns:
        By name, on the CPU.
    """
    names = list(names)
    unchanged: dict[str, QuantizedTensor] = {}
    origins = {name: None if reference is None else reference.quantized.get(name) for name in names}
    shared = set[str]() if reference is None else reference.shared_names(state.infos[name] for name in names)
    away = {name: state.tensors[name] for name in shared if not state.tensors[name].is_cpu}
    heads = copy_together({name: (x := as_matrix(tensor))[_head_rows(x)] for name, tensor in away.items()})
    # Those that others are relative to come first: where one has changed, the others cannot be written again.
    for name, origin in sorted(origins.items(), key=lambda item: _relative_to(item[1]) != ""):
        tensor = state.tensors[name]
        if origin is None or reference is None or not _is_self_contained(origin):
            continue
        if _relative_to(origin) and _relative_to(origin) not in unchanged:
            continue
        if name in shared and _equals_parent(tensor, name, reference, heads.get(name)):
            unchanged[name] = origin
    independent = global_tensors.tensors_where_all(
        {name: name in unchanged and not _relative_to(unchanged[name]) for name in names}
    )
    local = {name for name in unchanged if global_tensors.global_names[name] in independent}
    dependent = global_tensors.tensors_where_all(
        {name: name in unchanged and _relative_to(unchanged[name]) in local for name in names}
    )
    complete = independent | dependent
    return {
        name: unchanged[name] for name in names if name in unchanged and global_tensors.global_names[name] in complete
    }


def _head_rows(matrix: Tensor) -> slice:
    """The first rows of a matrix, of about `_HEAD_VALUES` values."""
    return slice(-(-_HEAD_VALUES // max(1, matrix.shape[1])))


def _equals_parent(tensor: Tensor, name: str, reference: Reference, head: Tensor | None) -> bool:
    """True if a tensor has the parent's bits; of a parent on a lattice, the first values are decoded first.

    Args:
        head: a copy of the first rows in host memory, if the tensor is on another device.
    """
    source = lattice_source(reference.tensors, name)
    if source is not None and source.needs_only_codes and tensor.is_cpu:
        is_equal = source.quantized.starts_with(tensor, _HEAD_VALUES)
        if not is_equal or tensor.numel() <= _HEAD_VALUES:
            return is_equal
    elif source is not None or head is not None:
        matrix = as_matrix(tensor.detach())
        rows = _head_rows(matrix)
        parent = tensor_rows(reference.tensors, name, rows)
        if not torch.equal(as_bits(matrix[rows] if head is None else head), as_bits(parent)):
            return False
    return is_bitwise_equal(tensor, reference.tensors[name])


def _has_moved(name: str, state: FlatState, reference: Reference | None) -> bool:
    """True if the parent checkpoint has other bits of a tensor."""
    if reference is None or name not in reference.shared_names([state.infos[name]]):
        return False
    return not is_bitwise_equal(state.tensors[name], reference.tensors[name])


def is_bitwise_equal(tensor: Tensor, parent: Tensor) -> bool:
    """True if two tensors of one shape and dtype are the same, bit by bit."""
    a, b = as_bits(tensor.detach()), as_bits(parent)
    head = min(len(a) if a.dim() else 1, max(1, _HEAD_VALUES // max(1, a[0].numel() if a.dim() and len(a) else 1)))
    if a.dim() and not torch.equal(a[:head], b[:head].to(a.device)):
        return False
    return torch.equal(a, b.to(a.device))


def equal_elements(tensor: Tensor, parent: Tensor) -> Tensor:
    """Mask of equal bits of two tensors of one shape and dtype; bool, on the device of `tensor`."""
    return as_bits(tensor.detach()) == as_bits(parent).to(tensor.device)


def _is_self_contained(quantized_tensor: QuantizedTensor) -> bool:
    return isinstance(quantized_tensor, LatticeTensor) or not (
        quantized_tensor.residual or quantized_tensor.context_name
    )


def _relative_to(quantized_tensor: QuantizedTensor | None) -> str:
    """The name of the tensor that a tensor's codes are relative to; "" if they are not."""
    return quantized_tensor.relative_to if isinstance(quantized_tensor, LatticeTensor) else ""


_ROLES = {Role.BUFFER: "a buffer", Role.GRADIENT: "a gradient", Role.OTHER: "not known to be a weight"}
_OPTIMIZER = "of the optimizer"
_UNKNOWN = "of an optimizer that is not known"
_MAX_NAMES = 4  # How many names are listed for each reason, the largest tensors first


def exact_reasons(
    state: FlatState, lossy: Collection[str], left_out: Mapping[str, str], min_numel: int, min_dims: int
) -> dict[str, str]:
    """Give the reason why each tensor of floats that is not lossy stays exact, by name.

    Args:
        lossy: names of the lossy tensors.
        left_out: reasons of weights that would have been quantized, by name.
        min_numel, min_dims: how many values and dimensions a weight has at least that the scheme quantizes.
    """
    slots: dict[str, str] = {}
    for name, kind in state.moment_kinds.items():
        slots[name] = slots[_parent(name) or name] = _UNKNOWN if kind is MomentKind.UNKNOWN else _OPTIMIZER
    out: dict[str, str] = {}
    for name, info in state.infos.items():
        tensor = state.tensors[name]
        if name in lossy or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        slot = next((key for key in (name, _parent(name), _parent(_parent(name))) if key in slots), None)
        if slot is not None:
            out[name] = slots[slot]
        else:
            out[name] = left_out.get(name) or _exact_reason(info, tensor, min_numel, min_dims)
    return out


def _parent(name: str) -> str:
    """The name of the nest that a tensor, or a nest, is in; "" at the root."""
    return name.rpartition("/")[0]


def summarize_reasons(reasons: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> dict[str, JSON]:
    """Summarize reasons for a manifest: how many tensors and bytes each has, and the names of the largest."""
    out: dict[str, JSON] = {}
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, given in reasons.items() if given == reason]
        names.sort(key=lambda name: -infos[name].nbytes)
        nbytes = sum(infos[name].nbytes for name in names)
        out[reason] = {"tensors": len(names), "bytes": nbytes, "largest": names[:_MAX_NAMES]}
    return out


def _exact_reason(info: TensorInfo, tensor: Tensor, min_numel: int, min_dims: int) -> str:
    if info.role in _ROLES:
        return _ROLES[info.role]
    if tensor.dtype not in WEIGHT_DTYPES:
        return f"of dtype {info.dtype}"
    if tensor.numel() < min_numel or tensor.dim() < min_dims:
        return "too small"
    return "left by the scheme"
