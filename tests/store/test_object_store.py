"""A store in a bucket: what it saves is whole, whatever fails, and costs few requests."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers.processes import run_forked
from helpers.stores import payloads, state
from helpers.strategies import difference

import shrinkpoint
from shrinkpoint import Keep, Store, load
from shrinkpoint.errors import ChainError, LockedError, MissingExtraError, NotFoundError, PolicyError, StorageError

_numbers = itertools.count()
KINDS = ("lost", "slow_down", "cut_before", "cut_answer")
KILLS = os.environ.get("SHRINKPOINT_BUCKET_KILLS", "15")


@pytest.fixture
def url(s3) -> str:
    return f"s3://checkpoints/{os.getpid()}/store-{next(_numbers)}"


def large_state(seed: int) -> dict:
    """A state of 24 MB that does not get smaller: its payload goes in parts."""
    return {**state(seed), "noise": torch.randint(0, 256, (24 << 20,), dtype=torch.uint8)}


def test_url_names_a_store_everywhere(url):
    with Store(url) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        assert repr(store) == f"Store({url!r})"
        assert store.manifest(3).depth == 2
    assert [*Store(Path(url)).steps()] == [1, 2, 3]  # pathlib has removed a slash
    assert difference(load(url), state(3)) is None
    assert difference(load(url, step=2, only="model.*"), {"model": state(2)["model"]}) is None
    manager = shrinkpoint.CheckpointManager(url, keep=Keep(last=1), background=True)
    manager.save(4, extra=state(4), rng=False)
    manager.close()
    assert difference(load(url)["extra"], state(4)) is None
    assert Store(url).verify(deep=True) == []


def test_payload_in_parts_loads_and_is_one_object(url, s3):
    saved = large_state(1)
    with Store(url) as store:
        store.save(1, saved)
        keys = store.storage.list()
    assert keys == ["step-000000001/manifest.json", *payloads(store.storage, 1)]
    assert sum("uploadId" in path and method == "PUT" for method, path, _ in s3.requests()) >= 3
    assert difference(Store(url).load(), saved) is None


def test_part_of_a_state_is_read_without_the_rest(url, s3):
    with Store(url) as store:
        store.save(1, large_state(1))
    s3.clear()
    assert difference(load(url, only="model.*"), {"model": state(1)["model"]}) is None
    gets = [path for method, path, _ in s3.requests() if method == "GET" and "rank" in path]
    assert len(gets) <= 6  # a block each, of 24 MB


def test_save_in_a_long_run_takes_a_few_requests(url, s3):
    with Store(url, keyframe_every=None) as store:
        for step in range(12):
            store.save(step, state(step))
        s3.clear()
        store.save(12, state(12))
        names = [f"{method} {path}" for method, path, _ in s3.requests()]
    assert len(names) <= 7, names


def test_files_of_a_chain_are_asked_for_at_once_and_opened_once(url, s3):
    with Store(url) as store:
        for step in range(12):
            store.save(step, state(step))
    for act in (lambda: Store(url).restore(), lambda: load(url), lambda: Store(url).list()):
        s3.clear()
        s3.set_delay(0.05)
        act()
        assert s3.peak() >= 4
        names = [f"{method} {path}" for method, path, _ in s3.requests()]
        assert sum(name.startswith("GET") for name in names) <= 12 + 5, names


def test_chain_outlives_pruning_without_links(url):
    with Store(url) as store:
        for step in range(1, 5):
            store.save(step, state(step))
        plan = store.prune(Keep(last=1), dry_run=False)
        assert plan.delete == ()
        store.forget(2)
        store.compact()
        plan = store.prune(Keep(last=2), dry_run=False)
        assert plan.delete == (2,)
        assert plan.bytes > 0
        for step in (1, 3, 4):
            assert difference(store.load(step), state(step)) is None
        assert store.verify(deep=True) == []


def test_second_writer_is_refused_and_readers_are_not(url):
    with Store(url) as first:
        first.save(1, state(1))
        second = Store(url)
        with pytest.raises(LockedError, match="is saving here already"):
            second.save(2, state(2))
        assert difference(second.load(), state(1)) is None
    second.save(2, state(2))
    second.close()


def test_writer_whose_lease_was_taken_leaves_no_checkpoint(url):
    from shrinkpoint.storage.lease import LockNote

    with Store(url) as store:
        store.save(1, state(1))
        import obstore

        other = LockNote("other", 1, 60.0, "elsewhere", 7).to_bytes()
        obstore.put(store.storage._store, ".shrinkpoint-lease", other)
        with pytest.raises(LockedError, match="elsewhere"):
            store.save(2, state(2))
    assert [*Store(url).steps()] == [1]
    assert difference(Store(url).load(), state(1)) is None


_nightly = pytest.mark.nightly


@pytest.mark.parametrize("kind", ["lost", *(pytest.param(kind, marks=_nightly) for kind in KINDS[1:])])
def test_save_and_load_go_on_when_one_request_in_three_fails(url, s3, kind):
    with Store(url) as store:
        for skip in range(60):
            s3.fail(".", kind, skip=2 * skip)
        for step in (1, 2, 3):
            store.save(step, state(step))
        assert difference(Store(url).load(), state(3)) is None


def test_save_that_fails_leaves_what_was_there(url, s3):
    with Store(url) as store:
        store.save(1, state(1))
        s3.fail("PUT .*rank", "error", count=1000)
        with pytest.raises(StorageError, match=r"step-000000002/rank-00000\.\d{9}\.safetensors: writing failed \(500"):
            store.save(2, state(2))
        s3.clear()
        assert difference(Store(url).load(), state(1)) is None
        store.save(3, state(3))
        assert [*store.steps()] == [1, 3]
        assert store.verify(deep=True) == []


def test_wrong_places_say_what_is_wrong(s3, monkeypatch):
    with pytest.raises(StorageError, match=r"no-such-bucket/run.*no such bucket"):
        Store("s3://no-such-bucket/run").save(1, state(1))
    with pytest.raises(NotFoundError, match=r"checkpoints/nothing.*no checkpoint"):
        Store("s3://checkpoints/nothing").load()
    for place in ("s3://", "s3:///run", "s3://bucket/a//b", "s3://bucket/../b"):
        with pytest.raises(PolicyError, match=r"expected (one of )?s3://bucket/path"):
            Store(place)
    for place in ("s3://key:SECRET@bucket/run", "s3://bucket/run?sig=SECRET"):
        with pytest.raises(PolicyError, match="AWS_ACCESS_KEY_ID") as caught:
            Store(place)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(PolicyError, match=r"hdfs://.*begins with s3://, gs:// or az://"):
        Store("hdfs://host/run")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingExtraError, match=r'pip install "shrinkpoint\[cloud\]"'):
        Store("s3://bucket/run")


_KILLS = """
import os, random, signal, sys, time, pathlib
url, kills, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
acknowledged = folder / "acknowledged"
acknowledged.write_text("-1")

