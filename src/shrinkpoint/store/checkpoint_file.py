"""Writes a quantized state to one container file, and decodes such a file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from shrinkpoint import validate
from shrinkpoint.codec.coder import default_threads
from shrinkpoint.codec.parallel import decode_all
from shrinkpoint.codec.reference import QuantizedTensor, Reference, RowSample, lattice_source
from shrinkpoint.container import FileReader, FileWriter
from shrinkpoint.errors import CorruptError, PolicyError
from shrinkpoint.guard import pause_gc, read_guard
from shrinkpoint.schemes.base import QuantizedState, Scheme
from shrinkpoint.schemes.select import summarize_reasons
from shrinkpoint.storage import Source, Storage
from shrinkpoint.store.save_report import COPY_ROLE, RoleBytes, SaveReport
from shrinkpoint.tensors.flat_state import copy_tensors, unflatten
from shrinkpoint.tensors.info import JSON, EncodedRecord, Role
from shrinkpoint.tensors.memory import available_bytes

MIN_LIMIT = 1 << 30  # Bytes of tensors that any file may hold, however small it is and however little memory is free
MAX_EXPANSION = 1000  # Bytes of tensors that each stored byte of a chain may decode to, beyond that
ENV_VARIABLE = validate.MAX_BYTES_VARIABLE

_DO = f"if you trust it, pass max_bytes= (--max-bytes on the command line), or set {ENV_VARIABLE}"


Device: TypeAlias = str | torch.device | None


class WriteResult(NamedTuple):
    """The report of a save, and the reference that a reader of the file decodes."""

    report: SaveReport
    reference: Reference


@dataclass(frozen=True)
class DecodedFile:
    """The decoded content of a file."""

    tree: JSON  # the state's structure; its leaves name tensors
    reference: Reference  # the decoded tensors
    max_copy_bytes: int | None = None  # limit on the bytes of copies in the tree; None: no limit was computed


def write_file(
    storage: Storage,
    key: str,
    quantized: QuantizedState,
    *,
    scheme: Scheme,
    reference: Reference | None,
    parent: JSON,
    originals: Mapping[str, torch.Tensor] | None = None,
    threads: int | None = None,
) -> WriteResult:
    """Write a quantized state under `key`, durably and atomically.

    Args:
        quantized: the state as the scheme quantized it.
        reference: the parent's decoded tensors; None writes a keyframe.
        parent: how a reader finds the parent (name, digest, ...), stored unchanged; None for a keyframe.
        originals: the state before it was quantized, of which the result holds a sample; None: none is needed.

    Raises:
        StorageError: writing failed; nothing is stored under `key`.
    """
    began = time.perf_counter()
    state = quantized.state
    roles: dict[str, RoleBytes] = {}
    codes: dict[str, QuantizedTensor] = {}
    with storage.create(key) as sink, pause_gc(state.nbytes, len(state.infos)):
        writer = FileWriter(sink, scheme=scheme.id, parent=parent, tree=state.tree, expected=list(state.infos.values()))
        for encoded in scheme.encode(state, reference, quantized=quantized.quantized, threads=threads):
            _count_roles(roles, encoded, writer.add(encoded), quantized.copies)
            # The quantized tensors that a reader of this record has for the next delta
            tensors = quantized.quantized
            if encoded.recipe == {"kind": "same"} and reference is not None:
                tensors = reference.quantized
            codes.update({info.name: tensors[info.name] for info in encoded.infos if info.name in tensors})
        size, digest = writer.finish({name: [r.raw, r.stored, r.tensors] for name, r in roles.items()})
    loss = quantized.loss
    if isinstance(loss, dict) and quantized.exact:
        loss = loss | {"stayed_exact": summarize_reasons(quantized.exact, state.infos)}
    report = SaveReport(
        path=storage.describe(key),
        scheme=scheme.id,
        keyframe=parent is None,
        raw_bytes=sum(role.raw for role in roles.values()),
        stored_bytes=size,
        seconds=time.perf_counter() - began,
        roles=roles,
        digest=digest,
        loss_report=loss,
        exact=quantized.exact,
    )
    samples = {} if originals is None else _sample_weights(originals, quantized, codes)
    return WriteResult(report, Reference(state.tensors, codes, samples))


def _sample_weights(
    originals: Mapping[str, torch.Tensor], quantized: QuantizedState, codes: Mapping[str, QuantizedTensor]
) -> dict[str, RowSample]:
    """Copies of some rows of each quantized weight, as it was before."""
    infos = quantized.state.infos
    return {
        name: quantized.samples.get(name) or RowSample.from_tensor(originals[name], quantized.sampled_rows.get(name))
        for name in codes
        if infos[name].role not in (Role.MOMENT1, Role.MOMENT2)
    }


def _count_roles(
    roles: dict[str, RoleBytes], encoded: EncodedRecord, stored: int, copies: Collection[str] = ()
) -> None:
    """Add a record to the sizes by role; one with several roles has few bytes, and they count for the first.

    Args:
        copies: names of tensors whose role is that of copies.
    """
    raw: dict[str, int] = {}
    own_roles = [COPY_ROLE if info.name in copies else info.role.value for info in encoded.infos]
    for role, info in zip(own_roles, encoded.infos, strict=True):
        raw[role] = raw.get(role, 0) + info.nbytes
    for role, count in Counter(own_roles).items():
        total = roles.get(role, RoleBytes())
        own = stored if role == own_roles[0] else 0
        roles[role] = RoleBytes(total.raw + raw[role], total.stored + own, total.tensors + count)


class Allowance:
    """Limits what the files of one chain may allocate, keyframe first.

    Args:
        max_bytes: limit on the bytes of tensors in any one file, copies in its tree included; None: the value of the
            environment variable `SHRINKPOINT_MAX_BYTES`, else the largest of 1 GiB, 1000 times the bytes of the files
            so far, and three quarters of the free memory.
        minimum: bytes that the limit has at least if no caller gives one.

    Attributes:
        max_copy_bytes: bytes of the limit that the last file's tensors leave for copies in its tree.

    Raises:
        PolicyError: the limit is not a whole number above 0.
    """

    def __init__(self, max_bytes: int | None = None, *, minimum: int = 0) -> None:
        limit = validate.check_optional_int("max_bytes", max_bytes, none_meaning=f"for {ENV_VARIABLE} or 1 GiB")
        self._limit = validate.read_byte_variable(ENV_VARIABLE) if limit is None else limit
        self._stored, self._minimum = 0, minimum
        self.max_copy_bytes = self._limit or MIN_LIMIT

    def admit(self, where: str, stored: int, raw: int) -> None:
        """Count a file that is about to be decoded.

        Args:
            where: its name in messages.
            stored: its size in bytes.
            raw: bytes of the tensors that its header announces.

        Raises:
            CorruptError: the tensors exceed the limit.
        """
        self._stored += stored
        limit = self._limit or max(MIN_LIMIT, MAX_EXPANSION * self._stored, self._minimum)
        if self._limit is None and 2 * raw > limit:  # copies in the tree may take as much again
            limit = max(limit, available_bytes() * 3 // 4)
        if raw > limit:
            found = f"{raw:,} bytes of tensors in a chain of {self._stored:,} bytes"
            raise CorruptError(where, found=found, expected=f"at most {limit:,} bytes", do=_DO)
        self.max_copy_bytes = limit - raw


def read_file(
    source: Source,
    where: str,
    reference: Reference | None,
    *,
    threads: int | None = None,
    allowance: Allowance | None = None,
) -> DecodedFile:
    """Decode one file.

    Args:
        reference: the parent's decoded tensors, if the file is a delta.
        threads: native threads; None: every core.
        allowance: counts the files of the chain so far; None: only this file.

    Raises:
        FormatError: the bytes are at fault, or ask for more memory than they may.
        ChainError: `reference` is missing or is not the one the file was made against.
    """
    return decode_records(FileReader(source, where), reference, threads=threads, allowance=allowance)


def decode_records(
    reader: FileReader,
    reference: Reference | None,
    *,
    threads: int | None = None,
    allowance: Allowance | None = None,
    records: Collection[int] | None = None,
    verify_others: bool = True,
    with_values: bool = True,
    trust_base: bool = False,
    overwrite: bool = False,
) -> DecodedFile:
    """Decode a file whose header has been read; raises as `read_file` does.

    Args:
        records: decode these alone; None: all.
        verify_others: compare the stored bytes of the other records with their digests; False: do not read them, nor
            count what they would decode to.
        with_values, trust_base, overwrite: as in `decode_all`.
    """
    allowance = allowance or Allowance()
    workers = default_threads(threads)
    with read_guard(reader.where):
        heads = reader.records
        recipes = [(head.recipe, len(head.infos), sum(info.nbytes for info in head.infos)) for head in heads]
        counted = range(len(recipes)) if records is None or verify_others else records
        raw = sum(recipes[index][2] for index in counted)
        allowance.admit(reader.where, reader.size, raw)
        with pause_gc(raw, sum(tensors for _, tensors, _ in recipes)):
            decoded = decode_all(
                recipes,
                lambda index: reader.read(heads[index]),
                reference,
                where=reader.where,
                threads=workers,
                needed=records,
                skip=lambda index: reader.read(heads[index]).infos if verify_others else heads[index].infos,
                with_values=with_values,
                trust_base=trust_base,
                overwrite=overwrite,
            )
        return DecodedFile(reader.tree, decoded, allowance.max_copy_bytes)


def build_state(
    decoded: DecodedFile, where: str, *, tie: bool = True, device: Device = None, copy: bool = False
) -> Any:
    """Build the state from a file's content.

    Args:
        where: the file, for messages.
        tie: tensors that shared memory share it again.
        device: of its tensors; None: the CPU.
        copy: the state shares no memory with what `ReferenceCache.adopt` keeps of `decoded`.

    Raises:
        CorruptError: the tree is invalid, or exceeds the limit on memory.
        PolicyError: the device does not exist, or its memory is full.
    """
    tensors: Mapping[str, torch.Tensor] = decoded.reference.tensors
    try:
        shared = {name for name in tensors if lattice_source(tensors, name) is None} if copy else set()
        if device is not None and torch.device(device).type != "cpu":
            tensors = {name: tensor.to(device, copy=name in shared) for name, tensor in tensors.items()}
        elif device is not None or copy:
            copies = copy_tensors({name: tensors[name] for name in shared})
            tensors = {name: copies.get(name, tensor) for name, tensor in tensors.items()}
    except (AssertionError, RuntimeError, TypeError) as error:  # torch has no error of its own for "no such device"
        expected, do = "a device with memory for the state", "choose another device, or free memory on it"
        raise PolicyError(f"device {device!r}", found=str(error)[:200], expected=expected, do=do) from error
    return unflatten(decoded.tree, tensors, tie=tie, where=where, max_bytes=decoded.max_copy_bytes)
