"""Parts of a version: which rank writes what, what a reader refuses, and what an update need not look at."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.live_weights import assert_same, stepped, weights, zeros_like
from helpers.processes import ranks
from helpers.sharded_weights import PRELUDE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shrinkpoint as sp
from shrinkpoint.errors import ChainError, CorruptError, FormatError, MismatchError, PolicyError, StateError
from shrinkpoint.storage import LocalStorage, MemoryStorage
from shrinkpoint.store.manifest import dump_with_digest
from shrinkpoint.sync import Publisher, Subscriber, live_writes
from shrinkpoint.sync.local_tensors import LocalTensor, Piece, local_tensors
from shrinkpoint.sync.part_plan import PartPlan, describe, make_plan
from shrinkpoint.sync.published import KEY, Published, VersionFile


@pytest.fixture
def alone(single_rank_group: None) -> Any:
    """The group of one rank."""
    return dist.group.WORLD


def boxes(*rows: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> LocalTensor:
    pieces = tuple(Piece(offsets, torch.zeros(sizes)) for offsets, sizes in rows)
    return LocalTensor(shape, pieces[0].tensor if pieces else torch.zeros(0), pieces)


def plans(*locals_by_rank: dict[str, LocalTensor]) -> list[PartPlan]:
    rows = [describe(local, dict.fromkeys(local, torch.float32)) for local in locals_by_rank]
    return [make_plan(rows, rank) for rank in range(len(rows))]


def test_every_value_is_written_once_and_replicas_share_the_work():
    shape = (8192, 1024)
    halves = [((0, 0), (4096, 1024)), ((4096, 0), (4096, 1024))]
    hsdp = plans(*({"w": boxes(halves[rank % 2], shape=shape)} for rank in range(4)))
    written = [box for plan in hsdp for box in plan.own["w"]]
    assert len(written) == len({*written}) and sum(a * b for _, (a, b) in written) == 8192 * 1024
    assert {sum(a * b for _, (a, b) in plan.own["w"]) for plan in hsdp} == {8192 * 1024 // 4}
    for _, sizes in written:
        assert sizes[1] == 1024 // 8  # so that a rank of columns reads a column
    replicas = plans(*({f"w{index}": boxes(((0,), (1000,)), shape=(1000,)) for index in range(8)} for _ in range(4)))
    assert [len(plan.own) for plan in replicas] == [2, 2, 2, 2]


def test_tensors_tied_on_every_rank_that_has_values_are_written_once():
    shared, apart = torch.zeros(4), torch.zeros(4)
    piece = LocalTensor((8,), shared, (Piece((0,), shared),))
    other = LocalTensor((8,), apart, (Piece((4,), apart),))
    nothing = LocalTensor((8,), torch.zeros(0), ())
    copy = LocalTensor((8,), apart.clone(), (Piece((4,), apart),))
    tied = plans({"a": piece, "b": piece}, {"a": other, "b": other}, {"a": nothing, "b": nothing})
    assert [[*plan.own] for plan in tied] == [["a"], ["a"], []] and tied[0].ties == {"b": "a"}
    assert plans({"a": piece, "b": piece}, {"a": other, "b": copy})[0].ties == {}


@pytest.mark.parametrize(
    "second",
    [
        {"w": boxes(((4,), (3,)), shape=(8,))},
        {"w": boxes(((3,), (5,)), shape=(8,))},
        {"w": boxes(((4,), (4,)), shape=(9,))},
        {},
    ],
    ids=["a value is missing", "two boxes overlap", "another shape", "another model"],
)
def test_ranks_that_do_not_fit_together_are_refused(second: dict[str, LocalTensor]):
    with pytest.raises(MismatchError, match=r"model\['w'\]"):
        plans({"w": boxes(((0,), (4,)), shape=(8,))}, second)


def test_a_rank_may_have_tensors_of_its_own():
    stages = plans({"first": boxes(((0,), (4,)), shape=(4,))}, {"second": boxes(((0,), (5,)), shape=(5,))})
    assert [[*plan.own] for plan in stages] == [["first"], ["second"]]
    assert stages[0].tensors == stages[1].tensors and [*stages[0].tensors] == ["first", "second"]


PART, OTHER = [5, "0" * 32, "f" * 16], [7, "1" * 32, "e" * 16]


@pytest.mark.parametrize(
    "files",
    [
        [[0, -1, []]],
        [[0, -1, [PART]], [1, 0, [PART, PART]]],
        [[0, -1, [PART]], [1, -1, 5, "0" * 32], [1, 0, [PART]]],
        [[0, -1, [PART]], [0, -1, [OTHER]]],
        [[0, -1, [PART[:1]]]],
        [[0, -1, [[-5, "0" * 32]]]],
        [[0, -1, [["5", "0" * 32]]]],
        [[0, -1, [[5, "0" * 32, "f" * 15]]]],
        [[0, -1, [5]]],
        [[0, -1, {"0": PART}]],
    ],
    ids=json.dumps,
)
def test_a_damaged_list_of_parts_is_an_error_of_the_tree(files):
    version = max(row[0] for row in files)
    with pytest.raises(CorruptError):
        Published.from_bytes(dump_with_digest({"format": 3, "id": "a", "version": version, "files": files}), KEY)


def test_a_list_of_parts_and_files_comes_back():
    parts = VersionFile.from_parts(4, -1, [])
    assert parts.size == 0
    rows = [[3, 1, 9, "2" * 32], [4, -1, [PART, [6, "3" * 32]]], [5, 4, [OTHER, PART]]]
    data = dump_with_digest({"format": 3, "id": "a", "version": 5, "files": rows})
    published = Published.from_bytes(data, KEY)
    assert published.to_bytes() == data and [file.size for file in published.files] == [9, 11, 12]
    assert published.files[2].keys == (
        "version-000000000005-from-000000000004-part-00000-eeeeeeeeeeeeeeee.safetensors",
        "version-000000000005-from-000000000004-part-00001-ffffffffffffffff.safetensors",
    )


def published_part(storage: LocalStorage) -> tuple[str, Published]:
    published = Published.from_bytes(storage.get(KEY), KEY)
    return published.files[-1].keys[0], published


def overlapping(state: dict[str, Any]) -> None:
    state["pieces"]["matrix"]["0,1"] = state["pieces"]["matrix"]["0,0"]


def lacking(state: dict[str, Any]) -> None:
    del state["pieces"]["bias"]


def tied_to_nothing(state: dict[str, Any]) -> None:
    state["ties"].append(["matrix", "nothing"])


def unknown(state: dict[str, Any]) -> None:
    state["pieces"]["other"] = {"0": torch.zeros(3)}


def other_dtype(state: dict[str, Any]) -> None:
    state["pieces"]["matrix"]["0,0"] = state["pieces"]["matrix"]["0,0"].float()


def huge(state: dict[str, Any]) -> None:
    state["tensors"][0][2] = [1 << 80, 300]


def no_dict(state: dict[str, Any]) -> None:
    state["pieces"] = [torch.zeros(3)]


def nothing_at_all(state: dict[str, Any]) -> None:
    state.clear()


@pytest.mark.parametrize(
    "forge", [overlapping, lacking, tied_to_nothing, unknown, other_dtype, huge, no_dict, nothing_at_all]
)
def test_a_forged_part_is_an_error_and_the_model_stays(tmp_path: Path, alone: Any, forge: Callable[[Any], None]):
    storage, live = LocalStorage(tmp_path), zeros_like(weights())
    with Publisher(storage, ranks=alone) as publisher:
        publisher.publish(weights())
    key, published = published_part(storage)
    state = sp.load(tmp_path / key)
    forge(state)
    saved = sp.save(state, tmp_path / "forged")
    digest = sp.inspect(tmp_path / "forged")
    file = VersionFile.from_parts(0, -1, [published.files[0].parts[0]._replace(size=saved.stored_bytes)])
    file = VersionFile.from_parts(0, -1, [file.parts[0]._replace(digest=saved.digest)])
    assert digest is not None
    (tmp_path / "forged").rename(tmp_path / key)
    storage.put(KEY, Published("a" * 16, 0, (file,)).to_bytes())
    for subscriber in (Subscriber(storage), Subscriber(storage, ranks=alone)):
        with pytest.raises((FormatError, ChainError)):
            subscriber.update(live)
    assert_same(live, zeros_like(weights()))


def test_parts_together_stay_within_the_limit_on_memory(tmp_path: Path):
    ranks(LIMIT, 2, tmp_path)


LIMIT = (
    PRELUDE
    + """
