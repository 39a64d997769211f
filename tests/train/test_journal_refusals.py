"""Promise of a journal: what it cannot replay is refused, with the reason, before a step is appended or lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.journal_training import Run, files, make
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import shrinkpoint as sp
from shrinkpoint.comm import compress_ddp
from shrinkpoint.errors import CorruptError, MismatchError, PolicyError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.train import Journal

pytestmark = pytest.mark.usefixtures("single_rank_group")


def test_what_cannot_be_replayed_is_refused_with_the_reason(tmp_path: Path):
    models = []

    def ddp(net: torch.nn.Module, **settings: Any) -> torch.nn.parallel.DistributedDataParallel:
        models.append(torch.nn.parallel.DistributedDataParallel(net, **settings))  # compress_ddp does not keep it alive
        return models[-1]

    manager, net = sp.CheckpointManager(tmp_path), lambda: torch.nn.Linear(4, 4)
    for compressor in ("ef(q4:64)", "ef21(top10)", "efmixed(top10)"):
        with pytest.raises(PolicyError, match=r'not on the wire.*feedback="restart"'):
            Journal(manager, compress_ddp(ddp(net()), compressor), print)
    both = compress_ddp(ddp(net()), "q4:64", average_compressor="ef(q4:64)")
    with pytest.raises(PolicyError, match="not on the wire"):
        Journal(manager, both, print)
    with pytest.raises(PolicyError, match=r"second hop.*average_compressor="):
        Journal(manager, compress_ddp(ddp(net()), "ef21(top10)"), print, feedback="restart")
    with pytest.raises(PolicyError, match="factors each rank remembers"):
        Journal(manager, compress_ddp(ddp(net()), "lowrank2"), print)
    with pytest.raises(PolicyError, match="find_unused_parameters"):
        Journal(manager, compress_ddp(ddp(net(), find_unused_parameters=True)), print)
    ignoring = net()
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["bias"])
    with pytest.raises(PolicyError, match="bias, which DDP ignores"):
        Journal(manager, compress_ddp(ddp(ignoring)), print)
    with pytest.raises(PolicyError, match="lossless"):
        Journal(sp.CheckpointManager(tmp_path, scheme=sp.Fisher(relative_error=0.3)), compress_ddp(ddp(net())), print)
    with pytest.raises(PolicyError, match="directory="):
        Journal(sp.CheckpointManager(MemoryStorage()), compress_ddp(ddp(net())), print)
    replicas = compress_ddp(ddp(net()))
    journal = Journal(manager, replicas, print)
    with pytest.raises(PolicyError, match="second journal"):
        Journal(manager, replicas, print)
    journal.close()
    Journal(manager, replicas, print).close()


@pytest.mark.parametrize("change", ["clipped", "accumulated"])
def test_gradients_that_change_after_the_backward_pass_are_refused(tmp_path: Path, change: str):
    run = make(tmp_path / "run").train(5)
    run.backward()
    before = [parameter.clone() for parameter in run.model.parameters()]
    if change == "clipped":
        nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    else:
        with run.model.no_sync():
            run.backward()
    with pytest.raises(PolicyError, match=r"gradient of shape .* that was changed"):
        run.journal.step(6)
    assert all(map(torch.equal, before, run.model.parameters()))
    run.optimizer.zero_grad()
    run.backward(), run.journal.step(6)
    run.close()


@pytest.mark.parametrize("change", ["unfrozen", "elsewhere"])
def test_gradients_of_an_optimizer_that_no_record_has_are_refused(tmp_path: Path, change: str):
    model, scale = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *(scale.parameters() if change == "elsewhere" else ())], lr=0.1)
    copy = torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=0.1)  # as of weights in another precision

    def update() -> None:
        copy.param_groups[0]["params"][0].grad = model.module[0].bias.grad.clone()
        copy.step(), optimizer.step(), optimizer.zero_grad()

    objects = {"model": model, "optimizer": [optimizer, copy]}
    with Journal(sp.CheckpointManager(tmp_path), compress_ddp(model), update) as journal:
        journal.save(0, **objects)
        for step in (1, 2):
            model(torch.ones(4)).sum().backward(), journal.step(step)
        if change == "unfrozen":
            model.module[1].requires_grad_(True)
        scale(model(torch.ones(4))).sum().backward()
        with pytest.raises(PolicyError, match=r"unfrozen or moved"):
            journal.step(3)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_settings_of_an_optimizer_that_change_outside_of_update_are_refused(tmp_path: Path, lr: Any):
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD([model.module.weight], lr=lr)
    objects = {"model": model, "optimizer": optimizer}

    def update() -> None:
        optimizer.step(), model.zero_grad()

    def backward() -> None:
        model(torch.ones(4)).sum().backward()

    with Journal(sp.CheckpointManager(tmp_path), compress_ddp(model), update) as journal:
        journal.save(0, **objects)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        backward(), journal.step(1)
        scheduler.step(), backward(), journal.step(2)
        scheduler.step(), backward()
        with pytest.raises(PolicyError, match=r"lr=0.05.* in group 0; expected .*lr=0.1.* in group 0\..*in `update`"):
            journal.step(3)
        journal.save(2, **objects)
        journal.step(3)
        optimizer.add_param_group({"params": [model.module.bias]})
        backward()
        with pytest.raises(PolicyError, match="params=1 in group 1"):
            journal.step(4)


def test_a_journal_of_other_settings_is_refused(tmp_path: Path):
    make(tmp_path / "run").train(2).close()
    run = make(tmp_path / "run", compressor="q8:64")
    with pytest.raises(MismatchError, match=r"q4:64.*q8:64"):
        run.journal.restore(**run.objects)
    run.close()


def test_calls_out_of_order_are_refused(tmp_path: Path):
    run = make(tmp_path / "run")
    run.backward()
    with pytest.raises(PolicyError, match="no state to begin with"):
        run.journal.step(1)
    run.journal.save(0, **run.objects)
    with pytest.raises(PolicyError, match="step 2; expected step 1"):
        run.journal.step(2)
    with pytest.raises(PolicyError, match="step 3; expected step 0"):
        run.journal.save(3, **run.objects)
    run.journal.step(1)
    with pytest.raises(PolicyError, match="backward"):
        run.journal.step(2)
    run.close()

    def again(run: Run) -> None:
        run.optimizer.zero_grad(), run.backward(), run.optimizer.step()

    run = make(tmp_path / "closure", update=again).train(0)
    run.backward()
    with pytest.raises(PolicyError, match="backward pass in `update`"):
        run.journal.step(1)
    run.close()


def test_a_closed_journal_says_so(tmp_path: Path):
    run = make(tmp_path).train(3).close()
    calls = (
        lambda: run.journal.step(4),
        lambda: run.journal.save(3, **run.objects),
        lambda: run.journal.restore(**run.objects),
    )
    for call in calls:
        with pytest.raises(PolicyError, match="closed journal"):
            call()


def test_after_a_restore_that_failed_no_step_is_appended(tmp_path: Path):
    run = make(tmp_path / "run").train(3)
    place = tmp_path / "run" / "journal" / files(tmp_path / "run")[0]
    data = place.read_bytes()
    place.write_bytes(data[:600] + b"damage" + data[606:])
    with pytest.raises(CorruptError):
        run.journal.restore(**run.objects)
    run.backward()
    with pytest.raises(PolicyError, match="no state to begin with"):
        run.journal.step(4)
    run.close()


@pytest.mark.parametrize("change", ["no generators", "short generator", "short buffer", "gradients", "counts"])
def test_a_record_that_is_whole_and_wrong_is_an_error_of_this_library(tmp_path: Path, change: str):
    run = make(tmp_path / "run").train(1)
    blobs, counts = run.journal._state.blobs, run.journal._compression.counts

    def changed() -> dict:
        result = blobs()
        if change == "no generators":
            result.pop("rng/torch")
        if change.startswith("short"):
            name = "rng/numpy" if change == "short generator" else "buffer/norm.running_mean"
            result[name] = [bytes(result[name][0])[:3]]
        return result

    run.journal._state.blobs = changed
    if change == "counts":
        run.journal._compression.counts = lambda: {"first": [-1]}
    if change == "gradients":
        messages = run.journal._record.messages
        run.journal._record.messages = lambda step: messages(step)[1:]
    run.backward(), run.journal.step(2)
    run.journal._compression.counts = counts
    run.close()
    run = make(tmp_path / "run")
    with pytest.raises((CorruptError, MismatchError)):
        run.journal.restore(**run.objects)
    run.close()
