"""Promise: rules of retention hold in the directories of every framework, and whatever they keep loads as it was."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from helpers import accelerate_runs
from helpers.huggingface import Text, made
from helpers.lightning_runs import QUIET, Small, points, trainer
from helpers.processes import run_forked
from helpers.strategies import difference
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from transformers import Trainer
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.errors import NotFoundError, PolicyError, StorageError
from shrinkpoint.store import Keep, directory_rewrite
from shrinkpoint.store.chain import file_sizes
from shrinkpoint.store.directory import find_siblings, newest_first, read_directory_manifest, verify_directory
from shrinkpoint.store.manifest import decode_directory_manifest
from shrinkpoint.train import (
    Checkpointer,
    best_valid,
)
from shrinkpoint.train.accelerate import AcceleratorCheckpointer
from shrinkpoint.train.lightning import ShrinkIO
from shrinkpoint.train.transformers import ShrinkCallback, ShrinkConfig, ShrinkTrainer, latest_valid

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def near(step: int) -> dict[str, Any]:
    """A state of 32 kB, of which little differs from that of another step, as an optimizer stores it."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 4096, generator=generator)
    generator.manual_seed(step + 1)
    weights[0, :400] += torch.randn(400, generator=generator)
    slots = {"step": torch.tensor(float(step)), "exp_avg": weights[1].clone()}
    groups = [{"params": [0], "lr": 1e-3}]
    return {"model": {"a": weights[0].clone()}, "optimizer": {"state": {0: slots}, "param_groups": groups}}


def save_next(checkpointer: Checkpointer, root: Path, keep: Keep, step: int, score: int = 0) -> None:
    checkpointer.retain(keep, deletes=True)
    checkpointer.save(root / f"step-{step}", near(step), step=step, metrics={"val_loss": score})


def assert_loads(root: Path) -> list[int]:
    """Everything that is there loads as it was, but for moments that are gone; the steps."""
    steps = []
    for path in newest_first(find_siblings(root / "step-0"))[::-1]:
        assert isinstance(path, Path)
        manifest = verify_directory(path, deep=True)
        assert manifest.step is not None
        expected = near(manifest.step)
        if manifest.weights_only:
            expected["optimizer"]["state"] = {}
        assert difference(sp.load(path), expected) is None
        steps.append(manifest.step)
    return steps


def selected(keep: Keep, scores: list[int]) -> set[int]:
    """The steps that rules select of steps 0, 1, ... with these scores."""
    count = len(scores)
    best = sorted(range(count), key=lambda step: (scores[step], -step))[: keep.best or 0]
    every = {step for step in range(count) if keep.every and step % keep.every == 0}
    return {count - 1, *range(count - (keep.last or 1), count), *best, *every} & {*range(count)}


number = st.none() | st.integers(1, 4)
rules = st.builds(Keep, last=number, every=number, best=number, moments_last=number).filter(lambda k: not k.keeps_all)


