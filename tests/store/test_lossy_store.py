"""A lossy store: what a reader gets is what the writer thinks it gets, through every way a checkpoint can go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.codebooks import Rounding
from helpers.lattice_records import same_reference
from helpers.round_trip import Loop
from helpers.stores import Linkless, flip, payloads, place, remove
from helpers.strategies import difference

from shrinkpoint import Lossless
from shrinkpoint.errors import ChainError, FormatError
from shrinkpoint.storage import MemoryStorage, Storage
from shrinkpoint.store import Keep, Store
from shrinkpoint.tensors.flat_state import flatten, snapshot

SCHEME = Rounding()

pytestmark = pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning")  # test_progress.py has them


@pytest.fixture(params=["local", "linkless"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return place(request.param, tmp_path / "store")


def states(count: int, **options: Any) -> list[dict[str, Any]]:
    loop = Loop(**options)
    return [loop.steps(3) for _ in range(count)]


def saved(storage: Storage, count: int, **options: Any) -> tuple[Store, dict[int, Any]]:
    """A store of lossy checkpoints, and what a reader must get of each."""
    store, expected = Store(storage, **options), {}
    for step, state in enumerate(states(count), 1):
        store.save(step, state, scheme=SCHEME)
        expected[step] = SCHEME.expected(state)
    return store, expected


def assert_loads(store: Store, expected: dict[int, Any]) -> None:
    for step, state in expected.items():
        assert difference(store.load(step, keep=False), state) is None, step


def read(storage: Storage, step: int | None = None) -> Any:
    """The reference that a reader which knows nothing gets."""
    fresh = Store(storage)
    fresh.load(step)
    return fresh.reference


def assert_law_3(store: Store, step: int | None = None) -> None:
    """A reference is always a decoded value: the writer's is the reader's."""
    assert store.reference is not None
    assert same_reference(store.reference, read(store.storage, step))


# saving and loading


def test_every_checkpoint_of_a_lossy_chain_comes_back(storage: Storage) -> None:
    store, expected = saved(storage, 5, keyframe_every=3)
    assert [one.depth for one in store.list()] == [0, 1, 2, 0, 1]
    assert all(one.is_lossy and one.scheme == "rounding" for one in store.list())
    assert_loads(store, expected)
    assert_loads(Store(storage), expected)
    assert store.verify(deep=True) == []


@pytest.mark.parametrize("adopt", [False, True])
def test_the_writer_holds_what_a_reader_gets_whatever_came_before(storage: Storage, adopt: bool) -> None:
    store, loop = Store(storage, keyframe_every=3), Loop()
    schemes = [SCHEME, SCHEME, Lossless(), SCHEME, replace(SCHEME, bins=5), Rounding(("model/", "optim")), SCHEME]
    for step, scheme in enumerate(schemes):
        state = loop.steps(1)
        store.save(step, snapshot(flatten(state)) if adopt else state, scheme=scheme, adopt=adopt)
        assert_law_3(store)
        assert difference(store.load(keep=False), scheme.expected(state) if scheme.id == "rounding" else state) is None


def test_a_lossless_save_of_lossy_values_holds_none_of_the_callers_memory(storage: Storage) -> None:
    """It writes nothing of the weights, and goes on with their symbols: training goes on in place meanwhile."""
    store = Store(storage)
    store.save(1, Loop().steps(1), scheme=SCHEME)
    state = store.load()
    store.save(2, state)
    expected = store.load(keep=False)
    for x in flatten(state).tensors.values():
        x.add_(1 if not x.is_floating_point() else 0.01)
    assert_law_3(store)
    store.save(3, state, scheme=SCHEME)
    assert_loads(Store(storage), {2: expected, 3: SCHEME.expected(state)})


def test_saves_after_a_restore_and_of_a_step_again_stand_on_what_is_there(storage: Storage) -> None:
    store, expected = saved(storage, 3)
    later = states(6)
    store.load(2)
    store.save(3, later[3], scheme=SCHEME)
    assert store.manifest(3).bases[-1].step == 2
    assert_law_3(store)
    store.save(3, later[4], scheme=SCHEME)
    assert_law_3(store)
    fresh = Store(storage)
    store.close()
    assert fresh.restore().step == 3
    fresh.save(4, later[5], scheme=SCHEME)
    assert fresh.manifest(4).bases[-1].step == 3
    assert_law_3(fresh)
    assert_loads(Store(storage), {1: expected[1], 2: expected[2], 3: SCHEME.expected(later[4])})
    assert fresh.verify(deep=True) == []


def test_a_delta_costs_less_than_a_keyframe_and_far_less_than_the_weights(storage: Storage) -> None:
    store = Store(storage)
    reports = [
        store.save(step, {"model": state["model"]}, scheme=SCHEME) for step, state in enumerate(states(3, width=900))
    ]
    assert [one.keyframe for one in reports] == [True, False, False]
    assert reports[1].roles["parameter"].stored < 0.5 * reports[0].roles["parameter"].stored
    assert reports[0].weights_ratio > 8 and reports[1].weights_ratio > 20


def test_the_manifest_says_what_was_lost() -> None:
    store = Store(MemoryStorage())
    loss = {"chosen": {"bins": 8}, "tried": [1, 2.5], "degradation": float("nan"), "worst": [float("inf")]}
    report = store.save(1, Loop().steps(1), scheme=replace(SCHEME, loss=loss))
    assert report.loss_report == loss
    assert store.manifest(1).loss == {**loss, "degradation": "nan", "worst": ["inf"]}
    store.save(2, Loop().steps(2))
    assert store.manifest(2).loss is None and not store.manifest(2).is_lossy


# tidying


def sizes(store: Store) -> dict[int, int]:
    return {one.step: one.stored_bytes for one in store.list()}


def test_a_lossy_delta_made_a_keyframe_stays_what_it_was_and_as_small_as_one(storage: Storage) -> None:
    store, expected = saved(storage, 4)
    before = [store.manifest(step) for step in (1, 3)]
    held = read(storage, 3)
    (report,) = store.compact(3)
    after = store.manifest(3)
    assert (after.id, after.scheme, after.loss) == (before[1].id, before[1].scheme, before[1].loss)
    assert after.depth == 0 and report.scheme == "rounding"
    assert after.stored_bytes < 1.3 * before[0].stored_bytes
    assert same_reference(read(storage, 3), held)
    assert_loads(Store(storage), expected)
    store.save(5, Loop().steps(9), scheme=SCHEME)
    assert_law_3(store)
    assert store.verify(deep=True) == []


def test_merged_lossy_deltas_stay_what_they_were(storage: Storage) -> None:
    store, expected = saved(storage, 6)
    before = sizes(store)
    references = {step: read(storage, step) for step in expected}
    for step in (2, 3, 5):
        store.forget(step)
        expected.pop(step)
    assert len(store.compact()) == 2
    store.prune(dry_run=False)
    assert_loads(Store(storage), expected)
    assert all(same_reference(read(storage, step), references[step]) for step in expected)
    assert all(size < 1.6 * before[1] for size in sizes(store).values())
    assert [one.depth for one in store.list()] == [0, 1, 2]
    assert store.verify(deep=True) == []


def test_a_store_goes_on_from_what_it_holds_after_that_was_compacted(storage: Storage) -> None:
    """The values of step 3 are those of step 1: what is merged onto it becomes a reference to it, symbols and all."""
    loop = Loop()
    store, first = Store(storage), loop.steps(1)
    for step, bins in ((1, 8), (2, 9), (3, 8)):
        store.save(step, first, scheme=replace(SCHEME, bins=bins))
    store.forget(2)
    store.compact()
    assert store.manifest(3).depth == 1
    assert_law_3(store, 3)
    last = loop.steps(1)
    store.save(4, last, scheme=SCHEME)
    assert store.manifest(4).bases[-1].step == 3
    assert_loads(Store(storage), {1: SCHEME.expected(first), 3: SCHEME.expected(first), 4: SCHEME.expected(last)})


def test_pruned_lossy_checkpoints_leave_the_others_whole(storage: Storage) -> None:
    store, expected = saved(storage, 6, keyframe_every=3)
    store.prune(Keep(last=1, every=3), dry_run=False)
    assert_loads(Store(storage), {step: state for step, state in expected.items() if step in store.steps()})
    assert 6 in store.steps() and store.verify(deep=True) == []


def test_a_lossy_chain_whose_base_is_gone_is_named_and_the_one_before_restored() -> None:
    storage = Linkless()
    store, expected = saved(storage, 3, keyframe_every=2)
    store.save(4, states(4)[3], scheme=SCHEME)
    remove(storage, 3)
    with pytest.raises(ChainError):
        Store(storage).load(4)
    back = Store(storage).restore()
    assert back.step == 2 and difference(back.state, expected[2]) is None


# damage


def test_flipped_bytes_and_prefixes_of_a_lossy_file_are_found() -> None:
    """Every fifth of each; `container/test_damage.py` has every byte."""
    storage = MemoryStorage()
    loop = Loop(width=5)
    store = Store(storage)
    for step in (1, 2):
        store.save(step, {"model": loop.steps(1)["model"]}, scheme=SCHEME)
    (key,) = payloads(storage, 2)
    whole = storage.get(key)
    for at in range(0, len(whole), 5):
        flip(storage, key, at)
        with pytest.raises(FormatError):
            Store(storage).load(2)
        storage.put(key, whole[:at])
        with pytest.raises(FormatError):
            Store(storage).load(2)
        storage.put(key, whole)
    Store(storage).load(2)


def test_a_failed_lossy_save_leaves_the_one_before_and_the_next_goes_on_from_it(storage: Storage) -> None:
    store, expected = saved(storage, 2)

    class Broken(Rounding):
        def encode(self, *args: Any, **kwargs: Any) -> Any:
            yield from list(super().encode(*args, **kwargs))[:2]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(3, states(3)[2], scheme=Broken())
    assert store.steps() == [1, 2]
    assert_law_3(store)
    last = states(4)[3]
    store.save(3, last, scheme=SCHEME)
    assert_loads(Store(storage), {**expected, 3: SCHEME.expected(last)})
    assert store.verify(deep=True) == []
