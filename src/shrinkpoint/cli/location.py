"""The location that a command is given: a store, one of its checkpoints, or a single file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.storage import LocalStorage, Source, Storage
from shrinkpoint.store.directory import find_checkpoints
from shrinkpoint.store.identify import EMPTY_DIRECTORY, identify
from shrinkpoint.store.listing import Listing, scan
from shrinkpoint.store.manifest import Manifest

OWN_CHECKPOINT = "a checkpoint of shrinkpoint"
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="Directory of a store.", show_default=False)]
RunArgument = Annotated[
    str,
    typer.Argument(metavar="STORE|RUN", help="Directory of a store, or of a framework's run.", show_default=False),
]
LocationArgument = Annotated[
    str,
    typer.Argument(
        metavar="STORE|FOLDER|FILE",
        help="A store, a store's checkpoint (STORE@STEP), a framework's checkpoint directory or run, or one file.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Location:
    """A place on the command line.

    Attributes:
        path: of the store or the file.
        step: which checkpoint was asked for; None for the newest.
    """

    path: Path
    step: int | None = None

    @property
    def is_file(self) -> bool:
        return self.path.is_file()

    @property
    def is_run(self) -> bool:
        """Whether it is a checkpoint in a folder of a framework's own, or a directory with such folders in it."""
        return self.path.is_dir() and bool(find_checkpoints(self.path)) and not scan(LocalStorage(self.path)).keys

    @property
    def newest_directory(self) -> Path:
        """Of a run, the newest checkpoint.

        Raises:
            PolicyError: a step was asked for, which folders do not have as their names.
        """
        if self.step is not None:
            found, do = f"step {self.step}", f"name the directory of that checkpoint below {self.path}"
            raise PolicyError(str(self.path), found=found, expected="a checkpoint's own directory", do=do)
        return find_checkpoints(self.path)[-1]

    def __str__(self) -> str:
        return str(self.path) if self.step is None else f"{self.path}@{self.step}"


def parse_location(text: str, step: int | None = None) -> Location:
    """Read `PATH` or `STORE@STEP`; a path that exists as it stands wins over the second reading.

    Raises:
        NotFoundError: there is nothing, or a file that something else wrote.
        PolicyError: two different steps, or a step of a file.
    """
    path = Path(text)
    if not path.exists():
        before, at, after = text.rpartition("@")
        if at and after.isdecimal() and Path(before).is_dir():
            if step not in (None, int(after)):
                raise PolicyError(text, found=f"--step {step} as well", expected="one step", do="leave one of them out")
            return Location(Path(before), int(after))
        raise NotFoundError(text, found="no such file or directory", do="check the path")
    if path.is_file() and step is not None:
        raise PolicyError(text, found="a file with --step", expected="a store", do="leave --step out")
    known = identify(path) if path.is_file() else None
    if known is not None and known.is_foreign:
        raise NotFoundError(text, found=known.description, expected=OWN_CHECKPOINT, do=known.do)
    return Location(path, step)


def open_store(text: str, *, allow_run: bool = False) -> tuple[Storage, Listing]:
    """A store's storage, and what stands in it.

    Args:
        allow_run: a framework's run will do, too.

    Raises:
        NotFoundError: there is no such directory, or one with other things in it. (An empty store is a store.)
    """
    path = Path(text)
    if not path.is_dir():
        found, do = (
            ("a file", f"see `shrinkpoint show {text}`") if path.exists() else ("no such directory", "check the path")
        )
        raise NotFoundError(text, found=found, expected="the directory of a store", do=do)
    storage = LocalStorage(path)
    listing = scan(storage)
    if not (listing.keys or listing.manifests or listing.broken):
        known = identify(path)
        if known is not None and known.description != EMPTY_DIRECTORY and (known.is_foreign or not allow_run):
            raise NotFoundError(text, found=known.description, expected="the directory of a store", do=known.do)
    return storage, listing


def open_file(path: Path) -> Source:
    """A single file as a source of bytes; the caller closes it."""
    return LocalStorage(path.absolute().parent).open(path.name)


def find_manifest(listing: Listing, location: Location) -> Manifest:
    """The checkpoint that was asked for, or the newest that is not forgotten.

    Raises:
        NotFoundError: there is none.
        FormatError: its manifest cannot be read.
    """
    if location.step in listing.broken:
        raise listing.broken[location.step]
    if location.step is None and listing.visible:
        return listing.visible[max(listing.visible)]
    if location.step in listing.manifests:
        return listing.manifests[location.step]
    known = None if listing.visible or listing.manifests else identify(location.path)
    if known is not None and (known.is_foreign or location.step is None):
        raise NotFoundError(str(location.path), found=known.description, expected=OWN_CHECKPOINT, do=known.do)
    wanted = "no checkpoint" if location.step is None else f"no checkpoint of step {location.step}"
    steps = f"one of {preview(sorted(listing.visible))}" if listing.visible else "a directory with a checkpoint in it"
    raise NotFoundError(str(location.path), found=wanted, expected=steps, do=f"see `shrinkpoint list {location.path}`")


def require_step(listing: Listing, step: int, store: str) -> int:
    """`step`, if the store has such a checkpoint, readable or not.

    Raises:
        NotFoundError: it has none.
    """
    if step not in listing.manifests and step not in listing.broken:
        expected = f"one of {preview(sorted(listing.visible))}" if listing.visible else "a store with checkpoints"
        raise NotFoundError(store, found=f"no checkpoint of step {step}", expected=expected, do="list the store")
    return step


def preview(steps: Sequence[int]) -> str:
    """Steps in a line that does not grow with their number.

    >>> preview([1, 2, 3]), preview(range(0, 1000, 100))
    ('1, 2, 3', '0, 100, 200, ..., 700, 800, 900')
    """
    texts = [str(step) for step in steps]
    return ", ".join(texts if len(texts) < 8 else [*texts[:3], "...", *texts[-3:]])
