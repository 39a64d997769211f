"""Moving averages of gradients on the host, from which schemes estimate the sensitivity of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError


class GradientRecorder:
    """Records a moving average of the gradients that training computes.

    The recorder of arXiv 2306.11800, sections on quantization and implementation. It takes two calls in the loop, or
    `attach`:

        loss.backward()
        recorder.after_backward()
        optimizer.step()
        recorder.before_zero_grad()
        optimizer.zero_grad()

    Each is called once per optimizer step: where gradients are accumulated, after the last backward pass. Clipping,
    and other changes of gradients in place, belong before `after_backward`. A loss scale in the gradients has no
    effect, as only relative sizes matter. A gradient with a value that is not finite is skipped, for that parameter
    and batch.

    The average starts as the first gradient and becomes `beta * average + (1 - beta) * gradient`. The paper prints the
    two factors the other way round and still records 50 batches, of which its literal form would remember little more
    than one; `paper=True` is that form, which `Inshrinkerator(paper=True)` switches on in the recorder it is given.

    If a parameter is sharded (FSDP2, tensor parallelism), each rank records its own shard, and skips it if a value in
    it is not finite; a scheme that decides over all ranks combines the shards (docs/dcp.md).

    While recording, the host holds the gradients once in float32 (twice with `squares`), and those of parameters on a
    GPU once more, pinned and in their own dtype; `clear` frees all. All calls must come from the thread that trains.

    Args:
        model: the model whose parameters are recorded: tied ones once, under their first name; frozen ones not at all.
        save_interval: optimizer steps between two saves: only the last `batches` steps before each multiple of it are
            recorded, and the average starts anew each time; None: every step is recorded.
        batches: number of steps that are recorded before a save.
        beta: weight of the previous average, at least 0 and below 1.
        paper: the paper's literal form; None: no, unless a scheme asks for it.
        squares: average the squares of the gradients, too: for `Fisher`, if the optimizer has no second moments.

    Raises:
        PolicyError: an argument out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        save_interval: int | None = None,
        batches: int = 50,
        beta: float = 0.9,
        paper: bool | None = None,
        squares: bool = False,
    ) -> None:
        expected, do = "a torch.nn.Module", "pass the model whose gradients are to be recorded"
        self._model: nn.Module = validate.check_instance(
            "GradientRecorder, model", model, nn.Module, expected=expected, do=do
        )
        self._save_interval = validate.check_optional_int(
            "GradientRecorder, save_interval", save_interval, none_meaning="for every step"
        )
        self._batches = validate.check_int("GradientRecorder, batches", batches)
        beta = validate.check_float("GradientRecorder, beta", beta, maximum=1.0, exclusive=False)
        if beta == 1:
            expected = "a number from 0, below 1"
            raise validate.argument_error("GradientRecorder, beta", beta, expected, validate.LEAVE_OUT)
        if paper is not None:
            validate.check_bool("GradientRecorder, paper", paper)
        validate.check_bool("GradientRecorder, squares", squares)
        self._paper, self._decay, self._gain = paper, *((1 - beta, beta) if paper else (beta, 1 - beta))
        self._step = 0
        self._window_index = 0
        self._mean: dict[str, Tensor] = {}
        self._square: dict[str, Tensor] | None = {} if squares else None
        self._host_copies = _AsyncHostCopies()
        self._handles: list[RemovableHandle] = []

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self._step

    def set_step(self, step: int) -> None:
        """Set the number of steps, as after a restore; the averages are dropped, as they belong to other weights."""
        self.clear()
        self._step = step

    @property
    def is_recording(self) -> bool:
        """True if the gradients of the next step are recorded."""
        return self._save_interval is None or -(self._step + 1) % self._save_interval < self._batches

    @property
    def ready(self) -> bool:
        """True if `mean` has any average."""
        self._drain_copies()
        return bool(self._mean)

    @property
    def mean(self) -> Mapping[str, Tensor]:
        """Averages by parameter name, float32 on the host, of all parameters with a gradient in the last window.

        They are copies: any thread may read them while recording continues.
        """
        self._drain_copies()
        return {name: mean.clone() for name, mean in self._mean.items()}

    @property
    def square(self) -> Mapping[str, Tensor]:
        """Averages of the squared gradients, otherwise as `mean`; empty unless `squares=True`."""
        self._drain_copies()
        return {name: square.clone() for name, square in (self._square or {}).items()}

    def after_backward(self) -> None:
        """Record the current gradients: those on a GPU are copied asynchronously, others are averaged at once."""
        self._drain_copies()
        if not self.is_recording:
            return
        window = 0 if self._save_interval is None else self._step // self._save_interval
        # With gaps, steps between two windows are not recorded; without, the average never starts anew
        has_gaps = self._save_interval is not None and self._batches < self._save_interval
        if window != self._window_index and has_gaps:
            self._reset_averages()
        self._window_index = window
        for name, gradient in self._iter_gradients():
            if gradient.is_cuda:
                self._host_copies.start(name, gradient)
            else:
                self._add_gradient(name, gradient)

    def before_zero_grad(self) -> None:
        """Count a step, and make the GPU finish copying the gradients before it clears them.

        The host does not wait: a copy is averaged when the next one starts, or when `mean` is read.
        """
        self._host_copies.hold()
        self._step += 1

    def attach(self, optimizer: torch.optim.Optimizer) -> GradientRecorder:
        """Make both calls at every step of an optimizer; with several optimizers, attach to the one that steps first.

        Gradients are recorded when `optimizer.step` is called, so not those that it computes by a closure.
        """
        self.detach()

        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self.after_backward()),
            optimizer.register_step_post_hook(lambda *_: self.before_zero_grad()),
        ]
        return self

    def detach(self) -> None:
        """Undo `attach`; the averages are kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def use_printed_average(self) -> None:
        """Use the paper's literal form of the average from now on.

        Raises:
            PolicyError: the recorder was created with `paper=False`.
        """
        if self._paper is False:
            do = "pass the same `paper` to both"
            raise PolicyError("GradientRecorder, paper", found="False", expected="True, as a scheme asks for", do=do)
        if self._paper is None:
            self._paper, self._decay, self._gain = True, self._gain, self._decay

    def clear(self) -> None:
        """Drop the averages, and free their memory."""
        self._host_copies = _AsyncHostCopies()
        self._reset_averages()

    def _reset_averages(self) -> None:
        self._mean, self._square = {}, None if self._square is None else {}

    def _iter_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            gradient = parameter.grad
            if gradient is None or not parameter.requires_grad or not gradient.is_floating_point():
                continue
            local = _local_shard(gradient.detach())
            dense = local.to_dense() if local.is_sparse else local
            if dense.numel():
                yield name, dense

    def _drain_copies(self) -> None:
        for name, gradient in self._host_copies.finish():
            self._add_gradient(name, gradient)

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        value = gradient.to(device="cpu", dtype=torch.float32)
        if not all(bool(extreme.isfinite()) for extreme in torch.aminmax(value)):  # both are nan if any value is
            return
        self._update_average(self._mean, name, value)
        if self._square is not None:
            self._update_average(self._square, name, value.square())

    def _update_average(self, averages: dict[str, Tensor], name: str, value: Tensor) -> None:
        mean = averages.get(name)
        if mean is None or mean.shape != value.shape:
            averages[name] = value.clone()
        else:  # rounded twice, as in the formula, and not once as `add_(value, alpha=...)` may do
            mean.mul_(self._decay).add_(value * self._gain)


def _local_shard(gradient: Tensor) -> Tensor:
    """This rank's shard of a gradient that FSDP2 or tensor parallelism has sharded; else all of it."""
    placements = getattr(gradient, "placements", None)
    if placements is None:
        return gradient
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(gradient, DTensor)
    if any(placement.is_partial() for placement in placements):  # only then do the ranks communicate
        summed = [Replicate() if placement.is_partial() else placement for placement in placements]
        gradient = gradient.redistribute(placements=summed)
    return gradient.to_local()


class _AsyncHostCopies:
    """Copies tensors from GPUs to pinned host memory, on a stream of its own for each GPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._buffers: dict[str, Tensor] = {}
        self._pending: list[str] = []
        self._events: dict[torch.device, torch.cuda.Event] = {}

    def start(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor when the work enqueued so far is done. `finish` must have been called since `hold`."""
        device = tensor.device
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream, buffer = self._streams[device], self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = self._buffers[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                buffer.copy_(tensor, non_blocking=True)
                self._events[device] = stream.record_event()
            tensor.record_stream(stream)  # otherwise its memory may be reused while it is read
        self._pending.append(name)

    def hold(self) -> None:
        """Make work that is enqueued on the GPUs from now on wait for the copies."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Names and copies, once these have arrived; a copy is valid until the next `start`."""
        for event in self._events.values():
            event.synchronize()
        names, self._pending, self._events = self._pending, [], {}
        return iter([(name, self._buffers[name]) for name in names])
