"""Retention: which checkpoints to keep, decided from manifests alone, and what deleting the others frees."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

from shrinkpoint import humanize, validate
from shrinkpoint.errors import NotFoundError, PolicyError
from shrinkpoint.storage import LocalStorage, Storage, object_size
from shrinkpoint.store import chain, layout
from shrinkpoint.store.history import oldest_first, place_of
from shrinkpoint.store.listing import Listing
from shrinkpoint.store.manifest import DirectoryManifest, Manifest

M = TypeVar("M", bound=DirectoryManifest)
PlaceT = TypeVar("PlaceT")
NO_METRIC = "Keep(metric=)"  # The `where` of an error about a metric that no checkpoint has
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])")


@dataclass(frozen=True)
class Keep:
    """Rules of retention: a checkpoint stays if any of them selects it.

    The newest checkpoint is the one that was saved last. It is always kept, since a run resumes from it, and so is
    every base of a kept one. Checkpoints that the run left behind when it went back to an older step count as older
    than all others. A `Keep()` without a rule keeps everything.

    Attributes:
        last: number of the newest to keep.
        every: keep those whose step is a multiple of this.
        best: number of those with the best `metric` to keep. Checkpoints without it, or with nan, are not selected by
            this rule. If no checkpoint has it, nothing is deleted: pruning raises, and a manager warns once.
        metric: the name under which the loop reported it.
        mode: "min" or "max".
        within: keep those younger than this, a timedelta or a text such as "90s", "12h", "7d", "2w".
        moments_last: of those that a rule selects, the number of the newest that keep what a run needs to resume. The
            others become weights only: what the optimizers keep for each parameter is deleted. None: all keep it.

    Raises:
        PolicyError: a number below 1, an unknown mode, an invalid span, or a metric or mode without `best`.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    within: timedelta | str | None = None
    moments_last: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "best", "moments_last"):
            value = getattr(self, name)
            if value is not None:
                validate.check_int(f"Keep({name}=)", value, do=f"leave {name} out for no such rule")
        validate.check_str("Keep(metric=)", self.metric, do="pass the name of a metric")
        validate.check_choice("Keep(mode=)", self.mode, ("min", "max"))
        if self.best is None and (self.metric, self.mode) != ("val_loss", "min"):
            found = f"metric={self.metric!r}, mode={self.mode!r} and no best="
            expected = "the number of the best to keep"
            raise PolicyError("Keep(best=)", found=found, expected=expected, do="pass e.g. best=1")
        if self.span is not None and self.span <= timedelta(0):
            raise PolicyError("Keep(within=)", found=repr(self.within), expected="a positive span", do="pass e.g. '7d'")

    @property
    def span(self) -> timedelta | None:
        """`within` as a timedelta."""
        if self.within is None or isinstance(self.within, timedelta):
            return self.within
        match = _SPAN.fullmatch(self.within.strip()) if isinstance(self.within, str) else None
        try:
            return timedelta(**{_UNITS[match[2]]: float(match[1])}) if match else timedelta(0)
        except OverflowError:
            return timedelta.max

    def is_permanent(self, step: int) -> bool:
        """True if a rule keeps the checkpoint of this step for good."""
        return self.every is not None and step % self.every == 0

    @property
    def keeps_all(self) -> bool:
        return self.last is None and self.every is None and self.best is None and self.within is None


def check_keep(keep: object) -> Keep | None:
    """Return a `Keep` or None; raises PolicyError if `keep` is something else."""
    if keep is None or isinstance(keep, Keep):
        return keep
    do = f"pass shrinkpoint.Keep(last={keep if type(keep) is int and keep > 0 else 3})"
    raise validate.argument_error("keep", keep, "a Keep, or None to keep all", do)


@dataclass(frozen=True)
class RetentionDecision:
    """Checkpoints to keep and to drop."""

    # `keep`, `drop`: steps, rising.
    keep: tuple[int, ...]
    drop: tuple[int, ...]
    selected: tuple[int, ...]  # of `keep`, those that a rule selects, and not only a delta needs, oldest first
    reasons: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by step, sentences that say why


