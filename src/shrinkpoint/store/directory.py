"""A checkpoint in a directory that a framework names, lists and deletes, with its own retention.

::

    rank-00000.safetensors       the payload, one a rank (rank-00000.2.safetensors where it is saved into again)
    bases/<digest>.safetensors   a hard link to each file that these depend on
    shrinkpoint.json             the manifest, written last: the checkpoint exists when this does
    README.txt                   for people: what reads this directory; not written over a file of that name

Such a directory needs no other one and may be copied and moved: if the bases of a delta are gone or cannot be linked, a
keyframe is written instead. In a bucket there are no links: there a delta names the files of other directories. Other
files in it are left alone. No torch here: `decode.decode_directory` decodes.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, overload

from shrinkpoint.errors import NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.storage import (
    AnyDirectory,
    LocalStorage,
    ObjectUrl,
    Storage,
    directory_storage,
    map_requests,
    natural_key,
    object_size,
    resolve_directory,
    storage_error,
)
from shrinkpoint.storage.base import RESERVED
from shrinkpoint.store import layout
from shrinkpoint.store.chain import ChainFile, directory_chain, manifest_identity, use_current
from shrinkpoint.store.file_place import FilePlace, place_file
from shrinkpoint.store.history import Line, Others, Place, oldest_first, place_of
from shrinkpoint.store.identify import MANIFEST, find_checkpoints, is_checkpoint, is_of_run
from shrinkpoint.store.manifest import (
    MAX_DIRECTORY_MANIFEST_BYTES,
    DirectoryManifest,
    Payload,
    decode_directory_manifest,
    encode_directory_manifest,
    names_payload,
    new_manifest,
    read_limited,
)
from shrinkpoint.tensors.info import JSON

README = "README.txt"
_README = """\
This directory is a compressed checkpoint, written by the Python package shrinkpoint.

Programs that look for model.safetensors, pytorch_model.bin, optimizer.pt or a .ckpt file do not find them here.
With the package, where DIRECTORY is this one:

    shrinkpoint convert DIRECTORY OUT    the files that its framework would have written, for from_pretrained, a stock
                                         Trainer, torch.load or torch.distributed.checkpoint
    shrinkpoint show DIRECTORY           what is in it
    shrinkpoint verify DIRECTORY         whether it is whole

