"""Saves a state to one file, and inspects and decodes such files: `save`, `inspect`, `decode_file`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shrinkpoint import validate
from shrinkpoint.codec.reference import tensor_layout
from shrinkpoint.errors import PolicyError, warn_user
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.storage import through_link
from shrinkpoint.store.chain import file_chain, read_header
from shrinkpoint.store.checkpoint_file import DecodedFile, write_file
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.file_place import AnyPlace, place_file
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.tensors.info import TensorInfo

_log = logging.getLogger("shrinkpoint")


@dataclass(frozen=True)
class FileInfo:
    """The header of a file.

    Attributes:
        path: of the file, or its URL.
        scheme: which scheme wrote it.
        parent: name of the file it is a delta against; None for a keyframe.
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
    Of a symbolic link, that is the file that it names.

    Args:
        state: any nest of dicts, lists, tuples, tensors and plain values; it is not changed. Of a `Parameter`
            `requires_grad` comes back; another tensor comes back without it.
        scheme: a scheme, or its text, such as "fisher(relative_error=0.3)".
        path: where to, or a URL such as "s3://bucket/file".
        base: a file saved earlier: write a delta against it. It must be kept; `load` needs it. One that shares no
            tensor is not used, with a warning.
        threads: native threads; None: every core.

    Raises:
        StateError: the state holds something that cannot be stored.
        PolicyError: a wrong argument; a URL of something else than object storage; a file that is its own base, or its
            base's.
        FormatError, ChainError, NotFoundError: the base does not load.
        StorageError: writing failed; a file that was there is unchanged.
    """
    scheme, threads = get_scheme(scheme), validate.check_threads(threads)
    target = place_file(path)
    target = target if target.path is None else place_file(through_link(target.path))
    flat_state = flatten(state)
    reference = parent = None
    if base is not None:
        root = place_file(base, "base")
        if any(place_file(file.storage.describe(*file.keys)).is_same(target) for file in file_chain(root)):
            found, do = "a base that is this file, or needs it", "save the delta under another name"
            raise PolicyError(str(path), found=found, do=do)
        decoded, digest = decode_file(root, threads=threads)
        reference = decoded.reference
        # Relative if they share a directory, so that both can be moved.
        parent = {"name": root.name_for(target), "digest": digest}
        if flat_state.tensors and not reference.shared_names(flat_state.infos.values()):
            theirs, mine = (_describe_first(tensors) for tensors in (reference.tensors, flat_state.tensors))
            text = f"{base}: no tensor has the name, shape and dtype of a saved one ({theirs} there, {mine} here)"
            warn_user(f"{text}, so {path} is a keyframe. Save the same nesting and dtypes as the base", UserWarning)
            reference = parent = None
    if isinstance(scheme, Planner):
        quantized = scheme.quantize_alone(flat_state, reference)
    else:
        quantized = scheme.quantize(flat_state, reference)
    if quantized.keyframe:
        reference = parent = None
    written = write_file(
        target.storage, target.key, quantized, scheme=scheme, reference=reference, parent=parent, threads=threads
    )
    _log.info("saved %s, in %.2f s", written.report, written.report.seconds)
    return written.report


def _describe_first(tensors: Mapping[str, Tensor]) -> str:
    name = next(iter(tensors), None)
    if name is None:
        return "none"
    shape, dtype = tensor_layout(tensors, name)
    return f"{name!r}, {list(shape)}, {dtype}"


def inspect(path: str | Path) -> FileInfo:
    """Read the header of a file; nothing is decoded.

    Raises:
        NotFoundError: there is no such file.
        FormatError: its header is damaged.
    """
    reader = read_header(path)
    tensors = tuple(info for head in reader.records for info in head.infos)
    parent = None if reader.parent is None else reader.parent["name"]
    raw_bytes = sum(info.nbytes for info in tensors)
    return FileInfo(str(path), reader.scheme, parent, raw_bytes, reader.size, tensors)


def decode_file(path: AnyPlace, *, threads: int | None = None) -> tuple[DecodedFile, str]:
    """A file's content, decoded from its keyframe, and its header digest; raises as `load.load` does."""
    chain = file_chain(path)
    return decode_chain(chain, threads=threads), chain[-1].digest