def check_metric(manifests: Iterable[DirectoryManifest], keep: Keep) -> None:
    """Check that the metric of a rule `best` exists.

    Args:
        manifests: of the checkpoints that are not forgotten.

    Raises:
        PolicyError: there are checkpoints, and none has a number for the metric; its `where` is `NO_METRIC`.
    """
    visible = [*manifests]
    if keep.best is None or not visible or any(_has_metric(manifest, keep) for manifest in visible):
        return
    names = sorted({name for manifest in visible for name, value in manifest.metrics.items() if not math.isnan(value)})
    is_nan = any(keep.metric in manifest.metrics for manifest in visible)
    found = f"{keep.metric!r}, which no checkpoint has{' except as nan' if is_nan else ''}"
    expected = "one of " + ", ".join(map(repr, names[:8])) if names else "checkpoints that were saved with metrics="
    do = "pass a metric that the loop saves, or leave best out; nothing was deleted"
    raise PolicyError(NO_METRIC, found=found, expected=expected, do=do)


def apply_policy(
    manifests: Iterable[Manifest], keep: Keep, now: datetime, *, forgotten: Collection[int] = frozenset()
) -> RetentionDecision:
    """Decide which checkpoints to keep.

    Args:
        manifests: of every checkpoint of the store, the forgotten ones included.
        now: with a time zone; `within` counts back from here.
        forgotten: hidden steps: no rule keeps them, but they may be bases of a kept checkpoint.

    Raises:
        PolicyError: `now` has no time zone.
    """
    if now.tzinfo is None:
        found, do = "a time without a zone", "pass datetime.now(timezone.utc)"
        raise PolicyError("now", found=found, expected="an aware datetime", do=do)
    by_step = {manifest.step: manifest for manifest in manifests}
    reasons: dict[int, list[str]] = {step: [] for step in sorted(by_step)}
    visible = oldest_first((by_step[step] for step in reasons if step not in forgotten), place_of)
    for manifest, reason in match_rules(visible, keep, now):
        reasons[manifest.step].append(reason)
    digests = {step: manifest.digest for step, manifest in by_step.items()}
    selected = tuple(manifest.step for manifest in visible if reasons[manifest.step])
    for step in selected:
        reason = f"base of step {step}"
        for base in chain.ancestors(digests, by_step[step]):
            reasons[base].append(reason)
    keep_steps = tuple(step for step, why in reasons.items() if why)
    drop_steps = tuple(step for step, why in reasons.items() if not why)
    for step in drop_steps:
        reasons[step].append("forgotten, and no base of anything kept" if step in forgotten else "no rule keeps it")
    return RetentionDecision(keep_steps, drop_steps, selected, {step: tuple(why) for step, why in reasons.items()})


def match_rules(visible: Sequence[M], keep: Keep, now: datetime) -> Iterator[tuple[M, str]]:
    """A checkpoint and a reason, for each rule that selects it.

    Args:
        visible: oldest first.
        now: with a time zone.
    """
    if keep.keeps_all:
        yield from ((manifest, "no rule is given, so everything is kept") for manifest in visible)
        return
    if visible:
        yield visible[-1], "newest: a run resumes from it"
    if keep.last is not None:
        yield from ((manifest, f"one of the last {keep.last}") for manifest in visible[-keep.last :])
    if keep.every is not None:
        selected = (manifest for manifest in visible if manifest.step is not None and keep.is_permanent(manifest.step))
        yield from ((manifest, f"a multiple of {keep.every}") for manifest in selected)
    if keep.best is not None:
        for rank, manifest in enumerate(best_first(visible, keep)[: keep.best], 1):
            value = f"{keep.metric} {manifest.metrics[keep.metric]:.6g}"
            yield manifest, f"{value} is number {rank} of the best {keep.best}"
    if keep.span is not None:
        selected = (manifest for manifest in visible if now - manifest.created_at <= keep.span)
        yield from ((manifest, f"younger than {keep.within}") for manifest in selected)


def _has_metric(manifest: DirectoryManifest, keep: Keep) -> bool:
    return not math.isnan(manifest.metrics.get(keep.metric, math.nan))


def best_first(visible: Sequence[M], keep: Keep) -> list[M]:
    """The checkpoints that have the metric of a rule `best`, the best first, of equals the newer one.

    Args:
        visible: oldest first.
    """
    sign = 1.0 if keep.mode == "min" else -1.0
    rated = [manifest for manifest in reversed(visible) if _has_metric(manifest, keep)]
    return sorted(rated, key=lambda manifest: sign * manifest.metrics[keep.metric])


