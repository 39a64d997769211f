"""What any release ever wrote, this one reads, and reads the same."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fingerprint import file_digests, fingerprint
from helpers.strategies import TORCH_DTYPES

import shrinkpoint as sp
from shrinkpoint.container import FileReader
from shrinkpoint.errors import NotFoundError
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import scan
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.directory import verify_directory
from shrinkpoint.sync import Subscriber
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.train.dcp import load

ROOT = Path(__file__).parent
VERSIONS = ["v1", "v2", "v3"]
"""Of the format; the folder of each says what its files hold."""


def _expectations() -> dict[str, Any]:
    """Of all versions, with the version as the first part of every path."""
    merged: dict[str, Any] = {}
    for version in VERSIONS:
        for key, expected in json.loads((ROOT / version / "expected.json").read_text()).items():
            merged.setdefault(key, {}).update({f"{version}/{name}": content for name, content in expected.items()})
    return merged


EXPECTED = _expectations()
FOLDERS = [(run, folder) for run, folders in EXPECTED["runs"].items() for folder in folders]


def listing() -> dict[str, tuple[int, int]]:
    """Size and time of change of everything there, directories included."""
    stats, folders = dict[str, tuple[int, int]](), [str(ROOT / version) for version in VERSIONS]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                stat = entry.stat()
                stats[entry.path] = stat.st_size, stat.st_mtime_ns
                if entry.is_dir():
                    folders.append(entry.path)
    return stats


@pytest.fixture(scope="module")
def listing_at_start() -> dict[str, tuple[int, int]]:
    return listing()


@pytest.fixture(autouse=True)
def nothing_is_written(listing_at_start: dict[str, tuple[int, int]]) -> Iterator[None]:
    yield
    assert listing() == listing_at_start


def test_no_golden_file_is_missing_new_or_changed():
    for version in VERSIONS:
        digests = {f"{version}/{name}": digest for name, digest in file_digests(ROOT / version).items()}
        digests.pop(f"{version}/expected.json")
        assert digests == {name: digest for name, digest in EXPECTED["files"].items() if name.startswith(version)}


def test_every_golden_file_has_an_expectation():
    parts = [name.split("/") for name in EXPECTED["files"]]
    files = {"/".join(path) for path in parts if len(path) == 3}
    assert files == EXPECTED["states"].keys() and len(files) > 50
    directories = {"/".join(path[:3]) for path in parts if len(path) > 3}
    assert directories == EXPECTED["stores"].keys() | EXPECTED["runs"].keys() | EXPECTED["published"].keys()


@pytest.mark.parametrize("folder", dict.fromkeys(name.rpartition("/")[0] for name in EXPECTED["states"]))
def test_golden_files_of_a_folder(folder):
    """Each decodes to what was saved, whatever the threads, is intact, and says its version."""
    for name in (name for name in EXPECTED["states"] if name.rpartition("/")[0] == folder):
        if "newest_dtypes" in name and not {"F8_E8M0", "F4_X2"} <= TORCH_DTYPES.keys():
            continue  # this torch lacks them
        for threads in (1, 2):
            assert fingerprint(sp.load(ROOT / name, threads=threads)) == EXPECTED["states"][name], name
        with LocalStorage(ROOT).open(name) as source:
            assert not list(FileReader(source, name).check()), name
        data = (ROOT / name).read_bytes()
        assert sp.inspect(ROOT / name).stored_bytes == len(data), name
        (length,) = struct.unpack("<Q", data[:8])
        document = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["shrinkpoint"])
        assert f"v{document['format']}" == folder.split("/")[0], name


def test_the_reader_of_the_page_on_the_format_reads_every_file_of_the_format_it_describes():
    page = (ROOT.parents[1] / "docs" / "format.md").read_text()
    block = page[page.index("## A reader of the outer half") :].split("```")[1]
    lines = [line[4:] for line in block.splitlines() if line.startswith((">>> ", "... "))]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    for path in sorted(path for version in ("v2", "v3") for path in (ROOT / version).rglob("*.safetensors")):
        with LocalStorage(path.parent).open(path.name) as source:
            reader = FileReader(source, path.name)
            read = [(head, part, data) for head in reader.records for part, data in reader.read(head).parts.items()]
        first = [head.infos[0] for head, _, _ in read]
        expected = [
            ([info.name, info.dtype, list(info.shape)], part, head.recipe, bytes(data))
            for info, (head, part, data) in zip(first, read, strict=True)
        ]
        assert list(names["parts"](path.read_bytes())) == expected


def test_a_delta_of_this_release_stands_on_a_file_of_format_1(tmp_path):
    shutil.copy(ROOT / "v1" / "lossless" / "0.1.0_adam_base.safetensors", tmp_path / "base.safetensors")
    state = sp.load(tmp_path / "base.safetensors")
    name = next(iter(state["model"]))
    state["model"][name] = state["model"][name] * 1.001
    sp.save(state, tmp_path / "delta.safetensors", base=tmp_path / "base.safetensors")
    assert fingerprint(sp.load(tmp_path / "delta.safetensors")) == fingerprint(state)
    with LocalStorage(tmp_path).open("delta.safetensors") as source:
        assert any(head.base for head in FileReader(source, "delta").records)


@pytest.mark.parametrize("store", EXPECTED["stores"])
def test_steps_of_a_golden_store_decode_to_what_was_saved(store):
    opened = sp.Store(ROOT / store)
    for step, expected in EXPECTED["stores"][store].items():
        if int(step) in opened.steps():
            assert fingerprint(opened.load(int(step))) == expected, step
        else:
            with pytest.raises(NotFoundError, match="forgotten"):
                opened.load(int(step))


def test_a_golden_store_lists_verifies_and_restores():
    for name, steps in EXPECTED["stores"].items():
        store = sp.Store(ROOT / name)
        hidden = 0 if name.endswith("returned_store") else 1  # one of the others is forgotten
        assert set(store.steps()) <= {int(step) for step in steps} and len(store.steps()) == len(steps) - hidden
        assert not list(store.verify(deep=True))
        newest = max(store.steps())
        assert fingerprint(store.restore().state) == steps[str(newest)]


def test_a_golden_run_that_went_back_has_left_a_step_behind():
    listing = scan(LocalStorage(ROOT / "v3" / "stores" / "0.1.0_returned_store"))
    assert listing.abandoned == {4} and listing.manifests[3].sequence == listing.manifests[4].sequence + 1


@pytest.mark.parametrize("run, folder", FOLDERS)
def test_a_golden_directory_verifies_and_decodes_to_what_was_saved(run, folder):
    path = ROOT / run / folder
    assert verify_directory(path, deep=True).depth > 0 or folder.endswith("1")
    if run.endswith("shards"):
        state = load(path)
    else:
        decoded = decode_directory(path)
        state = unflatten(decoded.tree, decoded.reference.tensors)
    assert fingerprint(state) == EXPECTED["runs"][run][folder]


@pytest.mark.parametrize("place", EXPECTED["published"])
def test_golden_published_weights_are_followed(place):
    ((version, expected),) = EXPECTED["published"][place].items()
    live = {"w": torch.zeros(40, 30, dtype=torch.bfloat16), "b": torch.zeros(30), "n": torch.tensor(0)}
    live |= {"tied": torch.zeros(30)} if place.endswith("parts") else {}
    update = Subscriber(ROOT / place).update(live)
    assert update is not None and update.version == int(version)
    assert fingerprint(live) == expected
    names = {path.name for path in (ROOT / place).iterdir()}
    ranks = [f"-part-{rank:05d}-*" for rank in range(2)] if place.endswith("parts") else [""]
    versions = ("version-000000000005", "version-000000000008-from-000000000005")
    files = [f"{version}{rank}.safetensors" for version in versions for rank in ranks]
    assert len(names) == 1 + len(files) and "published.json" in names
    assert all(len(fnmatch.filter(names, file)) == 1 for file in files)
