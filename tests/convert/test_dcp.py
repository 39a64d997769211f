"""Directories of torch.distributed.checkpoint: read without DCP's own unpickling, and written by DCP."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.foreign_files import Malice, same
from helpers.processes import ranks

from shrinkpoint.convert import dcp as dcp_format
from shrinkpoint.convert import directory
from shrinkpoint.errors import CorruptError, NotFoundError, ShrinkpointError, StateError, TruncatedError
from shrinkpoint.train.dcp import Writer

pytestmark = pytest.mark.filterwarnings("ignore")


def state() -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {"weight": torch.randn(5, 3, generator=generator), "half": torch.randn(4, generator=generator).half()},
        "optimizer": {"state": {"weight": {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "names": ["weight"]}]},
        "step": 7,
        "pair": (1, 2),
        "list": [1, {"deep": torch.ones(2)}],
        "point": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
        "text": "a",
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(state(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_directory_of_dcp_is_the_nest_that_was_saved(saved):
    part = directory.read(saved)
    assert part.form == "dcp"
    assert same(_sorted(part.content), _sorted(state()))


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_the_later_of_two_writers_owns_a_directory(tmp_path):
    dcp.save(state(), storage_writer=Writer(tmp_path), no_dist=True)
    assert directory.is_ours(tmp_path)
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    assert not directory.is_ours(tmp_path)
    dcp.save(state(), storage_writer=Writer(tmp_path), no_dist=True)
    assert directory.is_ours(tmp_path)


def test_what_is_written_back_is_what_dcp_loads(saved, tmp_path):
    dcp_format.write(tmp_path / "back", directory.read(saved).content)
    there = {
        "model": {"weight": torch.zeros(5, 3), "half": torch.zeros(4).half()},
        "step": 0,
        "list": [0, {"deep": torch.zeros(2)}],
    }
    dcp.load(there, checkpoint_id=tmp_path / "back", no_dist=True)
    assert same(there, {key: state()[key] for key in there})


def test_a_malicious_metadata_is_refused_by_name_and_does_not_run(saved, tmp_path):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data["extra"] = Malice(tmp_path / "mark")
    for evil in (Malice(tmp_path / "mark"), metadata):
        for protocol in (2, 4):
            (saved / ".metadata").write_bytes(pickle.dumps(evil, protocol))
            with pytest.raises(CorruptError, match=r"posix\.system"):
                directory.read(saved)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_metadata_of_an_early_python_3_11_is_read_and_its_getattr_does_not_run(saved, tmp_path, monkeypatch, protocol):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    members = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(members, "__reduce_ex__", lambda self, _: (getattr, (members, self.name)))
    (saved / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    assert b"getattr" in (saved / ".metadata").read_bytes()
    assert same(_sorted(directory.read(saved).content), _sorted(state()))
    metadata.planner_data["extra"] = Malice(tmp_path / "mark")
    (saved / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    with pytest.raises(CorruptError, match=r"posix\.system"):
        directory.read(saved)
    assert not (tmp_path / "mark").exists()


def test_a_malicious_plain_value_is_refused_by_name_and_does_not_run(tmp_path):
    dcp.save({"w": torch.ones(2), "x": Malice(tmp_path / "mark")}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(StateError, match=r"posix\.system"):
        directory.read(tmp_path / "dcp")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"{}", b"\x80\x02r\xff\xff\xff\xff.", b"\x80\x04N.", b"cbuiltins\neval\n."]
)
def test_a_metadata_that_is_none_is_refused(saved, data):
    (saved / ".metadata").write_bytes(data)
    with pytest.raises(CorruptError):
        directory.read(saved)


def _forged(saved: Path, change) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change(metadata)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))


def _entry(metadata, name):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def _huge(metadata) -> None:
    said = metadata.state_dict_metadata["model.weight"]
    said.size = said.chunks[0].sizes = torch.Size([1 << 40, 3])


def _gap(metadata) -> None:
    metadata.state_dict_metadata["model.weight"].size = torch.Size([6, 3])


def _outside(metadata) -> None:
    _entry(metadata, "model.weight").relative_path = "../elsewhere.distcp"


def _twice(metadata) -> None:
    said = metadata.state_dict_metadata["model.weight"]
    said.chunks, said.size = said.chunks * 2, torch.Size([10, 3])


def _missing(metadata) -> None:
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "step"}


def _collision(metadata) -> None:
    metadata.planner_data["step"] = ("text",)


def _inside_a_leaf(metadata) -> None:
    metadata.planner_data["step"] = ("model", "weight", "deeper")


def _other_dtype(metadata) -> None:
    metadata.state_dict_metadata["model.weight"].properties.dtype = torch.int32


def _compressed(metadata) -> None:
    _entry(metadata, "model.weight").transform_descriptors = ["stream.zstd"]


def _large_number(metadata) -> None:
    _entry(metadata, "model.weight").offset = 1 << 100_000


def _endless_when_printed(metadata) -> None:
    nest = ()
    for _ in range(100):
        nest = (nest, nest)
    _entry(metadata, "model.weight").relative_path = nest


def _deep(metadata) -> None:
    metadata.planner_data["step"] = ("step",) * 5000


@pytest.mark.parametrize(
    "change",
    [
        _huge,
        _gap,
        _outside,
        _twice,
        _missing,
        _collision,
        _inside_a_leaf,
        _other_dtype,
        _compressed,
        _large_number,
        _endless_when_printed,
        _deep,
    ],
)
def test_a_metadata_that_contradicts_itself_is_refused(saved, change):
    _forged(saved, change)
    with pytest.raises(CorruptError):
        directory.read(saved)


def test_many_shards_of_columns_cost_no_comparison_of_each_with_each():
    columns = 1 << 14  # pairwise it would take minutes
    entry = dcp_format.StorageEntry("__0_0.distcp", 0, 1 << 30)
    chunks = [dcp_format.TensorChunk((0, column), (9, 1), entry) for column in range(columns)]
    validator = dcp_format._Validator(None, "metadata")
    validator._check_coverage("w", dcp_format.TensorEntry(torch.float32, (9, columns), tuple(chunks)))
    chunks[0] = dcp_format.TensorChunk((0, 1), (9, 1), entry)
    with pytest.raises(CorruptError, match="do not make up"):
        validator._check_coverage("w", dcp_format.TensorEntry(torch.float32, (9, columns), tuple(chunks)))


def test_a_missing_and_a_cut_file_are_named(saved):
    data = (saved / "__0_0.distcp").read_bytes()
    (saved / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(TruncatedError, match=r"__0_0\.distcp"):
        directory.read(saved)
    (saved / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(TruncatedError):
        directory.read(saved)
    (saved / "__0_0.distcp").unlink()
    with pytest.raises(NotFoundError, match=r"__0_0\.distcp"):
        directory.read(saved)


def test_a_metadata_damaged_anywhere_is_read_or_is_an_error_of_ours(saved):
    data = (saved / ".metadata").read_bytes()
    for at in range(0, len(data), 7):
        (saved / ".metadata").write_bytes(data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :])
        try:
            directory.read(saved)
        except ShrinkpointError as error:
            assert str(saved.name) in str(error)


def test_other_files_beside_make_it_a_folder_that_goes_back_whole(saved, tmp_path):
    torch.save({"epoch": 3}, saved / "meta.pt")
    (saved / "notes.txt").write_bytes(b"mine")
    part = directory.read(saved)
    assert part.content["meta.pt"] == {"epoch": 3}
    assert same(_sorted(part.content[".metadata"]), _sorted(state()))
    (tmp_path / "back").mkdir()
    directory.write(tmp_path / "back", part.content, part.info)
    assert same(directory.read(tmp_path / "back").content[".metadata"], part.content[".metadata"])
    assert (tmp_path / "back" / "notes.txt").read_bytes() == b"mine"


def test_a_directory_of_our_writer_becomes_one_of_dcp(convert, tmp_path):
    for path in (tmp_path / "ours", tmp_path / "beside" / "model_0"):
        dcp.save(state(), storage_writer=Writer(path), no_dist=True)
    (tmp_path / "beside" / "notes.txt").write_bytes(b"mine")
    convert(tmp_path / "ours", tmp_path / "stock")
    convert(tmp_path / "beside", tmp_path / "store")
    convert(tmp_path / "store", tmp_path / "back")
    assert (tmp_path / "back" / "notes.txt").read_bytes() == b"mine"
    for path in (tmp_path / "stock", tmp_path / "back" / "model_0"):
        assert not (path / "shrinkpoint.json").exists()
        there = {"model": {"weight": torch.zeros(5, 3), "half": torch.zeros(4).half()}, "step": 0, "text": ""}
        dcp.load(there, checkpoint_id=path, no_dist=True)
        assert same(there, {key: state()[key] for key in there})


SHARDED = """
import json, torch
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

def of_rank(rank, width, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=width)
    mesh = DeviceMesh("cpu", list(range(width)))
    whole = torch.arange(35.0).view(7, 5)
    places = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    state = {name: distribute_tensor(whole + at, mesh, [place]) for at, (name, place) in enumerate(places.items())}
    state["short"] = distribute_tensor(torch.arange(1.0), mesh, [Shard(0)])  # one rank has nothing of it
    dcp.save({"model": state, "step": 3}, checkpoint_id=f"{folder}/dcp")
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({}, file)
"""


def test_shards_of_two_ranks_are_put_together(tmp_path):
    ranks(SHARDED, 2, tmp_path)
    found = directory.read(tmp_path / "dcp").content
    whole = torch.arange(35.0).view(7, 5)
    assert found["step"] == 3
    assert torch.equal(found["model"]["rows"], whole)
    assert torch.equal(found["model"]["columns"], whole + 1)
    assert torch.equal(found["model"]["copies"], whole + 2)
    assert torch.equal(found["model"]["short"], torch.arange(1.0))
    shutil.rmtree(tmp_path / "dcp")


def _sorted(value):
    """DCP keeps no order of keys."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
