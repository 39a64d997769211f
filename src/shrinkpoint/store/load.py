"""Loads a state, or a part of it, from wherever it lies: a file, a store, a framework's directory or run."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError
from shrinkpoint.storage import (
    LocalStorage,
    ObjectCache,
    ObjectUrl,
    Storage,
    is_object_url,
    local_path,
    resolve_storage,
    what_is_at,
)
from shrinkpoint.storage.paths import parse_object_url
from shrinkpoint.store import chain as chains
from shrinkpoint.store import layout
from shrinkpoint.store.checkpoint_file import Device, build_state
from shrinkpoint.store.decode import SelectLeaves, decode_chain
from shrinkpoint.store.directory import find_run, read_directory_manifest, select_step
from shrinkpoint.store.file_place import FilePlace, place_file
from shrinkpoint.store.identify import find_checkpoints, identify
from shrinkpoint.store.step_storage import find_store
from shrinkpoint.store.store import Store
from shrinkpoint.tensors.info import JSON
from shrinkpoint.tensors.tree_decoder import SelectedLeaves, match_patterns, select_leaves

_log = logging.getLogger("shrinkpoint")
_MAX_LISTED = 6  # Names that an error lists of those that exist


def load(
    where: str | Path | Storage,
    *,
    step: int | None = None,
    only: str | Sequence[str] | None = None,
    base: str | Path | None = None,
    device: Device = None,
    tie: bool = True,
    threads: int | None = None,
    max_bytes: int | None = None,
    cache: str | Path | ObjectCache | None = None,
) -> Any:
    """Load a state, or the part of it that `only` names.

    Tensors with memory of their own come back contiguous: one that was `channels_last` has its values, and other
    strides. `load_state_dict` copies them into the strides of the module.

    Args:
        where: a file that `save` wrote, or a payload; a store, as a directory or a storage; one step's directory of a
            store, or a copy of it; a URL of any of these, such as "s3://bucket/run"; a checkpoint directory of a
            framework, or its run.
        step: of a store or run: which checkpoint; None: the newest.
        only: a pattern of names, or several, such as `"model.*"`: load what matches, and decode only what that needs.
            Keys are joined by "." or, as `inspect` shows them, by "/"; `*` matches any of these, too. A pattern
            that matches a dict, list or tuple takes all that is in it. The nest stays; of lists, what does not match is
            left out.
        base: where a file's base is now; None: beside it, under the name it was saved with.
        device: of its tensors; None: the CPU.
        tie: tensors that shared memory share it again.
        threads: native threads; None: every core.
        max_bytes: how much memory the tensors of one file may take; None: the largest of 1 GiB, 1000 times the
            bytes of the file and its bases, and three quarters of the free memory (`SHRINKPOINT_MAX_BYTES` in the
            environment says otherwise).
        cache: of a URL: a directory on this machine for what is read, which is not fetched again, or an `ObjectCache`;
            None: that of the environment variable `SHRINKPOINT_CACHE`, if it is set.

    Raises:
        NotFoundError: there is no such file, or no checkpoint of that step; nothing matches `only`.
        ChainError: a base is missing, or is another than the delta was made against.
        FormatError: bytes are at fault, or ask for more memory than they may.
        MismatchError: several ranks wrote the directory: torch.distributed.checkpoint reads it.
        StorageError: reading failed.
        PolicyError: the device is not there, or is full; a limit that is none; a step that is no whole number; a step
            or a base of what has none.
    """
    began = time.perf_counter()
    threads, tie = validate.check_threads(threads), validate.check_bool("tie", tie)
    base_place = None if base is None else place_file(base, "base", cache=cache)
    select = None if only is None else select_patterns(only)
    decoded = chains.use_current(
        lambda: find_chain(where, step, base_place, cache=cache),
        lambda files: decode_chain(files, select=select, threads=threads, max_bytes=max_bytes),
        chains.chain_identity,
    )
    state = build_state(decoded, _describe(where), tie=tie, device=device)
    _log.info("loaded %s, in %.2f s", _describe(where), time.perf_counter() - began)
    return state


def select_patterns(only: str | Sequence[str]) -> SelectLeaves:
    """A function that selects the leaves of a tree that match; it raises NotFoundError where none does.

    Raises:
        PolicyError: not a pattern, nor several.
    """
    patterns = check_patterns(only)
    matches = match_patterns(patterns)

    def select(tree: JSON, where: str) -> SelectedLeaves:
        selected = select_leaves(tree, matches, where)
        if selected.is_empty:
            raise no_match_error(where, patterns, selected.names)
        return selected

    return select


def check_patterns(only: str | Sequence[str]) -> list[str]:
    """The patterns of names in `only`.

    Raises:
        PolicyError: not a pattern, nor several.
    """
    patterns = [only] if isinstance(only, str) else [*only] if isinstance(only, Sequence) else []
    if not patterns or not all(type(pattern) is str and pattern for pattern in patterns):
        raise validate.argument_error("only", only, "a pattern of names, or a list of patterns", 'pass e.g. "model.*"')
    return patterns


def no_match_error(where: str, patterns: Sequence[str], names: Sequence[str]) -> NotFoundError:
    """The error for patterns that no name of a state matches."""
    found = f"nothing named like {' or '.join(map(repr, patterns))}"
    do = "see `shrinkpoint show --tensors --values` for all names"
    return NotFoundError(where, found=found, expected=list_names(names), do=do)


def list_names(names: Sequence[str]) -> str:
    """The names that exist, for a message: the first few of each group at the top.

    >>> list_names(["model/a", "model/b", "model/c", "extra/epoch", "step"])
    'one of model/a, model/b, ... (3 below model), extra/epoch, step'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("/")[0], []).append(name)
    parts = []
    for group, members in [*groups.items()][:_MAX_LISTED]:
        shown = members if len(members) < 3 else [*members[:2], f"... ({len(members)} below {group})"]
        parts += shown
    more = [f"... ({len(names)} in all)"] if len(groups) > _MAX_LISTED else []
    return "one of " + ", ".join([*parts, *more]) if names else "a state that is not empty"


