"""Saving and restoring training loops: checkpoint managers, when to save, gradient recorders, partial restores.

Each framework has a subpackage, imported at its first use: `dcp`, `transformers`, `accelerate`, `lightning`,
`torchft`, `torchtitan`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shrinkpoint.store import SkippedCheckpoint
from shrinkpoint.store.save_settings import SaveSettings
from shrinkpoint.train.checkpoint_manager import CheckpointManager
from shrinkpoint.train.checkpointer import Checkpointer
from shrinkpoint.train.gradients import GradientRecorder
from shrinkpoint.train.loggers import TensorBoardHook
from shrinkpoint.train.newest_valid import best_valid, latest_valid
from shrinkpoint.train.partial_restore import RankShard
from shrinkpoint.train.recent_batches import RecentBatches
from shrinkpoint.train.restore_result import RestoreReport, RestoreResult
from shrinkpoint.train.save_decision import (
    AnySavePolicy,
    BestMetricPolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    FixedIntervalPolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SaveSchedule,
    SpecificStepsPolicy,
)

if TYPE_CHECKING:
    from shrinkpoint.train import accelerate as accelerate
    from shrinkpoint.train import dcp as dcp
    from shrinkpoint.train import lightning as lightning
    from shrinkpoint.train import torchft as torchft
    from shrinkpoint.train import torchtitan as torchtitan
    from shrinkpoint.train import transformers as transformers
    from shrinkpoint.train.journal import Journal, JournalRestore

_MODULES = {"Journal": "journal", "JournalRestore": "journal"}
"""The modules of names that few need: a journal brings `comm` and torch's distributed tensors, a second of imports."""
_SUBPACKAGES = ("accelerate", "dcp", "lightning", "torchft", "torchtitan", "transformers")

__all__ = [
    "AnySavePolicy",
    "BestMetricPolicy",
    "CheckpointManager",
    "Checkpointer",
    "ContinuousCheckpointingPolicy",
    "DecisionContext",
    "FixedIntervalPolicy",
    "GradientRecorder",
    "Journal",
    "JournalRestore",
    "PreemptionCheckpointingPolicy",
    "RankShard",
    "RecentBatches",
    "RestoreReport",
    "RestoreResult",
    "SaveDecisionPolicy",
    "SaveSchedule",
    "SaveSettings",
    "SkippedCheckpoint",
    "SpecificStepsPolicy",
    "TensorBoardHook",
    "best_valid",
    "latest_valid",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_SUBPACKAGES})
