"""A quantization plan for one state: codes are chosen, and applying them is exact.

A plan also says what becomes of moments: they stay exact, are reset, or are quantized. Two thirds of an Adam state are
moments, so a scheme for weights alone cannot reach more than about 1.5x (arXiv 2406.11257).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from shrinkpoint import validate
from shrinkpoint.codec.codebook_record import CODERS
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.reference import (
    CastSource,
    DecodedTensors,
    LatticeSource,
    QuantizedTensor,
    Reference,
    RowSample,
    TensorSource,
    to_host,
)
from shrinkpoint.errors import error_text, warn_user
from shrinkpoint.quantize.levels import (
    CELL_SHIFT,
    MAX_SHARE_BELOW,
    log_range_from_counts,
    magnitude_cells,
    quantize_log,
)
from shrinkpoint.schemes.base import QuantizedState, Scheme
from shrinkpoint.schemes.encode.records import RecordEncodingMixin
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL, exact_reasons
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState, snapshot
from shrinkpoint.tensors.info import JSON, Role
from shrinkpoint.tensors.memory import is_out_of_memory, wait_for_devices

OptimizerMode = Literal["exact", "reset", "lossy"]
"""exact: bit-exact moments. reset: moments of zero. lossy: moments on 254 logarithmic levels."""
PlanMode = OptimizerMode | Literal["reset first"]  # Also "reset first": first moments of zero, all else as it is

_MOMENTS = (Role.MOMENT1, Role.MOMENT2)


def check_optimizer_mode(mode: str) -> OptimizerMode:
    """Return the mode if it is valid; raises PolicyError if it is not."""
    checked: OptimizerMode = validate.check_choice("optimizer", mode, get_args(OptimizerMode))
    return checked


def zeroed_moments(state: FlatState, *, first_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield name and zeros of every moment, and of the step counters next to them.

    Counters are reset for Adam's bias correction, without which zero moments would make the first steps too long.

    Args:
        first_only: of first moments alone; counters stay, because second moments do.
    """
    roles = (Role.MOMENT1,) if first_only else _MOMENTS
    moments = [name for name, info in state.infos.items() if info.role in roles]
    parents = set() if first_only else {name.rpartition("/")[0] for name in moments}
    counters = [f"{parent}/step" for parent in parents if f"{parent}/step" in state.tensors]
    for name in (*moments, *counters):
        yield name, torch.zeros_like(state.tensors[name], device="cpu", memory_format=torch.contiguous_format)


def quantize_moments(state: FlatState, stats: GlobalStats) -> dict[str, CodebookTensor]:
    """Return the codes of each moment that is large enough and finite, on the CPU; a collective.

    The others stay exact. Levels are those of the global moment.
    """
    moments = {
        name: state.tensors[name]
        for name, info in state.infos.items()
        if info.role in _MOMENTS
        and state.tensors[name].dtype in (torch.float32, torch.bfloat16)
        and stats.global_tensors.global_numel(name) >= MIN_WEIGHT_NUMEL
    }
    finite = stats.global_tensors.tensors_where_all(
        {name: bool(moment.isfinite().all()) for name, moment in moments.items()}
    )
    moments = {name: x for name, x in moments.items() if stats.global_name(name) in finite and x.numel()}
    limits = _global_limits({name: x for name, x in moments.items() if name not in stats.global_tensors.whole}, stats)
    codes = {}
    for name, moment in moments.items():
        is_signed = state.infos[name].role is Role.MOMENT1
        codes[name] = quantize_log(moment, signed=is_signed, limits=limits.get(stats.global_name(name))).cpu()
    return codes


def _global_limits(moments: Mapping[str, Tensor], stats: GlobalStats) -> dict[str, tuple[float, float]]:
    """The lowest and the highest level of sharded moments, by global name; a collective."""
    magnitudes = {name: moment.detach().float().abs() for name, moment in moments.items()}
    cells = {name: magnitude_cells(x) for name, x in magnitudes.items()}
    # Padded with zeros to all cells that magnitudes may be in, so that those of shards add up.
    counts = stats.sum_histograms({n: F.pad(x, (0, (1 << 31 >> CELL_SHIFT) - x.numel())) for n, x in cells.items()})
    ends = stats.min_max({name: x[x > 0] for name, x in magnitudes.items()})
    return {
        name: log_range_from_counts(*ends[name], counts[name], MAX_SHARE_BELOW) if ends.get(name) else (0.0, 0.0)
        for name in counts
    }


_log = logging.getLogger("shrinkpoint")
_FREE_MEMORY = "free memory, or save less often"


