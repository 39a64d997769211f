"""forget, prune and compact: what goes, what stays, and what it costs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.stores import PLACES_AND_BUCKET, flip, payloads, place, remove, state, stored_bytes
from helpers.strategies import difference

from shrinkpoint.errors import NotFoundError, PolicyError, StorageError, VersionError
from shrinkpoint.storage import MemoryStorage, Storage
from shrinkpoint.store import Keep, Store, layout
from shrinkpoint.store import manifest as manifests


@pytest.fixture(params=PLACES_AND_BUCKET)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return place(request.param, tmp_path / "store")


def saved(storage: Storage, *steps: int, every: int = 3) -> Store:
    store = Store(storage, keyframe_every=every)
    for step in steps:
        store.save(step, state(step), metrics={"val_loss": 10.0 - step})
    return store


def assert_whole(store: Store, *steps: int) -> None:
    assert list(store.steps()) == list(steps)
    for step in steps:
        assert difference(store.load(step, keep=False), state(step)) is None
    assert store.verify(deep=True) == []


def test_forgetting_hides_and_pruning_deletes(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3, 4)
    store.forget(3)
    store.forget(1)
    assert_whole(store, 2, 4)
    with pytest.raises(NotFoundError, match="step 3 is forgotten"):
        store.load(3)
    store.forget(3)  # again is as good as once
    plan = store.prune(dry_run=False)
    assert plan.delete == (3,)
    assert plan.reasons[1] == ("base of step 2",)
    assert_whole(store, 2, 4)
    with pytest.raises(NotFoundError, match=r"no checkpoint of step 3.*one of 2, 4"):
        store.load(3)
    with pytest.raises(NotFoundError):
        store.forget(3)


def test_a_forgotten_step_that_is_saved_again_is_there_again(storage: Storage) -> None:
    store = saved(storage, 1, 2)
    store.forget(2)
    store.save(2, state(2))
    assert_whole(store, 1, 2)


def test_a_dry_run_says_what_the_run_then_does(storage: Storage) -> None:
    store = saved(storage, *range(1, 10))
    before = storage.list()
    plan = store.prune(Keep(last=2, best=1, every=4))
    assert storage.list() == before
    assert plan == store.prune(Keep(last=2, best=1, every=4), dry_run=False)
    assert plan.delete == (1, 2, 3, 5, 6)
    assert plan.keep == (4, 7, 8, 9)
    assert plan.reasons[8] == ("one of the last 2", "a multiple of 4", "base of step 9")
    assert_whole(store, 4, 7, 8, 9)
    assert store.prune(Keep(last=2, best=1, every=4)).keys == ()


def test_freed_bytes_are_those_the_disk_gets_back(tmp_path: Path) -> None:
    store = saved(place("local", tmp_path), *range(1, 8))
    for keep in (Keep(every=5), Keep(last=1)):
        before = stored_bytes(store.storage)
        plan = store.prune(keep, dry_run=False)
        assert plan.bytes == before - stored_bytes(store.storage) > 0


def test_a_file_with_another_name_elsewhere_frees_nothing(tmp_path: Path) -> None:
    store = saved(place("local", tmp_path / "store"), 1, 2, every=1)
    os.link(tmp_path / "store" / payloads(store.storage, 1)[0], tmp_path / "mine")
    size = (tmp_path / "store" / "step-000000001" / "manifest.json").stat().st_size
    assert store.prune(Keep(last=1)).bytes == size


@pytest.mark.parametrize("forgotten", [(), (6, 7)])
@pytest.mark.parametrize("kind", ["memory", "linkless"])
def test_freed_bytes_without_a_file_system(kind: str, forgotten: tuple[int, ...]) -> None:
    """Links free nothing: what the forgotten ones link to stays for the checkpoint before them."""
    store = saved(place(kind, Path()), *range(1, 8))
    for step in forgotten:
        store.forget(step)
    sizes = {key: len(store.storage.get(key)) for key in store.storage.list()}
    store.prune(Keep(last=1), dry_run=False)
    plan = {key for key in sizes if key not in store.storage.list()}
    counted = [key for key in plan if "/bases/" not in key]
    fresh = saved(place(kind, Path()), *range(1, 8))
    for step in forgotten:
        fresh.forget(step)
    assert fresh.prune(Keep(last=1)).bytes == pytest.approx(sum(sizes[key] for key in counted), abs=20)


def test_broken_checkpoints_stay_until_they_are_forgotten(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3, every=1)
    flip(storage, "step-000000002/manifest.json", 30)
    left = storage.list("step-000000002/")
    store.prune(Keep(last=1), dry_run=False)
    assert storage.list("step-000000002/") == left
    assert [one.step for one in store.verify()] == [2]
    store.forget(2)
    assert store.prune(dry_run=False).delete == (2,)
    assert storage.list("step-000000002/") == []
    assert_whole(store, 3)


def test_nothing_is_deleted_beside_what_a_newer_release_wrote(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "FORMAT", 4)
        saved(storage, 1).close()
    store = saved(storage, 2, 3, every=1)
    assert store.steps() == [2, 3]
    assert [(one.step, "format 4" in one.problem) for one in store.verify()] == [(1, True)]
    with pytest.raises(VersionError):
        store.prune(Keep(last=1), dry_run=False)


def test_nothing_is_deleted_while_a_manifest_cannot_be_read() -> None:
    class Moody(MemoryStorage):
        moody = False

        def open(self, key: str):  # type: ignore[no-untyped-def]
            if self.moody and key.startswith("step-000000002/manifest"):
                raise StorageError(key, found="reading failed", do="look there")
            return super().open(key)

        def link(self, source: str, target: str) -> bool:
            return False

    storage = Moody()
    store = saved(storage, 1, 2, 3)
    store.save(1, state(11))  # now 2 and 3 stand on a payload that only their manifests tell of
    before = storage.list()
    storage.moody = True
    with pytest.raises(StorageError):
        store.prune(Keep(last=1), dry_run=False)
    store.save(4, state(4))
    assert set(before) <= set(storage.list())
    storage.moody = False
    assert difference(store.load(2), state(2)) is None


def test_a_delta_becomes_a_keyframe_in_place(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3)
    before = store.manifest(2)
    (report,) = store.compact(2)
    after = store.manifest(2)
    assert report.keyframe
    assert after.depth == 0
    assert (after.id, after.created, after.metrics) == (before.id, before.created, before.metrics)
    assert_whole(store, 1, 2, 3)
    assert store.compact(2) == []
    remove(storage, 1) if storage.describe().startswith("/") else None
    assert difference(store.load(2), state(2)) is None
    assert difference(store.load(3), state(3)) is None
    store.compact()
    assert [base.step for base in store.manifest(3).bases] == [2]
    assert_loads_only_below(store)


def assert_loads_only_below(store: Store) -> None:
    """No step stands on anything but checkpoints that are shown, and nothing is left over."""
    shown = store.scan().visible
    for made in shown.values():
        assert all(base.step in shown and shown[base.step].digest == base.digest for base in made.bases)
    assert store.scan().orphans() == []
    assert store.verify(deep=True) == []


def test_the_next_delta_goes_on_from_what_was_compacted(storage: Storage) -> None:
    store = saved(storage, 1, 2, every=9)
    store.compact(2)
    store.save(3, state(3))
    assert [base.step for base in store.manifest(3).bases] == [2]
    assert_whole(store, 1, 2, 3)


def test_a_run_of_deltas_merges_when_its_middle_is_forgotten(storage: Storage) -> None:
    store = saved(storage, *range(1, 8), every=7)
    for step in (2, 3, 5, 6):
        store.forget(step)
    assert len(store.compact()) == 2  # 4 and 7
    assert {one.step: [base.step for base in one.bases] for one in store.list()} == {1: [], 4: [1], 7: [1, 4]}
    assert store.prune(dry_run=False).delete == (2, 3, 5, 6)
    assert_whole(store, 1, 4, 7)
    assert_loads_only_below(store)
    assert store.compact() == []


def test_when_the_keyframe_is_forgotten_the_next_step_becomes_one(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3)
    store.forget(1)
    store.compact()
    store.prune(dry_run=False)
    assert [one.depth for one in store.list()] == [0, 1]
    assert_whole(store, 2, 3)


def test_what_does_not_load_is_not_compacted(storage: Storage) -> None:
    store = saved(storage, 1, 2)
    flip(storage, payloads(storage, 2)[0])
    before = storage.list()
    with pytest.raises(Exception, match="digest"):
        store.compact(2)
    assert storage.list() == before


def test_prune_counts_what_it_frees_after_the_process_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store("runs", keyframe_every=1) as store:
        for step in (1, 2):
            store.save(step, state(step))
        expected = store.prune(Keep(last=1)).bytes
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert store.prune(Keep(last=1), dry_run=False).bytes == expected > 0


@pytest.mark.parametrize("step", ["1", 1.5, True, None])
def test_forgetting_what_is_no_step_is_refused(step: object) -> None:
    with pytest.raises(PolicyError, match="step"):
        saved(MemoryStorage(), 1).forget(step)  # type: ignore[arg-type]


def test_a_checkpoint_whose_id_has_a_lone_surrogate_is_forgotten() -> None:
    storage = MemoryStorage()
    with saved(storage, 1) as store:
        manifest = store.manifest(1)
    storage.put(layout.manifest_key(1), manifests.encode_store_manifest(replace(manifest, id="\ud800")))
    store = Store(storage)
    assert difference(store.load(1, keep=False), state(1)) is None
    store.forget(1)
    assert list(store.steps()) == []
