"""Which operator at which boundary: the bits go where the loss minds errors most."""

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
    """What was measured, and what follows from it.

    Attributes:
        specs: the spec of the operator of each boundary.
        loss_increases: by how much each operator raises the loss at each boundary, alone there; by boundary and spec.
        wire_bytes: wire bytes of an evaluation, likewise.
        loss: without any compression.
    """

    specs: tuple[str, ...]
    loss_increases: tuple[Mapping[str, float], ...] = field(repr=False)
    wire_bytes: tuple[Mapping[str, int], ...] = field(repr=False)
    loss: float

    @property
    def per_link(self) -> dict[int, dict[str, str]]:
        """As `compress_pipeline` takes it, and `insert_compression` as `per_point`."""
        return {number: {"forward": spec} for number, spec in enumerate(self.specs)}

    @property
    def predicted_increase(self) -> float:
        """The rise of the loss with all of them, if effects add up."""
        return sum(rises[spec] for rises, spec in zip(self.loss_increases, self.specs, strict=True))


def allocate_bits(
    model: nn.Module,
    after: Sequence[str],
    evaluate: Callable[[nn.Module], float],
    *,
    ratio: float = 8.0,
    candidates: Sequence[str] = DEFAULT_SPECS,
    higher_is_better: bool = False,
) -> BitAllocation:
    """Measure what each operator does at each boundary alone, and share out the bytes.

    Effects of several boundaries are taken to add up. Activations only: what an error of a gradient does to a loss
    cannot be seen in one evaluation.

    Args:
        after: as `insert_compression` has it.
        evaluate: a loss or score of the model; called once without compression, and once for each operator and
            boundary.
        ratio: how many times smaller than the tensors all messages together are, at least.
        candidates: specs of operators without feedback.
        higher_is_better: `evaluate` returns a score.

    Raises:
        PolicyError: no operator is as small as that, nothing crosses, or the loss is not finite.
    """
    expected, do = "a torch.nn.Module", "pass the model"
    validate.check_instance("allot, model", model, nn.Module, expected=expected, do=do)
    if not callable(evaluate):
        raise validate.argument_error(
            "allot, evaluate", evaluate, "a function of the model", "pass the function itself"
        )
    validate.check_float("allot, ratio", ratio, minimum=1.0, do="say how many times smaller")
    validate.check_bool("allot, higher_is_better", higher_is_better)
    loss = _evaluate_without_grad(model, evaluate)
    if not math.isfinite(loss):
        raise PolicyError(
            "allot, evaluate", found=f"{loss} without compression", expected="a number", do="mend the model"
        )
    rises, sizes, raw = [], [], 0
    for number in range(len(after)):
        found = {spec: _evaluate_boundary(model, after, number, spec, evaluate) for spec in candidates}
        sign = -1.0 if higher_is_better else 1.0
        rises.append({spec: _inf_if_nonfinite(sign * (at - loss)) for spec, (at, _, _) in found.items()})
        sizes.append({spec: size for spec, (_, size, _) in found.items()})
        raw += max(tensors for _, _, tensors in found.values())
    chosen = greedy_allocate(rises, sizes, math.floor(raw / ratio))
    return BitAllocation(tuple(chosen), tuple(rises), tuple(sizes), loss)


def greedy_allocate(
    loss_increases: Sequence[Mapping[str, float]], wire_bytes: Sequence[Mapping[str, int]], max_bytes: int
) -> list[str]:
    """An operator for each boundary, at most so many bytes together.

    From the smallest messages on, the change that lowers the rise most for its bytes is made, as long as one fits.

    Raises:
        PolicyError: the smallest are too large.
    """
    chosen = [min(size, key=lambda spec: size[spec]) for size in wire_bytes]
    spent = sum(size[spec] for size, spec in zip(wire_bytes, chosen, strict=True))
    if spent > max_bytes:
        found, do = f"{spent} bytes at least", "ask for a lower ratio, or name smaller candidates"
        raise PolicyError("allot, ratio", found=found, expected=f"at most {max_bytes}", do=do)
    while True:
        best, gain = None, 0.0
        for number, (rise, size) in enumerate(zip(loss_increases, wire_bytes, strict=True)):
            now = chosen[number]
            for spec in size:
                more = size[spec] - size[now]
                if more > 0 and spent + more <= max_bytes and (rise[now] - rise[spec]) / more > gain:
                    best, gain = (number, spec), (rise[now] - rise[spec]) / more
        if best is None:
            return chosen
        number, spec = best
        spent += wire_bytes[number][spec] - wire_bytes[number][chosen[number]]
        chosen[number] = spec


def _evaluate_boundary(
    model: nn.Module, after: Sequence[str], number: int, spec: str, evaluate: Callable[[nn.Module], float]
) -> tuple[float, int, int]:
    """(loss, wire bytes, bytes of the tensors) with one boundary compressed."""
    points = insert_compression(model, after, per_point={number: {"forward": spec}}, sample_every=0)
    try:
        found = _evaluate_without_grad(model, evaluate)
    finally:
        points.remove()
    ledger = points.link_stats()[f"{number} forward"]
    if not ledger.messages:
        what, do = f"nothing crosses after {after[number]!r}", "let evaluate run the model"
        raise PolicyError("allot", found=what, expected="tensors", do=do)
    return found, ledger.wire_bytes, ledger.raw_bytes


def _evaluate_without_grad(model: nn.Module, evaluate: Callable[[nn.Module], float]) -> float:
    with torch.no_grad():
        return float(evaluate(model))


def _inf_if_nonfinite(value: float) -> float:
    """A rise that is not finite is one that nobody would take."""
    return value if math.isfinite(value) else math.inf
