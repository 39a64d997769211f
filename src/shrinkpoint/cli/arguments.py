"""Arguments and options that several commands share, and what they name: a store, a checkpoint, a file, a function."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint import validate
from shrinkpoint.cli.console import print_note
from shrinkpoint.errors import NotFoundError, PolicyError, error_text
from shrinkpoint.storage import LocalStorage, Storage, directory_storage, is_object_url, resolve_storage, what_is_at
from shrinkpoint.storage.paths import ObjectUrl, parse_object_url
from shrinkpoint.store.directory import find_run, read_directory_manifest, select_step
from shrinkpoint.store.file_place import FilePlace, place_file
from shrinkpoint.store.identify import EMPTY_DIRECTORY, Identification, find_checkpoints, identify
from shrinkpoint.store.listing import Listing, list_steps, scan
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.step_storage import find_store

if TYPE_CHECKING:
    from shrinkpoint.store.checkpoint_file import DecodedFile
    from shrinkpoint.tensors.compare import LeafSource


def complete_step(incomplete: str) -> list[str]:
    """The steps of the store that the line names already, for the shell; of stores in directories only."""
    # From the line as scripts of typer pass it: where an option lacks its value, a context has no arguments.
    words = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    stores = [Path(word) for word in words[2:] if not is_object_url(word) and Path(word).is_dir()]
    texts = [str(step) for store in stores for step in list_steps(LocalStorage(store))]
    return [text for text in texts if text.startswith(incomplete)]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout and nothing else.")]
StepOption = Annotated[
    int | None,
    typer.Option(
        "--step",
        min=0,
        metavar="N",
        help="Step of the checkpoint; the newest if not given.",
        autocompletion=complete_step,
    ),
]
THRESHOLD_HELP = "For schemes that measure: largest rise of the loss, 1% or 0.01."
ThresholdOption = Annotated[str, typer.Option("--threshold", metavar="SHARE", help=THRESHOLD_HELP)]
HigherIsBetterOption = Annotated[
    bool, typer.Option("--higher-is-better", help="--evaluate returns a score, not a loss.")
]


def parse_share(text: str) -> float:
    """Reads what `--threshold` says: "1%" and "0.01" alike; raises PolicyError if the text is no share."""
    try:
        value: float | str = float(text)
    except ValueError:
        value = text
    return validate.check_fraction("--threshold", value, allow_zero=True)


def import_function(text: str, option: str) -> Callable[[Any], Any]:
    """Imports the function that `module:function` names; modules of the current directory are found too.

    Args:
        option: that named it, for errors.

    Raises:
        PolicyError: there is no such module or function.
    """
    module, colon, name = text.partition(":")
    do = "write module:function, for example quality:evaluate for evaluate() in quality.py"
    if not (module and colon and name):
        raise PolicyError(option, found=repr(text), expected="module:function", do=do)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:
        raise PolicyError(option, found=error_text(error), expected=f"the function {text}", do=do) from error
    if not callable(function):
        raise PolicyError(option, found=validate.type_name(function), expected="a function of a state", do=do)
    return function  # type: ignore[no-any-return]


OWN_CHECKPOINT = "a checkpoint of shrinkpoint"
_LOCATION_HELP = "A store, a store's checkpoint (STORE@STEP), a framework's checkpoint directory or run, or one file."
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="Directory or URL of a store.")]
_RUN_HELP = "Directory or URL of a store, or directory of a framework's run."
RunArgument = Annotated[str, typer.Argument(metavar="STORE|RUN", help=_RUN_HELP)]
LocationArgument = Annotated[str, typer.Argument(metavar="STORE|RUN|FILE", help=_LOCATION_HELP)]


@dataclass(frozen=True)
class Location:
    """A store, one of its checkpoints, a framework's directory or a file, as the command line names it."""

    path: Path | ObjectUrl  # path or URL of the store, directory or file
    step: int | None = None  # the requested step of a store; None: the newest

    @cached_property
    def file(self) -> FilePlace | None:
        """The single file that it names; None if that is none."""
        if isinstance(self.path, Path):
            return place_file(self.path) if self.path.is_file() else None
        place = place_file(str(self.path)) if self.path.prefix else None
        return place if place is not None and place.exists else None

    @property
    def directory(self) -> Path | None:
        """The directory that it names; None for a file, and in a bucket."""
        return self.path if isinstance(self.path, Path) and self.path.is_dir() else None

    @cached_property
    def directories(self) -> Sequence[Path | ObjectUrl]:
        """The checkpoint directories of frameworks that it names or holds."""
        if not isinstance(self.path, Path):
            return find_checkpoints(self.path)
        return [] if self.directory is None else find_checkpoints(self.directory)

    @property
    def is_run(self) -> bool:
        """True if it is a framework's checkpoint directory, or a directory with some in it and no store.

        A framework may name a directory as a store does, which has no manifest while a save is written.
        """
        if not self.directories:
            return False
        listing = scan(directory_storage(self.path))
        return not (listing.manifests or listing.broken)

    def identify(self) -> Identification | None:
        """Identification of a place that is no checkpoint of ours; None if unknown, and in a bucket."""
        return identify(self.path) if isinstance(self.path, Path) else None

    @property
    def run_directory(self) -> Path | ObjectUrl:
        """The checkpoint directory of a run: the newest, or that of the step.

        Raises:
            NotFoundError: the run has no checkpoint of this step.
        """
        run = find_run(self.path)
        return run[0] if self.step is None else select_step(run, self.step, str(self.path))

    def __str__(self) -> str:
        return str(self.path) if self.step is None else f"{self.path}@{self.step}"


