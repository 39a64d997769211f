"""The file `.metadata`, for which tools look that want to know whether a directory holds a checkpoint of torch's."""

from __future__ import annotations

import json
from pathlib import Path

from shrinkpoint.store.folder import MANIFEST

NAME = ".metadata"
_WORDS = (
    "shrinkpoint wrote this checkpoint: load it with shrinkpoint.train.dcp.Reader, or have it as torch writes it by "
    "the command shrinkpoint convert DIRECTORY OUT"
)
"""At most 200 letters, of which none is beyond ASCII: as much as the error quotes."""


def content(id: str) -> bytes:
    """What stands in ours: nothing that anybody reads back but who wants to know whose it is.

    It is no pickle. To who unpickles it, the first line is a whole number, which it is not: the error quotes it, and
    nothing was made or imported.
    """
    about = {"format": "shrinkpoint", "see": MANIFEST, "id": id, "read with": "shrinkpoint.train.dcp.Reader"}
    return f"L{_WORDS}\n{json.dumps(about)}\n".encode()


def is_foreign(folder: str | Path) -> bool:
    """Whether torch's own writer has saved into this folder after ours."""
    path, manifest = Path(folder) / NAME, Path(folder) / MANIFEST
    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with path.open("rb") as file:
            ours = file.read(1) in (b"L", b"{")  # "{": the line of JSON alone
        return not ours and path.stat().st_mtime_ns > manifest.stat().st_mtime_ns
    except FileNotFoundError:
        return False
