"""A manager with a mirror: the loop never waits for it, and a run goes on from it on another machine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from helpers.paths import TESTS
from helpers.processes import run_forked
from helpers.stores import Linkless, flip, state
from helpers.strategies import difference
from helpers.timeouts import PATIENCE

from shrinkpoint import CheckpointManager, Keep, Store
from shrinkpoint.errors import LockedError, NotFoundError, PolicyError, StorageError

_numbers = itertools.count()
_QUICK = {"max_retries": 1}


@pytest.fixture
def url(s3) -> str:
    return f"s3://checkpoints/{os.getpid()}/mirror-{next(_numbers)}"


def save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, extra=state(step), rng=False)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_of(where: object, check: bool = True) -> list[int]:
    """The steps of a store, each of which loads with the values that were saved."""
    store = Store(where)
    for step in store.steps() if check else ():
        assert difference(store.load(step, keep=False)["extra"], state(step)) is None
    return [*store.steps()]


class Gate(Linkless):
    """A place that takes nothing until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open, self.waits = threading.Event(), False

    @contextmanager
    def create(self, key: str) -> Iterator:
        self.waits = True
        assert self.is_open.wait(PATIENCE)
        with super().create(key) as sink:
            yield sink


@pytest.mark.parametrize("background", [False, True])
def test_saves_return_while_nothing_is_copied_and_all_is_there_in_the_end(tmp_path, background):
    gate = Gate()
    with CheckpointManager(tmp_path, mirror=gate, background=background) as manager:
        save(manager, 1, 2, 3)
        manager.wait()
        assert manager.mirror_lag == 3
        assert steps_of(gate) == []
        gate.is_open.set()
        manager.flush()
        assert manager.mirror_lag == 0
        assert steps_of(gate) == [1, 2, 3]
        save(manager, 4)
    assert steps_of(gate) == [1, 2, 3, 4]


def test_bucket_and_directory_are_mirrors(tmp_path, url):
    for number, mirror in enumerate((url, tmp_path / "mirror")):
        with CheckpointManager(
            tmp_path / f"run-{number}", mirror=mirror, keep=Keep(last=2), keyframe_every=3
        ) as manager:
            save(manager, *range(1, 6))
        assert steps_of(mirror) == [4, 5]
        assert Store(mirror).verify(deep=True) == []
    assert repr(manager.mirror) == f"Store({str(mirror)!r})"


def test_new_machine_restores_from_the_mirror_and_goes_on(tmp_path, url):
    with CheckpointManager(tmp_path / "first", mirror=url) as manager:
        save(manager, 1, 2, 3)
    with CheckpointManager(tmp_path / "second", mirror=url) as manager:
        result = manager.restore()
        assert (result.step, result.where) == (3, url)
        assert difference(result.extra, state(3)) is None
        assert manager.restore(2).where == url
        save(manager, 4)
        assert manager.restore().where == str(tmp_path / "second")
        with pytest.raises(NotFoundError, match="no checkpoint of step 9"):
            manager.restore(9)
    assert steps_of(url) == [1, 2, 3, 4]
    manager = CheckpointManager(tmp_path / "first", mirror=url)
    assert (manager.restore().step, manager.restore(1).where) == (4, str(tmp_path / "first"))
    assert CheckpointManager(tmp_path / "third", mirror=f"{url}/nothing").restore() is None


def test_copy_in_the_mirror_stands_in_for_a_damaged_checkpoint(tmp_path, url):
    with CheckpointManager(tmp_path, mirror=url) as manager:
        save(manager, 1, 2)
    flip(Store(tmp_path).storage, "step-000000002/rank-00000.safetensors")
    manager = CheckpointManager(tmp_path, mirror=url)
    result = manager.restore()
    assert (result.step, result.where, [checkpoint.step for checkpoint in result.skipped]) == (2, url, [2])
    assert difference(manager.restore(2).extra, state(2)) is None


def test_what_the_store_has_forgotten_does_not_come_back(tmp_path, url):
    with CheckpointManager(tmp_path, mirror=url) as manager:
        save(manager, 1, 2)
    Store(tmp_path).forget(2)
    with CheckpointManager(tmp_path, mirror=url) as manager:
        assert manager.restore().step == 1
        with pytest.raises(NotFoundError, match="forgotten"):
            manager.restore(2)
        save(manager, 3)
    assert steps_of(url) == [1, 3]


def test_checkpoint_that_is_found_before_it_is_announced_counts_once(tmp_path):
    gate = Gate()
    with CheckpointManager(tmp_path, mirror=gate) as manager:
        save(manager, 1)
        until(lambda: gate.waits)  # the copy of the first one
        uploader = manager._uploader
        manager.store.save(2, {"extra": state(2)})  # committed, as it is just before `start`
        uploader._find_missing()
        uploader.start(2)
        lag = manager.mirror_lag
        gate.is_open.set()
    assert lag == 2
    assert manager.mirror_lag == 0


