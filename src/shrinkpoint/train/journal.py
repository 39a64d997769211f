"""`Journal`: the gradients of each step, appended between checkpoints and replayed after a crash (arXiv 2509.04084)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from shrinkpoint import validate
from shrinkpoint.comm.ddp import DDPCompression
from shrinkpoint.comm.fsdp import FSDPCompression
from shrinkpoint.comm.link import CompressorLike
from shrinkpoint.errors import MismatchError, PolicyError, warn_user
from shrinkpoint.guard import read_guard
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.storage import LocalStorage
from shrinkpoint.store import SaveReport, layout
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.threads import reset_in_children
from shrinkpoint.train.journal_segments import ChainPlace, JournalDirectory, SegmentWriter
from shrinkpoint.train.journal_state import JournalState, OptimizerWatch
from shrinkpoint.train.restore_result import RestoreResult

_RECORD_OVERHEAD = 256  # Bytes that a record has at most besides blobs, their names and the numbers of messages
_DO = "resume with the same `update` and objects, or give up these steps: manager.restore, then journal.save"
T = TypeVar("T")


class LoopCheckpoints(Protocol):
    """Manager of the checkpoints between which a journal is written.

    Attributes:
        is_sharded: True if every rank saves its part, in calls that all make; else the first rank saves for all.
        journal_directory: where the journal of these checkpoints is; None: on no disk.
    """

    is_sharded: bool

    @property
    def journal_directory(self) -> Path | None: ...

    @property
    def scheme(self) -> Scheme: ...

    @property
    def last_report(self) -> SaveReport | None:
        """The report of the last save that is committed, without waiting."""

    def save(self, step: int, **arguments: Any) -> SaveReport | None: ...

    def restore(self, step: int | None = None, **arguments: Any) -> RestoreResult[int] | None: ...

    def wait(self) -> object:
        """Wait until the last save is durable."""


@dataclass(frozen=True)
class JournalRestore:
    """A checkpoint that was restored, and the steps that were replayed on top of it.

    Attributes:
        step: the last step that the state contains: the loop goes on with the next one.
        replayed: number of steps from the journal.
        checkpoint: what the manager's `restore` returned.
        seconds: of restoring and replaying.
    """

    step: int
    replayed: int
    checkpoint: RestoreResult[int]
    seconds: float


class Journal:
    """Appends each step's averaged gradients to a file between checkpoints, and makes the steps again after a crash.

    All that an optimizer gets to know of a step are the gradients. They are appended with the states of the random
    generators and the buffers that changed. After a crash the last checkpoint is restored, and each step is made again
    from its record: weights, optimizer and whatever else `update` changes are as after the last whole record, bit for
    bit. All ranks make the same calls, and share the directory.

    With `compress_ddp` the messages of the average are kept, which every rank has decoded: nothing is encoded, and they
    are in the file of rank 0 alone. On a group of one rank nothing is sent: gradients are kept as they are, 32 bits a
    value. With `compress_fsdp` each rank keeps its shards of the averaged gradients: as they are, 32 bits a value in
    all files together, or rounded by `shard_compressor`, in training, too.

    `update` is called in training and in replay. It may do whatever follows from gradients and from the objects that
    are saved: clip, step an optimizer, a scheduler or a GradScaler, zero gradients; it must not compute gradients.
    Nothing else may change gradients, weights or those objects between the backward pass and the next one.

    Args:
        manager: saves the checkpoints, without a lossy scheme: a `CheckpointManager` with replicas, a
            `shrinkpoint.train.dcp.Manager` with shards.
        compression: what `compress_ddp` or `compress_fsdp` returned.
        update: called without arguments after each backward pass.
        directory: where the files are; None: `journal` in the manager's directory.
        max_bytes: of a rank's records since the last save: what would exceed it is not appended, with a warning, and
            `is_full` asks for a save before that. None: no bound.
        sync_every: steps between two fsyncs. None: none but when a file begins and at `close`. A process that is killed
            loses nothing either way; this is about machines that lose power.
        check_every: the digest of all weights is in one of so many records, and is compared in replay.
        feedback: "refuse": a compressor with error feedback is refused, as each rank's memory of what its messages have
            lost is in no record. "restart": after a replay all memories are empty: the state is that of the last step,
            bit for bit, and the steps from there on are not those of an uninterrupted run.
        shard_compressor: with `compress_fsdp`, a compressor such as "q4:64": each rank rounds its shards of the
            averaged gradients before `update`, and a record has the bits of that. None: they are not rounded.

    Raises:
        PolicyError: an invalid argument; gradients that do not follow from a record alone.
    """

    def __init__(
        self,
        manager: LoopCheckpoints,
        compression: DDPCompression | FSDPCompression,
        update: Callable[[], object],
        *,
        directory: str | Path | None = None,
        max_bytes: int | None = None,
        sync_every: int | None = None,
        check_every: int = 16,
        feedback: Literal["refuse", "restart"] = "refuse",
        shard_compressor: CompressorLike = None,
    ) -> None:
        kinds, do = (DDPCompression, FSDPCompression), "pass what compress_ddp(model) or compress_fsdp(model) returned"
        expected = "what compress_ddp or compress_fsdp returned"
        validate.check_instance("journal, compression", compression, kinds, expected=expected, do=do)
        _check_manager(manager, is_sharded=isinstance(compression, FSDPCompression))
        if not callable(update):
            do = "pass a function that steps the optimizer and zeroes gradients"
            raise validate.argument_error("journal, update", update, "a function", do)
        self._max_bytes = validate.check_optional_int("journal, max_bytes", max_bytes)
        self._sync_every = validate.check_optional_int("journal, sync_every", sync_every, none_meaning="for none")
        self._check_every = validate.check_int("journal, check_every", check_every)
        validate.check_choice("journal, feedback", feedback, ("refuse", "restart"))
        self._directory = JournalDirectory(_place(manager, directory))
        if compression.has_feedback and feedback == "refuse":
            do = 'compress with e.g. "q4:64", or pass feedback="restart", which empties it at a replay'
            found = "error feedback, which is not on the wire"
            raise PolicyError("journal", found=found, expected="a compressor without it", do=do)
        self._manager, self._compression, self._update = manager, compression, update
        self._group = compression.group
        self._rank: int = self._group.rank()
        self._record = compression.record_gradients(shard_compressor)
        self._state = JournalState(compression.module, compression.parameters())
        self._lock = ExitStack()
        self._lock_fd: int | None = None
        self._gradient_bytes = 0  # of a record, on the rank that has most
        self._writer: SegmentWriter | None = None
        self._step: int | None = None  # the last one that the state contains; None: it is not known
        self._is_closed = self._has_failed = False  # `update` has raised: the state is that of no step
        self._num_bytes = 0  # of the records since the last save, the same on all ranks
        self._has_stopped = self._is_clean = False
        self._watch = OptimizerWatch(self._record)
        self._old_report = manager.last_report  # of a save whose older segments are deleted
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """In a forked child: the open segment and its lock are the parent's."""
        self._writer, self._step, self._lock, self._lock_fd = None, None, ExitStack(), None

    def __repr__(self) -> str:
        return f"Journal({str(self._directory.path)!r})"

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush the file to the disk, and let go of the model and of the directory."""
        self._delete_covered()
        self._is_closed = True
        self._compression.stop_recording()
        writer, self._writer, self._step = self._writer, None, None
        with self._lock:
            self._lock_fd = None
            if writer is not None:
                with closing(writer):
                    writer.sync()

    @property
    def is_full(self) -> bool:
        """True if the next step would exceed `max_bytes`: save now.

        It is the same on all ranks if their buffers change in the same steps.
        """
        return self._has_stopped or not self._has_room()

    def step(self, step: int) -> None:
        """Append the gradients of the last backward pass, and call `update`.

        Args:
            step: number of the training step: one more than the last one.

        Raises:
            PolicyError: nothing was saved or restored before; another step; no backward pass since the last one, or one
                in `update`; gradients that were changed since, or that no record has; an optimizer whose settings, such
                as learning rates, were changed since the last `update`.
            StorageError: appending failed. `update` was not called, and the steps before are safe: call this again once
                there is space. Where the journal was deleted, they are not: call `save` first.
            Exception: whatever `update` raises. The step is not in the journal, and the state is that of no step:
                restore before the next one.
        """
        self._check_usable()
        if self._step is None or self._writer is None:
            found, do = "no state to begin with", "call restore before the loop, and save if it returns None"
            raise PolicyError("journal", found=found, do=do)
        if layout.check_step(step) != self._step + 1:
            found, expected = f"step {step}", f"step {self._step + 1}"
            raise PolicyError("journal", found=found, expected=expected, do="number steps one by one")
        messages = self._record.messages(step)
        self._watch.check()
        last = self._step
        if not self._is_clean:  # another course of the run may have left segments of this rank behind the last step
            self._directory.delete(lambda start, rank: rank == self._rank and start > last)
            self._is_clean = True
        is_appended = self._append(self._writer, step, messages)
        self._record.clear()
        self._step = None
        try:
            self._run_update()
        except BaseException:
            self._has_failed = True
            if is_appended:  # a replay would raise again
                self._writer.undo()
            raise
        self._watch.note()
        self._step = last + 1
        self._delete_covered()

    def save(self, step: int, **arguments: Any) -> SaveReport | None:
        """Save a checkpoint, and begin the journal behind it; on all ranks.

        The records before go once the checkpoint is committed: until then a crash resumes from the one before it.

        Args:
            step: the last one that was made; before the first one any number.
            arguments: of the manager's `save`.

        Raises:
            PolicyError: another step than the last one; or `update` has raised, and the state is that of no step.
            LockedError: another process writes this journal.
            StorageError: the journal cannot be written, on a rank; nothing was saved, and the old file goes on.
            Exception: whatever the manager's `save` raises.
        """
        self._check_usable()
        layout.check_step(step)
        if self._step is not None and step != self._step:
            found, do = f"step {step}", "save after `step` of the same number"
            raise PolicyError("journal", found=found, expected=f"step {self._step}", do=do)
        if self._step is None:
            self._is_clean = False
        self._open()
        # Before the checkpoint is there every rank has a file that continues it, or it would lack the generators.
        self._begin(step)
        self._old_report = self._manager.last_report
        is_saver = self._manager.is_sharded or self._rank == 0
        report = self._manager.save(step, **arguments) if is_saver else None
        self._watch.begin(arguments)
        self._delete_covered()
        return report

    def restore(self, step: int | None = None, *, strict: bool = True, **arguments: Any) -> JournalRestore | None:
        """Restore a checkpoint on every rank, and replay the steps behind it.

        Args:
            step: of the checkpoint; None: the newest that loads.
            strict: False: a damaged record ends the replay, with a warning, as the end of the file does; and the steps
                of a rank count for nothing if another one has no file.
            arguments: of the manager's `restore`: the objects that `update` changes.

        Returns:
            Where training resumes; None if there is no checkpoint.

        Raises:
            CorruptError: a record in the middle is damaged. Objects are as in the checkpoint.
            MismatchError: the journal was written with other settings or on other ranks, or its steps lead to other
                weights than they did: `update` does something else, or more than follows from what is saved; or the
                checkpoint was saved without the journal, and steps behind it would be lost.
            LockedError: another process writes this journal.
            Exception: whatever the manager's `restore` or `update` raises.
        """
        begin = time.perf_counter()
        validate.check_bool("journal, strict", strict)
        self._check_open()
        self._step = None
        self._open()
        checkpoints: list[RestoreResult[int] | None] = []

        def find_last() -> tuple[int | None, tuple[int, int] | None]:
            checkpoint = self._manager.restore(step, **arguments)
            checkpoints.append(checkpoint)
            if checkpoint is None:
                return None, None
            if strict:
                self._directory.check_passed(checkpoint.step, self._rank)
            return checkpoint.step, self._directory.last_place(checkpoint.step, self._rank, strict=strict)

        places = self._agree(find_last)
        steps = [saved for saved, _ in places]
        if len(set(steps)) > 1:
            found, do = f"checkpoints of steps {steps}", "let all ranks read one store"
            raise MismatchError("journal", found=found, expected="one step", do=do)
        [checkpoint] = checkpoints
        self._has_failed = False
        if checkpoint is None:
            return None
        start = checkpoint.step
        self._record.clear()
        self._state.prepare(arguments)
        last = _common_place([place for _, place in places], start, strict=strict)
        self._replay(start, last) if last else self._begin(start)
        self._is_clean = False
        self._delete_before(start)  # what a run that was killed had not deleted yet
        assert self._step is not None
        self._watch.begin(arguments)
        if step is not None and self._rank == 0:
            self._warn_of_later(self._step)
        return JournalRestore(self._step, self._step - start, checkpoint, time.perf_counter() - begin)

    def rehearse(self, **arguments: Any) -> JournalRestore:
        """Restore and replay now, and compare what comes of it with the state as it is.

        A run whose steps do not give the same bits again, such as one with kernels that are not deterministic or with
        an `update` that depends on what is not saved, is found before a crash depends on it. Call it once, after some
        steps, on all ranks; it takes the time of a restore.

        Args:
            arguments: the objects, as of `restore`.

        Raises:
            MismatchError: something differs. The state is that of the replay.
            PolicyError: no step was made.
            Exception: whatever `restore` raises.
        """
        step = self._step
        if step is None or self._has_stopped:
            found, do = "a journal that is full" if self._has_stopped else "no step", "call rehearse after a step"
            raise PolicyError("journal, rehearse", found=found, expected="a journal with the last step", do=do)
        self._manager.wait()
        before = self._state.digests(arguments)
        restored = self.restore(**arguments)

        def compare() -> None:
            after = self._state.digests(arguments)
            different = [name for name in before | after if before.get(name) != after.get(name)]
            if restored is None or restored.step != step or different:
                found = f"a replay that differs in {', '.join(different[:4])}" if different else "other steps"
                do = "use deterministic kernels (torch.use_deterministic_algorithms), and save all that `update` reads"
                raise MismatchError(f"journal, step {step}", found=found, expected="the bits of the run", do=do)

        self._agree(compare)
        assert restored is not None
        return restored

    def _check_open(self) -> None:
        if self._is_closed:
            raise PolicyError("journal", found="a closed journal", expected="an open one", do="make a new one")

    def _check_usable(self) -> None:
        self._check_open()
        if self._has_failed:
            found, expected = "an `update` that raised: the state is that of no step", "the state of a step"
            raise PolicyError("journal", found=found, expected=expected, do="call restore first")

    def _warn_of_later(self, last: int) -> None:
        """Warn of checkpoints of another course: after a crash the newest one is restored, whoever has made it."""
        later = [start for start in self._directory.starts(self._rank) if start > last]
        if later:
            text = f"the run goes on from step {last}, but has checkpoints up to step {later[-1]} or later"
            warn_user(f"{text}. Delete them, or a crash resumes from the newest of them", UserWarning)

    def _agree(self, compute: Callable[[], T]) -> list[T]:
        return [compute()] if self._group.size() == 1 else gather_or_raise(compute, self._group)

    def _open(self) -> None:
        """Lock this rank's files, again if that was deleted, and learn the most bytes that a rank's gradients take."""

        def lock() -> int:
            if self._lock_fd is not None and not self._directory.holds_lock(self._rank, self._lock_fd):
                self._lock_fd = None
                self._lock.close()  # by now another process may have taken the place
            if self._lock_fd is None:
                self._lock_fd = self._lock.enter_context(self._directory.lock(self._rank))
            return self._record.nbytes

        self._gradient_bytes = max(self._agree(lock))

    # Writing

    def _append(self, writer: SegmentWriter, step: int, messages: Any) -> bool:
        """Append a record, unless it would exceed the bound; whether it did."""
        blobs = self._state.blobs()
        if self._has_stopped or not self._has_room():
            if not self._has_stopped:
                text = f"the journal has no room for step {step} and later ones until the next save"
                warn_user(f"{text}. Save more often, or raise max_bytes={self._max_bytes}", UserWarning)
            self._has_stopped = True
            return False
        has_digest = writer.num_records % self._check_every == 0
        if not writer.num_records & (writer.num_records - 1):  # seldom, as it decodes all: a loop repeats its mistakes
            self._record.check(self._compression.counts())
        fields = {"counts": self._compression.counts(), "weights": self._state.weight_digest() if has_digest else None}
        if self._rank == 0 or not self._record.is_shared:
            blobs["gradients"] = [tensor_bytes(message).data for message in messages]
        sync = self._sync_every is not None and (writer.num_records + 1) % self._sync_every == 0
        writer.append(step, fields, blobs, sync=sync)
        self._num_bytes += self._record_bytes()
        return True

    def _begin(self, step: int) -> None:
        """Begin a segment behind a step on all ranks: its first record has the generators, and no gradients.

        If that fails on a rank, all stay in the segment that is open.
        """
        created: list[SegmentWriter] = []
        path = self._directory.path_of(step, self._rank)

        def create() -> None:
            fields = {"counts": self._compression.counts(), "weights": self._state.weight_digest()}
            created.append(SegmentWriter.create(path, step, self._header(), fields, self._state.blobs()))

        try:
            self._agree(create)
        except BaseException:
            for writer in created:
                if self._writer is not None and self._writer.start == step:  # whose file the new one has replaced
                    self._writer.close()
                    self._writer = writer
                else:
                    writer.close()
                    path.unlink(missing_ok=True)
            raise
        self._use(created[0], step, 0)

    def _use(self, writer: SegmentWriter, step: int, num_bytes: int) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._step, self._num_bytes, self._has_stopped = writer, step, num_bytes, False

    def _run_update(self) -> None:
        self._update()
        if not self._record.is_empty:
            found, do = "a backward pass in `update`", "compute gradients in the loop; LBFGS cannot be replayed"
            raise PolicyError("journal", found=found, expected="an `update` from gradients alone", do=do)

    def _delete_covered(self) -> None:
        """Delete the segments before the checkpoint that was committed last, if a segment goes on from there.

        In the background that may be the one before the last: the next save has begun when it is committed.
        """
        report = self._manager.last_report
        if self._writer is None or report is None or report is self._old_report or report.step is None:
            return
        if report.step <= self._writer.start and self._directory.path_of(report.step, self._rank).is_file():
            self._delete_before(report.step)
            self._old_report = report

    def _delete_before(self, start: int) -> None:
        """Delete the segments of all ranks that begin before a step, on rank 0."""
        if not self._rank:
            self._directory.delete(lambda other, rank: other < start)

    def _header(self) -> dict[str, Any]:
        """Settings that a journal and the run that resumes from it share."""
        return {"rank": self._rank, "ranks": self._group.size(), "config": self._compression.config()}

    def _has_room(self) -> bool:
        return self._max_bytes is None or self._num_bytes + self._record_bytes() <= self._max_bytes

    def _record_bytes(self) -> int:
        counts = len(json.dumps(self._compression.counts()))
        return self._gradient_bytes + self._state.nbytes + counts + _RECORD_OVERHEAD

    # Replaying

    def _replay(self, start: int, target: tuple[int, int]) -> None:
        """Make the steps up to a place again, and open the file behind it.

        Ranks agree before each step: one that cannot make it would leave the others in a collective of `update`.
        """
        places = self._places(start)
        place, num_bytes, reached = None, 0, list[ChainPlace]()

        def prepare() -> int:
            reached.append(self._prepare(places))
            return reached[-1].record.step

        while place is None or (place.record.step, place.start) != target:
            steps = self._agree(prepare)
            place = reached.pop()
            if len(set(steps)) > 1:
                found, do = f"records of steps {steps}", "restore with the files of one run"
                raise MismatchError("journal", found=found, expected="one step", do=do)
            num_bytes = 0 if place.begins_segment else num_bytes + self._record_bytes()
            if not place.begins_segment:
                self._run_update()
        last, path = place, self._directory.path_of(place.start, self._rank)
        writers: list[SegmentWriter] = []

        def reopen() -> None:
            self._compression.restart(last.record.fields.get("counts"))
            writers.append(SegmentWriter.reopen(path, last))

        self._agree(reopen)
        self._use(writers[0], last.record.step, num_bytes)

    def _places(self, start: int) -> Iterator[tuple[ChainPlace, ChainPlace]]:
        """This rank's records, and those with the gradients of the same steps."""
        own_chain = self._directory.chain(start, self._rank)
        if self._rank == 0 or not self._record.is_shared:
            yield from ((place, place) for place in own_chain)
            return
        with_gradients = (place for place in self._directory.chain(start, 0) if not place.begins_segment)
        for place in own_chain:
            yield place, place if place.begins_segment else next(with_gradients, place)

    def _prepare(self, places: Iterator[tuple[ChainPlace, ChainPlace]]) -> ChainPlace:
        """Set generators, buffers and gradients to those of the next step."""
        place, shared = next(places, (None, None))
        if place is None or shared is None or shared.record.step != place.record.step:
            found, expected = "a file that ends before those of other ranks", "the same steps on all ranks"
            raise MismatchError(str(self._directory.path), found=found, expected=expected, do=_DO)
        own = self._header()
        if place.begins_segment and place.fields != own:
            different = [key for key in own if place.fields.get(key) != own[key]]
            found = ", ".join(f"{key} {place.fields.get(key)!r}" for key in different)[:300]
            expected = ", ".join(f"{key} {own[key]!r}" for key in different)[:300]
            do = "resume with the settings of the run, or give up its steps: manager.restore, then journal.save"
            raise MismatchError(place.where, found=found, expected=expected, do=do)
        record = place.record
        where = f"{place.where}, {'at the beginning' if place.begins_segment else f'before step {record.step}'}"
        weights = record.fields.get("weights")
        if weights is not None and weights != self._state.weight_digest():
            raise MismatchError(where, found="other weights than those of the run", do=_DO)
        with read_guard(where):
            self._state.load(record)
            if not place.begins_segment:
                if "gradients" not in shared.record.blobs:
                    expected = f"those of step {record.step} in the file of this rank or of rank 0"
                    raise MismatchError(where, found="no gradients", expected=expected, do=_DO)
                data, counts = shared.record.blobs["gradients"], record.fields.get("counts")
                self._record.fill_gradients(record.step, counts, data)
        return place


