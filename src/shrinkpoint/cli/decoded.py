"""The tensors behind a place on the command line. From here on torch is needed."""

from __future__ import annotations

from shrinkpoint.cli.target import Target, checkpoint, open_store
from shrinkpoint.store.file import Decoded
from shrinkpoint.store.single import decode_file
from shrinkpoint.store.walk import decode_chain


def decode(where: Target) -> Decoded:
    """Decode a checkpoint of a store, or a file with the files that it names as its bases.

    Raises:
        NotFoundError: there is no such checkpoint.
        ChainError: a base is missing, or is not the right one.
        FormatError: bytes are at fault.
    """
    if where.is_file:
        return decode_file(where.path.absolute())[0]
    storage, listing = open_store(str(where.path))
    return decode_chain(storage, checkpoint(listing, where))
