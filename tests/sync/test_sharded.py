"""Ranks publish their shards, and ranks with other shardings follow: the same bits, and no rank has everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.processes import ranks
from helpers.sharded_weights import PRELUDE

from shrinkpoint.storage import LocalStorage
from shrinkpoint.sync.published import KEY, Published

LAYOUTS = """
def layouts(width):
    line = init_device_mesh("cpu", (width,))
    square = init_device_mesh("cpu", (2, width // 2))
    return {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "replicas": (line, [Replicate()]),
        "hsdp": (square, [Replicate(), Shard(0)]),
        "grid": (square, [Shard(0), Shard(1)]),
        "fsdp_tp": (square, [_StridedShard(0, split_factor=width // 2), Shard(0)]),
    }
"""
PUBLISH = (
    PRELUDE
    + LAYOUTS
    + """
def of_rank(rank, width, folder):
    part_plan._MIN_CUT_NUMEL = 1 << 16  # a small model in as many pieces as a large one
    group = join(rank, width, folder)
    seen = {}
    for kind, layout in layouts(width).items():
        live, subscriber = zeroed(full(0)), Subscriber(f"{folder}/{kind}")
        with Publisher(f"{folder}/{kind}", ranks=group) as publisher:
            for version in range(3):
                sent = publisher.publish(sharded(version, *layout))
                assert (sent.version, sent.delta_bytes is None) == (version, version == 0)
                assert sent.raw_bytes == sum(x.nbytes for name, x in full(0).items() if name != "tied")
                update = subscriber.update(live)
                assert_version(live, version)
                assert update.nbytes == (sent.delta_bytes or sent.keyframe_bytes)
        live = zeroed(live)
        Subscriber(f"{folder}/{kind}").update(live)
        assert_version(live, 2)
        seen[kind] = sent.delta_bytes
    report(folder, rank, seen)
"""
)


@pytest.mark.parametrize("width", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_plain_model_follows_every_sharding(tmp_path: Path, width: int):
    reports = ranks(PUBLISH, width, tmp_path)
    assert all(report == reports[0] for report in reports)
    for kind in reports[0]:
        storage = LocalStorage(tmp_path / kind)
        published = Published.from_bytes(storage.get(KEY), kind)
        assert all(len(file.parts) == width for file in published.files)
        sizes = [part.size for part in published.files[0].parts]  # of the keyframe: the work is balanced
        assert max(sizes) < 1.3 * min(sizes)


RESHARD = (
    PRELUDE
    + LAYOUTS
    + """
def of_rank(rank, width, folder):
    group = join(rank, width, folder)
    part_plan._MIN_CUT_NUMEL = 1 << 16  # a small model in as many pieces as a large one
    pairs, seen = layouts(width), {}
    few = dist.new_group([0, 1])
    halves = DeviceMesh("cpu", [0, 1]) if rank < 2 else None
    targets = {kind: (group, *layout) for kind, layout in pairs.items()} | {"halves": (few, halves, [Shard(1)])}
    with Publisher(f"{folder}/w", ranks=group, keep=3, keyframe_every=5) as publisher:
        follow = {}
        for kind, (members, mesh, placements) in targets.items():
            if mesh is not None:
                live = zeroed(sharded(0, mesh, placements))
                follow[kind] = Subscriber(f"{folder}/w", ranks=members), live, mesh, placements
        for version in range(9):
            publisher.publish(sharded(version, *pairs["rows"]))
            for number, (kind, (subscriber, live, mesh, placements)) in enumerate(follow.items()):
                if version % 3 == 0 or number % 2 == 0 and version % 5 == 0:  # they miss versions
                    addresses = [x.to_local().data_ptr() for x in live.values() if isinstance(x, DTensor)]
                    update = subscriber.update(live)
                    assert update.version == version and subscriber.update(live) is None
                    assert_version(live, version, mesh, placements)
                    assert addresses == [x.to_local().data_ptr() for x in live.values() if isinstance(x, DTensor)]
                    seen.setdefault(kind, []).append(update.nbytes)
        held = {kind: sum(part.num_held_bytes for part in row[0]._held.parts) for kind, row in follow.items()}
    report(folder, rank, {"read": seen, "held": held, "all": sum(x.nbytes for x in full(0).values())})
"""
)


def test_any_sharding_follows_any_other_and_reads_what_it_needs(tmp_path: Path):
    reports = ranks(RESHARD, 4, tmp_path)
    for report in reports:
        everything = report["held"]["replicas"]
        for kind, share in (("rows", 0.25), ("columns", 0.25), ("grid", 0.25), ("hsdp", 0.5)):
            assert report["held"][kind] < (share + 0.08) * everything, kind
            assert report["read"][kind][0] < (share + 0.12) * report["read"]["replicas"][0], kind
    assert "halves" in reports[1]["held"] and "halves" not in reports[2]["held"]


FSDP = (
    PRELUDE
    + """
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(51, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 51, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)))

def of_rank(rank, width, folder):
    group = join(rank, width, folder)
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.inner)
    fully_shard(model)
    served = Net().bfloat16()
    two = init_device_mesh("cpu", (2, width // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    other = Net().bfloat16()
    fully_shard(other, mesh=two)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    subscribers = Subscriber(folder + "/w"), Subscriber(folder + "/w", ranks=group)
    with Publisher(folder + "/w", ranks=group, dtype=torch.bfloat16) as publisher:
        for version in range(4):
            loss = model(torch.arange(16) + rank).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sent = publisher.publish(model)
            assert sent.raw_bytes == 2 * (51 * 24 + 24 * 24 + 24 + 3)
            for subscriber, follower in zip(subscribers, (served, other)):
                assert subscriber.update(follower).version == version and subscriber.update(follower) is None
                assert torch.equal(follower(torch.arange(3)), served(torch.arange(3)))  # also what FSDP has gathered
                assert subscriber.update(follower) is None
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            follows = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
            for name, tensor in whole.items():
                if rank == 0:
                    assert torch.equal(bits(served.state_dict()[name]), bits(tensor.bfloat16())), name
                    assert torch.equal(bits(follows[name]), bits(tensor.bfloat16())), name
    assert served.head.weight is served.embedding.weight
    changed = other.inner.weight.to_local().clone()
    with torch.no_grad():
        other.inner.weight.add_(1)  # somebody else
    assert subscribers[1].update(other).version == 3
    assert torch.equal(other.inner.weight.to_local(), changed)
    report(folder, rank, sent.delta_bytes)
"""
)


def test_fsdp2_model_with_tied_weights_is_followed(tmp_path: Path):
    assert len({*ranks(FSDP, 4, tmp_path)}) == 1


RESUME = (
    PRELUDE
    + """
def of_rank(rank, width, folder):
    group = join(rank, width, folder)
    line = init_device_mesh("cpu", (width,))
    pair = DeviceMesh("cpu", [0, 1]) if rank < 2 else None
    few = dist.new_group([0, 1])
    live, subscriber, kinds = zeroed(full(0)), Subscriber(f"{folder}/w"), []

    def publish(version, ranks, mesh, placements):
        if mesh is None:
            sent = [True, True]
        else:
            with Publisher(f"{folder}/w", ranks=ranks) as publisher:
                assert publisher.version == (version - 1 if version else None)
                last = publisher.publish(sharded(version, mesh, placements) if ranks else full(version))
                sent = [last.delta_bytes is not None, last.keyframe_bytes is not None]
        dist.barrier()
        subscriber.update(live)
        assert_version(live, version)
        dist.barrier()  # a rank that publishes the next one alone waits for no other
        kinds.append(sent)

    publish(0, group, line, [Shard(0)])
    publish(1, group, line, [Shard(0)])  # goes on with a delta
    publish(2, group, line, [Shard(1)])  # another sharding: a keyframe
    publish(3, few, pair, [Shard(1)])  # fewer ranks
    publish(4, few, pair, [Shard(1)])
    if rank == 0:  # one process, and the place is an ordinary one
        publish(5, None, line, ())
    else:
        publish(5, None, None, ())
    publish(6, group, line, [Shard(0)])
    report(folder, rank, kinds)
"""
)


def test_restarted_ranks_go_on_and_other_ranks_begin_with_a_keyframe(tmp_path: Path):
    kinds = ranks(RESUME, 4, tmp_path)[0]
    delta, keyframe = [True, False], [False, True]
    assert kinds == [keyframe, delta, keyframe, keyframe, delta, keyframe, keyframe]


PIPELINE = (
    PRELUDE
    + """
def of_rank(rank, width, folder):
    # Stages of a pipeline, cut at another layer on the side that follows.
    group = join(rank, width, folder)
    def stage(version, first, names):
        state = full(version)
        return {f"{prefix}{name}": state[name] for prefix, name in names[:first] if rank == 0} | {
            f"{prefix}{name}": state[name] for prefix, name in names[first:] if rank == 1
        }
    names = [("", name) for name in SHAPES]
    wrapped = [("module.", name) for name in SHAPES]
    live, subscriber = zeroed(stage(0, 3, names)), Subscriber(f"{folder}/w", ranks=group)
    plain, follower = zeroed({name: full(0)[name] for name in SHAPES}), Subscriber(f"{folder}/w")
    with Publisher(f"{folder}/w", ranks=group) as publisher:
        for version in range(3):
            publisher.publish(stage(version, 6, wrapped))
            assert subscriber.update(live).version == version and subscriber.update(live) is None
            follower.update(plain)
            for name, tensor in stage(version, 3, names).items():
                assert torch.equal(bits(live[name]), bits(tensor)), name
            for name in SHAPES:
                assert torch.equal(bits(plain[name]), bits(full(version)[name])), name
        try:
            subscriber.update({name: x for name, x in live.items() if name != "vector"})
        except MismatchError as error:
            assert "vector" in str(error) and "the model lacks" in str(error)
        else:
            raise AssertionError("accepted")
    report(folder, rank, [*live])
"""
)


def test_stages_of_a_pipeline_follow_other_stages(tmp_path: Path):
    first, second = ranks(PIPELINE, 2, tmp_path)
    assert len(first) == 3 and len(second) == 5