def test_bucket_that_is_away_warns_once_and_is_caught_up_with(tmp_path, url, s3):
    mirror = s3.storage(url, retry_config=_QUICK)
    s3.fail(".", "error", count=10**6)
    with CheckpointManager(tmp_path, mirror=mirror) as manager:
        with pytest.warns(UserWarning, match=r"the mirror s3://.* is behind: .*500") as warned:
            save(manager, 1, 2)
            until(lambda: warned.list)
            with pytest.raises(StorageError, match="expected all checkpoints of"):
                manager.flush()
            save(manager, 3)
            assert manager.mirror_lag == 3
            with pytest.raises(StorageError):
                manager.flush()
        assert len(warned) == 1
        s3.clear()
        manager.flush()
        assert manager.mirror_lag == 0
    assert steps_of(url) == [1, 2, 3]


class Panic(BaseException):
    """As obstore's PanicException, which is no Exception."""


class Panicking(Linkless):
    """A place that panics until it is mended."""

    is_mended = False

    @contextmanager
    def create(self, key: str) -> Iterator:
        if not self.is_mended:
            raise Panic("no such thread pool")
        with super().create(key) as sink:
            yield sink


class Stuck(Linkless):
    """A place that another writer has, and whose lock cannot be given back."""

    @contextmanager
    def lock(self) -> Iterator:
        try:
            yield
        finally:
            raise Panic("no lock to give back")

    def create(self, key: str) -> Iterator:
        raise LockedError("place", found="another writer", do="wait")


@pytest.mark.filterwarnings("ignore:the mirror")  # it may come before the flush
def test_panic_of_a_storage_is_an_error_and_copying_goes_on_after_it(tmp_path):
    mirror = Panicking()
    with CheckpointManager(tmp_path, mirror=mirror) as manager:
        save(manager, 1)
        with pytest.raises(StorageError, match="no such thread pool"):
            manager.flush()
        mirror.is_mended = True
        manager.flush()
    assert steps_of(mirror) == [1]


@pytest.mark.filterwarnings("ignore:the mirror")  # it may come before the flush
def test_a_mirror_whose_lock_was_deleted_is_locked_again_or_belongs_to_another(tmp_path):
    mirror = tmp_path / "mirror"
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        save(manager, 1)
        manager.flush()
        (mirror / ".shrinkpoint-lock").unlink()
        save(manager, 2)
        manager.flush()
        with pytest.raises(LockedError), Store(mirror) as store:
            store.lock()
        (mirror / ".shrinkpoint-lock").unlink()
        with Store(mirror) as store:
            store.lock()
            save(manager, 3)
            with pytest.raises(StorageError, match="is saving here already"):
                manager.flush()
            assert steps_of(mirror) == [1, 2]
        manager.flush()
    assert steps_of(mirror) == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:the mirror")  # it may come before the flush
def test_error_of_the_thread_itself_ends_a_flush(tmp_path):
    manager = CheckpointManager(tmp_path, mirror=Stuck())
    save(manager, 1)
    for wait in (manager.flush, manager.flush, manager.close):
        with pytest.raises(StorageError, match="no lock to give back"):
            wait()


def test_next_process_copies_what_the_last_one_could_not(tmp_path, url, s3):
    s3.fail(".", "error", count=10**6)
    manager = CheckpointManager(tmp_path, mirror=s3.storage(url, retry_config=_QUICK))
    with pytest.warns(UserWarning, match="is behind") as warned:
        save(manager, 1, 2)
        until(lambda: warned.list)
        with pytest.raises(StorageError, match="is behind"):
            manager.close()
    s3.clear()
    CheckpointManager(tmp_path, mirror=url).flush()
    assert steps_of(url) == [1, 2]


def test_mirror_that_cannot_be_read_stops_no_resume_but_on_a_new_machine(tmp_path, url, s3):
    with CheckpointManager(tmp_path, mirror=url) as manager:
        save(manager, 1)
    s3.fail(".", "error", count=10**6)
    mirror = s3.storage(url, retry_config=_QUICK)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert CheckpointManager(tmp_path, mirror=mirror).restore().step == 1
    with pytest.raises(StorageError, match="500"):
        CheckpointManager(tmp_path / "new", mirror=mirror).restore()


def test_two_writers_take_turns(tmp_path, url):
    first = CheckpointManager(tmp_path / "first", mirror=url)
    save(first, 1)
    first.flush()
    second = CheckpointManager(tmp_path / "second", mirror=url)
    with pytest.warns(UserWarning, match="is saving here already") as warned:
        save(second, 2)
        until(lambda: warned.list)
        with pytest.raises(StorageError, match="is saving here already"):
            second.flush()
    first.close()
    second.close()
    assert steps_of(url) == [1, 2]


@pytest.mark.parametrize(
    "kind", ["lost", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("slow_down", "cut_before"))]
)
def test_mirror_is_whole_when_one_request_in_three_fails(tmp_path, url, s3, kind):
    for skip in range(60):
        s3.fail(".", kind, skip=2 * skip)
    with CheckpointManager(tmp_path, mirror=url, keep=Keep(last=2), keyframe_every=2) as manager:
        save(manager, 1, 2, 3, 4)
    s3.clear()
    assert steps_of(url) == [3, 4]
    assert Store(url).verify(deep=True) == []