Training goes on from it with ShrinkTrainer of shrinkpoint.train.transformers, load_state of
shrinkpoint.train.accelerate, ShrinkIO of shrinkpoint.train.lightning, or Reader of shrinkpoint.train.dcp.
"""
_log = logging.getLogger("shrinkpoint")
PlaceT = TypeVar("PlaceT", bound=Path | ObjectUrl)


_LINES: defaultdict[str, Line] = defaultdict(Line)  # The lines on which this process saves, by the directory of the run
_OWN_KEY = re.compile(f"{layout.PAYLOAD.pattern}|{layout.BASE.pattern}")


@overload
def find_run(root: Path) -> list[Path]: ...


@overload
def find_run(root: ObjectUrl) -> list[ObjectUrl]: ...


def find_run(root: Path | ObjectUrl) -> Sequence[Path | ObjectUrl]:
    """The checkpoints of a run, newest first: the directory itself, else those in it or in its `checkpoints`.

    A directory in which somebody's checkpoints happen to be, such as `/tmp`, is no run: names tell.

    Raises:
        NotFoundError: the checkpoints in it have names that no run gives.
    """
    found: Sequence[Path | ObjectUrl] = find_checkpoints(root)
    run = [place for place in found if is_of_run(root, place)]
    if found and not run:
        expected = "a checkpoint, or a run with checkpoints named step-100, checkpoint-100, epoch=1.ckpt, 100 or best"
        what = f"a directory with checkpoints of other names, such as {found[-1]}"
        raise NotFoundError(str(root), found=what, expected=expected, do="name one of them")
    return newest_first(run)


def select_step(run: Sequence[PlaceT], step: int, where: str) -> PlaceT:
    """Selects the checkpoint of a step from a run, which `find_run` sorts newest first.

    Raises:
        NotFoundError: no checkpoint of the run has this step.
        FormatError, StorageError: a manifest cannot be read.
    """
    steps: dict[int | None, PlaceT] = {}
    for directory in reversed(run):  # of two with one step the newer
        steps[read_directory_manifest(directory).step] = directory
    if step not in steps:
        numbers = sorted(number for number in steps if number is not None)
        expected = f"one of {', '.join(map(str, numbers))}" if numbers else "a checkpoint that has a step"
        raise NotFoundError(where, found=f"no checkpoint of step {step}", expected=expected, do="name one of them")
    return steps[step]


def newest_first(directories: Iterable[PlaceT]) -> list[PlaceT]:
    """Sort the checkpoints of one run, which its present line of history left behind last."""
    return sort_by_history({directory: find_place(directory) for directory in directories})[::-1]


def sort_by_history(places: Mapping[PlaceT, Place]) -> list[PlaceT]:
    """Sort directories by their places in the history of a run, oldest first; of equal places, by name."""
    by_name = sorted(places, key=lambda directory: (natural_key(directory.name), directory.name))
    return oldest_first(by_name, places.__getitem__)


def last_number(name: str) -> int:
    """The last number in the name of a directory; 0 if there is none."""
    return int([0, *re.findall("[0-9]{1,18}", name)][-1])


def find_place(directory: Path | ObjectUrl) -> Place:
    """The place of a checkpoint in the history of its run; that of the last number in its name, where it has no
    manifest that can be read."""
    return _find_step(directory)[1]


def note_restored(directory: AnyDirectory, manifest: DirectoryManifest | None) -> None:
    """Let the next checkpoint beside a directory go on from the one with this manifest; None: it is not known."""
    place = None if manifest is None else place_of(manifest)
    _LINES[str(resolve_directory(directory).parent)].note_restored(place)


def _find_step(directory: Path | ObjectUrl) -> tuple[int | None, Place]:
    try:
        manifest = read_directory_manifest(directory)
        return manifest.step, place_of(manifest)
    except (ShrinkpointError, OSError):
        number = last_number(directory.name)
        return number, Place(number)


def find_siblings(directory: Path | ObjectUrl) -> list[Path | ObjectUrl]:
    """The checkpoints of ours whose names differ in numbers alone, this one among them.

    Raises:
        OSError, StorageError: they cannot be listed.
    """
    root, pattern = directory.parent, _without_numbers(directory.name)
    places: Iterable[Path | ObjectUrl] = root.iterdir() if isinstance(root, Path) else find_checkpoints(root)
    like = (place for place in places if place.parent == root and _without_numbers(place.name) == pattern)
    return [place for place in like if is_checkpoint(place)]


def _without_numbers(name: str) -> str:
    return re.sub("[0-9]+", "#", name)


def delete_checkpoint(directory: Path | ObjectUrl) -> None:
    """Delete a directory with all its files, the manifest first: then there is none that has lost its payload.

    A directory that is not there is no error.

    Raises:
        StorageError: deleting failed.
    """
    if isinstance(directory, ObjectUrl):
        storage = directory_storage(directory)
        for key in sorted(storage.list(), key=lambda key: key != MANIFEST):
            storage.delete(key)
        return
    try:
        if not directory.is_symlink():  # which `rmtree` refuses
            (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(str(directory), "deleting", error) from error


def delete_expired(directories: Iterable[Path | ObjectUrl]) -> None:
    """Delete checkpoints; what cannot be deleted is logged: a checkpoint too many is no reason to end a run."""
    for directory in directories:
        try:
            delete_checkpoint(directory)
        except StorageError as error:
            _log.warning("%s", error)


def _read_others(directory: Path | ObjectUrl) -> Others:
    """The other checkpoints beside a directory.

    Of those without a manifest, they are the ones whose names differ from its own in numbers alone.
    """
    root, pattern = directory.parent, _without_numbers(directory.name)
    names: set[str] = set()
    try:
        if isinstance(root, Path):
            paths = (path for path in root.iterdir() if path.is_dir())
            names = {path.name for path in paths if _without_numbers(path.name) == pattern or is_checkpoint(path)}
        elif root.prefix:
            names = {url.name for url in find_checkpoints(root) if url.parent == root}
    except (ShrinkpointError, OSError) as error:  # no reason to lose a checkpoint
        _log.warning("%s is not compared with the checkpoints beside it: %s", directory, error)
    others = {name: _find_step(root / name) for name in sorted(names - {directory.name}, key=natural_key)}
    return Others(others, [find_place(directory).sequence] if is_checkpoint(directory) else [])


def read_directory_manifest(directory: AnyDirectory) -> DirectoryManifest:
    """Read the manifest of a checkpoint.

    Raises:
        NotFoundError: there is no manifest.
        FormatError: it is damaged, or too large.
        StorageError: it cannot be read.
    """
    storage = directory_storage(directory)
    data = read_limited(storage, MANIFEST, MAX_DIRECTORY_MANIFEST_BYTES)
    return decode_directory_manifest(data, storage.describe(MANIFEST))


def has_committed(directory: AnyDirectory, payload: Payload) -> bool:
    """True if a checkpoint exists in a directory, and this payload is one of its payloads.

    Raises:
        NotFoundError: there is no manifest.
        FormatError: it is too large.
        StorageError: it cannot be read.
    """
    return names_payload(read_limited(directory_storage(directory), MANIFEST, MAX_DIRECTORY_MANIFEST_BYTES), payload)


def chain_places(directory: AnyDirectory, payload: Payload) -> list[FilePlace]:
    """The files of a payload's chain, keyframe first, the payload last; raises as `directory_chain` does."""
    files = directory_chain(directory, payload)
    if isinstance(files[-1].storage, LocalStorage):
        return [place_file(file.storage.describe(*file.keys)) for file in files]
    return [FilePlace(file.storage, file.keys[0]) for file in files]


