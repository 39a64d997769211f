"""Maps keys to bytes, in a directory, in memory or in a bucket, with atomic and durable writes."""

from shrinkpoint.storage.base import (
    MemoryStorage,
    Sink,
    Source,
    Storage,
    check_key,
    copy_object,
    map_requests,
    object_size,
    storage_error,
)
from shrinkpoint.storage.local import LocalStorage, atomic_replace, check_no_loss
from shrinkpoint.storage.object_cache import ObjectCache
from shrinkpoint.storage.paths import (
    ObjectUrl,
    hide_credentials,
    is_object_url,
    is_url,
    local_path,
    natural_key,
    through_link,
    what_is_at,
)
from shrinkpoint.storage.resolve import (
    AnyDirectory,
    directory_storage,
    resolve_directory,
    resolve_storage,
    split_object_url,
)

__all__ = [
    "AnyDirectory",
    "LocalStorage",
    "MemoryStorage",
    "ObjectCache",
    "ObjectUrl",
    "Sink",
    "Source",
    "Storage",
    "atomic_replace",
    "check_key",
    "check_no_loss",
    "copy_object",
    "directory_storage",
    "hide_credentials",
    "is_object_url",
    "is_url",
    "local_path",
    "map_requests",
    "natural_key",
    "object_size",
    "resolve_directory",
    "resolve_storage",
    "split_object_url",
    "storage_error",
    "through_link",
    "what_is_at",
]
