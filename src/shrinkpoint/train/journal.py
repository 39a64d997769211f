"""`Journal`: what was sent in each step, appended between checkpoints and replayed after a crash (arXiv 2509.04084)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shrinkpoint import validate
from shrinkpoint._native import Hasher
from shrinkpoint.comm.ddp import DDPCompression
from shrinkpoint.container.journal_file import JournalRecord, encode_journal_header, encode_journal_record
from shrinkpoint.errors import MismatchError, PolicyError, warn_user
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.storage import LocalStorage
from shrinkpoint.storage.append_file import AppendFile
from shrinkpoint.store import SaveReport, layout
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.rng import rng_from_bytes, rng_to_bytes
from shrinkpoint.train.checkpoint_manager import CheckpointManager
from shrinkpoint.train.journal_segments import ChainPlace, JournalDirectory
from shrinkpoint.train.restore import RestoreResult

_RECORD_OVERHEAD = 1 << 10
"""Bytes that a record has at most besides gradients, generators and buffers."""
_BUFFER = "buffer/"


@dataclass(frozen=True)
class JournalRestore:
    """A checkpoint that was restored, and the steps that were replayed on top of it.

    Attributes:
        step: the last step that the state contains: the loop goes on with the next one.
        replayed: number of steps from the journal.
        checkpoint: what `CheckpointManager.restore` returned.
        seconds: of restoring and replaying.
    """

    step: int
    replayed: int
    checkpoint: RestoreResult[int]
    seconds: float


class Journal:
    """Appends each step's averaged gradients, as they were on the wire, to a file between checkpoints.

    The messages that `compress_ddp` has decoded are all that an optimizer gets to know of a step. They are appended as
    they are, with the states of the random generators and the buffers that changed; nothing is encoded. After a crash
    the last checkpoint is restored, and each step is made again from its messages: weights, optimizer and whatever else
    `update` changes are as after the last whole record, bit for bit. All ranks make the same calls. Gradients are in
    the file of rank 0; each rank has one for its generators and buffers. Ranks share the directory.

    `update` is called in training and in replay. It may do whatever follows from gradients and from the objects that
    are saved: clip, step an optimizer, a scheduler or a GradScaler, zero gradients; it must not compute gradients.
    Nothing else may change gradients, weights or those objects between the backward pass and the next one.

    On a group of one rank nothing is sent: gradients are appended as they are, 32 bits a value.

    Args:
        manager: saves the checkpoints; without a lossy scheme, in a directory.
        replicas: what `compress_ddp` returned.
        update: called without arguments after each backward pass.
        directory: where the files are; None: `journal` in the manager's directory.
        max_bytes: of the records since the last save: what would exceed it is not appended, with a warning, and
            `is_full` asks for a save before that. None: no bound.
        sync_every: steps between two fsyncs. None: none but when a file begins and at `close`. A process that is killed
            loses nothing either way; this is about machines that lose power.
        check_every: the digest of all weights is in one of so many records, and is compared in replay.
        feedback: "refuse": a compressor with error feedback is refused, as each rank's memory of what its messages have
            lost is not on the wire. "restart": after a replay all memories are empty: the state is that of the last
            step, bit for bit, and the steps from there on are not those of an uninterrupted run.

    Raises:
        PolicyError: an invalid argument; gradients that do not follow from the messages alone.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        replicas: DDPCompression,
        update: Callable[[], object],
        *,
        directory: str | Path | None = None,
        max_bytes: int | None = None,
        sync_every: int | None = None,
        check_every: int = 16,
        feedback: Literal["refuse", "restart"] = "refuse",
    ) -> None:
        expected, do = "a CheckpointManager", "pass the manager that saves the loop"
        validate.check_instance("journal, manager", manager, CheckpointManager, expected=expected, do=do)
        expected, do = "what compress_ddp returned", "pass replicas = compress_ddp(model)"
        validate.check_instance("journal, replicas", replicas, DDPCompression, expected=expected, do=do)
        if not callable(update):
            do = "pass a function that steps the optimizer and zeroes gradients"
            raise validate.argument_error("journal, update", update, "a function", do)
        self._max_bytes = validate.check_optional_int("journal, max_bytes", max_bytes)
        self._sync_every = validate.check_optional_int("journal, sync_every", sync_every, none_meaning="for none")
        self._check_every = validate.check_int("journal, check_every", check_every)
        validate.check_choice("journal, feedback", feedback, ("refuse", "restart"))
        _check_feedback(replicas, feedback)
        self._directory = JournalDirectory(_place(manager, directory))
        self._manager, self._replicas, self._update = manager, replicas, update
        self._model, self._group = replicas.model.module, replicas.model.process_group
        self._rank: int = self._group.rank()
        self._file: AppendFile | None = None
        self._digest = b""
        self._step: int | None = None  # the last one that the state contains
        self._start = 0  # the step after which the open segment begins
        self._num_bytes = 0  # of the records since the last save, the same on all ranks
        self._has_stopped = self._is_clean = False
        self._num_records = 0
        self._buffers = self._buffer_digests()  # of those that have not changed
        self._rng_bytes = sum(map(len, rng_to_bytes().values()))
        self._covered = -1  # the step of the last committed save
        self._record = replicas.record_averages()

    def __repr__(self) -> str:
        return f"Journal({str(self._directory.path)!r})"

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush the file to the disk, and let go of the model."""
        self._replicas.stop_recording()
        file, self._file = self._file, None
        if file is not None:
            with closing(file):
                file.sync()

    @property
    def is_full(self) -> bool:
        """Whether the next step would exceed `max_bytes`: save now.

        It is the same on all ranks if their buffers change in the same steps.
        """
        bound = self._num_bytes + self._record_bytes()
        return self._has_stopped or (self._max_bytes is not None and bound > self._max_bytes)

    def step(self, step: int) -> None:
        """Append the gradients of the last backward pass, and call `update`.

        Args:
            step: number of the training step: one more than the last one.

        Raises:
            PolicyError: nothing was saved or restored before; another step; no backward pass since the last one, or one
                in `update`.
            StorageError: appending failed; `update` was not called, and the steps before are safe.
        """
        if self._step is None:
            found, do = "no checkpoint to begin with", "call restore, and save if it returned None, before the loop"
            raise PolicyError("journal", found=found, do=do)
        if layout.check_step(step) != self._step + 1:
            found, expected = f"step {step}", f"{self._step + 1}"
            raise PolicyError("journal", found=found, expected=expected, do="count steps by one, from that of the save")
        count, messages = self._record.take()
        self._clean()
        self._append(step, count, messages)
        self._run_update()
        self._step = step
        self._delete_covered()

    def save(self, step: int, **arguments: Any) -> SaveReport | None:
        """Save a checkpoint, and begin the journal behind it; on all ranks, of which the first one saves.

        The records before go once the checkpoint is committed: until then a crash resumes from the one before it.

        Args:
            step: the last one that was made; before the first one any number.
            arguments: of `CheckpointManager.save`.

        Raises:
            PolicyError: another step than the last one.
            StorageError: the journal cannot be written, on a rank; nothing was saved.
            Exception: whatever `CheckpointManager.save` raises.
        """
        layout.check_step(step)
        if self._step is not None and step != self._step:
            found, do = f"step {step}", "save after `step` of the same number"
            raise PolicyError("journal", found=found, expected=f"{self._step}", do=do)
        # Before the checkpoint is there every rank has a file that continues it, or it would lack the generators.
        gather_or_raise(lambda: self._begin(step, self._replicas.message_count), self._group)
        report = self._manager.save(step, **arguments) if self._rank == 0 else None
        self._delete_covered()
        return report

    def restore(self, step: int | None = None, *, strict: bool = True, **arguments: Any) -> JournalRestore | None:
        """Restore a checkpoint on every rank, and replay the steps behind it.

        Args:
            step: of the checkpoint; None: the newest that loads.
            strict: False: a damaged record ends the replay, with a warning, as the end of the file does.
            arguments: of `CheckpointManager.restore`: the objects that `update` changes.

        Returns:
            Where training resumes; None if the store is empty.

        Raises:
            CorruptError: a record in the middle is damaged. Objects are as in the checkpoint.
            MismatchError: the journal was written with other settings or on other ranks, or its steps lead to other
                weights than they did: `update` does something else, or more than follows from what is saved.
            Exception: whatever `CheckpointManager.restore` or `update` raises.
        """
        begin = time.perf_counter()
        validate.check_bool("journal, strict", strict)
        checkpoint = self._manager.restore(step, **arguments)
        places = gather_or_raise(lambda: self._find_last(checkpoint, strict), self._group)
        if len({saved for saved, _ in places}) > 1:
            found, do = f"checkpoints of steps {[saved for saved, _ in places]}", "let all ranks read one store"
            raise MismatchError("journal", found=found, expected="one", do=do)
        if checkpoint is None:
            return None
        lasts = [last for _, last in places if last is not None]
        last = min(lasts) if len(lasts) == len(places) else None
        gather_or_raise(lambda: self._replay(checkpoint.step, last), self._group)
        self._is_clean = False
        seconds = time.perf_counter() - begin
        return JournalRestore(self._step or 0, (self._step or 0) - checkpoint.step, checkpoint, seconds)

    def _find_last(self, checkpoint: RestoreResult[int] | None, strict: bool) -> tuple[int | None, int | None]:
        """The step of a checkpoint, and the last one behind it that this rank can replay; None where there is none."""
        if checkpoint is None:
            return None, None
        return checkpoint.step, self._directory.last_step(checkpoint.step, self._rank, strict=strict)

    def _replay(self, start: int, last: int | None) -> None:
        """Make the steps up to the last one again, and open the file behind it; None: begin one."""
        if last is None:
            self._begin(start, self._replicas.message_count)
            return
        own_chain = self._directory.chain(start, self._rank)
        chain = own_chain if self._rank == 0 else self._directory.chain(start, 0)
        count, num_bytes, place = 0, 0, None
        for place in own_chain:
            shared = place if self._rank == 0 else next(chain, place)
            self._check_place(place)
            count = self._redo(place, shared)
            num_bytes = 0 if place.begins_segment else num_bytes + self._record_bytes()
            if place.record.step == last:
                break
        if place is None or place.record.step != last:
            raise MismatchError("journal", found="a shorter file", expected=f"step {last}", do="restore again")
        self._replicas.restart(count)
        self._close_file()
        path = self._directory.path_of(place.start, self._rank)
        self._file, self._digest = AppendFile(path, place.record.end), place.digest
        self._start, self._step, self._num_records = place.start, last, last - place.start
        self._num_bytes, self._has_stopped = num_bytes, False

    def _redo(self, place: ChainPlace, shared: ChainPlace) -> int:
        """Make a step again; returns the number of its messages."""
        record, count = place.record, place.record.fields.get("count")
        if type(count) is not int or shared.record.step != record.step:
            raise MismatchError("journal", found="records of another rank", expected=f"step {record.step}", do=_DO)
        weights = record.fields.get("weights")
        if weights is not None and weights != self._weight_digest():
            found, do = "other weights than those of the run", _DO
            raise MismatchError(f"journal, before step {record.step + place.begins_segment}", found=found, do=do)
        self._load_buffers(record)
        rng_from_bytes(record.blobs)
        if not place.begins_segment:
            if "gradients" not in shared.record.blobs:
                raise MismatchError("journal", found="no gradients", expected=f"those of step {record.step}", do=_DO)
            self._record.fill_gradients(shared.record.blobs["gradients"], count)
            self._run_update()
        return count

    def _check_place(self, place: ChainPlace) -> None:
        own = self._header()
        if place.begins_segment and place.fields != own:
            different = [key for key in own if place.fields.get(key) != own[key]]
            found = ", ".join(f"{key} {place.fields.get(key)!r}" for key in different)[:300]
            expected = ", ".join(f"{key} {own[key]!r}" for key in different)[:300]
            raise MismatchError("journal", found=found, expected=expected, do="resume with the settings of the run")

    def _append(self, step: int, count: int, messages: Iterable[Tensor]) -> None:
        """Append a record, unless it would exceed the bound."""
        assert self._file is not None
        buffers = self._changed_buffers()
        size = self._record_bytes()
        if self._has_stopped or (self._max_bytes is not None and self._num_bytes + size > self._max_bytes):
            if not self._has_stopped:
                text = f"step {step} and later ones are not appended until the next save: max_bytes={self._max_bytes}"
                warn_user(f"journal: {text}", UserWarning)
            self._has_stopped = True
            return
        has_digest = self._num_records % self._check_every == 0
        fields = {"count": count, "weights": self._weight_digest() if has_digest else None}
        blobs = {name: [data] for name, data in rng_to_bytes().items()} | buffers
        if self._rank == 0:
            blobs["gradients"] = [tensor_bytes(message).data for message in messages]
        data, digest = encode_journal_record(step, fields, blobs, self._digest)
        self._file.append(data)
        self._digest = digest
        self._num_records, self._num_bytes = self._num_records + 1, self._num_bytes + size
        if self._sync_every is not None and self._num_records % self._sync_every == 0:
            self._file.sync()

    def _begin(self, step: int, count: int) -> None:
        """Begin a segment behind a step: its first record has the state of the generators, and no gradients."""
        self._step = step
        self._clean()
        header, digest = encode_journal_header(self._header())
        blobs = {name: [data] for name, data in rng_to_bytes().items()} | self._changed_buffers()
        fields = {"count": count, "weights": self._weight_digest()}
        record, self._digest = encode_journal_record(step, fields, blobs, digest)
        self._close_file()
        path = self._directory.path_of(step, self._rank)
        self._file = AppendFile.create(path, b"".join(bytes(part) for part in (header, *record)))
        self._start, self._num_records, self._num_bytes, self._has_stopped = step, 0, 0, False

    def _run_update(self) -> None:
        self._update()
        if not self._record.is_empty:
            found, do = "a backward pass in `update`", "compute gradients in the loop; LBFGS cannot be replayed"
            raise PolicyError("journal", found=found, expected="what follows from the gradients alone", do=do)

    def _clean(self) -> None:
        """Delete this rank's segments behind the last step, which another course of the run has left."""
        last = self._step
        if not self._is_clean and last is not None:
            self._directory.delete(lambda start, rank: rank == self._rank and start > last)
            self._is_clean = True

    def _delete_covered(self) -> None:
        """Delete segments before the last checkpoint that this process has saved, once that is committed."""
        report = self._manager.last_report
        if self._rank == 0 and report is not None and report.step == self._start != self._covered:
            self._directory.delete(lambda start, rank: start < self._start)
            self._covered = self._start

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _header(self) -> dict[str, Any]:
        """What a journal and the run that resumes from it have in common."""
        return {"rank": self._rank, "ranks": self._group.size(), "config": self._replicas.config()}

    def _record_bytes(self) -> int:
        """Bytes of a record of rank 0, at most."""
        named = dict(self._model.named_buffers())
        changed: int = sum(buffer.nbytes for name, buffer in named.items() if name not in self._buffers)
        return self._record.nbytes + self._rng_bytes + changed + _RECORD_OVERHEAD

    def _weight_digest(self) -> str:
        return _digest_of(self._model.parameters())

    def _buffer_digests(self) -> dict[str, str]:
        return {name: _digest_of([buffer]) for name, buffer in self._model.named_buffers()}

    def _changed_buffers(self) -> dict[str, list[Any]]:
        """The buffers that have changed since the journal was made; from then on they are in every record."""
        named = dict(self._model.named_buffers())
        for name in [name for name, digest in self._buffers.items() if _digest_of([named[name]]) != digest]:
            del self._buffers[name]
        return {_BUFFER + name: [tensor_bytes(x).data] for name, x in named.items() if name not in self._buffers}

    @torch.no_grad()
    def _load_buffers(self, record: JournalRecord) -> None:
        named = dict(self._model.named_buffers())
        for key, data in record.blobs.items():
            if not key.startswith(_BUFFER):
                continue
            name = key[len(_BUFFER) :]
            buffer = named.get(name)
            if buffer is None or buffer.nbytes != data.nbytes:
                found, expected = f"a buffer {name!r} of {data.nbytes} bytes", "one of this model"
                raise MismatchError("journal", found=found, expected=expected, do="build the model as it was")
            values = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(buffer.dtype)
            buffer.copy_(values.view(buffer.shape))
            self._buffers.pop(name, None)