def of_rank(rank, width, folder):
    group = join(rank, width, folder)
    line = init_device_mesh("cpu", (width,))
    with Publisher(f"{folder}/w", ranks=group) as publisher:
        publisher.publish({"w": placed(line, torch.arange(1 << 18).float(), [Shard(0)])})  # 2^19 bytes a part
    live = {"w": torch.zeros(1 << 18)}
    try:
        Subscriber(f"{folder}/w", max_bytes=(1 << 20) - 8).update(live)
        raise AssertionError("admitted")
    except CorruptError as error:
        assert "max_bytes" in str(error) and not live["w"].any()
    assert Subscriber(f"{folder}/w", max_bytes=1 << 20).update(live)
    report(folder, rank, 0)
"""
)

EQUAL = (
    PRELUDE
    + """
def of_rank(rank, width, folder):
    # Pieces with the same values are stored as copies of one of them, which a rank may not hold.
    group = join(rank, width, folder)
    line = init_device_mesh("cpu", (width,))
    part_plan._MIN_CUT_NUMEL = 1 << 16
    states = [full(version)["large"][:, :208].repeat(1, 8) for version in range(3)]
    states.append(full(3)["large"])
    live = {"w": placed(line, torch.zeros_like(states[0]), [Shard(1)])}
    subscriber, whole = Subscriber(f"{folder}/w", ranks=group), []
    with Publisher(f"{folder}/w", ranks=group) as publisher:
        for state in states:
            publisher.publish({"w": placed(line, state, [Shard(0)])})
            subscriber.update(live)
            assert torch.equal(bits(live["w"]), bits(placed(line, state, [Shard(1)])))
            whole.append(len(subscriber._reader._whole))
    report(folder, rank, whole)
