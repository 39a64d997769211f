"""A training loop's face to a store."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shrinkpoint import validate
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.schemes.base import PlanningScheme, Resumable, Scheme
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.storage import Storage
from shrinkpoint.store import Keep, SaveReport, SkippedCheckpoint, Store, layout
from shrinkpoint.store import StoreRestore as Found
from shrinkpoint.store.retention import NO_METRIC, check_keep
from shrinkpoint.tensors.flat_state import FlatState, snapshot
from shrinkpoint.tensors.flatten import flatten
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.train import partial_restore, state_dicts
from shrinkpoint.train.background import BackgroundWorker
from shrinkpoint.train.planning import make_plan
from shrinkpoint.train.state_dicts import as_floats, mark_parameters


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        seconds: to find, read, decode and load it.
        raw_bytes: of the state's tensors.
        depth: deltas that were applied on top of the keyframe.
        scheme: which scheme wrote it.
        lossy_restores: how many restores from lossy checkpoints lie behind this state.
    """

    seconds: float
    raw_bytes: int
    depth: int
    scheme: str
    lossy_restores: int


@dataclass(frozen=True)
class RestoreResult:
    """Where a training loop goes on.

    Attributes:
        step: of the checkpoint.
        extra: what was passed to `save` as `extra`.
        metrics: what was passed as `metrics`.
        skipped: newer checkpoints that do not load, newest first, with the reasons.
        report: what the restore did.
    """

    step: int
    extra: Any
    metrics: Mapping[str, float]
    skipped: tuple[SkippedCheckpoint, ...]
    report: RestoreReport


