"""What a model that was trained with compression needs of it at inference."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from shrinkpoint.comm.feedback.base import Feedback
from shrinkpoint.comm.operators.base import Operator
from shrinkpoint.errors import LossWarning


class Reminder:
    """Says once that a model will be much worse without the compression of its activations.

    Args:
        activations: what they were trained with.
    """

    def __init__(self, activations: Iterable[Operator | Feedback]) -> None:
        self._sparse = next((how.spec for how in activations if _is_needed(how)), None)

    def say(self, what: str, stacklevel: int) -> None:
        """Warn, the first time, if there is reason to.

        Args:
            what: is the case now: "compression is off".
            stacklevel: as `warnings.warn` has it, seen from the caller.
        """
        sparse, self._sparse = self._sparse, None
        if sparse is not None:
            warnings.warn(
                f"{what} and this model has {sparse} on its activations: one that was trained so is usually much worse "
                "without (arXiv 2401.07788); feedback such as ef21 mends that",
                LossWarning,
                stacklevel=stacklevel + 1,
            )


def _is_needed(how: Feedback | Operator) -> bool:
    """Whether entries are dropped, and nothing makes it good."""
    if isinstance(how, Operator):
        return isinstance(getattr(how, "share", None), float)
    return how.plain and _is_needed(how.operator)
