"""Promise of every writer: after a kill, a power cut or damage a run goes on from the last checkpoint, or says why not.

`python -m helpers.writer_trials` makes more of these trials, of all writers.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from helpers import shadow_tree, writer_trials
from helpers.writers import WRITERS

from shrinkpoint.store import directory, layout
from shrinkpoint.store.manifest import decode_directory_manifest, decode_store_manifest
from shrinkpoint.sync.published import KEY, Published

DAILY = ("file",)
ALL = [pytest.param(name, marks=[] if name in DAILY else pytest.mark.nightly) for name in WRITERS]

needs_a_recorder = pytest.mark.skipif(shadow_tree.missing() is not None, reason=f"{shadow_tree.missing()}")


@needs_a_recorder
@pytest.mark.parametrize("name", ALL)
def test_power_cuts_lose_no_checkpoint_whose_save_returned(tmp_path: Path, name: str) -> None:
    counts = writer_trials.power(name, tmp_path, every=10)
    assert counts["records"] > 30 and all(counts[mode] for mode in shadow_tree.MODES)


@needs_a_recorder
def test_the_trial_sees_a_writer_that_flushes_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="expected one of"):
        writer_trials.power("unflushed", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRITERS)
def test_kills_lose_no_checkpoint_whose_save_returned(tmp_path: Path, name: str) -> None:
    counts = writer_trials.kills(name, tmp_path, count=2)
    assert counts.total() == 2


@pytest.mark.parametrize("name", ALL)
def test_damage_gives_an_error_or_an_older_checkpoint_and_never_other_bits(tmp_path: Path, name: str) -> None:
    counts = writer_trials.damage(name, tmp_path, count=30)
    assert counts.total() == 30 and counts["newest"] < 30


def named_files(path: Path, data: bytes) -> set[str]:
    """Paths of the files that a manifest needs in its own directory; nothing if `path` is no manifest."""
    if path.name == layout.MANIFEST:
        manifest = decode_store_manifest(data, str(path))
        names = {manifest.payloads[0].name, *(base.name for base in manifest.bases)}
    elif path.name == directory.MANIFEST:
        payloads = decode_directory_manifest(data, str(path)).payloads
        bases = {layout.base_name(digest) for payload in payloads for digest, _ in payload.bases}
        names = {payload.name for payload in payloads} | bases
    elif path.name == KEY:
        names = {key for file in Published.from_bytes(data, str(path)).files for key in file.keys}
    else:
        names = set()
    return {(path.parent / name).as_posix() for name in names}


@needs_a_recorder
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "store" else pytest.mark.nightly)
        for name in WRITERS
        if name not in ("file", "journal")
    ],
)
def test_a_manifest_appears_after_all_that_it_names_is_durable(tmp_path: Path, name: str) -> None:
    root, log = tmp_path / "run", tmp_path / "log"
    environ = writer_trials.environ() | shadow_tree.environment(root, log)
    subprocess.run(writer_trials.command(name, root), env=environ, check=True, stdout=subprocess.DEVNULL)
    tree, checked = shadow_tree.ShadowTree(root), 0
    for record in tree.replay(log):
        if not record.startswith("rename "):
            continue
        path = Path(record.rpartition(" ")[2]).relative_to(root)
        whole, durable = (tree.image(mode, random.Random(0)) for mode in ("all", "flushed"))
        needed = named_files(path, whole[path.as_posix()][1])
        assert {key: durable.get(key) for key in needed} == {key: whole[key] for key in needed}, record
        checked += bool(needed)
    assert checked >= 3
