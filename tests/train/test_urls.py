"""Wherever a path is taken, a URL is refused before anything happens, if it is not taken; so is what is no path."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers import GPT2Model, Trainer, TrainingArguments

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.comm import AQSGD, parse
from shrinkpoint.comm.ddp import DDPCompression
from shrinkpoint.errors import PolicyError, StorageError
from shrinkpoint.storage import LocalStorage, MemoryStorage, is_object_url, is_url, local_path
from shrinkpoint.store import directory as directories
from shrinkpoint.train import Checkpointer, Journal, best_valid, dcp
from shrinkpoint.train import lightning as ours
from shrinkpoint.train import transformers as hugging

SECRET = "hunter2"
URLS = ["s3://bucket/run", "gs://bucket", "hf://datasets/x", "file:///tmp/x", "memory://x", "simplecache::s3://x"]
URLS += [f"https://me:{SECRET}/@host/run?signature={SECRET}"]
STATE = {"w": torch.zeros(3)}


def _accelerator(**settings):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    if settings:
        settings = {"project_config": ProjectConfiguration(automatic_checkpoint_naming=True, **settings)}
    return Accelerator(cpu=True, **settings)


def _accelerate(name):
    return getattr(importlib.import_module("shrinkpoint.train.accelerate"), name)


def _trainer(place, **settings):
    model = torch.nn.Linear(2, 2)
    return hugging.ShrinkTrainer(model, TrainingArguments(place, report_to=[], use_cpu=True), **settings)


def _stock_trainer(place):
    arguments = SimpleNamespace(output_dir=place)
    hugging.ShrinkCallback().on_init_end(arguments, None, None)


def _fit(place, **settings):
    """Whoever trains before the error fails here: no batch may be asked for."""
    model = BoringModel()
    model.training_step = lambda *_: pytest.fail("trained before the error")
    LightningTrainer(
        max_epochs=1,
        plugins=[ours.ShrinkIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        callbacks=[ours.ShrinkIOCallback(), ModelCheckpoint(**settings)],
        default_root_dir=place,
    ).fit(model)


ENTRIES = {
    "save path": lambda place: sp.save(STATE, place),
    "save base": lambda place: sp.save(STATE, "never", base=place),
    "load where": sp.load,
    "load base": lambda place: sp.load("never", base=place),
    "load cache": lambda place: sp.load("s3://bucket/never", cache=place),
    "inspect path": sp.inspect,
    "Store where": sp.Store,
    "Store cache": lambda place: sp.Store("s3://bucket/never", cache=place),
    "CheckpointManager where": sp.CheckpointManager,
    "CheckpointManager mirror": lambda place: sp.CheckpointManager("never", mirror=place),
    "CheckpointManager cache": lambda place: sp.CheckpointManager("s3://bucket/never", cache=place),
    "LocalStorage path": LocalStorage,
    "Checkpointer.save directory": lambda place: Checkpointer().save(place, STATE),
    "Checkpointer.load directory": lambda place: Checkpointer().load(place),
    "Checkpointer.discard directory": lambda place: Checkpointer().discard(place),
    "is_checkpoint directory": directories.is_checkpoint,
    "find_checkpoints root": directories.find_checkpoints,
    "read_directory_manifest directory": directories.read_directory_manifest,
    "verify_directory directory": directories.verify_directory,
    "commit directory": lambda place: directories.commit(place, [], scheme="lossless"),
    "best_valid root": best_valid,
    "dcp.Writer path": dcp.Writer,
    "dcp.Reader path": dcp.Reader,
    "dcp.load directory": dcp.load,
    "dcp.latest_valid root": dcp.latest_valid,
    "dcp.Manager path": dcp.Manager,
    "Journal directory": lambda place: Journal(
        sp.CheckpointManager(MemoryStorage()), object.__new__(DDPCompression), len, directory=place
    ),
    "transformers.latest_valid output_dir": hugging.latest_valid,
    "transformers.from_pretrained where": lambda place: hugging.from_pretrained(GPT2Model, place),
    "transformers.export_pretrained where": lambda place: hugging.export_pretrained(place, "never"),
    "transformers.export_pretrained out": lambda place: hugging.export_pretrained("never", place),
    "transformers.ShrinkTrainer": _trainer,
    "transformers.ShrinkCallback": _stock_trainer,
    "transformers.ShrinkCallback resume_from_checkpoint": lambda place: hugging.ShrinkCallback(
        resume_from_checkpoint=place
    ),
    "lightning.latest_valid directory": ours.latest_valid,
    "lightning.ShrinkIO.save_checkpoint path": lambda place: ours.ShrinkIO().save_checkpoint({}, place),
    "lightning dirpath": lambda place: _fit("never", dirpath=place),
    "lightning default_root_dir": _fit,
    "accelerate.save_state output_dir": lambda place: _accelerate("save_state")(_accelerator(), place),
    "accelerate.load_state input_dir": lambda place: _accelerate("load_state")(_accelerator(), place),
    "accelerate.AcceleratorCheckpointer.save_state output_dir": lambda place: _accelerate("AcceleratorCheckpointer")(
        _accelerator()
    ).save_state(place),
    "accelerate.AcceleratorCheckpointer.load_state input_dir": lambda place: _accelerate("AcceleratorCheckpointer")(
        _accelerator()
    ).load_state(place),
    "accelerate.AcceleratorCheckpointer": lambda place: _accelerate("AcceleratorCheckpointer")(
        _accelerator(project_dir=place)
    ),
    "comm.AQSGD folder": lambda place: AQSGD(parse("q4"), folder=place),
}
ELSEWHERE = {
    "lightning.ShrinkIO.load_checkpoint path",  # the stock plugin's, which reads URLs
    "lightning.ShrinkIO.remove_checkpoint path",
    "lightning.load_from_checkpoint checkpoint_path",
    "lightning.load_from_checkpoint hparams_file",
    "latest_valid candidates",  # skipped, with the reason
    "Checkpointer.retain protected",  # never deleted
    "latest_valid check",  # a function of a candidate
    "dcp.Writer.reset checkpoint_id",  # torch calls these where other ranks hear of no error
    "dcp.Reader.reset checkpoint_id",
    "dcp.Writer.validate_checkpoint_id checkpoint_id",
    "dcp.Reader.validate_checkpoint_id checkpoint_id",
}
TAKES_BUCKETS = (
    "save path",
    "save base",
    "load base",
    "inspect path",
    "load where",
    "Store where",
    "CheckpointManager where",
    "CheckpointManager mirror",
    "transformers.from_pretrained where",
    "transformers.export_pretrained where",
    "Checkpointer.save directory",
    "Checkpointer.load directory",
    "Checkpointer.discard directory",
    "is_checkpoint directory",
    "read_directory_manifest directory",
    "verify_directory directory",
    "commit directory",
    "best_valid root",
    "dcp.Writer path",
    "dcp.Reader path",
    "dcp.load directory",
    "dcp.latest_valid root",
    "lightning.ShrinkIO.save_checkpoint path",
    "lightning default_root_dir",  # Lightning itself says which package is missing
    "accelerate.save_state output_dir",
    "accelerate.load_state input_dir",
    "accelerate.AcceleratorCheckpointer.save_state output_dir",
    "accelerate.AcceleratorCheckpointer.load_state input_dir",
)
IS_FRAMEWORKS = ("transformers.ShrinkTrainer", "transformers.ShrinkCallback", "lightning d")


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """An empty directory to work in."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("entry", ENTRIES)
def test_url_is_refused_everywhere_before_anything_is_written(entry, tmp_path):
    for url in [*URLS, *map(Path, URLS[:3])]:
        if entry in TAKES_BUCKETS and is_object_url(url):
            continue
        if isinstance(url, str) and url.startswith("file:") and entry.startswith("lightning"):
            continue  # a local path in Lightning's own spelling
        if entry == "lightning dirpath" and url != "memory://x":
            continue  # Lightning itself says which package is missing
        if isinstance(url, Path) and entry.startswith(
            ("transformers.Shrink", "accelerate.AcceleratorCheckpointer", "lightning d")
        ):
            continue  # of these a framework makes strings
        with pytest.raises(PolicyError, match="file system") as caught:
            ENTRIES[entry](url)
        assert SECRET not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if path.name != "checkpoints"] == []


