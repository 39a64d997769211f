"""Many checkpoints in one place, some of which are deltas against others.

A checkpoint exists when its manifest does. The modules that only read manifests (`manifest`, `chain`, `retention`,
`listing`) do not import torch; a module that decodes is imported when one of its names is used first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shrinkpoint.store.listing import SkippedCheckpoint as SkippedCheckpoint
    from shrinkpoint.store.listing import StoreRestore as StoreRestore
    from shrinkpoint.store.listing import scan as scan
    from shrinkpoint.store.retention import Keep as Keep
    from shrinkpoint.store.save_report import SaveReport as SaveReport
    from shrinkpoint.store.store import Store as Store

_MODULES = {
    "Keep": "retention",
    "SaveReport": "save_report",
    "scan": "listing",
    "SkippedCheckpoint": "listing",
    "Store": "store",
    "StoreRestore": "listing",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