class CheckpointManager:
    """Saves a training loop's state every now and then, and brings the loop back to where it was.

    Memory on the host, beyond the loop's own: one state, the reference of the next delta; with `background`, or a
    state that is not on the CPU, a second one, the snapshot that is being written.

    Args:
        where: a directory, which need not exist yet, or a storage.
        scheme: "lossless", or a scheme of one's own settings. One that searches evaluates `model` during `save`, before
            it returns; in a group of replicas all of them call `save`, and only the first one writes.
        keep: which checkpoints to keep, applied after every save; None keeps all.
        keyframe_every: each chain has at most this many checkpoints, its keyframe included.
        background: `save` returns as soon as the state is copied, and writing goes on beside the loop.
        threads: native threads for coding; None: every core.

    Raises:
        PolicyError: an argument that makes no sense.
    """

    def __init__(
        self,
        where: str | Path | Storage,
        *,
        scheme: str | Scheme = "lossless",
        keep: Keep | None = None,
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
    ) -> None:
        self.stall_seconds = 0.0
        """Seconds for which the last `save` held up the loop."""
        self._scheme, self._keep = get_scheme(scheme), check_keep(keep)
        self._background = validate.check_bool("background", background)
        self.store = Store(where, keyframe_every=keyframe_every, threads=threads)
        self._has_warned = False  # that nothing can be deleted
        self._worker = BackgroundWorker()
        self._last_report: SaveReport | None = None
        self._is_locked = False  # the store's lock is ours
        self._reference_snapshot: FlatState | None = None  # the snapshot that the store holds as its reference
        self._free_snapshot: FlatState | None = None  # the one before it, whose memory is free
        self._lossy_restores = 0  # behind the state that is being trained

    def __repr__(self) -> str:
        return f"Manager({self.store.storage.describe()!r})"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def save(
        self,
        step: int,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        extra: Any = None,
        metrics: Mapping[str, Any] | None = None,
        rng: bool = True,
        **more: Any,
    ) -> SaveReport | None:
        """Save. The state is that of this moment: the caller may step as soon as this returns.

        Args:
            model, optimizer, scheduler, more: anything with `state_dict`, or dicts and lists of such.
            extra: any nest of tensors and plain values; of tensors that are no parameters `requires_grad` is not kept.
            metrics: numbers, for `Keep(best=)` and for people.
            rng: save the random generators too.

        Returns:
            What the save did; None in the background, where `wait` returns it.

        Raises:
            StateError: the state holds something that cannot be stored.
            PolicyError: an object without `state_dict`, a name that is taken, a step or metric that is no number.
            LockedError: another process saves here.
            StorageError: writing failed; every checkpoint that was there still loads.
            whatever the save before raised in the background; then this call has saved nothing.
        """
        began = time.perf_counter()
        try:
            self._worker.wait()
            if isinstance(self._scheme, PlanningScheme):
                self._scheme.run_on_writer(lambda: self._lock_store(step))
            else:
                self._lock_store(step)
            measured = as_floats(metrics)
            parts = _check_names({"model": model, "optimizer": optimizer, "scheduler": scheduler, **more})
            flat = mark_parameters(flatten(_collect(parts, extra, rng=rng)), parts)
            scheme = make_plan(self._scheme, flat, self.store.reference, parts)
            if scheme is None:
                return None
            if not self._background and all(tensor.device.type == "cpu" for tensor in flat.tensors.values()):
                return self._write(step, flat, scheme, measured, adopt=False)
            copy = self._take_snapshot(flat)
            if not self._background:
                return self._write(step, copy, scheme, measured, adopt=True)
            self._worker.start(f"saving step {step}", lambda: self._write(step, copy, scheme, measured, adopt=True))
            return None
        finally:
            self.stall_seconds = time.perf_counter() - began

    def restore(
        self,
        step: int | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        rng: bool = True,
        strict: bool = True,
        only: partial_restore.RestoreSelection | None = None,
        **more: Any,
    ) -> RestoreResult | None:
        """Bring everything back to a checkpoint.

        Args:
            step: None: the newest that loads, and what was skipped is in the result. A number: that one or an error.
            model, optimizer, scheduler, more: what was passed to `save`; what is left out stays as it is.
            rng: set the random generators too, if they were saved.
            strict: False: a model may lack keys or have others, and objects that were not saved stay as they are;
                values may be rounded to a model's dtype, and an optimizer or scheduler may be of another kind than the
                one that was saved, as far as torch itself takes its state.
            only: patterns such as ["layers.3.*"]: of `model`, and nothing else is restored then, the tensors whose
                names fit one; all others, and the random generators, stay as they are. Or parts of tensors by pattern:
                {"layers.3.*": ..., "embed.weight": slice(0, 512), "head.weight": mask}; see `train.recovery`, and
                `RankShard` for what a rank holds. With `optimizer`, what it keeps of these parameters comes back in the
                same places; what there is one of for a parameter (its count of steps) only with all of it. After a
                failure that took a part of a model this loses less than going back with all of it (arXiv 1810.07354,
                partial recovery).

        Returns:
            Where to go on; None if the store is empty.

        Raises:
            MismatchError: the checkpoint does not fit; nothing was changed.
            NotFoundError: there is no such checkpoint, or none that loads.
            ChainError, FormatError: the checkpoint of that step does not load.
            StorageError: the store cannot be read.
            PolicyError: `only` together with something else than a model and its optimizer, fitting none of the
                tensors, or a part that a tensor does not have.
        """
        began = time.perf_counter()
        self._worker.join()
        wanted = _check_names({"model": model, "optimizer": optimizer, "scheduler": scheduler, **more})
        chosen = None if only is None else partial_restore.select_parts(wanted, only)
        found = self._load_checkpoint(step)
        if found is None:
            return None
        if chosen is None:
            _load_all(wanted, found.state, f"step {found.step}", rng=rng, strict=strict)
        else:
            partial_restore.restore_parts(chosen, wanted, found.state, f"step {found.step}", strict=strict)
        one = found.manifest
        self._lossy_restores = one.lossy_restores + one.is_lossy
        if isinstance(self._scheme, Resumable):
            self._scheme.resume(one.loss, self._lossy_restores)
        seconds = time.perf_counter() - began
        report = RestoreReport(seconds, one.raw_bytes, one.depth, one.scheme, self._lossy_restores)
        return RestoreResult(found.step, found.state.get("extra"), one.metrics, found.skipped, report)

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable.

        Returns:
            What the last save that succeeded did; None if there is none yet.

        Raises:
            whatever a save raised in the background, once.
        """
        self._worker.wait()
        return self._last_report

    def close(self) -> None:
        """Wait, let other processes save, free the memory. A later `save` opens the store again.

        Raises:
            whatever a save raised in the background, once.
        """
        try:
            self._worker.wait()
        finally:
            self._reference_snapshot, self._free_snapshot, self._is_locked = None, None, False
            self.store.close()

    def _lock_store(self, step: int) -> None:
        """Take the store's lock at the first save, so that a second process is refused here, not in the background."""
        layout.check_step(step)
        if not self._is_locked:
            self.store.lock()
            self._is_locked = True

    def _take_snapshot(self, state: FlatState) -> FlatState:
        spare, self._free_snapshot = self._free_snapshot, None
        return snapshot(state, reuse=spare)

    @torch.no_grad()
    def _write(
        self, step: int, state: FlatState, scheme: Scheme, metrics: dict[str, float], *, adopt: bool
    ) -> SaveReport:
        """Save, remember which snapshot the store now holds, apply retention."""
        last, self._reference_snapshot = (
            self._reference_snapshot,
            None,
        )  # should saving fail, nobody knows which of them is held
        report = self.store.save(
            step, state, scheme=scheme, metrics=metrics, adopt=adopt, lossy_restores=self._lossy_restores
        )
        if adopt:
            self._reference_snapshot, self._free_snapshot = state, last
        self._last_report = report
        if self._keep is not None:
            self._apply_retention(self._keep)
        return report

    def _apply_retention(self, keep: Keep) -> None:
        """Apply retention; where "the best" means nothing yet, nothing is deleted, and that is said once."""
        try:
            self.store.prune(keep, dry_run=False)
        except PolicyError as error:
            if error.where != NO_METRIC:
                raise
            if not self._has_warned and len(self.store.steps()) > 1:
                self._has_warned = True
                text = f"{error.found}: no checkpoint is deleted. Pass metrics={{{keep.metric!r}: ...}} to save"
                warnings.warn(f"{NO_METRIC}: {text}", UserWarning, stacklevel=4)

    def _load_checkpoint(self, step: int | None) -> Found | None:
        if step is not None:
            manifest = self.store.manifest(step)
            return Found(manifest.step, self.store.load(step), manifest)
        listing = self.store.scan()
        if not {*listing.manifests, *listing.broken} - listing.forgotten:
            return None
        return self.store.restore()


