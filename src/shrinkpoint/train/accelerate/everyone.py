"""What all processes of a run do together: none goes on where one failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.sharding.shard_spec import make_all_gather

T = TypeVar("T")


def gather_or_raise(compute: Callable[[], T]) -> list[T]:
    """What each process computed, by rank; where one fails, all raise what the first of them by rank raised.

    Args:
        compute: its result is small and can be pickled.

    Raises:
        ShrinkpointError: of the class that was raised; PolicyError where that was not one of ours.
        whatever `compute` raises, where there is one process.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [compute()]
    mine: Any
    cause: Exception | None = None
    try:
        mine = compute()
    except Exception as error:
        mine = cause = error
    try:
        return make_all_gather()(mine)
    except ShrinkpointError as told:
        raise told from cause
