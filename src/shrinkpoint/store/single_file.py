"""One file outside of any store: `save`, `load`, `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.container import FileReader
from shrinkpoint.errors import (
    ChainError,
    CorruptError,
    FormatError,
    NotFoundError,
    PolicyError,
    TruncatedError,
)
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.storage import LocalStorage, local_path
from shrinkpoint.store.allowance import Allowance
from shrinkpoint.store.checkpoint_file import DecodedFile, SaveReport, decode_records, to_device, write_file
from shrinkpoint.store.identify import identify
from shrinkpoint.tensors.flatten import flatten, unflatten
from shrinkpoint.tensors.info import TensorInfo


@dataclass(frozen=True)
class FileInfo:
    """What a file says of itself; nothing has been decoded.

    Attributes:
        path: of the file.
        scheme: which scheme wrote it.
        parent: name of the file it is a delta against; None: it stands alone.
        raw_bytes: bytes of its tensors.
        stored_bytes: bytes of the file.
        tensors: its tensors, in the order in which they are decoded.
    """

    path: str
    scheme: str
    parent: str | None
    raw_bytes: int
    stored_bytes: int
    tensors: tuple[TensorInfo, ...]

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored byte."""
        return self.raw_bytes / self.stored_bytes


def save(
    state: Any,
    path: str | Path,
    *,
    scheme: Scheme | str = "lossless",
    base: str | Path | None = None,
    threads: int | None = None,
) -> SaveReport:
    """Save a state in one file; when this returns, it is durable. A file that was there is replaced, atomically.

    Args:
        state: any nest of dicts, lists, tuples, tensors and plain values; it is not changed. Of a `Parameter`
            `requires_grad` comes back; another tensor comes back without it.
        scheme: a scheme, or its text, such as "fisher(relative_error=.3)".
        base: a file saved earlier: write a delta against it. It must stay; `load` needs it.
        threads: native threads; None: every core.

    Raises:
        StateError: the state holds something that cannot be stored.
        PolicyError: a wrong argument, a URL; a file that is its own base, or its base's.
        FormatError, ChainError, NotFoundError: the base does not load.
        StorageError: writing failed; what was there is still there.
    """
    chosen, threads = get_scheme(scheme), validate.check_threads(threads)
    target = local_path(path).absolute()
    flat = flatten(state)
    reference = parent = None
    if base is not None:
        root = local_path(base, "base").absolute()
        if any(_is_same(link, target) for link, _ in _find_chain(root, None)[0]):
            found = "a base that is this file, or needs it"
            raise PolicyError(str(path), found=found, do="save the delta under another name")
        decoded, digest = decode_file(root, threads=threads)
        reference = decoded.reference
        parent = {"name": _base_name(root, target), "digest": digest}
    kept = chosen.quantize(flat, reference)
    if kept.keyframe:
        reference = parent = None
    return write_file(
        LocalStorage(target.parent),
        target.name,
        kept,
        scheme=chosen,
        reference=reference,
        parent=parent,
        threads=threads,
    ).report


def load(
    path: str | Path,
    *,
    base: str | Path | None = None,
    device: str | torch.device | None = None,
    tie: bool = True,
    threads: int | None = None,
    max_bytes: int | None = None,
) -> Any:
    """The state of a file that `save` wrote, or that lies in a store.

    Args:
        base: where the file's base lies now; None: beside it, under the name it was saved with.
        device: where its tensors go; None: the CPU.
        tie: tensors that shared memory share it again.
        threads: native threads; None: every core.
        max_bytes: how much memory the tensors of one file may take; None: 1 GiB, or 1000 times the bytes of the file
            and its bases if that is more (`SHRINKPOINT_MAX_BYTES` in the environment says otherwise).

    Raises:
        NotFoundError: there is no such file.
        ChainError: a base is missing, or is another than the delta was made against.
        FormatError: bytes are at fault, or ask for more memory than they may.
        StorageError: reading failed.
        PolicyError: the device is not there, or is full; a limit that is none.
    """
    threads, tie = validate.check_threads(threads), validate.check_bool("tie", tie)
    below = None if base is None else local_path(base, "base").absolute()
    decoded, _ = decode_file(local_path(path).absolute(), below, threads=threads, max_bytes=max_bytes)
    tensors: Mapping[str, Tensor] = decoded.reference.tensors
    if device is not None:
        tensors = to_device(tensors, device, copy=False)
    return unflatten(decoded.tree, tensors, tie=tie, where=str(path), max_bytes=decoded.max_copy_bytes)