def new_state(step):
    from helpers.stores import noisy_state
    return noisy_state(step, (24 << 20) if step % 2 else 10_000)  # every other one is uploaded in parts

def save():
    from shrinkpoint import Keep, Store
    store = Store(url)
    step = 1 + (store.restore().step if store.has_checkpoint() else -1)
    while True:
        store.save(step, new_state(step))
        acknowledged.with_suffix(".new").write_text(str(step))
        acknowledged.with_suffix(".new").replace(acknowledged)
        if step % 5 == 0:
            store.prune(Keep(last=3), dry_run=False)
        step += 1

def check():
    from helpers.strategies import difference
    from shrinkpoint import Store
    store, last = Store(url), int(acknowledged.read_text())
    if not store.has_checkpoint():
        assert last == -1, "lost"
        return
    restored = store.restore()
    assert not restored.skipped, restored.skipped  # a half checkpoint
    assert restored.step in (last, last + 1), (restored.step, last)  # a lost one
    assert difference(restored.state, new_state(restored.step)) is None
    problems = [finding for finding in store.verify() if not finding.loads]
    assert not problems, problems

random.seed(5)
for number in range(kills):
    child = in_child(save)
    time.sleep(random.uniform(0.1, 2.5))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.waitpid(in_child(check), 0)[1] == 0, number
