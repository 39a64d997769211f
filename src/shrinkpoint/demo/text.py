"""The text: Python's own standard library, which is on every machine that can run this."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from shrinkpoint.errors import NotFoundError


def stdlib_text(folder: Path | None = None) -> bytes:
    """The bytes of the top-level modules, sorted by name and joined with a NUL: a few megabytes of English and Python.

    Args:
        folder: where the `*.py` lie; None asks `sysconfig`.

    Raises:
        NotFoundError: no module there (some distributions ship only byte code).
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"), key=lambda path: path.name)
    text = b"\0".join(path.read_bytes() for path in files)
    if not text:
        raise NotFoundError(
            str(folder),
            found="no Python source",
            expected="the standard library's modules",
            do="run this with a Python that ships its source",
        )
    return text
