"""safetensors files: tensors and metadata, and errors for what is no such file."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch
from helpers.foreign_files import same
from safetensors.torch import save, save_file

from shrinkpoint.convert import safetensors_file
from shrinkpoint.errors import CorruptError, FormatError, PolicyError, TruncatedError


def test_tensors_and_metadata_come_through_and_go_back_byte_for_byte(tmp_path):
    tensors = {
        "h.2.w": torch.randn(3, 4).bfloat16(),
        "h.10.w": torch.arange(5),
        "truth": torch.tensor([True]),
        "point": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "small": torch.randn(4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "step": "3"})
    part = safetensors_file.read(tmp_path / "a.safetensors")
    assert same(dict(sorted(part.content.items())), dict(sorted(tensors.items())))
    assert part.info == {"metadata": {"format": "pt", "step": "3"}}
    safetensors_file.write(tmp_path / "b.safetensors", part.content, part.info)
    again = safetensors_file.read(tmp_path / "b.safetensors")
    assert same(again.content, part.content)
    assert again.info == part.info


def test_layers_stand_in_the_order_of_their_numbers(tmp_path):
    save_file({f"h.{i}.w": torch.ones(1) for i in (10, 2, 1)}, tmp_path / "a.safetensors")
    assert list(safetensors_file.read(tmp_path / "a.safetensors").content) == ["h.1.w", "h.2.w", "h.10.w"]


def test_a_size_that_is_only_claimed_takes_no_memory(tmp_path):
    claim = {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    header = json.dumps(claim).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    for name in ("a", "b"):
        with pytest.raises(FormatError):
            safetensors_file.read(tmp_path / f"{name}.safetensors")


def test_every_prefix_is_an_error_of_ours(tmp_path):
    save_file({"w": torch.arange(9.0)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    for end in range(len(data)):
        (tmp_path / "b.safetensors").write_bytes(data[:end])
        with pytest.raises(FormatError):
            safetensors_file.read(tmp_path / "b.safetensors")
    (tmp_path / "b.safetensors").write_bytes(data[:-1])
    with pytest.raises(TruncatedError):
        safetensors_file.read(tmp_path / "b.safetensors")
    (tmp_path / "b.safetensors").write_bytes(data[:8] + b"?" + data[9:])
    with pytest.raises(CorruptError):
        safetensors_file.read(tmp_path / "b.safetensors")


def test_tensors_that_share_memory_are_written_apart(tmp_path):
    w = torch.arange(6.0)
    safetensors_file.write(tmp_path / "a.safetensors", {"a": w, "b": w, "part": w[::2], "t": w.view(2, 3).t()}, {})
    found = safetensors_file.read(tmp_path / "a.safetensors").content
    assert torch.equal(found["part"], w[::2])
    assert torch.equal(found["t"], w.view(2, 3).t())


def test_what_safetensors_cannot_hold_is_refused(tmp_path):
    for content in ({"a": 3}, {1: torch.ones(1)}, {"a": torch.zeros(1, dtype=torch.complex128)}):
        with pytest.raises(PolicyError):
            safetensors_file.write(tmp_path / "a.safetensors", content, {})


def test_a_file_whose_name_is_no_unicode_says_so(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.safetensors")
    path.write_bytes(save({"a": torch.ones(3)}))
    with pytest.raises(CorruptError, match="Give it a name of valid UTF-8"):
        safetensors_file.read(path)
