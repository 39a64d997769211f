"""The file `.metadata`, for which tools look that want to know whether a directory holds a checkpoint of torch's."""

from __future__ import annotations

import json
from pathlib import Path

from shrinkpoint.store.folder import MANIFEST

NAME = ".metadata"


def content(id: str) -> bytes:
    """What stands in ours: no pickle, and nothing that anybody reads back but who wants to know whose it is."""
    what = "shrinkpoint"
    return json.dumps({"format": what, "see": MANIFEST, "id": id, "read with": "shrinkpoint.train.dcp.Reader"}).encode()


def is_foreign(folder: str | Path) -> bool:
    """Whether torch's own writer has saved into this folder after ours."""
    path, manifest = Path(folder) / NAME, Path(folder) / MANIFEST
    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with path.open("rb") as file:
            ours = file.read(1) == b"{"
        return not ours and path.stat().st_mtime_ns > manifest.stat().st_mtime_ns
    except FileNotFoundError:
        return False
