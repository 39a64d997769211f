"""What happens to many ranks: a full disk, a kill, and a launcher's own processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.multi_rank_training import digest
from helpers.parameters import each_value
from helpers.paths import TESTS
from helpers.processes import ranks
from helpers.timeouts import PATIENCE

from shrinkpoint.train.dcp import load


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 600 KiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


FULL = """
import os, torch
from helpers import multi_rank_training as training
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from shrinkpoint.errors import NoSpaceError
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Reader, Writer, latest_valid

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    place = f"{folder}/tiny"
    x = torch.randn(30_000, generator=torch.Generator().manual_seed(rank))
    state = lambda step: {f"x{rank}": x + step, "step": step}
    dcp.save(state(0), storage_writer=Writer(f"{place}/step-0"))
    dist.barrier()
    if rank == 1:
        with open(f"{place}/ballast", "wb") as file:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, 200_000)
    dist.barrier()
    try:
        dcp.save(state(0.3), storage_writer=Writer(f"{place}/step-1", keyframe_every=1))
        raised = []
    except dcp.api.CheckpointException as error:
        raised = [type(one).__name__ for one, _ in error.failures.values()]
    dist.barrier()
    found = latest_valid(place).name
    if rank == 1:
        os.remove(f"{place}/ballast")
    dist.barrier()
    dcp.save(state(0.6), storage_writer=Writer(f"{place}/step-1", keyframe_every=1))
    target = {f"x{rank}": torch.zeros(30_000), "step": None}
    dcp.load(target, storage_reader=Reader(latest_valid(place)))
    left = sorted(directories.own_keys(f"{place}/step-1"))
    training.done(rank, folder, [raised, found, torch.equal(target[f"x{rank}"], x + 0.6), target["step"], left])
"""


def test_a_full_disk_is_an_error_on_all_ranks_and_the_next_save_succeeds(tiny: Path) -> None:
    for raised, found, same, step, left in ranks(FULL, 2, tiny.parent):
        assert set(raised) == {"NoSpaceError"}
        assert (found, same, step) == ("step-0", True, 0.6)
        assert len(left) == 2


TRAINING = """
    import os, sys, torch
    import torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from helpers import multi_rank_training as training
    from shrinkpoint.train.dcp import Reader, Writer, latest_valid

    def main(folder, steps):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        run = training.Run(init_device_mesh("cpu", (dist.get_world_size(),)))
        found = latest_valid(folder)
        if found is not None:
            run.train(1)
            run.restore(storage_reader=Reader(found))
            run.generator.manual_seed(int(run.model.count))
            loaded = training.digest(run.state())
            open(f"{folder}/loaded-{int(run.model.count)}-{dist.get_rank()}.txt", "w").write(loaded)
        for _ in range(steps):
            run.train()
            run.generator.manual_seed(int(run.model.count))
            dcp.save(run.state(), storage_writer=Writer(f"{folder}/step-{int(run.model.count)}"))
        results = training.digest(run.state())
        open(f"{folder}/{int(run.model.count)}-{dist.get_rank()}.txt", "w").write(results)
        dist.barrier()
        os._exit(0)  # gloo's end of a group aborts now and then

    main(sys.argv[1], int(sys.argv[2]))
"""


def torchrun(script: Path, width: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={width}"]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_processes_of_torchrun_save_is_loaded_elsewhere(tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(TRAINING))
    torchrun(script, 2, str(tmp_path), "2")
    saved = {(tmp_path / f"2-{rank}.txt").read_text() for rank in range(2)}
    assert saved == {digest(load(tmp_path / "step-2"))}


@pytest.mark.nightly
def test_torchrun_goes_on_with_any_number_of_processes(tmp_path: Path) -> None:
    script, reached = tmp_path / "training.py", 3
    script.write_text(textwrap.dedent(TRAINING))
    torchrun(script, 2, str(tmp_path), "3")
    for width in (1, 3, 4, 2):
        torchrun(script, width, str(tmp_path), "1")
        saved = (tmp_path / f"{reached}-0.txt").read_text()
        assert {(tmp_path / f"loaded-{reached}-{rank}.txt").read_text() for rank in range(width)} == {saved}
        reached += 1


KILLED = """
import os, signal, threading, torch
from helpers import multi_rank_training as training
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from shrinkpoint.train.dcp import Writer

def of_rank(rank, width, folder):
    training.start(rank, width, folder)
    run = training.Run(training.mesh_of(range(width)))
    run.train(1)
    dcp.save(run.state(), storage_writer=Writer(f"{folder}/step-0"))
    dcp.save(run.state(), storage_writer=Writer(f"{folder}/again"))
    note = lambda: print(training.digest(run.state()), file=open(f"{folder}/digests-{rank}.txt", "a"), flush=True)
    note()
    if rank == VICTIM:
        threading.Timer(DELAY, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        for step in range(1, 1000):
            run.train(1)
            note()
            dcp.save(run.state(), storage_writer=Writer(f"{folder}/again" if step % 2 else f"{folder}/step-{step}"))
    except BaseException:
        raise SystemExit(1)
"""
AFTER = """
import torch
from helpers import multi_rank_training as training
import torch.distributed.checkpoint as dcp
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Reader, latest_valid

def of_rank(rank, width, folder):
    training.start(rank, width, folder + "/after")
    run, found = training.Run(training.mesh_of(range(width))), []
    run.train(1)
    for place in (latest_valid(folder), folder + "/again"):
        directories.verify_directory(place, deep=True)
        found.append(training.digest(run.restore(storage_reader=Reader(place))))
    training.done(rank, folder, found)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("victim", "delay"), each_value([0, 1], [0.05, 0.13, 0.31, 0.57]))
def test_a_rank_that_is_killed_while_saving_leaves_what_was_committed(
    victim: int, delay: float, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):  # one of them was killed
        ranks(f"VICTIM, DELAY = {victim}, {delay}\n{KILLED}", 2, tmp_path)
    (tmp_path / "after").mkdir()
    digests = (tmp_path / f"digests-{1 - victim}.txt").read_text().split()
    for found in ranks(AFTER, 2, tmp_path):
        assert set(found) <= set(digests[-3:])  # even steps go to one place, odd ones to the other
