"""Modes of lossy schemes for the optimizer's state: exact, reset or quantized moments.

Two thirds of an Adam state are moments, so that a scheme for weights alone cannot reach more than about 1.5x
(arXiv 2406.11257).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.levels import (
    CELL_SHIFT,
    MAX_SHARE_BELOW,
    log_range_from_counts,
    magnitude_cells,
    quantize_log,
)
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL
from shrinkpoint.sharding.global_stats import GlobalStats
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import Role

Mode = Literal["exact", "reset", "lossy"]
"""exact: bit-exact moments. reset: moments of zero. lossy: moments on 254 logarithmic levels."""
PlanMode = Mode | Literal["reset first"]  # Also "reset first": first moments of zero, all else as it is

_MOMENTS = (Role.MOMENT1, Role.MOMENT2)


def check_mode(mode: str) -> Mode:
    """Return the mode if it is valid; raises PolicyError if it is not."""
    checked: Mode = validate.check_choice("optimizer", mode, get_args(Mode))
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
    counts = stats.sum_histograms({name: _all_cells(magnitude_cells(x)) for name, x in magnitudes.items()})
    ends = stats.min_max({name: x[x > 0] for name, x in magnitudes.items()})
    return {
        name: log_range_from_counts(*ends[name], counts[name], MAX_SHARE_BELOW) if ends.get(name) else (0.0, 0.0)
        for name in counts
    }


def _all_cells(counts: Tensor) -> Tensor:
    """Counts padded with zeros to all cells that magnitudes may be in, so that those of shards add up."""
    return torch.nn.functional.pad(counts, (0, (1 << 31 >> CELL_SHIFT) - counts.numel()))
