"""Compression between the modules of one process, with the same bits as a compressed pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from shrinkpoint import validate
from shrinkpoint.comm.boundary import CompressionSwitch, check_ids, find_sparse_spec, parse_directions, split_ids
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.error_feedback import ErrorFeedback
from shrinkpoint.comm.link import CompressorLike, Link, LinkStats, MessageContext, NonfinitePolicy
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.nest import map_nested_tensors


def insert_compression(
    model: nn.Module,
    after: Sequence[str],
    *,
    forward: CompressorLike = None,
    backward: CompressorLike = None,
    per_point: Mapping[int, Mapping[str, CompressorLike]] | None = None,
    micro_batches: int = 1,
    nonfinite: NonfinitePolicy = "pass",
    min_numel: int = 0,
    sample_every: int = 16,
) -> CompressionPoints:
    """Compress the outputs of some modules, and the gradients that return to them, as links of a pipeline would.

    The result has the same bits as a pipeline that is cut there and compressed in the same way; so compressors can be
    tried, and models that were trained in a pipeline evaluated, in one process. A module computes its own gradients
    from its uncompressed output: the error of the message is not differentiated.

    A step is `micro_batches` forward calls, each of them a micro-batch; calls where gradients are off are evaluations,
    which nothing remembers. Modules inside of an activation checkpoint run twice, which would be counted twice: put
    points around checkpoints, not into them.

    Args:
        after: names of modules, as in `model.named_modules()`; point i corresponds to boundary i of a pipeline. A
            module may return a tensor or a nest of tuples, lists and dicts; tensors that are not floating point are
            not compressed. It must run once in each forward call of the model.
        forward, backward: a compressor, a feedback, or the spec of either; None to leave that direction uncompressed.
        per_point: other compressors for some points: `{0: dict(forward="q8:64")}`.
        micro_batches: the number of micro-batches of a step.
        nonfinite, min_numel, sample_every: as for `Link`.

    Returns:
        The handle: statistics, state, and removal.

    Raises:
        PolicyError: no such module or point, one that is compressed already, or an invalid spec.
    """
    overrides = dict(per_point or {})
    modules = _check_points(model, after, overrides)
    validate.check_int("insert_compression, micro_batches", micro_batches)
    options = {"nonfinite": nonfinite, "min_numel": min_numel, "sample_every": sample_every}
    points = []
    for index, name in enumerate(after):
        compressors: dict[str, CompressorLike] = {"forward": forward, "backward": backward, **overrides.get(index, {})}
        parsed = parse_directions("insert_compression", index, compressors)
        links = {
            direction: None if compressor is None else _LoopbackLink(compressor, f"{index} {direction}", options)
            for direction, compressor in parsed.items()
        }
        points.append(_BoundaryHook(name, links["forward"], links["backward"]))
    handle = CompressionPoints(points, micro_batches)
    for point in points:
        point.handle = modules[point.path].register_forward_hook(point)
    return handle


def _check_points(
    model: nn.Module, after: Sequence[str], overrides: Mapping[int, Mapping[str, CompressorLike]]
) -> dict[str, nn.Module]:
    expected, advice = "a torch.nn.Module", "pass the model"
    validate.check_instance("insert_compression, model", model, nn.Module, expected=expected, do=advice)
    if isinstance(after, str) or not isinstance(after, Sequence):
        advice = f"pass [{after!r}]"
        raise validate.argument_error("insert_compression, after", after, "a list of names of modules", advice)
    modules = dict(model.named_modules())
    for name in after:
        if name not in modules:
            expected = f"one of {', '.join(filter(None, modules))}"[:400]  # the model itself has no name
            do = "pass names as `named_modules` gives them"
            raise PolicyError("insert_compression, after", found=repr(name), expected=expected, do=do)
        if after.count(name) > 1 or any(
            isinstance(hook, _BoundaryHook) for hook in modules[name]._forward_hooks.values()
        ):
            problem, expected = f"{name!r}, which is compressed already", "each module once"
            do = "pass it once, and first call remove() of earlier points"
            raise PolicyError("insert_compression, after", found=problem, expected=expected, do=do)
    for index, override in overrides.items():
        if index not in range(len(after)) or override.keys() - {"forward", "backward"}:
            problem, expected = f"{index}: {dict(override)}", f"0 to {len(after) - 1}, each with forward or backward"
            do = 'pass e.g. {0: {"forward": "q4"}}'
            raise PolicyError("insert_compression, per_point", found=problem, expected=expected, do=do)
    return modules


class CompressionPoints:
    """Handle of the compression points of a model, which `insert_compression` returns.

    Attributes:
        enabled: True if anything is compressed; if False, the model computes what it did without the points.
        inference: compress where gradients are off, too. A model that was trained with TopK or Random-K
            needs it.
    """

    enabled = CompressionSwitch("compression is off")
    inference = CompressionSwitch("compression is off")

    def __init__(self, points: Sequence[_BoundaryHook], micro_batches: int) -> None:
        self._points, self._micro_batches = list(points), micro_batches
        self._ids: tuple[Tensor, ...] | None = None
        self.sparse_spec = find_sparse_spec(point.forward.sender.feedback for point in self._points if point.forward)
        for point in self._points:
            point.owner = self

    def __repr__(self) -> str:
        return f"CompressionPoints({', '.join(repr(point.path) for point in self._points)})"

    def set_sample_ids(self, ids: Tensor | Sequence[int]) -> None:
        """Set the sample ids of the next step; they are split into micro-batches as a pipeline splits its batch.

        Args:
            ids: integers, 1-d, one for each row of the batch.

        Raises:
            PolicyError: they are not integers, or not 1-d.
        """
        self._ids = split_ids(check_ids(ids), self._micro_batches)

    def link_stats(self) -> dict[str, LinkStats]:
        """Statistics by boundary and direction ("0 forward"), of both ends together."""
        links = [link for point in self._points for link in point.links.values()]
        return {link.sender.name: link.sender.stats.merged_with(link.receiver.stats) for link in links}

    def state_dict(self) -> dict[str, Any]:
        """The state of both ends of every link, and the index of the next micro-batch."""
        return {str(index): point.state_dict() for index, point in enumerate(self._points)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            MismatchError: it is the state of other points.
        """
        if set(state) != {str(index) for index in range(len(self._points))}:
            found, do = f"the state of {len(state)}", "insert the same points as when it was saved"
            raise MismatchError("points", found=found, expected=f"that of {len(self._points)}", do=do)
        for index, point in enumerate(self._points):
            point.load_state_dict(state[str(index)])

    def remove(self) -> None:
        """Remove the points from the model."""
        for point in self._points:
            point.handle.remove()

    def compresses(self) -> bool:
        return self.enabled and (self.inference or torch.is_grad_enabled())

    def message_context(self, call_index: int, training: bool) -> MessageContext:
        slot = call_index % self._micro_batches
        return MessageContext(slot, training=training, ids=None if self._ids is None else self._ids[slot])


