"""Averages of gradients in steps of a shared second moment, and how the steps follow the size of gradients."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shrinkpoint import _native, validate
from shrinkpoint.comm.compressed_allreduce import (
    CompressedAllGather,
    CompressedAllReduce,
    CompressedReduceScatter,
    EncodedRow,
    check_hops,
    share_numel,
)
from shrinkpoint.comm.compressors.base import SharedSteps
from shrinkpoint.comm.compressors.step_codes import SMALLEST_ROOT, StepCodes, is_finite, message_level
from shrinkpoint.comm.error_feedback import MessageInfo, NoFeedback
from shrinkpoint.comm.gradient_layout import GradientLayout
from shrinkpoint.comm.link import LinkStats
from shrinkpoint.comm.moment_steps import MomentSteps, SegmentRoots
from shrinkpoint.comm.rendezvous import replica_check
from shrinkpoint.comm.state_check import check_entries, check_mapping, part_error
from shrinkpoint.tensors.dtypes import tensor_bytes

WARMUP_STEPS = 100
"""Backward passes before gradients are rounded to steps: second moments change fast at first, and errors cost more."""
FIRST_SCALE = 1 / 8
"""The first scale of steps: finer than need be, which costs bits and no accuracy, until the scale is known."""
MAX_GROWTH, MAX_DECLINE = 2.0, 1 / 16
"""The limits of a change of scale in one step. One large gradient must not make the next ones round to 0."""
_WEIGHT = 1 / 4
"""The weight of the last gradient in the scale."""
_MEAN_MAGNITUDE = 0.7
"""The mean magnitude of values relative to their root mean square: that of a Laplace distribution is 0.71."""
StepsFor = Callable[[str, int, int], SharedSteps]
"""Gives the steps of a row of a segment, from the segment's name, the row and the hop, 0 or 1."""


class _StepReduceScatter(CompressedReduceScatter):
    """The first hop, in which all messages about a row have the steps of that row."""

    steps_for: StepsFor

    def _message_info(self, layout: str, count: int, source: int, target: int, slot: int) -> MessageInfo:
        info = super()._message_info(layout, count, source, target, slot)
        return replace(info, context=replace(info.context, steps=self.steps_for(layout, target, 0)))


class _StepAllGather(CompressedAllGather):
    """The second hop, in which each rank sends the row that it has averaged."""

    steps_for: StepsFor
    on_averages: Callable[[str, Sequence[Tensor]], None]

    def _message_info(self, layout: str, count: int, source: int, target: int, slot: int) -> MessageInfo:
        info = super()._message_info(layout, count, source, target, slot)
        return replace(info, context=replace(info.context, steps=self.steps_for(layout, source, 1)))

    def decode(self, encoded: EncodedRow, messages: Sequence[Tensor], rows: Tensor | Sequence[Tensor]) -> None:
        super().decode(encoded, messages, rows)
        self.on_averages(encoded.layout, messages)


