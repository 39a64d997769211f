"""The tensors behind a place on the command line. From here on torch is needed."""

from __future__ import annotations

from pathlib import Path

from shrinkpoint.cli.target import Target, checkpoint, open_store
from shrinkpoint.codec import Reference
from shrinkpoint.state import flatten
from shrinkpoint.store.file import Decoded
from shrinkpoint.store.folder import read_manifest
from shrinkpoint.store.single import decode_file
from shrinkpoint.store.unfold import decode as decode_folder
from shrinkpoint.store.walk import decode_chain
from shrinkpoint.train.dcp import load
from shrinkpoint.train.dcp.description import KEY


def decode(where: Target) -> Decoded:
    """Decode a checkpoint of a store, a framework's, or a file with the files that it names as its bases.

    Raises:
        NotFoundError: there is no such checkpoint.
        ChainError: a base is missing, or is not the right one.
        FormatError: bytes are at fault.
    """
    if where.is_file:
        return decode_file(where.path.absolute())[0]
    if where.is_run:
        return _folder(where.folder)
    storage, listing = open_store(str(where.path))
    return decode_chain(storage, checkpoint(listing, where))


def _folder(folder: Path) -> Decoded:
    """What one process wrote, or the ranks of torch.distributed.checkpoint together."""
    extra = read_manifest(folder).extra
    if not isinstance(extra, dict) or KEY not in extra:
        return decode_folder(folder)
    flat = flatten(load(folder))
    return Decoded(flat.tree, Reference(flat.tensors))
