"""What the gradients of the last batches were like, kept on the host for the sensitivity of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError


class GradientRecorder:
    """Records a moving average of the gradients that training computes anyway.

    The recorder of arXiv 2306.11800, sections on quantization and implementation. Two calls in the loop, or `attach`:

        loss.backward()
        recorder.after_backward()
        optimizer.step()
        recorder.before_zero_grad()
        optimizer.zero_grad()

    Each is called once per optimizer step: where gradients are accumulated, after the last backward pass. What changes
    gradients in place, such as clipping, belongs before `after_backward`. A loss scale that is still in them changes
    nothing, as only relative sizes matter. A gradient with a value that is not finite is skipped, for that parameter
    and batch.

    The average starts as the first gradient and becomes `beta * average + (1 - beta) * gradient`. The paper prints the
    two factors the other way round and still records 50 batches, of which its literal form would remember little more
    than one; `paper=True` is that form, which `Inshrinkerator(paper=True)` switches on in the recorder it is given.

    Of a parameter that is in parts (FSDP2, tensor parallelism) each rank records its own part, and what is not finite
    in one part is skipped there; a scheme that is decided by all ranks puts them together (docs/dcp.md).

    While recording, the host holds gradients once in float32 (twice with `squares`), and of parameters on a GPU once
    more, pinned and in their own dtype; `clear` frees all. All calls belong to the thread that trains.

    Args:
        model: whose parameters are recorded: tied ones once, under their first name; frozen ones not at all.
        save_interval: a save is planned at each multiple of so many optimizer steps, and only the last `batches`
            steps before
            it are recorded, afresh each time; None: every step is, without an end.
        batches: how many steps.
        beta: how much of the average is kept, at least 0 and below 1.
        paper: the paper's literal form; None: not, unless a scheme asks for it.
        squares: average the squares of the gradients, too: for `Fisher`, where the optimizer has no second moments.

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
            raise validate.argument_error(
                "GradientRecorder, beta", beta, "a number from 0, below 1", "take the default"
            )
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
        """How many optimizer steps were counted."""
        return self._step

    def set_step(self, step: int) -> None:
        """Go on from a step, as after a restore; what was recorded belongs to other weights and is dropped."""
        self.clear()
        self._step = step

    @property
    def is_recording(self) -> bool:
        """Whether the gradients of the step that comes next are recorded."""
        return self._save_interval is None or -(self._step + 1) % self._save_interval < self._batches

    @property
    def ready(self) -> bool:
        """Whether there is anything in `mean`."""
        self._drain_copies()
        return bool(self._mean)

    @property
    def mean(self) -> Mapping[str, Tensor]:
        """The averages by parameter name, float32 on the host, of all parameters with a gradient in the last window.

        A copy: what reads it, in whichever thread, is not disturbed by the recording that goes on.
        """
        self._drain_copies()
        return {name: mean.clone() for name, mean in self._mean.items()}

    @property
    def square(self) -> Mapping[str, Tensor]:
        """The averages of squares, as `mean`; empty where they were not asked for."""
        self._drain_copies()
        return {name: square.clone() for name, square in (self._square or {}).items()}

    def after_backward(self) -> None:
        """Record the gradients as they are now: on a GPU, start to copy them; else, average them at once."""
        self._drain_copies()
        if not self.is_recording:
            return
        window = 0 if self._save_interval is None else self._step // self._save_interval
        if window != self._window_index and self._has_gaps:
            self._reset_averages()
        self._window_index = window
        for name, gradient in self._iter_gradients():
            if gradient.is_cuda:
                self._host_copies.start(name, gradient)
            else:
                self._add_gradient(name, gradient)

    def before_zero_grad(self) -> None:
        """Count a step, and let nothing clear the gradients before they are copied.

        It is the GPU that waits, not the host: a copy is averaged when the next one starts, or when `mean` is read.
        """
        self._host_copies.hold()
        self._step += 1

    def attach(self, optimizer: torch.optim.Optimizer) -> GradientRecorder:
        """Do both at every step of an optimizer, instead of by hand; of several, the one that steps first.

        Gradients are recorded as `optimizer.step` finds them, so not those that it lets a closure compute.
        """
        self.detach()

        def before(*_: Any) -> None:
            self.after_backward()

        def after(*_: Any) -> None:
            self.before_zero_grad()

        self._handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        return self

    def detach(self) -> None:
        """Undo `attach`; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def use_printed_average(self) -> None:
        """Average from now on as the paper prints it.

        Raises:
            PolicyError: `paper=False` was asked for.
        """
        if self._paper is False:
            do = "leave `paper` out of one of the two"
            raise PolicyError("GradientRecorder, paper", found="False", expected="True, as a scheme asks for", do=do)
        if self._paper is None:
            self._paper, self._decay, self._gain = True, self._gain, self._decay

    def clear(self) -> None:
        """Forget what was recorded, and free its memory."""
        self._host_copies = _AsyncHostCopies()
        self._reset_averages()

    def _reset_averages(self) -> None:
        self._mean, self._square = {}, None if self._square is None else {}

    @property
    def _has_gaps(self) -> bool:
        """Windows that touch are one: then nothing is ever stale."""
        return self._save_interval is not None and self._batches < self._save_interval

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
        fresh = gradient.to(device="cpu", dtype=torch.float32)
        if not all(bool(x.isfinite()) for x in torch.aminmax(fresh)):  # nan is both where there is one
            return
        self._update_average(self._mean, name, fresh)
        if self._square is not None:
            self._update_average(self._square, name, fresh.square())

    def _update_average(self, averages: dict[str, Tensor], name: str, value: Tensor) -> None:
        mean = averages.get(name)
        if mean is None or mean.shape != value.shape:
            averages[name] = value.clone()
        else:  # two roundings, as in the formula, and not the fused one that `add_(fresh, alpha=...)` may be
            mean.mul_(self._decay).add_(value * self._gain)


def _local_shard(gradient: Tensor) -> Tensor:
    """This rank's part of a gradient in parts, as FSDP2 and tensor parallelism leave them; else all of it.

    No rank waits for another, but where the ranks' parts are still to be summed.
    """
    placements = getattr(gradient, "placements", None)
    if placements is None:
        return gradient
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(gradient, DTensor)
    if any(one.is_partial() for one in placements):
        gradient = gradient.redistribute(placements=[Replicate() if one.is_partial() else one for one in placements])
    return gradient.to_local()


class _AsyncHostCopies:
    """Copies of tensors on GPUs on their way to pinned host memory, on a stream of their own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._buffers: dict[str, Tensor] = {}
        self._pending: list[str] = []
        self._events: dict[torch.device, torch.cuda.Event] = {}

    def start(self, name: str, tensor: Tensor) -> None:
        """Copy as soon as the work enqueued so far is done. `finish` must have been called since `hold`."""
        device = tensor.device
        with torch.cuda.device(device):
            stream, buffer = self._stream(device), self._buffer(name, tensor)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                buffer.copy_(tensor, non_blocking=True)
                self._events[device] = stream.record_event()
            tensor.record_stream(stream)  # or its memory may be handed out again while it is read
        self._pending.append(name)

    def hold(self) -> None:
        """Let what is enqueued on the GPUs from now on wait for the copies."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """What was copied, once it has arrived; a buffer is good until the next `start`."""
        for event in self._events.values():
            event.synchronize()
        names, self._pending, self._events = self._pending, [], {}
        return iter([(name, self._buffers[name]) for name in names])

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        held = self._buffers.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._buffers[name] = held
        return held
