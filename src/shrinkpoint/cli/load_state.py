"""Decodes the checkpoint at a location of the command line; imports torch."""

from __future__ import annotations

from pathlib import Path

from shrinkpoint.cli.location import Location, find_manifest, open_store
from shrinkpoint.codec.reference import Reference
from shrinkpoint.store.chain import store_chain
from shrinkpoint.store.checkpoint_file import DecodedFile
from shrinkpoint.store.decode import decode_chain
from shrinkpoint.store.decode import decode_directory as decode_folder
from shrinkpoint.store.directory import read_directory_manifest
from shrinkpoint.store.single_file import decode_file
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.train.dcp import load
from shrinkpoint.train.dcp.checkpoint_metadata import DCP_KEY


def decode_location(location: Location) -> DecodedFile:
    """Decodes a checkpoint of a store or a framework, or a file with the bases that it names.

    Raises:
        NotFoundError: there is no such checkpoint.
        ChainError: a base is missing, or has another digest.
        FormatError: a file is damaged.
    """
    if location.is_file:
        return decode_file(location.path.absolute())[0]
    if location.is_run:
        return _decode_directory(location.newest_directory)
    storage, listing = open_store(str(location.path))
    return decode_chain(store_chain(storage, find_manifest(listing, location)))


def _decode_directory(directory: Path) -> DecodedFile:
    """Decodes what one process wrote, or the state of all ranks of torch.distributed.checkpoint."""
    extra = read_directory_manifest(directory).extra
    if not isinstance(extra, dict) or DCP_KEY not in extra:
        return decode_folder(directory)
    state = flatten(load(directory))
    return DecodedFile(state.tree, Reference(state.tensors))
