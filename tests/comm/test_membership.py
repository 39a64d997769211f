"""Who is in a group: what one process can see of it. Several processes are in test_elastic_local_steps.py."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from helpers.timeouts import PATIENCE

from shrinkpoint.comm.heartbeat import Heartbeat
from shrinkpoint.comm.membership import LostMemberError, Membership, is_lost
from shrinkpoint.comm.shared_file_store import SharedFileStore
from shrinkpoint.errors import CorruptError, MembershipError, MismatchError, PolicyError, StorageError


@pytest.fixture
def store(tmp_path):
    return SharedFileStore(tmp_path / "store")


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_one_process_forms_group_after_group_and_leaves(store):
    membership = Membership(store, 1, name="a")
    assert (membership.generation, membership.members) == (0, [])
    for generation in (1, 2):
        assert membership.form().size() == 1
        assert (membership.generation, membership.members) == (generation, ["a"])
    assert not membership.has_ended() and not membership.has_newcomers()
    membership.leave()
    assert not dist.is_initialized()
    for use in (membership.form, membership.has_ended):
        with pytest.raises(MembershipError, match="this process has left"):
            use()


def test_a_process_that_comes_back_with_another_object_is_in_the_next_generation(store):
    for generation in (1, 2):
        membership = Membership(store, 1, name="a")
        membership.form()
        assert membership.generation == generation  # the one before has left: nobody waits for it
        membership.leave()


def test_one_process_without_enough_others_gives_up(store):
    first = Membership(store, 1, name="a")
    first.form()
    second = Membership(store, 2, name="b", timeout=0.1)
    first.leave()
    with pytest.raises(MembershipError, match=r"too few processes in 0.1 s: 1; expected 2 or more"):
        second.form()


def test_a_default_group_of_the_program_is_refused_and_stays(store):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        membership = Membership(store, 1)
        with pytest.raises(PolicyError, match="Leave out init_process_group"):
            membership.form()
        membership.leave()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_arguments_are_checked(store):
    for arguments in ((None, 1), (store, 0), (store, "2")):
        with pytest.raises(PolicyError):
            Membership(*arguments)
    for settings in ({"min_size": 3}, {"timeout": 0}, {"patience": -1}, {"name": 5}):
        with pytest.raises(PolicyError):
            Membership(store, 2, **settings)


@pytest.mark.parametrize(
    "wrap", [lambda store: store, lambda store: dist.PrefixStore("a", dist.PrefixStore("b", store))]
)
def test_a_store_that_a_kill_may_leave_half_written_is_refused(wrap, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"))
    with pytest.raises(PolicyError, match=r"a FileStore; expected .* Take comm.SharedFileStore\('.*store'\)"):
        Membership(wrap(store), 2)


def test_a_process_that_stops_counting_is_dead_and_one_that_counts_is_not(store, tmp_path):
    watcher, alive, leaving = (Heartbeat(SharedFileStore(tmp_path / "store"), name, 1.0) for name in "wab")
    watcher.watch(["a", "b", "never"], ["key", "other"])
    wait_until(lambda: watcher.is_dead("never"))
    leaving.stop()
    store.set("key", "")
    wait_until(lambda: watcher.is_dead("b") and watcher.has_seen("key"))
    assert not watcher.is_dead("a") and not watcher.has_seen("other")
    alive.stop(), watcher.stop()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LostMemberError("a", found="b", do="c"), True),
        (RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (dist.DistNetworkError("broken"), True),
        (ConnectionResetError(), True),
        (StorageError("a", found="b", do="c"), True),
        (CorruptError("a", found="b", do="c"), True),
        (RuntimeError("shape mismatch"), False),
        (MismatchError("a", found="timeout", do="c"), False),
        (MembershipError("a", found="left out", do="c"), False),
        (ValueError("connection"), False),
    ],
)
def test_errors_that_mean_a_lost_connection(error, expected):
    assert is_lost(error) == expected


def test_a_file_of_a_store_that_is_gone_or_damaged_is_a_store_that_does_not_answer(tmp_path):
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:30])):
        path = tmp_path / "members"
        membership = Membership(SharedFileStore(path), 1, patience=0.2)
        membership.form()
        damage(path)
        wait_until(lambda membership=membership: membership._heartbeat._error is not None)
        with pytest.raises(MembershipError, match="the store does not answer"):
            membership.has_ended()
        with pytest.raises(MembershipError, match="the store does not answer"):
            membership.form()
        path.unlink(missing_ok=True)


ENDS = """
import torch.distributed as dist
from shrinkpoint.comm.heartbeat import Heartbeat

store = dist.TCPStore("127.0.0.1", 0, is_master=True)
clients = [dist.TCPStore("127.0.0.1", store.port) for _ in range(8)]
beats = [Heartbeat(client, str(index), patience=1e-5) for index, client in enumerate(clients)]
"""


def test_a_process_may_end_while_it_gives_signs_of_life():
    ran = subprocess.run([sys.executable, "-c", ENDS], timeout=PATIENCE, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
