"""Whatever fails on one rank fails on all; the last version stays, and the next one works."""

from __future__ import annotations

from pathlib import Path

from helpers.processes import ranks, run_forked
from helpers.sharded_weights import PRELUDE

FAILING = (
    PRELUDE
    + """
import shrinkpoint.sync.publisher as module
from helpers.faulty_storage import FaultyStorage
from shrinkpoint.storage import LocalStorage, MemoryStorage

def raised(call):
    try:
        call()
    except ShrinkpointError as error:
        return [type(error).__name__, str(error)]
    return None

def of_rank(rank, width, folder):
    group = join(rank, width, folder)
    line, seen = init_device_mesh("cpu", (width,)), {}
    live, subscriber = zeroed(full(0)), Subscriber(f"{folder}/w")
    storage = FaultyStorage(LocalStorage(f"{folder}/w"))
    state = lambda version: sharded(version, line, [Shard(0)])
    with Publisher(storage, ranks=group) as publisher:
        assert raised(lambda: Publisher(f"{folder}/w", ranks=group))[0] == "LockedError"
        publisher.publish(state(0))
        for version, failing in ((1, 2), (2, 0), (3, width - 1)):
            if rank == failing:
                storage.fail_at = storage.calls + 1
            seen[f"disk of {failing}"] = raised(lambda: publisher.publish(state(version)))
            storage.fail_at = None
            dist.barrier()
            assert publisher.version == subscriber.latest() == version - 1
            files = sorted(path.name for path in Path(f"{folder}/w").glob("version-*"))
            assert not any(f"version-{version:012d}" in name for name in files), files
            dist.barrier()
            assert publisher.publish(state(version)).delta_bytes
            subscriber.update(live)
            assert_version(live, version)
        partial = DTensor.from_local(torch.ones(3), line, [Partial()], run_check=False)
        other = state(4) | ({"even": torch.zeros(3)} if rank == 1 else {})
        differs = state(4) | ({"steps": torch.tensor(5)} if rank == 2 else {})
        lacks = {name: x for name, x in state(4).items() if name != "large" or rank != 1}
        for kind, call in {
            "partial": lambda: publisher.publish({"w": partial}),
            "numbers": lambda: publisher.publish(state(4), version=4 + rank),
            "keyframe": lambda: publisher.publish(state(4), keyframe=rank == 1),
            "shapes": lambda: publisher.publish(other),
            "lacks": lambda: publisher.publish(lacks),
            "differs": lambda: publisher.publish(differs),
            "no model": lambda: publisher.publish([1] if rank == 1 else state(4)),
            "without ranks": lambda: Publisher(MemoryStorage()).publish(state(4)),
            "follows without ranks": lambda: Subscriber(f"{folder}/w").update(state(4)),
            "memory": lambda: Publisher(MemoryStorage(), ranks=group).publish(state(4)),
            "settings": lambda: Publisher(f"{folder}/other", ranks=group, keep=1 + rank).publish(state(4)),
            "with a group": lambda: Publisher(group=group, ranks=group),
        }.items():
            seen[kind] = raised(call)
        assert publisher.publish(state(4)).version == 4
        subscriber.update(live)
        assert_version(live, 4)
    seen["closed"] = raised(lambda: publisher.publish(state(5)))
    report(folder, rank, seen)
"""
)


def test_error_of_one_rank_is_raised_by_all_and_the_next_version_works(tmp_path: Path):
    reports = ranks(FAILING, 4, tmp_path)
    for kind, (name, text) in reports[0].items():
        expected = {
            "partial": "StateError", "shapes": "MismatchError", "lacks": "MismatchError", "no model": "PolicyError",
            "differs": "MismatchError", "numbers": "PolicyError", "keyframe": "PolicyError", "settings": "PolicyError",
            "with a group": "PolicyError", "closed": "PolicyError",
            "without ranks": "StateError", "follows without ranks": "StateError",
        }  # fmt: skip
        assert name == expected.get(kind, "StorageError"), (kind, text)
        assert {report[kind][0] for report in reports} == {name}, kind
    assert all(
        "'steps'" in report["differs"][1] and "rank 2 than on rank 0" in report["differs"][1] for report in reports
    )
    assert "rank 2" in reports[0]["disk of 2"][1] and "all ranks share" in reports[1]["memory"][1]
    assert "ranks=" in reports[0]["without ranks"][1] and "Partial" in reports[3]["partial"][1]


