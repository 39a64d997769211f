"""Checksums that formats of others have are compared; where a format has none, convert says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.foreign_files import same
from helpers.parameters import each_value
from safetensors.torch import save_file
from typer.testing import CliRunner

from shrinkpoint.cli.app import app
from shrinkpoint.convert.discover import discover
from shrinkpoint.errors import ShrinkpointError

pytestmark = pytest.mark.filterwarnings("ignore")
STATE = {"model": {"w": torch.full((40,), 1.0), "half": torch.arange(9).half()}, "step": 7, "list": [1, {"name": "x"}]}


def torch_file(folder: Path, **options) -> Path:
    torch.save(STATE, folder / "step-1.pt", **options)
    return folder / "step-1.pt"


def dcp_directory(folder: Path) -> Path:
    dcp.save(STATE, checkpoint_id=folder / "step-1", no_dist=True)
    return folder / "step-1"


def trainer_directory(folder: Path) -> Path:
    path = folder / "checkpoint-1"
    path.mkdir()
    save_file(STATE["model"], path / "model.safetensors")
    torch.save(STATE, path / "optimizer.pt")
    (path / "config.json").write_text("{}")
    return path


def sharded_directory(folder: Path, suffix: str = "safetensors") -> Path:
    path = folder / "checkpoint-1"
    path.mkdir()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    for name, tensor in STATE["model"].items():
        save = save_file if suffix == "safetensors" else torch.save
        save({name: tensor}, path / f"{name}.{suffix}")
    index = {"metadata": {}, "weight_map": {name: f"{name}.{suffix}" for name in STATE["model"]}}
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize(
    ("write", "files"),
    [(torch_file, ["."]), (dcp_directory, ["__0_0.distcp"]), (trainer_directory, ["optimizer.pt"])],
)
def test_each_flipped_bit_of_a_format_with_checksums_is_found_or_harmless(tmp_path, write, files):
    source = write(tmp_path)
    whole = discover(source).checkpoints[0].read()
    found = 0
    for path in (source / file for file in files):
        data = path.read_bytes()
        for at in range(0, len(data), len(data) // 150):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            try:
                assert same(discover(source).checkpoints[0].read(), whole), f"byte {at} of {path}"
            except ShrinkpointError:
                found += 1
        path.write_bytes(data)
    assert found > 50


def without_crc(folder: Path) -> Path:
    torch.serialization.set_crc32_options(False)
    try:
        return torch_file(folder)
    finally:
        torch.serialization.set_crc32_options(True)


def safetensors_file(folder: Path) -> Path:
    save_file(STATE["model"], folder / "step-1.safetensors")
    return folder / "step-1.safetensors"


UNCHECKED = {
    torch_file: [],
    lambda folder: torch_file(folder, _use_new_zipfile_serialization=False): ["step-1.pt"],
    without_crc: ["step-1.pt"],
    safetensors_file: ["step-1.safetensors"],
    dcp_directory: [".metadata"],
    trainer_directory: ["config.json", "model.safetensors"],
    sharded_directory: ["half.safetensors", "model.safetensors.index.json", "w.safetensors"],
    lambda folder: sharded_directory(folder, "bin"): ["pytorch_model.bin.index.json"],
}


@pytest.mark.parametrize(("write", "form"), each_value(UNCHECKED, ["shrinkpoint", "torch"]))
def test_convert_says_which_files_have_no_checksum(tmp_path, write, form):
    names = UNCHECKED[write]
    arguments = ["convert", str(write(tmp_path)), str(tmp_path / "out"), "--to", form]
    lines = [line for line in CliRunner().invoke(app, arguments).stderr.splitlines() if "no checksum" in line]
    assert len(lines) == bool(names)
    for line in lines:
        assert all(name in line for name in names)
    again = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--force"]).stdout)
    (row,) = again["checkpoints" if form == "shrinkpoint" else "written"]
    assert sorted(row["unchecked"]) == names
