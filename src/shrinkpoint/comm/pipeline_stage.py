"""A pipeline stage whose messages are packed and unpacked where torch posts them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressed_allreduce import is_gloo
from shrinkpoint.comm.compressors.sparse import SameIndices
from shrinkpoint.comm.link import FINITE_VALUES, Link, LinkStats, MessageContext
from shrinkpoint.errors import MismatchError, PolicyError

if TYPE_CHECKING:
    from shrinkpoint.comm.pipeline import CompressedPipeline

_REPLACEMENTS = {
    "get_fwd_recv_ops": ("_receive", "forward"),
    "get_fwd_send_ops": ("_send_forward",),
    "get_bwd_recv_ops": ("_receive", "backward"),
    "get_bwd_send_ops": ("_send_backward",),
    "_retrieve_recv_activations": ("_consume", "forward"),
    "_retrieve_recv_grads": ("_consume", "backward"),
    "_prepare_forward_infra": ("_infer_shapes",),
    "clear_runtime_states": ("_start",),
}
"""Methods of torch's stages, and those of `CompressedStage` that replace them, with their first arguments."""
_INFERENCE_CLEANUP = "_post_metadata_inference_cleanup"
"""A method that frees the graph of shape inference; releases of torch without it leave none."""
_FIRST_TAG = 0x2000_0000  # Tags of messages between stages have this bit; those that torch gives its own messages are 0
_Transfers = Sequence[tuple[int | None, bool]]
"""For each tensor that torch lists: the stage at the other end, and whether it is sent in a message."""


@dataclass(frozen=True)
class Direction:
    """One direction of a boundary, at one of its ends. Without a link everything is sent uncompressed."""

    name: str
    neighbour: int  # the index of the stage at the other end
    link: Link | None
    stats: LinkStats
    forward: Link | None = None  # of a direction of gradients, the link of the activations at the same boundary


Boundary = tuple[Direction, Direction]  # The forward and the backward direction of a boundary, at one of its ends


@dataclass(frozen=True)
class _PendingReceive:
    """A message that is being received into `wire`, and will be unpacked into `out`; `work` is None if torch waits."""

    wire: Tensor
    out: Tensor
    context: MessageContext
    work: dist.Work | None = None


