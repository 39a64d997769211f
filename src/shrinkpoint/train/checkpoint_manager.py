"""Saves a training loop's state into a store and restores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from shrinkpoint import validate
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import (
    ChainError,
    FormatError,
    MismatchError,
    NotFoundError,
    PolicyError,
    StorageError,
    warn_user,
)
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.storage import LocalStorage, ObjectCache, Storage, resolve_storage
from shrinkpoint.store import Keep, SaveReport, Store, StoreRestore, layout
from shrinkpoint.store.chain import manifest_identity, use_current
from shrinkpoint.store.history import oldest_first, place_of
from shrinkpoint.store.identify import refuse_run
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.mirror import Mirror
from shrinkpoint.store.newest import restore_newest
from shrinkpoint.store.retention import NO_METRIC, best_first, check_keep
from shrinkpoint.store.save_settings import OnSave, SaveSettings
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.rng import get_rng_state, set_rng_state
from shrinkpoint.train import partial_restore, state_dicts
from shrinkpoint.train.background import BackgroundSaver, make_save_plan
from shrinkpoint.train.mirror_uploader import MirrorUploader
from shrinkpoint.train.restore_result import RestoreResult
from shrinkpoint.train.save_decision import SaveDecisionPolicy, ScheduledSaver
from shrinkpoint.train.state_alignment import (
    NAMES_KEY,
    AlignedState,
    align_state,
    collect_names,
    iter_leaves,
)
from shrinkpoint.train.state_dicts import mark_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("shrinkpoint")


class CheckpointManager(ScheduledSaver, BackgroundSaver):
    """Saves a training loop's state into a store, and restores the loop from it.

    Memory on the host, beyond the loop's own: the reference of the next delta, one state, but a byte a value of what is
    on lattices (the scheme `fisher`). With `background`, or a state that is not on the CPU, one state more: the
    snapshot that is being written, whose memory the next one takes. With `background`, CUDA devices that have twice the
    state's size free hold a copy of it until it has been planned for and brought to the host.

    Args:
        where: a directory or a URL such as "s3://bucket/run", which need not exist yet, or a storage.
        scheme, keyframe_every, background, threads, on_save: see `SaveSettings`. Where a scheme searches in a group of
            replicas, all of them call `save`, and only the first one writes.
        keep: which checkpoints to keep, applied after every save; None keeps all. With `Keep(moments_last=)` a chain is
            written again without moments once none of its checkpoints is to keep them: beside the loop with
            `background`, else before `save` returns.
        mirror: a second place for the checkpoints, such as "s3://bucket/run". Each is copied there after it is
            committed, behind the loop, by the process that saves; `keep` is applied there, too. Restores look there.
        save_decision_policy: what `should_save` asks; None: the loop decides itself.
        group: the ranks that all call `should_save` at every step and get the same answer; None: this process alone.
        cache: of a URL: a directory on this machine for payloads that are read and written, which are not fetched
            again, or an `ObjectCache`; None: that of the environment variable `SHRINKPOINT_CACHE`, if it is set.

    Attributes:
        store: the store.
        mirror: the mirror as a store, to read from; None: there is none.

    Raises:
        PolicyError: an invalid argument.
        MissingExtraError: a URL, and what reaches it is not installed.
    """

    is_sharded: ClassVar[bool] = False  # in a group, the first rank saves for all

    def __init__(
        self,
        where: str | Path | Storage,
        *,
        scheme: str | Scheme = "lossless",
        keep: Keep | None = None,
        keyframe_every: int | None = 20,
        background: bool = False,
        threads: int | None = None,
        mirror: str | Path | Storage | None = None,
        save_decision_policy: SaveDecisionPolicy | None = None,
        group: ProcessGroup | None = None,
        cache: str | Path | ObjectCache | None = None,
        on_save: OnSave | None = None,
    ) -> None:
        BackgroundSaver.__init__(self, SaveSettings(scheme, keyframe_every, background, threads, on_save=on_save))
        ScheduledSaver.__init__(self, save_decision_policy, group)
        self._keep = check_keep(keep)
        self.store = Store(where, keyframe_every=keyframe_every, threads=threads, cache=cache)
        self.store.chain_limit.keep = self._keep
        self._take_scheme(self.store.place)
        self.mirror: Store | None = None
        self._uploader: MirrorUploader | None = None
        if mirror is not None:
            self.mirror = Store(resolve_storage(mirror, "mirror", cache=cache), threads=threads)
            self._uploader = MirrorUploader(Mirror(self.store.storage, self.mirror.storage, self._keep))
        self._has_warned = False  # that retention deletes nothing
        self._is_locked = False  # the store's lock is ours

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_is_locked": False}

    def __repr__(self) -> str:
        return f"CheckpointManager({self.store.storage.describe()!r})"

    @property
    def journal_directory(self) -> Path | None:
        """Directory of a `Journal` of these checkpoints; None in a bucket, where nothing is appended."""
        storage = self.store.storage
        return storage.path.absolute() / "journal" if isinstance(storage, LocalStorage) else None

    @property
    def _is_saving(self) -> bool:
        return self._worker.is_running

    def _previous_manifests(self) -> Iterable[Manifest]:
        return self.store.list()

    def latest_step(self) -> int | None:
        """The step that was saved last, which `restore()` tries first; None in an empty store. A mirror is not asked.

        Raises:
            StorageError: the store cannot be read.
        """
        return self.store.manifest().step if self.store.has_checkpoint() else None

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] = "min") -> int | None:
        """The step with the best value of a metric, of equals the newer one; None if none has it, or only nan.

        Args:
            metric: name under which it was passed to `save`; None: that of `keep`, with its mode, or else "val_loss".
            mode: "min" or "max".

        Raises:
            PolicyError: another mode.
            StorageError: the store cannot be read.
        """
        rule = Keep(best=1, metric=metric or "val_loss", mode=mode)
        if metric is None and self._keep is not None and self._keep.best is not None:
            rule = self._keep
        best = best_first(oldest_first(self.store.list(), place_of), rule)
        return best[0].step if best else None

    @property
    def mirror_lag(self) -> int:
        """Number of checkpoints that are committed, and not in the mirror yet; 0 without a mirror."""
        return 0 if self._uploader is None else self._uploader.lag

    def flush(self) -> None:
        """Wait until the last save is durable, and the mirror has all that the store has.

        Raises:
            Exception: whatever a save raised in the background, once.
            StorageError: the mirror lacks something; it is copied later, by this manager or another one.
        """
        self.wait()
        if self._uploader is not None:
            self._uploader.flush()

    def close(self) -> None:
        """Wait as `flush` does, release the locks, and free the memory. A later `save` opens the store again.

        A mirror is waited for if this manager has saved something.

        Raises:
            Exception: whatever a save raised in the background, once.
            StorageError: the mirror lacks something; it is copied later, by this manager or another one.
            PolicyError: `on_save` calls this in the background, where the save is not over.
        """
        self._worker.refuse_own_thread("close")
        try:
            super().close()
        finally:
            self._close_schedule()

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
        """Save the state as it is now: the caller may take the next step as soon as this returns.

        Args:
            step: number of the training step, at least 0.
            model, optimizer, scheduler, more: objects with `state_dict`, or dicts and lists of such.
            extra: any nest of tensors and plain values; `requires_grad` of tensors that are not parameters is not kept.
            metrics: numbers, for `Keep(best=)` and for people. A scheme that measures the loss evaluates the unchanged
                weights less often where one of them is what its `evaluate` returns for these.
            rng: save the states of the random generators too.

        Returns:
            The report of the save; None if another process writes. In the background a `PendingReport`, which has the
            same attributes: asking for one waits for the save, `done()` does not.

        Raises:
            StateError: the state holds something that cannot be stored.
            PolicyError: an object without `state_dict`, a reserved name, a step or metric that is not a number.
            LockedError: another process saves here.
            StorageError: writing failed; every checkpoint that was there still loads.
            Exception: whatever the previous save raised in the background; then this call has saved nothing.
        """
        validate.check_bool("rng", rng)  # a generator, say, which would not be saved
        with self._next_save():
            if isinstance(self._scheme, Planner):
                self._scheme.run_on_writer(lambda: self._lock_store(step))
            else:
                self._lock_store(step)
            values = validate.as_floats(metrics)
            if isinstance(self._scheme, Planner):
                self._scheme.note_metrics(values)
            objects = _check_names({"model": model, "optimizer": optimizer, "scheduler": scheduler, **more})
            state = {name: state_dicts.collect_state_dicts(obj, name) for name, obj in objects.items()}
            if extra is not None:
                state["extra"] = extra
            if names := collect_names(objects):
                state[NAMES_KEY] = names
            if rng:
                state["rng"] = get_rng_state()
            flat_state = mark_parameters(flatten(state), objects)
            reference = self.store.reference if isinstance(self._scheme, Planner) else None
            plan = make_save_plan(self._scheme, flat_state, reference, objects, defer=self._background)
            if plan is None:
                return None

            def write(copy: FlatState, scheme: Scheme, adopt: bool) -> SaveReport:
                return self.store.save(
                    step,
                    copy,
                    scheme=scheme,
                    metrics=values,
                    adopt=adopt,
                    lossy_restores=self._lossy_restores,
                    stall=self._stall,
                )

            report = self._save(f"saving step {step}", flat_state, plan, write, partial(self._finish_save, step))
            if self._schedule is not None:
                self._schedule.note_saved(step, values)
            return report

    @torch.inference_mode(False)  # training cannot change tensors that are made within that mode
    @torch.no_grad()
    def restore(
        self,
        step: int | Literal["latest", "best"] | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        rng: bool = True,
        strict: bool = True,
        only: partial_restore.RestoreSelection | None = None,
        max_bytes: int | None = None,
        **more: Any,
    ) -> RestoreResult[int] | None:
        """Load a checkpoint into the objects of the loop.

        Args:
            step: None or "latest": the newest checkpoint that loads, which is the one that was saved last, and the
                result lists those that were skipped. A number, or "best" for `best_step()`: that checkpoint or an
                error; the next save goes on from there, and the checkpoints saved after it count as older.
            model, optimizer, scheduler, more: what was passed to `save`; objects that are left out are not changed.
            rng: set the random generators too, if they were saved.
            strict: False: a model may lack keys or have others, and objects that were not saved are not changed;
                values may be rounded to a model's dtype, and an optimizer or scheduler may be of another kind than the
                one that was saved, as far as torch itself accepts its state. A parameter whose slots were not saved
                begins afresh. The result names what is missing and unexpected, and so does a warning in the log.
            only: patterns such as `["layers.3.*"]`: restore only the tensors of `model` whose names match; all others,
                and the random generators, keep their values. Or parts of tensors by pattern:
                `{"layers.3.*": ..., "embed.weight": slice(0, 512), "head.weight": mask}`; see
                `train.partial_restore`, and `RankShard` for the shard of one rank. With `optimizer`, its values for
                the same parameters are restored at the same indices; a value that exists once per parameter (its step
                count) only with all of the parameter. After a failure that lost a part of a model this loses less
                than restoring all of it (arXiv 1810.07354, partial recovery).
            max_bytes: how much memory the tensors of one checkpoint may take; None: as for `shrinkpoint.load`.

        Returns:
            Where training resumes; None if the store is empty.

        Raises:
            MismatchError: the checkpoint does not fit; an optimizer is to be restored from one that has weights only
                (`Keep(moments_last=)`); a framework has saved in the directory. Nothing was changed, but what an object
                of your own class changes before it refuses its state: such objects are loaded first.
            NotFoundError: there is no such checkpoint, or none that loads.
            ChainError, FormatError: the checkpoint of that step does not load.
            StorageError: the store cannot be read.
            PolicyError: `only` together with objects other than a model and its optimizer, without a match, or with a
                part that a tensor does not have.
        """
        for name, flag in (("rng", rng), ("strict", strict)):
            validate.check_bool(name, flag)
        start = time.perf_counter()
        self.join()
        step = self._find_step(step) if isinstance(step, str) else step
        objects = _check_names({"model": model, "optimizer": optimizer, "scheduler": scheduler, **more})
        selection = None if only is None else partial_restore.select_parts(objects, only)
        weights_only = not state_dicts.has_optimizer(objects)
        line = replace(self.store.line)
        checkpoint = self._load_checkpoint(step, weights_only=weights_only, max_bytes=max_bytes)
        self.store.line = line  # until all of it is restored
        if checkpoint is None:
            return None
        if checkpoint.where != self.store.storage.describe():
            _log.info("step %d is restored from the mirror %s", checkpoint.step, checkpoint.where)
        where = f"{checkpoint.where}, step {checkpoint.step}"
        fields: dict[str, Any] = {"skipped": checkpoint.skipped, "where": checkpoint.where}
        if selection is None:
            aligned = _load_all(objects, checkpoint.state, where, rng=rng, strict=strict)
            fields |= {"missing_keys": aligned.missing_keys, "unexpected_keys": aligned.unexpected_keys}
            self.store.line.note_restored(place_of(checkpoint.manifest))
            if self.mirror is not None:
                with suppress(StorageError):
                    self.store.line.mirrored = self.mirror.scan().others(-1).by_name
            self._restored_step = checkpoint.step
            if self._schedule is not None:
                self._schedule.go_back(checkpoint.step)
        else:
            partial_restore.restore_parts(selection, objects, checkpoint.state, where, strict=strict)
        self._resume_from(checkpoint.manifest)
        seconds, extra = time.perf_counter() - start, checkpoint.state.get("extra")
        return RestoreResult.from_manifest(checkpoint.manifest, seconds, extra=extra, **fields)

    def _find_step(self, step: str) -> int | None:
        """The step that `restore` is asked for; None: the newest that loads."""
        if step == "latest":
            return None
        where = self.store.storage.describe()
        if step != "best":
            raise validate.argument_error("step", step, "a whole number, None, 'latest' or 'best'", "pass one of them")
        best = self.best_step()
        if best is None:
            expected, do = "one with the metric of best_step()", "pass metrics= to save, or restore a step by number"
            raise NotFoundError(where, found="no best checkpoint", expected=expected, do=do)
        return best

    def _last_reference(self) -> Reference | None:
        return self.store.reference

    def reset_after_fork(self) -> None:
        super().reset_after_fork()
        self._is_locked = False

    def _release(self) -> None:
        self._is_locked = False
        try:
            if self._uploader is not None:
                self._uploader.close()
        finally:
            self.store.close()

    def _lock_store(self, step: int) -> None:
        """Take the store's lock at the first save, so that a second process is refused here, not in the background."""
        layout.check_step(step)
        if not self._is_locked:
            self.store.lock()
            self._is_locked = True
            if self._uploader is not None:  # what an earlier process has not copied
                self._uploader.start()

    def _finish_save(self, step: int) -> None:
        try:
            if self._keep is not None:
                self._apply_retention(self._keep)
        finally:
            if self._uploader is not None:
                self._uploader.start(step)

    def _apply_retention(self, keep: Keep) -> None:
        """Delete what `keep` does not keep; warn once if it means nothing yet because no checkpoint has its metric."""
        try:
            self.store.prune(keep, dry_run=False, defer=True)
        except PolicyError as error:
            if error.where != NO_METRIC:
                raise
            if not self._has_warned and len(self.store.steps()) > 1:
                self._has_warned = True
                text = f"{error.found}: no checkpoint is deleted. Pass metrics={{{keep.metric!r}: ...}} to save"
                warn_user(f"{NO_METRIC}: {text}", UserWarning)

    def _load_checkpoint(self, step: int | None, *, weights_only: bool, max_bytes: int | None) -> StoreRestore | None:
        """The checkpoint of a step, or the newest that loads; None if there is none.

        Args:
            weights_only: one without moments will do.
        """
        if step is not None:
            # Where the store has no checkpoint of the step that loads, the mirror may have one
            try:
                return self._load_from(self.store, step, weights_only, max_bytes)
            except (NotFoundError, FormatError, ChainError, StorageError, MismatchError) as error:
                if self.mirror is None or step in self.store.scan().forgotten:
                    raise
                try:
                    return self._load_from(self.mirror, step, weights_only, max_bytes)
                except (NotFoundError, MismatchError):
                    raise error from None
        stores, exists = [self.store], self.store.has_checkpoint()
        if self.mirror is not None:
            try:
                exists |= self.mirror.has_checkpoint()
                stores.append(self.mirror)
            except StorageError as error:
                if not exists:
                    raise
                warn_user(f"the mirror cannot be read, and may have a newer checkpoint: {error}", UserWarning)
        if not exists:
            refuse_run(self.store.storage, to_write=False)
            return None
        return restore_newest(stores, keep=self.store, weights_only=weights_only, max_bytes=max_bytes)

    def _load_from(self, store: Store, step: int, weights_only: bool, max_bytes: int | None) -> StoreRestore:
        def load(manifest: Manifest) -> StoreRestore:
            if manifest.weights_only and not weights_only:
                raise store.weights_only_error(manifest)
            state = store._load(manifest, None, True, store is self.store, max_bytes)
            return StoreRestore(step, state, manifest, where=store.storage.describe())

        return use_current(lambda: store.manifest(step), load, manifest_identity)


