"""The events of one training process: its losses, its stalls, and digests of its state after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shrinkpoint_lab.demo.digests import StateDigests, differing_names


@dataclass(frozen=True)
class Divergence:
    """The first step after which a process had another state than the one that was never killed.

    Attributes:
        step: the step.
        names: the tensors and values that differ after it.
    """

    step: int
    names: tuple[str, ...]


@dataclass
class TrainingLog:
    """The events of one training process.

    Attributes:
        name: of the run.
        first_step: its first step; 0 before it has made one.
        last_step: its newest step.
        skip_reasons: checkpoints that its restore skipped, and why.
        restored_state: its state right after it restored a checkpoint; None: it began from nothing.
        losses: loss by step.
        states: state after each step.
        stalls: seconds by which each save stalled the loop, by step.
    """

    name: str
    first_step: int = 0
    last_step: int = 0
    skip_reasons: list[str] = field(default_factory=list)
    restored_state: StateDigests | None = None
    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, StateDigests] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)

    @property
    def restored_step(self) -> int | None:
        """The step of the checkpoint that it restored; None: it began from nothing."""
        return None if self.restored_state is None else self.first_step - 1

    def first_divergence(self, reference: TrainingLog) -> Divergence | None:
        """The first common step after which the states differ; None: there is none."""
        for step in sorted(self.states.keys() & reference.states.keys()):
            names = differing_names(reference.states[step], self.states[step])
            if names:
                return Divergence(step, names)
        return None

    def add_event(self, event: dict[str, Any]) -> None:
        kind, step = event["event"], event["step"]
        if kind == "start":
            self.first_step, self.skip_reasons, self.restored_state = step, event["skipped"], event["restored"]
        elif kind == "step":
            self.last_step, self.losses[step], self.states[step] = step, event["loss"], event["state"]
        elif kind == "save":
            self.stalls[step] = event["stall"]