def _common_place(places: list[tuple[int, int] | None], start: int, *, strict: bool) -> tuple[int, int] | None:
    """The last place that every rank can replay to; None: there is none.

    Raises:
        MismatchError: a rank has no file, while there are steps in those of others.
    """
    present = [place for place in places if place is not None]
    if len(present) == len(places):
        return min(present)
    lost = max((last for last, _ in present), default=start) - start
    if lost:
        absent = ", ".join(str(rank) for rank, place in enumerate(places) if place is None)
        found, expected = f"no file of rank {absent}, and {lost} steps in others", f"{len(places)} files of one run"
        do = "resume on as many ranks as the run had, in a shared directory; or lose the steps with strict=False"
        error = MismatchError(f"journal, after step {start}", found=found, expected=expected, do=do)
        if strict:
            raise error
        warn_user(f"the journal is not replayed: {error}", UserWarning)
    return None


def _check_manager(manager: LoopCheckpoints, *, is_sharded: bool) -> None:
    own, other = "a CheckpointManager", "a shrinkpoint.train.dcp.Manager"
    if isinstance(manager, type) or getattr(manager, "is_sharded", None) is not is_sharded:
        expected = f"{other}, for shards" if is_sharded else f"{own}, for replicas"
        do = "pass the manager that saves the loop"
        raise validate.argument_error("journal, manager", manager, expected, do)
    if not isinstance(manager.scheme, Lossless):
        found, do = f"the scheme {manager.scheme.id}", 'save with scheme="lossless"'
        raise PolicyError("journal", found=found, expected="a checkpoint to replay on bit for bit", do=do)


def _place(manager: LoopCheckpoints, directory: str | Path | None) -> Path:
    if directory is not None:
        return LocalStorage(directory).path.absolute()
    if manager.journal_directory is None:
        found, do = "checkpoints in a place without appending", "pass directory=, on a disk that all ranks share"
        raise PolicyError("journal", found=found, expected="a directory", do=do)
    return manager.journal_directory
