"""A mirror is a valid store at every moment, and has what its store has in the end."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import pytest
import torch
from helpers.faulty_storage import FaultyStorage
from helpers.stores import Linkless, flip, place, remove, state
from helpers.strategies import difference

from shrinkpoint import CheckpointManager
from shrinkpoint.errors import PolicyError, StorageError
from shrinkpoint.storage import LocalStorage, MemoryStorage, Storage
from shrinkpoint.store import Keep, Store, layout, scan
from shrinkpoint.store import manifest as manifests
from shrinkpoint.store.mirror import Mirror, select_missing


class CheckedStorage(Linkless):
    """After each write and each deletion, every checkpoint it lists has all of its files, and is what it was.

    Attributes:
        log: what was written and deleted, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self.check(f"put {key}")

    @contextmanager
    def create(self, key: str) -> Iterator:
        assert key not in self.list(), f"{key} is written over"
        with super().create(key) as sink:
            yield sink
        self.check(f"create {key}")

    def delete(self, key: str) -> None:
        super().delete(key)
        self.check(f"delete {key}")

    def check(self, entry: str) -> None:
        self.log.append(entry)
        findings = [finding for finding in Store(self).verify() if not finding.loads]
        assert not findings, (self.log, findings)


def catch_up(mirror: Mirror) -> list[int]:
    """Copy what is missing; returns the steps in the order in which they were copied."""
    copied = []
    mirror.begin()
    while missing := mirror.missing():
        if mirror.copy(missing[0]):
            copied.append(missing[0].step)
        mirror.tidy()
    mirror.tidy()
    return copied