@settings(max_examples=25, deadline=None)
@given(rules, st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_what_rules_select_stays_and_loads(
    tmp_path_factory: pytest.TempPathFactory, keep: Keep, scores: list[int]
) -> None:
    root = tmp_path_factory.mktemp("run")
    present: set[int] = set()
    with Checkpointer() as checkpointer:
        for step, score in enumerate(scores):
            save_next(checkpointer, root, keep, step, score)
            present = (present | {step}) & selected(keep, scores[: step + 1])
            assert {*assert_loads(root)} == present
    manifests = [read_directory_manifest(path) for path in newest_first(find_siblings(root / "step-0"))[::-1]]
    # One of the best may have lost its moments while there were more that are newer.
    count = len(manifests) if keep.moments_last is None else 1 if keep.best else keep.moments_last
    assert not any(manifest.weights_only for manifest in manifests[-count:])


def test_what_is_kept_needs_one_keyframe(tmp_path: Path) -> None:
    with Checkpointer() as checkpointer:
        for step in range(12):
            save_next(checkpointer, tmp_path, Keep(last=3), step)
            held = [read_directory_manifest(path) for path in newest_first(find_siblings(tmp_path / "step-0"))[::-1]]
            assert sum(not manifest.depth for manifest in held) <= 1 + (step == 3)
    depths = [manifest.depth for manifest in held]
    assert assert_loads(tmp_path) == [9, 10, 11]
    assert sum(file_sizes(held).values()) < 1.5 * max(file_sizes(held).values()), depths


def test_moments_go_once_no_checkpoint_of_their_chain_needs_them(tmp_path: Path) -> None:
    with Checkpointer(keyframe_every=3) as checkpointer:
        for step in range(7):
            save_next(checkpointer, tmp_path, Keep(last=6, moments_last=1), step)
    kinds = [read_directory_manifest(path).kind for path in newest_first(find_siblings(tmp_path / "step-0"))[::-1]]
    assert assert_loads(tmp_path) == [1, 2, 3, 4, 5, 6]
    chains = [
        "delta 1",
        "delta 2",
        "keyframe",
        "delta 1",
        "delta 2",
    ]  # of which 0 has gone, and what 1 needs of it stays
    assert kinds == [*(f"{kind}, weights only" for kind in chains), "keyframe"]
    data = (tmp_path / "step-1" / "shrinkpoint.json").read_bytes()
    assert json.loads(data)["format"] == 2  # which earlier releases refuse: they would resume with moments of zero
    assert decode_directory_manifest(data, "here").weights_only


@pytest.mark.parametrize("fault", ["payload", "manifest"])
@pytest.mark.parametrize("keep", [Keep(last=3), Keep(last=6, moments_last=1)])
def test_a_fault_at_any_time_leaves_what_loads(tmp_path: Path, keep: Keep, fault: str, monkeypatch: Any) -> None:
    original = {"payload": directory_rewrite.RunRewriter._write, "manifest": directory_rewrite.replace_manifest}
    calls, failures = [0], []

    def fail(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3:
            return original[fault](*arguments)
        failures.append(calls[0])
        raise StorageError("disk", found="no space left", do="make room")

    owner = directory_rewrite.RunRewriter if fault == "payload" else directory_rewrite
    monkeypatch.setattr(owner, "_write" if fault == "payload" else "replace_manifest", fail)
    with Checkpointer(keyframe_every=4) as checkpointer:
        for step in range(14):
            save_next(checkpointer, tmp_path, keep, step)
            assert assert_loads(tmp_path) == [*range(max(0, step + 1 - keep.last), step + 1)]
    assert failures


IMPORTS = """
import os
from pathlib import Path
from typing import Any
import torch
from shrinkpoint.store import Keep, directory_rewrite
from shrinkpoint.train import Checkpointer

"""
KILLED = """
calls, original = [0], directory_rewrite.replace_manifest

def kill(*arguments):
    calls[0] += 1
    if calls[0] == {after}:
        os._exit(9)
    original(*arguments)

directory_rewrite.replace_manifest = kill
with Checkpointer(keyframe_every=3) as checkpointer:
    for step in range(9):
        save_next(checkpointer, Path({root!r}), Keep({keep}), step)
"""


@pytest.mark.parametrize("keep", ["last=3", "last=6, moments_last=1"])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_kill_while_older_ones_are_written_again_leaves_what_loads(tmp_path: Path, keep: str, after: int) -> None:
    program = KILLED.format(root=str(tmp_path), keep=keep, after=after)
    run_forked(IMPORTS + inspect.getsource(near) + inspect.getsource(save_next) + program, code=9)
    steps = assert_loads(tmp_path)
    assert len(steps) >= 3
    with Checkpointer(keyframe_every=3) as checkpointer:  # and the run goes on
        checkpointer.load(tmp_path / f"step-{steps[-1]}")
        for step in range(steps[-1] + 1, steps[-1] + 8):
            save_next(checkpointer, tmp_path, Keep(last=3), step)
    assert assert_loads(tmp_path) == [step - 2, step - 1, step]
    held = [read_directory_manifest(path) for path in newest_first(find_siblings(tmp_path / "step-0"))[::-1]]
    payloads = sum(path.stat().st_size for path in tmp_path.glob("*/rank-*"))
    assert payloads == sum(manifest.stored_bytes for manifest in held)  # nothing is left over


def test_a_metric_that_nobody_reports_deletes_nothing(tmp_path: Path, caplog: Any) -> None:
    with Checkpointer() as checkpointer:
        for step in range(3):
            checkpointer.retain(Keep(best=1, metric="acc"), deletes=True)
            checkpointer.save(tmp_path / f"step-{step}", near(step), step=step)
    assert assert_loads(tmp_path) == [0, 1, 2] and "acc" in caplog.text


def test_the_best_valid_checkpoint_of_a_run_is_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="val_loss"):
        best_valid(tmp_path)
    with Checkpointer() as checkpointer:
        for step, score in enumerate([3, 1, 2, 9]):
            checkpointer.save(tmp_path / f"step-{step}", near(step), step=step, metrics={"val_loss": score})
    assert best_valid(tmp_path) == tmp_path / "step-1" and best_valid(tmp_path, mode="max") == tmp_path / "step-3"
    payload = next((tmp_path / "step-1").glob("rank-*"))
    data = bytearray(payload.read_bytes())
    data[-9] ^= 1
    payload.unlink()
    payload.write_bytes(data)
    assert best_valid(tmp_path) == tmp_path / "step-2"
    with pytest.raises(NotFoundError, match="acc"):
        best_valid(tmp_path, metric="acc")


# The frameworks


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_a_trainer_keeps_what_rules_select_and_resumes(tmp_path: Path) -> None:
    keep = Keep(last=2, every=4, best=1, metric="eval_loss", moments_last=2)
    options: dict[str, Any] = {"save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "max_steps": 8}
    run = made(
        ShrinkTrainer, tmp_path, trainer_shrink=ShrinkConfig(keep=keep), trainer_eval_dataset=Text(8, 64), **options
    )
    run.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry}
    best = min(losses, key=losses.__getitem__)
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in {4, 7, 8, best})
    assert read_directory_manifest(tmp_path / "checkpoint-4").weights_only
    stripped = sp.load(tmp_path / "checkpoint-4")
    assert stripped["model"] and not stripped["optimizer"]["state"]
    assert latest_valid(tmp_path) == str(tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-8" / "shrinkpoint.json").unlink()
    (tmp_path / "checkpoint-7" / "shrinkpoint.json").unlink()
    with pytest.raises(NotFoundError):  # those without moments are no checkpoints to resume from
        latest_valid(tmp_path, optimizer=True)
    assert latest_valid(tmp_path, optimizer=False)
    with pytest.raises(PolicyError, match="save_total_limit"):
        made(ShrinkTrainer, tmp_path, trainer_shrink=ShrinkConfig(keep=keep), save_total_limit=2)


def test_a_callback_keeps_what_rules_select(tmp_path: Path) -> None:
    callback = ShrinkCallback(keep=Keep(last=2, every=3, best=1, metric="eval_loss", mode="max"))
    evaluated: dict[str, Any] = {"eval_steps": 1, "eval_strategy": "steps", "trainer_eval_dataset": Text(8, 64)}
    run = made(Trainer, tmp_path, trainer_callbacks=[callback], save_only_model=True, save_steps=1, **evaluated)
    run.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry}
    assert names(tmp_path) == [f"checkpoint-{step}" for step in sorted({max(losses, key=losses.get), 3, 6, 7, 8})]
    with pytest.raises(PolicyError, match="save_total_limit"):
        made(Trainer, tmp_path, trainer_callbacks=[ShrinkCallback(keep=Keep(last=2))], save_total_limit=2)


