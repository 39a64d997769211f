"""Where a scheme loses something, and nothing says what that does to the loss."""

from __future__ import annotations

import warnings

from shrinkpoint.errors import UnmeasuredLossWarning

MEASURE = 'Pass evaluate= to a scheme that measures, such as Fisher(budget="1%", evaluate=...)'


class Unmeasured:
    """Says so once in a run; a scheme has one."""

    def __init__(self) -> None:
        self._is_said = False

    def tell(self, who: object, *, quiet: bool = False) -> None:
        """Warn, the first time.

        Args:
            who: the scheme, as it is written.
            quiet: another process says it.
        """
        if self._is_said or quiet:
            return
        self._is_said = True
        text = f"the loss is not measured: {who} says how far values move, and not what that costs. {MEASURE}"
        warnings.warn(text, UnmeasuredLossWarning, stacklevel=4)
