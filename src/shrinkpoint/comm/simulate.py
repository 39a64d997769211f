"""Compression between the modules of one process: bit for bit what a compressed pipeline computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shrinkpoint import validate
from shrinkpoint.comm.compressors.base import Compressor
from shrinkpoint.comm.feedback.base import ErrorFeedback
from shrinkpoint.comm.link import CompressorLike, Link, MessageContext, NonfinitePolicy
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import LossWarning, MismatchError, PolicyError


class InferenceReminder:
    """Says once that a model will be much worse without the compression of its activations.

    Args:
        activations: what they were trained with.
    """

    def __init__(self, activations: Iterable[Compressor | ErrorFeedback]) -> None:
        self._sparse_spec = next((how.spec for how in activations if _drops_entries(how)), None)

    def warn(self, condition: str, stacklevel: int) -> None:
        """Warn, the first time, if there is reason to.

        Args:
            condition: is the case now: "compression is off".
            stacklevel: as `warnings.warn` has it, seen from the caller.
        """
        sparse, self._sparse_spec = self._sparse_spec, None
        if sparse is not None:
            warnings.warn(
                f"{condition} and this model has {sparse} on its activations: "
                f"one that was trained so is usually much worse "
                "without (arXiv 2401.07788); feedback such as ef21 mends that",
                LossWarning,
                stacklevel=stacklevel + 1,
            )


def _drops_entries(compressor: ErrorFeedback | Compressor) -> bool:
    """Whether entries are dropped, and nothing makes it good."""
    if isinstance(compressor, Compressor):
        return isinstance(getattr(compressor, "share", None), float)
    return compressor.is_stateless and _drops_entries(compressor.compressor)


class CompressionPoints:
    """The points of a model, as `insert_compression` made them.

    Attributes:
        inference: compress where gradients are off, too. A model that was trained with TopK or Random-K needs it.
    """

    def __init__(self, points: Sequence[_BoundaryHook], micro_batches: int) -> None:
        self._points, self._micro_batches = list(points), micro_batches
        self._enabled = self._inference = True
        self._ids: tuple[Tensor, ...] | None = None
        forward = [point.forward.sender.feedback for point in self._points if point.forward is not None]
        self._inference_reminder = InferenceReminder(forward)
        for point in self._points:
            point.owner = self

    def __repr__(self) -> str:
        return f"Points({', '.join(repr(point.path) for point in self._points)})"

    @property
    def enabled(self) -> bool:
        """Whether anything is compressed; without, the model is as it was before."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value
        if not value:
            self._inference_reminder.warn("compression is off", stacklevel=2)

    @property
    def inference(self) -> bool:
        return self._inference

    @inference.setter
    def inference(self, value: bool) -> None:
        self._inference = value
        if not value:
            self._inference_reminder.warn("compression is off", stacklevel=2)

    def set_sample_ids(self, ids: Tensor) -> None:
        """The samples of the next step, one id a row of the whole batch; split along the micro-batches as a pipeline's.

        Args:
            ids: integers, 1-d.

        Raises:
            PolicyError: they are none.
        """
        self._ids = split_ids(ids, self._micro_batches)

    def link_stats(self) -> dict[str, LinkStats]:
        """What crossed at each boundary and direction, by name: "0 forward". Both ends are one account."""
        pairs = [pair for point in self._points for pair in (point.forward, point.backward) if pair is not None]
        return {pair.sender.name: pair.sender.stats.merged_with(pair.receiver.stats) for pair in pairs}

    def state_dict(self) -> dict[str, Any]:
        """Both ends of every link, and which micro-batch comes next."""
        return {str(number): point.state_dict() for number, point in enumerate(self._points)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            MismatchError: it is that of other points.
        """
        if set(state) != {str(number) for number in range(len(self._points))}:
            raise MismatchError("points", found=f"the state of {len(state)}", expected=f"that of {len(self._points)}")
        for number, point in enumerate(self._points):
            point.load_state_dict(state[str(number)])

    def remove(self) -> None:
        """Take the points out of the model."""
        for point in self._points:
            point.handle.remove()

    def compresses(self) -> bool:
        return self._enabled and (self._inference or torch.is_grad_enabled())

    def message_context(self, call_index: int, training: bool) -> MessageContext:
        slot = call_index % self._micro_batches
        return MessageContext(slot, training=training, ids=None if self._ids is None else self._ids[slot])


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
    """Make what leaves some modules, and the gradients that come back, what they would be after crossing a link.

    The result is bit for bit that of a pipeline that is cut there and compressed likewise; so operators can be tried,
    and models that were trained in a pipeline evaluated, in one process. A module computes its own gradients from what
    it really put out: the loss of the message is not differentiated.

    A step is `micro_batches` forward calls, each of them a micro-batch; where gradients are off it is an evaluation,
    and nothing is remembered of it. Modules inside of an activation checkpoint run twice, which would be counted twice:
    put points around checkpoints, not into them.

    Args:
        after: names of modules, as in `model.named_modules()`; point i is what boundary i of a pipeline is. A module
            may give a tensor or a nest of tuples, lists and dicts; what is not floating point stays as it is. It runs
            once in each forward call of the model.
        forward, backward: an operator, a feedback, or the spec of one; None: that direction is not compressed.
        per_point: other operators for some points: `{0: dict(forward="q8:64")}`.
        micro_batches: of a step.
        nonfinite, min_numel, sample_every: as `Link` has them.

    Raises:
        PolicyError: no such module or point, or a spec that is none.
    """
    expected, do = "a torch.nn.Module", "pass the model"
    validate.check_instance("insert_points, model", model, nn.Module, expected=expected, do=do)
    if isinstance(after, str) or not isinstance(after, Sequence):
        raise validate.argument_error("insert_points, after", after, "a list of names of modules", f"write [{after!r}]")
    modules, special = dict(model.named_modules()), dict(per_point or {})
    validate.check_int("insert_points, micro_batches", micro_batches)
    for name in after:
        if name not in modules:
            raise PolicyError("insert_points, after", found=repr(name), expected=f"one of {', '.join(modules)}"[:400])
    for number, options in special.items():
        if number not in range(len(after)) or options.keys() - {"forward", "backward"}:
            found, expected = f"{number}: {dict(options)}", f"0 to {len(after) - 1}, each with forward or backward"
            raise PolicyError("insert_points, per_point", found=found, expected=expected)
    common = {"nonfinite": nonfinite, "min_numel": min_numel, "sample_every": sample_every}
    points = []
    for number, name in enumerate(after):
        hows: dict[str, CompressorLike] = {"forward": forward, "backward": backward, **special.get(number, {})}
        pairs = {
            way: None if how is None else _LoopbackLink(how, f"{number} {way}", common) for way, how in hows.items()
        }
        points.append(_BoundaryHook(name, pairs["forward"], pairs["backward"]))
    made = CompressionPoints(points, micro_batches)
    for point in points:
        point.handle = modules[point.path].register_forward_hook(point)
    return made


def split_ids(ids: Tensor, micro_batches: int) -> tuple[Tensor, ...]:
    """The ids of each micro-batch, split as torch's schedules split a batch.

    Raises:
        PolicyError: they are not integers, or not 1-d.
    """
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        found, expected = f"{ids.dtype} of shape {tuple(ids.shape)}", "integers, 1-d: one a row of the batch"
        raise PolicyError("set_sample_ids", found=found, expected=expected)
    return torch.tensor_split(ids.detach().to("cpu", torch.int64), micro_batches)


class _LoopbackLink:
    """Both ends of a link."""

    def __init__(self, compressor: Compressor | ErrorFeedback | str, name: str, options: dict[str, Any]) -> None:
        self.sender, self.receiver = (Link(compressor, name=name, **options) for _ in range(2))

    def cross(self, x: Tensor, context: MessageContext) -> Tensor:
        """What the other end gets, and has the strides of x where x is dense."""
        if not self.sender.is_compressible(x):
            self.sender.count_uncompressed(x)
            self.receiver.count_uncompressed(x)
            return x.clone()
        return self.receiver.unpack(self.sender.pack(x, context), torch.empty_like(x), context)

    def state_dict(self) -> dict[str, Any]:
        return {"sender": self.sender.state_dict(), "receiver": self.receiver.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sender.load_state_dict(state["sender"])
        self.receiver.load_state_dict(state["receiver"])


class _BoundaryHook:
    """What is done to the outputs of one module; a forward hook."""

    owner: CompressionPoints
    handle: RemovableHandle

    def __init__(self, path: str, forward: _LoopbackLink | None, backward: _LoopbackLink | None) -> None:
        self.path, self.forward, self.backward = path, forward, backward
        self._calls = {True: 0, False: 0}

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.owner.compresses():
            return None
        training = torch.is_grad_enabled()
        at = self.owner.message_context(self._calls[training], training)
        self._calls[training] += 1
        if training:
            self._calls[False] = 0
        number = iter(range(1 << 30))
        return _map_tensors(output, lambda x: self._cross_tensor(x, replace(at, tensor=next(number))))

    def state_dict(self) -> dict[str, Any]:
        ways = {"forward": self.forward, "backward": self.backward}
        return {
            "calls": self._calls[True],
            **{way: pair.state_dict() for way, pair in ways.items() if pair is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for way, pair in (("forward", self.forward), ("backward", self.backward)):
            if (pair is not None) != (way in state):
                found = f"a state {'with' if way in state else 'without'} a {way} link"
                raise MismatchError(
                    f"point {self.path}", found=found, expected="the opposite", do="insert as it was saved"
                )
        for way, pair in (("forward", self.forward), ("backward", self.backward)):
            if pair is not None:
                pair.load_state_dict(state[way])
        self._calls = {True: int(state["calls"]), False: 0}

    def _cross_tensor(self, x: Tensor, context: MessageContext) -> Tensor:
        if not x.is_floating_point():
            return x
        crossed: Tensor = _CompressFunction.apply(x, self, context)  # type: ignore[no-untyped-call]
        return crossed


class _CompressFunction(torch.autograd.Function):
    """Identity, but for what messages lose on the way there and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: _BoundaryHook, context: MessageContext) -> Tensor:
        ctx.point, ctx.at = hook, context
        if hook.forward is None:
            return x.clone()
        made = hook.forward.cross(x, context)
        if context.training:
            ctx.at = replace(context, indices=hook.forward.receiver.indices(context))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        pair: _LoopbackLink | None = ctx.point.backward
        return gradients[0] if pair is None else pair.cross(gradients[0], ctx.at), None, None


def _map_tensors(nest: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A nest with its tensors changed, in their order; anything else stays what it is."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_map_tensors(one, function) for one in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(_map_tensors(one, function) for one in nest)
    if isinstance(nest, dict):
        changed = {key: _map_tensors(one, function) for key, one in nest.items()}
        return changed if type(nest) is dict else type(nest)(**changed)
    return nest
