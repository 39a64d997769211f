"""A subscriber's model has the bits of the newest version, whatever it missed; else it is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.live_weights import assert_same, stepped, weights, zeros_like
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.errors import (
    LockedError,
    MismatchError,
    PolicyError,
)
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.sync import Publisher, Subscriber
from shrinkpoint.sync.published import KEY, Published

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.complex64,
]


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


def test_versions_are_published_within_inference_mode_and_outside(tmp_path: Path):
    trained, served = nn.Linear(64, 64), nn.Linear(64, 64)
    subscriber = Subscriber(tmp_path)
    with Publisher(tmp_path) as publisher:
        for version in range(6):
            with torch.no_grad():
                trained.weight[version] += 1
            with torch.inference_mode(version % 3 < 2):
                publisher.publish(trained)
            with torch.inference_mode(version % 2 == 0):
                subscriber.update(served)
            assert_same(served.state_dict(), trained.state_dict())
    served(torch.ones(64)).sum().backward()


@pytest.mark.parametrize("is_trained_compiled", [True, False])
def test_a_compiled_part_follows_a_plain_one_and_the_reverse(is_trained_compiled: bool):
    trained, served = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    compiled = trained if is_trained_compiled else served
    compiled[0] = torch.compile(compiled[0], backend="eager")
    storage = MemoryStorage()
    with Publisher(storage) as publisher:
        publisher.publish(trained)
        Subscriber(storage).update(served)
    assert all(map(torch.equal, trained.parameters(), served.parameters()))


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


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.float16, torch.int16), (torch.float64, torch.float32), (torch.complex64, torch.float32)],
)
def test_a_cast_does_not_change_views_of_the_same_memory_in_another_dtype(dtype: torch.dtype, other: torch.dtype):
    storage, values = MemoryStorage(), torch.randn(6, dtype=dtype)
    state = {"w": values, "tied": values, "view": values.view(other)}
    expected = {name: x.bfloat16() if x.is_floating_point() else x for name, x in state.items()}
    live = zeros_like(expected)
    with Publisher(storage, dtype=torch.bfloat16) as publisher:
        publisher.publish(state)
    Subscriber(storage).update(live)
    assert_same(live, expected)


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
        named = {key for file in Published.from_bytes(storage.get(KEY), "").files for key in file.keys}
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


def test_a_closed_publisher_publishes_nothing_more(tmp_path: Path):
    closed = Publisher(tmp_path)
    closed.publish({"a": torch.zeros(3)})
    closed.close()
    with Publisher(tmp_path) as publisher:
        publisher.publish({"a": torch.ones(3)})
        with pytest.raises(PolicyError, match="closed publisher"):
            closed.publish({"a": torch.zeros(3)})
    Subscriber(tmp_path).update(live := {"a": torch.zeros(3)})
    assert torch.equal(live["a"], torch.ones(3))


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


def test_another_default_device_changes_nothing(tmp_path: Path):
    trained, served = nn.Linear(64, 64), nn.Linear(64, 64).bfloat16()
    publisher, subscriber = Publisher(tmp_path, dtype=torch.bfloat16), Subscriber(tmp_path)
    for _ in range(2):
        with torch.device("meta"):  # what is made without a device has no values
            publisher.publish(trained)
            subscriber.update(served)
        assert torch.equal(served.weight, trained.weight.bfloat16())
        with torch.no_grad():
            trained.weight.mul_(1.01)
