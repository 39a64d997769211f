"""One stage of a pipeline whose messages are packed and unpacked where torch posts them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressors.sparse import SameIndices
from shrinkpoint.comm.gloo import is_gloo
from shrinkpoint.comm.link import FINITE_VALUES, Link, MessageContext
from shrinkpoint.comm.stats import LinkStats
from shrinkpoint.errors import MismatchError, PolicyError

_REQUIRED_METHODS = (
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
    "_prepare_forward_infra",
    "clear_runtime_states",
)
_Transfers = Sequence[tuple[int | None, bool]]
"""For each tensor that torch has in mind: the stage at the other end, and whether a message carries it."""
_INFERENCE_CLEANUP = (
    "_post_metadata_inference_cleanup"  # releases without it leave no graph behind, so that buffers may change at once
)


@dataclass(frozen=True)
class Direction:
    """One direction of a boundary as one of its ends has it. No link: everything crosses as it is."""

    name: str
    link: Link | None
    stats: LinkStats

    def is_compressible(self, x: Tensor) -> bool:
        return self.link is not None and self.link.is_compressible(x)

    def count_uncompressed(self, x: Tensor) -> None:
        """Note a tensor that crosses as it is."""
        self.stats.add_message(x.numel() * x.element_size(), x.numel() * x.element_size())


@dataclass(frozen=True)
class Boundary:
    """One boundary as the stage at one of its ends has it; `neighbour` is the index of the stage at the other one."""

    neighbour: int
    forward: Direction
    backward: Direction


@dataclass(frozen=True)
class _PendingReceive:
    """A message on its way in: where it lands, what it will be unpacked into, and where it stands.

    Attributes:
        work: to be waited for; None: the schedule does.
    """

    wire: Tensor
    out: Tensor
    context: MessageContext
    work: dist.Work | None = None


class StageHost(Protocol):
    """What a stage asks of the rank that it is on."""

    def begin_step(self, stage: int) -> None:
        """Called at the start of a step, before its first message."""

    def end_step(self, stage: int) -> None:
        """Called at the end of a step, after the stage's last message."""

    def compresses(self, training: bool) -> bool:
        """Whether a step compresses."""

    def sample_ids_for(self, stage: int, slot: int) -> Tensor | None:
        """The ids of the samples of a micro-batch where this rank knows them without a message."""

    def defer_error(self, error: PolicyError) -> None:
        """Raise an error about values once no other rank waits for a message of this one."""