def inspect(path: str | Path) -> FileInfo:
    """What a file holds, from its header alone.

    Raises:
        NotFoundError: there is no such file.
        FormatError: its header is damaged.
    """
    reader = _read_header(local_path(path).absolute())
    tensors = tuple(info for head in reader.records for info in head.infos)
    return FileInfo(
        str(path),
        reader.scheme,
        None if reader.parent is None else reader.parent["name"],
        sum(info.nbytes for info in tensors),
        reader.size,
        tensors,
    )


def decode_file(
    path: Path, base: Path | None = None, *, threads: int | None = None, max_bytes: int | None = None
) -> tuple[DecodedFile, str]:
    """A file's content and its header digest, its chain decoded from the keyframe on; raises as `load` does."""
    allowance = Allowance(max_bytes)
    chain, keyframe = _find_chain(path, base)
    decoded: DecodedFile | None = None
    for link, digest in reversed(chain):
        with LocalStorage(link.parent).open(link.name) as source:
            reader = keyframe.reopen(source) if digest == keyframe.digest else FileReader(source, str(link))
            reference = None if decoded is None else decoded.reference
            decoded = decode_records(reader, reference, threads=threads, allowance=allowance)
    assert decoded is not None
    return decoded, chain[0][1]


def _find_chain(path: Path, base: Path | None) -> tuple[list[tuple[Path, str]], FileReader]:
    """The files from `path` down to the keyframe with their digests, each checked against what its child recorded.

    The header of the keyframe comes with them: what has been read of it need not be read again.
    """
    reader = _read_header(path)
    out = [(path, reader.digest)]
    while reader.parent is not None:
        name, digest = reader.parent["name"], reader.parent["digest"]
        if digest in {known for _, known in out}:
            raise ChainError(str(path), found="a chain that leads back to itself", do="restore another checkpoint")
        candidates = [base] if base is not None and len(out) == 1 else _candidate_paths(out[-1][0], name)
        here, reader = _find_base(candidates, digest, out[-1][0])
        out.append((here, reader.digest))
    return out, reader


def _candidate_paths(path: Path, name: str) -> list[Path]:
    """Where the base that `path` names may lie.

    The name is relative to the directory in which the file was written. A link to that file in the `bases` directory
    of a later step says the same name, so what it means is looked for beside the link and one level up too.
    """
    folder = path.parent
    return [*dict.fromkeys((folder / name, folder / Path(name).name, folder.parent / name))]


def _find_base(candidates: list[Path], digest: str, child: Path) -> tuple[Path, FileReader]:
    """The first candidate with this digest."""
    error: ChainError | None = None
    do = "say where the base is with base=, or load through its store"
    for path in candidates:
        if not _is_file(path):
            continue
        reader = _read_header(path)
        if reader.digest == digest:
            return path, reader
        found, expected = f"a file with digest {reader.digest}", f"{digest}, which {child} needs"
        error = error or ChainError(str(path), found=found, expected=expected, do=do)
    expected = f"the base of {child}, with digest {digest}"
    raise error or ChainError(str(candidates[0]), found="no such file", expected=expected, do=do)


def _read_header(path: Path) -> FileReader:
    try:
        with LocalStorage(path.parent).open(path.name) as source:
            reader = FileReader(source, str(path))
    except (NotFoundError, CorruptError, TruncatedError) as error:
        known = identify(path)
        if known is None:
            raise
        kind = FormatError if known.is_foreign and isinstance(error, FormatError) else type(error)
        raise kind(str(path), found=known.description, expected="a file that shrinkpoint saved", do=known.do) from error
    if reader.parent is not None and not all(type(reader.parent.get(key)) is str for key in ("name", "digest")):
        found, do = f"a parent {reader.parent!a:.60}", "restore another checkpoint"
        raise CorruptError(str(path), found=found, expected="an object with a name and a digest", do=do)
    return reader


def _is_file(path: Path) -> bool:
    with suppress(OSError):  # a name too long for this file system, a directory that may not be entered
        return path.is_file()
    return False


def _is_same(a: Path, b: Path) -> bool:
    with suppress(OSError):
        return a.samefile(b)
    return False


def _base_name(base: Path, target: Path) -> str:
    """The base's name as the delta records it: relative where they share a directory, so that both can be moved."""
    return base.name if base.parent == target.parent else str(base)