@dataclass(frozen=True)
class RewriteTarget:
    """A checkpoint that is to be written again."""

    manifest: Manifest  # as it is
    weights_only: bool  # it has no moments afterwards
    parent: int | None  # step of the checkpoint that it becomes a delta against; None: it becomes a keyframe


class ReversedShares(NamedTuple):
    """Bytes of checkpoints that became deltas against newer ones, for each byte of their tensors."""

    mean: float
    largest: float


@dataclass(frozen=True)
class PrunePlan:
    """Deletions and rewrites of a prune, with reasons.

    Attributes:
        delete, keep: steps, rising.
        bytes: what it frees, less what it writes; a file with a hard link elsewhere frees nothing.
        reasons: by step, sentences that say why it is kept or deleted.
        keys: what is deleted, in this order: manifests first, so that no crash leaves one without its payload.
        rewrite: steps that are written again, rising.
        weights_only: of these, those that lose what the optimizers keep for each parameter.
        written: bytes that are written again. Of each chain they are written before anything is deleted.
        bases: of `keep`, steps that no rule selects, but that deltas need.
        reversed_shares: of the checkpoints that became deltas against newer ones; None: nothing did.
    """

    delete: tuple[int, ...]
    keep: tuple[int, ...]
    bytes: int
    reasons: dict[int, tuple[str, ...]]
    keys: tuple[str, ...]
    rewrite: tuple[int, ...] = ()
    weights_only: tuple[int, ...] = ()
    written: int = 0
    bases: tuple[int, ...] = ()
    reversed_shares: ReversedShares | None = None

    def __repr__(self) -> str:
        """Short line with what the plan frees."""
        count = humanize.count(len(self.delete), "checkpoint")
        again = f", writes {len(self.rewrite)} again" if self.rewrite else ""
        return f"<PrunePlan deletes {count} and {humanize.size(self.bytes)}, keeps {len(self.keep)}{again}>"


def reversed_shares(rewritten: Iterable[DirectoryManifest]) -> ReversedShares | None:
    """Sizes of the checkpoints that became deltas against newer ones.

    Args:
        rewritten: the manifests afterwards.

    Returns:
        None if all became keyframes.
    """
    shares = [after.stored_bytes / after.raw_bytes for after in rewritten if after.depth and after.raw_bytes]
    return ReversedShares(fmean(shares), max(shares)) if shares else None


def frees_bytes(
    before: Mapping[PlaceT, DirectoryManifest],
    after: Mapping[PlaceT, DirectoryManifest],
    waiting: Collection[PlaceT],
    keep: Keep,
) -> bool:
    """True if checkpoints need fewer bytes once all of an ended chain have become deltas against newer ones.

    The last ones are deleted one by one, while an ended chain stays until its newest checkpoint is deleted. So for them
    the mean over that time counts, as long as they never need more than the tensors themselves.

    Args:
        before: all that are kept, as they were.
        after: those that have been written again.
        waiting: those that have not; each is taken to need as many bytes as those that are deltas now.
    """
    deltas = [manifest.stored_bytes for manifest in after.values() if manifest.depth]
    rest = [after.get(place, manifest) for place, manifest in before.items() if place not in waiting]
    needed = sum(chain.file_sizes(rest).values()) + len(waiting) * sum(deltas) / max(1, len(deltas))
    total = sum(chain.file_sizes(before.values()).values())
    if keep.best is not None or keep.every is not None:
        return needed < total
    others = [manifest for place, manifest in before.items() if place not in after and place not in waiting]
    shared, count = sum(chain.file_sizes(others).values()), len(after) + len(waiting)
    mean = (needed - shared) * (count + 1) / (2 * count)
    return mean < total - shared and needed <= sum(manifest.raw_bytes for manifest in before.values())


