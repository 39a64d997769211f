"""Compression between the modules of one process: what a pipeline does to a model, without the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shrinkpoint import arguments
from shrinkpoint.comm.feedback.base import Feedback
from shrinkpoint.comm.inference import Reminder
from shrinkpoint.comm.ledger import Ledger
from shrinkpoint.comm.link import At, How, Link, Nonfinite
from shrinkpoint.comm.operators.base import Operator
from shrinkpoint.errors import MismatchError, PolicyError


class Points:
    """The points of a model, as `insert_points` made them.

    Attributes:
        inference: compress where gradients are off, too. A model that was trained with TopK or Random-K needs it.
    """

    def __init__(self, points: Sequence[_Point], micro_batches: int) -> None:
        self._points, self._micro_batches = list(points), micro_batches
        self._enabled = self._inference = True
        self._ids: tuple[Tensor, ...] | None = None
        forward = [point.forward.sender.how for point in self._points if point.forward is not None]
        self._reminder = Reminder(forward)
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
            self._reminder.say("compression is off", stacklevel=2)

    @property
    def inference(self) -> bool:
        return self._inference

    @inference.setter
    def inference(self, value: bool) -> None:
        self._inference = value
        if not value:
            self._reminder.say("compression is off", stacklevel=2)

    def set_sample_ids(self, ids: Tensor) -> None:
        """The samples of the next step, one id a row of the whole batch; split along the micro-batches as a pipeline's.

        Args:
            ids: integers, 1-d.

        Raises:
            PolicyError: they are none.
        """
        self._ids = split_ids(ids, self._micro_batches)

    def ledgers(self) -> dict[str, Ledger]:
        """What crossed at each boundary and direction, by name: "0 forward". Both ends are one account."""
        pairs = [pair for point in self._points for pair in (point.forward, point.backward) if pair is not None]
        return {pair.sender.name: pair.sender.ledger.beside(pair.receiver.ledger) for pair in pairs}

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

    def at(self, call: int, training: bool) -> At:
        slot = call % self._micro_batches
        return At(slot, training=training, ids=None if self._ids is None else self._ids[slot])


def insert_points(
    model: nn.Module, after: Sequence[str], *, forward: How = None, backward: How = None,
    per_point: Mapping[int, Mapping[str, How]] | None = None, micro_batches: int = 1, nonfinite: Nonfinite = "pass",
    min_numel: int = 0, sample_every: int = 16,
) -> Points:  # fmt: skip
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
    arguments.kind("insert_points, model", model, nn.Module, expected=expected, do=do)
    if isinstance(after, str) or not isinstance(after, Sequence):
        raise arguments.wrong("insert_points, after", after, "a list of names of modules", f"write [{after!r}]")
    modules, special = dict(model.named_modules()), dict(per_point or {})
    arguments.whole("insert_points, micro_batches", micro_batches)
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
        hows: dict[str, How] = {"forward": forward, "backward": backward, **special.get(number, {})}
        pairs = {way: None if how is None else _Pair(how, f"{number} {way}", common) for way, how in hows.items()}
        points.append(_Point(name, pairs["forward"], pairs["backward"]))
    made = Points(points, micro_batches)
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


class _Pair:
    """Both ends of a link."""

    def __init__(self, how: Operator | Feedback | str, name: str, options: dict[str, Any]) -> None:
        self.sender, self.receiver = (Link(how, name=name, **options) for _ in range(2))

    def cross(self, x: Tensor, at: At) -> Tensor:
        """What the other end gets, and has the strides of x where x is dense."""
        if not self.sender.wants(x):
            self.sender.passed(x)
            self.receiver.passed(x)
            return x.clone()
        return self.receiver.unpack(self.sender.pack(x, at), torch.empty_like(x), at)

    def state_dict(self) -> dict[str, Any]:
        return {"sender": self.sender.state_dict(), "receiver": self.receiver.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sender.load_state_dict(state["sender"])
        self.receiver.load_state_dict(state["receiver"])


class _Point:
    """What is done to the outputs of one module; a forward hook."""

    owner: Points
    handle: RemovableHandle

    def __init__(self, path: str, forward: _Pair | None, backward: _Pair | None) -> None:
        self.path, self.forward, self.backward = path, forward, backward
        self._calls = {True: 0, False: 0}

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self.owner.compresses():
            return None
        training = torch.is_grad_enabled()
        at = self.owner.at(self._calls[training], training)
        self._calls[training] += 1
        if training:
            self._calls[False] = 0
        number = iter(range(1 << 30))
        return _mapped(output, lambda x: self._crossed(x, replace(at, tensor=next(number))))

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

    def _crossed(self, x: Tensor, at: At) -> Tensor:
        if not x.is_floating_point():
            return x
        crossed: Tensor = _Crossing.apply(x, self, at)  # type: ignore[no-untyped-call]
        return crossed


class _Crossing(torch.autograd.Function):
    """Identity, but for what messages lose on the way there and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, point: _Point, at: At) -> Tensor:
        ctx.point, ctx.at = point, at
        if point.forward is None:
            return x.clone()
        made = point.forward.cross(x, at)
        if at.training:
            ctx.at = replace(at, places=point.forward.receiver.places(at))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        pair: _Pair | None = ctx.point.backward
        return gradients[0] if pair is None else pair.cross(gradients[0], ctx.at), None, None


def _mapped(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nest with its tensors changed, in their order; anything else stays what it is."""
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(_mapped(one, change) for one in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(_mapped(one, change) for one in nest)
    if isinstance(nest, dict):
        changed = {key: _mapped(one, change) for key, one in nest.items()}
        return changed if type(nest) is dict else type(nest)(**changed)
    return nest