class MomentAllReduce:
    """Averages segments in steps of second moments, with a scale for each that follows the size of its gradients.

    A scale is computed from messages of the second hop, which all ranks have alike: from the mean magnitude of their
    codes. It follows within some steps what makes gradients larger or smaller than second moments say, such as a
    `GradScaler` or clipping.

    Args:
        group_sizes: the number of ranks that send each other messages, the place of this rank in its node, and the
            number of places there: each rank of a node averages a share.
        link_stats: where to add statistics.

    Attributes:
        spec: of the setting.
        all_reduce: for the segments that `serves` names.
    """

    def __init__(
        self,
        setting: MomentSteps,
        roots: SegmentRoots,
        layout: GradientLayout,
        group_sizes: tuple[int, int, int],
        link_stats: dict[str, LinkStats],
    ) -> None:
        self.spec, self._step, self._roots, self._layout = setting.spec, setting.step, roots, layout
        self._world_size, self._place, self._num_places = group_sizes
        self._is_served: frozenset[int] = frozenset()
        self._num_steps = 0
        self._scales: dict[str, float] = {}
        self._rows: dict[str, tuple[Tensor, int]] = {}
        self._shares: dict[str, float] = {}
        codes = StepCodes(setting.step)
        self.all_reduce = CompressedAllReduce(codes, name="ddp steps", link_stats=link_stats)
        feedback = NoFeedback(codes)
        first = _StepReduceScatter(feedback, link_stats["first hop"], name="ddp steps first")
        second = _StepAllGather(feedback, link_stats["second hop"], name="ddp steps second")
        first.steps_for = second.steps_for = self._steps
        second.on_averages = self._update_scale
        self.all_reduce.reduce_scatter, self.all_reduce.all_gather = first, second

    def begin(self, group: dist.ProcessGroup, timeout: float) -> None:
        """Begin a backward pass: choose the segments that are sent in steps.

        Raises:
            PolicyError: the optimizer keeps no second moments.
            MismatchError: ranks have chosen different segments.
        """
        self._rows.clear()
        found = self._roots.begin()
        self._num_steps += 1
        served = found if self._num_steps > WARMUP_STEPS else frozenset()
        if served != self._is_served:
            where, text = "compress_ddp, second moments", ",".join(map(str, sorted(served)))
            config = {"segments": f"{len(served)} with second moments", "digest": zlib.crc32(text.encode())}
            replica_check(group, where, config, timeout).check()
            self._is_served = served

    def serves(self, index: int) -> bool:
        """True if the segment of this index is sent in steps."""
        return index in self._is_served

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, the scales and what the hops count; scales of a node's ranks are those of shares."""
        return {"steps": self._num_steps, "scales": dict(self._scales), "hops": self.all_reduce.state_dict()}

    def load_state_dict(self, state: object) -> None:
        """Restore what `state_dict` returned.

        Raises:
            MismatchError: it is something else; then nothing has changed.
        """
        where = "compress_ddp, moment steps"
        entries = check_entries(where, state, ("steps", "scales", "hops"))
        if type(entries["steps"]) is not int or entries["steps"] < 0:
            raise part_error(f"{where}, steps", validate.describe_value(entries["steps"]), "a whole number from 0")
        scales = check_mapping(f"{where}, scales", entries["scales"])
        for name, scale in scales.items():
            if type(scale) is not float or not 0 < scale < float("inf"):
                raise part_error(f"{where}, scale of {name}", validate.describe_value(scale), "a number above 0")
        check_hops(where, entries["hops"])
        self.all_reduce.load_state_dict(entries["hops"])
        self._num_steps, self._scales = entries["steps"], dict(scales)
        self._is_served = frozenset()  # all ranks compare their segments anew, whatever each did before

    def counts(self) -> Mapping[str, Any]:
        """The counts that all ranks must have in common to go on together."""
        return {"steps": self._num_steps, "moment counts": self.all_reduce.reduce_scatter.counts()}

    def _steps(self, name: str, row: int, hop: int) -> SharedSteps:
        if name not in self._rows:  # by the thread that encodes first
            self._rows[name] = self._make_rows(name)
        rows, digest = self._rows[name]
        factor = self._step * self._scales.get(name, FIRST_SCALE)
        if hop == 0:  # the gradient of one rank is noisier than the average
            factor *= self._world_size**0.5
        return SharedSteps(rows[row], factor, zlib.crc32(struct.pack("<d", factor), digest))

    def _make_rows(self, name: str) -> tuple[Tensor, int]:
        """The roots of this rank's share of a segment by row, and 32 bits of the digest of all roots of the segment.

        All ranks notice another root on one of them: each gets a message with the digest of that rank.
        """
        segment, places = self._layout.segments[int(name)], self._num_places
        numel = share_numel(segment.numel, places) if places > 1 else segment.numel
        row_numel = share_numel(numel, self._world_size)
        padded = row_numel * self._world_size
        roots = self._roots.roots(segment, numel * places if places > 1 else padded)
        share = roots[self._place * numel :][:numel] if places > 1 else roots
        share = F.pad(share, (0, padded - numel), value=SMALLEST_ROOT) if places > 1 else share
        self._shares[name] = int(np.count_nonzero(share.numpy() > SMALLEST_ROOT)) / padded
        return share.view(self._world_size, row_numel), int(_native.xxh3_128(tensor_bytes(roots))[:8], 16)

    def _update_scale(self, name: str, messages: Sequence[Tensor]) -> None:
        """Move the scale of a segment towards the mean magnitude of its average gradient, and free its steps."""
        del self._rows[name]
        if not self._shares[name] or not all(map(is_finite, messages)):  # such a gradient says nothing about the next
            return
        scale = self._scales.get(name, FIRST_SCALE)
        mean_code = sum(map(message_level, messages)) / len(messages) / self._shares[name]
        level = scale * self._step * mean_code / _MEAN_MAGNITUDE
        target = min(scale + _WEIGHT * (level - scale), 2 * level)
        self._scales[name] = min(max(target, scale * MAX_DECLINE, 2.0**-60), scale * MAX_GROWTH, 2.0**60)
