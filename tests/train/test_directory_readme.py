"""A folder of ours in the hands of somebody who does not know it: what it says, and what errors one catches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from helpers import accelerate_runs
from helpers.huggingface import gpt2, made
from helpers.lightning_runs import QUIET, every, points, small, trainer
from helpers.strategies import same
from lightning.pytorch.plugins.io import TorchCheckpointIO
from transformers import AutoModelForCausalLM, Trainer
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint import errors
from shrinkpoint.cli.app import app
from shrinkpoint.store import directory as directories
from shrinkpoint.train.accelerate import load_state, save_state
from shrinkpoint.train.dcp import Writer
from shrinkpoint.train.lightning import ShrinkIO
from shrinkpoint.train.transformers import ShrinkTrainer

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def of_transformers(root: Path) -> Path:
    made(ShrinkTrainer, root, max_steps=2).train()
    return root / "checkpoint-2"


def of_accelerate(root: Path) -> Path:
    accelerate_runs.forget()
    save_state(accelerate_runs.Loop().steps(1).accelerator, root)
    accelerate_runs.forget()
    return root


def of_lightning(root: Path) -> Path:
    trainer(root, ShrinkIO(), epochs=1, callbacks=[every(root)]).fit(small(), points())
    return root / "epoch=0.ckpt"


def of_dcp(root: Path) -> Path:
    dcp.save({"x": torch.ones(2)}, storage_writer=Writer(root))
    return root


def read_transformers(folder: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(folder).config.n_embd == 32
    made(Trainer, folder.parent / "on", max_steps=4).train(resume_from_checkpoint=str(folder))


def read_accelerate(folder: Path) -> None:
    accelerate_runs.forget()
    accelerate_runs.Loop().accelerator.load_state(str(folder))
    accelerate_runs.forget()


def read_lightning(folder: Path) -> None:
    assert torch.load(folder, weights_only=True)["global_step"] == 4


def read_dcp(folder: Path) -> None:
    target = {"x": torch.zeros(2)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(folder))
    assert target["x"].tolist() == [1, 1]


KINDS = {
    "transformers": (of_transformers, read_transformers),
    "accelerate": (of_accelerate, read_accelerate),
    "lightning": (of_lightning, read_lightning),
    "dcp": (of_dcp, read_dcp),
}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_every_folder_says_what_reads_it_and_what_it_says_works(tmp_path: Path, kind: str) -> None:
    writes, reads = KINDS[kind]
    folder = writes(tmp_path / "run")
    with pytest.raises((OSError, ValueError, dcp.api.CheckpointException)):  # the stock reader cannot
        reads(folder)
    text = (folder / directories.README).read_text("ascii")
    assert f"shrinkpoint.train.{kind}" in text
    lines = [line.strip() for line in text.splitlines() if line.startswith("    shrinkpoint ")]
    commands = [line.split("   ")[0].split() for line in lines]
    assert [words[1] for words in commands] == ["convert", "show", "verify"]
    out = tmp_path / "out"
    for words in commands:
        run(*({"DIRECTORY": str(folder), "OUT": str(out)}.get(word, word) for word in words[1:]))
    assert not (out / directories.README).exists()
    reads(out)


def test_the_readme_is_one_text_and_a_users_own_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / directories.README).write_text("mine")
    checkpointer = sp.train.Checkpointer()
    for name in ("a", "b", "c"):
        checkpointer.save(tmp_path / name, {"x": torch.ones(2)})
    checkpointer.save(tmp_path / "a", {"x": torch.zeros(2)})
    texts = [(tmp_path / name / directories.README).read_text() for name in ("a", "b", "c")]
    assert texts[0] == texts[2] and texts[1] == "mine"
    assert tmp_path / "a" / directories.README in directories.own_files(tmp_path / "a")
    assert tmp_path / "b" / directories.README not in directories.own_files(tmp_path / "b")
    (tmp_path / "c" / directories.README).unlink()
    directories.verify_directory(tmp_path / "c", deep=True)
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]


# what a framework documents is what one catches


@pytest.mark.parametrize("place", ["missing", "empty"])
@pytest.mark.parametrize("kind", [Trainer, ShrinkTrainer])
def test_resuming_from_what_is_no_checkpoint_is_a_valueerror(tmp_path: Path, kind: Any, place: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at") as caught:
        made(kind, tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / place))
    assert isinstance(caught.value, errors.ShrinkpointError) == (kind is ShrinkTrainer)


def test_resuming_where_no_checkpoint_is_whole_is_a_valueerror(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match="none of them valid") as caught:
        made(ShrinkTrainer, tmp_path).train(resume_from_checkpoint=True)
    assert isinstance(caught.value, errors.NotFoundError)


@pytest.mark.parametrize("loads", [Accelerator.load_state, load_state], ids=["stock", "ours"])
def test_loading_an_accelerators_state_from_nowhere_is_a_valueerror(tmp_path: Path, loads: Any) -> None:
    accelerate_runs.forget()
    loop = accelerate_runs.Loop()
    with pytest.raises(ValueError, match=r"Tried to find .* but folder does not exist"):
        loads(loop.accelerator, str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError):
        loads(loop.accelerator, str(tmp_path / "empty"))
    accelerate_runs.forget()


@pytest.mark.parametrize("plugin", [TorchCheckpointIO, ShrinkIO])
def test_lightnings_missing_checkpoint_is_a_filenotfounderror(tmp_path: Path, plugin: Any) -> None:
    (tmp_path / "empty.ckpt").mkdir()
    with pytest.raises(FileNotFoundError):
        plugin().load_checkpoint(tmp_path / "missing.ckpt")
    if plugin is ShrinkIO:
        with pytest.raises(FileNotFoundError, match="latest_valid"):
            plugin().load_checkpoint(tmp_path / "empty.ckpt")


def test_a_file_that_is_not_there_is_a_filenotfounderror_and_a_misfit_a_runtimeerror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        sp.load(tmp_path / "missing.safetensors")
    assert isinstance(caught.value, KeyError) and str(caught.value) == caught.value.message
    with sp.CheckpointManager(tmp_path) as manager:
        manager.save(1, model=gpt2())
    with sp.CheckpointManager(tmp_path) as manager, pytest.raises(RuntimeError, match="shape") as misfit:
        manager.restore(model=gpt2(64))
    assert isinstance(misfit.value, errors.MismatchError) and same({}, {})
