"""shrinkpoint: what deep-learning training stores and sends, made small.

    import shrinkpoint as sp

    sp.save(state, "a.safetensors")                            # lossless; any nest of tensors and plain values
    sp.save(later, "b.safetensors", base="a.safetensors")      # a delta: only what changed
    state = sp.load("b.safetensors")                           # finds its base by name

    manager = sp.CheckpointManager("runs/gpt", keep=sp.Keep(last=3), background=True)
    manager.save(step, model=model, optimizer=optimizer)
    restored = manager.restore(model=model, optimizer=optimizer)

Importing this module does not import torch; using a name that needs it does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shrinkpoint import errors as errors
from shrinkpoint.errors import ShrinkpointError as ShrinkpointError

if TYPE_CHECKING:
    from shrinkpoint import comm as comm
    from shrinkpoint import schemes as schemes
    from shrinkpoint import sync as sync
    from shrinkpoint import train as train
    from shrinkpoint.progress import watch_progress as watch_progress
    from shrinkpoint.schemes import SCAR as SCAR
    from shrinkpoint.schemes import TOPN as TOPN
    from shrinkpoint.schemes import Activations as Activations
    from shrinkpoint.schemes import Fisher as Fisher
    from shrinkpoint.schemes import Inshrinkerator as Inshrinkerator
    from shrinkpoint.schemes import LCCheckpoint as LCCheckpoint
    from shrinkpoint.schemes import Lossless as Lossless
    from shrinkpoint.store import Keep as Keep
    from shrinkpoint.store import Store as Store
    from shrinkpoint.store.load import load as load
    from shrinkpoint.store.single_file import inspect as inspect
    from shrinkpoint.store.single_file import save as save
    from shrinkpoint.train import CheckpointManager as CheckpointManager
    from shrinkpoint.train import RecentBatches as RecentBatches

__version__ = "0.1.0"

_MODULES = {
    "Activations": "schemes",
    "CheckpointManager": "train",
    "Fisher": "schemes",
    "Inshrinkerator": "schemes",
    "inspect": "store.single_file",
    "Keep": "store.retention",
    "LCCheckpoint": "schemes",
    "load": "store.load",
    "Lossless": "schemes",
    "RecentBatches": "train",
    "save": "store.single_file",
    "SCAR": "schemes",
    "Store": "store.store",
    "TOPN": "schemes",
    "watch_progress": "progress",
}
"""The module of each public name; it is imported when the name is used first."""

_SUBPACKAGES = ("comm", "schemes", "sync", "train")
"""Subpackages that are attributes without an import of their own: `shrinkpoint.comm`, `shrinkpoint.train.dcp`, ..."""

__all__ = ["ShrinkpointError", "__version__", "errors", *_MODULES]


def __getattr__(name: str) -> object:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    module = _MODULES.get(name)
    # Upper case first: `from shrinkpoint import validate` asks here, too, and looking for packages takes 50 ms.
    if module is None and name[:1].isupper() and name in importlib.import_module(f"{__name__}.schemes").added_schemes():
        module = "schemes"
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
