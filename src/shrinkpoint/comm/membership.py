"""The processes that train together: who is in the group, who died, and who wants to join."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from shrinkpoint import validate
from shrinkpoint.comm.heartbeat import Heartbeat
from shrinkpoint.errors import CorruptError, MembershipError, PolicyError, StorageError

_POLL_SECONDS = 0.02
_STORE_ADVICE = "host the store in a process that outlives the training, and start anew with another store"


class LostMemberError(MembershipError):
    """A member of the group died, or the others form the next group; this process has to form it, too."""


class Membership:
    """Forms a process group of the processes that are alive, and the next one when some of them died or others came.

    Each group is a generation, with a number. The members of a generation are decided once, by one atomic write to the
    store, so there are never two groups. A process that is not among them though it was a member before, since it was
    too slow, gets an error. It may come back as a new one, with another `Membership`.

        store = torch.distributed.TCPStore(host, port, is_master=False)  # of a process that trains nothing
        membership = Membership(store, size=4, min_size=2)
        local = LocalSteps(model, optimizer, every=30, membership=membership)

    Args:
        store: of a process that outlives the training: if it dies, all end with an error. A `SharedFileStore` on a
            shared file system, with a new file for each training, needs no such process.
        size: the number of processes that the first group waits for.
        min_size: the smallest number of processes that go on when others have died.
        name: of this process, for errors. New members have the order of their names, shorter ones first; without
            names that in which they came.
        backend: of the group, which is torch's default group.
        timeout: seconds that others wait for this process while it is alive, before they leave it out; and for a
            message.
        patience: seconds without a sign of life after which a process counts as dead.

    Attributes:
        generation: the number of the group, from 1; 0 before there is one.
        members: their names, in the order of ranks.

    Raises:
        PolicyError: an argument is unusable.
        MembershipError: the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        size: int,
        *,
        min_size: int = 1,
        name: str = "",
        backend: str = "gloo",
        timeout: float = 600.0,
        patience: float = 30.0,
    ) -> None:
        _check_store(store)
        self._size = validate.check_int("Membership, size", size, do="say how many processes there are")
        self._min_size = validate.check_int("Membership, min_size", min_size, maximum=size)
        self._name, self._backend = validate.check_str("Membership, name", name), backend
        self.timeout = validate.check_float("Membership, timeout", timeout)
        self._patience = validate.check_float("Membership, patience", patience)
        self._id = f"{self._name}/{uuid.uuid4().hex[:12]}"
        self.generation, self._ids, self._has_left = 0, list[str](), False
        self._store = PrefixStore("shrinkpoint/membership", store)
        clone: Callable[[], Store] = getattr(self._store, "clone", lambda: self._store)
        with _store_errors():
            self._heartbeat = Heartbeat(clone(), self._id, self._patience)

    @property
    def members(self) -> list[str]:
        return [_name(member) for member in self._ids]

    def form(self) -> dist.ProcessGroup:
        """Leave the group of before, if there was one, and return the next: torch's default group.

        It waits for all members of the group before that are alive. A new process waits until members form a group: in
        local steps at the end of a round.

        Raises:
            MembershipError: this process was left out; too few processes came in time; or the store does not answer.
            PolicyError: there is a default group of somebody else.
        """
        self._check_not_left()
        if dist.is_initialized():
            if not self.generation:
                advice = "leave out init_process_group: Membership makes the default group"
                raise PolicyError("Membership", found="a default process group", expected="none", do=advice)
            dist.destroy_process_group()
        try:
            with _store_errors():
                while not self._try_generation():
                    pass
        except BaseException:
            with suppress(MembershipError):
                self.leave()
            raise
        return dist.distributed_c10d._get_default_group()

    def leave(self) -> None:
        """End the membership of this process: others do not wait for it. Its group is destroyed."""
        try:
            with _store_errors():
                self._heartbeat.stop()
        finally:
            if self.generation and dist.is_initialized():
                dist.destroy_process_group()
            self.generation, self._ids, self._has_left = 0, [], True

    @property
    def has_left(self) -> bool:
        """Whether this process has left."""
        return self._has_left

    def has_ended(self) -> bool:
        """Whether another member forms the next group, as of some tenths of a second ago."""
        self._check_not_left()
        with _store_errors():
            return self._heartbeat.has_seen(f"ended/{self.generation}")

    def has_newcomers(self) -> bool:
        """Whether a process waits for the next group, as of some tenths of a second ago."""
        with _store_errors():
            return self._heartbeat.has_seen(f"arrivals/{self.generation + 1}")

    def check_member(self, rank: int) -> None:
        """Raise LostMemberError if a member has died, or if the next group is being formed."""
        advice = "form the next group"
        with _store_errors():
            is_dead = self._is_dead(self._ids[rank])
        if is_dead:
            problem = f"rank {rank}, {self.members[rank]!r}, gave no sign of life for {self._patience:g} s, or left"
            raise LostMemberError("Membership", found=problem, do=advice)
        if self.has_ended():
            problem = f"generation {self.generation} has ended"
            raise LostMemberError("Membership", found=problem, do=advice)

    def _check_not_left(self) -> None:
        if self._has_left:
            advice = "make another Membership, and another LocalSteps of the same model"
            raise MembershipError("Membership", found="this process has left", do=advice)

    def _try_generation(self) -> bool:
        """Take part in forming the next generation; whether this process is in its group now."""
        target = self._find_newest() + 1
        before = self._read_members(target - 1)
        if self.generation:
            self._check_is_member(target - 1, before)
            self._store.set(f"ended/{self.generation}", "")
        self._heartbeat.watch(before)
        self._store.set(f"arrivals/{target}/{self._store.add(f'arrivals/{target}', 1)}", self._id)
        members = self._wait_until_decided(target, before)
        if self._id not in members:
            if self.generation:
                self._check_is_member(target, members)
            return False  # a new process that came too late for this generation
        self.generation, self._ids = target, members
        self._heartbeat.watch(members, (f"ended/{target}", f"arrivals/{target + 1}"))
        return self._wait_until_ready() and self._init_group()

    def _find_newest(self) -> int:
        newest = self.generation
        while self._store.check([f"members/{newest + 1}"]):
            newest += 1
        return newest

    def _read_members(self, generation: int) -> list[str]:
        return list(json.loads(self._store.get(f"members/{generation}"))) if generation else []

    def _check_is_member(self, generation: int, members: Sequence[str]) -> None:
        if self._id not in members:
            problem = f"process {self._name!r} was too slow, and generation {generation} has gone on without it"
            expected = f"a sign of life every {self._patience:g} s, and {self.timeout:g} s of waiting at most"
            advice = "join as a new process: make another Membership, and another LocalSteps of the same model"
            raise MembershipError("Membership", found=problem, expected=expected, do=advice)

    def _wait_until_decided(self, target: int, before: Sequence[str]) -> list[str]:
        """Wait for the decision on who is in a generation, or make it as soon as it can be made."""
        began, waited_since, key = time.monotonic(), None, f"members/{target}"
        while not self._store.check([key]):
            arrived = [member for member in self._arrived(target, before) if not self._is_dead(member)]
            is_late = self._id in before and time.monotonic() - began > self.timeout
            is_awaited = any(member not in arrived and not self._heartbeat.is_dead(member) for member in before)
            if is_awaited and not is_late:
                waited_since = None
            elif len(arrived) >= self._required(arrived, before):
                self._store.compare_set(key, "", json.dumps(arrived))
            elif (waited_since := waited_since or time.monotonic()) + self.timeout < time.monotonic():
                self._raise_too_few(len(arrived), self._required(arrived, before))
            time.sleep(_POLL_SECONDS)
        return self._read_members(target)

    def _arrived(self, target: int, before: Sequence[str]) -> list[str]:
        """The processes that have come, in the order of ranks: members in the order of before, then new ones."""
        keys = [f"arrivals/{target}/{place}" for place in range(1, self._store.add(f"arrivals/{target}", 0) + 1)]
        arrived = [str(self._store.get(key), "utf-8") for key in keys if self._store.check([key])]
        newcomers = [process for process in arrived if process not in before]
        newcomers.sort(key=lambda process: (len(_name(process)), _name(process)))
        self._heartbeat.watch([*before, *newcomers])
        return [*(member for member in before if member in arrived), *newcomers]

    def _is_dead(self, process: str) -> bool:
        return process != self._id and self._heartbeat.is_dead(process)

    def _required(self, arrived: Sequence[str], before: Sequence[str]) -> int:
        return self._min_size if any(member in arrived for member in before) else self._size

    def _raise_too_few(self, count: int, required: int) -> None:
        problem, expected = f"too few processes in {self.timeout:g} s: {count}", f"{required} or more"
        advice = "start the others, or lower size or min_size"
        raise MembershipError("Membership", found=problem, expected=expected, do=advice)

    def _wait_until_ready(self) -> bool:
        """Wait until all members are about to connect; False if one of them died, which ends the generation."""
        keys = [f"ready/{self.generation}/{member}" for member in self._ids]
        self._store.set(keys[self._ids.index(self._id)], "")
        deadline = time.monotonic() + self.timeout
        while not self._store.check(keys):
            is_dead = any(self._is_dead(member) for member in self._ids)
            if is_dead or self.has_ended() or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _init_group(self) -> bool:
        """Connect to all members; False if one of them died meanwhile."""
        store = PrefixStore(f"group/{self.generation}", self._store)
        settings: dict[str, Any] = {"rank": self._ids.index(self._id), "world_size": len(self._ids)}
        try:
            timeout = timedelta(seconds=self.timeout)
            dist.init_process_group(self._backend, store=store, timeout=timeout, **settings)
        except RuntimeError as error:
            if not is_lost(error):
                raise
            return False
        return True


