"""Averages of gradient segments that run beside the backward pass: in threads on gloo, on a stream on a GPU.

`HierarchicalAllReduce` averages in two levels: exactly within a node, in compressed messages between nodes.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.compressed_allreduce import (
    CompressedAllReduce,
    EncodedRow,
    EncodedRows,
    is_gloo,
    other_ranks,
    share_numel,
)
from shrinkpoint.comm.gradient_layout import Segment, SegmentValues
from shrinkpoint.comm.rendezvous import group_timeout
from shrinkpoint.threads import end_thread_with

MAX_IN_FLIGHT = 8
"""Segments between the first and the last stage at a time: what bounds memory, and covers a link's latency."""
_FIRST_TAG = 0x5350_0000  # The first tag of point-to-point messages of a group; each segment has two, one a hop
_next_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The first tag that is free, by group: several models of a group may be in their backward passes at a time."""
AllReduceFor = Callable[[Segment], CompressedAllReduce]  # Gives what averages a segment


class BackgroundAllReduce(ABC):
    """Averages segments in place over the ranks of a group, which submit the same ones in the same order.

    Between `begin` and `wait` nothing but this object may touch the values of a submitted segment.
    """

    @staticmethod
    def create(group: dist.ProcessGroup, device: torch.device, all_reduce_for: AllReduceFor) -> BackgroundAllReduce:
        """The way that suits a group and a device."""
        kind = ThreadedAllReduce if is_gloo(group, device) else StreamAllReduce
        return kind(group, device, all_reduce_for)

    @abstractmethod
    def begin(self, segments: Sequence[Segment]) -> None:
        """Begin a step in which each of these segments will be submitted once, in any order."""

    @abstractmethod
    def submit(self, values: SegmentValues) -> None:
        """Start to average a segment."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all submitted segments are averaged, and raise what went wrong with one of them."""

    def close(self) -> None:
        """End the threads, if there are any, and wait for them; without it they end some time after this object."""
        return


