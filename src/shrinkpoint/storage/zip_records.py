"""Checksums of the records of a zip file, which is what `torch.save` writes."""

from __future__ import annotations

import zipfile
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def check_zip_records(path: Path) -> None:
    """Read every record of a zip file and compare its CRC-32, which `torch.load` does not do.

    A record with 0 in the place of its CRC-32 is passed over: torch writes that after
    `torch.serialization.set_crc32_options(False)`. So is a compressed record, which torch never writes.

    Raises:
        zipfile.BadZipFile, EOFError, RuntimeError, ValueError: the file, or the named record of it, is damaged.
        OSError: reading failed.
    """
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.CRC == 0 or record.compress_type != zipfile.ZIP_STORED:
                continue
            with archive.open(record) as stream:
                while stream.read(_CHUNK_BYTES):
                    pass
