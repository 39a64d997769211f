"""Decodes the checkpoint at a location of the command line; needs torch."""

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
from shrinkpoint.tensors.flatten import flatten
from shrinkpoint.train.dcp import load
from shrinkpoint.train.dcp.checkpoint_metadata import DCP_KEY


def decode_location(location: Location) -> DecodedFile:
    """Decode a checkpoint of a store, a framework's, or a file with the files that it names as its bases.

    Raises:
        NotFoundError: there is no such checkpoint.
        ChainError: a base is missing, or is not the right one.
        FormatError: bytes are at fault.
    """
    if location.is_file:
        return decode_file(location.path.absolute())[0]
    if location.is_run:
        return _decode_directory(location.newest_directory)
    storage, listing = open_store(str(location.path))
    return decode_chain(store_chain(storage, find_manifest(listing, location)))


def _decode_directory(directory: Path) -> DecodedFile:
    """What one process wrote, or the ranks of torch.distributed.checkpoint together."""
    extra = read_directory_manifest(directory).extra
    if not isinstance(extra, dict) or DCP_KEY not in extra:
        return decode_folder(directory)
    flat = flatten(load(directory))
    return DecodedFile(flat.tree, Reference(flat.tensors))