@pytest.mark.parametrize("given", ["", b"runs", 7, "a\0b"])
def test_what_is_no_path_is_an_error_of_ours(given, tmp_path):
    for entry in (entry for entry in ENTRIES if not entry.startswith(IS_FRAMEWORKS)):
        if entry == "accelerate.AcceleratorCheckpointer" and not isinstance(given, str):
            continue  # accelerate refuses it
        with pytest.raises(PolicyError):
            pytest.fail(f"{entry}: {ENTRIES[entry](given)}")
        assert [*tmp_path.iterdir()] == [], entry


@pytest.mark.parametrize("entry", ["Store where", "CheckpointManager where"])
def test_file_where_a_directory_should_be_is_refused(entry, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PolicyError, match="no directory"):
        ENTRIES[entry](tmp_path / "file")
    with pytest.raises(StorageError):
        ENTRIES["Checkpointer.save directory"](tmp_path / "file")


def test_none_is_no_store():
    for make in (sp.Store, sp.CheckpointManager):
        with pytest.raises(PolicyError, match="expected a path") as caught:
            make(None)
        assert isinstance(caught.value, TypeError)


def test_local_paths_are_taken_as_they_are():
    for text in ("runs/a:b", "C:/run", "C:\\run", "a:b", "./http/x", "/abs/x:y/z", "über/ß", "-", "~/x", " "):
        assert str(local_path(text)) == str(Path(text))
        assert not is_url(text)


