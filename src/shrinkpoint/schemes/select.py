"""Selects the tensors of a state that are quantized.

Those that equal the decoded parent bit by bit keep the codes they have: a restored weight that no training moves (a
frozen backbone, the base of an adapter) would gain an error with every restore if it were rounded again to another
grid or with another dither. For all others that stay exact, the reason is given."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.errors import LossWarning
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.dtypes import as_bits
from shrinkpoint.tensors.flat_state import FlatState, OptimizerInfo
from shrinkpoint.tensors.info import JSON, Role, TensorInfo

MIN_WEIGHT_NUMEL = 4096
"""Numbers below which a weight is kept exactly: what it could gain is little, and it is the likelier to matter."""
_PROBE_VALUES = 256
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TensorSelection:
    """The weights of a state to be quantized, and what follows from them.

    Attributes:
        tensors: by name; the state's own, on their devices.
        cast_sources: name of a copy, narrower or not -> name of the picked tensor it is a cast of.
        nonfinite: weights that would have been picked but hold a nan or an infinity.
    """

    tensors: dict[str, Tensor] = field(repr=False)
    cast_sources: dict[str, str]
    nonfinite: tuple[str, ...] = ()

    @classmethod
    def from_state(
        cls,
        state: FlatState,
        quantizable: Collection[str] | None = None,
        *,
        min_numel: int = MIN_WEIGHT_NUMEL,
        min_dims: int = 2,
    ) -> TensorSelection:
        """Weights with two axes or more and at least `SMALLEST` values (arXiv 2306.11800 leaves open which, D1).

        Norms, biases, buffers, counters and 64-bit floats stay exact. Where a 16-bit weight is a cast of a float32
        master copy, the master is quantized and the weight follows.

        Args:
            quantizable: the names of a model's own parameters, where these are known: nothing else is then picked,
                but for
                the masters of those.
            smallest, axes: how many values and axes a weight has at least.
        """

        def is_weight(name: str, role: Role) -> bool:
            return role is Role.MASTER or (role is Role.PARAMETER if quantizable is None else name in quantizable)

        wanted = {
            name: state.tensors[name]
            for name, info in state.infos.items()
            if is_weight(name, info.role) and _is_large_enough(state.tensors[name], min_numel, min_dims)
        }
        finite = {name: x for name, x in wanted.items() if math.isfinite(max_abs(x))}
        casts = _find_casts(finite)
        ours = {*(wanted if quantizable is None else quantizable), *casts.values()}
        tensors = {name: x for name, x in finite.items() if name in ours and name not in casts}
        return cls(tensors, casts, tuple(name for name in wanted if name in ours and name not in finite))

    def warn_nonfinite(self) -> None:
        """Say what was refused, where something was."""
        if self.nonfinite:
            text = f"weights with values that are not finite are kept as they are: {', '.join(self.nonfinite)}"
            warnings.warn(text, LossWarning, stacklevel=3)

    def optimizer_info_of_masters(self, state: FlatState) -> dict[str, OptimizerInfo]:
        """What the optimizer knows, of the master copies where it was found to know it of the narrow ones."""
        out = {name: facts for name, facts in state.optimizer_info.items() if name not in self.cast_sources}
        for name, master in self.cast_sources.items():
            if name in state.optimizer_info:
                out.setdefault(master, state.optimizer_info[name])
        return out

    def with_tied_copies(self, optimized_names: Collection[str]) -> TensorSelection:
        """The same, but copies of a weight that an optimizer knows follow that weight (a tied one, saved twice).

        Args:
            optimized_names: names of what an optimizer knows.
        """
        known: dict[tuple[int, ...], list[str]] = {}
        for name, x in self.tensors.items():
            if name in optimized_names:
                known.setdefault(tuple(x.shape), []).append(name)
        copies = {}
        for name, x in self.tensors.items():
            for other in known.get(tuple(x.shape), []) if name not in optimized_names else []:
                if x.dtype == self.tensors[other].dtype and is_cast(x, self.tensors[other]):
                    copies[name] = other
                    break
        tensors = {name: x for name, x in self.tensors.items() if name not in copies}
        return TensorSelection(tensors, self.cast_sources | copies, self.nonfinite)

    def exclude(self, names: Collection[str]) -> TensorSelection:
        """The same but for these; what is a cast of one of them stays so."""
        tensors = {name: x for name, x in self.tensors.items() if name not in names}
        return TensorSelection(tensors, self.cast_sources, self.nonfinite)

    def with_casts(self, values: Mapping[str, Tensor], state: FlatState) -> dict[str, Tensor]:
        """The state's tensors that change when those picked get these values: they, and their casts."""
        out = dict(values)
        for name, source in self.cast_sources.items():
            if source in values:
                out[name] = values[source].to(state.tensors[name].dtype)
        return out


def max_abs(tensor: Tensor) -> float:
    """The largest magnitude, 0 of nothing; not finite where a value is not. A tenth of the time of `isfinite`."""
    if tensor.numel() == 0:
        return 0.0
    low, high = (float(end) for end in torch.aminmax(tensor.detach()))
    return math.nan if math.isnan(low) else max(-low, high)


def _is_large_enough(x: Tensor, min_numel: int, min_dims: int) -> bool:
    return x.dtype in WEIGHT_DTYPES and x.dim() >= min_dims and x.numel() >= min_numel


