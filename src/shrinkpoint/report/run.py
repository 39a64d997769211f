"""Contents of a page about one store, run or file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from shrinkpoint import humanize
from shrinkpoint.report.checkpoints import CheckpointReport, StoreReport
from shrinkpoint.report.files import FileReport
from shrinkpoint.store.loss_increase import LossIncrease


@dataclass(frozen=True)
class RunReport:
    """A store or a run with one of its checkpoints, or one file.

    Attributes:
        name: how the page calls it, such as its path.
        store: all checkpoints; None: a single file.
        shown: the checkpoint whose tensors are shown; None: a single file, or there is none.
        files: the files of that checkpoint.
        doomed: why the next prune deletes a checkpoint, by step.
    """

    name: str
    store: StoreReport | None
    shown: CheckpointReport | None
    files: tuple[FileReport, ...]
    doomed: Mapping[int, str] = field(default_factory=dict)

    @property
    def checkpoints(self) -> tuple[CheckpointReport, ...]:
        return () if self.store is None else self.store.checkpoints

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints; their numbers where a run does not name its steps."""
        return [
            number if row.manifest.step is None else row.manifest.step for number, row in enumerate(self.checkpoints)
        ]

    @property
    def shown_name(self) -> str:
        """Name of the checkpoint whose tensors the page shows."""
        if self.shown is None:
            return "the file"
        return self.shown.folder or f"step {self.shown.manifest.step}"

    def totals(self) -> list[tuple[str, str]]:
        """The numbers at the top of the page, under their names."""
        if self.store is None:
            raw, stored = (sum(getattr(file, name) for file in self.files) for name in ("raw_bytes", "size"))
            return [("scheme", self.files[0].scheme), *_size_texts(raw, stored)]
        stats = [row.manifest.stats for row in self.checkpoints]
        stalls, seconds = (sorted(row[name] for row in stats if name in row) for name in ("stall", "seconds"))
        return [
            ("checkpoints", f"{len(self.checkpoints):,}"),
            *_size_texts(self.store.raw_bytes, self.store.stored_bytes),
            ("worst rise of the loss", worst_rise(self.checkpoints)),
            ("median save", f"{seconds[len(seconds) // 2]:.3g} s" if seconds else ""),
            ("median wait of the loop", f"{stalls[len(stalls) // 2]:.3g} s" if stalls else ""),
            ("deleted by the next prune", str(len(self.doomed) or "")),
            ("unreadable", str(len(self.store.broken) or "")),
        ]

    def deletion_reason(self, row: CheckpointReport) -> str:
        """Reason for which the next prune deletes a checkpoint; "" if it does not."""
        return "" if row.manifest.step is None else self.doomed.get(row.manifest.step, "")

    def cumulative_bytes(self) -> tuple[list[int], list[int]]:
        """Bytes that `torch.save` would have written until each checkpoint, and those that were."""
        raw = accumulate(row.manifest.raw_bytes for row in self.checkpoints)
        return [*raw], [*accumulate(row.manifest.stored_bytes for row in self.checkpoints)]


def worst_rise(checkpoints: tuple[CheckpointReport, ...]) -> str:
    """The largest rise of the loss that was measured, and how many checkpoints were not measured."""
    increases = [LossIncrease.from_loss(row.manifest.loss) for row in checkpoints]
    measured = [increase for increase in increases if increase.value is not None]
    unmeasured = sum(increase.is_lossy and increase.value is None for increase in increases)
    worst = str(max(measured, key=lambda increase: increase.value or 0.0)) if measured else ""
    note = f"{unmeasured:,} not measured" if unmeasured else ""
    if not any(increase.is_lossy for increase in increases):
        return "nothing lost" if checkpoints else ""
    return "; ".join(filter(None, (worst, note)))


def _size_texts(raw: int, stored: int) -> list[tuple[str, str]]:
    return [
        ("torch.save would have written", humanize.size(raw)),
        ("stored", humanize.size(stored)),
        ("saved", humanize.size(raw - stored)),
        ("ratio", humanize.ratio(raw, stored)),
    ]
