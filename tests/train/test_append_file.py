"""A file that only grows, and what is left of it when it cannot be opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from shrinkpoint.errors import StorageError
from shrinkpoint.train.journal_segments import AppendFile


def test_file_that_cannot_be_cut_is_closed_again(tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(b"abc")
    with pytest.raises(StorageError, match="opening for appending"):
        AppendFile(path, -1)  # no size: the system refuses it
    assert path not in [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]
    assert path.read_bytes() == b"abc"
