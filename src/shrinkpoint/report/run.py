"""Contents of a page about one store, run or file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from shrinkpoint import humanize
from shrinkpoint.report.checkpoints import CheckpointReport, StoreReport
from shrinkpoint.report.files import FileReport
from shrinkpoint.store.chain import file_sizes
from shrinkpoint.store.save_report import LossIncrease


@dataclass(frozen=True)
class RunReport:
    """A store or a run with one of its checkpoints, or one file."""

    name: str  # how the page calls it, such as its path
    store: StoreReport | None  # all checkpoints; None: a single file
    shown: CheckpointReport | None  # the checkpoint whose tensors are shown; None: a single file, or there is none
    files: tuple[FileReport, ...]  # the files of that checkpoint
    doomed: Mapping[int, str] = field(default_factory=dict)  # why the next prune deletes a checkpoint, by step

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

    def hero(self) -> list[tuple[str, str, str]]:
        """The numbers at the top of the page: each with its name, and with what it says in a few words."""
        if self.store is None:
            raw, stored = (sum(getattr(file, name) for file in self.files) for name in ("raw_bytes", "size"))
            return [
                ("smaller", humanize.ratio(raw, stored), f"{humanize.size(raw)} of state in {humanize.size(stored)}")
            ]
        raw, stored = self.store.raw_bytes, self.store.stored_bytes
        count = sum(not row.forgotten for row in self.checkpoints)
        plain = f"{humanize.size(raw)} as {humanize.count(count, 'file')} of torch.save"
        rise, note = worst_rise(self.checkpoints)
        waited, written = self._median("stall"), self._median("seconds")
        beside = f"{written} to write it; " if waited and written else ""
        return [
            ("smaller on the disk", humanize.ratio(raw, stored), f"{humanize.size(stored)}, bases included; {plain}"),
            ("rise of the loss", rise or "-", note),
            (
                "wait of the loop for a save" if waited else "to write a checkpoint",
                waited or written or "-",
                f"the median; {beside}torch.save was not timed" if waited or written else "not recorded",
            ),
        ]

    def totals(self) -> list[tuple[str, str]]:
        """The numbers below these, under their names."""
        if self.store is None:
            return [("scheme", self.files[0].scheme)]
        schemes = dict.fromkeys(row.manifest.scheme for row in self.checkpoints)
        return [
            ("checkpoints", f"{len(self.checkpoints):,}"),
            ("scheme", ", ".join(schemes)),
            ("forgotten", str(sum(row.forgotten for row in self.checkpoints) or "")),
            ("deleted by the next prune", str(len(self.doomed) or "")),
            ("unreadable", str(len(self.store.broken) or "")),
        ]

    def _median(self, stat: str) -> str:
        values = sorted(row.manifest.stats[stat] for row in self.checkpoints if stat in row.manifest.stats)
        return seconds_text(values[len(values) // 2]) if values else ""

    def links(self) -> list[tuple[int, tuple[float, int]]]:
        """For each delta, its number and the file that it stands on: its step and its depth.

        A base that is no checkpoint any more has the step that it was saved at; in a framework's run that is not known,
        and the delta has no entry.
        """
        owners = {
            payload.digest: row for row, report in enumerate(self.checkpoints) for payload in report.manifest.payloads
        }
        links, steps = list[tuple[int, tuple[float, int]]](), self.steps
        for row, report in enumerate(self.checkpoints):
            manifest = report.manifest
            digests = [base.digest for base in manifest.bases]
            digests = digests or max(([digest for digest, _ in file.bases] for file in manifest.payloads), key=len)
            if digests and (owner := owners.get(digests[-1])) is not None:
                links.append((row, (steps[owner], self.checkpoints[owner].manifest.depth)))
            elif manifest.bases:
                links.append((row, (manifest.bases[-1].step, manifest.depth - 1)))
        return links

    def deletion_reason(self, row: CheckpointReport) -> str:
        """Reason for which the next prune deletes a checkpoint; "" if it does not."""
        return "" if row.manifest.step is None else self.doomed.get(row.manifest.step, "")

    def cumulative_bytes(self) -> tuple[list[int], list[int]]:
        """Bytes of a file of `torch.save` for each checkpoint up to each one, and of all files that these need."""
        raw = accumulate(0 if row.forgotten else row.manifest.raw_bytes for row in self.checkpoints)
        seen: set[str] = set()
        stored = []
        for row in self.checkpoints:
            sizes = file_sizes([row.manifest])
            stored.append(sum(size for digest, size in sizes.items() if digest not in seen))
            seen.update(sizes)
        return [*raw], [*accumulate(stored)]

    def tips(self) -> list[str]:
        """The text of each checkpoint that the page shows under the mouse."""
        return [self._tip(row) for row in self.checkpoints]

    def _tip(self, row: CheckpointReport) -> str:
        manifest, stats = row.manifest, row.manifest.stats
        lines = [
            row.folder or f"step {manifest.step}",
            f"{manifest.scheme}, {manifest.kind}",
            humanize.sizes(manifest.raw_bytes, manifest.stored_bytes),
            f"{humanize.size(row.disk_bytes)} with its bases" if manifest.depth else "",
            f"loss {str(LossIncrease.from_loss(manifest.loss)) or 'as before'}",
            f"{seconds_text(stats['seconds'])} to write" if "seconds" in stats else "",
            f"the loop waited {seconds_text(stats['stall'])}" if "stall" in stats else "",
            f"next prune deletes it: {self.deletion_reason(row)}" if self.deletion_reason(row) else "",
        ]
        return "\n".join(humanize.printable(line) for line in lines if line)


def seconds_text(seconds: float) -> str:
    """A time in three digits.

    >>> seconds_text(0.01194), seconds_text(2.5), seconds_text(0.0)
    ('11.9 ms', '2.5 s', '0 s')
    """
    return f"{1000 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"


def worst_rise(checkpoints: tuple[CheckpointReport, ...]) -> tuple[str, str]:
    """The largest rise of the loss that was measured, and how many checkpoints were not measured."""
    increases = [LossIncrease.from_loss(row.manifest.loss) for row in checkpoints]
    measured = [increase.value for increase in increases if increase.value is not None]
    unmeasured = sum(increase.is_lossy and increase.value is None for increase in increases)
    note = f"{unmeasured:,} of {len(increases):,} not measured" if unmeasured else ""
    if not any(increase.is_lossy for increase in increases):
        return ("none", "every bit comes back") if checkpoints else ("", "")
    if not measured:
        return "not measured", note if unmeasured < len(increases) else ""
    worst = LossIncrease(is_lossy=True, value=max(measured))
    return str(worst), "; ".join(filter(None, ("the worst, right after a restore", note)))
