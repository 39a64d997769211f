"""Keeps the last training batches, and measures a model's loss on them; counts the loss terms of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.evaluate import Reading, iter_modules
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.tensors.nest import iter_tensors, map_nested_tensors

LossOfBatch = Callable[[Any, Any], Any]  # The loss of a model on a batch: a number, or a tensor of each example's loss
DEFAULT_BATCHES = 8  # Batches that one measurement evaluates
MAX_BYTES = 64 << 20  # Bytes of batches that are kept


class RecentBatches:
    """The last training batches, as the examples on which a scheme measures the loss.

        recent = sp.RecentBatches(lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
        manager = sp.CheckpointManager("runs/gpt", scheme=sp.Fisher(evaluate=recent))
        for batch in loader:
            recent.add(batch)
            ...

    Copies on the CPU are measured at a save, in eval mode and without gradients; the manager restores the modes and
    the random generators. Of a batch that is too large, the first examples are kept. Ranks that share a model measure
    as many batches as the rank with the fewest.

    Args:
        loss: called with the model and a batch on its device; returns the loss, or a tensor of each example's loss.
        batches: how many are kept.
        max_bytes: how large all of them together may be.
        accumulate: batches whose gradients one optimizer step sums up: this cannot be known from the batches.

    Raises:
        PolicyError: an argument is out of range.
    """

    def __init__(
        self, loss: LossOfBatch, *, batches: int = DEFAULT_BATCHES, max_bytes: int = MAX_BYTES, accumulate: int = 1
    ) -> None:
        if not callable(loss):
            expected = "a function of a model and a batch"
            raise validate.argument_error("loss", loss, expected, "pass the function itself, not what it returned")
        self._loss, self._ring = loss, BatchRing(batches, max_bytes)
        self._accumulate = validate.check_int("accumulate", accumulate)
        self._counter = TermCounter()

    def add(self, batch: Any) -> None:
        """Keep a copy of a batch: a tensor, or a nest of mappings, lists and tuples of tensors and plain values."""
        self._counter.add([batch], scale=self._accumulate * _world_size())
        self._ring.add(batch)

    @property
    def terms(self) -> float | None:
        """Number of loss terms of an optimizer step: those of a batch, times `accumulate`, times the ranks.

        Labels of integers are a term each, but for -100; else examples are counted. None before the first batch.
        """
        return self._counter.terms

    @property
    def description(self) -> str:
        """Description of the examples that are measured."""
        return self._ring.describe()

    def __call__(self, model: Any) -> float:
        """The mean loss of a model."""
        return self.reading(model).value

    def reading(self, model: Any) -> Reading:
        """The mean loss of a model, with the loss of each batch to estimate its confidence.

        The reading of no batch is one that could not be measured.
        """
        reading = self._ring.measure(self._loss, model)
        return replace(reading, advice="call add(batch) before the save") if reading.failure else reading


class BatchRing:
    """Copies of the last batches on the CPU.

    Args:
        batches: how many.
        max_bytes: how large all of them together may be.

    Raises:
        PolicyError: an argument is out of range.
    """

    def __init__(self, batches: int = DEFAULT_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self._batches: deque[Any] = deque(maxlen=validate.check_int("batches", batches))
        self._max_batch_bytes = validate.check_int("max_bytes", max_bytes) // batches

    def describe(self) -> str:
        """Description of the batches, in words."""
        return f"the last {len(self._batches)} training batches"

    def add(self, batch: Any) -> None:
        """Keep a copy in place of the oldest one, unless a single example is too large."""
        if (copy := copy_batch(batch, self._max_batch_bytes)) is not None:
            self._batches.append(copy)

    def measure(self, loss: LossOfBatch, model: Any) -> Reading:
        """The mean loss of a model on the batches, as `RecentBatches.reading`."""
        count = _fewest_of_ranks(len(self._batches), model)
        if not count:
            return Reading(float("nan"), failure="no training batch was seen before the save")
        return measure_batches(loss, model, [*self._batches][-count:])


@torch.no_grad()
def measure_batches(loss: LossOfBatch, model: Any, batches: Sequence[Any]) -> Reading:
    """The mean loss on batches, in eval mode; the caller restores the modes.

    Raises:
        PolicyError: `loss` returns no number.
        Exception: whatever `loss` raises.
    """
    modules = [*iter_modules(model)]
    device = next((parameter.device for module in modules for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies of batches may still be on their way
    for module in modules:
        module.eval()

    def measure(batch: Any) -> Any:  # of a copy, which a loss may change; it is freed before the next one is made
        return _as_number(loss(model, map_nested_tensors(batch, lambda x: x.to(device, copy=True))))

    return Reading.of_batches([measure(batch) for batch in batches])


def copy_batch(batch: Any, max_bytes: int) -> Any:
    """A copy of a batch on the CPU, without gradients: of its first examples, if all are more than `max_bytes`.

    Returns:
        None if not even one example fits.
    """
    sizes = [tensor.shape[0] if _is_plain(tensor) else -1 for tensor in iter_tensors(batch) if tensor.dim()]
    nbytes = sum(map(_nbytes, iter_tensors(batch)))
    if nbytes <= max_bytes:
        return map_nested_tensors(batch, _copy_to_host)
    num_examples = sizes[0] if len({*sizes}) == 1 and sizes[0] > 0 else 0
    count = num_examples * max_bytes // nbytes
    return None if not count else map_nested_tensors(batch, lambda x: _copy_to_host(x[:count] if x.dim() else x))


def _is_plain(x: Tensor) -> bool:
    """False of a sparse or nested tensor, which is not cut."""
    return x.layout is torch.strided and not x.is_nested


def _nbytes(x: Tensor) -> int:
    """Bytes of a tensor; of a sparse one, about."""
    if x.is_nested:
        return x.values().nbytes
    return x.nbytes if x.layout is torch.strided else x._nnz() * (x.element_size() + 8 * x.dim())


def _copy_to_host(x: Tensor) -> Tensor:
    """A copy on the CPU; of a tensor on a CUDA device it arrives later, and the loop does not wait for it."""
    if not _is_plain(x):
        return x.detach().to("cpu", copy=True)
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda, device="cpu")
    return copy.copy_(x.detach(), non_blocking=x.is_cuda)


def _as_number(loss: Any) -> float:
    if isinstance(loss, Tensor) and loss.numel():
        return float(loss.detach().to(torch.float64).mean())
    if isinstance(loss, int | float):
        return float(loss)
    do = "return the loss of the batch"
    raise PolicyError("loss", found=validate.type_name(loss), expected="a number or a tensor", do=do)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _fewest_of_ranks(count: int, model: Any) -> int:
    """The least count of the ranks that evaluate a model of which each has a part."""
    parameters = (p for module in iter_modules(model) for p in module.parameters())
    mesh = next((mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None), None)
    if mesh is None or _world_size() == 1:
        return count
    number = torch.tensor(count, device=mesh.device_type)
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    return int(number)


IGNORED_LABEL = -100  # The label that `torch.nn.functional.cross_entropy` leaves out, by its default
_SHIFTED_KEY = "shift_labels"
"""The key that some collators of transformers give a causal language model, in place of labels that its loss shifts."""
_LABEL_KEYS = ("labels", "label_ids", "label", "targets", "target")
_MAX_STEPS = 16  # Optimizer steps over which the number of terms is averaged: batches of text differ in their padding


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
    labels = labels.values() if isinstance(labels, Tensor) and labels.is_nested else labels
    if (
        not isinstance(labels, Tensor)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype is torch.bool
    ):
        first = next(iter_tensors(batch), None)
        return 0 if first is None else first.size(0) if first.dim() else 1
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
