"""Listing again and again: what has not changed is not read again, and every change is seen."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.stores import Linkless, flip, remove, state
from helpers.strategies import difference

from shrinkpoint.storage import LocalStorage, MemoryStorage, Source, Storage
from shrinkpoint.store import Keep, Store, listing

AGE = 0.05
"""Seconds after which a directory's times are trusted here, so that the tests need not wait for two seconds."""


class Counting:
    """Counts the manifests that are read, and the listings of everything."""

    def __init__(self) -> None:
        self.manifests: list[str] = []
        self.scans = 0

    def of(self, kind: type[Storage]) -> type[Storage]:
        counts = self

        class Counted(kind):  # type: ignore[misc,valid-type]
            def open(self, key: str) -> Source:
                if key.endswith("manifest.json"):
                    counts.manifests.append(key)
                return super().open(key)

            def list(self, prefix: str = "") -> list[str]:
                counts.scans += not prefix
                return super().list(prefix)

        return Counted


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until what was written is old enough to be trusted."""
    monkeypatch.setattr(listing, "_MIN_AGE", int(AGE * 1e9))
    return lambda: time.sleep(1.2 * AGE)


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, settled: Callable[[], None]) -> None:
    counts = Counting()
    with Store(counts.of(LocalStorage)(tmp_path)) as store:
        for step in range(1, 7):
            store.save(step, state(step))
        settled()
        assert store.steps() == [1, 2, 3, 4, 5, 6]
        counts.manifests.clear()
        assert store.steps() == [1, 2, 3, 4, 5, 6]
        assert store.scan() is store.scan()
        assert not counts.manifests
        store.save(7, state(7))
        counts.manifests.clear()
        store.prune(Keep(last=3), dry_run=False)
        assert counts.manifests == ["step-000000007/manifest.json"]


CHANGES: dict[str, tuple[Callable[[Path], None], list[int]]] = {
    "saved": (lambda path: _save(path, 9), [1, 2, 3, 9]),
    "saved again": (lambda path: _save(path, 2), [1, 2, 3]),
    "forgotten": (lambda path: Store(path).forget(2), [1, 3]),
    "pruned": (lambda path: _write(path, lambda store: store.prune(Keep(last=1), dry_run=False)), [3]),
    "removed": (lambda path: shutil.rmtree(path / "step-000000002"), [1, 3]),
    "manifest removed": (lambda path: (path / "step-000000002/manifest.json").unlink(), [1, 3]),
    "manifest damaged": (lambda path: flip(LocalStorage(path), "step-000000002/manifest.json", 40), [1, 3]),
    "mark damaged": (lambda path: _remark(path), [1, 2, 3]),
}


def _write(path: Path, change: Callable[[Store], object]) -> None:
    with Store(path, keyframe_every=1) as store:
        change(store)


def _save(path: Path, step: int) -> None:
    _write(path, lambda store: store.save(step, state(step)))


def _remark(path: Path) -> None:
    Store(path).forget(2)
    assert Store(path).steps() == [1, 3]
    (path / "step-000000002/forgotten").write_text("another")


@pytest.mark.parametrize("change", CHANGES)
def test_what_others_change_is_seen_at_once(tmp_path: Path, settled: Callable[[], None], change: str) -> None:
    for step in (1, 2, 3):
        _save(tmp_path, step)
    settled()
    reader = Store(tmp_path)
    assert reader.steps() == [1, 2, 3]
    id = reader.manifest(2).id
    hurt, steps = CHANGES[change]
    hurt(tmp_path)
    assert reader.steps() == steps
    assert list(reader.scan().manifests) == list(Store(tmp_path).scan().manifests)
    assert reader.scan().keys == Store(tmp_path).scan().keys
    if 2 in steps:
        assert (reader.manifest(2).id == id) == (change != "saved again")
        assert reader.list() == Store(tmp_path).list()


def test_a_link_that_is_gone_is_seen(tmp_path: Path, settled: Callable[[], None]) -> None:
    """Pruning the base then would cost the delta."""
    with Store(tmp_path) as store:
        store.save(1, state(1))
        store.save(2, state(2))
        settled()
        assert store.prune(Keep(last=1)).keep == (1, 2)
        (link,) = (tmp_path / "step-000000002/bases").iterdir()
        link.unlink()
        plan = store.prune(Keep(last=1), dry_run=False)
        assert not plan.keys
        assert difference(store.load(2), state(2)) is None


def test_a_second_change_within_one_tick_of_the_clock_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(LocalStorage, "stamp", lambda storage, key: (1, now, now, 1))
    with Store(tmp_path, keyframe_every=1) as store:
        store.save(1, state(1))
        id = store.list()[0].id
        store.save(1, state(2))
        assert store.list()[0].id != id


@pytest.mark.parametrize("kind", [LocalStorage, MemoryStorage, Linkless])
def test_saves_and_restores_read_as_many_manifests_in_large_stores_as_in_small_ones(
    kind: type[Storage], tmp_path: Path
) -> None:
    seen = []
    for count in (6, 24):
        counts, names = Counting(), (tmp_path / str(count),) if kind is LocalStorage else ()
        storage = counts.of(kind)(*names)
        with Store(storage, keyframe_every=4) as store:
            for step in range(1, count + 1):
                store.save(step, {"w": torch.full((3,), float(step))})
            scans, manifests = counts.scans, []
            uses: list[tuple[Callable[..., object], tuple[object, ...]]] = [
                (store.save, (count + 1, {"w": torch.ones(3)})),
                (store.load, (count,)),
                (store.load, ()),
                (store.forget, (count,)),
                (store.has_checkpoint, ()),
                (store.restore, ()),
            ]
            for use, arguments in uses:
                counts.manifests.clear()
                use(*arguments)
                manifests.append(len(counts.manifests))
            seen.append((manifests, counts.scans - scans))
    assert seen[0] == seen[1]
    assert max(seen[0][0]) <= 2


def test_merging_lists_a_store_once(tmp_path: Path) -> None:
    counts = Counting()
    with Store(counts.of(MemoryStorage)()) as store:
        for step in range(1, 9):
            store.save(step, state(step))
        for step in (2, 4, 6):
            store.forget(step)
        counts.scans = 0
        store.compact()
        assert counts.scans <= 2
        store.prune(dry_run=False)
        assert store.steps() == [1, 3, 5, 7, 8]
        for step in store.steps():
            assert difference(store.load(step, keep=False), state(step)) is None


def test_a_restore_tells_of_directories_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shrinkpoint.errors import StorageError

    class Failing(LocalStorage):
        def list(self, prefix: str = "") -> list[str]:
            if prefix.startswith("step-000000002"):
                raise StorageError(self.describe(prefix), found="listing failed", do="look there")
            return super().list(prefix)

    for step in (1, 2):
        _save(tmp_path, step)
    result = Store(Failing(tmp_path)).restore()
    assert (result.step, [skipped.step for skipped in result.skipped]) == (1, [2])


def test_removed_checkpoints_are_gone_for_a_store_that_is_open(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        remove(store.storage, 3)
        assert store.manifest().step == 2
        assert store.restore().step == 2
