"""Directories that a framework names, in a bucket: each is a keyframe, and loads without any other."""

from __future__ import annotations

import itertools
import os
from datetime import datetime, timezone

import pytest
import torch
from helpers import accelerate_runs, lightning_runs
from helpers.strategies import difference
from torch import nn

import shrinkpoint
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError, StorageError
from shrinkpoint.storage import directory_storage
from shrinkpoint.storage.paths import parse_object_url
from shrinkpoint.store import Keep
from shrinkpoint.store.directory import find_checkpoints, read_directory_manifest
from shrinkpoint.store.directory_retention import plan_run
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.accelerate import AcceleratorCheckpointer, load_state
from shrinkpoint.train.dcp import Writer, reset_chains
from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback, load_from_checkpoint
from shrinkpoint.train.lightning import latest_valid as latest_valid_of_lightning

_nightly = pytest.mark.nightly
_numbers = itertools.count()


@pytest.fixture
def url(s3) -> str:
    return f"s3://checkpoints/{os.getpid()}/directories-{next(_numbers)}"


pytestmark = pytest.mark.usefixtures("no_accelerator")


@pytest.mark.parametrize("background", [False, True])
def test_checkpointer_saves_loads_and_discards(url, background) -> None:
    state = {"w": torch.randn(5000), "n": 1}
    checkpointer = Checkpointer(background=background)
    for step in range(3):
        state["w"] += 1e-4
        checkpointer.save(f"{url}/step-{step}", state, step=step)
    checkpointer.wait()
    assert [read_directory_manifest(f"{url}/step-{step}").depth for step in range(3)] == [0, 0, 0]
    checkpointer.discard(f"{url}/step-0")
    assert directory_storage(f"{url}/step-0").list() == []
    checkpointer.discard(f"{url}/step-0")  # a missing one is no error
    restored = Checkpointer().load(f"{url}/step-2")
    assert (str(restored.directory), restored.step) == (f"{url}/step-2", 2)
    assert difference(restored.state, state) is None
    assert difference(shrinkpoint.load(f"{url}/step-2"), state) is None
    with pytest.raises(NotFoundError, match="step-0"):
        checkpointer.load(f"{url}/step-0")
    checkpointer.close()


@_nightly
def test_save_that_fails_leaves_what_was_there(url, s3) -> None:
    checkpointer, state = Checkpointer(), {"w": torch.randn(5000)}
    checkpointer.save(f"{url}/last", state)
    for pattern in (r"PUT .*rank-00000\.\d+\.safetensors", "PUT .*shrinkpoint.json"):
        s3.fail(pattern, "error", count=1000)
        with pytest.raises(StorageError, match="500"):
            checkpointer.save(f"{url}/last", {"w": torch.randn(5000)})
        s3.clear()
        assert difference(Checkpointer().load(f"{url}/last").state, state) is None
    checkpointer.save(f"{url}/last", {"w": -state["w"]})
    assert difference(Checkpointer().load(f"{url}/last").state, {"w": -state["w"]}) is None
    assert len([key for key in directory_storage(f"{url}/last").list() if "rank" in key]) == 1


@_nightly
@pytest.mark.filterwarnings(*lightning_runs.QUIET)
def test_trainer_saves_to_a_bucket_and_resumes_from_it(url, tmp_path) -> None:
    first = lightning_runs.small()
    trainer = lightning_runs.trainer(tmp_path, ShrinkIO(), epochs=2, callbacks=[ShrinkIOCallback()])
    trainer.fit(first, lightning_runs.points())
    trainer.save_checkpoint(f"{url}/2.ckpt")
    again = lightning_runs.small(1)
    trainer = lightning_runs.trainer(tmp_path, ShrinkIO(), epochs=3, callbacks=[ShrinkIOCallback()])
    trainer.fit(again, lightning_runs.points(), ckpt_path=f"{url}/2.ckpt", weights_only=False)
    assert trainer.global_step == 3 * 4
    loaded = load_from_checkpoint(lightning_runs.Small, f"{url}/2.ckpt")
    assert difference(loaded.state_dict(), first.state_dict()) is None
    with pytest.raises(PolicyError, match="Pass the path of a checkpoint"):
        latest_valid_of_lightning(url)


@_nightly
def test_accelerate(url) -> None:
    run = accelerate_runs.Loop()
    shrink = AcceleratorCheckpointer(run.accelerator)
    for number in range(2):
        run.steps(1)
        shrink.save_state(f"{url}/{number}")
    saved = run.state()
    accelerate_runs.forget()
    other = accelerate_runs.Loop(seed=9)
    restored = load_state(other.accelerator, f"{url}/1")
    assert str(restored.directory) == f"{url}/1"
    assert other.state() == saved
    assert [read_directory_manifest(f"{url}/{number}").depth for number in range(2)] == [0, 0]
    with pytest.raises(NotFoundError, match=f"{url}/7"):
        load_state(other.accelerator, f"{url}/7")


def test_rules_keep_and_strip_directories_in_a_bucket(url) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer()
    for step in range(6):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        checkpointer.retain(Keep(last=2, best=1, moments_last=2), deletes=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpointer.save(f"{url}/step-{step}", state, step=step, metrics={"val_loss": abs(step - 1)})
        if step == 1:
            best = {name: value.clone() for name, value in state["model"].items()}
    manifests = {place.name: read_directory_manifest(place) for place in find_checkpoints(parse_object_url(url))}
    assert [*manifests] == ["step-1", "step-4", "step-5"]
    assert [manifest.weights_only for manifest in manifests.values()] == [True, False, False]
    stripped = shrinkpoint.load(f"{url}/step-1")
    assert difference({**stripped["model"]}, best) is None and stripped["optimizer"]["state"] == {}
    assert len([key for key in directory_storage(f"{url}/step-1").list() if key.startswith("rank-")]) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_delta_in_a_bucket_keeps_the_directories_that_it_needs(url) -> None:
    model = nn.Linear(64, 64)
    reset_chains()
    for step in range(6):
        with torch.no_grad():
            model.weight[0] += 1e-3
        writer = Writer(f"{url}/step-{step}", step=step, keyframe_every=3)
        torch.distributed.checkpoint.save({"model": model.state_dict()}, storage_writer=writer)
    places = find_checkpoints(parse_object_url(url))
    plan = plan_run(places, Keep(last=2), datetime.now(timezone.utc))
    assert [place.name for place in plan.delete] == ["step-0", "step-1", "step-2"]
    assert plan.reasons[places[3]] == ("base of step-4", "base of step-5")
    assert not plan_run(places, Keep(last=1, moments_last=1), datetime.now(timezone.utc)).strip


def test_a_store_in_a_bucket_is_not_written_over_a_run(url):
    model = nn.Linear(3, 2)
    Checkpointer().save(f"{url}/step-000000001", model.state_dict(), step=1)
    with shrinkpoint.CheckpointManager(url) as store:
        for call in (lambda: store.restore(model=model), lambda: store.save(1, model=model)):
            with pytest.raises(MismatchError, match="the run of a framework, with step-000000001"):
                call()
