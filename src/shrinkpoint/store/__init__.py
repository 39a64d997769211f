"""FILES <-> A CHAIN: a place with many checkpoints, some of which stand on others.

A checkpoint exists when its manifest does. What the manifests say (`manifest`, `chain`, `retention`, `listing`) needs
no torch, so it is imported here only when a name that decodes is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shrinkpoint.store.file import Decoded as Decoded
    from shrinkpoint.store.file import RoleBytes as RoleBytes
    from shrinkpoint.store.file import SaveReport as SaveReport
    from shrinkpoint.store.listing import Listing as Listing
    from shrinkpoint.store.listing import scan as scan
    from shrinkpoint.store.manifest import Manifest as Manifest
    from shrinkpoint.store.pending import Pending as Pending
    from shrinkpoint.store.prune import PrunePlan as PrunePlan
    from shrinkpoint.store.retention import Decision as Decision
    from shrinkpoint.store.retention import Keep as Keep
    from shrinkpoint.store.retention import retain as retain
    from shrinkpoint.store.store import Restored as Restored
    from shrinkpoint.store.store import Skipped as Skipped
    from shrinkpoint.store.store import Store as Store
    from shrinkpoint.store.verify import Finding as Finding

_HOMES = {
    "Decision": "retention", "Decoded": "file", "Finding": "verify", "Keep": "retention", "Listing": "listing",
    "Manifest": "manifest", "Pending": "pending", "PrunePlan": "prune", "Restored": "store", "RoleBytes": "file",
    "SaveReport": "file", "Skipped": "store", "Store": "store", "retain": "retention", "scan": "listing",
}  # fmt: skip

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