_DO = "resume with the same `update` and objects; without the journal, use the manager's own restore"


def _digest_of(tensors: Iterable[Tensor]) -> str:
    hasher = Hasher()
    for tensor in tensors:
        hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


def _check_feedback(replicas: DDPCompression, feedback: str) -> None:
    if replicas.has_feedback and feedback == "refuse":
        found, expected = "error feedback, which is not on the wire", "a compressor without it"
        do = 'compress with "q4:64", say, or pass feedback="restart", with which all memories are empty after a replay'
        raise PolicyError("journal", found=found, expected=expected, do=do)


def _place(manager: CheckpointManager, directory: str | Path | None) -> Path:
    """The journal's directory."""
    if not isinstance(manager.scheme, Lossless):
        found, do = f"the scheme {manager.scheme.id}", 'save with scheme="lossless"'
        raise PolicyError("journal", found=found, expected="a checkpoint to replay on bit for bit", do=do)
    if directory is not None:
        return LocalStorage(directory).path.absolute()
    storage = manager.store.storage
    if not isinstance(storage, LocalStorage):
        found, do = f"{storage.describe()}, where nothing is appended", "name a directory=, on a disk that ranks share"
        raise PolicyError("journal", found=found, expected="a directory", do=do)
    return storage.path.absolute() / "journal"
