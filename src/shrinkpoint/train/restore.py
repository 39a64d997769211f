"""Where training resumes: what a restore returns, and the newest of several checkpoint directories that is valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from shrinkpoint import html, humanize
from shrinkpoint.errors import NotFoundError, ShrinkpointError
from shrinkpoint.sharding.collectives import AllGather
from shrinkpoint.storage import ObjectUrl
from shrinkpoint.store import SkippedCheckpoint
from shrinkpoint.store.directory import verify_directory
from shrinkpoint.store.manifest import Manifest, StepT
from shrinkpoint.store.newest import newest_that_loads


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
        """The numbers, for a notebook."""
        numbers = [
            ("scheme", self.scheme),
            ("state", humanize.size(self.raw_bytes)),
            ("deltas above the keyframe", str(self.depth)),
            ("lossy restores", str(self.lossy_restores or "")),
            ("seconds", f"{self.seconds:.2f}"),
        ]
        return html.fragment("restored", html.pairs(numbers))


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


PlaceT = TypeVar("PlaceT", bound=Path | ObjectUrl)


class NoCheckpointError(NotFoundError, ValueError):
    """There is no checkpoint to resume from. Also a ValueError, which frameworks raise for this."""


def latest_valid(
    candidates: Iterable[PlaceT],
    *,
    deep: bool = True,
    check: Callable[[PlaceT], object] | None = None,
    gather: AllGather | None = None,
    share: Callable[[PlaceT], tuple[int, int]] | None = None,
) -> tuple[PlaceT | None, tuple[SkippedCheckpoint, ...]]:
    """The first valid checkpoint of several, and those before it that are not; a warning is logged for each of these.

    Args:
        candidates: checkpoint directories, or places in a bucket, the newest first.
        deep: compare every stored byte with its digest; False: read headers and manifests only.
        check: raises a ShrinkpointError if a candidate is not valid; None: verify it as a directory of ours.
        gather: gathers a value from all ranks that call this together with the same candidates: a checkpoint is valid
            if it is so on every rank. None: this process decides alone.
        share: says which files of a candidate this rank verifies, as `verify_directory` takes it; all ranks call it
            together. None: all files.

    Returns:
        The directory, None if no candidate is valid; and the candidates that were skipped.
    """

    def find(directory: PlaceT) -> PlaceT:
        part = (0, 1) if share is None else share(directory)
        verify = check or partial(verify_directory, deep=deep, share=part)
        if gather is None:
            verify(directory)
            return directory
        text = ""
        try:
            verify(directory)
        except Exception as error:  # other ranks wait for this one, so any exception counts as an invalid checkpoint
            text = str(error) or type(error).__name__
        if reasons := [f"rank {rank}: {text}" for rank, text in enumerate(gather(text)) if text]:
            raise _RankError("; ".join(reasons))
        return directory

    pairs = ((directory, partial(find, directory)) for directory in candidates)
    return newest_that_loads(pairs, errors=(ShrinkpointError if gather is None else _RankError,))


class _RankError(Exception):
    """The errors of several ranks."""
