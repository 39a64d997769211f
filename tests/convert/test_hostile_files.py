"""Small files of others that would take very much memory or time: bounded, and else a clear error."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from helpers.processes import run_forked
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import shrinkpoint as sp
from shrinkpoint.convert import sharded_index, torch_file
from shrinkpoint.convert.dcp import parse_metadata
from shrinkpoint.errors import CorruptError, ShrinkpointError, StateError
from shrinkpoint.tensors import tree

PEAK = """
import resource, sys
from pathlib import Path
import shrinkpoint as sp
from shrinkpoint.convert.discover import discover
from shrinkpoint.convert.import_ import import_to_file
from shrinkpoint.schemes import get_scheme

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

source, out = Path(sys.argv[1]), Path(sys.argv[2])
before = peak()
try:
    if sys.argv[3] == "convert":
        import_to_file(discover(source).checkpoints[0], out, get_scheme("lossless"), opaque=False, verify=True)
    else:
        sp.save(torch.load(source), out)
        sp.load(out)
    print("done", peak() - before)
except sp.ShrinkpointError as error:
    print(type(error).__name__, peak() - before)
"""
TEXT, BYTES, ARRAY, WEIGHT = "x" * 50_000, b"y" * 1_000_000, np.arange(250_000, dtype=">f4"), torch.ones(3)
REPEATED = {
    "text": [TEXT] * 30_000,
    "keys": [{TEXT: 1}] * 30_000,
    "an array": [ARRAY] * 3_000,
    "a long name above tensors": {"k" * 1_000_000: [torch.ones(1) for _ in range(500)]},
    "a tensor of a long name": {"k" * 1_000_000: WEIGHT, "again": [WEIGHT] * 10_000},
}


@pytest.mark.parametrize(("name", "how"), each_value(REPEATED, ["save", "convert"]))
def test_a_value_in_many_places_takes_bounded_memory(tmp_path, name, how):
    torch.save(REPEATED[name], tmp_path / "a.pt")
    outcome, megabytes = run_forked(PEAK, str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors"), how).split()
    assert outcome == ("done" if name == "an array" else "StateError")
    assert int(megabytes) < 700


def test_repeated_bytes_are_stored_once_and_come_back_as_one(tmp_path):
    report = sp.save({"a": [BYTES] * 2_000}, tmp_path / "a.safetensors")
    assert report.raw_bytes == len(BYTES)
    loaded = sp.load(tmp_path / "a.safetensors", max_bytes=3 * len(BYTES))["a"]
    assert loaded == [BYTES] * 2_000 and all(value is loaded[0] for value in loaded)


def test_a_nest_that_refers_to_itself_many_times_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "_MAX_NESTS", 1 << 14)
    nest: list = []
    for _ in range(40):
        nest = [nest, nest]
    with pytest.raises(StateError, match="lists and dicts"):
        sp.save(nest, tmp_path / "a.safetensors")


def torch_zip(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED, data: bytes = b"") -> Path:
    torch.save({"w": torch.zeros(4)}, path.with_suffix(".real"))
    with zipfile.ZipFile(path.with_suffix(".real")) as real, zipfile.ZipFile(path, "w", compression) as made:
        for name in real.namelist():
            old = real.read(name)
            made.writestr(
                name, content or old if name.endswith("data.pkl") else data or old if "data/0" in name else old
            )
    return path


def test_a_compressed_record_is_refused_before_it_is_read(tmp_path):
    path = torch_zip(tmp_path / "a.pt", b"", zipfile.ZIP_DEFLATED, bytes(50 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(CorruptError, match="compressed record"):
        torch_file.read(path)


def test_records_that_overlap_are_refused(tmp_path):
    torch.save({str(i): torch.zeros(2500) for i in range(4)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = data.rindex(b"PK\x01\x02")
    struct.pack_into("<II", data, at + 20, len(data), len(data))
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptError):
        torch_file.read(tmp_path / "a.pt")


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return pickle.LONG1 + bytes([len(data)]) + data


def colliding_tuple(first: int, target: int) -> tuple[int, int] | None:
    """Two numbers whose hash as a pair is that of all other pairs made for `target`; None where there are none."""
    mask, one, two, five = (1 << 64) - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261

    def lane(accumulator: int, value: int) -> int:
        accumulator = (accumulator + value * two) & mask
        return ((accumulator << 31 | accumulator >> 33) & mask) * one & mask

    back = target * pow(one, -1, 1 << 64) & mask
    back = (back >> 31 | back << 33) & mask
    second = (back - lane(five, first)) * pow(two, -1, 1 << 64) & mask
    return (first, second) if second < (1 << 61) - 1 else None


PAIRS = [pair for pair in (colliding_tuple(i, 12345) for i in range(60_000)) if pair]
KEYS = {
    "numbers": [number((2**61 - 1) * i) for i in range(5_000)],
    "pairs": [number(a) + number(b) + pickle.TUPLE2 for a, b in PAIRS],
}


def test_the_pairs_of_this_test_do_collide():
    assert len(PAIRS) > 5_000 and len({hash(pair) for pair in PAIRS}) == 1


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_keys_made_to_collide_are_refused_in_files_of_torch_and_in_metadata(tmp_path, keys):
    items = b"}(" + b"".join(key + b"N" for key in keys) + b"u"
    for dictionary in (items, b"}" + b"".join(key + b"Ns" for key in keys)):
        with pytest.raises(StateError, match="collide"):
            torch_file.read(torch_zip(tmp_path / "a.pt", b"\x80\x02" + dictionary + b"."))
        with pytest.raises(CorruptError):
            parse_metadata(b"\x80\x02" + dictionary + b".", "metadata")
    for call in (b"cbuiltins\nset\n", b"ccollections\nCounter\n"):
        elements = b"](" + b"".join(keys) + b"e"
        with pytest.raises(StateError, match="collide"):
            torch_file.read(torch_zip(tmp_path / "a.pt", b"\x80\x02" + call + elements + b"\x85R."))


def test_many_chunks_of_one_tensor_are_found_by_their_offsets():
    count = 5_000
    chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(count)]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([count]), chunks)
    places = {MetadataIndex("w", torch.Size([i]), i): _StorageInfo("__0_0.distcp", 100 * i, 100) for i in range(count)}
    parsed = parse_metadata(pickle.dumps(Metadata({"w": tensor}, storage_data=places)), "metadata")
    assert [chunk.entry.offset for chunk in parsed.items["w"].chunks] == [100 * i for i in range(count)]


def test_a_key_that_is_slow_to_hash_is_refused(tmp_path):
    key = b"N" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
    content = b"\x80\x02}" + key + b"Ns" + b"N" * 40_000 + b"0" * 40_000 + b"."
    with pytest.raises(ShrinkpointError, match="very many values"):
        torch_file.read(torch_zip(tmp_path / "a.pt", content))


def test_bytes_that_a_pickle_copies_very_often_are_refused(tmp_path):
    text = b"X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000 + b"q\x00"
    encode = b"c_codecs\nencode\nq\x010h\x01h\x00X\x06\x00\x00\x00latin1q\x02\x86R"
    again = b"h\x01h\x00h\x02\x86R"
    content = b"\x80\x02](" + text + b"0" + encode + again * 200 + b"e."
    with pytest.raises(StateError, match="copies one text"):
        torch_file.read(torch_zip(tmp_path / "a.pt", content))


def test_a_tensor_that_a_pickle_calls_for_is_refused(tmp_path):
    content = b"\x80\x02ctorch\nFloatTensor\nJ" + struct.pack("<i", 1 << 28) + b"\x85R."
    with pytest.raises(ShrinkpointError, match=r"more bytes than their file|no torch file"):
        torch_file.read(torch_zip(tmp_path / "a.pt", content))


def test_an_index_of_many_empty_lists_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(b'{"weight_map": {"a": "b"}, "x": [' + b"[]," * 3_000_000 + b"[]]}")
    with pytest.raises(CorruptError, match="lists and objects"):
        sharded_index.read(path)