def _check_names(objects: Mapping[str, Any]) -> dict[str, Any]:
    if NAMES_KEY in objects:
        raise PolicyError(NAMES_KEY, found="a name that is taken", expected="another name", do="rename the object")
    for name in ("extra", "metrics"):
        if name in objects:
            raise PolicyError(name, found="an argument of restore", do=f"take `{name}` from what restore returns")
    for name, other, expected in (("model", "optimizer", "a module"), ("optimizer", "model", "an optimizer")):
        value = objects.get(name)
        for obj in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]:
            is_module = isinstance(obj, nn.Module)
            if is_module != hasattr(obj, "param_groups") and is_module != (name == "model"):
                raise PolicyError(name, found=validate.type_name(obj), expected=expected, do=f"pass it as {other}=")
    return {name: obj for name, obj in objects.items() if obj is not None}


def _load_all(objects: Mapping[str, Any], state: Any, where: str, *, rng: bool, strict: bool) -> AlignedState:
    """Load a state into the objects, after a check that it fits all of them.

    Objects whose state only they themselves can check are loaded first: where one of them refuses it, no model,
    optimizer or scheduler has changed.
    """
    if not isinstance(state, dict):
        found, expected = validate.type_name(state), "what a CheckpointManager saves"
        raise MismatchError(where, found=found, expected=expected, do="use Store.load")
    missing = [name for name in objects if name not in state]
    if missing and strict:
        saved_names = ", ".join(repr(name) for name in state if name != NAMES_KEY)
        found, do = f"no {missing[0]!r} in the checkpoint, only {saved_names}", "leave it out, or strict=False"
        raise MismatchError(where, found=found, expected="all that is to be restored", do=do)
    present = {name: obj for name, obj in objects.items() if name in state}
    models = {
        name: obj for name, obj in present.items() if all(isinstance(leaf, nn.Module) for _, leaf in iter_leaves(obj))
    }
    for name, obj in models.items():  # models first: where layers differ, so do the optimizer's parameters
        state_dicts.check_state_dicts(obj, state[name], f"{where}, {name}", strict=strict)
    aligned = align_state(objects, state, where, strict=strict)
    options: dict[str, Any] = {"strict": strict, "saved_dtypes": aligned.saved_dtypes}
    for name, obj in present.items():
        if name in models:
            continue
        state_dicts.check_state_dicts(obj, aligned.state[name], f"{where}, {name}", **options)
    for name, obj in sorted(present.items(), key=lambda item: state_dicts.is_checked(item[1])):
        state_dicts.load_state_dicts(obj, aligned.state[name], f"{where}, {name}", **options)
    if rng and "rng" in state:
        set_rng_state(state["rng"])
    aligned.report(where)
    return aligned
