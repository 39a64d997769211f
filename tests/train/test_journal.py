"""Promise: after a crash a run goes on from its last step, bit for bit, and never from a state that it did not have."""

from __future__ import annotations

import random
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.journal_training import OPTIMIZERS, Run, files, make
from helpers.processes import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import shrinkpoint as sp
from shrinkpoint.comm import compress_ddp
from shrinkpoint.errors import CorruptError, LockedError, MismatchError, PolicyError, StorageError
from shrinkpoint.storage import LocalStorage
from shrinkpoint.train import Journal


@pytest.fixture(autouse=True)
def begin(single_rank_group: None) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_from_its_last_step(tmp_path: Path, optimizer: str):
    expected = make(tmp_path / "whole", optimizer=optimizer).train(17).close()
    make(tmp_path / "run", optimizer=optimizer).train(13).close()
    run = make(tmp_path / "run", optimizer=optimizer).train(17).close()
    assert run.restored is not None
    assert (run.restored.step, run.restored.replayed, run.restored.checkpoint.step) == (13, 3, 10)
    assert run.bits() == expected.bits() and run.random() == expected.random()


def test_a_run_that_stops_again_and_again_is_the_same(tmp_path: Path):
    expected = make(tmp_path / "whole").train(17).close().bits()
    for last in range(18):
        run = make(tmp_path / "run").train(last).close()
    assert run.bits() == expected


def test_records_go_with_the_checkpoint_that_covers_them(tmp_path: Path):
    run = make(tmp_path).train(4)
    assert files(tmp_path) == ["000000000000-00000.journal"]
    run.backward(), run.journal.step(5)
    run.journal.save(5, **run.objects)
    assert files(tmp_path) == ["000000000005-00000.journal"]
    run.close()


def test_a_checkpoint_that_was_not_committed_costs_no_step(tmp_path: Path):
    expected = make(tmp_path / "whole").train(9, save_every=100).close().bits()
    run = make(tmp_path / "run").train(4)
    run.manager.save = lambda *a, **b: None  # as if killed before its manifest was there
    for step in range(5, 9):
        run.backward(), run.journal.step(step)
        if step == 6:
            run.journal.save(6, **run.objects)
    run.close()
    assert files(tmp_path / "run") == ["000000000000-00000.journal", "000000000006-00000.journal"]
    again = make(tmp_path / "run").train(9)
    assert again.restored is not None and again.restored.step == 8 and again.restored.checkpoint.step == 0
    assert again.close().bits() == expected


def test_records_stay_until_a_background_save_is_committed(tmp_path: Path):
    run = make(tmp_path / "run", background=True).train(12)
    run.manager.wait()
    run.backward(), run.journal.step(13)
    assert files(tmp_path / "run") == ["000000000010-00000.journal"]
    run.close()
    expected = make(tmp_path / "whole").train(14).close().bits()
    assert make(tmp_path / "run").train(14).close().bits() == expected


def test_records_go_where_each_save_lasts_longer_than_the_steps_to_the_next(tmp_path: Path, monkeypatch):
    """The next save has always begun when one is committed: what lies before that one goes all the same."""
    run = make(tmp_path / "run", background=True).train(0)
    put = LocalStorage.put
    monkeypatch.setattr(LocalStorage, "put", lambda *a, **b: (time.sleep(0.05), put(*a, **b))[1])
    for step in range(1, 21):
        run.backward(), run.journal.step(step)
        if step % 2 == 0:
            run.journal.save(step, **run.objects)
        assert len(files(tmp_path / "run")) <= 3
    run.close()
    (tmp_path / "run" / "journal" / "000000000002-00000.journal").write_bytes(b"")  # as a killed run leaves them
    again = make(tmp_path / "run").train(20)
    assert again.restored is not None and again.restored.step == 20
    assert len(files(tmp_path / "run")) <= 2
    again.close()