class StreamAllReduce(BackgroundAllReduce):
    """On a GPU everything is enqueued on a stream of its own, in the order of submissions; elsewhere it runs at once.

    The host does not wait, neither in `submit` nor in `wait`, after which the current stream waits.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, all_reduce_for: AllReduceFor) -> None:
        self._group, self._all_reduce_for = group, all_reduce_for
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, segments: Sequence[Segment]) -> None:
        return

    def submit(self, values: SegmentValues) -> None:
        segment = values.segment
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):  # None changes no stream
            flat = torch.empty(segment.numel, dtype=values.dtype, device=segment.device)
            values.copy_to(flat)
            values.copy_from(self._all_reduce_for(segment).average_(flat, self._group, segment.name))

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class _Receives:
    """The messages of one hop of a segment from all other ranks: posted receives and their buffers."""

    def __init__(self, size: int, tag: int, group: dist.ProcessGroup) -> None:
        self.messages, self.tag = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(group.size())], tag
        self._works = [group.recv([self.messages[rank]], rank, tag) for rank in other_ranks(group)]

    def wait(self) -> list[Tensor]:
        """Wait for all messages, and return them by rank; that of this rank itself is not filled."""
        for work in self._works:
            work.wait()
        return self.messages


@dataclass
class _Transfer:
    """A segment on its way through the stages."""

    values: SegmentValues
    all_reduce: CompressedAllReduce
    receives: tuple[_Receives, _Receives]
    rows: EncodedRows
    row: EncodedRow | None = None
    sends: list[dist.Work] = field(default_factory=list)


class ThreadedAllReduce(BackgroundAllReduce):
    """Three stages on gloo, a thread each, so that the first hop of a segment runs beside the second of another one.

    The first stage encodes the rows of a segment and sends them, the second sums the rows that come and sends the
    encoded average, the third decodes the averages of all ranks. Point-to-point messages with a tag for each segment
    and hop cannot be mixed up with collectives of other threads.

    On gloo a message starts when its receiver is ready, and the notice of that takes the way of the data. So the
    receives of `MAX_IN_FLIGHT` segments are posted beforehand, in the order of the last step.

    After an error the object raises it again in every step: messages of other ranks may be under way.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, all_reduce_for: AllReduceFor) -> None:
        self._group, self._all_reduce_for = group, all_reduce_for
        self._stages: list[SimpleQueue[Callable[[], None] | None]] = []
        self._ends: list[Callable[[], object]] = []
        self._segments: dict[int, Segment] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._order: list[int] = []
        self._submitted: list[int] = []
        self._receives: dict[int, tuple[_Receives, _Receives] | None] = {}
        self._receives_lock = threading.Lock()
        self._first_tag = _FIRST_TAG
        self._scratch: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._in_flight = threading.Semaphore(MAX_IN_FLIGHT)
        self._progress, self._num_done = threading.Condition(), 0
        self._error: BaseException | None = None

    def begin(self, segments: Sequence[Segment]) -> None:
        if self._error is not None:
            raise self._error
        self._segments = {segment.index: segment for segment in segments}
        if not self._stages:
            self._first_tag = _next_tags.get(self._group, _FIRST_TAG)
            _next_tags[self._group] = self._first_tag + 2 * (1 + max(self._segments, default=0))
            self._stages = [SimpleQueue() for _ in range(3)]
            for tasks in self._stages:
                # A thread knows its queue alone, so that the end of this object ends it. A peer that died does not keep
                # the process alive.
                thread = threading.Thread(target=_run_tasks, args=(tasks,), name="shrinkpoint gradients", daemon=True)
                thread.start()
                self._ends.append(end_thread_with(self, thread, partial(tasks.put, None)))
        self._order = self._submitted if set(self._submitted) == set(self._segments) else list(self._segments)
        self._submitted, self._num_done, self._receives = [], 0, {}
        for index in self._order[:MAX_IN_FLIGHT]:
            self._post_receives(index)

    def submit(self, values: SegmentValues) -> None:
        index = values.segment.index
        self._submitted.append(index)
        self._dtypes[index] = values.dtype
        self._enqueue(0, lambda: self._send_rows(values))

    def wait(self) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._error is not None or self._num_done == len(self._submitted))
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        for end in self._ends:
            end()

    def _send_rows(self, values: SegmentValues) -> None:
        """The first stage: encode a row for each other rank, and send it."""
        self._in_flight.acquire()
        segment, all_reduce, rank = values.segment, self._all_reduce_for(values.segment), self._group.rank()
        receives = self._post_receives(segment.index)
        assert receives is not None  # the dtype is known, and a segment is submitted once in a step
        scratch = self._scratch_for(0, segment)
        encoded = all_reduce.reduce_scatter.encode(values.read_rows(scratch), rank, segment.name)
        if encoded.own_row.data_ptr() == scratch[rank].data_ptr():
            # The next segment overwrites the scratch before the second stage sums this one.
            encoded = replace(encoded, own_row=encoded.own_row.clone())
        transfer = _Transfer(values, all_reduce, receives, encoded)
        self._send(transfer, encoded.messages, hop=0)
        self._enqueue(1, lambda: self._send_average(transfer))

    def _send_average(self, transfer: _Transfer) -> None:
        """The second stage: sum the rows of all ranks, and send the encoded average to each."""
        segment, world_size = transfer.values.segment, self._group.size()
        messages = transfer.receives[0].wait()
        total = transfer.all_reduce.reduce_scatter.decode(transfer.rows, messages, self._group.rank())
        mean = total.div_(world_size).to(self._dtypes[segment.index])
        transfer.row = transfer.all_reduce.all_gather.encode(mean, self._group.rank(), world_size, segment.name)
        self._send(transfer, [transfer.row.message] * world_size, hop=1)
        self._enqueue(2, lambda: self._fill(transfer))

    def _fill(self, transfer: _Transfer) -> None:
        """The third stage: decode the averages of all ranks into the gradients."""
        segment, row = transfer.values.segment, transfer.row
        assert row is not None
        messages = transfer.receives[1].wait()
        messages[self._group.rank()] = row.message
        scratch = self._scratch_for(1, segment)
        transfer.values.write_rows(scratch, lambda rows: transfer.all_reduce.all_gather.decode(row, messages, rows))
        for work in transfer.sends:
            work.wait()
        self._receives[segment.index] = None
        for index in self._order[self._order.index(segment.index) + MAX_IN_FLIGHT :][:1]:
            self._post_receives(index)
        self._in_flight.release()
        with self._progress:
            self._num_done += 1
            self._progress.notify_all()

    def _send(self, transfer: _Transfer, messages: Sequence[Tensor | None], hop: int) -> None:
        for rank in other_ranks(self._group):
            message = messages[rank]
            assert message is not None
            transfer.sends.append(self._group.send([message], rank, transfer.receives[hop].tag))

    def _post_receives(self, index: int) -> tuple[_Receives, _Receives] | None:
        """Post the receives of both hops, once in a step; None if they were used, or the dtype is not known yet."""
        with self._receives_lock:
            if index not in self._receives and index in self._dtypes:
                segment, dtype = self._segments[index], self._dtypes[index]
                share = share_numel(segment.numel, self._group.size())
                first, second = (
                    _Receives(hop.message_bytes(share, dtype), self._first_tag + 2 * index + number, self._group)
                    for number, hop in enumerate(self._all_reduce_for(segment).hops)
                )
                self._receives[index] = first, second
            return self._receives.get(index)

    def _scratch_for(self, stage: int, segment: Segment) -> Tensor:
        """A tensor of a row for each rank, which a stage uses again for other segments of this size."""
        world_size, dtype = self._group.size(), self._dtypes[segment.index]
        key = (stage, share_numel(segment.numel, world_size), dtype)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(world_size, key[1], dtype=dtype, device="cpu")
        return self._scratch[key]

    def _enqueue(self, stage: int, work: Callable[[], None]) -> None:
        def task() -> None:
            try:
                if self._error is None:
                    with torch.no_grad():
                        work()
            except BaseException as error:
                with self._progress:
                    self._error = self._error or error  # raised by `wait`
                    self._progress.notify_all()
                self._in_flight.release()  # the first stage may wait for a segment that is never done

        self._stages[stage].put(task)