class CompressedStage:
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
        previous_boundary: the boundary to the stage before; None: it is the first.
        next_boundary: the same for the stage after.
    """

    def __init__(
        self, stage: Any, previous_boundary: Boundary | None, next_boundary: Boundary | None, host: StageHost
    ) -> None:
        self.stage, self.previous_boundary, self.next_boundary, self._host = (
            stage,
            previous_boundary,
            next_boundary,
            host,
        )
        self.index: int = stage.stage_index
        self._pending_receives: dict[tuple[str, int], list[_PendingReceive]] = {}
        self._sent_buffers: list[Tensor] = []
        ranks = stage.stage_index_to_group_rank
        self._is_one_stage_per_rank = len(set(ranks.values())) == len(ranks)
        self._received_ids: dict[int, Tensor | None] = {}
        self._module_buffers: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._original_methods: dict[str, Any] = {}
        self._attach()

    @property
    def boundaries(self) -> list[Boundary]:
        return [side for side in (self.previous_boundary, self.next_boundary) if side is not None]

    def sample_ids(self, slot: int) -> Tensor | None:
        """The ids of the samples of a micro-batch; None: nobody said."""
        told = self._host.sample_ids_for(self.index, slot)
        return self._received_ids.get(slot) if told is None else told

    def detach(self) -> None:
        """Give the stage its own methods back."""
        for name, own in self._original_methods.items():
            if own is None:
                delattr(self.stage, name)
            else:
                setattr(self.stage, name, own)
        self._original_methods.clear()

    def _attach(self) -> None:
        replacements: dict[str, Callable[..., Any]] = {
            "get_fwd_send_ops": self._send_forward,
            "get_bwd_send_ops": self._send_backward,
            "get_fwd_recv_ops": self._receive_forward,
            "get_bwd_recv_ops": self._receive_backward,
            "_retrieve_recv_activations": self._consume_forward,
            "_retrieve_recv_grads": self._consume_backward,
            "_prepare_forward_infra": self._infer_shapes,
            _INFERENCE_CLEANUP: self._clean_up_inference,
            "clear_runtime_states": self._start,
            "perform_reduce_grad" if hasattr(self.stage, "perform_reduce_grad") else "scale_grads": self._finish,
        }
        for name, ours in replacements.items():
            torchs = getattr(self.stage, name, None)
            if torchs is not None:
                self._original_methods[name] = vars(self.stage).get(name)
                setattr(self.stage, name, functools.partial(ours, torchs))

    # What torch calls. `torchs` is its own method.

    def _start(self, original: Callable[[], None]) -> None:
        original()
        self._sent_buffers.clear()
        self._received_ids.clear()
        self._pending_receives.clear()
        for way in (way for side in self.boundaries for way in (side.forward, side.backward)):
            if way.link is not None:
                way.link.forget_expected()
        self._host.begin_step(self.index)

    def _finish(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._host.end_step(self.index)

    def _send_forward(self, original: Callable[[int], list[Any]], slot: int) -> list[Any]:
        ops = original(slot)
        if self.next_boundary is None:
            return ops
        sent = [(to, index) for index, tos in self.stage.act_send_info.items() for to in tos if to is not None]
        for op, (_, index) in zip(ops, sent, strict=True):
            self._check_output(op.tensor, index, slot)
        return self._send(ops, slot, [(to, True) for to, _ in sent], self.next_boundary, backward=False)

    def _send_backward(self, original: Callable[[int], list[Any]], slot: int) -> list[Any]:
        grads = self.stage.bwd_cache.get(slot, ())
        ops = original(slot)
        if self.previous_boundary is None or not ops:
            return ops
        slots = [
            (to, to is not None and self._has_gradient(i, grads[i])) for i, to in enumerate(self.stage.grad_send_info)
        ]
        return self._send(ops, slot, slots, self.previous_boundary, backward=True)

    def _receive_forward(self, original: Callable[[int], list[Any]], slot: int) -> list[Any]:
        ops = original(slot)
        if self.previous_boundary is None:
            return ops
        infos = self.stage.args_recv_info[slot]
        slots = [(getattr(info, "source", None), getattr(info, "buffer", None) is not None) for info in infos]
        return self._receive(ops, slot, slots, self.previous_boundary, backward=False)

    def _receive_backward(self, original: Callable[[int], list[Any]], slot: int) -> list[Any]:
        ops = original(slot)
        if self.next_boundary is None or not ops:
            return ops
        infos, sent = self.stage.grad_recv_info[slot], list(self.stage.act_send_info.values())
        sent = sent if len(sent) == len(infos) else [to for to in sent if to]  # some releases list only what is sent
        slots = [(to[0] if to else None, info.buffer is not None) for to, info in zip(sent, infos, strict=True)]
        return self._receive(ops, slot, slots, self.next_boundary, backward=True)

    def _consume_forward(self, original: Callable[[int], Any], slot: int) -> Any:
        if self.previous_boundary is not None:
            self._unpack(self.previous_boundary.forward, slot)
        return original(slot)

    def _consume_backward(self, original: Callable[[int], Any], slot: int) -> Any:
        if self.next_boundary is not None:
            self._unpack(self.next_boundary.backward, slot)
        return original(slot)

    def _infer_shapes(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._save_buffers()
        result = original(*args, **kwargs)
        if _INFERENCE_CLEANUP not in self._original_methods:
            self._restore_buffers()
        return result

    def _clean_up_inference(self, original: Callable[[], None]) -> None:
        original()
        self._restore_buffers()

    # What is done there.

    def _send(
        self, ops: list[Any], slot: int, transfers: _Transfers, boundary: Boundary, *, backward: bool
    ) -> list[Any]:
        way = boundary.backward if backward else boundary.forward
        for op, tensor in zip(ops, _tensor_numbers(transfers, boundary.neighbour, len(ops)), strict=True):
            if tensor is None:
                continue
            if way.link is None or not self._is_compressed(way, op.tensor):
                way.count_uncompressed(op.tensor)
                continue
            op.tensor = way.link.pack(op.tensor, self._message_context(boundary, slot, tensor, backward=backward))
            self._sent_buffers.append(op.tensor)  # a transport may read it until the step ends
            self._defer_nonfinite(way.link.check)
        return ops

    def _receive(
        self, ops: list[Any], slot: int, transfers: _Transfers, boundary: Boundary, *, backward: bool
    ) -> list[Any]:
        way = boundary.backward if backward else boundary.forward
        posted = self._pending_receives[way.name, slot] = []
        for op, tensor in zip(ops, _tensor_numbers(transfers, boundary.neighbour, len(ops)), strict=True):
            if tensor is None:
                continue
            if way.link is None or not self._is_compressed(way, op.tensor):
                way.count_uncompressed(op.tensor)
                continue
            out, at = op.tensor.detach(), self._message_context(boundary, slot, tensor, backward=backward)
            op.tensor = torch.empty(way.link.expect(out.shape, out.dtype, at), dtype=torch.uint8, device=out.device)
            posted.append(_PendingReceive(op.tensor, out, at))
        if not (
            self._is_one_stage_per_rank
            and len(posted) == len(ops)
            and all(is_gloo(op.group, op.tensor.device) for op in ops)
        ):
            return ops
        works = [dist.irecv(op.tensor, op.peer, op.group, op.tag) for op in ops]
        posted[:] = [replace(one, work=work) for one, work in zip(posted, works, strict=True)]
        return []

    def _unpack(self, direction: Direction, slot: int) -> None:
        for posted in self._pending_receives.pop((direction.name, slot), ()):
            assert direction.link is not None
            if posted.work is not None:
                posted.work.wait()
            self._defer_nonfinite(functools.partial(direction.link.unpack, posted.wire, posted.out, posted.context))
            ids = direction.link.ids(posted.context)
            if self._received_ids.get(slot) is None and ids is not None:
                self._received_ids[slot] = ids

    def _defer_nonfinite(self, call: Callable[[], Any]) -> None:
        """Values that are refused are no reason to leave others waiting: the step goes on to its end."""
        try:
            call()
        except PolicyError as error:
            if error.expected != FINITE_VALUES:
                raise
            self._host.defer_error(error)

    def _is_compressed(self, direction: Direction, x: Tensor) -> bool:
        return self._host.compresses(self.stage.has_backward) and direction.is_compressible(x)

    def _message_context(self, boundary: Boundary, slot: int, tensor: int, *, backward: bool) -> MessageContext:
        at = MessageContext(slot, tensor, training=self.stage.has_backward, ids=self.sample_ids(slot))
        link = boundary.backward.link
        if (
            backward
            and link is not None
            and isinstance(link.compressor, SameIndices)
            and boundary.forward.link is not None
        ):
            return replace(at, indices=boundary.forward.link.indices(at))
        return at

    def _has_gradient(self, index: int, grad: Tensor | None) -> bool:
        """Whether torch sends a gradient for an input of this stage."""
        meta = getattr(self.stage, "_get_grad_send_meta", None)
        return grad is not None if meta is None else meta(index) is not None

    def _check_output(self, x: Tensor, index: int, slot: int) -> None:
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

    def _save_buffers(self) -> None:
        """Inference runs the module on memory that holds anything, in training mode: its statistics become that."""
        self._module_buffers = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for module in self.stage.submod.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for owner, name, buffer, was in self._module_buffers:
                owner[name] = buffer.copy_(was)
        self._module_buffers = []


def check_stage_api(stage: Any) -> None:
    """Never silently compress nothing.

    Raises:
        PolicyError: the stage lacks a method that would be replaced.
    """
    missing = [name for name in _REQUIRED_METHODS if not callable(getattr(stage, name, None))]
    if missing:
        found = f"{type(stage).__name__} of torch {torch.__version__} has no {', '.join(missing)}"
        raise PolicyError("compress_pipeline", found=found, expected="a stage of torch 2.6 or newer")


def _tensor_numbers(transfers: _Transfers, neighbour: int, count: int) -> list[int | None]:
    """For each message of a list, which of the tensors of the boundary to `neighbour` it is; None: of none of them.

    Args:
        count: how many messages there are.
    """
    tensors: list[int | None] = []
    number = 0
    for stage, moves in transfers:
        if moves:
            tensors.append(number if stage == neighbour else None)
        number += stage == neighbour
    if len(tensors) != count:
        found = f"torch {torch.__version__} makes {count} messages of {len(tensors)} tensors"
        raise PolicyError("compress_pipeline", found=found, do="report this; another release of torch may do")
    return tensors
