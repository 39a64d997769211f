"""Whatever is refused, damaged or interrupted, a subscriber's model is as it was, and goes on from there."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from helpers.faulty_storage import FaultyStorage
from helpers.live_weights import assert_same, stepped, weights, zeros_like
from torch import Tensor, nn

from shrinkpoint.errors import (
    ChainError,
    CorruptError,
    FormatError,
    LockedError,
    MismatchError,
    PolicyError,
    ShrinkpointError,
    StateError,
    StorageError,
    VersionError,
)
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store.manifest import dump_with_digest
from shrinkpoint.sync import Publisher, Subscriber
from shrinkpoint.sync.published import KEY, Published, VersionFile
from shrinkpoint.tensors.dtypes import as_bits


def change_name(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"model." + name: tensor for name, tensor in state.items()}


def change_shape(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"matrix": torch.zeros(300, 299, dtype=torch.bfloat16)}


def change_dtype(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"matrix": state["matrix"].float()}


def make_meta(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"matrix": state["matrix"].to("meta")}


def expand(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"matrix": torch.zeros(1, 300, dtype=torch.bfloat16).expand(300, 300)}


def step_by_one(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state | {"matrix": torch.zeros(599, dtype=torch.bfloat16).as_strided((300, 300), (1, 1))}


def overlap(state: dict[str, Tensor]) -> dict[str, Tensor]:
    memory = torch.zeros(301)
    return state | {"bias": memory[:300], "second": memory[1:]}


@pytest.mark.parametrize("change", [change_name, change_shape, change_dtype, make_meta, expand, step_by_one])
def test_another_model_is_refused_and_stays_as_it_is(change):
    storage, state = MemoryStorage(), weights()
    live = change(zeros_like(state))
    with Publisher(storage) as publisher:
        publisher.publish(state)
    with pytest.raises(MismatchError):
        Subscriber(storage).update(live)
    assert all(tensor.is_meta or not as_bits(tensor).any() for tensor in live.values())


def test_a_model_whose_tensors_overlap_in_part_is_refused():
    storage, state = MemoryStorage(), weights()
    state["second"] = torch.ones(300)
    with Publisher(storage) as publisher:
        publisher.publish(state)
    with pytest.raises(MismatchError, match="share a part"):
        Subscriber(storage).update(overlap(zeros_like(state)))


def test_a_model_whose_tensors_are_conjugated_when_they_are_read_is_refused():
    storage, numbers = MemoryStorage(), torch.ones(3, dtype=torch.complex64)
    with Publisher(storage) as publisher:
        publisher.publish({"w": numbers.conj(), "v": numbers.conj().imag})
    live = {"w": numbers.conj(), "v": torch.ones(3)}, {"w": numbers.clone(), "v": numbers.conj().imag}
    for state in live:
        with pytest.raises(MismatchError, match="is a view; expected tensors that can be written to"):
            Subscriber(storage).update(state)


def test_a_module_whose_state_dict_is_a_copy_is_refused():
    class Copied(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"].clone()

    storage, served = MemoryStorage(), Copied(4, 4)
    with Publisher(storage) as publisher:
        publisher.publish(served)
    with pytest.raises(MismatchError, match="a copy of 'weight'"):
        Subscriber(storage).update(served)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_plain_tensor_is_refused():
    class Sharded(Tensor):
        pass

    storage = MemoryStorage()
    sharded = torch.zeros(3).as_subclass(Sharded)
    with Publisher(storage) as publisher:
        nested = torch.nested.nested_tensor([torch.zeros(3)])
        models = (
            ({"w": sharded}, "Sharded"),
            ({"w": [1]}, "a list"),
            ({"w": nested}, "a nested"),
            ({1: sharded}, "name 1"),
        )
        with pytest.raises(PolicyError, match="single floating-point values"):
            Publisher(MemoryStorage(), dtype=torch.float4_e2m1fn_x2)
        for model, found in models:
            with pytest.raises(StateError, match=found):
                publisher.publish(model)  # type: ignore[arg-type]
        with pytest.raises(PolicyError):
            publisher.publish([1])  # type: ignore[arg-type]
        publisher.publish({"w": torch.zeros(3)})
    for tensor in (sharded, nested, torch.eye(3).to_sparse()):
        with pytest.raises(StateError):
            Subscriber(storage).update({"w": tensor})


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "other"])
def test_damage_leaves_the_model_as_it_is_and_a_keyframe_mends_it(tmp_path: Path, damage: str):
    state = weights()
    live = zeros_like(state)
    subscriber = Subscriber(tmp_path)
    with Publisher(tmp_path) as publisher:
        publisher.publish(state)
        subscriber.update(live)
        before = {name: tensor.clone() for name, tensor in live.items()}
        state = stepped(state, 1)
        publisher.publish(state)
        path = tmp_path / "version-000000000001-from-000000000000.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 64
        if damage == "remove":
            path.unlink()
        else:
            other = (tmp_path / "version-000000000000.safetensors").read_bytes()
            path.write_bytes({"flip": data, "cut": data[:-1], "other": other}[damage])
        with pytest.raises(ShrinkpointError) as raised:
            subscriber.update(live)
        assert isinstance(raised.value, ChainError | FormatError | KeyError)
        assert_same(live, before)
        assert subscriber.version == 0
        state = stepped(state, 2)
        publisher.publish(state, keyframe=True)
        subscriber.update(live)
        assert_same(live, state)


def test_a_damaged_last_version_does_not_stop_a_publisher(tmp_path: Path):
    state = weights()
    with Publisher(tmp_path) as publisher:
        publisher.publish(state)
    path = tmp_path / "version-000000000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with Publisher(tmp_path) as publisher:
        assert publisher.publish(state).keyframe_bytes is not None
    live = zeros_like(state)
    Subscriber(tmp_path).update(live)
    assert_same(live, state)


def test_every_call_of_a_storage_may_fail_and_subscribers_go_on():
    state = weights(size=40)

    def publish_all(storage: FaultyStorage, live: dict[str, Tensor], subscriber: Subscriber) -> int:
        failures, now = 0, state
        with Publisher(storage, keep=2, keyframe_every=3) as publisher:  # type: ignore[arg-type]
            for seed in range(6):
                now = stepped(now, seed)
                try:
                    publisher.publish(now)
                except StorageError:
                    failures += 1
                    publisher.publish(now)
                subscriber.update(live)
                assert_same(live, now)
        return failures

    count = FaultyStorage(MemoryStorage())
    publish_all(count, zeros_like(state), Subscriber(count.inner))
    seen = 0
    for late in (False, True):
        for fail_at in range(4 + late, count.calls + 1, 2):  # half of them before, half after their effect
            faulty = FaultyStorage(MemoryStorage(), fail_at, late=late)
            seen += publish_all(faulty, zeros_like(state), Subscriber(faulty.inner))
    assert seen > 10


def test_an_answer_that_was_lost_begins_another_series():
    """The list of versions may have been replaced although its writer was told otherwise."""
    state, live = {"w": torch.randn(50, 50)}, {"w": torch.zeros(50, 50)}
    faulty = FaultyStorage(MemoryStorage())
    subscriber = Subscriber(faulty.inner)
    with Publisher(faulty) as publisher:  # type: ignore[arg-type]
        publisher.publish(state)
        before = faulty.calls
        publisher.publish(state)
        put = next(number for number, call in enumerate(faulty.log[before:], 1) if call.startswith("put"))
        faulty.late, faulty.fail_at = True, faulty.calls + put
        with pytest.raises(StorageError):
            publisher.publish({"w": state["w"] * 2})
        subscriber.update(live)
        assert torch.equal(live["w"], state["w"] * 2)
        assert publisher.publish(state).keyframe_bytes is not None
        subscriber.update(live)
    assert torch.equal(live["w"], state["w"])


def test_an_interrupt_while_the_model_is_written_gives_it_back(monkeypatch: pytest.MonkeyPatch):
    from shrinkpoint.sync.live_writes import TensorWrite

    storage, state = MemoryStorage(), {f"w{index}": torch.randn(500) for index in range(6)}
    live = zeros_like(state)
    with Publisher(storage) as publisher:
        publisher.publish(state)
    subscriber = Subscriber(storage)
    write, count = TensorWrite.write, 0

    def interrupted(self: TensorWrite) -> None:
        nonlocal count
        count += 1
        write(self)
        if count == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(TensorWrite, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        subscriber.update(live)
    assert count == 4 and not any(tensor.any() for tensor in live.values()) and subscriber.version is None
    monkeypatch.undo()
    assert subscriber.update(live) is not None
    assert_same(live, state)


def test_what_somebody_else_wrote_into_the_model_is_replaced():
    storage, state = MemoryStorage(), weights()
    live = zeros_like(state)
    with Publisher(storage) as publisher:
        publisher.publish(state)
        subscriber = Subscriber(storage)
        subscriber.update(live)
        live["matrix"].fill_(1)
        publisher.publish(stepped(state, 1))
        subscriber.update(live)
    assert_same(live, stepped(state, 1))


def test_a_model_that_is_built_anew_or_overwritten_gets_the_version_that_was_applied():
    storage, state = MemoryStorage(), {"weight": torch.randn(256, 256)}
    with Publisher(storage) as publisher:
        publisher.publish(state)
    subscriber = Subscriber(storage)
    for _ in range(12):  # one of them lies where one before it did
        live = zeros_like(state)
        assert subscriber.update(live) is not None
        assert subscriber.update(live) is None
        assert_same(live, state)
        del live
    model = nn.Linear(4, 4)
    with Publisher(other := MemoryStorage()) as publisher:
        publisher.publish(published := nn.Linear(4, 4))
    subscriber = Subscriber(other)
    subscriber.update(model)
    model.load_state_dict(nn.Linear(4, 4).state_dict())
    assert subscriber.update(model) is not None
    assert_same(model.state_dict(), published.state_dict())


def test_tensors_of_inference_mode_are_followed_too():
    storage, state = MemoryStorage(), weights()
    with torch.inference_mode():
        live = zeros_like(state)
    with Publisher(storage) as publisher:
        publisher.publish(state)
    Subscriber(storage).update(live)
    assert_same(live, state)


def test_waiting_ends_with_a_version_or_with_the_time():
    storage, state = MemoryStorage(), weights()
    live = zeros_like(state)
    subscriber = Subscriber(storage, poll=0.01)
    assert subscriber.update(live, wait=0.05) is None
    with Publisher(storage) as publisher:
        timer = threading.Timer(0.1, publisher.publish, [state])
        timer.start()
        update = subscriber.update(live, wait=60)
        assert update is not None and update.version == 0
        timer.join()
        threading.Timer(0.1, publisher.publish, [stepped(state, 1)]).start()
        versions = [update.version for update in subscriber.follow(live, wait=1)]
    assert versions == [1]


def test_a_place_that_was_begun_again_is_followed(tmp_path: Path):
    state = weights()
    live = zeros_like(state)
    subscriber = Subscriber(tmp_path)
    for seed in (1, 2):
        with Publisher(tmp_path) as publisher:
            publisher.publish(stepped(state, seed))
        update = subscriber.update(live)
        assert update is not None and update.version == 0
        assert_same(live, stepped(state, seed))
        for path in tmp_path.iterdir():
            path.unlink()
    assert subscriber.update(live) is None


@pytest.mark.parametrize("gone", ["*", KEY, "version-000000000000.*"])
def test_a_publisher_whose_files_were_deleted_goes_on_with_a_keyframe(tmp_path: Path, gone: str):
    state = weights()
    live = zeros_like(state)
    subscriber = Subscriber(tmp_path)
    with Publisher(tmp_path) as publisher:
        for seed in range(4):
            state = stepped(state, seed)
            report = publisher.publish(state)
            assert (report.keyframe_bytes is None) == (seed in (1, 3))
            assert_same(live if subscriber.update(live) else {}, state)
            if seed == 1:
                for path in tmp_path.glob(gone):
                    path.unlink()
        Subscriber(tmp_path).update(joined := zeros_like(state))
    assert_same(joined, state)


def test_a_publisher_whose_place_another_one_has_taken_publishes_nothing_more(tmp_path: Path):
    place, state = tmp_path / "weights", weights()
    with Publisher(place) as publisher:
        publisher.publish(state)
        shutil.rmtree(place)
        with Publisher(place) as other:
            other.publish(state)
            with pytest.raises(LockedError):
                publisher.publish(state)
        assert publisher.publish(state).keyframe_bytes is not None


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"files": []},
        {"files": [[0, -1, 5, "0" * 31]]},
        {"files": [[0, -1, 5, "0" * 32], [0, -1, 5, "0" * 32]]},
        {"files": [[0, 0, 5, "0" * 32]]},
        {"files": [[1, 0, 5, "0" * 32]]},
        {"files": [[0, -2, 5, "0" * 32]]},
        {"files": [[0, -1, -5, "0" * 32]]},
        {"files": [[0, -1, 5]]},
        {"version": 1.0},
        {"version": 10**12, "files": [[10**12, -1, 5, "0" * 32]]},
        {"id": 3},
    ],
    ids=json.dumps,
)
def test_a_damaged_list_is_an_error_of_the_tree(document):
    good = {"format": 1, "id": "ab", "version": 0, "files": [[0, -1, 5, "0" * 32]]}
    storage = MemoryStorage()
    bad = good | document if document else {"format": 1}
    storage.put(KEY, dump_with_digest(bad))
    with pytest.raises(CorruptError):
        Subscriber(storage).latest()
    storage.put(KEY, dump_with_digest(good))
    assert Subscriber(storage).latest() == 0
    storage.put(KEY, dump_with_digest(good)[:-5])
    with pytest.raises(FormatError):
        Subscriber(storage).latest()
    storage.put(KEY, dump_with_digest(good | {"format": 4}))
    with pytest.raises(VersionError, match="or a newer one"):
        Subscriber(storage).latest()


def test_a_list_without_a_way_to_the_newest_version_is_a_chain_error():
    storage = MemoryStorage()
    document = {"format": 1, "id": "ab", "version": 2, "files": [[2, 1, 5, "0" * 32]]}
    storage.put(KEY, dump_with_digest(document))
    with pytest.raises(ChainError, match="no keyframe"):
        Subscriber(storage).update({"w": torch.zeros(1)})


def test_many_ways_take_the_memory_of_the_files_that_are_named():
    count = 2000
    deltas = (VersionFile(version, version - 1, 5, "0" * 32) for version in range(1, count))
    keyframes = (VersionFile(version, -1, 9, "0" * 32) for version in range(count))
    published = Published("ab", count - 1, (*keyframes, *deltas))
    tracemalloc.start()
    try:
        first, second = itertools.islice(published.routes(None), 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [key for file in first for key in file.keys] == ["version-000000001999.safetensors"]
    assert [(file.version, file.base) for file in second] == [(1998, -1), (1999, 1998)]
    assert peak < 2000 * count


def test_a_limit_on_memory_holds():
    storage, state = MemoryStorage(), {"w": torch.zeros(1 << 20)}
    with Publisher(storage) as publisher:
        publisher.publish(state)
    live = {"w": torch.ones(1 << 20)}
    with pytest.raises(CorruptError, match="max_bytes"):
        Subscriber(storage, max_bytes=1 << 20).update(live)
    assert live["w"].all()
    assert Subscriber(storage).update(live) is not None
