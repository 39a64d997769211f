"""What torch's own writer and reader have beside the protocol, and what they say: ours has it, and says it, too."""

from __future__ import annotations

import io
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.multi_rank_training import save

from shrinkpoint import errors
from shrinkpoint.store import directory as directories
from shrinkpoint.train.dcp import Reader, Writer, load, reset_chains

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def anew() -> None:
    reset_chains()


def buffer(data: bytes, position: int = 0) -> io.BytesIO:
    made = io.BytesIO(data)
    made.seek(position)
    return made


def state() -> dict[str, Any]:
    return {
        "x": torch.ones(2),
        "short": buffer(b"abc", 2),
        "empty": buffer(b""),
        "beyond": buffer(b"abc", 9),
        "model": {"long": [buffer(b"x" * 5000, 7), 1]},
        "pair": (buffer(b"\x80\xff"), {"shrinkpoint:buffer": [1, b""]}),
        "nothing": b"",
    }


def plain(value: Any) -> Any:
    """With what a buffer holds in its place."""
    if isinstance(value, io.BytesIO):
        return "buffer", value.tell(), value.getvalue()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("writer", "reader"), [(dcp.FileSystemWriter, dcp.FileSystemReader), (Writer, Reader)], ids=["stock", "ours"]
)
def test_a_bytesio_comes_back_with_its_bytes_and_its_position(tmp_path: Path, writer: Any, reader: Any) -> None:
    dcp.save(state(), storage_writer=writer(tmp_path))
    target = state() | {"x": torch.zeros(2), "short": buffer(b""), "pair": None}
    dcp.load(target, storage_reader=reader(tmp_path))
    assert plain(target) == plain(state())
    if writer is Writer:
        assert plain(load(tmp_path)) == plain(state())


class Thing:
    """Something of the user's own."""


@pytest.mark.parametrize("value", [Thing(), (Thing(),), print, {Thing()}, bytearray(b"x")])
def test_what_cannot_be_stored_raises_our_own_error(tmp_path: Path, value: Any) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"x": torch.ones(2), "odd": value}, storage_writer=Writer(tmp_path))
    ((error, _),) = caught.value.failures.values()
    results = str(error) + "".join(traceback.format_exception(error)) + str(caught.value)
    assert isinstance(error, errors.StateError) and "odd" in error.where
    assert type(value[0] if isinstance(value, tuple) else value).__name__ in str(error)
    assert not any(words in results for words in ("weights_only", "torch.load", "\x1b", "trust"))


def test_a_save_has_an_id_which_its_checkpoint_keeps(tmp_path: Path) -> None:
    writer, ids = Writer(), set[str]()
    for step in range(2):
        dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / f"{step}", storage_writer=writer)
        assert writer.path == writer.checkpoint_id == tmp_path / f"{step}"
        assert (
            writer.storage_meta().save_id
            == writer.save_id
            == directories.read_directory_manifest(tmp_path / f"{step}").id
        )
        ids.add(writer.save_id)
    reader = Reader(tmp_path / "1")
    meta = reader.read_metadata().storage_meta
    assert (meta.checkpoint_id, meta.save_id, meta.load_id) == (reader.path, writer.save_id, reader.load_id)
    reader.reset()
    assert len(ids) == 2 and reader.load_id != meta.load_id
    for ours, stock in ((writer, dcp.FileSystemWriter(tmp_path)), (reader, dcp.FileSystemReader(tmp_path))):
        for name in ("path", "checkpoint_id", "save_id", "load_id", "overwrite"):
            assert hasattr(ours, name) or not hasattr(stock, name)


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, Writer], ids=["stock", "ours"])
def test_overwrite_false_says_torchs_words(tmp_path: Path, writer: Any) -> None:
    dcp.save({"x": torch.ones(2)}, storage_writer=writer(tmp_path, overwrite=False))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"x": torch.zeros(2)}, storage_writer=writer(tmp_path, overwrite=False))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, RuntimeError) and "Checkpoint already exists and self.overwrite=False" in str(error)
    if writer is Writer:
        assert isinstance(error, errors.PolicyError) and load(tmp_path)["x"].tolist() == [1, 1]


def test_torchs_own_reader_quotes_what_reads_it(tmp_path: Path) -> None:
    save({"x": torch.ones(2)}, tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match=r"shrinkpoint\.train\.dcp\.Reader.*shrinkpoint convert"):
        dcp.load({"x": torch.zeros(2)}, storage_reader=dcp.FileSystemReader(tmp_path))
