"""What every framework promises whose runs we save. Subclass `FrameworkContract`, give two methods, get every test."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.strategies import same

from shrinkpoint.errors import NoSpaceError
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import SaveReport
from shrinkpoint.store.directory import MANIFEST, newest_first, read_directory_manifest, verify_directory


def _flip(payload: Path) -> None:
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 4
    payload.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "a bit of the manifest": lambda folder: _flip(folder / MANIFEST),
    "no payload": lambda folder: (folder / "rank-00000.safetensors").unlink(),
    "a bit of a payload": lambda folder: _flip(folder / "rank-00000.safetensors"),
    "no bases": lambda folder: shutil.rmtree(folder / "bases"),
    "an empty directory": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


def checkpoints(root: Path) -> list[Path]:
    """Directories of whole checkpoints, the oldest first."""
    return newest_first({path.parent for path in root.rglob(MANIFEST)})[::-1]


@pytest.mark.filterwarnings("ignore:.*was saved below")
class FrameworkContract:
    """The tests; a subclass trains."""

    backgrounds: tuple[bool, ...] = (False, True)
    tells_of_empty_directories = True

    def train(
        self,
        root: Path,
        saves: int,
        *,
        resume: bool = False,
        limit: int | None = None,
        background: bool = False,
        on_save: Callable[[SaveReport], object] | None = None,
    ) -> Any:
        """The state of a run, by a new process as it were, that has saved `saves` times.

        Args:
            resume: go on from the newest checkpoint that loads, whose saves count.
            limit: how many checkpoints stay.
        """
        raise NotImplementedError

    def newest(self, root: Path) -> Path | None:
        """The checkpoint that a resume takes."""
        raise NotImplementedError

    @pytest.fixture(params=[False, True], ids=["", "background"])
    def background(self, request: pytest.FixtureRequest) -> bool:
        if request.param not in self.backgrounds:
            pytest.skip("saves are never in the background")
        return request.param

    def test_resumed_run_ends_as_an_uninterrupted_one(self, tmp_path, background):
        whole = self.train(tmp_path / "whole", 4)
        self.train(tmp_path / "run", 2, background=background)
        resumed = self.train(tmp_path / "run", 4, resume=True, background=background)
        assert same(resumed, whole)
        assert [read_directory_manifest(path).depth for path in checkpoints(tmp_path / "run")] == [0, 1, 2, 3]

    def test_newest_needs_no_older_one(self, tmp_path, background):
        reports: list[SaveReport] = []
        self.train(tmp_path, 4, limit=2, background=background, on_save=reports.append)
        assert [str(path) for path in checkpoints(tmp_path)] == [report.path for report in reports[2:]]
        older, newest = checkpoints(tmp_path)
        shutil.rmtree(older)
        verify_directory(newest, deep=True)
        assert self.newest(tmp_path) == newest

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_newest_is_skipped_with_a_warning(self, tmp_path, damage, caplog):
        self.train(tmp_path, 2)
        older, newest = checkpoints(tmp_path)
        assert self.newest(tmp_path) == newest
        DAMAGES[damage](newest)
        with caplog.at_level(logging.WARNING, "shrinkpoint"):
            assert self.newest(tmp_path) == older
        is_told = f"{newest.name} is passed over" in caplog.text
        assert is_told or (damage == "an empty directory" and not self.tells_of_empty_directories)

    def test_failed_save_raises_and_deletes_nothing(self, tmp_path, background, monkeypatch):
        self.train(tmp_path, 1, limit=1)
        [first] = checkpoints(tmp_path)

        def create(*_: object) -> None:
            raise NoSpaceError("disk", found="no space", do="look there")

        monkeypatch.setattr(LocalStorage, "create", create)
        with pytest.raises(NoSpaceError):
            self.train(tmp_path, 2, resume=True, limit=1, background=background)
        monkeypatch.undo()
        assert checkpoints(tmp_path) == [first] and self.newest(tmp_path) == first
        self.train(tmp_path, 2, resume=True, limit=1, background=background)
        assert self.newest(tmp_path) == checkpoints(tmp_path)[-1] != first  # in the place of the one that failed

    def test_new_run_in_an_old_directory_keeps_what_it_saves(self, tmp_path):
        self.train(tmp_path, 4, limit=2)
        reports: list[SaveReport] = []
        self.train(tmp_path, 2, limit=2, on_save=reports.append)
        assert {report.path for report in reports} <= {str(path) for path in checkpoints(tmp_path)}
        assert str(self.newest(tmp_path)) == reports[-1].path

    def test_on_save_gets_a_report_of_each_save(self, tmp_path, background):
        reports: list[SaveReport] = []
        self.train(tmp_path, 3, background=background, on_save=reports.append)
        assert [report.path for report in reports] == [str(path) for path in checkpoints(tmp_path)]
        manifests = [read_directory_manifest(path) for path in checkpoints(tmp_path)]
        assert [(report.step, report.depth) for report in reports] == [(one.step, one.depth) for one in manifests]
        assert [one.depth for one in manifests] == [0, 1, 2] and all(
            report.metrics()["bytes"] > 0 for report in reports
        )