def _takes_a_path(hint):
    return any(word in str(hint) for word in ("Path", "PathLike", "_PATH"))


def _public():
    """Every public function, method and class with a parameter that is a path, as `module.name parameter`."""
    heads = ("dcp", "transformers", "lightning", "accelerate")
    for module, head in [("", ""), (".train", ""), *((f".train.{head}", f"{head}.") for head in heads)]:
        one = importlib.import_module(f"shrinkpoint{module}")
        for name in getattr(one, "__all__", [name for name in vars(one) if not name.startswith("_")]):
            thing = getattr(one, name)
            if not getattr(thing, "__module__", "").startswith("shrinkpoint"):
                continue
            if inspect.isclass(thing):
                members = {name: member for name, member in vars(thing).items() if inspect.isfunction(member)}
                if "__init__" in members and not hasattr(thing, "__dataclass_fields__"):
                    yield from _parameters(f"{head}{name}", members["__init__"])
                for inner, member in members.items():
                    if not inner.startswith("_"):
                        yield from _parameters(f"{head}{name}.{inner}", member)
            elif inspect.isfunction(thing):
                yield from _parameters(f"{head}{name}", thing)


def _parameters(name, function):
    for parameter, hint in function.__annotations__.items():
        if parameter != "return" and _takes_a_path(hint):
            yield f"{name} {parameter}"


def test_no_public_name_that_takes_a_path_is_left_out_above():
    assert {entry for entry in _public() if entry not in ENTRIES} - ELSEWHERE == set()


def _arguments(command):
    """Names of a command's parameters that are paths: all its arguments, and options that say so."""
    hints = get_type_hints(command, include_extras=True)
    for name, hint in hints.items():
        results = getattr(hint, "__metadata__", ())
        if any(type(result).__name__ == "ArgumentInfo" for result in results) or "Path" in str(
            getattr(hint, "__origin__", "")
        ):
            yield name, results[0]


def test_every_path_of_every_command_is_checked(tmp_path):
    from typer.testing import CliRunner

    checked = []
    for info in app.registered_commands:
        arguments = dict(_arguments(inspect.unwrap(info.callback)))
        assert arguments, info.name
        arguments.pop("steps", None)
        places = [name for name, one in arguments.items() if type(one).__name__ == "ArgumentInfo"]
        for name in arguments:
            line = [info.name, *("hdfs://x/y" if place == name else "here" for place in places)]
            line += [f"--{name}", "hdfs://x/y"] if name not in places else []
            line += ["3"] if info.name == "forget" else []
            result = CliRunner().invoke(app, line)
            checked.append(name)
            assert result.exit_code == 2, (line, result.output)
            assert "file system of this machine" in result.output + result.stderr, line
    assert len(checked) > 12
    assert [*tmp_path.iterdir()] == []


def test_trainers_are_refused_when_they_are_made(tmp_path):
    with pytest.raises(PolicyError, match="file system"):
        Trainer(
            torch.nn.Linear(2, 2),
            TrainingArguments("s3://b/x", report_to=[], use_cpu=True),
            callbacks=[hugging.ShrinkCallback()],
        )
