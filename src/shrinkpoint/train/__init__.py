"""A TRAINING LOOP MEETS A STORE: when to save, what belongs to a state, how to go on from it.

Frameworks have rooms of their own, which import them when they are first used: `dcp`, `transformers`, `accelerate`,
`lightning`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shrinkpoint.store.listing import SkippedCheckpoint
from shrinkpoint.train.checkpoint_manager import CheckpointManager, RestoreReport, RestoreResult
from shrinkpoint.train.checkpointer import Checkpointer, DirectoryRestore, latest_valid
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.partial_restore import RankShard

if TYPE_CHECKING:
    from shrinkpoint.train import accelerate as accelerate
    from shrinkpoint.train import dcp as dcp
    from shrinkpoint.train import lightning as lightning
    from shrinkpoint.train import transformers as transformers

_SUBPACKAGES = ("accelerate", "dcp", "lightning", "transformers")

__all__ = [
    "CheckpointManager",
    "Checkpointer",
    "DirectoryRestore",
    "GradientRecorder",
    "RankShard",
    "RestoreReport",
    "RestoreResult",
    "SkippedCheckpoint",
    "latest_valid",
]


def __getattr__(name: str) -> object:
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
