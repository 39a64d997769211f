"""A state that compresses a thousandfold is saved and loaded by every writer, and a limit of the caller bounds it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from helpers.stores import new_bucket
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.errors import FormatError, NotFoundError
from shrinkpoint.store import checkpoint_file
from shrinkpoint.sync import Publisher, Subscriber
from shrinkpoint.train import dcp
from shrinkpoint.train.lightning import ShrinkIO
from shrinkpoint.train.transformers import ShrinkConfig

SIZE = 1 << 22
pytestmark = pytest.mark.filterwarnings("ignore")


class Buffer:
    """A replay buffer that is nearly empty yet."""

    def __init__(self, frames: torch.Tensor) -> None:
        self.frames = frames

    def state_dict(self):
        return {"frames": self.frames}

    def load_state_dict(self, state):
        self.frames = state["frames"]


def zeros() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8)


def empty() -> torch.Tensor:
    return torch.full((SIZE,), 7, dtype=torch.uint8)


def manager(folder, max_bytes, **options):
    with sp.CheckpointManager(folder / "run", **options) as writer:
        writer.save(1, buffer=Buffer(zeros()))
    buffer = Buffer(empty())
    sp.CheckpointManager(folder / "run", **options).restore(buffer=buffer, max_bytes=max_bytes)
    return buffer.frames


def bucket(folder, max_bytes):
    storage = new_bucket()
    with sp.CheckpointManager(storage) as writer:
        writer.save(1, buffer=Buffer(zeros()))
    buffer = Buffer(empty())
    sp.CheckpointManager(storage).restore(1, buffer=buffer, max_bytes=max_bytes)
    return buffer.frames


def mirror(folder, max_bytes):
    with sp.CheckpointManager(folder / "run", mirror=folder / "mirror") as writer:
        writer.save(1, buffer=Buffer(zeros()))
    buffer = Buffer(empty())
    sp.CheckpointManager(folder / "mirror").restore(1, buffer=buffer, max_bytes=max_bytes)
    return buffer.frames


def single_file(folder, max_bytes):
    sp.save({"w": zeros()}, folder / "a.safetensors")
    return sp.load(folder / "a.safetensors", max_bytes=max_bytes)["w"]


def array(folder, max_bytes):
    sp.save({"w": zeros().numpy()}, folder / "a.safetensors")
    return torch.from_numpy(sp.load(folder / "a.safetensors", max_bytes=max_bytes)["w"])


def dcp_reader(folder, max_bytes, size=SIZE):
    torch_dcp.save(
        {"w": zeros(), "more": torch.ones(2 * size)}, storage_writer=dcp.Writer(folder / "dcp"), no_dist=True
    )
    state = {"w": empty()}
    torch_dcp.load(state, storage_reader=dcp.Reader(folder / "dcp", max_bytes=max_bytes), no_dist=True)
    return state["w"]


def dcp_load(folder, max_bytes):
    torch_dcp.save({"w": zeros()}, storage_writer=dcp.Writer(folder / "dcp"), no_dist=True)
    return dcp.load(folder / "dcp", max_bytes=max_bytes)["w"]


def lightning(folder, max_bytes):
    ShrinkIO().save_checkpoint({"state_dict": {"w": zeros()}, "global_step": 1}, folder / "a.ckpt")
    return ShrinkIO(max_bytes=max_bytes).load_checkpoint(folder / "a.ckpt")["state_dict"]["w"]


def hugging_face(folder, max_bytes):
    writer = ShrinkConfig().make_checkpointer(None, False, None)
    writer.save(folder / "checkpoint-1", {"model": {"w": zeros()}}, step=1)
    reader = ShrinkConfig(max_bytes=max_bytes).make_checkpointer(None, False, None)
    return reader.load(folder / "checkpoint-1").state["model"]["w"]


def accelerate(folder, max_bytes):
    from accelerate import Accelerator

    from shrinkpoint.train.accelerate import AcceleratorCheckpointer

    def checkpointer(frames, **options):
        accelerator, buffer = Accelerator(cpu=True), Buffer(frames)
        accelerator.register_for_checkpointing(buffer)
        return AcceleratorCheckpointer(accelerator, **options), buffer

    checkpointer(zeros())[0].save_state(folder / "checkpoint_0")
    reader, buffer = checkpointer(empty(), max_bytes=max_bytes)
    reader.load_state(folder / "checkpoint_0")
    return buffer.frames


def sync(folder, max_bytes):
    with Publisher(folder / "weights") as publisher:
        publisher.publish({"w": zeros()}, version=1)
    weights = {"w": empty()}
    Subscriber(folder / "weights", max_bytes=max_bytes).update(weights)
    return weights["w"]


def command_line(folder, max_bytes):
    sp.save({"w": zeros()}, folder / "a.safetensors")
    limit = [] if max_bytes is None else ["--max-bytes", str(max_bytes)]
    arguments = ["export", str(folder / "a.safetensors"), str(folder / "a.pt"), *limit]
    result = CliRunner().invoke(app, arguments)
    if result.exit_code:
        raise FormatError("command line", found=result.stderr, do="")
    return torch.load(folder / "a.pt")["w"]


WAYS = [
    manager,
    partial(manager, background=True),
    bucket,
    mirror,
    single_file,
    array,
    dcp_reader,
    partial(dcp_reader, size=1),
    dcp_load,
    lightning,
    hugging_face,
    accelerate,
    sync,
    command_line,
]


@pytest.fixture(autouse=True)
def small_minimum(monkeypatch):
    """A file may decode to little; what is free decides, as for a buffer of gigabytes."""
    monkeypatch.setattr(checkpoint_file, "MIN_LIMIT", 1 << 10)
    monkeypatch.setattr(checkpoint_file, "MAX_EXPANSION", 10)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_saved_loads_within_the_limit_of_the_caller(tmp_path: Path, way, monkeypatch):
    places = [tmp_path / name for name in ("default", "less", "more")]
    for place in places:
        place.mkdir()
    assert torch.equal(way(places[0], None), zeros())
    with pytest.raises((FormatError, NotFoundError, torch_dcp.api.CheckpointException), match="max_bytes="):
        way(places[1], SIZE // 2)
    monkeypatch.setattr(checkpoint_file, "available_bytes", lambda: SIZE // 2)  # which decides without a limit
    assert torch.equal(way(places[2], 16 * SIZE), zeros())


def test_a_small_file_that_declares_terabytes_is_refused_before_memory_is_taken(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "available_bytes", lambda: SIZE // 2)
    sp.save({"w": zeros()}, tmp_path / "a.safetensors")
    with pytest.raises(FormatError, match=r"--max-bytes on the command line"):
        sp.load(tmp_path / "a.safetensors")


def test_free_memory_is_what_the_system_and_its_limits_leave():
    from shrinkpoint.tensors.memory import available_bytes

    assert 1 << 20 < available_bytes() < 1 << 50