@pytest.mark.parametrize("background", [False, True])
def test_lightning_keeps_what_rules_select(tmp_path: Path, background: bool) -> None:
    class Score(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            module.log("score", float(abs(trainer.current_epoch - 2)))

    plugin = ShrinkIO(background=background, keep=Keep(last=2, best=1, metric="score", moments_last=2))
    every = ModelCheckpoint(
        tmp_path, filename="{epoch}", monitor="score", save_top_k=-1, save_last=True, save_on_train_epoch_end=True
    )
    run = trainer(tmp_path / "logs", plugin, epochs=7, callbacks=[Score(), every])
    run.fit(Small(), points())
    plugin.teardown()
    assert [name for name in names(tmp_path) if "ckpt" in name] == [
        "epoch=2.ckpt",
        "epoch=5.ckpt",
        "epoch=6.ckpt",
        "last.ckpt",
    ]
    weights = ShrinkIO().load_checkpoint(tmp_path / "epoch=2.ckpt")
    assert "state_dict" in weights and "optimizer_states" not in weights
    assert "optimizer_states" in ShrinkIO().load_checkpoint(tmp_path / "epoch=6.ckpt")


@pytest.mark.parametrize("numbered", [True, False])
def test_accelerate_keeps_what_rules_select(tmp_path: Path, numbered: bool) -> None:
    accelerate_runs.forget()
    naming = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True) if numbered else None
    accelerator, model = Accelerator(cpu=True, project_config=naming), nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    keep = Keep(last=2, best=1, metric="loss", moments_last=2)
    root, prefix = (tmp_path / "checkpoints", "checkpoint_") if numbered else (tmp_path / "out", "step-")
    with AcceleratorCheckpointer(accelerator, keep=keep) as checkpointer:
        for step in range(6):
            accelerator.backward(model(torch.randn(4, 64)).square().mean())
            optimizer.step()
            where = None if numbered else root / f"step-{step}"
            checkpointer.save_state(where, step=step, metrics={"loss": abs(step - 1)})
        assert names(root) == [f"{prefix}{step}" for step in (1, 4, 5)]
        with pytest.raises(NotFoundError, match="weights only"):
            checkpointer.load_state(root / f"{prefix}1")
        assert checkpointer.load_state(None if numbered else root / f"{prefix}5").step == 5
    assert sp.load(root / f"{prefix}1")["model"]
    accelerate_runs.forget()
    limited = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    with pytest.raises(PolicyError, match="total_limit"):
        AcceleratorCheckpointer(Accelerator(cpu=True, project_config=limited), keep=keep)
    accelerate_runs.forget()