KILLED = (
    PRELUDE
    + """
import sys
import shrinkpoint.sync.publisher as module

def publish(folder, name, first, last, kill_at=None):
    # All ranks of one job; the exit codes of its processes.
    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                group = join(rank, 3, folder, name)
                line = init_device_mesh("cpu", (3,))
                with Publisher(f"{folder}/w", ranks=group) as publisher:
                    for version in range(first, last):
                        if (rank, version) == kill_at:
                            write = module.write_file
                            def killed(*arguments, **settings):
                                write(*arguments, **settings)
                                os.kill(os.getpid(), signal.SIGKILL)
                            module.write_file = killed
                        publisher.publish(sharded(version, line, [Shard(0)]))
                code = 0
            except MembershipError:
                code = 7
            except BaseException as error:
                print(type(error), error, file=sys.stderr, flush=True)
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

folder = sys.argv[1]
live, subscriber = zeroed(full(0)), Subscriber(f"{folder}/w")
for job, killed in enumerate((1, 0, 2)):
    codes = publish(folder, f"join{job}", 2 * job, 2 * job + 3, kill_at=(killed, 2 * job + 2))
    assert codes[killed] == -signal.SIGKILL, codes
    assert all(code == 7 for rank, code in enumerate(codes) if rank != killed), codes
    assert subscriber.latest() == 2 * job + 1
    subscriber.update(live)
    assert_version(live, 2 * job + 1)
assert publish(folder, "last", 6, 8) == [0, 0, 0]
subscriber.update(live)
assert_version(live, 7)
names = {key for file in subscriber._reader.published().files for key in file.keys}
assert {path.name for path in Path(f"{folder}/w").glob("version-*")} == names  # what died left nothing
files = [file for file in subscriber._reader.published().files if file.version > 0]
assert all(not file.is_keyframe for file in files)  # every job went on with deltas
"""
)


def test_killed_rank_leaves_the_last_version_and_the_next_job_goes_on_with_deltas(tmp_path: Path):
    run_forked(KILLED, str(tmp_path))


FOLLOWING = (
    PRELUDE
    + """
from shrinkpoint.sync.live_writes import TensorWrite

def of_rank(rank, width, folder):
    group = join(rank, width, folder)
    line = init_device_mesh("cpu", (width,))
    live = zeroed(sharded(0, line, [Shard(1)]))
    subscriber, write, seen = Subscriber(f"{folder}/w", ranks=group, poll=0.01), TensorWrite.write, []
    publisher = Publisher(f"{folder}/w", ranks=group)
    publisher.publish(sharded(0, line, [Shard(0)]))
    subscriber.update(live)

    def fails(kind):
        try:
            subscriber.update(live)
        except (ShrinkpointError, KeyboardInterrupt) as error:
            seen.append([kind, type(error).__name__])
        assert subscriber.version == 0
        assert_version(live, 0, line, [Shard(1)])

    publisher.publish(sharded(1, line, [Shard(0)]))

    def interrupted(self):
        write(self)
        if rank == 1:
            raise KeyboardInterrupt

    TensorWrite.write = interrupted
    fails("interrupt")
    TensorWrite.write = write
    part = next(path for path in Path(f"{folder}/w").glob("version-000000000001-*part-00001*"))
    data = part.read_bytes()
    dist.barrier()
    for kind in ("flip", "cut", "gone"):
        if rank == 0:
            bad = bytearray(data)
            bad[len(bad) // 2] ^= 64
            part.unlink() if kind == "gone" else part.write_bytes(bad if kind == "flip" else data[:-9])
        dist.barrier()
        subscriber._held = None  # as after a start
        fails(kind)
        dist.barrier()
    if rank == 0:
        part.write_bytes(data)
    dist.barrier()
    assert subscriber.update(live).version == 1
    assert_version(live, 1, line, [Shard(1)])
    if rank == 0:
        live["even"].to_local().fill_(1)  # somebody else writes on one rank: all write again
    assert subscriber.update(live).version == 1
    assert_version(live, 1, line, [Shard(1)])
    try:
        subscriber.update(live | {"other": torch.zeros(1)} if rank == 1 else live)
    except ShrinkpointError as error:
        seen.append(["names", type(error).__name__])
    assert subscriber.update(live, wait=0.05) is None
    report(folder, rank, seen)
    publisher.close()
"""
)


def test_no_rank_has_a_version_that_another_one_could_not_take(tmp_path: Path):
    first, second = ranks(FOLLOWING, 2, tmp_path)
    assert first[0] == ["interrupt", "PolicyError"] and second[0] == ["interrupt", "KeyboardInterrupt"]
    kinds = [kind for kind, _ in first]
    assert kinds == ["interrupt", "flip", "cut", "gone", "names"] and first[1:] == second[1:]
    assert dict(first)["names"] == "MismatchError"


DEAD = (
    PRELUDE
    + """
import sys
from shrinkpoint.sync.live_writes import TensorWrite

def of_job(rank, folder):
    group = join(rank, 2, folder)
    line = init_device_mesh("cpu", (2,))
    live = zeroed(sharded(0, line, [Shard(1)]))
    subscriber, write = Subscriber(f"{folder}/w", ranks=group), TensorWrite.write
    with Publisher(f"{folder}/w", ranks=group) as publisher:
        publisher.publish(sharded(0, line, [Shard(0)]))
        subscriber.update(live)
        publisher.publish(sharded(1, line, [Shard(0)]))

    def killed(self):
        write(self)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    TensorWrite.write = killed
    try:
        subscriber.update(live)
    except MembershipError:
        assert_version(live, 0, line, [Shard(1)])
        return 7
    return 1

children = []
for rank in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        code = 1
        try:
            code = of_job(rank, sys.argv[1])
        finally:
            os._exit(code)
assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [7, -signal.SIGKILL]
"""
)


def test_death_of_a_rank_that_follows_gives_the_others_their_old_values_back(tmp_path: Path):
    run_forked(DEAD, str(tmp_path))