def find_chain(
    where: str | Path | Storage,
    step: int | None = None,
    base: FilePlace | None = None,
    *,
    cache: str | Path | ObjectCache | None = None,
) -> tuple[chains.ChainFile, ...]:
    """The files that a checkpoint is decoded from, wherever it lies; `load` says what `where` may be.

    Raises:
        NotFoundError, ChainError, FormatError, MismatchError, StorageError, PolicyError: as `load`.
    """
    step = None if step is None else layout.as_step(step)
    if is_object_url(where):
        url = parse_object_url(where)
        if (store := find_store(resolve_storage(where, cache=cache))) is not None:
            _check_absent("base", base, str(where), "a checkpoint of a store names its own")
            return _store_or_run_chain(store, url, step)
        if find_checkpoints(url):
            _check_absent("base", base, str(url), "a checkpoint in a directory names its own")
            return _directory_chain(find_directory(url, step))
        _check_absent("step", step, str(where), "a file has none: name the store")
        return chains.file_chain(place_file(where, cache=cache), base)
    if not isinstance(where, str | Path):
        storage = resolve_storage(where, cache=cache)
        return _store_chain(find_store(storage) or storage, step)
    path = local_path(where).absolute()
    if what_is_at(path) != "a directory":
        _check_absent("step", step, str(where), "a file has none: name the store")
        return chains.file_chain(path, base)
    _check_absent("base", base, str(where), "a checkpoint in a directory names its own")
    if (store := find_store(LocalStorage(path))) is not None:
        return _store_or_run_chain(store, path, step)
    return _directory_chain(find_directory(path, step))


@overload
def find_directory(path: Path, step: int | None) -> Path: ...


@overload
def find_directory(path: ObjectUrl, step: int | None) -> ObjectUrl: ...


def find_directory(path: Path | ObjectUrl, step: int | None) -> Path | ObjectUrl:
    """A framework's checkpoint directory, also in a bucket: `path` itself, or of a run the newest or that of a step.

    Raises:
        NotFoundError: there is none.
        FormatError, StorageError: a manifest cannot be read.
    """
    directories: Sequence[Path | ObjectUrl] = find_run(path)
    if not directories:
        identity = identify(path) if isinstance(path, Path) else None
        found, do = ("a directory", "check the path") if identity is None else (identity.description, identity.do)
        raise NotFoundError(str(path), found=found, expected="a file, a store or a checkpoint of shrinkpoint", do=do)
    if step is None:
        return directories[0]
    return select_step(directories, step, str(path))


def _directory_chain(directory: Path | ObjectUrl) -> tuple[chains.ChainFile, ...]:
    manifest = read_directory_manifest(directory)
    payloads = manifest.payloads
    if len(payloads) != 1:
        found, do = f"the files of {len(payloads)} ranks", "load it with shrinkpoint.train.dcp.load"
        raise MismatchError(str(directory), found=found, expected="the file of one process", do=do)
    *bases, own = chains.directory_chain(directory, payloads[0])
    return (*bases, replace(own, id=manifest.id))


def _store_chain(storage: Storage, step: int | None) -> tuple[chains.ChainFile, ...]:
    return chains.store_chain(storage, Store(storage).manifest(step))


def _store_or_run_chain(store: Storage, place: Path | ObjectUrl, step: int | None) -> tuple[chains.ChainFile, ...]:
    """The chain of a store; where it has none, of a framework that named its directories as a store does."""
    try:
        return _store_chain(store, step)
    except NotFoundError:
        if not find_checkpoints(place):
            raise
    return _directory_chain(find_directory(place, step))


def _check_absent(name: str, value: object, where: str, do: str) -> None:
    if value is not None:
        raise PolicyError(where, found=f"{name}={value!r}", expected=f"no {name}", do=do)


def _describe(where: str | Path | Storage) -> str:
    return str(where) if isinstance(where, str | Path) else where.describe()
