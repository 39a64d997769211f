"""Reports of a save for people (bytes by role, time, the rise of the loss), and of a store in a notebook. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shrinkpoint import html, humanize
from shrinkpoint.store.chain import file_sizes
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.tensors.info import JSON, Role

NOT_MEASURED = "not measured"
MIN_SHOWN_REST = 1e-4  # The least rise left by restores, relative to the loss, that is worth a word


@dataclass(frozen=True)
class LossIncrease:
    """The rise of the loss, or the fall of a score, after a restore of a checkpoint.

    Attributes:
        is_lossy: a restore gives other values than were saved.
        is_measured: True if the rise was measured; True where nothing was lost.
        value: relative to the loss before the save: 0.01 is 1%; 0 if no weight changed; None if unknown.
        interval: 95% confidence interval of `value` on other examples of the same kind; None if unknown.
        predicted: the rise that the scheme expected if it was not measured, in nats; None if it expected nothing.
        restored: the rise that earlier restores have left, as the scheme estimates; relative like `value`.
    """

    is_lossy: bool = False
    is_measured: bool = True
    value: float | None = None
    interval: tuple[float, float] | None = None
    predicted: float | None = None
    restored: float = 0.0

    @property
    def restored_text(self) -> str:
        """The rise that earlier restores have left, in words; "" if they have left nothing."""
        return f"remaining rise of the loss about {100 * self.restored:.2g}%" if self.restored >= MIN_SHOWN_REST else ""

    @classmethod
    def from_loss(cls, loss: JSON) -> LossIncrease:
        """Parse the `loss` of a manifest, which may be any JSON, also one of a release without the key `measured`."""
        if not isinstance(loss, dict) or loss.get("chosen") is None:
            return cls()
        value, scale = _relative_increase(loss)
        restored = (_number(loss.get("restored_rise")) or 0.0) / _loss_scale(loss)
        measured = loss.get("measured", value is not None) is True
        chosen = loss["chosen"]
        has_exact_weights = (
            isinstance(chosen, dict) and "step_in_deviations" in chosen and chosen["step_in_deviations"] is None
        )
        if measured and value is None and has_exact_weights:  # only optimizer moments are quantized
            value, scale = 0.0, 1.0
        if not measured:
            return cls(True, False, predicted=_predicted_increase(loss), restored=restored)
        if scale is None:
            return cls(True)
        ends = loss.get("interval")
        low, high = (_number(end) for end in ends) if isinstance(ends, list) and len(ends) == 2 else (None, None)
        interval = None if low is None or high is None else (low / scale, high / scale)
        return cls(True, True, None if value is None else _number(value / scale), interval, restored=restored)

    def __str__(self) -> str:
        if not self.is_lossy:
            return ""
        if self.predicted is not None:
            return f"{NOT_MEASURED}, predicted {self.predicted:+.2g} nats"
        if self.value is None:
            return "measured" if self.is_measured else NOT_MEASURED
        text = _percent(self.value)
        return text if self.interval is None else f"{text} ({' to '.join(map(_percent, self.interval))})"


def _relative_increase(loss: Mapping[str, JSON]) -> tuple[float | None, float | None]:
    """The increase that a scheme reported, and the loss that it is relative to; None for what is unknown."""
    if "degradation" in loss:
        return _number(loss["degradation"]), 1.0
    value, scale = _number(loss.get("rise")), _loss_scale(loss)
    if value == 0:
        return value, 1.0
    return value, None if math.isinf(scale) else scale


def _loss_scale(loss: Mapping[str, JSON]) -> float:
    """The loss that rises are relative to; infinite if it is unknown."""
    quality = _number(loss.get("quality"))
    return math.inf if quality is None else abs(quality) or 1.0


def _predicted_increase(loss: Mapping[str, JSON]) -> float | None:
    """The increase that the scheme `fisher` predicted of what it chose."""
    chosen, tried = loss["chosen"], loss.get("tried")
    step = _number(chosen.get("step_in_deviations")) if isinstance(chosen, dict) else None
    if step is None or not isinstance(tried, list):
        return None
    trials = [trial for trial in tried if isinstance(trial, dict) and _number(trial.get("step")) == step]
    return _number(trials[-1].get("curvature")) if trials else None


def _percent(share: float) -> str:
    """
    >>> _percent(0.00317), _percent(-0.2), _percent(0.0)
    ('+0.32%', '-20%', '0%')
    """
    if share == 0:
        return "0%"
    return f"{100 * share:+.2g}%" if abs(share) < 1 else f"{100 * share:+.0f}%"


def _number(value: JSON) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


COPY_ROLE = "copy"
"""The role in a report of weights beside the model that track it and are lossy as it is: averages, target networks."""


@dataclass(frozen=True)
class RoleBytes:
    """Sizes of the tensors of one role.

    Attributes:
        raw: bytes of the tensors.
        stored: bytes of their records.
        tensors: how many there are.
    """

    raw: int = 0
    stored: int = 0
    tensors: int = 0


@dataclass(frozen=True)
class CopyReport:
    """Loss of weights beside the model that track it: an average, a target network, a teacher.

    Attributes:
        tensors: how many are lossy.
        distance: from the model, relative to its weights.
        error: of the checkpoint, relative to the copy's weights.
        rise: relative increase of the copy's own loss, measured with its values in the model; None: not measured.
        predicted: the increase in the loss's unit by the model's curvature; None if that is unknown.
    """

    tensors: int
    distance: float
    error: float
    rise: float | None
    predicted: float | None

    @classmethod
    def from_record(cls, record: Mapping[str, JSON]) -> CopyReport:
        """The report of an entry of a manifest's `loss`."""
        increase = LossIncrease.from_loss({**record, "chosen": {}})
        tensors, distance, error, predicted = (record.get(key) for key in ("tensors", "distance", "error", "predicted"))
        return cls(
            tensors if isinstance(tensors, int) else 0,
            distance if isinstance(distance, float) else math.nan,
            error if isinstance(error, float) else math.nan,
            increase.value,
            predicted if isinstance(predicted, float) else None,
        )

    def __str__(self) -> str:
        """The rise of the loss.

        >>> str(CopyReport(4, 0.2, 0.1, None, 0.002)), str(CopyReport(4, 0.2, 0.1, 0.004, 0.002))
        ('not measured, predicted +0.002 nats', '+0.4%')
        """
        is_measured = self.rise is not None
        return str(LossIncrease(True, is_measured, self.rise, predicted=None if is_measured else self.predicted))