def _find_casts(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    masters: dict[tuple[int, ...], list[str]] = {}
    for name, x in tensors.items():
        if x.dtype == torch.float32:
            masters.setdefault(tuple(x.shape), []).append(name)
    out = {}
    for name, x in tensors.items():
        if x.dtype == torch.float32:
            continue
        for master in masters.get(tuple(x.shape), []):
            if is_cast(x, tensors[master]):
                out[name] = master
                break
    return out


def is_cast(tensor: Tensor, master: Tensor) -> bool:
    """A few values first: most layers of a model have the same shape, and each would be compared with each."""
    some, others = (one.detach().reshape(-1)[:_PROBE_VALUES].cpu() for one in (tensor, master))
    return torch.equal(some, others.to(tensor.dtype)) and torch.equal(tensor.cpu(), master.to(tensor.dtype).cpu())


_HEAD_VALUES = 4096
"""Bytes-wide integers compared first: what trains differs there already."""


def unchanged_tensors(
    names: Iterable[str], state: FlatState, reference: Reference | None
) -> dict[str, QuantizedTensor]:
    """Origins, on the CPU, of those tensors that equal a reader's bit by bit; without those that cannot stand alone.

    What a reader has exactly, and what is a difference to the checkpoint before that, has no origin to be kept.

    Args:
        names: of tensors of `state`.
        reference: what a reader has of the checkpoint before; None: nothing.
    """
    out: dict[str, QuantizedTensor] = {}
    if reference is None:
        return out
    for name in names:
        origin, x = reference.quantized.get(name), state.tensors[name]
        held = reference.get_like(name, tuple(x.shape), x.dtype)
        if origin is not None and held is not None and _is_self_contained(origin) and is_bitwise_equal(x, held):
            out[name] = origin
    return {name: one for name, one in out.items() if not _relative_to(one) or _relative_to(one) in out}


def is_bitwise_equal(x: Tensor, parent: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same, bit by bit."""
    a, b = as_bits(x.detach()), as_bits(parent)
    head = min(len(a) if a.dim() else 1, max(1, _HEAD_VALUES // max(1, a[0].numel() if a.dim() and len(a) else 1)))
    if a.dim() and not torch.equal(a[:head], b[:head].to(a.device)):
        return False
    return torch.equal(a, b.to(a.device))


def equal_elements(x: Tensor, parent: Tensor) -> Tensor:
    """Where a tensor is what a reader has of it, bit by bit; bool, on the device of `x`."""
    return as_bits(x.detach()) == as_bits(parent).to(x.device)


def unchanged_on_all_ranks(
    unchanged: Mapping[str, QuantizedTensor], names: Iterable[str], global_tensors: GlobalTensors
) -> dict[str, QuantizedTensor]:
    """Those of whole tensors of which no box has moved on any rank; a collective.

    Args:
        unchanged: what has not moved of this rank's boxes.
        names: of all that this rank was asked about.
    """
    names = list(names)
    titles = global_tensors.tensors_where_all(
        {name: name in unchanged and not _relative_to(unchanged[name]) for name in names}
    )
    alone = {name for name in names if global_tensors.global_name(name) in titles and name in unchanged}
    titles |= global_tensors.tensors_where_all(
        {name: name in unchanged and _relative_to(unchanged[name]) in alone for name in names}
    )
    return {name: one for name, one in unchanged.items() if global_tensors.global_name(name) in titles}


def _is_self_contained(quantized_tensor: QuantizedTensor) -> bool:
    return isinstance(quantized_tensor, LatticeTensor) or not (
        quantized_tensor.residual or quantized_tensor.context_name
    )


def _relative_to(quantized_tensor: QuantizedTensor) -> str:
    """The tensor that a tensor's points are relative to."""
    return quantized_tensor.relative_to if isinstance(quantized_tensor, LatticeTensor) else ""


_ROLES = {Role.BUFFER: "a buffer", Role.GRADIENT: "a gradient", Role.OTHER: "not known to be a weight"}
_MOMENTS = (Role.MOMENT1, Role.MOMENT2)
_OPTIMIZER = "of the optimizer"
_MAX_NAMES = 4
"""Names that are said of each reason, the largest first."""


def exact_reasons(
    state: FlatState, lossy: Collection[str], nonfinite: Collection[str], min_numel: int, min_dims: int
) -> dict[str, str]:
    """Why each tensor of floats that is not lossy stays exact, by name.

    Args:
        lossy: names of those that are.
        nonfinite: names of weights that are not finite.
        smallest, axes: how many values and axes a weight has at least that the scheme quantizes.
    """
    homes = {name.rpartition("/")[0] for name, info in state.infos.items() if info.role in _MOMENTS}
    out: dict[str, str] = {}
    for name, info in state.infos.items():
        x = state.tensors[name]
        if name in lossy or not (x.is_floating_point() or x.is_complex()):
            continue
        if info.role in _MOMENTS or name.rpartition("/")[0] in homes:
            out[name] = _OPTIMIZER
        else:
            out[name] = "not finite" if name in nonfinite else _exact_reason(info, x, min_numel, min_dims)
    return out


def summarize_reasons(reasons: Mapping[str, str], infos: Mapping[str, TensorInfo]) -> dict[str, JSON]:
    """The same for a manifest: of each reason how many tensors and bytes, and the names of the largest."""
    out: dict[str, JSON] = {}
    for reason in dict.fromkeys(reasons.values()):
        names = sorted((name for name, why in reasons.items() if why == reason), key=lambda name: -infos[name].nbytes)
        nbytes = sum(infos[name].nbytes for name in names)
        out[reason] = {"tensors": len(names), "bytes": nbytes, "largest": names[:_MAX_NAMES]}
    return out


def _exact_reason(info: TensorInfo, x: Tensor, min_numel: int, min_dims: int) -> str:
    if info.role in _ROLES:
        return _ROLES[info.role]
    if x.dtype not in WEIGHT_DTYPES:
        return f"of dtype {info.dtype}"
    if x.numel() < min_numel or x.dim() < min_dims:
        return "too small"
    return "left by the scheme"
