"""Checksums and sizes of the records of a zip file, which is what `torch.save` writes."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import IO

_CHUNK_BYTES = 1 << 20


def check_zip_records(file: Path | IO[bytes]) -> bool:
    """Read every record of a zip file and compare its CRC-32, which `torch.load` does not do.

    A record with 0 in the place of its CRC-32 is not compared: torch writes that after
    `torch.serialization.set_crc32_options(False)`.

    Returns:
        True if every record has a CRC-32.

    Raises:
        zipfile.BadZipFile, EOFError, RuntimeError, ValueError: the file, or the named record of it, is damaged; or is
            compressed or overlaps others, which torch never writes and by which a small file becomes a large state.
        OSError: reading failed.
    """
    has_checksums = True
    with zipfile.ZipFile(file) as archive:
        records = [record for record in archive.infolist() if "/code/" not in record.filename]  # that of TorchScript
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"the compressed record {record.filename[:80]!r}")
        size = file.stat().st_size if isinstance(file, Path) else file.seek(0, os.SEEK_END)
        if sum(max(record.file_size, record.compress_size) for record in records) > size:
            raise zipfile.BadZipFile("records that overlap")
        for record in records:
            if record.CRC == 0 and record.file_size:
                has_checksums = False
                continue
            with archive.open(record) as stream:
                while stream.read(_CHUNK_BYTES):
                    pass
    return has_checksums