def parse_location(text: str, step: int | None = None, *, allow_foreign: bool = False) -> Location:
    """Parses `PATH`, `STORE@STEP`, or a URL of either; a path that exists is not split at its `@`.

    Args:
        allow_foreign: also accept a file that something else wrote.

    Raises:
        NotFoundError: there is nothing, or a file that something else wrote.
        PolicyError: two different steps, or a step of a file.
    """
    is_remote = is_object_url(text)
    store, _, step_text = text.rpartition("@")
    if store and step_text.isdecimal() and (is_remote or (not Path(text).exists() and Path(store).is_dir())):
        if step not in (None, int(step_text)):
            raise PolicyError(text, found=f"--step {step} as well", expected="one step", do="leave one of them out")
        text, step = store, int(step_text)
    location = Location(parse_object_url(text) if is_remote else Path(text), step)
    if not is_remote and not Path(text).exists():
        raise NotFoundError(text, found="no such file or directory", do="check the path")
    if step is not None and location.file is not None:
        raise PolicyError(text, found="a file with --step", expected="a store", do="leave --step out")
    identity = location.identify() if location.file is not None else None
    if identity is not None and identity.is_foreign and not allow_foreign:
        raise NotFoundError(text, found=identity.description, expected=OWN_CHECKPOINT, do=identity.do)
    return location


def parse_store(text: str) -> Location:
    """The location of a store or run, which need not exist."""
    return Location(parse_object_url(text) if is_object_url(text) else Path(text))


def open_store(text: str, *, allow_run: bool = False) -> tuple[Storage, Listing]:
    """Opens the storage of a store, and lists its checkpoints.

    Args:
        text: path or URL of the store's directory.
        allow_run: also accept the directory of a framework's run.

    Raises:
        NotFoundError: there is no such directory, or it has something else in it. An empty directory is a store.
    """
    if is_object_url(text):
        storage = resolve_storage(text)
        storage = find_store(storage) or storage
        listing = scan(storage)
        if not (listing.keys or allow_run):
            raise NotFoundError(text, found="no checkpoint", expected="a store", do="check the URL")
        return storage, listing
    path, expected = Path(text), "the directory of a store"
    if path.exists() and not path.is_dir():
        do = f"see `shrinkpoint show {shlex.quote(text)}`" if path.is_file() else "choose another path"
        raise NotFoundError(text, found=what_is_at(path), expected=expected, do=do)
    if not path.exists():
        raise NotFoundError(text, found="no such directory", expected=expected, do="check the path")
    storage = find_store(LocalStorage(path)) or LocalStorage(path)
    listing = scan(storage)
    if not (listing.keys or listing.manifests or listing.broken):
        identity = identify(path)
        if identity is not None and identity.description != EMPTY_DIRECTORY and (identity.is_foreign or not allow_run):
            raise NotFoundError(text, found=identity.description, expected=expected, do=identity.do)
    return storage, listing


