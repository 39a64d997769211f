"""An Accelerator whose states are saved and loaded here."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from shrinkpoint import arguments
from shrinkpoint.errors import ChainError, FormatError, MismatchError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.schemes import Scheme, Settling
from shrinkpoint.state import unflatten
from shrinkpoint.store import SaveReport
from shrinkpoint.store import folder as folders
from shrinkpoint.store.foldermanifest import FolderManifest
from shrinkpoint.store.unfold import decode
from shrinkpoint.train.accelerate import contents, places
from shrinkpoint.train.accelerate.everyone import everyone
from shrinkpoint.train.accelerate.sharded import Sharded, is_sharded
from shrinkpoint.train.trail import Passed, Trail, settle

_log = logging.getLogger("shrinkpoint")
_BROKEN = (ChainError, FormatError, NotFoundError, StorageError)


@dataclass(frozen=True)
class Resumed:
    """Where training goes on.

    Attributes:
        folder: of the checkpoint.
        manifest: what it says of itself; None: Accelerate itself had saved it.
        passed: newer ones that do not load, the newest first, and why.
    """

    folder: Path
    manifest: FolderManifest | None
    passed: tuple[Passed, ...] = ()


class Shrink:
    """Saves and loads what an Accelerator has prepared and registered.

    All its methods but `close` are called by all processes, like those of the Accelerator. The main
    process writes (with `save_on_each_node`, one on each node), and every process gets its own random numbers back.
    Where a model is sharded (FSDP2), every process writes its shards.

    Memory on the host: on the process that writes, one state; with `background`, or a state on a GPU, two.

    Args:
        accelerator: models may be prepared, and objects registered, before or after.
        scheme: "lossless", or a scheme of one's own settings. What it measures with gets the bare model, on the
            process that writes.
        keyframe_every: each chain has at most this many checkpoints, its keyframe included; None: no bound.
        background: `save_state` returns as soon as the state is copied, and writing goes on beside the loop.
        threads: native threads for coding; None: every core.

    Raises:
        PolicyError: a scheme nobody knows, or a number out of range.
    """

    def __init__(
        self, accelerator: Accelerator, *, scheme: str | Scheme = "lossless", keyframe_every: int | None = 20,
        background: bool = False, threads: int | None = None,
    ) -> None:  # fmt: skip
        expected, do = "an Accelerator", "pass the one that prepares the model"
        arguments.kind("accelerator", accelerator, Accelerator, expected=expected, do=do)
        if accelerator.project_configuration.project_dir is not None:
            places.root_of(accelerator)
        self.stall = 0.0
        """Seconds for which the last `save_state` held up the loop."""
        self._accelerator, self._background = accelerator, background
        self._trail = Trail(scheme=scheme, keyframe_every=keyframe_every, background=background, threads=threads)
        self._sharded = Sharded(accelerator, scheme=scheme, keyframe_every=keyframe_every, threads=threads)
        self._threads = threads
        self._loaded: Path | None = None  # what the next delta stands on, before the first save
        self._saved = False

    def __enter__(self) -> Shrink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()  # with all the others: what fails on one of them is an error on each
        self.close()

    def save_state(
        self,
        output_dir: str | Path | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        keyframe: bool = False,
    ) -> SaveReport | None:
        """Save, as `Accelerator.save_state` does; older checkpoints beyond `total_limit` go once this one is whole.

        Args:
            output_dir: where, unless checkpoints are numbered (`automatic_checkpoint_naming`). What is there stands
                until this one is whole.
            step: for people; None: the number of the checkpoint, if it has one.
            metrics: numbers, for people.
            keyframe: True: do not make a delta; not with shards.

        Returns:
            What the save did; None in the background, where `wait` returns it, on processes that do not write, and
            with shards.

        Raises:
            StateError: an object holds something that cannot be stored.
            PolicyError: no directory, one whose number is taken, or an engine that keeps its state to itself.
            StorageError: writing failed; every checkpoint that was there still loads.
            whatever the save before raised in the background; then this call has saved nothing.
        """
        began = time.perf_counter()
        try:
            contents.check_engine(self._accelerator)
            everyone(self._sharded.wait)
            folder = everyone(lambda: self._entered(output_dir))[0]
            if step is None and places.root_of(self._accelerator) is not None:
                step = self._accelerator.save_iteration
            report = self._write(folder, step=step, metrics=metrics, note=note, keyframe=keyframe)
            self._saved = True
            self._accelerator.project_configuration.iteration += 1
            if not self._background:
                self._prune()
            return report
        finally:
            self.stall = time.perf_counter() - began

    def load_state(self, input_dir: str | Path | None = None, *, strict: bool = True) -> Resumed:
        """Load, as `Accelerator.load_state` does; the next save is a delta against what was loaded.

        Numbered checkpoints go on behind the newest that is there.

        Args:
            input_dir: what `save_state` was given, or a directory that Accelerate itself has saved; None: the newest
                numbered checkpoint that loads on all processes, and what is passed over is said aloud.
            strict: False: a model may lack keys or have others.

        Raises:
            NotFoundError: there is no such checkpoint, or none that loads.
            MismatchError: it does not fit what is prepared and registered; nothing was changed.
            ChainError, FormatError, StorageError: the checkpoint of that directory does not load.
        """
        contents.check_engine(self._accelerator)
        self._settle()
        passed: list[Passed] = []
        for folder in everyone(lambda: self._found(input_dir))[0]:
            try:
                manifest = self._load(folder, strict=strict)
            except _BROKEN as error:
                if input_dir is not None:
                    raise
                passed.append(Passed(folder, str(error)))
                self._say("%s is passed over: %s", folder, error)
            else:
                self._count_on()
                return Resumed(folder, manifest, tuple(passed))
        reasons = "; ".join(one.reason for one in passed)
        do = "look at what is said of each of them, or begin again"
        raise places.NoCheckpointError(
            str(passed[-1].folder.parent), found=f"no checkpoint that loads ({reasons})", do=do
        )

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable, on all processes.

        Returns:
            What the last save that succeeded did; None if there is none yet, and on processes that do not write.

        Raises:
            whatever a save raised in the background, once.
        """
        report: list[SaveReport | None] = []
        everyone(self._sharded.wait)
        everyone(lambda: report.append(self._trail.wait()))
        self._prune()
        return report[0]

    def close(self) -> None:
        """Wait, and free the memory. A later `save_state` begins a new chain.

        Raises:
            whatever a save raised in the background, once.
        """
        try:
            self._sharded.wait()
        finally:
            self._trail.close()

    def go_on_from(self, other: Shrink) -> None:
        """Take the place of one that has loaded, and has saved nothing yet."""
        folder, self._loaded = other._loaded, other._loaded
        other.close()

        def load() -> None:
            if folder is not None and (self._writes or self._helps):
                self._trail.load(folder)

        try:
            everyone(load)
        except _BROKEN as error:
            self._say("%s has gone since it was loaded, the next checkpoint is a keyframe: %s", folder, error)

    @property
    def saved(self) -> bool:
        """Whether it has saved anything."""
        return self._saved

    @property
    def _writes(self) -> bool:
        each = self._accelerator.project_configuration.save_on_each_node
        return bool(self._accelerator.is_local_main_process if each else self._accelerator.is_main_process)

    @property
    def _helps(self) -> bool:
        """Whether this process takes part in a search that another one leads."""
        return isinstance(self._trail.scheme, Settling) and not self._trail.scheme.leads

    def _say(self, text: str, *args: object) -> None:
        if self._accelerator.is_main_process:
            _log.warning(text, *args)

    def _settle(self) -> None:
        """Wait for what is being written; that it fails concerns no checkpoint that is there."""
        for wait in (self._sharded.wait, self._trail.wait):
            try:
                everyone(wait)
            except Exception as error:
                self._say("the last save failed: %s", error)

    def _entered(self, output_dir: str | Path | None) -> Path:
        """Where to save, once nothing is being written and there is room."""
        if not self._writes:
            return Path()
        folder = places.to_save(self._accelerator, output_dir)
        self._trail.wait()
        self._prune()
        _make(folder)
        return folder

    def _write(self, folder: Path, **about: Any) -> SaveReport | None:
        collected: list[contents.Collected] = []
        spread = contents.sharded(self._accelerator)

        def collect() -> dict[str, Any]:
            collected.append(contents.collect(self._accelerator, folder, models=not spread))
            return {} if spread else collected[0].own

        ranks = everyone(collect)
        if spread:
            self._sharded.save(folder, collected[0].state, collected[0].own, background=self._background, **about)
            return None
        state, parts = collected[0].state | {"ranks": ranks}, collected[0].parts
        reports: list[SaveReport | None] = []

        def save() -> None:
            if self._writes or self._helps:
                reports.append(self._trail.save(folder, state, parts=parts, extra={"framework": "accelerate"}, **about))

        everyone(save)
        return reports[0] if reports else None

    def _found(self, input_dir: str | Path | None) -> list[Path]:
        return places.to_load(self._accelerator, input_dir) if self._accelerator.is_main_process else []

    def _load(self, folder: Path, *, strict: bool) -> FolderManifest | None:
        self._loaded = None
        settle(folder)
        if everyone(lambda: places.is_stock(folder))[0]:
            self._trail.close()
            everyone(lambda: self._accelerator.load_state(str(folder)))
            return None
        manifests: list[FolderManifest] = []
        read = folders.check if self._writes else folders.read_manifest
        everyone(lambda: manifests.append(read(folder)))
        manifest = manifests[0]
        if is_sharded(manifest):
            self._load_shards(folder)
            return manifest
        states: list[Any] = []
        everyone(lambda: states.append(self._read(folder)))
        models = list(self._accelerator._models)
        everyone(lambda: self._fit(states[0], models, folder, strict=strict))
        everyone(lambda: contents.apply(self._accelerator, states[0], models, str(folder), strict=strict))
        return manifest

    def _load_shards(self, folder: Path) -> None:
        """The small things first: that they fit is known before anything has changed."""
        self._trail.close()
        state = self._sharded.read(folder)
        everyone(lambda: self._fit(state, [], folder, strict=True))
        self._sharded.load(folder)
        everyone(lambda: contents.apply_rest(self._accelerator, state, str(folder)))

    def _read(self, folder: Path) -> Any:
        """The state that a folder holds; only who will write goes on from it."""
        if contents.sharded(self._accelerator):
            found, do = (
                "the state of a model that was not sharded",
                "load it without FSDP, and save the model by itself",
            )
            raise MismatchError(str(folder), found=found, expected="shards", do=do)
        if self._writes or self._helps:
            state = self._trail.load(folder).state
            self._loaded = folder
            return state
        decoded = decode(folder, threads=self._threads)
        return unflatten(decoded.tree, decoded.reference.tensors, where=str(folder), max_bytes=decoded.left)

    def _fit(self, state: Any, models: list[Any], folder: Path, *, strict: bool) -> None:
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, str(folder))
        contents.check(self._accelerator, state, models, str(folder), strict=strict)

    def _count_on(self) -> None:
        root = places.root_of(self._accelerator)
        if root is not None:
            settings = self._accelerator.project_configuration
            settings.iteration = max(settings.iteration, everyone(lambda: places.next_free(root))[0])

    def _prune(self) -> None:
        """Delete what is too many; a checkpoint that cannot be deleted is no reason to end a run."""
        root = places.root_of(self._accelerator)
        if root is None or not self._writes:
            return
        try:
            for folder in places.too_many(root, self._accelerator.project_configuration.total_limit):
                self._discard(folder)
        except OSError as error:
            _log.warning("%s", error)

    def _discard(self, folder: Path) -> None:
        try:
            self._trail.discard(folder)
        except ShrinkpointError as error:
            _log.warning("%s", error)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(str(folder), found=f"{error}", expected="a directory", do="name another one") from error
