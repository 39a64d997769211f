"""What a store promises a training run."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mutations import canonical
from helpers.stores import PLACES_AND_BUCKET, flip, payloads, place, remove, state
from helpers.strategies import difference

import shrinkpoint as sp
import shrinkpoint.store.store as store_module
from shrinkpoint._native import xxh3_128
from shrinkpoint.container import FileReader
from shrinkpoint.errors import (
    ChainError,
    CorruptError,
    LockedError,
    NotFoundError,
    PolicyError,
    StorageError,
)
from shrinkpoint.storage import LocalStorage, Storage
from shrinkpoint.store import Keep, Store, chain_limit, decode
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, MAX_NOTE
from shrinkpoint.tensors.flat_state import flatten, snapshot


@pytest.fixture(params=PLACES_AND_BUCKET)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return place(request.param, tmp_path / "store")


def saved(storage: Storage, *steps: int, **options: Any) -> Store:
    store = Store(storage, **options)
    for step in steps:
        store.save(step, state(step))
    return store


def assert_loads(store: Store, *steps: int) -> None:
    for step in steps:
        assert difference(store.load(step, keep=False), state(step)) is None


# saving and loading


def test_every_checkpoint_of_a_chain_comes_back(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3, 4, 5, keyframe_every=3)
    assert [one.depth for one in store.list()] == [0, 1, 2, 0, 1]
    assert_loads(store, 1, 2, 3, 4, 5)
    assert_loads(Store(storage), 1, 2, 3, 4, 5)
    assert difference(store.load(), state(5)) is None
    assert store.verify(deep=True) == []


@pytest.mark.parametrize(("keyframe_every", "is_bounded"), [(20, True), (None, False)])
def test_a_chain_ends_where_a_restore_would_read_four_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyframe_every: int | None, is_bounded: bool
) -> None:
    monkeypatch.setattr(chain_limit, "MIN_CHAIN_BYTES", 0)
    store = Store(tmp_path, keyframe_every=keyframe_every)
    for step in range(12):
        store.save(step, {"w": torch.randn(20_000, generator=torch.Generator().manual_seed(step))})
    manifests = store.list()
    for manifest in manifests:
        before = sum(base.size for base in manifest.bases)
        assert before < 4 * manifest.raw_bytes or not is_bounded
    assert (max(manifest.depth for manifest in manifests) < 11) == is_bounded
    assert manifests[1].depth == 1  # a few deltas are no reason


def test_small_states_have_chains_of_any_size(tmp_path: Path) -> None:
    store = saved(LocalStorage(tmp_path), *range(12))
    assert [one.depth for one in store.list()] == [*range(12)]


def test_a_store_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    store = Store(tmp_path / "not" / "yet")
    assert store.steps() == []
    assert store.verify(deep=True) == []
    assert not (tmp_path / "not").exists()
    for ask in (store.load, store.restore, store.manifest):
        with pytest.raises(NotFoundError, match="no checkpoint"):
            ask()


def test_a_fresh_process_writes_a_keyframe_and_a_resumed_one_a_delta(storage: Storage) -> None:
    saved(storage, 1).close()
    with saved(storage, 2) as store:
        assert store.manifest(2).depth == 0
    with Store(storage) as store:
        store.load()
        store.save(3, state(3))
        assert [base.step for base in store.manifest(3).bases] == [2]
        store.save(4, state(4), keyframe=True)
        assert store.manifest(4).depth == 0
    assert_loads(Store(storage), 1, 2, 3, 4)


def test_a_delta_needs_its_base(storage: Storage) -> None:
    """Else most tests of this folder would prove little."""
    store = saved(storage, 1, 2)
    with storage.open(payloads(storage, 2)[0]) as source:
        records = {info.name: head for head in FileReader(source, "here").records for info in head.infos}
    assert all(records[name].base for name in ("model/w", "model/frozen"))
    assert store.manifest(2).stored_bytes < store.manifest(1).stored_bytes


def test_an_unchanged_tensor_costs_its_bytes_once(storage: Storage) -> None:
    store, one = Store(storage), state(1)
    one["base model"] = torch.randn(100_000)
    first, second = store.save(1, one), store.save(2, one)
    assert first.stored_bytes > 200_000
    assert second.stored_bytes < 10_000


@pytest.mark.parametrize("adopt", [False, True])
def test_what_the_caller_does_to_its_tensors_after_a_save_is_not_seen(storage: Storage, adopt: bool) -> None:
    store, live = Store(storage), state(0)
    for step in (1, 2, 3):
        store.save(step, snapshot(flatten(live)) if adopt else live, adopt=adopt)
        live["model"]["w"].add_(1.0)
    assert store.manifest(3).depth == 2
    expected = state(0)
    for step in (1, 2, 3):
        assert difference(store.load(step), expected) is None
        expected["model"]["w"].add_(1.0)


def test_what_the_caller_does_to_loaded_tensors_is_not_seen(storage: Storage) -> None:
    saved(storage, 1).close()
    store = Store(storage)
    live = store.load()
    live["model"]["w"].zero_()
    live["model"]["frozen"].zero_()
    store.save(2, live)
    assert store.manifest(2).depth == 1
    assert difference(store.load(2), live) is None
    assert_loads(store, 1)


def test_a_state_of_another_shape_may_follow(storage: Storage) -> None:
    store = saved(storage, 1)
    grown = {"model": {"w": torch.ones(9), "frozen": torch.ones(2, dtype=torch.int8)}}
    store.save(2, grown)
    store.save(3, state(3))
    assert difference(store.load(2), grown) is None
    assert_loads(store, 1, 3)


def test_loading_for_mere_reading_leaves_the_next_delta_alone(storage: Storage) -> None:
    store = saved(storage, 1, 2)
    store.load(1, keep=False)
    store.save(3, state(3))
    assert store.manifest(3).bases[-1].step == 2


def count_loads(monkeypatch: pytest.MonkeyPatch, *, fail_after: int | None = None) -> list[str]:
    """Grows by an entry whenever a store decodes a chain; after so many, files are damaged."""
    loads, original = list[str](), store_module.decode_chain

    def counted(*args: Any, **kwargs: Any) -> Any:
        loads.append("load")
        if fail_after is not None and len(loads) > fail_after:
            raise CorruptError("a file", found="damage", do="look there")
        return original(*args, **kwargs)

    monkeypatch.setattr(store_module, "decode_chain", counted)
    return loads


def test_a_save_after_a_load_is_a_delta_for_which_the_state_is_decoded_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(storage, 1, 2).close()
    store, loads = Store(storage), count_loads(monkeypatch)
    loaded = store.load(2)
    loaded["model"]["w"].zero_()  # which is the caller's alone
    assert len(loads) == 1
    store.save(3, state(3))
    assert len(loads) == 2 and store.manifest(3).bases[-1].step == 2
    store.save(4, state(4))
    assert len(loads) == 2
    assert_loads(store, 2, 3, 4)


def test_a_save_after_a_load_is_a_keyframe_where_the_state_cannot_be_decoded_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(storage, 1, 2).close()
    store, loads = Store(storage), count_loads(monkeypatch, fail_after=1)
    store.load(2)
    store.save(3, state(3))
    assert len(loads) == 2
    assert store.manifest(3).bases == ()
    store.save(4, state(4))
    assert store.manifest(4).bases[-1].step == 3
    monkeypatch.undo()
    assert_loads(store, 1, 2, 3, 4)


def test_two_states_at_most_are_in_memory_while_a_chain_is_walked(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[Any] = []
    most = []
    original = decode.decode_records

    def watched(*args: Any, **kwargs: Any) -> Any:
        most.append(sum(one() is not None for one in alive))
        decoded = original(*args, **kwargs)
        alive.append(weakref.ref(decoded.reference.tensors["model/w"]))
        return decoded

    store = saved(storage, 1, 2, 3, 4, 5, 6)
    monkeypatch.setattr(decode, "decode_records", watched)
    store.load()
    store.load()
    assert most == [0, 1, 1, 1, 1, 1] * 2


def test_a_device_that_is_not_there_is_an_error_of_ours(storage: Storage) -> None:
    store = saved(storage, 1)
    with pytest.raises(PolicyError, match="device"):
        store.load(device="no such device")
    assert store.load(device="meta")["model"]["w"].is_meta


def test_a_step_saved_again_replaces_the_old_one(storage: Storage) -> None:
    store = saved(storage, 1, 2, 3)
    store.save(2, state(7))
    assert store.steps() == [1, 2, 3]
    assert difference(store.load(2), state(7)) is None
    assert_loads(store, 1, 3)
    store.save(2, state(2))
    assert_loads(store, 1, 2, 3)
    remove(storage, 3)
    store.save(4, state(4))
    store.close()
    assert saved(storage, 5).verify(deep=True) == []
    assert len(payloads(storage, 2)) == 1, "what nothing stands on any more is swept"


def test_metrics_and_notes_come_back(storage: Storage) -> None:
    store = Store(storage)
    store.save(
        1, state(1), metrics={"val_loss": torch.tensor(1.5), "bad": math.nan}, note="hand-made", lossy_restores=2
    )  # type: ignore[dict-item]
    made = Store(storage).manifest()
    assert made.metrics["val_loss"] == 1.5
    assert math.isnan(made.metrics["bad"])
    assert (made.note, made.lossy_restores, made.scheme) == ("hand-made", 2, "lossless")
    assert made.raw_bytes == sum(t.nbytes for t in flatten(state(1)).tensors.values())


@pytest.mark.parametrize("step", [-1, 1.5, "1", None, True, 10**15])
def test_a_step_that_is_none_is_refused(step: Any) -> None:
    store = Store(place("memory", Path()))
    with pytest.raises(PolicyError, match="step"):
        store.save(step, state(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"note": None},
        {"note": 5},
        {"note": "x" * (MAX_NOTE + 1)},
        {"lossy_restores": -1},
        {"lossy_restores": 1.5},
        {"lossy_restores": True},
        {"metrics": {"x" * MAX_MANIFEST_BYTES: 1.0}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_a_reader_would_refuse_is_not_written(storage: Storage, wrong: Any) -> None:
    store = Store(storage)
    store.save(1, state(1))
    with pytest.raises(PolicyError, match=r"note|lossy_restores|manifest"):
        store.save(2, state(2), **wrong)
    store.save(3, state(3), note="\ud800" * MAX_NOTE)  # as many bytes as a note may take
    store.close()
    again = Store(storage)
    assert again.steps() == [1, 3] and again.verify(deep=True) == []
    assert len(again.manifest().note) == MAX_NOTE


# one after another


def test_two_writers_cannot_save_and_readers_never_wait(storage: Storage) -> None:
    first, second = saved(storage, 1), Store(storage)
    assert_loads(second, 1)
    assert second.verify(deep=True) == []
    for write in (
        lambda: second.save(2, state(2)),
        lambda: second.forget(1),
        lambda: second.prune(dry_run=False),
        lambda: second.compact(),
    ):
        with pytest.raises(LockedError):
            write()
    second.prune()  # a dry run only reads
    first.close()
    second.save(2, state(2))
    second.close()
    first.save(3, state(3))
    assert first.steps() == [1, 2, 3]


@pytest.mark.parametrize("gone", ["run", "lock"])
def test_a_writer_whose_lock_was_deleted_takes_it_again_or_is_refused(tmp_path: Path, gone: str) -> None:
    """Somebody begins a new run in a directory that was emptied, and the old run is still there."""

    def delete() -> None:
        if gone == "run":
            shutil.rmtree(tmp_path / "run")
        else:
            (tmp_path / "run" / ".shrinkpoint-lock").unlink()

    first, second = saved(LocalStorage(tmp_path / "run"), 1), Store(tmp_path / "run")
    delete()
    first.save(2, state(2))
    with pytest.raises(LockedError):
        second.save(3, state(3))
    delete()
    second.save(3, state(3))
    with pytest.raises(LockedError):
        first.save(4, state(4))
    second.close()
    first.save(4, state(4))
    for step in (3, 4):
        assert_loads(first, step)


def test_what_an_interrupted_save_left_is_no_checkpoint_and_is_swept(storage: Storage) -> None:
    saved(storage, 1, 2).close()
    storage.delete("step-000000002/manifest.json")
    storage.put("step-000000001/rank-00000.7.safetensors", b"left behind")
    storage.put("step-000000001/notes.txt", b"a person's own")
    storage.put("readme", b"a person's own")
    store = Store(storage)
    assert store.steps() == [1]
    assert all(one.loads for one in store.verify())
    assert [one.step for one in store.verify()] == [None] * len(store.verify())
    store.save(3, state(3))
    assert store.verify(deep=True) == []
    assert storage.list("step-000000002") == []
    assert storage.get("readme") == storage.get("step-000000001/notes.txt") == b"a person's own"
    assert_loads(store, 1, 3)


def test_a_pending_checkpoint_that_is_not_committed_never_was(storage: Storage) -> None:
    store = saved(storage, 1)
    with store.begin(2) as pending:
        pending.add(flatten(state(2)), scheme=_lossless())
        with pytest.raises(PolicyError, match="second payload"):
            pending.add(flatten(state(2)), scheme=_lossless())
        assert store.steps() == [1]
    assert storage.list("step-000000002") == []
    with pytest.raises(PolicyError, match="closed"):
        pending.commit()
    with store.begin(3) as pending, pytest.raises(PolicyError, match="no payload"):
        pending.commit()
    with store.begin(4) as pending:
        pending.add(flatten(state(4)), scheme=_lossless())
        made = pending.commit(metrics={"val_loss": 2.0})
    assert store.manifest(4) == made
    assert_loads(store, 1, 4)


def test_one_checkpoint_is_in_the_making_at_a_time(storage: Storage) -> None:
    store = saved(storage, 1, 2)
    store.forget(1)
    pending = store.begin(3)
    pending.add(flatten(state(3)), scheme=_lossless())
    for other in (lambda: store.save(3, state(3)), lambda: store.prune(dry_run=False), store.compact):
        with pytest.raises(PolicyError, match="step 3 is not committed yet"):
            other()
    pending.commit()
    store.prune(dry_run=False)
    assert_loads(store, 2, 3)


def _lossless() -> Any:
    from shrinkpoint import Lossless

    return Lossless()


# what goes missing


def test_deleting_older_directories_by_hand(tmp_path: Path) -> None:
    storage = place("local", tmp_path)
    store = saved(storage, 1, 2, 3, 4, 5)
    for step in (1, 2, 3, 4):
        remove(storage, step)
    assert_loads(store, 5)
    assert [(one.step, one.loads) for one in store.verify(deep=True)] == [(1, True), (2, True), (3, True), (4, True)]
    store.save(6, state(6))
    assert [base.step for base in store.manifest(6).bases] == [1, 2, 3, 4, 5]
    store.compact()
    assert [one.depth for one in store.list()] == [0, 1]
    assert store.verify(deep=True) == []
    assert_loads(store, 5, 6)


def test_a_directory_copied_elsewhere_loads_alone(tmp_path: Path) -> None:
    import shutil

    saved(place("local", tmp_path / "a"), 1, 2, 3)
    shutil.copytree(tmp_path / "a" / "step-000000003", tmp_path / "b" / "step-000000003")
    assert_loads(Store(tmp_path / "b"), 3)


def test_without_links_a_missing_base_is_an_error_that_names_it() -> None:
    storage = place("linkless", Path())
    store = saved(storage, 1, 2, 3, 4, keyframe_every=2)
    store.save(5, state(5), keyframe=True)
    store.save(6, state(6))
    remove(storage, 5)
    with pytest.raises(ChainError) as caught:
        store.load(6)
    for part in ("step-000000005/rank-00000.safetensors", "no such file", "base of step 6", "verify"):
        assert part in str(caught.value)
    at = store.restore()
    assert (at.step, [one.step for one in at.skipped]) == (4, [6])
    assert "step 5" in at.skipped[0].reason
    assert [(one.step, one.loads) for one in store.verify()] == [(6, False)]
    store.save(7, state(7))
    assert_loads(store, 7)


def test_a_base_that_was_exchanged_is_an_error_that_tells_both_digests() -> None:
    storage = place("linkless", Path())
    store = saved(storage, 1, 2)
    other = saved(place("memory", Path()), 9)
    storage.put("step-000000001/rank-00000.safetensors", other.storage.get("step-000000009/rank-00000.safetensors"))
    with pytest.raises(ChainError) as caught:
        store.load(2)
    assert other.manifest(9).digest in caught.value.found
    assert store.manifest(2).bases[0].digest in caught.value.expected


def test_restore_walks_back_and_says_what_it_skipped(storage: Storage) -> None:
    saved(storage, 1, 2, 3, 4, 5, 6, keyframe_every=1).close()
    flip(storage, "step-000000006/manifest.json", 20)
    flip(storage, payloads(storage, 5)[0], -1)
    flip(storage, payloads(storage, 4)[0], 100)
    storage.delete(payloads(storage, 3)[0])
    store = Store(storage)
    at = store.restore()
    assert at.step == at.manifest.step == 2
    assert difference(at.state, state(2)) is None
    assert [one.step for one in at.skipped] == [6, 5, 4, 3]
    assert all(one.reason for one in at.skipped)
    assert sorted(one.step or 0 for one in store.verify()) == [3, 4, 5, 6]
    store.save(7, state(7))  # beside the ruins, and not on them
    assert store.manifest(7).bases[-1].step == 2
    assert_loads(store, 1, 2, 7)
    remove(storage, 1)
    remove(storage, 2)
    remove(storage, 7)
    with pytest.raises(NotFoundError, match=r"no checkpoint that loads.*step 6.*step 5.*step 4.*step 3"):
        store.restore()


def test_a_delta_is_not_made_against_a_parent_that_was_damaged_or_deleted(storage: Storage) -> None:
    store = saved(storage, 1)
    flip(storage, payloads(storage, 1)[0], 100)
    store.save(2, state(2))
    assert store.manifest(2).depth == 0
    remove(storage, 2)
    store.save(3, state(3))
    assert store.manifest(3).depth == 0


def test_flipped_bytes_of_a_step_are_found(tmp_path: Path) -> None:
    """Every fifth byte; `container/test_damage.py` and `test_manifest.py` have every byte."""
    storage = place("memory", tmp_path)
    small = {"w": torch.arange(3.0), "n": 1}
    store = Store(storage)
    store.save(1, {"w": torch.zeros(3), "n": 0})
    store.save(2, small)
    for key in storage.list("step-000000002/"):
        data = storage.get(key)
        for place_ in range(0, len(data), 5):
            storage.put(key, data[:place_] + bytes([data[place_] ^ 0x10]) + data[place_ + 1 :])
            assert any(one.step == 2 for one in store.verify()), f"{key} byte {place_}"
            at = store.restore(keep=False)
            assert at.step == 1 or difference(at.state, small) is None
        storage.put(key, data)
    assert store.verify(deep=True) == []


def test_deep_verification_reads_a_file_after_the_bases_that_its_own_manifest_names(tmp_path: Path) -> None:
    """The newest chain decodes the file of step 1 as well, but after a base that the manifest of step 1 leaves out."""
    store = saved(LocalStorage(tmp_path), 0, 1, 2)
    path = tmp_path / "step-000000001" / "manifest.json"
    document = json.loads(path.read_text()) | {"bases": []}
    del document["digest"]
    path.write_bytes(canonical({**document, "digest": xxh3_128(canonical(document))}))
    assert {finding.step for finding in store.verify(deep=True) if not finding.loads} == {1}
    with pytest.raises(ChainError, match="a delta without its base"):
        store.load(1)


@pytest.mark.parametrize("target", ["directory", "nothing", "other run"])
def test_directory_of_a_step_that_is_a_link_is_refused_and_named(tmp_path, target):
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    with Store(run) as store:
        store.save(4, state(4))
    if target == "other run":
        with Store(other) as store:
            store.save(5, state(50))
    place = {"directory": other, "nothing": tmp_path / "gone", "other run": other / "step-000000005"}[target]
    (run / "step-000000005").symlink_to(place)
    before = sorted((path, path.stat().st_ino) for path in other.rglob("*"))
    with Store(run) as store:
        with pytest.raises(StorageError, match="step-000000005: a symbolic link"):
            store.save(5, state(5))
        assert sorted((path, path.stat().st_ino) for path in other.rglob("*")) == before
        assert not (tmp_path / "gone").exists()
        (finding,) = store.verify()
        assert (finding.step, "a symbolic link" in finding.problem) == (5, True)
        with pytest.raises(CorruptError, match="a symbolic link"):
            store.load(5)
        restored = store.restore()
        assert (restored.step, [skipped.step for skipped in restored.skipped]) == (4, [5])
        store.save(6, state(6))
        store.prune(Keep(last=1), dry_run=False)
        assert sorted((path, path.stat().st_ino) for path in other.rglob("*")) == before


@pytest.mark.parametrize("name", ["manifest.json", "bases", "forgotten"])
def test_nothing_is_written_through_a_link_in_a_step(tmp_path, name):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with Store(tmp_path / "run") as store:
        store.save(4, state(4))
        place = tmp_path / "run" / "step-000000005"
        place.mkdir()
        (place / name).symlink_to(foreign if name == "bases" else foreign / name)
        with pytest.raises(StorageError, match=f"{name}: a symbolic link"):
            store.save(5, state(5))
            store.forget(5)
        assert [*foreign.iterdir()] == []


def test_run_directory_that_is_a_link_is_followed(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    with Store(tmp_path / "run") as store:
        store.save(1, state(1))
        store.save(2, state(2))
        assert store.verify(deep=True) == []
    assert [*Store(tmp_path / "scratch").steps()] == [1, 2]


def test_mirror_is_not_written_through_a_link(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "step-000000001").symlink_to(tmp_path / "foreign")
    manager = sp.CheckpointManager(tmp_path / "run", mirror=tmp_path / "mirror")
    manager.save(1, extra=state(1), rng=False)
    with pytest.raises(StorageError, match="a symbolic link"):
        manager.flush()
    with pytest.raises(StorageError, match="a symbolic link"):
        manager.close()
    assert [*(tmp_path / "foreign").iterdir()] == []


def test_directory_of_a_framework_that_is_a_link_is_refused(tmp_path):
    from shrinkpoint.train import Checkpointer

    (tmp_path / "foreign").mkdir()
    (tmp_path / "last").symlink_to(tmp_path / "foreign")
    with Checkpointer() as checkpointer, pytest.raises(StorageError, match="last: a symbolic link"):
        checkpointer.save(tmp_path / "last", state(1))
    assert [*(tmp_path / "foreign").iterdir()] == []
