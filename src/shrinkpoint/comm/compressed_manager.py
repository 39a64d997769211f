"""A torchft Manager whose all-reduce sends compressed messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.comm.compressed_allreduce import all_gather_tensor
from shrinkpoint.comm.link import CompressorLike, LinkStats
from shrinkpoint.comm.round_average import RoundAverage
from shrinkpoint.errors import MembershipError, MismatchError, PolicyError, ShrinkpointError, missing_extra

if TYPE_CHECKING:
    from torchft import Manager

_WHERE = "CompressedManager"


class CompressedManager:
    """Averages in compressed messages over the replicas of a torchft Manager; all else is the manager's own.

    Pass it to torchft where a manager is expected:

        manager = CompressedManager(torchft.Manager(..., use_async_quorum=False), "ef(q2:64)")
        with torchft.local_sgd.DiLoCo(manager, [model], optimizer, outer_optimizer, sync_every=30):
            ...

    All replicas decode the same bytes. Error feedback stays with each replica: it goes back if a step is not
    committed, is sent late if replicas come or go, and is dropped by a replica that recovers from another one.

    Args:
        manager: with a synchronous quorum and a process group of the same process, such as ProcessGroupGloo.
        compressor: for tensors; None for no compression.
        fragments: the number of fragments of a DiLoCo. torchft does not tell a manager which of them it averages, so
            feedback tells them apart by the step.

    Attributes:
        link_stats: statistics of the messages: of "all-gather", or of "first hop" and "second hop".

    Raises:
        PolicyError: an argument is unusable, or the manager is already compressed.
        MembershipError: torchft did not answer, or gave up; from `start_quorum` and `should_commit`.
        MismatchError: from `start_quorum`: this replica cannot recover from one with another compressor.
    """

    def __init__(self, manager: Manager, compressor: CompressorLike = None, *, fragments: int = 1) -> None:
        try:
            import torchft
            from torchft.process_group import ManagedProcessGroup
        except ModuleNotFoundError as error:
            raise missing_extra(error, "elastic") from None
        advice = "make one: torchft.Manager(pg=torchft.ProcessGroupGloo(), use_async_quorum=False, ...)"
        validate.check_instance(f"{_WHERE}, manager", manager, torchft.Manager, expected="a torchft.Manager", do=advice)
        if manager._use_async_quorum:
            found, expected = "an asynchronous quorum", "a synchronous one, as torchft's DiLoCo"
            raise PolicyError(f"{_WHERE}, manager", found=found, expected=expected, do=advice)
        self._process_group: Any = ManagedProcessGroup(manager).parent
        if not hasattr(type(self._process_group), "parent"):  # torchft's Baby groups live in another process
            found, expected = type(self._process_group).__name__, "a process group of this process"
            raise PolicyError(f"{_WHERE}, manager", found=found, expected=expected, do=advice)
        self._fragments = validate.check_int(f"{_WHERE}, fragments", fragments)
        self._manager, self.average = manager, RoundAverage(compressor, "torchft")
        self.link_stats: dict[str, LinkStats] = self.average.link_stats
        self._group: Any = lambda: None  # a weak reference: torchft replaces the group, and has to free it
        self._calls, self._has_recovered = 0, False
        try:
            manager.register_state_dict_fn("shrinkpoint", self._recover, lambda: self.average.feedback.shared_spec)
        except AssertionError:
            do = "make a new torchft.Manager"
            raise PolicyError(f"{_WHERE}, manager", found="a Manager that is compressed already", do=do) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    @property
    def group(self) -> dist.ProcessGroup:
        """torch's process group of the replicas in the present quorum."""
        group: dist.ProcessGroup = self._process_group.parent
        return group

    def start_quorum(self, *arguments: Any, **options: Any) -> None:
        """Wait for the next quorum, and recover if this replica is behind."""
        with _torchft_errors("look at the lighthouse, or make the Manager with a quorum_timeout longer than a round"):
            self._manager.start_quorum(*arguments, **options)
        if self._manager.errored() is None and self._group() is not self.group:
            self.average.change_group(keep=not self._has_recovered)
            self._group = ref(self.group)
        self._calls, self._has_recovered = 0, False
        self.average.begin()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Commit the step if this replica averaged without an error, else take its feedback back."""
        is_committed: bool = False
        try:
            with _torchft_errors("look at the log of torchft, or raise max_retries of the Manager"):
                is_committed = self._manager.should_commit(timeout)
        finally:
            self.average.end(is_committed)
        return is_committed

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = dist.ReduceOp.AVG) -> dist.Work:
        """Average a tensor over the replicas in place, before it returns. An error is left to `should_commit`.

        Raises:
            PolicyError: another reduction than an average, or no floating-point tensor of 16 bits or more.
        """
        from torchft.manager import _ManagedWork
        from torchft.work import _DummyWork

        if reduce_op != dist.ReduceOp.AVG:
            advice = "pass ReduceOp.AVG, or use a Manager without compression"
            raise PolicyError(f"{_WHERE}, allreduce", found=f"{reduce_op}", expected="an average", do=advice)
        if not (tensor.is_floating_point() and tensor.itemsize > 1):
            expected, do = "a floating-point dtype of 16 bits or more", "average a copy in such a dtype"
            raise PolicyError(f"{_WHERE}, allreduce", found=f"{tensor.dtype}", expected=expected, do=do)
        layout = f"{self._manager.current_step() % self._fragments}.{self._calls}"
        self._calls += 1
        if self._manager.errored() is None:
            try:
                if not self._manager.is_participating():
                    tensor.zero_()
                flat = tensor.detach().flatten().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
                tensor.detach().copy_(self.average.average_(flat, self.group, layout).view_as(tensor))
            except Exception as error:
                self._manager.report_error(error)
                if not is_lost(error):
                    raise
        # torchft's DDP takes the future of its own kind of work
        work: dist.Work = _ManagedWork(self._manager, _DummyWork(tensor), tensor)
        return work

    def gather(self, message: Mapping[str, Any], device: torch.device) -> list[Any]:
        """The messages of plain values that all replicas of the quorum call this with, in the order of ranks."""
        group, data = self.group, json.dumps(message).encode()
        sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
        all_gather_tensor(sizes, torch.tensor([len(data)], device=device), group=group)
        longest = int(sizes.max())
        row = F.pad(torch.frombuffer(bytearray(data), dtype=torch.uint8), (0, longest - len(data))).to(device)
        rows = torch.empty(group.size() * longest, dtype=torch.uint8, device=device)
        all_gather_tensor(rows, row, group=group)
        texts = zip(rows.cpu().view(-1, longest), sizes.tolist(), strict=True)
        return [json.loads(text[:size].numpy().tobytes()) for text, size in texts]

    def _recover(self, spec: Any) -> None:
        mine = self.average.feedback.shared_spec
        if spec != mine:
            do = "pass the same compressor on all replicas"
            raise MismatchError(_WHERE, found=f"{mine} here, {spec} on others", expected="the same", do=do)
        self._has_recovered = True


def is_lost(error: BaseException) -> bool:
    """True if an error says that another replica or its connection is gone: torch has no class for all of these."""
    if isinstance(error, dist.DistError | ConnectionError | TimeoutError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(sign in text for sign in ("gloo", "connection", "timed out", "timeout"))


@contextmanager
def _torchft_errors(advice: str) -> Iterator[None]:
    """Raise errors of torchft as ours; errors of functions that it calls for us are ours already."""
    try:
        yield
    except ShrinkpointError:
        raise
    except (RuntimeError, OSError) as error:  # a TimeoutError is an OSError
        found = f"torchft: {type(error).__name__}, {error}"
        raise MembershipError("Manager", found=found, expected="an answer", do=advice) from error
