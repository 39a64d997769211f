"""Which operator at which boundary: the bits go where the loss minds errors most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shrinkpoint import arguments
from shrinkpoint.comm.points import insert_points
from shrinkpoint.errors import PolicyError

CANDIDATES = ("q2:64", "q3:64", "q4:64", "q6:64", "q8:64")


@dataclass(frozen=True)
class Allotment:
    """What was measured, and what follows from it.

    Attributes:
        chosen: the spec of the operator of each boundary.
        rises: by how much each operator raises the loss at each boundary, alone there; by boundary and spec.
        sizes: wire bytes of an evaluation, likewise.
        loss: without any compression.
    """

    chosen: tuple[str, ...]
    rises: tuple[Mapping[str, float], ...] = field(repr=False)
    sizes: tuple[Mapping[str, int], ...] = field(repr=False)
    loss: float

    @property
    def per_link(self) -> dict[int, dict[str, str]]:
        """As `compress_pipeline` takes it, and `insert_points` as `per_point`."""
        return {number: {"forward": spec} for number, spec in enumerate(self.chosen)}

    @property
    def predicted(self) -> float:
        """The rise of the loss with all of them, if effects add up."""
        return sum(rises[spec] for rises, spec in zip(self.rises, self.chosen, strict=True))


def allot(
    model: nn.Module, after: Sequence[str], evaluate: Callable[[nn.Module], float], *, ratio: float = 8.0,
    candidates: Sequence[str] = CANDIDATES, higher_is_better: bool = False,
) -> Allotment:  # fmt: skip
    """Measure what each operator does at each boundary alone, and share out the bytes.

    Effects of several boundaries are taken to add up. Activations only: what an error of a gradient does to a loss
    cannot be seen in one evaluation.

    Args:
        after: as `insert_points` has it.
        evaluate: a loss or score of the model; called once without compression, and once for each operator and
            boundary.
        ratio: how many times smaller than the tensors all messages together are, at least.
        candidates: specs of operators without feedback.
        higher_is_better: `evaluate` returns a score.

    Raises:
        PolicyError: no operator is as small as that, nothing crosses, or the loss is not finite.
    """
    expected, do = "a torch.nn.Module", "pass the model"
    arguments.kind("allot, model", model, nn.Module, expected=expected, do=do)
    if not callable(evaluate):
        raise arguments.wrong("allot, evaluate", evaluate, "a function of the model", "pass the function itself")
    arguments.number("allot, ratio", ratio, least=1.0, do="say how many times smaller")
    arguments.flag("allot, higher_is_better", higher_is_better)
    loss = _measured(model, evaluate)
    if not math.isfinite(loss):
        raise PolicyError(
            "allot, evaluate", found=f"{loss} without compression", expected="a number", do="mend the model"
        )
    rises, sizes, raw = [], [], 0
    for number in range(len(after)):
        found = {spec: _tried(model, after, number, spec, evaluate) for spec in candidates}
        sign = -1.0 if higher_is_better else 1.0
        rises.append({spec: _rise(sign * (at - loss)) for spec, (at, _, _) in found.items()})
        sizes.append({spec: size for spec, (_, size, _) in found.items()})
        raw += max(tensors for _, _, tensors in found.values())
    chosen = share_out(rises, sizes, math.floor(raw / ratio))
    return Allotment(tuple(chosen), tuple(rises), tuple(sizes), loss)


def share_out(rises: Sequence[Mapping[str, float]], sizes: Sequence[Mapping[str, int]], most: int) -> list[str]:
    """An operator for each boundary, at most so many bytes together.

    From the smallest messages on, the change that lowers the rise most for its bytes is made, as long as one fits.

    Raises:
        PolicyError: the smallest are too large.
    """
    chosen = [min(size, key=lambda spec: size[spec]) for size in sizes]
    spent = sum(size[spec] for size, spec in zip(sizes, chosen, strict=True))
    if spent > most:
        found, do = f"{spent} bytes at least", "ask for a lower ratio, or name smaller candidates"
        raise PolicyError("allot, ratio", found=found, expected=f"at most {most}", do=do)
    while True:
        best, gain = None, 0.0
        for number, (rise, size) in enumerate(zip(rises, sizes, strict=True)):
            now = chosen[number]
            for spec in size:
                more = size[spec] - size[now]
                if more > 0 and spent + more <= most and (rise[now] - rise[spec]) / more > gain:
                    best, gain = (number, spec), (rise[now] - rise[spec]) / more
        if best is None:
            return chosen
        number, spec = best
        spent += sizes[number][spec] - sizes[number][chosen[number]]
        chosen[number] = spec


def _tried(
    model: nn.Module, after: Sequence[str], number: int, spec: str, evaluate: Callable[[nn.Module], float]
) -> tuple[float, int, int]:
    """(loss, wire bytes, bytes of the tensors) with one boundary compressed."""
    points = insert_points(model, after, per_point={number: {"forward": spec}}, sample_every=0)
    try:
        found = _measured(model, evaluate)
    finally:
        points.remove()
    ledger = points.ledgers()[f"{number} forward"]
    if not ledger.messages:
        what, do = f"nothing crosses after {after[number]!r}", "let evaluate run the model"
        raise PolicyError("allot", found=what, expected="tensors", do=do)
    return found, ledger.wire_bytes, ledger.raw_bytes


def _measured(model: nn.Module, evaluate: Callable[[nn.Module], float]) -> float:
    with torch.no_grad():
        return float(evaluate(model))


def _rise(value: float) -> float:
    """A rise that is not finite is one that nobody would take."""
    return value if math.isfinite(value) else math.inf