@dataclass(frozen=True)
class QuantizationPlan(RecordEncodingMixin):
    """A plan for one state: its quantized tensors are chosen; applying and encoding them is exact.

    Attributes:
        id: of the scheme that chose them.
        quantized: the quantized tensors by name, on the CPU or where they were planned.
        cast_sources: name of a narrower copy -> name of the weight it is a cast of.
        optimizer: what becomes of moments that are not in `quantized`, once the plan is applied; nothing was measured
            with it, so that it need not be done while a model waits.
        coders: coders that codes may be coded with.
        loss: for the manifest: what was tried, measured and chosen.
        keyframe: see `QuantizedState`.
        sampled_rows, samples: see `QuantizedState`.
        copies: names of quantized weights that are copies of a model's: averages, target networks.
        min_size: how many values and axes a quantized weight has at least; None if this rank lacks parts of the state,
            and so cannot tell why tensors stay exact.
    """

    id: str
    quantized: Mapping[str, QuantizedTensor] = field(repr=False)
    cast_sources: Mapping[str, str] = field(default_factory=dict)
    optimizer: PlanMode = "exact"
    coders: Sequence[str] = CODERS
    loss: JSON = None
    keyframe: bool = False
    sampled_rows: Mapping[str, slice] = field(default_factory=dict, repr=False)
    samples: Mapping[str, RowSample] = field(default_factory=dict, repr=False)
    min_size: tuple[int, int] | None = None
    copies: frozenset[str] = frozenset()

    @torch.no_grad()
    def quantize(self, state: FlatState, reference: Reference | None) -> QuantizedState:
        """Replace values by the chosen ones; `state` is the state that was planned for, or a copy of it."""
        changed: dict[str, TensorSource] = {}
        quantized_tensors = to_host(self.quantized)
        wait_for_devices(tensor.codes for tensor in self.quantized.values())
        if self.optimizer in ("reset", "reset first"):
            first_only = self.optimizer == "reset first"
            changed.update(zeroed_moments(state, first_only=first_only))
        elif self.optimizer == "lossy":
            quantized_tensors |= quantize_moments(state, GlobalStats(GlobalTensors.from_state(state)))
        for name, quantized in quantized_tensors.items():
            dtype = state.tensors[name].dtype
            if isinstance(quantized, LatticeTensor):
                changed[name] = LatticeSource(quantized, dtype)
            else:
                parent = reference.tensors[name] if quantized.residual and reference is not None else None
                changed[name] = quantized.dequantize(dtype, parent)
        for name, source in self.cast_sources.items():
            if source in changed:
                changed[name] = CastSource(source, state.tensors[name].dtype)
        tensors = DecodedTensors({name: changed.get(name, tensor) for name, tensor in state.tensors.items()})
        exact: dict[str, str] = {}
        if self.min_size is not None:
            loss = self.loss if isinstance(self.loss, dict) else {}
            left_out = dict.fromkeys(loss.get("left_out") or (), "not finite")
            left_out |= dict.fromkeys(loss.get("unmeasured") or (), "not measured by evaluate")
            left_out |= dict.fromkeys(loss.get("out_of_reach") or (), "out of reach of its steps")
            exact = exact_reasons(state, changed, left_out, *self.min_size)
        return QuantizedState(
            replace(state, tensors=tensors),
            quantized_tensors,
            self.loss,
            self.keyframe,
            exact,
            self.sampled_rows,
            self.samples,
            copies=self.copies,
        )

    @property
    def replaced_names(self) -> frozenset[str]:
        """Names of tensors of which a state that is quantized needs only shape and dtype: codes say the rest."""
        on_lattices = {name for name, quantized in self.quantized.items() if isinstance(quantized, LatticeTensor)}
        return frozenset(on_lattices | {name for name, source in self.cast_sources.items() if source in on_lattices})

    def to_host(self) -> QuantizationPlan:
        """The same plan with codes in CPU memory, where they may arrive later: see `reference.to_host`."""
        return replace(self, quantized=to_host(self.quantized))

    @torch.no_grad()
    def with_samples(self, state: FlatState) -> QuantizationPlan:
        """The same plan with the rows of weights on which progress is measured, copied from the state of the plan."""
        sampled = {
            name: (state.tensors[name], self.sampled_rows.get(name))
            for name in self.replaced_names & self.quantized.keys()
            if state.infos[name].role not in (Role.MOMENT1, Role.MOMENT2)
        }
        return replace(self, samples=RowSample.from_tensors(sampled))


def plan_within_memory(
    plan: Callable[[FlatState], Scheme], state: FlatState, scheme: Scheme, *, use_host: bool = True
) -> Scheme:
    """Plan a state. If a device has no memory for that, plan a copy in host memory; if that fails too, lose nothing.

    A save that runs out of memory does not end the run: training may need less, or have freed more, a step later.

    Args:
        plan: plans the state, or a copy of it.
        scheme: the one that plans.
        use_host: False: do not try in host memory.
    """
    try:
        return plan(state)
    except Exception as error:  # it holds the frames, and so the memory, of what has failed: not beyond this block
        shortage = _memory_shortage(error)
    if use_host and not state.is_on_cpu:
        try:
            made = plan(snapshot(state))
        except Exception as error:
            shortage = _memory_shortage(error)
        else:
            warn_user(f"{shortage}, so this checkpoint is planned in host memory: {_FREE_MEMORY}")
            return made
    warn_user(f"{shortage}, so this checkpoint is exact, weights and moments: {_FREE_MEMORY}")
    return exact_plan(scheme, shortage)


def exact_plan(scheme: Scheme, reason: str) -> QuantizationPlan:
    """A plan by which a scheme loses nothing, with the reason for the manifest."""
    return QuantizationPlan(scheme.id, {}, loss={"scheme": scheme.id, "chosen": None, "exact": reason})


def _memory_shortage(error: Exception) -> str:
    """Describe an error of a device or a host without memory; any other error is raised again."""
    if not is_out_of_memory(error):
        raise error
    _log.info("no memory to plan", exc_info=error)
    return f"out of memory while planning this checkpoint ({error_text(error)})"
