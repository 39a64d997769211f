"""What any release ever wrote, this one reads, and reads the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fingerprint import file_digests, fingerprint
from helpers.strategies import TORCH_DTYPES

import shrinkpoint as sp
from shrinkpoint.container import FileReader
from shrinkpoint.errors import NotFoundError
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.directory import verify_directory
from shrinkpoint.tensors.flat_state import unflatten
from shrinkpoint.train.dcp import load

ROOT = Path(__file__).parent / "v1"
EXPECTED = json.loads((ROOT / "expected.json").read_text())
FOLDERS = [(run, folder) for run, folders in EXPECTED["runs"].items() for folder in folders]
STORED = [(store, int(step)) for store, steps in EXPECTED["stores"].items() for step in steps]


def listing() -> dict[str, tuple[int, int]]:
    """Size and time of change of everything there, directories included."""
    stats = {path: path.stat() for path in [ROOT, *ROOT.rglob("*")]}
    return {os.fspath(path): (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


@pytest.fixture(autouse=True)
def nothing_is_written() -> Iterator[None]:
    before = listing()
    yield
    assert listing() == before


def test_no_golden_file_is_missing_new_or_changed():
    digests = file_digests(ROOT)
    digests.pop("expected.json")
    assert digests == EXPECTED["files"]


def test_every_golden_file_has_an_expectation():
    parts = [name.split("/") for name in EXPECTED["files"]]
    files = {"/".join(path) for path in parts if len(path) == 2}
    assert files == EXPECTED["states"].keys() and len(files) > 25
    directories = {"/".join(path[:2]) for path in parts if len(path) > 2}
    assert directories == EXPECTED["stores"].keys() | EXPECTED["runs"].keys()


@pytest.mark.parametrize("name", EXPECTED["states"])
def test_a_golden_file_decodes_to_what_was_saved(name):
    if "newest_dtypes" in name and not {"F8_E8M0", "F4_X2"} <= TORCH_DTYPES.keys():
        pytest.skip("this torch lacks the newest dtypes")
    for threads in (1, 2):
        assert fingerprint(sp.load(ROOT / name, threads=threads)) == EXPECTED["states"][name]


@pytest.mark.parametrize("name", EXPECTED["states"])
def test_a_golden_file_is_intact_as_far_as_the_container_goes(name):
    with LocalStorage(ROOT).open(name) as source:
        assert not list(FileReader(source, name).check())
    assert sp.inspect(ROOT / name).stored_bytes == (ROOT / name).stat().st_size


@pytest.mark.parametrize("store, step", STORED)
def test_a_golden_step_decodes_to_what_was_saved(store, step):
    opened = sp.Store(ROOT / store)
    if step not in opened.steps():
        with pytest.raises(NotFoundError, match="forgotten"):
            opened.load(step)
        return
    assert fingerprint(opened.load(step)) == EXPECTED["stores"][store][str(step)]


def test_a_golden_store_lists_verifies_and_restores():
    for name, steps in EXPECTED["stores"].items():
        store = sp.Store(ROOT / name)
        assert set(store.steps()) < {int(step) for step in steps}  # one of them is forgotten
        assert not list(store.verify(deep=True))
        newest = max(store.steps())
        assert fingerprint(store.restore().state) == steps[str(newest)]


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
