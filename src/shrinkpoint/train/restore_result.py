"""The result of a restore: the checkpoint, the step to resume from, and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

from shrinkpoint import html, humanize
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store import SkippedCheckpoint
from shrinkpoint.store.manifest import Manifest, StepT


@dataclass(frozen=True)
class RestoreReport:
    """Measurements of a restore.

    Attributes:
        seconds: to find, read, decode and load the checkpoint.
        raw_bytes: of the state's tensors.
        depth: deltas that were applied on top of the keyframe.
        scheme: id of the scheme that wrote the checkpoint; empty if a framework wrote it itself.
        lossy_restores: how many restores from lossy checkpoints lie behind this state.
    """

    seconds: float
    raw_bytes: int = 0
    depth: int = 0
    scheme: str = ""
    lossy_restores: int = 0

    def _repr_html_(self) -> str:
        numbers = [
            ("scheme", self.scheme),
            ("state", humanize.size(self.raw_bytes)),
            ("deltas above the keyframe", str(self.depth)),
            ("lossy restores", str(self.lossy_restores or "")),
            ("seconds", f"{self.seconds:.2f}"),
        ]
        return html.fragment("restored", numbers)


@dataclass(frozen=True)
class RestoreResult(Generic[StepT]):
    """A checkpoint that was restored, and where training resumes.

    Attributes:
        report: measurements of the restore.
        manifest: the checkpoint's manifest; None if a framework wrote the checkpoint itself.
        step: the checkpoint's training step; None if it is not known.
        metrics: the metrics that were passed to `save`.
        extra: what was passed to `CheckpointManager.save` as `extra`.
        state: the nested state that was loaded; None if it was loaded into the caller's objects only.
        directory: the checkpoint's directory, or the place in a bucket; None in a store.
        skipped: newer checkpoints that do not load, newest first, with the reasons.
        where: of a `CheckpointManager`, the store that it was read from: its own, or the mirror.
        missing_keys: with `strict=False`, keys of models that are not in the checkpoint, as torch's `load_state_dict`
            names them, and parameters of optimizers; those of other objects than `model` follow the object's name.
        unexpected_keys: with `strict=False`, keys of the checkpoint that nothing was restored of.
    """

    report: RestoreReport
    manifest: Manifest[StepT] | None
    step: StepT
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Any = None
    state: Any = field(default=None, repr=False)
    directory: Path | ObjectUrl | None = None
    skipped: tuple[SkippedCheckpoint, ...] = ()
    where: str = ""
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()

    @classmethod
    def from_manifest(cls, manifest: Manifest[StepT], seconds: float, **fields: Any) -> RestoreResult[StepT]:
        """The result of restoring a checkpoint with this manifest.

        Args:
            seconds: how long the restore took.
            fields: the attributes that no manifest has: extra, state, directory, skipped, where and keys.
        """
        report = RestoreReport(
            seconds, manifest.raw_bytes, manifest.depth, manifest.scheme, manifest.lossy_restores + manifest.is_lossy
        )
        return cls(report, manifest, manifest.step, manifest.metrics, **fields)
