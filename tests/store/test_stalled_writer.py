"""A writer to a bucket that stands still while another one commits: what that one has committed stays."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest
import torch
from helpers.paths import TESTS
from helpers.s3_server import S3Server
from helpers.stores import noisy_state
from helpers.strategies import difference
from helpers.timeouts import PATIENCE

import shrinkpoint as sp
from shrinkpoint import Keep, Store
from shrinkpoint.errors import LockedError, StorageError
from shrinkpoint.storage.object_storage import ObjectStorage
from shrinkpoint.store.verify import Finding
from shrinkpoint.sync import Publisher, Subscriber

_LEASE_SECONDS = 6.0
_numbers = itertools.count()
_nightly = pytest.mark.nightly


@pytest.fixture
def url(s3) -> str:
    return f"s3://checkpoints/{os.getpid()}/stalled-{next(_numbers)}"


def storage(url: str) -> ObjectStorage:
    return ObjectStorage(url, lease_seconds=_LEASE_SECONDS)


def large_state(seed: int) -> dict[str, Any]:
    """A state whose payload is uploaded in parts."""
    return noisy_state(seed, 24 << 20)


def save_in_store(url: str, seed: int) -> None:
    with Store(storage(url), threads=1) as store:
        store.save(5, large_state(seed))


def save_in_mirror(url: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        manager = sp.CheckpointManager(directory, mirror=storage(url), threads=1)
        try:
            manager.save(5, extra=large_state(seed), rng=False)
            manager.flush()
        finally:
            with suppress(StorageError):
                manager.close()


def compact_store(url: str, seed: int) -> None:
    """Write step 5 again as a keyframe; the second writer saves it again."""
    if seed != 1:
        save_in_store(url, seed)
        return
    with Store(storage(url), threads=1) as store:
        store.compact(5)


def prune_store(url: str, seed: int) -> None:
    """Delete step 5; the second writer saves it again."""
    if seed != 1:
        save_in_store(url, seed)
        return
    with Store(storage(url), threads=1) as store:
        store.prune(Keep(last=1), dry_run=False)


def save_directory(url: str, seed: int) -> None:
    from shrinkpoint.train import Checkpointer

    with Checkpointer(threads=1) as checkpointer:
        checkpointer.save(f"{url}/last", large_state(seed), step=5)


def save_dcp(url: str, seed: int) -> None:
    import torch.distributed.checkpoint as dcp

    from shrinkpoint.train.dcp import Writer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: a single process
        dcp.save({"noise": large_state(seed)["noise"]}, storage_writer=Writer(f"{url}/last", threads=1))


def publish(url: str, seed: int) -> None:
    with Publisher(storage(url), threads=1) as publisher:
        publisher.publish({"w": large_state(seed)["noise"]})


def load_store(url: str) -> Any:
    state = Store(url).load(5)
    return state.get("extra", state)["noise"]


def load_published(url: str) -> Any:
    model = {"w": torch.zeros(24 << 20, dtype=torch.uint8)}
    Subscriber(url).update(model)
    return model["w"]


def load_dcp(url: str) -> Any:
    from shrinkpoint.train.dcp import load

    return load(f"{url}/last")["noise"]


def prepare_chain(url: str) -> None:
    with Store(url) as store:
        store.save(4, large_state(1))
        store.save(5, {**large_state(1), "seed": 7, "more": large_state(3)["noise"]})
        assert store.manifest(5).depth == 1


def prepare_two(url: str) -> None:
    with Store(url) as store:
        for step in (5, 6):
            store.save(step, noisy_state(step, 100), keyframe=True)


class Writing(NamedTuple):
    """A way to write to a bucket.

    Attributes:
        write: called with the URL and 1 in the writer that stands still, with 2 in the other one.
        load: the noise that is in the bucket.
        commit: the request by which it is there, as a pattern.
        prepare: called with the URL before.
    """

    write: Callable[[str, int], None]
    load: Callable[[str], Any]
    commit: str
    prepare: Callable[[str], None] = lambda url: None


_MANIFEST = "PUT .*step-000000005/manifest.json"
WRITINGS = {
    "store": Writing(save_in_store, load_store, _MANIFEST),
    "mirror": Writing(save_in_mirror, load_store, _MANIFEST),
    "compact": Writing(compact_store, load_store, _MANIFEST, prepare_chain),
    "directory": Writing(save_directory, lambda url: sp.load(f"{url}/last")["noise"], "PUT .*/shrinkpoint.json"),
    "dcp": Writing(save_dcp, load_dcp, "PUT .*/shrinkpoint.json"),
    "publisher": Writing(publish, load_published, "PUT .*/published.json"),
}
_PART = "PUT .*partNumber"


@contextmanager
def stalled_writer(s3: S3Server, kind: str, url: str, request: str) -> Iterator[subprocess.Popen[str]]:
    """A writer in a process of its own that stands still from when it has sent a request on."""
    program = f"from store.test_stalled_writer import *; (WRITINGS | PRUNE)[{kind!r}].write({url!r}, 1)"
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=pipe, text=True)
    try:
        deadline = time.monotonic() + PATIENCE
        method, _, path = request.partition(" .*")
        while not any(found == method and path in name for found, name, _ in s3.requests()):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def write_when_free(write: Callable[[str, int], None], url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return write(url, 2)
        except (LockedError, StorageError) as error:
            assert "is saving here already" in str(error)
            assert time.monotonic() < deadline
            time.sleep(0.5)


def findings(url: str) -> list[Finding]:
    return [finding for finding in Store(url).verify() if not finding.loads]


@pytest.mark.parametrize(
    ("kind", "is_commit"),
    [
        pytest.param(kind, is_commit, marks=() if (kind, is_commit) == ("directory", True) else _nightly)
        for kind in WRITINGS
        for is_commit in (False, True)
    ],
)
def test_what_another_writer_commits_meanwhile_stays(s3, url, kind, is_commit):
    writing, expected = WRITINGS[kind], large_state(2)["noise"]
    writing.prepare(url)
    s3.clear()
    if is_commit:  # it waits to send the request again
        s3.fail(writing.commit, "slow_down", count=4)
    with stalled_writer(s3, kind, url, writing.commit if is_commit else _PART) as process:
        method, _, path = writing.commit.partition(" .*")
        before = len([name for found, name, _ in s3.requests() if found == method and path in name])
        s3.clear()
        write_when_free(writing.write, url)
        assert torch.equal(writing.load(url), expected)
        assert before == is_commit  # else it had committed already
        process.send_signal(signal.SIGCONT)
        error = process.communicate(timeout=PATIENCE)[1]
        assert "LockedError" in error or "ObjectConflictError" in error or kind == "mirror", error
    assert torch.equal(writing.load(url), expected)
    assert findings(url) == []
    if kind in ("store", "mirror", "compact"):
        with Store(url) as store:
            store.lock()
            named = {key for entry in store.scan().directories.values() for key in entry.needed_keys}
            assert {key for key in store.storage.list() if "rank-" in key} == {key for key in named if "rank-" in key}


PRUNE = {"prune": Writing(prune_store, load_store, "POST .*delete", prepare_two)}


@_nightly
def test_deletion_that_is_sent_again_spares_what_was_saved_again(s3, url):
    writing = PRUNE["prune"]
    writing.prepare(url)
    s3.clear()
    s3.fail(writing.commit, "slow_down", count=4)
    with stalled_writer(s3, "prune", url, writing.commit) as process:
        s3.clear()
        write_when_free(writing.write, url)
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=PATIENCE)
    assert difference(Store(url).load(5), large_state(2)) is None
    assert findings(url) == []
