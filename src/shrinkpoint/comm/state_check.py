"""Checks of the form of a state, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError

STATE_ADVICE = "load what state_dict() returned on the same rank"
SAME_ADVICE = "pass the same model and settings on all ranks"


def check_entries(where: str, state: object, names: Collection[str]) -> Mapping[str, Any]:
    """Return a state that is a mapping of these names, and of no others.

    Raises:
        MismatchError: it is something else.
    """
    if isinstance(state, Mapping) and state.keys() == set(names):
        return state
    found = validate.type_name(state)
    if isinstance(state, Mapping):
        found = f"a state of {sorted(map(str, state))}"[:200]
    raise MismatchError(where, found=found, expected=f"one of {sorted(names)}", do=STATE_ADVICE)


def check_mapping(where: str, value: object) -> Mapping[str, Any]:
    """Return a part of a state that is a mapping; raises MismatchError if it is something else."""
    if isinstance(value, Mapping):
        return value
    raise part_error(where, validate.describe_value(value), "a mapping")


def part_error(where: str, found: str, expected: str) -> MismatchError:
    """The error for a part of a state that cannot be loaded."""
    return MismatchError(where, found=found, expected=expected, do=STATE_ADVICE)