@dataclass(frozen=True)
class SaveReport:
    """The result of a save.

    Attributes:
        path: where the checkpoint went.
        scheme: which scheme wrote it.
        keyframe: True when it needs no other checkpoint.
        raw_bytes: bytes of the tensors of the state, each storage once.
        stored_bytes: bytes of the whole file, header included.
        seconds: from the first tensor to the durable file.
        roles: bytes by role name; "copy" is that of weights beside the model that track it and are lossy as it is.
        digest: the file's header digest, which authenticates every other byte.
        retention: fraction of the weights' progress since the previous checkpoint that this one holds, estimated from
            about 2^16 values of each weight (see `store.delta_base`); None: nothing was lost, there is no previous one,
            or weights have moved by too little to tell it from 1.
        loss_report: what a searched scheme tried, measured and chose; None: nothing was searched.
        exact: why floating-point tensors stayed exact under a lossy scheme, by name; empty for sharded tensors.
        step: of the training; None: a single file, or not given.
        depth: deltas between this checkpoint and its keyframe, itself included; None: a single file.
        disk_bytes: of all files that the checkpoint needs, its bases included; None: a single file.
        stall_seconds: for which the save had held up the loop when its manifest was written; None: no loop saved.
    """

    path: str
    scheme: str
    keyframe: bool
    raw_bytes: int
    stored_bytes: int
    seconds: float
    roles: dict[str, RoleBytes] = field(default_factory=dict)
    digest: str = ""
    retention: float | None = None
    loss_report: JSON = None
    exact: Mapping[str, str] = field(default_factory=dict, repr=False)
    step: int | None = None
    depth: int | None = None
    stall_seconds: float | None = None
    disk_bytes: int | None = None

    @classmethod
    def from_manifest(cls, path: str, manifest: Manifest[Any]) -> SaveReport:
        """The report of a checkpoint of several ranks, as far as its manifest tells: without roles and digest."""
        stats = manifest.stats
        return cls(
            path,
            manifest.scheme,
            keyframe=manifest.depth == 0,
            raw_bytes=manifest.raw_bytes,
            stored_bytes=manifest.stored_bytes,
            seconds=stats.get("seconds", 0.0),
            retention=stats.get("retention"),
            loss_report=manifest.loss,
            step=manifest.step,
            depth=manifest.depth,
            stall_seconds=stats.get("stall"),
            disk_bytes=sum(file_sizes([manifest]).values()),
        )

    @property
    def loss_increase(self) -> float | None:
        """Relative rise of the loss, or fall of a score, measured for a restore: 0.01 is 1%.

        0 where no weight lost anything; None: not measured.
        """
        increase = LossIncrease.from_loss(self.loss_report)
        return increase.value if increase.is_lossy else 0.0

    @property
    def copies(self) -> dict[str, CopyReport]:
        """The weights beside the model that track it and are lossy as it is, by what their names begin with."""
        loss = self.loss_report
        found = loss.get("copies") if isinstance(loss, dict) else None
        records = found if isinstance(found, dict) else {}
        return {name: CopyReport.from_record(record) for name, record in records.items() if isinstance(record, dict)}

    @property
    def is_measured(self) -> bool:
        """True if the loss was measured; True where nothing was lost."""
        return LossIncrease.from_loss(self.loss_report).is_measured

    @property
    def measured_on(self) -> str | None:
        """The examples that the loss was measured on, in words; None if nothing was measured, or it is not known."""
        loss = self.loss_report
        name = loss.get("measured_on") if isinstance(loss, dict) and self.is_measured else None
        return name if isinstance(name, str) else None

    def __str__(self) -> str:
        """One line: what was written, how small, and what that costs.

        >>> str(SaveReport("a", "fisher", True, 2200, 100, 1.0, loss_report={"chosen": {}, "measured": False}))
        'a: fisher, keyframe, 100 bytes of 2,200 (22x), loss not measured'
        """
        increase = str(LossIncrease.from_loss(self.loss_report))
        lost = f"loss {increase}" if increase else "nothing lost"
        if increase and self.measured_on:
            lost += f" on {self.measured_on}"
        lost += "".join(f", of {name} {copy}" for name, copy in self.copies.items())
        sizes = f"{self.stored_bytes:,} bytes of {self.raw_bytes:,} ({self.ratio:.3g}x)"
        if self.disk_bytes is not None and not self.keyframe:
            sizes += f", {self.disk_bytes:,} with its bases"
        return f"{self.path}: {self.scheme}, {self._kind}, {sizes}, {lost}"

    def __repr__(self) -> str:
        """Short line with what was written.

        >>> SaveReport("a", "fisher", True, 2200, 100, 1.0, loss_report={"chosen": {}, "measured": False})
        <SaveReport fisher, keyframe, 100 B of 2.20 kB (22.00x), loss not measured, 1.00 s>
        """
        lost = str(LossIncrease.from_loss(self.loss_report))
        sizes = humanize.sizes(self.raw_bytes, self.stored_bytes)
        if self.disk_bytes is not None and not self.keyframe:
            sizes += f", {humanize.size(self.disk_bytes)} with its bases"
        parts = [self.scheme, self._kind, sizes, lost and f"loss {lost}", f"{self.seconds:.2f} s"]
        return f"<SaveReport {', '.join(filter(None, parts))}>"

    def _repr_html_(self) -> str:
        lost = str(LossIncrease.from_loss(self.loss_report))
        numbers = [
            ("scheme", self.scheme),
            ("kind", self._kind),
            ("state", humanize.size(self.raw_bytes)),
            ("stored", humanize.size(self.stored_bytes)),
            ("ratio", humanize.ratio(self.raw_bytes, self.stored_bytes)),
            ("with its bases", "" if self.disk_bytes is None else humanize.size(self.disk_bytes)),
            ("loss rise", lost or "nothing lost"),
            ("measured on", self.measured_on or ""),
            *((f"loss rise of {name}", str(copy)) for name, copy in self.copies.items()),
            ("progress held", "" if self.retention is None else f"{100 * self.retention:.1f}%"),
            ("seconds", f"{self.seconds:.2f}"),
        ]
        heads = ("role", "tensors", "state", "stored", "ratio")
        rows = []
        for name, role in self.roles.items():
            sizes = humanize.size(role.raw), humanize.size(role.stored), humanize.ratio(role.raw, role.stored)
            rows.append((name, f"{role.tensors:,}", *sizes))
        return html.fragment(self.path, numbers, heads, rows, aligned=heads[1:])

    @property
    def _kind(self) -> str:
        return "keyframe" if self.keyframe else "delta"

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """The numbers for a logger, by name; what is not known or was not measured is left out.

        `bytes` and `raw_bytes` of the checkpoint and of the state, and their `ratio`; `disk_bytes` of the checkpoint
        and its bases; `seconds` that it took, and
        `stall_seconds` of the loop; `keyframe` (1 or 0) and `depth`, the deltas above the keyframe; `rise` of the loss
        (0.01 is 1%) and `retention`, the share of the progress that is held; `step`.

        Args:
            prefix: of every name, such as "checkpoint/".

        >>> SaveReport("a", "lossless", True, 2200, 1100, 1.0, step=7).metrics("save/")["save/ratio"]
        2.0
        """
        values = {
            "bytes": self.stored_bytes,
            "raw_bytes": self.raw_bytes,
            "ratio": self.ratio,
            "disk_bytes": self.disk_bytes,
            "seconds": self.seconds,
            "stall_seconds": self.stall_seconds,
            "keyframe": self.keyframe,
            "depth": self.depth,
            "rise": self.loss_increase,
            "retention": self.retention,
            "step": self.step,
        }
        return {prefix + name: float(value) for name, value in values.items() if value is not None}

    @property
    def stats(self) -> dict[str, float]:
        """Statistics of the save for the manifest, as far as they are known."""
        values = {"seconds": self.seconds, "retention": self.retention, "stall": self.stall_seconds}
        return {name: round(value, 6) for name, value in values.items() if value is not None}

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored byte, of the whole state and the whole file."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    @property
    def weights_ratio(self) -> float:
        """Raw bytes for each stored byte of the weights, the file's header left out.

        Master copies and lossy averages count as weights; a cast of a master takes no bytes of its own. Infinite if no
        weight takes any.
        """
        names = (Role.PARAMETER.value, Role.MASTER.value, COPY_ROLE)
        weights = [self.roles[name] for name in names if name in self.roles]
        raw, stored = sum(role.raw for role in weights), sum(role.stored for role in weights)
        return raw / stored if stored else float("inf") if raw else 1.0