def parents_to_reverse(
    kept: Mapping[PlaceT, DirectoryManifest], keep: Keep, needs_none: Callable[[DirectoryManifest], bool]
) -> dict[PlaceT, PlaceT | None]:
    """Checkpoints to write again, newest first, each with the newer one that it becomes a delta against.

    One of the last becomes a delta against the next newer one, since it goes before that. One of the best may stay
    longer than all others, so it becomes a delta against the newest. One that stays for good becomes a keyframe.

    Args:
        kept: manifests with steps, by place, oldest first.
        needs_none: True if a checkpoint that stays for good depends on none that goes.
    """
    places = [*kept]
    parents: dict[PlaceT, PlaceT | None] = {}
    newest = newer = places[-1] if places else None
    for index, place in reversed([*enumerate(places[:-1], -len(places))]):
        manifest = kept[place]
        is_permanent = keep.is_permanent(manifest.step or 0)
        if manifest.weights_only or (is_permanent and needs_none(manifest)):
            continue  # as they stay as they are, no other becomes a delta against them: their bases may be targets
        is_one_of_last = keep.best is None or index >= -(keep.last or 1)
        parents[place] = None if is_permanent else newer if is_one_of_last else newest
        newer = place if is_one_of_last else newer
    return parents


def plan_prune(storage: Storage, listing: Listing, keep: Keep, now: datetime) -> PrunePlan:
    """Decide what to delete without writing anything again; nothing is deleted.

    Raises: as `plan_deletion`.
    """
    plan, freed = plan_deletion(listing, keep, now), FreedBytes(storage, listing)
    freed.add(plan.keys)
    return replace(plan, bytes=freed.total)


def plan_deletion(listing: Listing, keep: Keep, now: datetime) -> PrunePlan:
    """As `plan_prune`, without looking at sizes: `bytes` is 0.

    Raises:
        PolicyError: the best are to be kept by a metric that no checkpoint has.
        StorageError: a manifest cannot be read now, so its bases are unknown.
        VersionError: a newer release wrote one.
    """
    listing.raise_unreadable()
    check_metric(listing.visible.values(), keep)
    decision = apply_policy(listing.manifests.values(), keep, now, forgotten=listing.forgotten)
    broken = {step for step in listing.broken if step in listing.forgotten}
    reasons = {**decision.reasons, **dict.fromkeys(broken, ("forgotten, and its manifest is broken",))}
    drop = sorted({*decision.drop, *broken})
    manifests = [layout.manifest_key(step) for step in sorted(drop, key=listing.depth, reverse=True)]
    unreadable = {step for step in listing.broken if step not in drop}
    files = listing.unneeded_keys({*decision.keep}, unreadable)
    keys = (*manifests, *(key for key in files if key not in {*manifests}))
    selected = {*decision.selected}
    bases = tuple(step for step in decision.keep if step not in selected)
    return PrunePlan(tuple(drop), decision.keep, 0, dict(sorted(reasons.items())), keys, bases=bases)


class FreedBytes:
    """Counts the bytes that deleting keys frees; a file with several names counts if all of them are deleted.

    Args:
        storage: the store's.
        listing: its content before anything is deleted.
    """

    def __init__(self, storage: Storage, listing: Listing) -> None:
        self._storage = storage
        self._digests = {} if isinstance(storage, LocalStorage) else dict(_digests(listing))
        self._names = Counter(self._digests[key] for key in listing.keys if key in self._digests)
        self._deleted_names: Counter[object] = Counter()
        self._files: dict[object, tuple[int, int]] = {}

    @property
    def total(self) -> int:
        """Bytes that are freed once all keys that were added are deleted."""
        return sum(size for file, (names, size) in self._files.items() if self._deleted_names[file] >= names)

    def add(self, keys: Iterable[str]) -> None:
        """Count keys, each once, before they are deleted."""
        for key in set(keys):
            with suppress(NotFoundError, FileNotFoundError):
                if isinstance(self._storage, LocalStorage):
                    status = (self._storage.path / key).stat()
                    file: object = (status.st_dev, status.st_ino)
                    self._files.setdefault(file, (status.st_nlink, status.st_size))
                else:
                    file = self._digests.get(key, key)
                    if file not in self._files:
                        self._files[file] = self._names.get(file, 1), object_size(self._storage, key)
                self._deleted_names[file] += 1


def inode_key(storage: Storage, key: str) -> object:
    """Equal for two keys only if they are the same file."""
    if isinstance(storage, LocalStorage):
        with suppress(OSError):
            status = (storage.path / key).stat()
            return status.st_dev, status.st_ino
    return key


def _digests(listing: Listing) -> Iterable[tuple[str, str]]:
    """(key, header digest) of every payload and link that a manifest names; equal digests share bytes."""
    for manifest in listing.manifests.values():
        yield from ((manifest.key(payload.name), payload.digest) for payload in manifest.payloads)
        yield from ((manifest.key(base.name), base.digest) for base in manifest.bases if base.name)
