"""What one training process told while it ran."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Course:
    """Events of one process, collected.

    Attributes:
        first: the first step it made, 0 while it has made none.
        last: the newest.
        skipped: checkpoints that its restore passed over, and why.
        losses: by step.
        stalls: seconds that each save held up the loop, by step.
    """

    first: int = 0
    last: int = 0
    skipped: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    stalls: dict[int, float] = field(default_factory=dict)

    def parts_from(self, other: Course) -> int | None:
        """The first step, of those that both made, whose loss is not the same number; None: there is none."""
        common = sorted(self.losses.keys() & other.losses.keys())
        return next((step for step in common if self.losses[step] != other.losses[step]), None)

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self.first, self.skipped = event["step"], event["skipped"]
        elif event["event"] == "step":
            self.last = event["step"]
            self.losses[self.last] = event["loss"]
        elif event["event"] == "save":
            self.stalls[event["step"]] = event["stall"]