def find_manifest(listing: Listing, location: Location) -> Manifest:
    """The manifest of the requested checkpoint, or of the newest that is not forgotten.

    Raises:
        NotFoundError: there is no such checkpoint.
        FormatError: its manifest cannot be read.
    """
    if location.step in listing.broken:
        raise listing.broken[location.step]
    if location.step is None and listing.visible:
        return listing.by_age[-1]
    if location.step in listing.manifests:
        return listing.manifests[location.step]
    identity = None if listing.visible or listing.manifests else location.identify()
    if identity is not None and (identity.is_foreign or location.step is None):
        where, do = str(location.path), identity.do
        raise NotFoundError(where, found=identity.description, expected=OWN_CHECKPOINT, do=do)
    raise unknown_step_error(str(location.path), listing, location.step)


def unknown_step_error(where: str, listing: Listing, step: int | None) -> NotFoundError:
    """The error for a step that a store does not have; None: it has none."""
    found = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    steps = f"one of {preview(sorted(listing.visible))}" if listing.visible else "a directory with a checkpoint in it"
    return NotFoundError(where, found=found, expected=steps, do=f"see `shrinkpoint list {shlex.quote(where)}`")


def preview(steps: Sequence[int]) -> str:
    """At most seven steps as text; the middle of longer sequences is left out.

    >>> preview([1, 2, 3]), preview(range(0, 1000, 100))
    ('1, 2, 3', '0, 100, 200, ..., 700, 800, 900')
    """
    texts = [str(step) for step in steps]
    return ", ".join(texts if len(texts) < 8 else [*texts[:3], "...", *texts[-3:]])


def decode_location(location: Location) -> DecodedFile:
    """Decodes a checkpoint of a store or a framework, or a file with the bases that it names.

    Raises:
        NotFoundError: there is no such checkpoint.
        ChainError: a base is missing, or has another digest.
        FormatError: a file is damaged.
    """
    from shrinkpoint.store.chain import chain_identity, store_chain, use_current
    from shrinkpoint.store.decode import decode_chain
    from shrinkpoint.store.single_file import decode_file

    if location.file is not None:
        return decode_file(location.file)[0]
    if location.is_run:
        return _decode_directory(location.run_directory)
    return use_current(lambda: store_chain(*_find_checkpoint(location)), decode_chain, chain_identity)


def _decode_directory(directory: Path | ObjectUrl) -> DecodedFile:
    """Decodes what one process wrote, or the state of all ranks of torch.distributed.checkpoint."""
    from shrinkpoint.codec.reference import Reference
    from shrinkpoint.store.checkpoint_file import DecodedFile
    from shrinkpoint.store.decode import decode_directory
    from shrinkpoint.tensors.flat_state import flatten
    from shrinkpoint.train.dcp import load

    if not read_directory_manifest(directory).is_dcp:
        return decode_directory(directory)
    state = flatten(load(directory))
    return DecodedFile(state.tree, Reference(state.tensors))


def open_leaves(location: Location) -> LeafSource:
    """Opens a checkpoint to read its leaves some at a time; raises as `decode_location` does."""
    from shrinkpoint.store.chain import chain_identity, directory_chain, file_chain, store_chain, use_current
    from shrinkpoint.store.decode import ChainLeaves
    from shrinkpoint.tensors.compare import StateLeaves
    from shrinkpoint.tensors.flat_state import flatten
    from shrinkpoint.train.dcp import load

    if location.file is not None:
        return ChainLeaves(file_chain(location.file))
    if location.is_run:
        directory = location.run_directory
        manifest = read_directory_manifest(directory)
        if manifest.is_dcp:
            state = load(directory)
            return StateLeaves(state, flatten(state).tree)
        return ChainLeaves(directory_chain(directory, manifest.payloads[0]))
    return use_current(lambda: store_chain(*_find_checkpoint(location)), ChainLeaves, chain_identity)


def _find_checkpoint(location: Location) -> tuple[Storage, Manifest]:
    """The storage and the manifest of a store's checkpoint; says on stderr if it has weights alone."""
    storage, listing = open_store(str(location.path))
    manifest = find_manifest(listing, location)
    if manifest.weights_only:
        print_note(f"step {manifest.step} has weights only: retention has deleted the optimizer's moments")
    return storage, manifest
