"""Copies of what a device has computed, and computations that need them: many tensors wait for a device together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from shrinkpoint.tensors.dtypes import copy_to_host

P = ParamSpec("P")
T = TypeVar("T")
Reads: TypeAlias = Generator[Tensor, Any, T]
"""Yields tensors of float64 on a device, is sent their copies in host memory, and returns a result."""


class Reading(Generic[P, T]):
    """A function that waits for a device, if its arguments are on one.

    Attributes:
        together: the same function as `Reads`, for `finish_together`.
    """

    def __init__(self, together: Callable[P, Reads[T]]) -> None:
        self.together = together
        update_wrapper(self, together)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = finish(self.together(*args, **kwargs))
        return result


def finish(result: Any) -> Any:
    """The result of one `Reads`; what is none is a result already."""
    answer: Tensor | None = None
    while isinstance(result, Generator):
        try:
            answer = result.send(answer).cpu()
        except StopIteration as end:
            return end.value
    return result


def finish_together(started: Mapping[str, Any]) -> dict[str, Any]:
    """The results of many `Reads` by name, as of `finish`; what they ask for at once is copied to the host at once."""
    done: dict[str, Any] = {}
    answers: dict[str, Tensor | None] = dict.fromkeys(started)
    while answers:
        asked: dict[str, Tensor] = {}
        for name, answer in answers.items():
            result = started[name]
            if isinstance(result, Generator):
                try:
                    asked[name] = result.send(answer)
                except StopIteration as end:
                    done[name] = end.value
            else:
                done[name] = result
        answers = {**copy_together(asked)}
    return {name: done[name] for name in started}


def copy_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies in host memory, by name; those from one device, of one dtype, cross in one transfer."""
    out = {name: copy_to_host(tensor) for name, tensor in tensors.items() if tensor.is_cpu}
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in out:
            groups.setdefault((tensor.device, tensor.dtype), {})[name] = tensor.detach()
    for group in groups.values():
        joined = torch.cat([tensor.reshape(-1) for tensor in group.values()]).cpu()
        parts = joined.split([tensor.numel() for tensor in group.values()])
        out |= {name: part.view(group[name].shape) for name, part in zip(group, parts, strict=True)}
    return out