"""
)


def test_what_a_needed_piece_is_a_copy_of_is_read_besides(tmp_path: Path):
    first, second = ranks(EQUAL, 2, tmp_path)
    assert first[0] == second[0] == 0 and max(first[-1], second[-1]) > 0


def test_an_update_compares_and_writes_what_a_delta_has_changed(monkeypatch: pytest.MonkeyPatch):
    storage, state = MemoryStorage(), weights() | {"still": torch.randn(100, 100)}
    state["still_too"] = state["still"].clone()
    live = zeros_like(state)
    compared: list[tuple[int, bool]] = []
    plan = live_writes._plan_write

    def spy(target: Tensor, new: Tensor, old: Tensor | None) -> Any:
        compared.append((target.numel(), old is not None))
        return plan(target, new, old)

    monkeypatch.setattr(live_writes, "_plan_write", spy)
    with Publisher(storage) as publisher:
        subscriber = Subscriber(storage)
        publisher.publish(state)
        subscriber.update(live)
        assert len(compared) == len(state) and not any(is_known for _, is_known in compared)
        compared.clear()
        before, state = state, state | {"matrix": stepped(weights(), 1)["matrix"]}
        publisher.publish(state)
        update = subscriber.update(live)
        assert compared == [(300 * 300, True)]  # what else is there is known to be as it was
        assert update is not None and update.changed == int((before["matrix"] != state["matrix"]).sum())
        compared.clear()
        live["still"].fill_(3)  # somebody else
        publisher.publish(state | {"count": torch.tensor(9)})
        subscriber.update(live)
        assert compared == [(1, True), (100 * 100, False)]
    assert_same(live, state | {"count": torch.tensor(9)})


def test_a_shard_that_follows_a_plain_version(alone: Any):
    storage, mesh, state = MemoryStorage(), init_device_mesh("cpu", (1,)), weights()
    live = {name: DTensor.from_local(x, mesh, [Shard(0)]) if x.dim() else x for name, x in zeros_like(state).items()}
    with Publisher(storage) as publisher:
        subscriber = Subscriber(storage, ranks=alone)
        for seed in range(3):
            publisher.publish(stepped(state, seed))
            update = subscriber.update(live)
            assert update is not None and update.version == seed
            local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in live.items()}
            assert_same(local, stepped(state, seed))


@pytest.mark.usefixtures("s3")
def test_parts_in_a_bucket_are_followed(alone: Any):
    url, mesh, state = f"s3://checkpoints/{uuid.uuid4().hex}", init_device_mesh("cpu", (1,)), weights()
    live = {name: DTensor.from_local(x, mesh, [Shard(0)]) if x.dim() else x for name, x in zeros_like(state).items()}
    subscribers = Subscriber(url, ranks=alone), Subscriber(url)
    plain = zeros_like(state)
    for seed in range(3):
        with Publisher(url, ranks=alone) as publisher:  # goes on with a delta
            assert (publisher.publish(stepped(state, seed)).delta_bytes is None) == (seed == 0)
        for subscriber, model in zip(subscribers, (live, plain), strict=True):
            assert subscriber.update(model) is not None
        assert_same(plain, stepped(state, seed))
    assert torch.equal(live["matrix"].to_local(), plain["matrix"])  # type: ignore[attr-defined]


def test_arguments_are_checked(alone: Any, tmp_path: Path):
    for kind in (Publisher, Subscriber):
        with pytest.raises(PolicyError, match="a process group that"):
            kind(tmp_path, ranks="world")  # type: ignore[arg-type]
        with pytest.raises(PolicyError, match="ranks"):
            kind(group=alone, ranks=alone)
    with Publisher(tmp_path, ranks=alone) as publisher, pytest.raises(StateError, match="begin with"):
        publisher.publish({"$t": torch.zeros(3)})


def test_names_and_wrappers_of_modules_make_no_difference(alone: Any, tmp_path: Path):
    model, served = nn.Linear(4, 4), nn.Linear(4, 4)
    with Publisher(tmp_path, ranks=alone, dtype=torch.bfloat16) as publisher:
        assert publisher.publish(nn.DataParallel(model)).raw_bytes == 2 * 20  # type: ignore[arg-type]
    served.bfloat16()
    Subscriber(tmp_path, ranks=alone).update(nn.Sequential(served)[0])
    assert_same(dict(served.state_dict()), {name: x.bfloat16() for name, x in model.state_dict().items()})
    assert [*local_tensors(model)] == ["weight", "bias"]
