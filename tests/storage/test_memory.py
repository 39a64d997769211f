"""`MemoryStorage` is a storage."""

from __future__ import annotations

from contracts.storage import StorageSuite

from shrinkpoint.storage import MemoryStorage, Storage


class TestMemoryStorage(StorageSuite):
    def make(self) -> Storage:
        return MemoryStorage()