# The command line


def shrinkpoint(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_prune_and_compact_know_the_run_of_a_framework(tmp_path: Path) -> None:
    with Checkpointer(keyframe_every=4) as checkpointer:
        for step in range(8):
            checkpointer.save(tmp_path / f"step-{step}", near(step), step=step, metrics={"val_loss": step})
    said = shrinkpoint("prune", tmp_path, "--keep-last", 3, "--keep-best", 1)
    assert "would delete 4 checkpoints" in said and assert_loads(tmp_path) == [*range(8)]
    said = json.loads(shrinkpoint("prune", tmp_path, "--keep-last", 3, "--keep-best", 1, "--apply", "--json"))
    assert said["delete"] == [f"step-{step}" for step in (1, 2, 3, 4)] and assert_loads(tmp_path) == [0, 5, 6, 7]
    before = sum(path.stat().st_size for path in {p.stat().st_ino: p for p in tmp_path.rglob("*.safetensors")}.values())
    assert "would write again" in shrinkpoint("compact", tmp_path, "--dry-run")
    assert "step-7 again" in shrinkpoint("compact", tmp_path)
    after = sum(path.stat().st_size for path in {p.stat().st_ino: p for p in tmp_path.rglob("*.safetensors")}.values())
    assert after < before and assert_loads(tmp_path) == [0, 5, 6, 7]
    assert "nothing to do" in shrinkpoint("compact", tmp_path)
    shrinkpoint("prune", tmp_path, "--keep-last", 4, "--moments-last", 3, "--apply")
    kinds = [
        read_directory_manifest(path).weights_only for path in newest_first(find_siblings(tmp_path / "step-0"))[::-1]
    ]
    assert kinds == [True, False, False, False] and assert_loads(tmp_path) == [0, 5, 6, 7]