def _check_names(named_objects: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("extra", "metrics"):
        if name in named_objects:
            raise PolicyError(name, found="an argument of restore", do=f"take `{name}` from what restore returns")
    return {name: part for name, part in named_objects.items() if part is not None}


def _collect(named_objects: Mapping[str, Any], extra: Any, *, rng: bool) -> dict[str, Any]:
    state = {name: state_dicts.collect_state_dicts(part, name) for name, part in named_objects.items()}
    if extra is not None:
        state["extra"] = extra
    if rng:
        state["rng"] = get_rng_state()
    return state


def _load_all(named_objects: Mapping[str, Any], state: Any, where: str, *, rng: bool, strict: bool) -> None:
    """Check that everything fits, then load it."""
    if not isinstance(state, dict):
        raise MismatchError(
            where, found=f"a {type(state).__name__}", expected="what a Manager saves", do="use Store.load"
        )
    missing = [name for name in named_objects if name not in state]
    if missing and strict:
        found = f"no {missing[0]!r} in the checkpoint, only " + ", ".join(map(repr, state))
        raise MismatchError(
            where, found=found, expected="all that is to be restored", do="leave it out, or strict=False"
        )
    present = {name: part for name, part in named_objects.items() if name in state}
    for name, part in present.items():
        state_dicts.check_state_dicts(part, state[name], f"{where}, {name}", strict=strict)
    for name, part in present.items():
        state_dicts.load_state_dicts(part, state[name], f"{where}, {name}", strict=strict)
    if rng and "rng" in state:
        set_rng_state(state["rng"])
