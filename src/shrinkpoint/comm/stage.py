"""One stage of a pipeline whose messages are packed and unpacked where torch posts them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.gloo import is_gloo
from shrinkpoint.comm.ledger import Ledger
from shrinkpoint.comm.link import FINITE, At, Link
from shrinkpoint.comm.operators.same import SameIndices
from shrinkpoint.errors import MismatchError, PolicyError

_NEEDED = (
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
    "_prepare_forward_infra",
    "clear_runtime_states",
)
_Slots = Sequence[tuple[int | None, bool]]
"""For each tensor that torch has in mind: the stage at the other end, and whether a message carries it."""
_AFTER_INFERENCE = (
    "_post_metadata_inference_cleanup"  # releases without it leave no graph behind, so that buffers may change at once
)


@dataclass(frozen=True)
class Way:
    """One direction of a boundary as one of its ends has it. No link: everything crosses as it is."""

    name: str
    link: Link | None
    ledger: Ledger

    def packs(self, x: Tensor) -> bool:
        return self.link is not None and self.link.wants(x)

    def passed(self, x: Tensor) -> None:
        """Note a tensor that crosses as it is."""
        self.ledger.count(x.numel() * x.element_size(), x.numel() * x.element_size())


@dataclass(frozen=True)
class Boundary:
    """One boundary as the stage at one of its ends has it; `other` is the index of the stage at the other one."""

    other: int
    forward: Way
    backward: Way


@dataclass(frozen=True)
class _Posted:
    """A message on its way in: where it lands, what it will be unpacked into, and where it stands.

    Attributes:
        work: to be waited for; None: the schedule does.
    """

    wire: Tensor
    out: Tensor
    at: At
    work: dist.Work | None = None


class Rank(Protocol):
    """What a stage asks of the rank that it is on."""

    def begin(self, stage: int) -> None:
        """Called at the start of a step, before its first message."""

    def end(self, stage: int) -> None:
        """Called at the end of a step, after the stage's last message."""

    def compresses(self, training: bool) -> bool:
        """Whether a step compresses."""

    def told_ids(self, stage: int, slot: int) -> Tensor | None:
        """The ids of the samples of a micro-batch where this rank knows them without a message."""

    def refuse(self, error: PolicyError) -> None:
        """Raise an error about values once no other rank waits for a message of this one."""