_MAX_ROWS = 20
_HEADS = ("step", "age", "kind", "scheme", "state", "stored", "ratio", "loss rise")


def store_html(where: str, manifests: Sequence[Manifest], stored: int) -> str:
    """The totals of a store and its newest checkpoints.

    Args:
        where: path or URL of the store.
        manifests: by rising step.
        stored: bytes of all payloads on the disk, bases included.
    """
    raw = sum(manifest.raw_bytes for manifest in manifests)
    numbers = [
        ("checkpoints", f"{len(manifests):,}"),
        ("state", humanize.size(raw)),
        ("stored", humanize.size(stored)),
        ("ratio", humanize.ratio(raw, stored)),
    ]
    newest = manifests[: -_MAX_ROWS - 1 : -1]
    earlier = len(manifests) - len(newest)
    note = f"and {humanize.count(earlier, 'earlier checkpoint')}" if earlier else ""
    note = note if newest else "no checkpoint yet"
    aligned = ("step", "age", "state", "stored", "ratio", "loss rise")
    return html.fragment(where, numbers, _HEADS, [*map(_row, newest)], aligned=aligned, note=note)


def _row(manifest: Manifest) -> tuple[str, ...]:
    raw, stored = manifest.raw_bytes, manifest.stored_bytes
    sizes = humanize.size(raw), humanize.size(stored), humanize.ratio(raw, stored)
    increase = str(LossIncrease.from_loss(manifest.loss))
    return str(manifest.step), humanize.age(manifest.created), manifest.kind, manifest.scheme, *sizes, increase
