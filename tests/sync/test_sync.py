"""A subscriber's model has the bits of the newest version, whatever it missed; else it is as it was."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from helpers.faulty_storage import FaultyStorage
from torch import Tensor, nn

import shrinkpoint as sp
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
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.store.manifest import dump_with_digest
from shrinkpoint.sync import Publisher, Subscriber
from shrinkpoint.sync.published import KEY, Published
from shrinkpoint.tensors.dtypes import as_bits

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.complex64,
]


def weights(seed: int = 0, size: int = 300) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator).bfloat16()
    return {"matrix": matrix, "bias": torch.randn(size, generator=generator), "count": torch.tensor(seed)}


def stepped(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Some of the values changed a little, as training does."""
    generator = torch.Generator().manual_seed(seed)
    moved = torch.rand(state["matrix"].shape, generator=generator) < 0.01
    bits = state["matrix"].view(torch.int16)
    matrix = torch.where(moved, bits + 1, bits).view(torch.bfloat16)
    return {"matrix": matrix, "bias": state["bias"] * 1.0001, "count": state["count"] + 1}


def zeros_like(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def assert_same(live: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    assert live.keys() == state.keys()
    for name, tensor in state.items():
        assert live[name].dtype == tensor.dtype and live[name].shape == tensor.shape
        assert torch.equal(as_bits(live[name].contiguous()), as_bits(tensor.contiguous())), name


def test_a_model_follows_every_version_in_its_own_memory(tmp_path: Path):
    torch.manual_seed(0)
    trained, served = nn.Linear(64, 64), nn.Linear(64, 64)
    addresses = [parameter.data_ptr() for parameter in served.parameters()]
    with Publisher(tmp_path) as publisher:
        subscriber = Subscriber(tmp_path)
        assert subscriber.latest() is None and subscriber.update(served) is None and subscriber.version is None
        for version in range(4):
            with torch.no_grad():
                trained.weight[version] += 1
            report = publisher.publish(trained)
            assert report.version == version and (report.delta_bytes is None) == (version == 0)
            update = subscriber.update(served)
            assert update is not None and (update.version, update.previous) == (
                version,
                version - 1 if version else None,
            )
            assert_same(served.state_dict(), trained.state_dict())
            assert version == 0 or update.changed == 64
        assert subscriber.update(served) is None
    assert [parameter.data_ptr() for parameter in served.parameters()] == addresses
    assert served.weight.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype):
    def make(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(-100, 100, (40, 33), generator=generator).to(torch.float32)
        values = bits.to(dtype)
        return {
            "matrix": values,
            "scalar": values[0, 0].clone(),
            "empty": values[:0].clone(),
            "transposed": values.t(),
            "strided": values[:, ::2],
            "flags": bits > seed,
        }

    storage = MemoryStorage()
    live = make(7)
    live |= {"transposed": live["matrix"].t().clone(memory_format=torch.preserve_format)}
    live |= {"strided": torch.zeros_like(live["matrix"]).clone()[:, ::2]}
    with Publisher(storage) as publisher:
        subscriber = Subscriber(storage)
        for seed in range(3):
            publisher.publish(make(seed))
            subscriber.update(live)
            assert_same(live, make(seed))


def test_nan_payloads_and_negative_zeros_come_back():
    storage, bits = MemoryStorage(), torch.tensor([0x7FC1, -0x8000, 0, 0x7F80, -1], dtype=torch.int16)
    live = {"w": torch.zeros(5, dtype=torch.bfloat16)}
    with Publisher(storage) as publisher:
        publisher.publish({"w": bits.view(torch.bfloat16)})
        Subscriber(storage).update(live)
    assert torch.equal(live["w"].view(torch.int16), bits)


def test_masters_are_published_in_bf16():
    model, live = nn.Linear(8, 8), {name: x.bfloat16() * 0 for name, x in nn.Linear(8, 8).state_dict().items()}
    model.register_buffer("steps", torch.tensor(3))
    live["steps"] = torch.tensor(0)
    storage = MemoryStorage()
    with Publisher(storage, dtype=torch.bfloat16) as publisher:
        assert publisher.publish(model).raw_bytes == 2 * 72 + 8
        Subscriber(storage).update(live)
        assert live["steps"] == 3 and torch.equal(live["weight"], model.weight.detach().bfloat16())
        model.weight.data.add_(1)
        publisher.publish(model)
    Subscriber(storage).update(live)
    assert torch.equal(live["weight"], model.weight.detach().bfloat16())


def test_the_published_state_may_change_as_soon_as_publish_returns():
    storage, state = MemoryStorage(), weights()
    live = zeros_like(state)
    with Publisher(storage) as publisher:
        publisher.publish(state)
        before = {name: tensor.clone() for name, tensor in state.items()}
        state["matrix"].zero_()
        subscriber = Subscriber(storage)
        subscriber.update(live)
        assert_same(live, before)
        publisher.publish(state)
        subscriber.update(live)
        assert_same(live, state)


def test_missed_versions_are_caught_up_over_the_deltas():
    storage, state = MemoryStorage(), weights()
    live = zeros_like(state)
    with Publisher(storage) as publisher:
        subscriber = Subscriber(storage)
        sizes = []
        for seed in range(5):
            state = stepped(state, seed)
            report = publisher.publish(state)
            sizes.append(report.delta_bytes)
            if seed == 1:
                subscriber.update(live)
        update = subscriber.update(live)
        assert update is not None and (update.previous, update.version) == (1, 4)
        assert update.nbytes == sum(sizes[2:])
        assert_same(live, state)


def test_a_newer_keyframe_is_taken_where_it_is_fewer_bytes():
    storage, state = MemoryStorage(), weights(size=200)
    live = zeros_like(state)
    with Publisher(storage, keep=64) as publisher:
        subscriber = Subscriber(storage)
        publisher.publish(state)
        subscriber.update(live)
        for seed in range(8):  # each delta is about as large as a keyframe
            state = weights(seed, size=200)
            last = publisher.publish(state, keyframe=True)
        update = subscriber.update(live)
        assert update is not None and update.nbytes <= last.keyframe_bytes
        assert_same(live, state)


def test_joining_reads_at_most_two_keyframes_and_a_delta():
    storage, state = MemoryStorage(), weights()
    with Publisher(storage) as publisher:
        reports = []
        for seed in range(40):
            state = stepped(state, seed)
            reports.append(publisher.publish(state))
            live = zeros_like(state)
            update = Subscriber(storage).update(live)
            assert_same(live, state)
            keyframe = max(report.keyframe_bytes or 0 for report in reports)
            assert update is not None and update.nbytes <= 2 * keyframe + reports[-1].delta_bytes if seed else True
    assert sum(report.keyframe_bytes is not None for report in reports) >= 2


def test_a_delta_as_large_as_its_keyframe_is_not_published():
    storage = MemoryStorage()
    with Publisher(storage) as publisher:
        publisher.publish({"w": torch.randn(1000)})
        report = publisher.publish({"other": torch.randn(1000)})
    assert report.delta_bytes is None and report.keyframe_bytes is not None
    assert storage.list("version-000000000001") == ["version-000000000001.safetensors"]


def test_old_versions_go_and_who_is_behind_takes_a_keyframe(tmp_path: Path):
    state = weights()
    live = zeros_like(state)
    storage = LocalStorage(tmp_path)
    subscriber = Subscriber(storage)
    with Publisher(storage, keep=2, keyframe_every=3) as publisher:
        publisher.publish(state)
        subscriber.update(live)
        for seed in range(12):
            state = stepped(state, seed)
            publisher.publish(state)
            assert len(storage.list("version-")) <= 9
        named = {file.key for file in Published.from_bytes(storage.get(KEY), "").files}
        assert named <= set(storage.list("version-"))
    update = subscriber.update(live)
    assert update is not None and update.version == 12
    assert_same(live, state)


def test_versions_have_the_numbers_that_the_trainer_gives():
    storage, state = MemoryStorage(), weights()
    with Publisher(storage) as publisher:
        assert publisher.publish(state, version=10).version == 10
        for wrong in (10, 3, -1, 1.5, True, 10**12):
            with pytest.raises(PolicyError):
                publisher.publish(state, version=wrong)
        assert publisher.publish(stepped(state, 1), version=30).version == 30
        assert publisher.publish(stepped(state, 2)).version == 31
    assert Subscriber(storage).latest() == 31


def test_a_restarted_publisher_goes_on_with_deltas():
    storage, state = MemoryStorage(), weights()
    live = zeros_like(state)
    subscriber = Subscriber(storage)
    for seed in range(3):
        with Publisher(storage) as publisher:
            assert publisher.version == (seed - 1 if seed else None)
            state = stepped(state, seed)
            report = publisher.publish(state)
            assert (report.keyframe_bytes is None) == (seed > 0)
        subscriber.update(live)
        assert_same(live, state)


def test_files_that_a_dead_publisher_left_are_removed_and_others_stay(tmp_path: Path):
    with Publisher(tmp_path) as publisher:
        publisher.publish(weights())
    (tmp_path / "version-000000000007.safetensors").write_bytes(b"orphan")
    (tmp_path / "notes.txt").write_text("mine")
    with Publisher(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "notes.txt", KEY, "version-000000000000.safetensors"
    ]  # fmt: skip


def test_a_published_file_is_an_ordinary_one(tmp_path: Path):
    state = weights()
    with Publisher(tmp_path) as publisher:
        publisher.publish(state)
        publisher.publish(stepped(state, 1))
    loaded = sp.load(tmp_path / "version-000000000001-from-000000000000.safetensors")
    assert_same(loaded, stepped(state, 1))


def test_two_publishers_are_refused(tmp_path: Path):
    with Publisher(tmp_path), pytest.raises(LockedError):
        Publisher(tmp_path)
    Publisher(tmp_path).close()


def test_tied_weights_are_sent_once_and_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

    storage, trained, served = MemoryStorage(), Tied(), Tied()
    with Publisher(storage) as publisher:
        assert publisher.publish(trained).raw_bytes == 50 * 16 * 4
        subscriber = Subscriber(storage)
        subscriber.update(served)
        assert (
            torch.equal(served.head.weight, trained.embedding.weight) and served.head.weight is served.embedding.weight
        )
        separate = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
        assert subscriber.update(separate) is not None  # another model, the same version
        assert_same(separate, trained.state_dict())
        separate["head.weight"] += 1
        publisher.publish(separate)
        before = served.head.weight.detach().clone()
        with pytest.raises(MismatchError, match=r"different values for .*ties them"):
            subscriber.update(served)
        assert torch.equal(served.head.weight, before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports what torch deprecates
def test_wrappers_of_a_model_make_no_difference():
    storage, model, served = MemoryStorage(), nn.Linear(4, 4), nn.Linear(4, 4)
    with Publisher(storage) as publisher:
        publisher.publish(nn.DataParallel(torch.compile(model)))  # type: ignore[arg-type]
    Subscriber(storage).update(served)
    assert_same(served.state_dict(), model.state_dict())


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


def overlap(state: dict[str, Tensor]) -> dict[str, Tensor]:
    memory = torch.zeros(301)
    return state | {"bias": memory[:300], "second": memory[1:]}


@pytest.mark.parametrize("change", [change_name, change_shape, change_dtype, make_meta, expand])
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


def test_what_is_no_plain_tensor_is_refused():
    class Sharded(Tensor):
        pass

    storage = MemoryStorage()
    sharded = torch.zeros(3).as_subclass(Sharded)
    with Publisher(storage) as publisher:
        for model, error in (({"w": sharded}, StateError), ({"w": [1]}, StateError), ([1], PolicyError)):
            with pytest.raises(error):
                publisher.publish(model)  # type: ignore[arg-type]
        publisher.publish({"w": torch.zeros(3)})
    with pytest.raises(StateError):
        Subscriber(storage).update({"w": sharded})


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
        for fail_at in range(4, count.calls + 1):
            faulty = FaultyStorage(MemoryStorage(), fail_at, late=late)
            seen += publish_all(faulty, zeros_like(state), Subscriber(faulty.inner))
    assert seen > 20


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
    from shrinkpoint.sync.in_place import TensorWrite

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
    storage.put(KEY, dump_with_digest(good | {"format": 2}))
    with pytest.raises(VersionError):
        Subscriber(storage).latest()


def test_a_list_without_a_way_to_the_newest_version_is_a_chain_error():
    storage = MemoryStorage()
    document = {"format": 1, "id": "ab", "version": 2, "files": [[2, 1, 5, "0" * 32]]}
    storage.put(KEY, dump_with_digest(document))
    with pytest.raises(ChainError, match="no keyframe"):
        Subscriber(storage).update({"w": torch.zeros(1)})


def test_arguments_are_checked(tmp_path: Path):
    wrong = [{"dtype": "bf16"}, {"dtype": torch.int8}, {"keep": 0}, {"keyframe_every": 0}, {"threads": 0}]
    for arguments in wrong:
        with pytest.raises(PolicyError):
            Publisher(tmp_path, **arguments)  # type: ignore[arg-type]
    for arguments in ({"poll": 0}, {"threads": 0}, {"max_bytes": 0}):
        with pytest.raises(PolicyError):
            Subscriber(tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(PolicyError):
        Subscriber(tmp_path).update({}, wait=-1)


def test_a_limit_on_memory_holds():
    storage, state = MemoryStorage(), {"w": torch.zeros(1 << 20)}
    with Publisher(storage) as publisher:
        publisher.publish(state)
    live = {"w": torch.ones(1 << 20)}
    with pytest.raises(CorruptError, match="max_bytes"):
        Subscriber(storage, max_bytes=1 << 20).update(live)
    assert live["w"].all()
    assert Subscriber(storage).update(live) is not None