print(acknowledged.read_text())
"""


@pytest.mark.nightly
def test_no_kill_loses_or_halves_a_checkpoint(url, tmp_path):
    assert int(run_forked(_KILLS, url, KILLS, str(tmp_path), timeout=1500)) > 0


def test_single_files_in_a_bucket(url, tmp_path):
    a, b, c = f"{url}/a.safetensors", f"{url}/b.safetensors", f"{url}/deep/er/c.safetensors"
    shrinkpoint.save(state(1), a)
    assert not shrinkpoint.save(state(2), b, base=a).keyframe
    shrinkpoint.save(state(3), c, base=b)
    for file, seed in ((a, 1), (b, 2), (c, 3)):
        assert difference(load(file), state(seed)) is None
        assert difference(load(file, only="seed"), {"seed": seed}) is None
    info = shrinkpoint.inspect(c)
    assert (info.path, info.parent, len(info.tensors)) == (c, "../../b.safetensors", 3)
    with pytest.raises(PolicyError, match="a base that is this file"):
        shrinkpoint.save(state(4), a, base=c)
    with pytest.raises(NotFoundError, match=r"b\.safetensors2: no such object"):
        load(f"{b}2")
    with pytest.raises(PolicyError, match="A file has none"):
        load(a, step=3)

    here = tmp_path / "here.safetensors"
    shrinkpoint.save(state(5), here, base=b)
    with pytest.raises(ChainError, match="base="):  # a file does not send its reader to a bucket
        load(here)
    assert difference(load(here, base=b), state(5)) is None
    shrinkpoint.save(state(5), here)
    shrinkpoint.save(state(6), f"{url}/d.safetensors", base=here)
    with pytest.raises(ChainError, match="base="):
        load(f"{url}/d.safetensors")


def test_payload_of_a_store_loads_by_its_url(url):
    with Store(url) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
    (payload,) = payloads(store.storage, 3)
    assert difference(load(f"{url}/{payload}"), state(3)) is None


def test_file_is_inspected_without_its_payload(url, s3):
    shrinkpoint.save(large_state(1), f"{url}/a")
    s3.clear()
    shrinkpoint.inspect(f"{url}/a")
    assert len([path for method, path, _ in s3.requests() if method == "GET"]) <= 2


_TWO_WRITERS = """
import os, random, sys, time

def of_rank(rank, width, url, folder):
    import json
    from helpers.stores import state
    from shrinkpoint import Store
    from shrinkpoint.errors import LockedError
    random.seed(rank)
    saved, refused = [], 0
    deadline = time.monotonic() + 40
    step = rank
    while time.monotonic() < deadline:
        try:
            with Store(url) as store:
                for _ in range(random.randrange(1, 4)):
                    store.save(step, state(step))
                    saved.append(step)
                    step += width
        except LockedError:
            refused += 1
        time.sleep(random.uniform(0, .05))
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump([saved, refused], file)

folder, url = sys.argv[1:]
children = []
for rank in range(3):
    children.append(os.fork())
    if children[-1] == 0:
        finish(lambda: of_rank(rank, 3, url, folder))
assert not any([os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.nightly
def test_writers_at_once_take_turns_and_every_save_that_returned_is_there(url, tmp_path):
    run_forked(_TWO_WRITERS, str(tmp_path), url)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    saved = sorted(step for steps, _ in results for step in steps)
    assert sum(refused for _, refused in results) > 0
    assert sum(bool(steps) for steps, _ in results) > 1
    store = Store(url)
    assert [*store.steps()] == saved
    assert store.verify(deep=True) == []
    for step in saved[::7]:
        assert difference(store.load(step, keep=False), state(step)) is None


@pytest.mark.nightly
def test_slow_line_takes_longer_and_that_is_all(url, s3):
    saved = large_state(1)
    s3.set_pace(12.5e6)  # 100 Mbit/s for each of the requests
    with Store(url) as store:
        store.save(1, saved)
    assert difference(Store(url).load(), saved) is None
    s3.set_pace(1e6)
    assert difference(load(url, only="model.*"), {"model": saved["model"]}) is None