class WiredStage:
    """A stage of torch.distributed.pipelining, its messages compressed.

    torch builds the list of messages of a micro-batch in four methods and takes what came in two others; this instance
    has them replaced. Schedules do not notice: the shapes, dtypes and gradients that they see are those of before.

    On gloo a receive is posted here, before the sends that 1F1B fuses it with: otherwise what tells the other rank that
    this one is ready goes behind what this one sends, and the two messages of an exchange cross one after the other.
    Messages between two ranks are told apart by their order alone, so that this is done only where each rank has one
    stage and all messages of a list are compressed: then the order of the lists is that of the sends, whatever the
    schedule fuses. Elsewhere torch posts them; its schedules of several stages a rank do so at once in any case.

    Args:
        stage: a `PipelineStage` or what the tracing frontend builds.
        before: the boundary to the stage before; None: it is the first.
        after: the same for the stage after.
    """

    def __init__(self, stage: Any, before: Boundary | None, after: Boundary | None, rank: Rank) -> None:
        self.stage, self.before, self.after, self._rank = stage, before, after, rank
        self.index: int = stage.stage_index
        self._came: dict[tuple[str, int], list[_Posted]] = {}
        self._left: list[Tensor] = []
        ranks = stage.stage_index_to_group_rank
        self._alone = len(set(ranks.values())) == len(ranks)
        self._ids: dict[int, Tensor | None] = {}
        self._buffers: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._replaced: dict[str, Any] = {}
        self._attach()

    @property
    def boundaries(self) -> list[Boundary]:
        return [side for side in (self.before, self.after) if side is not None]

    def sample_ids(self, slot: int) -> Tensor | None:
        """The ids of the samples of a micro-batch; None: nobody said."""
        told = self._rank.told_ids(self.index, slot)
        return self._ids.get(slot) if told is None else told

    def detach(self) -> None:
        """Give the stage its own methods back."""
        for name, own in self._replaced.items():
            if own is None:
                delattr(self.stage, name)
            else:
                setattr(self.stage, name, own)
        self._replaced.clear()

    def _attach(self) -> None:
        replacements: dict[str, Callable[..., Any]] = {
            "get_fwd_send_ops": self._send_forward,
            "get_bwd_send_ops": self._send_backward,
            "get_fwd_recv_ops": self._receive_forward,
            "get_bwd_recv_ops": self._receive_backward,
            "_retrieve_recv_activations": self._take_forward,
            "_retrieve_recv_grads": self._take_backward,
            "_prepare_forward_infra": self._infer,
            _AFTER_INFERENCE: self._inferred,
            "clear_runtime_states": self._start,
            "perform_reduce_grad" if hasattr(self.stage, "perform_reduce_grad") else "scale_grads": self._finish,
        }
        for name, ours in replacements.items():
            torchs = getattr(self.stage, name, None)
            if torchs is not None:
                self._replaced[name] = vars(self.stage).get(name)
                setattr(self.stage, name, functools.partial(ours, torchs))

    # What torch calls. `torchs` is its own method.

    def _start(self, torchs: Callable[[], None]) -> None:
        torchs()
        self._left.clear()
        self._ids.clear()
        self._came.clear()
        for way in (way for side in self.boundaries for way in (side.forward, side.backward)):
            if way.link is not None:
                way.link.forget_expected()
        self._rank.begin(self.index)

    def _finish(self, torchs: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        torchs(*args, **kwargs)
        self._rank.end(self.index)

    def _send_forward(self, torchs: Callable[[int], list[Any]], slot: int) -> list[Any]:
        ops = torchs(slot)
        if self.after is None:
            return ops
        sent = [(to, index) for index, tos in self.stage.act_send_info.items() for to in tos if to is not None]
        for op, (_, index) in zip(ops, sent, strict=True):
            self._check(op.tensor, index, slot)
        return self._send(ops, slot, [(to, True) for to, _ in sent], self.after, backward=False)

    def _send_backward(self, torchs: Callable[[int], list[Any]], slot: int) -> list[Any]:
        grads = self.stage.bwd_cache.get(slot, ())
        ops = torchs(slot)
        if self.before is None or not ops:
            return ops
        slots = [
            (to, to is not None and self._has_gradient(i, grads[i])) for i, to in enumerate(self.stage.grad_send_info)
        ]
        return self._send(ops, slot, slots, self.before, backward=True)

    def _receive_forward(self, torchs: Callable[[int], list[Any]], slot: int) -> list[Any]:
        ops = torchs(slot)
        if self.before is None:
            return ops
        infos = self.stage.args_recv_info[slot]
        slots = [(getattr(info, "source", None), getattr(info, "buffer", None) is not None) for info in infos]
        return self._receive(ops, slot, slots, self.before, backward=False)

    def _receive_backward(self, torchs: Callable[[int], list[Any]], slot: int) -> list[Any]:
        ops = torchs(slot)
        if self.after is None or not ops:
            return ops
        infos, sent = self.stage.grad_recv_info[slot], list(self.stage.act_send_info.values())
        sent = sent if len(sent) == len(infos) else [to for to in sent if to]  # some releases list only what is sent
        slots = [(to[0] if to else None, info.buffer is not None) for to, info in zip(sent, infos, strict=True)]
        return self._receive(ops, slot, slots, self.after, backward=True)

    def _take_forward(self, torchs: Callable[[int], Any], slot: int) -> Any:
        if self.before is not None:
            self._unpack(self.before.forward, slot)
        return torchs(slot)

    def _take_backward(self, torchs: Callable[[int], Any], slot: int) -> Any:
        if self.after is not None:
            self._unpack(self.after.backward, slot)
        return torchs(slot)

    def _infer(self, torchs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._keep_buffers()
        result = torchs(*args, **kwargs)
        if _AFTER_INFERENCE not in self._replaced:
            self._put_buffers_back()
        return result

    def _inferred(self, torchs: Callable[[], None]) -> None:
        torchs()
        self._put_buffers_back()

    # What is done there.

    def _send(self, ops: list[Any], slot: int, slots: _Slots, side: Boundary, *, backward: bool) -> list[Any]:
        way = side.backward if backward else side.forward
        for op, tensor in zip(ops, _tensors(slots, side.other, len(ops)), strict=True):
            if tensor is None:
                continue
            if way.link is None or not self._compresses(way, op.tensor):
                way.passed(op.tensor)
                continue
            op.tensor = way.link.pack(op.tensor, self._at(side, slot, tensor, backward=backward))
            self._left.append(op.tensor)  # a transport may read it until the step ends
            self._checked(way.link.check)
        return ops

    def _receive(self, ops: list[Any], slot: int, slots: _Slots, side: Boundary, *, backward: bool) -> list[Any]:
        way = side.backward if backward else side.forward
        posted = self._came[way.name, slot] = []
        for op, tensor in zip(ops, _tensors(slots, side.other, len(ops)), strict=True):
            if tensor is None:
                continue
            if way.link is None or not self._compresses(way, op.tensor):
                way.passed(op.tensor)
                continue
            out, at = op.tensor.detach(), self._at(side, slot, tensor, backward=backward)
            op.tensor = torch.empty(way.link.expect(out.shape, out.dtype, at), dtype=torch.uint8, device=out.device)
            posted.append(_Posted(op.tensor, out, at))
        if not (self._alone and len(posted) == len(ops) and all(is_gloo(op.group, op.tensor.device) for op in ops)):
            return ops
        works = [dist.irecv(op.tensor, op.peer, op.group, op.tag) for op in ops]
        posted[:] = [replace(one, work=work) for one, work in zip(posted, works, strict=True)]
        return []

    def _unpack(self, way: Way, slot: int) -> None:
        for posted in self._came.pop((way.name, slot), ()):
            assert way.link is not None
            if posted.work is not None:
                posted.work.wait()
            self._checked(functools.partial(way.link.unpack, posted.wire, posted.out, posted.at))
            ids = way.link.ids(posted.at)
            if self._ids.get(slot) is None and ids is not None:
                self._ids[slot] = ids

    def _checked(self, call: Callable[[], Any]) -> None:
        """Values that are refused are no reason to leave others waiting: the step goes on to its end."""
        try:
            call()
        except PolicyError as error:
            if error.expected != FINITE:
                raise
            self._rank.refuse(error)

    def _compresses(self, way: Way, x: Tensor) -> bool:
        return self._rank.compresses(self.stage.has_backward) and way.packs(x)

    def _at(self, side: Boundary, slot: int, tensor: int, *, backward: bool) -> At:
        at = At(slot, tensor, training=self.stage.has_backward, ids=self.sample_ids(slot))
        link = side.backward.link
        if backward and link is not None and isinstance(link.operator, SameIndices) and side.forward.link is not None:
            return replace(at, places=side.forward.link.places(at))
        return at

    def _has_gradient(self, index: int, grad: Tensor | None) -> bool:
        """Whether torch sends a gradient for an input of this stage."""
        meta = getattr(self.stage, "_get_grad_send_meta", None)
        return grad is not None if meta is None else meta(index) is not None

    def _check(self, x: Tensor, index: int, slot: int) -> None:
        """Refuse an output that the next stage has no buffer for: a longer message would end its process.

        Raises:
            MismatchError: it is of another shape or dtype than what torch inferred or was told.
        """
        metas = self.stage._stage_meta.outputs if hasattr(self.stage, "_stage_meta") else self.stage.get_outputs_meta()
        meta = metas[index]
        if (meta.shape, meta.dtype) != (x.shape, x.dtype):
            where = f"stage {self.stage.stage_index}, micro-batch {slot}, output {index}"
            found, expected = (
                f"{tuple(x.shape)} of {x.dtype}",
                f"{tuple(meta.shape)} of {meta.dtype}, for which torch made",
            )
            do = (
                "make all micro-batches alike (drop or pad the last batch), or call Wire.new_shapes() on every rank "
                "before a step whose micro-batches have another shape"
            )
            raise MismatchError(where, found=found, expected=f"{expected} the next stage's buffers", do=do)

    def _keep_buffers(self) -> None:
        """Inference runs the module on memory that holds anything, in training mode: its statistics become that."""
        self._buffers = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for module in self.stage.submod.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _put_buffers_back(self) -> None:
        with torch.no_grad():
            for owner, name, buffer, was in self._buffers:
                owner[name] = buffer.copy_(was)
        self._buffers = []


def refuse_unknown(stage: Any) -> None:
    """Never silently compress nothing.

    Raises:
        PolicyError: the stage lacks a method that would be replaced.
    """
    missing = [name for name in _NEEDED if not callable(getattr(stage, name, None))]
    if missing:
        found = f"{type(stage).__name__} of torch {torch.__version__} has no {', '.join(missing)}"
        raise PolicyError("compress_pipeline", found=found, expected="a stage of torch 2.6 or newer")


def _tensors(slots: _Slots, other: int, count: int) -> list[int | None]:
    """For each message of a list, which of the tensors of the boundary to `other` it is; None: of none of them.

    Args:
        count: how many messages there are.
    """
    tensors: list[int | None] = []
    number = 0
    for stage, moves in slots:
        if moves:
            tensors.append(number if stage == other else None)
        number += stage == other
    if len(tensors) != count:
        found = f"torch {torch.__version__} makes {count} messages of {len(tensors)} tensors"
        raise PolicyError("compress_pipeline", found=found, do="report this; another release of torch may do")
    return tensors