class _LoopbackLink:
    """Both ends of a link in one process."""

    def __init__(self, compressor: Compressor | ErrorFeedback | str, name: str, options: dict[str, Any]) -> None:
        self.sender, self.receiver = (Link(compressor, name=name, **options) for _ in range(2))

    def cross(self, tensor: Tensor, context: MessageContext) -> Tensor:
        """Send a tensor through the link; the result has the strides of the tensor if that is dense."""
        if not self.sender.is_compressible(tensor):
            self.sender.stats.add_uncompressed(tensor)
            self.receiver.stats.add_uncompressed(tensor)
            return tensor.clone()
        return self.receiver.unpack(self.sender.pack(tensor, context), torch.empty_like(tensor), context)

    def state_dict(self) -> dict[str, Any]:
        return {"sender": self.sender.state_dict(), "receiver": self.receiver.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sender.load_state_dict(state["sender"])
        self.receiver.load_state_dict(state["receiver"])


class _BoundaryHook:
    """A forward hook that sends the outputs of the module `path`, and their gradients, through links.

    Without a link a direction is not compressed. `owner` is the handle of all points of the model.
    """

    owner: CompressionPoints
    handle: RemovableHandle

    def __init__(self, path: str, forward: _LoopbackLink | None, backward: _LoopbackLink | None) -> None:
        self.path, self.forward, self.backward = path, forward, backward
        self.links = {name: link for name, link in (("forward", forward), ("backward", backward)) if link is not None}
        self._calls = {True: 0, False: 0}

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.owner.compresses():
            return None
        training = torch.is_grad_enabled()
        context = self.owner.message_context(self._calls[training], training)
        self._calls[training] += 1
        if training:
            self._calls[False] = 0
        numbers = count()
        return map_nested_tensors(output, lambda x: self._cross_tensor(x, replace(context, tensor=next(numbers))))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls[True], **{name: link.state_dict() for name, link in self.links.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for direction in ("forward", "backward"):
            if (direction in self.links) != (direction in state):
                problem = f"a state {'with' if direction in state else 'without'} a {direction} link"
                advice = "insert the compression that was saved"
                raise MismatchError(f"point {self.path}", found=problem, expected="the opposite", do=advice)
        for direction, link in self.links.items():
            link.load_state_dict(state[direction])
        self._calls = {True: int(state["calls"]), False: 0}

    def _cross_tensor(self, tensor: Tensor, context: MessageContext) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        crossed: Tensor = _CompressFunction.apply(tensor, self, context)  # type: ignore[no-untyped-call]
        return crossed


class _CompressFunction(torch.autograd.Function):
    """Sends a tensor through the forward link, and its gradient through the backward link."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, hook: _BoundaryHook, context: MessageContext) -> Tensor:
        ctx.hook, ctx.context = hook, context
        if hook.forward is None:
            return tensor.clone()
        received = hook.forward.cross(tensor, context)
        if context.training:
            ctx.context = replace(context, indices=hook.forward.receiver.indices(context))
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        link: _LoopbackLink | None = ctx.hook.backward
        return gradients[0] if link is None else link.cross(gradients[0], ctx.context), None, None
