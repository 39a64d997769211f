"""A storage that dies at its n-th call, for every n: what was saved before still loads, and the next save goes on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from helpers.faulty_storage import FaultyStorage
from helpers.parameters import each_value
from helpers.stores import PLACES, place, state, weights_only
from helpers.strategies import difference

from shrinkpoint.errors import ShrinkpointError, StorageError
from shrinkpoint.storage import LocalStorage, Storage
from shrinkpoint.store import Keep, Store

Act = Callable[[Store], object]

SHOWN = (1, 2, 3)
EVERY = [5, pytest.param(1, marks=pytest.mark.nightly)]
"""One of so many calls fails; which one depends on how many an act makes."""
FAULTS = {
    "death-local": ("local", True, True),
    "error-memory": ("memory", False, False),
    "error-linkless": ("linkless", False, False),
    "death-linkless": ("linkless", True, True),
}
"""Kind of storage, whether the call that fails has had its effect, and whether all later calls fail as well."""


def prepared(storage: Storage) -> None:
    """Steps 1 to 4 in a chain of deltas, of which 4 is forgotten."""
    with Store(storage, keyframe_every=9, threads=1) as store:
        for step in (1, 2, 3, 4):
            store.save(step, state(step))
        store.forget(4)


def resumed(storage: Storage) -> Store:
    store = Store(storage, keyframe_every=9, threads=1)
    store.load()
    return store


def save_and_reverse(store: Store) -> None:
    """Write a keyframe, and the older checkpoints again as deltas against it."""
    keep = store.chain_limit.keep = Keep(last=4)
    store.chain_limit._delta_ratio = 0.1  # as a process has it that wrote the chain
    store.save(6, state(6), keyframe=True)
    store.prune(keep, dry_run=False, defer=True)


ACTS: dict[str, tuple[Act, dict[int, int]]] = {
    "save": (lambda store: store.save(6, state(6)), {6: 6}),
    "keyframe": (lambda store: store.save(6, state(6), keyframe=True), {6: 6}),
    "save again": (lambda store: store.save(2, state(12)), {2: 12}),
    "forget": (lambda store: store.forget(3), {}),
    "prune": (lambda store: store.prune(Keep(last=1), dry_run=False), {}),
    "make a keyframe": (lambda store: store.compact(3), {}),
    "merge": (lambda store: (store.forget(2), store.compact(), store.prune(dry_run=False)), {}),
    "weights only": (lambda store: store.prune(Keep(moments_last=1), dry_run=False), {}),
    "reverse": (lambda store: save_and_reverse(store), {6: 6}),
    "compacting prune": (lambda store: store.prune(Keep(every=2), dry_run=False, compact=True), {}),
}
MAY_GO = {"forget": {3}, "merge": {2}, "compacting prune": {1}}


def copied(storage: Storage, path: Path) -> Storage:
    """A storage with the same content, to be spoilt."""
    if isinstance(storage, LocalStorage):
        own = shutil.ignore_patterns(".shrinkpoint-*")
        shutil.copytree(storage.path, path, copy_function=os.link, ignore=own)  # no file is ever written into
        return LocalStorage(path)
    copy = type(storage)()
    for key in storage.list():
        copy.put(key, storage.get(key))
    return copy


def attempt(storage: FaultyStorage, act: Act, fail_at: int) -> None:
    """Let `act` fail at its n-th call; 0: let it succeed."""
    store = resumed(storage)
    storage.log.clear()
    storage.fail_at = fail_at
    with suppress(StorageError) if fail_at else nullcontext():
        act(store)
    storage.fail_at = 0
    store.close()


@pytest.fixture
def path() -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of stores are made, and the disk is not what is tested."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize(("fault", "name"), each_value(FAULTS, ACTS))
def test_dying_at_any_fifth_call(fault: str, name: str, path: Path) -> None:
    assert_survives(name, fault, 5, path)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ACTS)
def test_dying_at_any_call(fault: str, name: str, path: Path) -> None:
    assert_survives(name, fault, 1, path)


def assert_survives(name: str, fault: str, every: int, path: Path) -> None:
    """Let each call of an act fail, or every n-th one: what was saved loads, and the next save goes on."""
    (act, written), (kind, late, dead) = ACTS[name], FAULTS[fault]
    prepared(whole := place(kind, path / "whole"))
    attempt(faulty := FaultyStorage(copied(whole, path / "0")), act, 0)
    for fail_at in range(1 + faulty.calls % every, faulty.calls + 1, every):
        inner = copied(whole, path / str(fail_at))
        attempt(FaultyStorage(inner, late=late, dead=dead), act, fail_at)
        at = f"{name}, call {fail_at} of {faulty.calls}: {faulty.log[fail_at - 1]}"
        with resumed(inner) as store:
            assert_whole(store, written, MAY_GO.get(name, set()), at)
            store.save(9, state(9))
            assert store.scan().orphans() == [], at
            assert store.verify(deep=True) == [], at
            assert difference(store.load(9, keep=False), state(9)) is None, at


def assert_whole(store: Store, written: dict[int, int], may_go: set[int], at: str) -> None:
    """Every step that was there is there, as it was or as the failed call wanted it."""
    assert set(SHOWN) - may_go <= set(store.steps()) <= {*SHOWN, *written}, at
    for step in store.steps():
        loaded = store.load(step, keep=False)
        assert loaded["seed"] in (step, written.get(step)), at
        expected = weights_only if store.manifest(step).weights_only else state
        assert difference(loaded, expected(loaded["seed"])) is None, at
    if 3 not in may_go:
        assert not store.manifest(3).weights_only, at


@pytest.mark.parametrize(("late", "kind"), each_value([False, True], PLACES))
@pytest.mark.parametrize("every", EVERY)
def test_a_run_whose_save_failed_once_goes_on_saving(every: int, kind: str, late: bool, path: Path) -> None:
    """The same store object, after the error was caught: its reference still is what its next delta is made against."""
    prepared(whole := place(kind, path / "whole"))
    attempt(faulty := FaultyStorage(copied(whole, path / "0")), ACTS["save"][0], 0)
    for fail_at in range(1 + faulty.calls % every, faulty.calls + 1, every):
        faulty = FaultyStorage(copied(whole, path / str(fail_at)), late=late)
        store = resumed(faulty)
        faulty.log.clear()
        faulty.fail_at = fail_at
        with suppress(ShrinkpointError):
            store.save(6, state(6))
        faulty.fail_at = 0
        for step in (6, 7, 8):
            store.save(step, state(step))
        for step in store.steps():
            assert difference(store.load(step, keep=False), state(step)) is None, faulty.log[fail_at - 1]
        assert store.manifest(8).depth >= 2
        assert store.verify(deep=True) == []
        assert store.scan().orphans() == []


@pytest.mark.parametrize("kind", PLACES)
def test_reading_that_fails_falls_back_or_says_so(kind: str, path: Path) -> None:
    inner = place(kind, path)
    prepared(inner)
    probe = FaultyStorage(inner)
    Store(probe, threads=1).restore()
    for fail_at in range(1, probe.calls + 1):
        try:
            at = Store(FaultyStorage(inner, fail_at), threads=1).restore()
        except StorageError:
            assert fail_at <= 2, "only a store that cannot even be listed cannot be restored"
            continue
        assert difference(at.state, state(at.step)) is None
        assert at.step == 3 or at.skipped