def test_wrong_mirrors_are_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    for mirror, match in ((tmp_path / "run", "outside of the store"), (tmp_path / "file", "a directory")):
        with pytest.raises(PolicyError, match=match):
            CheckpointManager(tmp_path / "run", mirror=mirror)
    with pytest.raises(PolicyError, match="s3://bucket/path"):
        CheckpointManager(tmp_path / "run", mirror="s3://")


_LAST_SAVE = """
import sys
from helpers.stores import state
from shrinkpoint import CheckpointManager, Store
store = Store(sys.argv[3])
store.save(1, state(1))
store.load()
manager = CheckpointManager(sys.argv[1], mirror=sys.argv[2])
for step in (1, 2, 3):
    manager.save(step, extra=state(step), rng=False)
"""


def test_process_that_closes_nothing_copies_all_and_has_a_successor(tmp_path, url):
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", _LAST_SAVE, str(tmp_path), url, f"{url}-store"]
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE)
    assert steps_of(url) == [1, 2, 3]
    with CheckpointManager(tmp_path, mirror=url) as manager:
        save(manager, 4)
    assert steps_of(url) == [1, 2, 3, 4]
    with Store(f"{url}-store") as store:
        store.save(2, state(2))
        assert [*store.steps()] == [1, 2]


_KILLS = """
import os, random, signal, sys, time
folder, url, kills, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def new_state(step):
    from helpers.stores import noisy_state
    return noisy_state(step, (20 << 20) if step % 3 == 0 else 10_000)  # every third is uploaded in parts

def save():
    from shrinkpoint import CheckpointManager, Keep
    manager = CheckpointManager(folder, mirror=url, keep=Keep(last=3), keyframe_every=4)
    result = manager.restore()
    step = 1 if result is None else result.step + 1
    while True:
        manager.save(step, extra=new_state(step), rng=False)
        step += 1

def check():
    from helpers.strategies import difference
    from shrinkpoint import Store
    store = Store(url)
    for manifest in store.list():
        assert difference(store.load(manifest.step, keep=False)["extra"], new_state(manifest.step)) is None
    problems = [finding for finding in store.verify() if not finding.loads]
    assert not problems, problems

def catch_up():
    from shrinkpoint import CheckpointManager, Keep, Store
    CheckpointManager(folder, mirror=url, keep=Keep(last=3)).flush()
    ours, theirs = Store(folder).steps(), Store(url).steps()
    assert ours[-3:] == theirs[-3:], (ours, theirs)  # a kill before a deletion leaves more in ours

random.seed(seed)
for number in range(kills):
    child = in_child(save)
    time.sleep(random.uniform(0.3, 2.0))
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.waitpid(in_child(check), 0)[1] == 0, number
for work in (catch_up, check):
    assert os.waitpid(in_child(work), 0)[1] == 0
"""


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.nightly)])
def test_killed_process_leaves_a_mirror_in_which_all_that_is_listed_loads(tmp_path, url, kills):
    run_forked(_KILLS, str(tmp_path), url, str(kills), "3")


def test_a_run_that_went_back_in_its_mirror_alone_resumes_from_what_it_saved_last(tmp_path):
    with CheckpointManager(tmp_path / "first", mirror=tmp_path / "mirror", keep=Keep(last=3)) as manager:
        save(manager, *range(1, 9))
    for step in (7, 8):  # of another process each
        with CheckpointManager(tmp_path / "second", mirror=tmp_path / "mirror", keep=Keep(last=3)) as manager:
            if step == 7:
                assert manager.restore(6).step == 6
                with pytest.warns(UserWarning, match="step 7 was saved below step 8"):
                    manager.save(7, extra=state(70), rng=False)
            else:
                assert difference(manager.restore().extra, state(70)) is None
                manager.save(8, extra=state(80), rng=False)
    with CheckpointManager(tmp_path / "third", mirror=tmp_path / "mirror") as manager:
        assert difference(manager.restore().extra, state(80)) is None
    for step in (7, 8):
        assert difference(Store(tmp_path / "mirror").load(step)["extra"], state(step * 10)) is None


@pytest.mark.parametrize("keep", [None, Keep(last=2)])
def test_a_new_run_beside_the_mirror_of_another_is_told_that_a_restore_takes_the_other(tmp_path, keep):
    with CheckpointManager(tmp_path / "first", mirror=tmp_path / "mirror", keep=keep) as manager:
        save(manager, 10, 20)
    text = r"mirror: step 20 is from another run, and counts as newer than step 1,"
    manager = CheckpointManager(tmp_path / "second", mirror=tmp_path / "mirror", keep=keep)
    with pytest.warns(UserWarning, match=text), manager:
        save(manager, 1)
        manager.flush()  # else a busy mirror may find step 2 as the newest
        save(manager, 2)
    with CheckpointManager(tmp_path / "third", mirror=tmp_path / "mirror", keep=keep) as manager:
        assert manager.restore().step == 20
        save(manager, 21)  # goes on with that run