def _check_store(store: Any) -> None:
    expected, advice = "a store of torch.distributed", "make a TCPStore or a SharedFileStore"
    validate.check_instance("Membership, store", store, Store, expected=expected, do=advice)
    bottom: Any = store
    while isinstance(bottom, PrefixStore):
        bottom = bottom.underlying_store
    if isinstance(bottom, FileStore):
        path = getattr(bottom, "path", "PATH")
        problem, expected = "a FileStore", "a store that others can use when a process is killed while it writes there"
        advice = f"take comm.SharedFileStore({path!r}), or a TCPStore"
        raise PolicyError("Membership, store", found=problem, expected=expected, do=advice)


def is_lost(error: BaseException) -> bool:
    """Whether an error means that another process died, its connection, or the store: torch has no class for all."""
    if isinstance(
        error, LostMemberError | dist.DistError | ConnectionError | TimeoutError | StorageError | CorruptError
    ):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(sign in text for sign in ("gloo", "connection", "timed out", "timeout"))


def _name(process: str) -> str:
    return process.rpartition("/")[0]


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raise errors of the store as ours."""
    try:
        yield
    except (RuntimeError, OSError, CorruptError) as error:
        problem = f"the store does not answer ({error})"
        raise MembershipError("Membership", found=problem, do=_STORE_ADVICE) from error
