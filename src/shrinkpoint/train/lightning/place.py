"""Where a checkpoint lies, and what may lie there already."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lightning.fabric.utilities.types import _PATH

from shrinkpoint.errors import PolicyError
from shrinkpoint.storage import is_url, local_path


def local(path: _PATH) -> Path | None:
    """A path of the file system of this machine; None: it is somewhere else."""
    given: object = path.removeprefix("file://") if isinstance(path, str) else path
    return None if is_url(given) else local_path(given).absolute()


def folder_of(path: _PATH) -> Path:
    """The directory that a checkpoint is to be.

    Raises:
        PolicyError: it is not on a file system of this machine.
    """
    found = local(path)
    if found is None:
        do = "save to a local or mounted directory, and copy what is to be kept elsewhere from there"
        raise PolicyError("ShrinkIO", found=str(path), expected="a path of a local file system", do=do)
    return found


def vacated(folder: Path) -> Path | None:
    """Make room for a directory: a link is removed, not followed; a file, such as a checkpoint of the stock plugin,
    gets another name, under which it still loads.

    Returns:
        The file's other name; None: there was none.
    """
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_file():
        aside = folder.with_name(f"{folder.stem}-before{folder.suffix}")
        folder.replace(aside)
        return aside
    return None


def remove_empty(folder: Path) -> None:
    """Remove a directory into which nothing was saved."""
    with suppress(OSError):
        (folder / "bases").rmdir()
    with suppress(OSError):
        folder.rmdir()