def _run_tasks(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task


class NodeGroups:
    """The ranks of this node, and those of other nodes that have the same place there, as groups of their own.

    Ranks of a node follow each other in the group. The node has a group for each direction, in which threads of
    their own make collectives. All ranks of the group create them alike.
    """

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int) -> None:
        members = dist.get_process_group_ranks(group)
        first, place = group.rank() - group.rank() % ranks_per_node, group.rank() % ranks_per_node
        node_members = members[first : first + ranks_per_node]
        timeout, backend = timedelta(seconds=group_timeout(group)), dist.get_backend_config(group)
        # a group that its members alone create
        new_group = partial(dist.new_group, timeout=timeout, backend=backend, use_local_synchronization=True)
        self.reduce: dist.ProcessGroup = new_group(node_members)
        self.gather: dist.ProcessGroup = new_group(node_members)
        self.across: dist.ProcessGroup = new_group(members[place::ranks_per_node])


class _NodeShare(SegmentValues):
    """This rank's share of the average of its node: reading and writing it are collectives within the node."""

    def __init__(
        self, values: SegmentValues, segment: Segment, all_reduce: CompressedAllReduce, groups: NodeGroups
    ) -> None:
        self.segment, self._values, self._all_reduce, self._groups = segment, values, all_reduce, groups

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self._values.dtype, torch.float32)

    def copy_to(self, flat: Tensor) -> None:
        rows = self._new_rows(flat)
        self._values.copy_to(rows.view(-1))
        total = self._all_reduce.reduce_scatter(rows, self._groups.reduce, self.segment.name)
        flat[: self.segment.numel] = total.div_(len(rows))
        flat[self.segment.numel :] = 0

    def copy_from(self, flat: Tensor) -> None:
        rows = self._new_rows(flat)
        share = flat[: self.segment.numel].to(rows.dtype)
        self._all_reduce.all_gather(share, rows, self._groups.gather, self.segment.name)
        self._values.copy_from(rows.view(-1))

    def _new_rows(self, flat: Tensor) -> Tensor:
        shape = self._groups.reduce.size(), self.segment.numel
        return torch.empty(shape, dtype=self._values.dtype, device=flat.device)


class HierarchicalAllReduce(BackgroundAllReduce):
    """Averages segments within a node first, of which each rank then averages a share with the other nodes.

    A rank sends to other nodes the messages of its share alone, and all shares of a node together are one model's.

    Args:
        node_all_reduce: within the node; exact, so that all ranks of it get the same bits.
        all_reduce_for: between nodes.
    """

    def __init__(
        self,
        groups: NodeGroups,
        device: torch.device,
        node_all_reduce: CompressedAllReduce,
        all_reduce_for: AllReduceFor,
    ) -> None:
        self._groups, self._node_all_reduce = groups, node_all_reduce
        self._across = BackgroundAllReduce.create(groups.across, device, all_reduce_for)

    def begin(self, segments: Sequence[Segment]) -> None:
        self._across.begin([self._share(segment) for segment in segments])

    def submit(self, values: SegmentValues) -> None:
        self._across.submit(_NodeShare(values, self._share(values.segment), self._node_all_reduce, self._groups))

    def wait(self) -> None:
        self._across.wait()

    def close(self) -> None:
        self._across.close()

    def _share(self, segment: Segment) -> Segment:
        return replace(segment, numel=share_numel(segment.numel, self._groups.reduce.size()))
