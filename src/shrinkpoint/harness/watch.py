"""How often a user's function was asked, and how long it took."""

from __future__ import annotations

import time
from typing import Any

from shrinkpoint.schemes.target import Evaluate


class Watch:
    """A quality function that knows how often it was called and how long it took, since `lap` was last called."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self.calls, self.seconds = 0, 0.0

    def __call__(self, argument: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._evaluate(argument)
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - began

    def lap(self) -> dict[str, float]:
        out = {"calls": self.calls, "seconds": self.seconds}
        self.calls, self.seconds = 0, 0.0
        return out