def verify_directory(
    directory: AnyDirectory, *, deep: bool = False, share: tuple[int, int] = (0, 1)
) -> DirectoryManifest:
    """Verify that every file of a checkpoint exists and has the right size and header.

    Args:
        deep: also compare every stored byte with its digest.
        share: (i, n): verify every n-th payload from the i-th on, with its bases; other processes verify the others.

    Raises:
        NotFoundError: there is no manifest.
        ChainError: a base is missing, or is another than the delta was made against.
        FormatError: bytes are at fault.
        StorageError: reading failed.
    """

    def check(manifest: DirectoryManifest) -> DirectoryManifest:
        payloads = manifest.payloads[slice(share[0], None, share[1])]
        files = {file.digest: file for payload in payloads for file in directory_chain(directory, payload)}
        for file in files.values():
            error = file.read(lambda reader: next(reader.check(), None) if deep else None)
            if error is not None:
                raise error
        return manifest

    return use_current(lambda: read_directory_manifest(directory), check, manifest_identity)


def manifest_condition(directory: AnyDirectory) -> object:
    """Identifies the checkpoint that is in a directory, or that there is none: what `commit` may replace.

    It is asked before a payload is written. Another writer that commits from then on may delete the payload.
    None where one process at a time writes.

    Raises:
        StorageError: the bucket cannot be asked.
    """
    ask: Callable[[str], object] | None = getattr(directory_storage(directory), "condition", None)
    return None if ask is None else ask(MANIFEST)


def commit(
    directory: AnyDirectory,
    payloads: Sequence[Payload],
    *,
    scheme: str,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    lossy_restores: int = 0,
    loss: JSON = None,
    note: str = "",
    stats: Mapping[str, float] | None = None,
    extra: JSON = None,
    id: str | None = None,
    keep_payloads: bool = False,
    condition: object = None,
) -> DirectoryManifest:
    """Write the manifest, by which the checkpoint exists, and remove files of an earlier checkpoint in this directory.

    Args:
        payloads: one for each rank, written already.
        stats: what the save measured of itself.
        id: random hex, unique to this save; None: a new one.
        keep_payloads: do not remove files of an earlier checkpoint: deltas in other directories of a bucket may need
            them.
        condition: from `manifest_condition`; None: whatever is there is replaced.

    Raises:
        PolicyError: a reader would refuse the manifest; an earlier checkpoint still exists.
        StorageError: a payload is missing or has another size, writing failed, or another process has saved here
            meanwhile; an earlier checkpoint still exists.
    """
    files = _check_files(directory, payloads)
    place = resolve_directory(directory)
    step = None if step is None else layout.check_step(step)
    line = _LINES[str(place.parent)]
    sequence, abandoned = own_place = line.next_place(step, lambda: _read_others(place))
    manifest: DirectoryManifest = new_manifest(
        id=id,
        scheme=scheme,
        payloads=tuple(payloads),
        step=step,
        metrics=metrics,
        lossy_restores=lossy_restores,
        loss=loss,
        note=note,
        stats=stats,
        extra=extra,
        sequence=sequence,
        abandoned=abandoned,
    )
    _put_manifest(directory, manifest, files, keep_payloads=keep_payloads, condition=condition)
    line.note_saved(own_place, step, str(place.parent), place.name)
    if isinstance(place, Path):
        # Nothing depends on the README, so it is not flushed
        path, temporary = place / README, place / f"{RESERVED}tmp-{secrets.token_hex(8)}"
        with suppress(OSError):
            if not os.path.lexists(path):
                temporary.write_text(_README, "ascii")
                temporary.replace(path)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return manifest


