"""One step's directory of a store, wherever it was copied or moved to, as a store with that one step. No torch."""

from __future__ import annotations

from typing import Any, NoReturn

from shrinkpoint.errors import FormatError, NotFoundError, PolicyError
from shrinkpoint.storage import LocalStorage, Source, Storage
from shrinkpoint.storage.base import Keys
from shrinkpoint.store import layout
from shrinkpoint.store.listing import list_steps
from shrinkpoint.store.manifest import MAX_MANIFEST_BYTES, decode_store_manifest, read_limited


class StepStorage:
    """A storage for reading, with the keys that the files of a step's directory have in their store.

    Files of other steps are found only where the directory still lies in its store.

    Args:
        storage: of the directory.
        step: of its checkpoint.
    """

    missing_base_advice = "copy the step's directory with its folder `bases`, or the whole store"

    def __init__(self, storage: Storage, step: int) -> None:
        self._storage, self._head = storage, f"{layout.step_dir(step)}/"
        in_place = isinstance(storage, LocalStorage) and storage.path.name == layout.step_dir(step)
        self._store = LocalStorage(storage.path.parent) if isinstance(storage, LocalStorage) and in_place else None

    def list(self, prefix: str = "") -> Keys:
        keys = [self._head + name for name in self._storage.list() if layout.is_own_name(name)]
        return [key for key in keys if key.startswith(prefix)]

    def open(self, key: str) -> Source:
        if key.startswith(self._head):
            return self._storage.open(key.removeprefix(self._head))
        if self._store is None:
            raise NotFoundError(self.describe(key), found="no such step here", do=self.missing_base_advice)
        return self._store.open(key)

    def get(self, key: str) -> bytes:
        with self.open(key) as source:
            return bytes(source.read(0, source.size))

    def describe(self, key: str = "") -> str:
        if key and not key.startswith(self._head) and self._store is not None:
            return self._store.describe(key)
        return self._storage.describe(key.removeprefix(self._head))

    def _refuse_write(self, *_: Any, **__: Any) -> NoReturn:
        found, expected = "the directory of one step", "the directory of a store"
        raise PolicyError(self.describe(), found=found, expected=expected, do="pass the store, or a new directory")

    lock = put = create = delete = link = remove_stale = _refuse_write


def find_store(storage: Storage) -> Storage | None:
    """The storage itself if it has steps; if it is the directory of one step, a store with that step alone; else None.

    Raises:
        StorageError: it cannot be listed, or its manifest cannot be read.
    """
    if list_steps(storage):
        return storage
    try:
        data = read_limited(storage, layout.MANIFEST, MAX_MANIFEST_BYTES)
        return StepStorage(storage, decode_store_manifest(data, storage.describe(layout.MANIFEST)).step)
    except NotFoundError:
        return None
    except FormatError:  # a damaged manifest, which the store will report, or one of another program
        is_ours = any(layout.PAYLOAD.fullmatch(name) for name in storage.list("rank-"))
        step = layout.step_of_dir(storage.path.name) if isinstance(storage, LocalStorage) else None
        return StepStorage(storage, step or 0) if is_ours else None