def shift_clock(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    """Let checkpoints that are saved from now on say that it is so many hours later."""
    time = datetime.now(timezone.utc) + timedelta(hours=hours)
    monkeypatch.setattr(manifests, "utc_timestamp", lambda: time.isoformat(timespec="milliseconds"))


def assert_same(store: Storage, mirror: Storage) -> None:
    """The checkpoints that are shown are the same in both, and load with the same values; nothing is left over."""
    first, second = Store(store), Store(mirror)
    assert [*first.steps()] == [*second.steps()]
    for step in first.steps():
        assert difference(first.load(step, keep=False), second.load(step, keep=False)) is None
    assert scan(mirror).orphans() == []


def names(log: list[str]) -> list[str]:
    """What was written: "3" for the payload of step 3, "3!" for its manifest; "-3" and "-3!" where it was deleted."""
    out = []
    for entry in log:
        kind, _, key = entry.partition(" ")
        suffix = "!" if key.endswith(layout.MANIFEST) else "?" if key.endswith(layout.FORGOTTEN) else ""
        out.append(f"{'-' if kind == 'delete' else ''}{layout.step_of(key)}{suffix}")
    return out


@pytest.mark.parametrize("kind", ["local", "memory", "linkless"])
def test_oldest_first_and_payloads_before_manifests(tmp_path, kind):
    source, target = place(kind, tmp_path), CheckedStorage()
    with Store(source, keyframe_every=3) as store:
        for step in range(1, 6):
            store.save(step, state(step))
    assert catch_up(Mirror(source, target)) == [1, 2, 3, 4, 5]
    assert names(target.log) == ["1", "1!", "2", "2!", "3", "3!", "4", "4!", "5", "5!"]
    assert_same(source, target)
    target.log.clear()
    assert catch_up(Mirror(source, target)) == []
    assert target.log == []


def test_what_was_copied_is_one_file_each_and_bit_for_bit(tmp_path):
    source, target = LocalStorage(tmp_path / "store"), LocalStorage(tmp_path / "mirror")
    with Store(source) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
    catch_up(Mirror(source, target))
    payloads = [key for key in target.list() if "rank" in key]
    assert target.list() == sorted([*payloads, *(layout.manifest_key(step) for step in (1, 2, 3))])
    assert [target.get(key) for key in payloads] == [source.get(key) for key in payloads]


def test_step_saved_again_replaces_the_copy_and_deltas_keep_their_base(tmp_path):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    mirror = Mirror(source, target)
    with Store(source) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        catch_up(mirror)
        for seed in (10, 20, 30):
            store.save(2, state(seed))
            assert catch_up(mirror) == [2]
            assert_same(source, target)


def test_base_that_the_store_only_has_as_a_link_is_copied(tmp_path):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    with Store(source) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        store.save(2, state(20))
        remove(source, 1)
    assert catch_up(Mirror(source, target)) == [2, 3]
    assert_same(source, target)


@pytest.mark.parametrize("gone", [(1,), (1, 2), (2,)])
def test_what_was_deleted_from_a_mirror_is_copied_again(tmp_path, gone):
    source, target = LocalStorage(tmp_path / "store"), LocalStorage(tmp_path / "mirror")
    mirror = Mirror(source, target)
    with Store(source) as store:
        for step in (1, 2):
            store.save(step, state(step))
        catch_up(mirror)
        store.save(3, state(3))
        missing = mirror.missing()
        for step in gone:
            remove(target, step)
        assert mirror.copy(missing[0])
        for manifest in mirror.missing():
            mirror.copy(manifest)
    assert_same(source, target)


def test_forgotten_checkpoints_are_hidden_and_go_when_nothing_needs_them(tmp_path):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    mirror = Mirror(source, target)
    with Store(source) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        store.forget(1)
        catch_up(mirror)  # a base that is not shown is copied without its manifest
        assert_same(source, target)
        store.save(4, state(4))
        catch_up(mirror)
        store.forget(4)
        catch_up(mirror)
        assert_same(source, target)
        assert "-4!" in names(target.log)
        store.compact()
        catch_up(mirror)
        assert_same(source, target)
        assert not [key for key in target.list() if layout.step_of(key) == 1]


def test_mirror_keeps_what_its_rules_keep_and_bases_of_that(tmp_path):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    mirror = Mirror(source, target, Keep(last=2))
    with Store(source, keyframe_every=3) as store:
        for step in range(1, 9):
            store.save(step, state(step))
            catch_up(mirror)
            store.prune(Keep(last=2), dry_run=False)
    assert_same(source, target)
    assert [*Store(target).steps()] == [7, 8]


def test_what_retention_has_deleted_before_it_was_copied_is_left_out(tmp_path):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    mirror = Mirror(source, target, Keep(last=1))
    mirror.begin()
    with Store(source, keyframe_every=2) as store:
        store.save(1, state(1))
        (first,) = mirror.missing()
        for step in (2, 3, 4, 5, 6):
            store.save(step, state(step))
        store.prune(Keep(last=1), dry_run=False)
        assert not mirror.copy(first)  # it has gone since
        assert catch_up(mirror) == [5, 6]
    assert_same(source, target)


def test_new_machine_deletes_nothing_but_what_the_rules_say(tmp_path):
    first, second, target = LocalStorage(tmp_path / "1"), LocalStorage(tmp_path / "2"), CheckedStorage()
    with Store(first) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
    catch_up(Mirror(first, target))
    with Store(second) as store:
        store.save(4, state(4))
    catch_up(Mirror(second, target))
    assert [*Store(target).steps()] == [1, 2, 3, 4]
    catch_up(Mirror(second, target, Keep(last=2)))
    assert [*Store(target).steps()][-2:] == [3, 4]


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_of_two_checkpoints_of_a_step_the_later_one_is_copied(tmp_path, monkeypatch, hours):
    first, second, target = LocalStorage(tmp_path / "1"), LocalStorage(tmp_path / "2"), CheckedStorage()
    for storage, seeds in ((first, (1, 2, 3)), (second, (1, 20))):
        with Store(storage) as store:
            for step, seed in enumerate(seeds, 1):
                store.save(step, state(seed))
        shift_clock(monkeypatch, hours)
    catch_up(Mirror(first, target))
    assert catch_up(Mirror(second, target)) == [1, 2]
    assert difference(Store(target).load(2), state(20)) is None
    assert difference(Store(target).load(3), state(3)) is None
    assert catch_up(Mirror(first, target)) == []
    with Store(first) as store:
        store.save(2, state(200))
    assert catch_up(Mirror(first, target)) == [2]
    assert catch_up(Mirror(second, target)) == []
    assert difference(Store(target).load(2), state(200)) is None


@pytest.mark.parametrize("hours", [-1, 1])
def test_step_saved_again_is_copied_again_whatever_the_clock_says(tmp_path, monkeypatch, hours):
    manager = CheckpointManager(tmp_path / "1", mirror=tmp_path / "2")
    manager.save(5, extra=state(5), rng=False)
    manager.flush()
    shift_clock(monkeypatch, hours)
    for seed in (50, 51):
        manager.save(5, extra=state(seed), rng=False)
        manager.flush()
        assert manager.mirror_lag == 0
        assert difference(Store(tmp_path / "2").load(5)["extra"], state(seed)) is None
    manager.close()
    shutil.rmtree(tmp_path / "1")
    restored = CheckpointManager(tmp_path / "1", mirror=tmp_path / "2").restore()
    assert restored is not None
    assert difference(restored.extra, state(51)) is None


def test_payload_whose_manifest_is_missing_is_not_copied_twice(tmp_path):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    with Store(source) as store:
        store.save(1, state(1))
        store.save(2, state(2))
    catch_up(Mirror(source, target))
    MemoryStorage.delete(target, layout.manifest_key(2))  # as if the process had been killed before it
    target.log.clear()
    assert catch_up(Mirror(source, target)) == [2]
    assert names(target.log) == ["2!"]


def test_other_bytes_under_a_name_are_not_written_over(tmp_path):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    with Store(source) as store:
        store.save(1, state(1))
    MemoryStorage.put(target, "step-000000001/rank-00000.safetensors", b"foreign")
    assert catch_up(Mirror(source, target)) == [1]
    assert target.log[0] == "create step-000000001/rank-00000.2.safetensors"
    assert_same(source, target)


def test_damaged_checkpoint_is_not_copied_and_holds_up_no_other(tmp_path, caplog):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    with Store(source, keyframe_every=2) as store:
        for step in range(1, 5):
            store.save(step, state(step))
    flip(source, "step-000000002/rank-00000.safetensors", 3000)
    assert catch_up(Mirror(source, target)) == [1, 3, 4]
    assert "step 2 is not copied" in caplog.text
    assert Store(target).verify(deep=True) == []


def test_rule_by_a_metric_that_nothing_has_deletes_nothing(tmp_path):
    source, target = LocalStorage(tmp_path), CheckedStorage()
    with Store(source, keyframe_every=1) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        mirror = Mirror(source, target, Keep(best=1))
        catch_up(mirror)
        assert [*Store(target).steps()] == [1, 2, 3]
        store.save(4, state(4), metrics={"val_loss": 1.0})
        catch_up(mirror)
        assert [*Store(target).steps()] == [4]


def test_older_checkpoints_than_the_rules_keep_are_not_copied(tmp_path):
    source = LocalStorage(tmp_path)
    with Store(source, keyframe_every=1) as store:
        for step in range(1, 6):
            store.save(step, state(step))
    content, now = scan(MemoryStorage()), datetime.now(timezone.utc)
    missing = select_missing(scan(source), content, Keep(last=1, every=2), now)
    assert [manifest.step for manifest in missing] == [2, 4, 5]


@pytest.mark.parametrize("url", [False, True])
def test_mirror_within_its_store_is_refused(tmp_path, s3, url):
    outer, inner = ("s3://checkpoints/run", "s3://checkpoints/run/mirror") if url else (tmp_path, tmp_path / "mirror")
    for where, mirror in ((outer, inner), (inner, outer), (outer, outer)):
        with pytest.raises(PolicyError, match="expected a place outside of the store"):
            Mirror(Store(where).storage, Store(mirror).storage)


class Cut(Exception):
    """A copy ends here."""


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_any_sequence_of_operations_and_cuts_leaves_a_valid_mirror(tmp_path, seed):
    choose = random.Random(seed)
    source, target, keep = (
        LocalStorage(tmp_path),
        CheckedStorage(),
        choose.choice([None, Keep(last=2, every=3), Keep(last=3, moments_last=1)]),
    )
    mirror = Mirror(source, target, keep)
    mirror.begin()

    def cut(entry: str, countdown: list[int]) -> None:
        CheckedStorage.check(target, entry)
        countdown[0] -= 1
        if countdown[0] == 0:
            raise Cut

    with Store(source, keyframe_every=choose.choice([3, None]), threads=1) as store:
        for number in range(1, 25):
            steps = [*store.steps()]
            action = choose.choice(["save", "save", "save", "again", "forget", "prune", "compact"])
            if action == "save" or not steps:
                store.save(max(steps, default=0) + 1, state(number))
            elif action == "again":
                store.save(choose.choice(steps), state(number))
            elif action == "forget" and len(steps) > 1:
                store.forget(choose.choice(steps[:-1]))
            elif action == "prune":
                store.prune(keep or Keep(last=4), dry_run=False)
            elif action == "compact":
                store.compact()
            if choose.random() < 0.3:
                continue
            countdown = [choose.randrange(1, 5)]
            target.check = lambda entry, countdown=countdown: cut(entry, countdown)
            try:
                catch_up(mirror)
            except Cut:
                mirror = Mirror(source, target, keep)
                mirror.begin()
        target.check = lambda entry: CheckedStorage.check(target, entry)
        catch_up(mirror)
        for step in store.steps():
            assert difference(store.load(step, keep=False), Store(target).load(step, keep=False)) is None


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_any_call_that_fails_leaves_a_valid_mirror_that_is_caught_up_with(tmp_path, late):
    source, keep = LocalStorage(tmp_path), Keep(last=2)
    first = Linkless()
    with Store(source, keyframe_every=2, threads=1) as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
        catch_up(Mirror(source, first, keep))
        store.save(3, state(30))
        for step in (4, 5):
            store.save(step, state(step))
    for fail_at in range(1, 1000):
        target = CheckedStorage()
        target._objects = dict(first._objects)
        faulty = FaultyStorage(target, fail_at, late=late)
        try:
            catch_up(Mirror(source, faulty, keep))
        except StorageError:
            assert faulty.calls >= fail_at
        else:
            break
        catch_up(Mirror(source, target, keep))
        assert [*Store(target).steps()] == [3, 4, 5]
        assert scan(target).orphans() == []
    assert fail_at > 20


def test_large_payload_is_copied_from_a_source_of_any_kind(s3, tmp_path):
    data = {"noise": torch.randint(0, 256, (20 << 20,), dtype=torch.uint8)}
    urls = [f"s3://checkpoints/{tmp_path.name}/{name}" for name in ("store", "mirror")]
    with Store(urls[0]) as store:
        store.save(1, data)
    s3.clear()
    catch_up(Mirror(Store(urls[0]).storage, Store(urls[1]).storage))
    assert sum("uploadId" in path and method == "PUT" for method, path, _ in s3.requests()) >= 3
    assert difference(Store(urls[1]).load(), data) is None


def test_checkpoints_that_became_weights_only_do_so_in_the_mirror() -> None:
    storage, target = MemoryStorage(), CheckedStorage()
    with Store(storage, keyframe_every=3, threads=1) as store:
        for step in range(1, 5):
            store.save(step, state(step))
        mirror = Mirror(storage, target, Keep(last=3, moments_last=1))
        catch_up(mirror)
        plan = store.prune(Keep(last=3, moments_last=1), dry_run=False)
        assert (plan.delete, plan.weights_only) == ((1,), (2, 3))
        catch_up(mirror)
        assert_same(storage, target)
        assert [manifest.weights_only for manifest in Store(target).list()] == [True, True, False]
