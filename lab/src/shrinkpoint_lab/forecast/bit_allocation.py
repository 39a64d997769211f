"""Bit allocation: the compressor of each boundary, by how much errors there increase the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shrinkpoint import validate
from shrinkpoint.comm.simulate import insert_compression
from shrinkpoint.errors import PolicyError

DEFAULT_SPECS = ("q2:64", "q3:64", "q4:64", "q6:64", "q8:64")


@dataclass(frozen=True)
class BitAllocation:
    """The result of `allocate_bits`.

    Attributes:
        specs: the spec of the compressor of each boundary.
        loss_increases: the increase of the loss by each compressor at a single boundary; by boundary and spec.
        wire_bytes: bytes of the messages of an evaluation; by boundary and spec.
        loss: of the model without compression.
    """

    specs: tuple[str, ...]
    loss_increases: tuple[Mapping[str, float], ...] = field(repr=False)
    wire_bytes: tuple[Mapping[str, int], ...] = field(repr=False)
    loss: float

    @property
    def per_link(self) -> dict[int, dict[str, str]]:
        """The specs as argument `per_link` of `compress_pipeline`, and `per_point` of `insert_compression`."""
        return {boundary: {"forward": spec} for boundary, spec in enumerate(self.specs)}

    @property
    def predicted_increase(self) -> float:
        """The increase of the loss with all compressors, assuming that effects add up."""
        return sum(increases[spec] for increases, spec in zip(self.loss_increases, self.specs, strict=True))


def allocate_bits(
    model: nn.Module,
    after: Sequence[str],
    evaluate: Callable[[nn.Module], float],
    *,
    ratio: float = 8.0,
    candidates: Sequence[str] = DEFAULT_SPECS,
    higher_is_better: bool = False,
) -> BitAllocation:
    """Measure the effect of each compressor at each boundary alone, and allocate bytes to boundaries.

    Effects of several boundaries are assumed to add up. Only activations are covered: the effect of an error of a
    gradient cannot be measured in one evaluation.

    Args:
        after: names of modules, as for `insert_compression`.
        evaluate: returns a loss or score of the model; called once without compression, and once for each compressor
            and boundary.
        ratio: size of the tensors over that of all messages, at least.
        candidates: specs of compressors without feedback.
        higher_is_better: True if `evaluate` returns a score.

    Raises:
        PolicyError: no allocation reaches the ratio, nothing is sent, or the loss is not finite.
    """
    expected, advice = "a torch.nn.Module", "pass the model"
    validate.check_instance("allocate_bits, model", model, nn.Module, expected=expected, do=advice)
    if not callable(evaluate):
        where, expected, advice = "allocate_bits, evaluate", "a function of the model", "pass the function itself"
        raise validate.argument_error(where, evaluate, expected, advice)
    validate.check_float("allocate_bits, ratio", ratio, minimum=1.0, do="pass how many times smaller, such as 4")
    validate.check_bool("allocate_bits, higher_is_better", higher_is_better)
    loss = _evaluate_without_grad(model, evaluate)
    if not math.isfinite(loss):
        problem, advice = f"{loss} without compression", "mend the model"
        raise PolicyError("allocate_bits, evaluate", found=problem, expected="a number", do=advice)
    increases, sizes, raw_bytes = [], [], 0
    for boundary in range(len(after)):
        results = {spec: _evaluate_boundary(model, after, boundary, spec, evaluate) for spec in candidates}
        changes = {spec: loss - value if higher_is_better else value - loss for spec, (value, _, _) in results.items()}
        increases.append({spec: change if math.isfinite(change) else math.inf for spec, change in changes.items()})
        sizes.append({spec: nbytes for spec, (_, nbytes, _) in results.items()})
        raw_bytes += max(tensors for _, _, tensors in results.values())
    chosen = greedy_allocate(increases, sizes, math.floor(raw_bytes / ratio))
    return BitAllocation(tuple(chosen), tuple(increases), tuple(sizes), loss)


def greedy_allocate(
    loss_increases: Sequence[Mapping[str, float]], wire_bytes: Sequence[Mapping[str, int]], max_bytes: int
) -> list[str]:
    """Choose a spec for each boundary, with at most `max_bytes` bytes together; a PolicyError if none is so small.

    Starts with the smallest messages, and makes the change that lowers the increase most for its bytes as long as one
    fits.
    """
    chosen = [min(sizes, key=lambda spec: sizes[spec]) for sizes in wire_bytes]
    spent = sum(sizes[spec] for sizes, spec in zip(wire_bytes, chosen, strict=True))
    if spent > max_bytes:
        problem, advice = f"{spent} bytes at least", "ask for a lower ratio, or name smaller candidates"
        raise PolicyError("allocate_bits, ratio", found=problem, expected=f"at most {max_bytes}", do=advice)
    while True:
        best, gain = None, 0.0
        for boundary, (increases, sizes) in enumerate(zip(loss_increases, wire_bytes, strict=True)):
            current = chosen[boundary]
            for spec in sizes:
                extra = sizes[spec] - sizes[current]
                if extra > 0 and spent + extra <= max_bytes and (increases[current] - increases[spec]) / extra > gain:
                    best, gain = (boundary, spec), (increases[current] - increases[spec]) / extra
        if best is None:
            return chosen
        boundary, spec = best
        spent += wire_bytes[boundary][spec] - wire_bytes[boundary][chosen[boundary]]
        chosen[boundary] = spec


def _evaluate_boundary(
    model: nn.Module, after: Sequence[str], boundary: int, spec: str, evaluate: Callable[[nn.Module], float]
) -> tuple[float, int, int]:
    """Evaluate with one boundary compressed: (loss, bytes of the messages, bytes of the tensors)."""
    points = insert_compression(model, after, per_point={boundary: {"forward": spec}}, sample_every=0)
    try:
        loss = _evaluate_without_grad(model, evaluate)
    finally:
        points.remove()
    stats = points.link_stats()[f"{boundary} forward"]
    if not stats.messages:
        problem, advice = f"nothing crosses after {after[boundary]!r}", "let evaluate run the model"
        raise PolicyError("allocate_bits", found=problem, expected="tensors", do=advice)
    return loss, stats.wire_bytes, stats.raw_bytes


def _evaluate_without_grad(model: nn.Module, evaluate: Callable[[nn.Module], float]) -> float:
    with torch.no_grad():
        return float(evaluate(model))