def test_a_journal_that_is_cut_anywhere_gives_a_state_of_the_run(tmp_path: Path):
    states, run = {}, make(tmp_path / "run").train(0)
    for step in range(1, 4):
        run.backward(), run.journal.step(step)
        states[step] = run.bits()
    run.close()
    path = tmp_path / "run" / "journal" / "000000000000-00000.journal"
    data = path.read_bytes()
    seen = set()
    for size in [*range(len(data), len(data) * 3 // 4, -977), len(data) // 2, len(data) // 5]:
        path.write_bytes(data[:size])
        again = make(tmp_path / "run")
        restored = again.journal.restore(**again.objects)
        assert restored is not None
        seen.add(restored.step)
        assert restored.step == 0 or again.bits() == states[restored.step]
        again.close()
    assert seen >= {0, 1, 2, 3}


def test_a_damaged_record_is_an_error_that_names_the_place(tmp_path: Path):
    run = make(tmp_path / "run").train(2)
    state, place = run.bits(), (tmp_path / "run" / "journal" / files(tmp_path / "run")[0])
    size = place.stat().st_size
    run.train, _ = None, run.backward()
    run.journal.step(3), run.backward(), run.journal.step(4)
    run.close()
    data = bytearray(place.read_bytes())
    data[size + 200] ^= 1
    place.write_bytes(data)
    again = make(tmp_path / "run")
    with pytest.raises(CorruptError, match=f"{place.name}, byte {size}.*strict=False"):
        again.journal.restore(**again.objects)
    with pytest.warns(UserWarning, match="up to step 2"):
        restored = again.journal.restore(strict=False, **again.objects)
    assert restored is not None and restored.step == 2 and again.bits() == state
    again.backward(), again.journal.step(3)
    again.close()
    third = make(tmp_path / "run").train(3).close()  # the damaged bytes are gone
    assert third.restored is not None and third.restored.step == 3


def test_a_place_that_takes_no_more_is_an_error_and_loses_no_step(tmp_path: Path):
    run = make(tmp_path / "run").train(3)
    state, place = run.bits(), tmp_path / "run" / "journal" / files(tmp_path / "run")[0]
    size = place.stat().st_size
    run.backward()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, limits[1]))  # a part of the record is written
    try:
        with pytest.raises(StorageError, match="appending failed"):
            run.journal.step(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert place.stat().st_size == size
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    again = make(copy).train(3).close()
    assert again.restored is not None and again.restored.step == 3 and again.bits() == state
    run.journal.step(4)  # there is space again
    assert run.close().bits() == make(tmp_path / "whole").train(4).close().bits()


@pytest.mark.parametrize("gone", ["files", "journal", "run"])
def test_a_journal_that_was_deleted_is_an_error_and_a_save_begins_it_anew(tmp_path: Path, gone: str):
    where = tmp_path / "run"
    run = make(where).train(3)
    match gone:
        case "files":
            (where / "journal" / files(where)[0]).unlink()
        case "journal":
            (where / "journal").rename(tmp_path / "elsewhere")
        case _:
            shutil.rmtree(where)
    run.backward()
    with pytest.raises(StorageError, match="deleted"):
        run.journal.step(4)
    run.journal.save(3, **run.objects)
    run.journal.step(4)
    bits = run.close().bits()
    again = make(where).train(4).close()
    assert again.restored is not None and again.restored.step == 4 and again.bits() == bits


def test_a_journal_whose_lock_was_deleted_takes_it_again_or_is_refused(tmp_path: Path):
    where, lock = tmp_path / "run", tmp_path / "run" / "journal" / ".shrinkpoint-lock-00000"
    run, other = make(where).train(3), make(tmp_path / "other", directory=where / "journal")
    lock.unlink()
    run.journal.save(3, **run.objects)
    with pytest.raises(LockedError):
        other.journal.save(0, **other.objects)
    lock.unlink()
    other.journal.save(0, **other.objects)
    with pytest.raises(LockedError):
        run.journal.save(3, **run.objects)
    other.close(), run.close()


def test_a_step_whose_update_raises_is_not_in_the_journal(tmp_path: Path):
    expected = make(tmp_path / "whole").train(4).close().bits()

    def raising(run: Run) -> None:
        run.optimizer.step()
        raise ArithmeticError("in the middle")

    make(tmp_path / "run").train(3).close()
    run = make(tmp_path / "run", update=raising)
    with pytest.raises(ArithmeticError, match="in the middle"):  # and so does a replay
        run.journal.restore(**run.objects)
    run.close()
    run = make(tmp_path / "run").train(3)
    update, run.journal._update = run.journal._update, lambda: raising(run)
    run.backward()
    with pytest.raises(ArithmeticError):
        run.journal.step(4)
    run.journal._update = update
    run.backward()
    for refused in (lambda: run.journal.step(4), lambda: run.journal.save(3, **run.objects)):
        with pytest.raises(PolicyError, match="`update` that raised"):  # the weights are those of no step
            refused()
    run.train(4)
    assert run.restored is not None and run.restored.step == 3
    assert run.close().bits() == expected


def test_two_runs_do_not_write_one_journal(tmp_path: Path):
    run, other = make(tmp_path / "run").train(3), make(tmp_path / "run")
    data = (tmp_path / "run" / "journal" / files(tmp_path / "run")[0]).read_bytes()
    with pytest.raises(LockedError):
        other.journal.restore(**other.objects)
    with pytest.raises(LockedError):
        other.journal.save(0, **other.objects)
    assert (tmp_path / "run" / "journal" / files(tmp_path / "run")[0]).read_bytes() == data
    run.close()
    assert other.train(3).close().bits() == run.bits()


def test_records_stay_until_the_checkpoint_of_this_course_of_the_run_is_committed(tmp_path: Path):
    expected = make(tmp_path / "whole").train(7, save_every=100).close().bits()
    run = make(tmp_path / "run").train(0)
    run.manager.save(5, **run.objects)  # an old checkpoint of this step
    run.manager.store.forget(5)
    run.manager.save = lambda *a, **b: None  # as if killed before its manifest was there
    for step in range(1, 7):
        run.backward(), run.journal.step(step)
        if step == 5:
            run.journal.save(5, **run.objects)
    assert len(files(tmp_path / "run")) == 2
    run.close()
    assert make(tmp_path / "run").train(7).close().bits() == expected


def test_a_checkpoint_that_is_older_than_an_open_file_does_not_lose_the_file(tmp_path: Path):
    expected = make(tmp_path / "whole").train(8, save_every=100).close().bits()
    run = make(tmp_path / "run").train(5, save_every=100)
    run.manager.store.storage.delete = lambda *a: None
    keep = (tmp_path / "run" / "journal" / files(tmp_path / "run")[0]).read_bytes()
    run.journal.save(5, **run.objects)
    run.close()
    (tmp_path / "run" / "journal" / "000000000000-00000.journal").write_bytes(keep)  # as before it was deleted
    run = make(tmp_path / "run")
    restored = run.journal.restore(0, **run.objects)
    assert restored is not None and (restored.step, restored.replayed) == (5, 5)
    for step in (6, 7):
        run.backward(), run.journal.step(step)
    run.close()
    run = make(tmp_path / "run").train(8, save_every=100)  # from the checkpoint of step 5
    assert run.restored is not None and (run.restored.step, run.restored.checkpoint.step) == (7, 5)
    assert run.close().bits() == expected


def test_a_rehearsal_finds_what_does_not_repeat(tmp_path: Path):
    run = make(tmp_path / "run", background=True).train(8)
    state = run.bits(), run.random()
    restored = run.journal.rehearse(**run.objects)
    assert (restored.step, restored.replayed) == (8, 3) and (run.bits(), run.random()) == state
    assert run.train(8).close().bits() == state[0]
    calls = []

    def counted(run: Run) -> None:
        calls.append(None)
        run.optimizer.param_groups[0]["lr"] = 0.01 + 1e-4 * len(calls)
        run.optimizer.step(), run.optimizer.zero_grad()

    run = make(tmp_path / "counted", update=counted, check_every=1000).train(3)
    with pytest.raises(MismatchError, match=r"step 3: a replay that differs in .*weights.*optimizer"):
        run.journal.rehearse(**run.objects)
    run.close()
    averages = nn.Linear(1, 1)

    def averaged(run: Run) -> None:
        run.optimizer.step(), run.optimizer.zero_grad()
        averages.bias.data += len(calls)
        calls.append(None)

    run = make(tmp_path / "averaged", update=averaged).train(3)
    run.journal.save(3, **run.objects, averages=averages)
    run.backward(), run.journal.step(4)
    with pytest.raises(MismatchError, match=r"step 4: a replay that differs in averages.bias"):
        run.journal.rehearse(**run.objects, averages=averages)
    run.close()


def test_the_bound_holds_with_many_buffers(tmp_path: Path):
    def made(where: Path) -> Run:
        run = make(where, max_bytes=400_000)
        for index in range(150):
            run.model.module.norm.register_buffer(f"a_name_that_is_not_short_{index}", torch.zeros(1))
        return run

    run = made(tmp_path / "run")
    run.journal.save(0, **run.objects)
    place = tmp_path / "run" / "journal" / files(tmp_path / "run")[0]
    begin, step = place.stat().st_size, 0
    while not run.journal.is_full:
        step += 1
        run.backward(), run.journal.step(step)
    assert 300_000 < place.stat().st_size - begin <= 400_000
    run.close()


def test_another_branch_of_a_run_is_not_continued(tmp_path: Path):
    run = make(tmp_path / "run").train(8)
    run.close()
    again = make(tmp_path / "run")
    with pytest.warns(UserWarning, match="checkpoints up to step 5"):
        restored = again.journal.restore(0, **again.objects)
    assert restored is not None and restored.step == 0  # its steps went with the checkpoint of step 5
    for step in range(1, 4):
        again.backward(), again.journal.step(step)
    assert files(tmp_path / "run") == ["000000000000-00000.journal"]
    again.close()


def test_an_update_that_does_something_else_is_found(tmp_path: Path):
    def twice(run: Run) -> None:
        run.optimizer.step(), run.optimizer.step(), run.optimizer.zero_grad()

    make(tmp_path / "run", check_every=1).train(4).close()
    run = make(tmp_path / "run", update=twice)
    with pytest.raises(MismatchError, match="other weights"):
        run.journal.restore(**run.objects)
    run.close()


def test_a_grad_scaler_skips_the_same_steps(tmp_path: Path):
    def made(where: Path) -> tuple[Run, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

        def update(run: Run) -> None:
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer), scaler.update(), run.optimizer.zero_grad()

        return make(where, update=update), scaler

    def train(where: Path, last: int) -> str:
        run, scaler = made(where)
        objects = {**run.objects, "scaler": scaler}
        restored = run.journal.restore(**objects)
        if restored is None:
            torch.manual_seed(3)
            run.journal.save(0, **objects)
        for step in range(1 if restored is None else restored.step + 1, last + 1):
            loss = run.model(torch.randn(6, 3, 4, 4)).square().mean() * (torch.inf if step in (2, 5) else 1.0)
            scaler.scale(loss).backward()
            run.journal.step(step)
        return run.close().bits() + str(scaler.get_scale())

    expected = train(tmp_path / "whole", 7)
    train(tmp_path / "run", 6)
    assert train(tmp_path / "run", 7) == expected


def test_accumulated_gradients_are_replayed(tmp_path: Path):
    def train(where: Path, last: int) -> str:
        run = make(where)
        restored = run.journal.restore(**run.objects)
        if restored is None:
            torch.manual_seed(3)
            run.journal.save(0, **run.objects)
        for step in range(1 if restored is None else restored.step + 1, last + 1):
            with run.model.no_sync():
                run.backward()
            run.backward()
            run.journal.step(step)
        return run.close().bits()

    expected = train(tmp_path / "whole", 5)
    train(tmp_path / "run", 4)
    assert train(tmp_path / "run", 5) == expected


def test_a_full_journal_stops_says_so_and_asks_for_a_save(tmp_path: Path):
    run = make(tmp_path / "run", max_bytes=120_000).train(0)
    full = []
    for step in range(1, 9):
        run.backward()
        if run.journal.is_full:
            full.append(step)
            break
        run.journal.step(step)
    assert full and (tmp_path / "run" / "journal" / files(tmp_path / "run")[0]).stat().st_size < 120_000
    with pytest.warns(UserWarning, match="max_bytes=120000"):
        run.journal.step(full[0])
    run.backward(), run.journal.step(full[0] + 1)  # warned once
    again = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert make(again).train(0).close().restored.step == full[0] - 1  # type: ignore[union-attr]
    run.journal.save(full[0] + 1, **run.objects)
    assert not run.journal.is_full
    run.close()


def test_going_back_behind_a_later_checkpoint_is_warned_of(tmp_path: Path):
    make(tmp_path).train(12).close()
    run = make(tmp_path)
    with pytest.warns(UserWarning, match="goes on from step 5, but has checkpoints up to step 10"):
        run.journal.restore(5, **run.objects)
    run.close()


def test_steps_behind_a_checkpoint_that_the_journal_did_not_save_are_not_lost_without_a_word(tmp_path: Path):
    run = make(tmp_path).train(7, save_every=10)
    run.manager.save(7, **run.objects)
    for step in (8, 9):
        run.backward(), run.journal.step(step)
    expected = run.close().bits()
    run = make(tmp_path)
    with pytest.raises(MismatchError, match=r"step 7, .*without the journal, and 2 steps.*checkpoint of step 0"):
        run.journal.restore(**run.objects)
    assert run.journal.restore(0, **run.objects).step == 9
    assert run.bits() == expected
    assert run.journal.restore(strict=False, **run.objects).step == 7
    run.close()


def test_a_parameter_without_values_is_replayed_like_the_others(tmp_path: Path):
    model = nn.Linear(4, 4)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    model.register_forward_hook(lambda module, x, y: y + module.empty.sum())
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    objects: dict[str, Any] = {"model": ddp, "optimizer": optimizer}

    def update() -> None:
        optimizer.step(), optimizer.zero_grad()

    with Journal(sp.CheckpointManager(tmp_path), compress_ddp(ddp), update) as journal:
        journal.restore(**objects)
        journal.save(0, **objects)
        ddp(torch.ones(2, 4)).square().mean().backward()
        journal.step(1)
        assert journal.rehearse(**objects).replayed == 1


RANKS = """
    import os, warnings
    import torch
    import torch.distributed as dist
    from helpers.journal_training import make
    from helpers.replica_search import caught, join, leave

    HOWS = {
        "q4:64": {},
        "q3:64:dither": {},
        "n3:64": {"wire": {"min_numel": 40}},
        "top10": {"optimizer": "sgd"},
        "top6.25:64:q2:64": {"optimizer": "adam"},
        "rand10": {"wire": {"average_compressor": "bf16"}},
    }

    def of_rank(rank, width, folder):
        said = join(rank, width, folder)

        def state(run):
            return [run.bits(), run.random(), run.restored and run.restored.step]

        for how, options in HOWS.items():
            options = options | {"rank": rank}
            name = f"{folder}/{how}"
            end = 7 if how == "q4:64" else 6  # past another save, or not
            said["whole " + how] = state(make(name + "-whole", how, **options).train(end, 3).close())
            for last in (5, end):
                said[how] = state(make(name, how, **options).train(last, 3).close())
            dist.barrier()

        # a rank that was killed a step earlier than the others: all resume from its last step
        run = make(f"{folder}/uneven", rank=rank).train(5, 3).close()
        dist.barrier()
        if rank == 1:
            path = f"{folder}/uneven/journal/000000000003-00001.journal"
            os.truncate(path, os.path.getsize(path) - 9)
        dist.barrier()
        said["uneven"] = state(make(f"{folder}/uneven", rank=rank).train(7, 3).close())

        # feedback restarts: the weights of the last step are right, on all ranks
        for how, wire in (("ef(q2:64)", {}), ("ef21(top10)", {"average_compressor": "top10"})):
            options = {"rank": rank, "feedback": "restart", "wire": wire}
            run = make(f"{folder}/{how}", how, **options).train(5, 3).close()
            again = make(f"{folder}/{how}", how, **options).train(5, 3)
            said[how] = [run.bits() == again.bits(), again.restored.step]
            again.backward()
            again.journal.step(6)
            said[how].append(again.close().bits())

        # a file that one rank cannot begin: no checkpoint, and all go on in the old one
        run = make(f"{folder}/blocked", rank=rank).train(5, 3)
        if rank == 1:
            os.mkdir(f"{folder}/blocked/journal/000000000005-00001.journal")
        said["blocked"] = caught(lambda: run.journal.save(5, **run.objects))
        dist.barrier()
        if rank == 1:
            os.rmdir(f"{folder}/blocked/journal/000000000005-00001.journal")
        run.backward(), run.journal.step(6), run.close()
        said["after"] = state(make(f"{folder}/blocked", rank=rank).train(7, 3).close())

        # a rank that has no file, or another model
        run = make(f"{folder}/absent", rank=rank).train(5, 3).close()
        dist.barrier()
        if rank == 1:
            os.remove(f"{folder}/absent/journal/000000000003-00001.journal")
        dist.barrier()
        run = make(f"{folder}/absent", rank=rank)
        said["absent"] = caught(lambda: run.journal.restore(**run.objects))
        said["unlike"] = caught(lambda: run.journal.restore(**run.objects, other=torch.nn.Linear(1, 1))
                                if rank == 1 else run.journal.restore(**run.objects))
        with warnings.catch_warnings(record=True) as said["warned"]:
            warnings.simplefilter("always")
            restored = run.journal.restore(strict=False, **run.objects)
        said["warned"] = [str(one.message) for one in said["warned"]] + [restored.step]
        run.close()

        # an error of one rank is one of all
        run = make(f"{folder}/damaged", rank=rank).train(5, 3).close()
        dist.barrier()
        if rank == 1:
            with open(f"{folder}/damaged/journal/000000000003-00001.journal", "r+b") as file:
                file.seek(600)
                file.write(b"damage")
        dist.barrier()
        run = make(f"{folder}/damaged", rank=rank)
        said["damaged"] = caught(lambda: run.journal.restore(**run.objects))
        run.close()
        leave(said, rank, folder)
"""


@pytest.mark.parametrize("width", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_ranks_go_on_from_their_last_step(tmp_path: Path, width: int):
    reports = ranks(RANKS, width, tmp_path)
    weights = set()
    for report in reports:
        for how in [name.removeprefix("whole ") for name in report if name.startswith("whole ")]:
            expected = report["whole " + how]
            assert report[how] == [*expected[:2], 5], how
        assert report["uneven"] == [*report["whole q4:64"][:2], 4]
        for how in ("ef(q2:64)", "ef21(top10)"):
            assert report[how][:2] == [True, 5]
        assert report["blocked"][0] == "StorageError" and "rank 1: " in report["blocked"][1]
        assert report["after"] == [*report["whole q4:64"][:2], 6]
        assert report["absent"][0] == "MismatchError" and "no file of rank 1, and 2 steps" in report["absent"][1]
        assert report["unlike"][0] == "MismatchError" and "rank 1: " in report["unlike"][1]
        assert "not replayed" in report["warned"][0] and report["warned"][-1] == 3
        assert report["damaged"][0] == "CorruptError" and "rank 1: " in report["damaged"][1]
        weights.add(str([report[how][2] for how in ("ef(q2:64)", "ef21(top10)")]))
    assert len({str(report["whole q4:64"][1]) for report in reports}) == width  # each has dropout of its own
