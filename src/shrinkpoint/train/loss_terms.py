"""Counts the loss terms that an optimizer step averages (tokens, images), from which `fisher` predicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.tensors.nest import iter_tensors

IGNORED_LABEL = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out, by its default."""
_SHIFTED_KEY = "shift_labels"
"""What some collators of transformers give a causal language model, in place of labels that its loss shifts."""
_LABEL_KEYS = ("labels", "label_ids", "label", "targets", "target")
_MAX_STEPS = 16
"""Optimizer steps over which the number of terms is averaged: batches of text differ in their padding."""


def count_terms(batch: Any, *, shift: bool = False) -> Tensor | int:
    """Number of terms that the loss of a batch averages.

    Integer labels (of a mapping, or the last item of a tuple) are a term each, but for those that are -100; so are the
    values of a batch that is one tensor of integers. Any other batch has as many terms as examples.

    Args:
        shift: the loss of a causal language model, which has no term for the first label of a row.

    Returns:
        0 if the batch has no tensor. Of labels, a scalar tensor on their device, for which nothing waits.
    """
    is_shifted = isinstance(batch, Mapping) and _SHIFTED_KEY in batch
    labels = batch[_SHIFTED_KEY] if is_shifted else find_labels(batch)
    if (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype is torch.bool
    ):
        first = next(iter_tensors(batch), None)
        return 0 if first is None else len(first) if first.dim() else 1
    if shift and not is_shifted and labels.dim() > 1:
        labels = labels[..., 1:]
    return labels.ne(IGNORED_LABEL).sum()


def find_labels(batch: Any) -> Tensor | None:
    """Targets of a loss; None if a batch does not tell."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in _LABEL_KEYS if key in batch), None)
    else:
        labels = batch[-1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    return labels if isinstance(labels, Tensor) else None


class TermCounter:
    """The mean number of loss terms of the last optimizer steps."""

    def __init__(self) -> None:
        self._steps: deque[list[Tensor | int]] = deque(maxlen=_MAX_STEPS)
        self._scale = 1.0

    def add(self, batches: Iterable[Any], *, scale: float = 1, shift: bool = False) -> None:
        """Count the batches of one optimizer step, on this process.

        Args:
            scale: number of processes that average as many; times that of batches, if only one of a step is given.
            shift: of `count_terms`.
        """
        self._scale = scale
        self._steps.append([count_terms(batch, shift=shift) for batch in batches])

    @property
    def terms(self) -> float | None:
        """Terms of a step, over all processes; None if nothing was counted."""
        if not self._steps:
            return None
        total = sum(int(count) for step in self._steps for count in step)
        return self._scale * total / len(self._steps) or None


def counts_terms(scheme: Scheme) -> bool:
    """True if a scheme uses the number of loss terms that an optimizer step averages."""
    return isinstance(scheme, Planner) and scheme.counts_terms


def note_terms(scheme: Scheme, terms: float | None) -> None:
    """Tell a scheme how many terms a step averages, if it uses that."""
    if terms is not None and isinstance(scheme, Planner):
        scheme.note_terms(terms)
