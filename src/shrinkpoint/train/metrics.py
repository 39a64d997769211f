"""What a loop measured, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shrinkpoint.errors import PolicyError


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics as floats, tensors on devices included.

    Raises:
        PolicyError: one of them is no number.
    """
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        found, expected = f"{metrics!r:.200}", "a number for each name"
        raise PolicyError("metrics", found=found, expected=expected, do="pass floats") from error
