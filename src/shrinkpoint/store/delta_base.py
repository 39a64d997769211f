"""Base of the next delta: the decoded tensors of the last checkpoint, how much of the weights' progress
they hold, and whether the files that they were decoded from are still intact.

Right after a restore the weights are exactly the values that a quantizer chose. In a save that follows soon, most of
them may still round to the same values, so that nothing is stored: with repeated restores training makes no progress
although every single checkpoint is within its threshold (docs/scheme_studies.md measures it).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from shrinkpoint._native import Hasher, progress_sums, xxh3_128
from shrinkpoint.codec.parallel import thread_pool
from shrinkpoint.codec.reference import Reference, RowSample, all_tensor_rows, as_decoded, tensor_layout
from shrinkpoint.container import FileReader
from shrinkpoint.container.header import read_header
from shrinkpoint.container.reader import WINDOW_BYTES
from shrinkpoint.errors import ChainError, CorruptError, ShrinkpointError, warn_user
from shrinkpoint.storage import LocalStorage, Source, Storage
from shrinkpoint.tensors.dtypes import as_native_float
from shrinkpoint.tensors.flat_state import copy_tensors
from shrinkpoint.threads import submit_or_run

MIN_RETENTION = 0.7  # A checkpoint with a lower fraction raises a warning
MAX_CHANCE = 3.0  # Standard errors that a fraction may be away from 1 by chance, without a warning
MIN_MOVEMENT = 2.0**-20  # Movement, relative to the weights, from which a fraction is judged
MAX_ERROR = 1.0  # The standard error from which a fraction says nothing
MAX_SAVES_PER_PASS = 8
"""Number of saves within which every byte of a chain has been read again and compared with its digest."""
MIN_BYTES = 8 << 20  # Bytes that are read again at every save, if the chain has as many
MISSING = "gone"
_DO = "the next checkpoint is a keyframe; `shrinkpoint verify --deep` says which others are damaged"
_log = logging.getLogger("shrinkpoint")
M = TypeVar("M")


@torch.no_grad()
def retained_fraction(
    parent_weights: Mapping[str, Tensor],
    parent_stored: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
) -> float | None:
    """Fraction of the weights' progress since the previous checkpoint that this checkpoint holds.

    `<w'_t - w'_(t-1), w_t - w_(t-1)> / |w_t - w_(t-1)|^2` over all tensors that were quantized at both times: 1 if all
    of the progress is stored, 0 if none is, above 1 if a checkpoint catches up with what the previous one missed.

    Where the step of the weights is more than ten times their own norm (a spike that was rolled back), it counts from
    zero: what matters then is how much of the present weights is stored.

    Args:
        parent_weights, weights: the weights w in training, by name, at the previous save and now.
        parent_stored, stored: the same as the checkpoints decode (w').

    Returns:
        None if nothing can be compared or nothing has changed.
    """
    stored_progress = progress = 0.0
    for name, weight in weights.items():
        parent_weight = parent_weights.get(name)
        if parent_weight is None or parent_weight.shape != weight.shape:
            continue
        a, b, c, d = map(as_native_float, (weight, parent_weight, stored[name], parent_stored[name]))
        sums = progress_sums(a, b, c, d, weight.numel(), threads=torch.get_num_threads())
        movement, stored_movement, squared_weight, stored_weight = sums
        if movement > 100 * squared_weight > 0:
            movement, stored_movement = squared_weight, stored_weight
        progress += movement
        stored_progress += stored_movement
    is_finite = math.isfinite(stored_progress) and math.isfinite(progress)
    return stored_progress / progress if progress > 0 and is_finite else None


class ReferenceCache(Generic[M]):
    """Holds the last checkpoint that was committed or loaded, as a reader decodes it.

    A tensor that a scheme leaves exact decodes to the value it was given, so that value is held. Of tensors on lattices
    codes are held, and of weights that are quantized a sample of the original values. No caller can reach this memory.
    """

    def __init__(self) -> None:
        self.manifest: M | None = None  # the checkpoint; None if nothing is held
        self._reference = Reference({})
        self._decode: Callable[[], Reference] | None = None

    @property
    def reference(self) -> Reference:
        """Tensors that are held; empty after a decoding that failed: then nothing is held any more."""
        self.ensure_decoded()
        return self._reference

    @property
    def decoded(self) -> tuple[M | None, Reference | None]:
        """The checkpoint and its tensors, if they are held decoded."""
        return (None, None) if self._decode is not None else (self.manifest, self._reference)

    def ensure_decoded(self) -> bool:
        """Decode what is held encoded; whether anything is held after that."""
        if self._decode is not None:
            manifest, decode = self.manifest, self._decode
            try:
                reference = decode()
            except (ShrinkpointError, MemoryError) as error:
                _log.warning("no delta is written against this, the next checkpoint is a keyframe: %s", error)
                self.drop()
            else:
                assert manifest is not None
                self.adopt(manifest, reference)
        return self.manifest is not None

    def drop(self) -> None:
        """Free the tensors: the next save is a keyframe."""
        self.manifest, self._reference, self._decode = None, Reference({}), None

    def adopt_encoded(self, manifest: M, decode: Callable[[], Reference]) -> None:
        """Hold no tensors: `decode` returns them when the next delta needs them."""
        self.drop()
        self._decode = decode
        self.manifest = manifest

    def adopt(self, manifest: M, reference: Reference) -> None:
        """Hold these tensors themselves; the caller no longer writes to them.

        A reference without originals is one that was loaded: what it decodes to is what training goes on from.
        """
        self.manifest = self._decode = None  # until all is assigned: an interrupt may come at any line
        tensors = as_decoded(reference.tensors).without_values()
        originals = reference.originals or tensors.subset(reference.quantized)
        self._reference = Reference(tensors, dict(reference.quantized), originals)
        self.manifest = manifest

    def copy(self, manifest: M, reference: Reference) -> None:
        """Hold a copy of these tensors, in the present buffers where they fit; hold nothing if memory runs out.

        The checkpoint is committed already: without a reference the next one is a keyframe. Codes and samples are not
        shared with the caller and need no copy.
        """
        buffers = as_decoded(self._reference.tensors).held_tensors()
        self.drop()
        tensors = as_decoded(reference.tensors).without_values()
        try:
            copies = copy_tensors(tensors.held_tensors(), buffers)
        except (MemoryError, RuntimeError):  # torch reports an allocation that failed as a RuntimeError
            return
        self.adopt(manifest, replace(reference, tensors=tensors.replace_tensors(copies)))

    def retained_progress(self, stored: Reference) -> RetainedProgress:
        """The `retained_fraction` of the weights' progress since the checkpoint that is held, from a sample of them.

        Args:
            stored: the state as a reader decodes it, with a sample of the originals.
        """
        if self.manifest is None or self._decode is not None:  # what is decoded when needed has no originals
            return RetainedProgress()
        parent, weights = self._reference, dict[str, _SampledWeight]()
        samples = {
            name: sample
            for name, sample in stored.originals.items()
            if isinstance(sample, RowSample)
            and name in parent.tensors
            and tensor_layout(parent.tensors, name)[0] == sample.shape
        }
        rows = {name: sample.rows for name, sample in samples.items()}
        before, now = all_tensor_rows(parent.tensors, rows), all_tensor_rows(stored.tensors, rows)
        for name, sample in samples.items():
            original = parent.original_rows(name, sample.shape, sample.rows)
            if original is None and name not in parent.quantized:
                original = before[name]  # exact tensors have no separate original
            if original is not None:
                weights[name] = _SampledWeight(original, before[name], sample.values, now[name])
        columns = [dict(zip(weights, column, strict=True)) for column in zip(*weights.values(), strict=True)]
        fraction = retained_fraction(*columns) if weights else None
        if fraction is None or abs(fraction - 1) <= 1 - MIN_RETENTION:
            return RetainedProgress(fraction)
        error = _standard_error(weights.values())
        is_lost = fraction < min(MIN_RETENTION, 1 - MAX_CHANCE * error)
        return RetainedProgress(fraction, is_lost) if error <= MAX_ERROR else RetainedProgress()


class RetainedProgress(NamedTuple):
    """The share of the weights' progress that a checkpoint holds."""

    fraction: float | None = None  # None if there is nothing to compare, or weights have moved by too little to tell
    is_lost: bool = False  # Too much is missing, and not by chance


class _SampledWeight(NamedTuple):
    """The same rows of a weight, as in `retained_fraction`."""

    parent_weight: Tensor
    parent_stored: Tensor
    weight: Tensor
    stored: Tensor


@torch.no_grad()
def _standard_error(weights: Iterable[_SampledWeight]) -> float:
    """Standard error of a `retained_fraction` of 1, if rounding errors are independent of the movement.

    It is large where weights have moved by much less than they were rounded: after one step of a small learning rate
    the fraction may be 0 or -4 without anything being lost. It is infinite where the movement is about as small as the
    resolution of float32: by chance, no weight at all is rounded up then.
    """
    noise = progress = squares = 0.0
    for sample in weights:
        before, stored_before, now, stored = (tensor.double() for tensor in sample)
        movement = now - before
        if movement.square().sum() > 100 * now.square().sum() > 0:  # as in `retained_fraction`
            movement = now
        errors = (stored_before - before).square() + (stored - now).square()
        noise += float((movement.square() * errors).sum())
        progress += float(movement.square().sum())
        squares += float(now.square().sum())
    return math.sqrt(noise) / progress if progress > MIN_MOVEMENT**2 * squares else math.inf


def as_delta_base(reference: Reference | None, *, base: bool) -> Reference | None:
    """A copy that is marked as the base of a delta, or else as values to compare with only."""
    return None if reference is None else replace(reference, is_base=base)


def warn_lost_progress(retention: float | None) -> None:
    """Warn that a checkpoint holds too little of the progress since the previous one."""
    warn_user(
        f"this checkpoint holds {retention or 0:.0%} of the progress since the one before; a restore loses the rest. "
        "Save less often, or allow a smaller rise of the loss"
    )


@dataclass(frozen=True)
class StoredFile:
    """One file of a chain under one key."""

    digest: str  # of its header, which authenticates every other byte
    size: int  # in bytes
    # `storage`, `key`: where it is stored.
    storage: Storage
    key: str
    version: object = None  # as the storage has just listed it; None: `stamp` asks for it

    @property
    def where(self) -> str:
        """Its name in messages."""
        return self.storage.describe(self.key)

    def stamp(self) -> object:
        """A value that changes when the file is written to or replaced; None if the storage has none.

        Of a file device, inode, size and time of modification. The time of the inode's change is left out: a hard link
        made or removed elsewhere changes it, too.
        """
        if not isinstance(self.storage, LocalStorage):
            version: Callable[[str], object] | None = getattr(self.storage, "version", None)
            return None if version is None else self.version or version(self.key) or MISSING
        with suppress(OSError):
            status = (self.storage.path / self.key).stat()
            return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return MISSING


class BaseVerifier:
    """Finds damage in a chain before another delta is written against it.

    Memory: one row for each part of each file of the chain.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, object] = {}
        self._queue: list[str] = []  # digests of the files still to be read in this pass
        self._scan: _FileScan | None = None  # the file that is being read
        self._scans: dict[str, _FileScan] = {}  # by digest, of files that have been read before
        self._due: dict[str, StoredFile] = {}  # the chain of which a share is to be read; empty: none is
        self._damage: dict[str, Exception] = {}  # by digest of a file, found since the last `find_damage`

    def mark_verified(self, stamps: Mapping[str, object]) -> None:
        """Record files that this process has just written, or has read completely.

        Args:
            stamps: `StoredFile.stamp` by digest, taken before reading.
        """
        self._stamps.update(stamps)
        for digest in stamps:
            self._damage.pop(digest, None)

    def find_damage(self, files: Sequence[StoredFile]) -> Exception | None:
        """The first damage found in a chain; None if none is known so far. Damage is logged.

        Reads files that are unknown or have changed, and a chain of `MIN_BYTES` or on a custom storage besides. Of
        another one a share is due: `read_share` reads it, and what is wrong with it is found by the next call. None is
        due of what an object storage holds, which compares it with checksums itself.

        Args:
            files: the chain, keyframe first.
        """
        files = [file for file in files if getattr(file.storage, "keeps_payloads", True)]
        stamps = {file.digest: self._stamps[file.digest] for file in files if file.digest in self._stamps}
        self._stamps = stamps
        self._scans = {file.digest: self._scans[file.digest] for file in files if file.digest in self._scans}
        try:
            for file in files:
                stamp = file.stamp()
                verified = stamps.get(file.digest, MISSING)
                if verified == MISSING or verified != stamp:  # of a file that is missing nothing was verified
                    self._begin_scan(file).read(file, file.size)
                    stamps[file.digest] = stamp  # taken before reading
            # A storage with versions compares what it holds with checksums itself.
            self._due = {file.digest: file for file in files if not hasattr(file.storage, "version")}
            is_local = all(isinstance(file.storage, LocalStorage) for file in files)
            if sum(file.size for file in files) <= MIN_BYTES or not is_local:
                self._check_share()
        except ShrinkpointError as error:
            self._damage[files[0].digest] = error
        damage, self._damage = self._damage, {}
        found = next((damage[file.digest] for file in files if file.digest in damage), None)
        if found is not None:
            self._scan, self._queue, self._due = None, [], {}
            stamps.clear()
            self._scans.clear()
            _log.warning("no delta is written against this, the next checkpoint is a keyframe: %s", found)
        return found

    @contextmanager
    def read_share(self) -> Iterator[None]:
        """Read the share of the chain that is due, an eighth of all bytes, beside the block, and wait for it after."""
        if not self._due:
            yield
            return
        with thread_pool(1) as pool:
            submit_or_run(pool, self._check_share)
            yield

    def _check_share(self) -> None:
        """Read the share that is due; an error of it counts for the whole chain."""
        due, self._due = self._due, {}
        try:
            self._read_share(due)
        except (ShrinkpointError, OSError, MemoryError) as error:
            self._damage.update(dict.fromkeys(due, error))

    def _read_share(self, files: dict[str, StoredFile]) -> None:
        total = sum(file.size for file in files.values())
        budget = min(total, max(-(-total // MAX_SAVES_PER_PASS), MIN_BYTES))
        passes = 0
        while budget > 0:
            if self._scan is None:
                if not self._queue and passes == 2:  # the end of one pass and the beginning of the next
                    return
                if not self._queue:
                    self._queue, passes = [*files], passes + 1
                file = files.get(self._queue.pop(0))
                if file is None:  # of an earlier chain
                    continue
                self._scan = self._begin_scan(file)
            scan = self._scan
            if scan.digest not in files:
                self._scan = None
                continue
            budget -= scan.read(files[scan.digest], max(budget, 1))
            if scan.is_done:
                self._scan = None

    def _begin_scan(self, file: StoredFile) -> _FileScan:
        scan = self._scans.setdefault(file.digest, _FileScan(file.digest))
        scan.begin()
        return scan


class _Piece(NamedTuple):
    """Bytes of a part of a file that are read at once."""

    # `offset`, `size`, `pad`, `digest`: of the part, see `container.metadata.Entry`.
    offset: int
    size: int
    pad: int
    digest: str
    # `begin`, `end`: offsets of the bytes in the file; the first piece of a part has the filler before it, too.
    begin: int
    end: int


class _FileScan:
    """Reads one file window by window, and compares each part with its digest; raises an error for any damage.

    Attributes:
        digest: of the file's header.
    """

    def __init__(self, digest: str) -> None:
        self.digest, self._header_bytes = digest, 0
        self._windows: list[list[_Piece]] = []  # pieces that lie one behind the other; none until the first is read
        self.begin()

    def begin(self) -> None:
        """Begin with the header, and then the first part."""
        self._next = -1  # index of the window that is read next; -1: the header
        self._hasher = Hasher()  # of the current part

    def _check_header(self, source: Source, file: StoredFile) -> None:
        """Compare the header with its digest; the index is parsed once, and tells the windows."""
        size, where = source.size, file.where
        reader = None if self._windows else FileReader(source, where)
        digest = read_header(source, where)[1] if reader is None else reader.digest
        if digest != file.digest or size != file.size:
            found, expected = f"{size} bytes with header digest {digest}", f"{file.size} bytes with {file.digest}"
            raise ChainError(where, found=found, expected=expected, do=_DO)
        if reader is None:
            return
        entries = [entry for record in reader.records for entry in record.parts.values()]
        parts = [(entry.offset, entry.size, entry.pad, entry.digest) for entry in entries]
        end = max((begin + length for begin, length, *_ in parts), default=size)
        if end < size:  # the index, which the header's digest covers: it is a part like others from now on
            parts.append((end, size - end, 0, xxh3_128(source.read(end, size - end))))
        self._header_bytes = size - sum(pad + length for _, length, pad, _ in parts)
        self._windows = _windows(parts)

    @property
    def is_done(self) -> bool:
        """True if all parts have been compared."""
        return self._next == len(self._windows)

    def read(self, file: StoredFile, max_bytes: int) -> int:
        """Read on by `max_bytes` bytes or a little more, and return how many were read."""
        read = 0
        with file.storage.open(file.key) as source:
            getattr(source, "forget_pages", lambda: None)()  # the next read goes to the disk, if the storage can
            if self._next < 0:
                self._check_header(source, file)
                self._next, read = 0, self._header_bytes
            while read < max_bytes and self._next < len(self._windows):
                read += self._read_window(source, file.where)
                self._next += 1
        return read

    def _read_window(self, source: Source, where: str) -> int:
        window = self._windows[self._next]
        start = window[0].begin
        data = memoryview(source.read(start, window[-1].end - start))
        for offset, size, pad, digest, begin, end in window:
            if pad and begin < offset and any(data[begin - start : offset - start]):
                raise CorruptError(where, found=f"a filler that is not zero, at byte {begin}", do=_DO)
            self._hasher.update(data[max(begin, offset) - start : end - start])
            if end == offset + size:
                actual, self._hasher = self._hasher.hexdigest(), Hasher()
                if actual != digest:
                    found = f"bytes {offset} to {end} with digest {actual}"
                    raise CorruptError(where, found=found, expected=digest, do=_DO)
        return data.nbytes


def _windows(parts: Iterable[tuple[int, int, int, str]]) -> list[list[_Piece]]:
    """Groups parts into windows: as many as fit into one; a part that is larger has several windows."""
    windows: list[list[_Piece]] = []
    for offset, size, pad, digest in parts:
        begin, part_end = offset - pad, offset + size
        while True:
            end = min(part_end, max(begin, offset) + WINDOW_BYTES)
            piece = _Piece(offset, size, pad, digest, begin, end)
            last = windows[-1] if windows else []
            if last and last[-1].end == begin and end - last[0].begin <= WINDOW_BYTES:
                last.append(piece)
            else:
                windows.append([piece])
            begin = end
            if end == part_end:
                break
    return windows
