"""Maps keys to bytes, in a directory or in memory, with atomic and durable writes."""

from shrinkpoint.storage.base import MemoryStorage, Sink, Source, Storage, check_key, storage_error
from shrinkpoint.storage.local import LocalStorage, atomic_replace, check_no_loss
from shrinkpoint.storage.paths import is_url, local_path, natural_key, what_is_at

__all__ = [
    "LocalStorage",
    "MemoryStorage",
    "Sink",
    "Source",
    "Storage",
    "atomic_replace",
    "check_key",
    "check_no_loss",
    "is_url",
    "local_path",
    "natural_key",
    "storage_error",
    "what_is_at",
]