def replace_manifest(directory: AnyDirectory, manifest: DirectoryManifest, condition: object = None) -> None:
    """Replace the manifest of a checkpoint whose payloads were written again, and remove the old ones.

    Args:
        manifest: as it was, but for its payloads and what describes them.
        condition: from `manifest_condition`, asked before the old manifest was read.

    Raises: as `commit`; the checkpoint loads, from the old payloads or from the new ones.
    """
    files = _check_files(directory, manifest.payloads)
    _put_manifest(directory, manifest, files, keep_payloads=False, condition=condition)


def _check_files(directory: AnyDirectory, payloads: Sequence[Payload]) -> list[ChainFile]:
    """The files of payloads that are about to be committed, once they are known to be there."""
    storage = directory_storage(directory)
    if not isinstance(storage, LocalStorage):  # the bases are elsewhere, where each rank has just found them
        payloads = [replace(payload, bases=()) for payload in payloads]
    files = [file for payload in payloads for file in directory_chain(directory, payload)]
    listed = own_keys(directory) if isinstance(storage, LocalStorage) else set()
    # Each rank has verified its links. What the listing of a network file system does not show yet is asked for.
    unverified = [file for file in files if file.is_payload or not listed.issuperset(file.keys)]
    map_requests(storage, partial(_check_size, storage), unverified)
    return files


def _put_manifest(
    directory: AnyDirectory,
    manifest: DirectoryManifest,
    files: Sequence[ChainFile],
    *,
    keep_payloads: bool,
    condition: object,
) -> None:
    """Write a manifest, and delete what it does not need."""
    storage = directory_storage(directory)
    if isinstance(storage, LocalStorage):
        storage.flush_tree()  # the framework's files belong to the checkpoint, and it flushes none of them
    # Listed before the manifest is there: what is there later may be another writer's.
    stale_keys = set() if keep_payloads else own_keys(directory) - {key for file in files for key in file.keys}
    data = encode_directory_manifest(manifest)
    put_if: Callable[[str, bytes, object], None] | None = getattr(storage, "put_if", None)
    if put_if is None or condition is None:
        storage.put(MANIFEST, data)
    else:
        put_if(MANIFEST, data, condition)
    try:
        storage.remove_stale(lambda name: name == layout.BASES)
        for key in stale_keys:
            storage.delete(key)
    except StorageError as error:  # the checkpoint exists; what is left over only takes space
        _log.warning("%s", error)


def own_keys(directory: AnyDirectory) -> set[str]:
    """Keys of all payloads and links in a directory, also those that the manifest does not name."""
    storage = directory_storage(directory)
    keys: Iterable[str]
    if isinstance(storage, LocalStorage):
        bases = (f"{layout.BASES}/{name}" for name in _names_in(storage.path / layout.BASES))
        keys = (*_names_in(storage.path), *bases)
    else:
        keys = storage.list()
    return {key for key in keys if _OWN_KEY.fullmatch(key)}


def _names_in(root: Path) -> list[str]:
    try:
        return [path.name for path in root.iterdir()]
    except OSError:
        return []


def own_files(directory: str | Path) -> set[Path]:
    """Every file in a directory that was written for its checkpoint."""
    root = Path(directory)
    files = {root / MANIFEST, *(root / key for key in own_keys(root))}
    readme, first_line = root / README, _README.partition("\n")[0].encode()
    if readme.is_file():  # reading a pipe would wait
        with readme.open("rb") as file:
            if file.read(len(first_line)) == first_line:  # the README of any release of this package
                files.add(readme)
    return files


def _check_size(storage: Storage, file: ChainFile) -> None:
    (key,) = file.keys
    try:
        size = object_size(storage, key)
        message = f"{size} bytes"
        if size == file.size:
            return
    except NotFoundError:
        message = "no such file"
    do = "let all ranks write to one file system, or to one bucket"
    raise StorageError(storage.describe(key), found=message, expected=f"the {file.size} bytes that a rank wrote", do=do)