class CompressedStage:
    """Compresses the messages of a stage of torch.distributed.pipelining.

    torch builds the list of messages of a micro-batch in four methods and reads received tensors in two others, which
    this class replaces on the instance. Schedules see the same shapes, dtypes and gradients as without compression.

    On gloo the receives of all micro-batches are posted here with the first one of a step. A sender waits for the
    notice that a receive is posted, which would otherwise be queued behind this rank's sends, so that the two messages
    of an exchange would cross one after the other, and would take a link's latency once more. Each message has a tag of
    its own, since order alone would not tell which of several stages' messages comes. Where the size of a message
    depends on what comes before it (AQ-SGD, `SameIndices`), one receive at a time is posted. Lists in which some
    messages are not compressed are left to torch.

    Args:
        stage: a `PipelineStage`, or a stage built by the tracing frontend.
        previous: the boundary to the previous stage; None for the first stage.
        next: the boundary to the next stage; None for the last stage.
        pipeline: the handle of all stages of this rank.
    """

    def __init__(
        self, stage: Any, previous: Boundary | None, next: Boundary | None, pipeline: CompressedPipeline
    ) -> None:
        self.stage, self._pipeline = stage, pipeline
        self.directions = [*(previous or ()), *(next or ())]
        none: tuple[Direction | None, Direction | None] = None, None
        inputs, self._input_grads = previous or none
        self._outputs, output_grads = next or none
        self._incoming = {"forward": inputs, "backward": output_grads}
        self.index: int = stage.stage_index
        self._pending_receives: dict[tuple[str, int], list[_PendingReceive]] = {}
        self._posted: set[tuple[str, int]] = set()  # directions and micro-batches of this step
        self._sent_buffers: list[Tensor] = []
        self._received_ids: dict[int, Tensor | None] = {}
        self._module_buffers: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._original_methods: dict[str, Any] = {}
        last = "perform_reduce_grad" if hasattr(stage, "perform_reduce_grad") else "scale_grads"
        optional = {_INFERENCE_CLEANUP: ("_clean_up_inference",), last: ("_finish",)}
        for name, (replacement, *arguments) in {**_REPLACEMENTS, **optional}.items():
            original = getattr(stage, name, None)
            if original is not None:
                self._original_methods[name] = vars(stage).get(name)
                setattr(stage, name, functools.partial(getattr(self, replacement), *arguments, original))

    def sample_ids(self, slot: int) -> Tensor | None:
        """The sample ids of a micro-batch; None if they are unknown."""
        ids = self._pipeline.sample_ids_for(self.index, slot)
        return self._received_ids.get(slot) if ids is None else ids

    def detach(self) -> None:
        """Restore the stage's own methods."""
        for name, method in self._original_methods.items():
            if method is None:
                delattr(self.stage, name)
            else:
                setattr(self.stage, name, method)
        self._original_methods.clear()

    # Replacements of methods of torch, which are passed as `original`.

    def _start(self, original: Callable[[], None]) -> None:
        original()
        self._sent_buffers.clear()
        self._received_ids.clear()
        self._pending_receives.clear()
        self._posted.clear()
        for direction in self.directions:
            if direction.link is not None:
                direction.link.forget_expected()
        self._pipeline.begin_step(self.index)

    def _finish(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._pipeline.end_step(self.index)

    def _send_forward(self, original: Callable[[int], list[Any]], slot: int) -> list[Any]:
        ops = original(slot)
        if self._outputs is None:
            return ops
        infos = self.stage.act_send_info.items()
        targets = [(target, index) for index, stages in infos for target in stages if target is not None]
        for op, (_, index) in zip(ops, targets, strict=True):
            self._check_output(op.tensor, index, slot)
        return self._send(ops, slot, [(target, True) for target, _ in targets], self._outputs)

    def _send_backward(self, original: Callable[[int], list[Any]], slot: int) -> list[Any]:
        grads = self.stage.bwd_cache.get(slot, ())
        ops = original(slot)
        if self._input_grads is None or not ops:
            return ops
        meta = getattr(self.stage, "_get_grad_send_meta", None)  # newer releases of torch have it
        transfers = [
            (target, target is not None and (grads[index] if meta is None else meta(index)) is not None)
            for index, target in enumerate(self.stage.grad_send_info)
        ]
        return self._send(ops, slot, transfers, self._input_grads)

    def _transfers(self, way: str, slot: int) -> _Transfers:
        if way == "forward":
            infos = self.stage.args_recv_info[slot]
            return [(getattr(info, "source", None), getattr(info, "buffer", None) is not None) for info in infos]
        infos, targets = self.stage.grad_recv_info[slot], list(self.stage.act_send_info.values())
        if len(targets) != len(infos):  # some releases list only what is sent
            targets = [target for target in targets if target]
        pairs = zip(targets, infos, strict=True)
        return [(target[0] if target else None, info.buffer is not None) for target, info in pairs]

    def _consume(self, way: str, original: Callable[[int], Any], slot: int) -> Any:
        if (direction := self._incoming[way]) is not None:
            self._unpack(direction, slot)
        return original(slot)

    def _infer_shapes(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Shape inference runs the module in training mode on uninitialised memory
        self._module_buffers = [
            (module._buffers, name, buffer, buffer.detach().clone())
            for module in self.stage.submod.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        result = original(*args, **kwargs)
        if _INFERENCE_CLEANUP not in self._original_methods:
            self._restore_buffers()
        return result

    def _clean_up_inference(self, original: Callable[[], None]) -> None:
        original()
        self._restore_buffers()

    def _send(self, ops: list[Any], slot: int, transfers: _Transfers, direction: Direction) -> list[Any]:
        for op, link, context in self._compressed_ops(ops, slot, transfers, direction):
            op.tensor = link.pack(op.tensor, context)
            op.tag = _message_tag(self.index, direction.neighbour, slot, context.tensor)
            self._sent_buffers.append(op.tensor)  # a transport may read it until the step ends
            self._defer_nonfinite(link.check)
        return ops

    def _receive(self, way: str, original: Callable[[int], list[Any]], slot: int) -> list[Any]:
        """Receive a micro-batch, and on gloo with it all of the step; returns the messages that torch has to post."""
        direction = self._incoming[way]
        if direction is None:
            return original(slot)
        if (direction.name, slot) in self._posted:
            return []
        ops = original(slot)
        if not ops:  # an evaluation has no gradients
            return ops
        transfers = self._transfers(way, slot)
        is_own = self._is_posted_here(ops, transfers, direction)
        self._expect(ops, slot, transfers, direction)
        if not is_own:
            return ops
        self._post(ops, direction, slot)
        slots: Iterable[int] = self.stage.args_recv_info if way == "forward" else self.stage.grad_recv_info
        for other in slots if direction.link is not None and direction.link.is_size_fixed else ():
            if (direction.name, other) not in self._posted:
                ops = original(other)
                self._expect(ops, other, self._transfers(way, other), direction)
                self._post(ops, direction, other)
        return []

    def _is_posted_here(self, ops: list[Any], transfers: _Transfers, direction: Direction) -> bool:
        """True if gloo carries all messages of a list, and all are compressed ones of one boundary."""
        link = direction.link
        if link is None or not self._pipeline.compresses(self.stage.has_backward):
            return False
        numbers = _tensor_numbers(transfers, direction.neighbour, len(ops))
        return None not in numbers and all(
            link.is_compressible(op.tensor) and is_gloo(op.group, op.tensor.device) for op in ops
        )

    def _expect(self, ops: list[Any], slot: int, transfers: _Transfers, direction: Direction) -> None:
        """Replace the tensors of a list by buffers for their messages."""
        pending = self._pending_receives[direction.name, slot] = []
        for op, link, context in self._compressed_ops(ops, slot, transfers, direction):
            out = op.tensor.detach()
            op.tensor = torch.empty(link.expect(out.shape, out.dtype, context), dtype=torch.uint8, device=out.device)
            op.tag = _message_tag(direction.neighbour, self.index, slot, context.tensor)
            pending.append(_PendingReceive(op.tensor, out, context))

    def _post(self, ops: list[Any], direction: Direction, slot: int) -> None:
        pending = self._pending_receives[direction.name, slot]
        works = [dist.irecv(op.tensor, op.peer, op.group, op.tag) for op in ops]
        pending[:] = [replace(receive, work=work) for receive, work in zip(pending, works, strict=True)]
        self._posted.add((direction.name, slot))

    def _compressed_ops(
        self, ops: list[Any], slot: int, transfers: _Transfers, direction: Direction
    ) -> Iterator[tuple[Any, Link, MessageContext]]:
        """Yield the messages over a boundary that are compressed; count others unless compression is off."""
        link, is_compressed = direction.link, self._pipeline.compresses(self.stage.has_backward)
        for op, number in zip(ops, _tensor_numbers(transfers, direction.neighbour, len(ops)), strict=True):
            if number is None or not is_compressed:
                continue
            if link is not None and link.is_compressible(op.tensor):
                context = MessageContext(slot, number, training=self.stage.has_backward, ids=self.sample_ids(slot))
                if direction.forward is not None and isinstance(link.compressor, SameIndices):
                    context = replace(context, indices=direction.forward.indices(context))
                yield op, link, context
            else:
                direction.stats.add_uncompressed(op.tensor)

    def _unpack(self, direction: Direction, slot: int) -> None:
        for receive in self._pending_receives.pop((direction.name, slot), ()):
            assert direction.link is not None
            if receive.work is not None:
                receive.work.wait()
            self._defer_nonfinite(functools.partial(direction.link.unpack, receive.wire, receive.out, receive.context))
            ids = direction.link.ids(receive.context)
            if self._received_ids.get(slot) is None and ids is not None:
                self._received_ids[slot] = ids

    def _defer_nonfinite(self, call: Callable[[], Any]) -> None:
        """Call a function; defer errors about values that are not finite, so that other ranks do not wait in vain."""
        try:
            call()
        except PolicyError as error:
            if error.expected != FINITE_VALUES:
                raise
            self._pipeline.deferred_errors.append(error)

    def _check_output(self, tensor: Tensor, index: int, slot: int) -> None:
        """Check that the next stage has a buffer for an output: a longer message would end its process."""
        metas = self.stage._stage_meta.outputs if hasattr(self.stage, "_stage_meta") else self.stage.get_outputs_meta()
        meta = metas[index]
        if (meta.shape, meta.dtype) != (tensor.shape, tensor.dtype):
            where = f"stage {self.stage.stage_index}, micro-batch {slot}, output {index}"
            problem = f"{tuple(tensor.shape)} of {tensor.dtype}"
            expected = f"{tuple(meta.shape)} of {meta.dtype}, for which torch made the next stage's buffers"
            advice = (
                "give all micro-batches one shape (drop or pad the last batch), or call reset_shapes() on every rank "
                "before a step whose micro-batches have another shape"
            )
            raise MismatchError(where, found=problem, expected=expected, do=advice)

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for owner, name, buffer, saved in self._module_buffers:
                owner[name] = buffer.copy_(saved)
        self._module_buffers = []


def check_stage_api(stage: Any) -> None:
    """Raise a PolicyError if a stage lacks a method to replace, so that compression is never silently left out."""
    missing = [name for name in _REPLACEMENTS if not callable(getattr(stage, name, None))]
    if missing:
        problem = f"{type(stage).__name__} of torch {torch.__version__} has no {', '.join(missing)}"
        do = "install a newer torch, or report this"
        raise PolicyError("compress_pipeline", found=problem, expected="a stage of torch 2.6 or newer", do=do)


def _message_tag(sender: int, receiver: int, slot: int, tensor: int) -> int:
    """The tag of a message between neighbouring stages: different for 1024 stages, 4096 slots and 64 tensors."""
    is_backward = sender > receiver
    boundary = min(sender, receiver)
    return _FIRST_TAG | (boundary % 1024) << 19 | is_backward << 18 | (slot % 4096) << 6 | tensor % 64


def _tensor_numbers(transfers: _Transfers, neighbour: int, count: int) -> list[int | None]:
    """For each message of a list, the index of its tensor among those of the boundary to `neighbour`, or None."""
    tensors: list[int | None] = []
    number = 0
    for stage, is_sent in transfers:
        if is_sent:
            tensors.append(number if stage == neighbour else None)
        number += stage == neighbour
    if len(tensors) != count:
        problem = f"torch {torch.__version__} makes {count} messages of {len(tensors)} tensors"
        raise PolicyError("compress_pipeline", found=problem, do="report this; another release of torch may do")
    return tensors
