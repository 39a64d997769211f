"""Reports of stores, runs and files as plain data, for tables and for programs; imports no torch."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from shrinkpoint.container import FileReader, RecordHead
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.store.directory import find_checkpoints, read_directory_manifest
from shrinkpoint.store.manifest import DirectoryManifest, LossIncrease, Manifest
from shrinkpoint.tensors.info import JSON, Role

_STORE_ONLY = ("id", "chain", "forgotten", "keyframe")
_DIRECTORY_ONLY = ("folder", "ranks")


@dataclass(frozen=True)
class CheckpointReport:
    """One checkpoint of a store or of a framework's run, from its manifest.

    Attributes:
        folder: path of its directory, relative to the run; None for a checkpoint of a store.
        step: the training step it was saved at; None if unknown.
        id: random hex; a step that is saved again gets a new one; "" for a checkpoint of a run.
        created: UTC, ISO 8601.
        scheme: which scheme wrote it.
        depth: deltas above the keyframe, on the rank that has most; 0 for a keyframe.
        chain: the steps it is decoded from, keyframe first, itself last; empty for a checkpoint of a run.
        ranks: how many processes wrote it.
        raw_bytes: bytes of the tensors of the state.
        stored_bytes: bytes of its own files, without links to its bases.
        metrics: what the training loop measured.
        lossy_restores: how many lossy restores the state has behind it.
        loss: what was lost, and what was measured to decide it; None: nothing.
        note: free text.
        forgotten: hidden, and deleted by the next `prune` unless a kept checkpoint depends on it.
        files: (name, bytes, header digest) of its payloads.
    """

    folder: str | None
    step: int | None
    id: str
    created: str
    scheme: str
    depth: int
    chain: tuple[int, ...]
    ranks: int
    raw_bytes: int
    stored_bytes: int
    metrics: dict[str, float]
    lossy_restores: int
    loss: JSON
    note: str
    forgotten: bool
    files: tuple[tuple[str, int, str], ...]

    @property
    def keyframe(self) -> bool:
        return self.depth == 0

    def to_json(self, *, loss: bool = True) -> dict[str, Any]:
        """The report as a JSON object, with the fields that a store's or a run's checkpoint has.

        `ratio` is raw bytes for each stored byte, null if there are none. `rise` is the relative increase of the loss,
        null if it was not measured, as `measured` says, or nothing was lost.

        Args:
            loss: include what the scheme recorded of the loss; a store's checkpoint has no entry if nothing was lost.
        """
        increase = LossIncrease.from_loss(self.loss)
        document = {
            **asdict(self),
            "files": [{"name": name, "bytes": size, "digest": digest} for name, size, digest in self.files],
            "keyframe": self.keyframe,
            "ratio": _ratio(self.raw_bytes, self.stored_bytes),
            "rise": increase.value,
            "measured": increase.is_measured,
        }
        omitted = set(_DIRECTORY_ONLY if self.folder is None else _STORE_ONLY)
        if not loss or (self.loss is None and self.folder is None):
            omitted.add("loss")
        return {name: value for name, value in document.items() if name not in omitted}


@dataclass(frozen=True)
class StoreReport:
    """Every checkpoint of a store, or below the directory of a framework's run.

    Attributes:
        where: its path or URL.
        checkpoints: a store's by rising step, a run's in the order of the numbers in their names.
        broken: (place, reason) of every checkpoint whose manifest cannot be read.
        is_run: it is the directory of a framework's run.
    """

    where: str
    checkpoints: tuple[CheckpointReport, ...]
    broken: tuple[tuple[str, str], ...] = ()
    is_run: bool = False

    @property
    def raw_bytes(self) -> int:
        return sum(checkpoint.raw_bytes for checkpoint in self.checkpoints)

    @property
    def stored_bytes(self) -> int:
        return sum(checkpoint.stored_bytes for checkpoint in self.checkpoints)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object; only `show` prints what a scheme recorded of the loss."""
        document: dict[str, Any] = {
            "where": self.where,
            "checkpoints": [checkpoint.to_json(loss=False) for checkpoint in self.checkpoints],
            "broken": [{"where": where, "found": found} for where, found in self.broken],
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
        }
        return document if self.is_run else {**document, "ratio": _ratio(self.raw_bytes, self.stored_bytes)}


def checkpoint_report(
    manifest: Manifest | DirectoryManifest, *, folder: str | None = None, forgotten: bool = False
) -> CheckpointReport:
    """Reports what the manifest of a checkpoint says, without looking at its files.

    Args:
        folder: path of the directory of a framework's checkpoint; None for one of a store.
    """
    chain: tuple[int, ...] = ()
    if folder is None and manifest.step is not None:
        chain = (*(base.step for base in manifest.bases), manifest.step)
    return CheckpointReport(
        folder=folder,
        step=manifest.step,
        id=manifest.id if folder is None else "",
        created=manifest.created,
        scheme=manifest.scheme,
        depth=manifest.depth,
        chain=chain,
        ranks=1 if folder is None else len(manifest.payloads),
        raw_bytes=manifest.raw_bytes,
        stored_bytes=manifest.stored_bytes,
        metrics=dict(manifest.metrics),
        lossy_restores=manifest.lossy_restores,
        loss=manifest.loss,
        note=manifest.note,
        forgotten=forgotten,
        files=tuple((payload.name, payload.size, payload.digest) for payload in manifest.payloads),
    )


def store_report(
    where: str,
    manifests: Iterable[Manifest],
    *,
    forgotten: Collection[int] = frozenset(),
    broken: Iterable[tuple[str, str]] = (),
) -> StoreReport:
    """Reports a store from its manifests, given in any order."""
    rising = sorted(manifests, key=lambda manifest: manifest.step)
    reports = (checkpoint_report(manifest, forgotten=manifest.step in forgotten) for manifest in rising)
    return StoreReport(where, tuple(reports), tuple(broken))


def run_report(root: Path) -> StoreReport:
    """Reports every checkpoint below a directory, or the one checkpoint that the directory is."""
    reports, broken = [], []
    for directory in find_checkpoints(root):
        folder = directory.relative_to(root).as_posix() if directory != root else directory.name
        try:
            reports.append(checkpoint_report(read_directory_manifest(directory), folder=folder))
        except ShrinkpointError as error:
            broken.append((error.where, error.found))
    return StoreReport(str(root), tuple(reports), tuple(broken), is_run=True)


def _ratio(raw: int, stored: int) -> float | None:
    return raw / stored if raw and stored else None


class TensorRow(NamedTuple):
    """One tensor of a file.

    Attributes:
        name: its name in the state.
        dtype: its dtype, as text.
        shape: its shape.
        role: its role ("parameter", "moment1", ...).
        raw_bytes: bytes of its values.
        stored_bytes: bytes in the file; in a record of several tensors, a share in proportion to raw bytes.
        how: the kind of its recipe ("plain", "same", ...).
        record: name of its record.
        shared: the record holds other tensors too.
        needs_base: decoding needs the parent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    raw_bytes: int
    stored_bytes: int
    how: str
    record: str
    shared: bool
    needs_base: bool


class RoleRow(NamedTuple):
    """Totals of all tensors of one role."""

    role: str
    tensors: int
    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class FileReport:
    """One file.

    Attributes:
        where: its path.
        size: bytes of the whole file.
        digest: digest of its header, which has the digests of all other bytes.
        scheme: which scheme wrote it.
        parent: how it names the file it depends on; None for a keyframe.
        tensors: in the order of the file.
        values: (path, text) of the plain values of the state.
    """

    where: str
    size: int
    digest: str
    scheme: str
    parent: JSON
    tensors: tuple[TensorRow, ...] = field(repr=False)
    values: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def raw_bytes(self) -> int:
        return sum(row.raw_bytes for row in self.tensors)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of the header: names, shapes, digests, plain values."""
        return self.size - sum(row.stored_bytes for row in self.tensors)

    @property
    def roles(self) -> list[RoleRow]:
        """The totals of each role that the file has."""
        rows_by_role = {role.value: [row for row in self.tensors if row.role == role.value] for role in Role}
        return [
            RoleRow(name, len(rows), sum(row.raw_bytes for row in rows), sum(row.stored_bytes for row in rows))
            for name, rows in rows_by_role.items()
            if rows
        ]

    def to_json(self, *, tensors: bool) -> dict[str, Any]:
        """The report as a JSON object; `tensors`: with one entry for each tensor."""
        document = {
            "where": self.where,
            "bytes": self.size,
            "digest": self.digest,
            "scheme": self.scheme,
            "parent": self.parent,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.size,
            "ratio": self.raw_bytes / self.size if self.raw_bytes else None,
            "header_bytes": self.overhead_bytes,
            "roles": [row._asdict() for row in self.roles],
            "values": dict(self.values),
        }
        return {**document, "tensors": [row._asdict() for row in self.tensors]} if tensors else document


def file_report(reader: FileReader, where: str) -> FileReport:
    """Reports what the header of an open file says, without reading its payload."""
    rows = tuple(row for head in reader.records for row in _tensor_rows(head))
    values = list_plain_values(reader.tree)
    return FileReport(where, reader.size, reader.digest, reader.scheme, reader.parent, rows, values)


def _tensor_rows(head: RecordHead) -> Iterator[TensorRow]:
    stored = sum(entry.size for entry in head.parts.values())
    for info, share in zip(head.infos, _split_bytes([info.nbytes for info in head.infos], stored), strict=True):
        yield TensorRow(
            name=info.name,
            dtype=info.dtype,
            shape=info.shape,
            role=info.role.value,
            raw_bytes=info.nbytes,
            stored_bytes=share,
            how=str(head.recipe.get("kind", "?")) if isinstance(head.recipe, dict) else "?",
            record=head.name,
            shared=len(head.infos) > 1,
            needs_base=head.base is not None,
        )


def _split_bytes(weights: list[int], total: int) -> list[int]:
    """Splits `total` in proportion to the weights, so that the shares add up to it."""
    total_weight = sum(weights)
    if not total_weight:
        return [total, *[0] * (len(weights) - 1)] if weights else []
    ends = [total * cumulative // total_weight for cumulative in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


# Plain values of a tree, for display only: a malformed tree is shown unchanged; `unflatten` is what decodes a tree.

_TENSOR_TAGS = {"$t", "$p", "$q", "$n", "$B"}
_NEST_TAGS = {"$u", "$z", "$o", "$c"}
_MAX_DEPTH = 128
_STRUCT_CODES = {
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
}
"""Codes of `struct` by the dtype of a numpy scalar without its byte order."""


def list_plain_values(tree: JSON) -> tuple[tuple[str, str], ...]:
    """Lists (path, text) of every plain value of a state's tree, in its order; tensors and arrays are left out.

    >>> extra = {"epoch": 3, "betas": {"$u": [0.9, 0.95]}, "tags": []}
    >>> list_plain_values({"model": {"w": {"$t": ["model/w"]}}, "extra": extra})
    (('extra/epoch', '3'), ('extra/betas', '(0.9, 0.95)'), ('extra/tags', '[]'))
    """
    return tuple(_iter_values(tree, "", 0))


def _iter_values(tree: JSON, path: str, depth: int) -> Iterator[tuple[str, str]]:
    tag, inner = _split_tag(tree)
    if tag in _TENSOR_TAGS:
        return
    if not _has_tensor(tree, depth) and _is_small(tree):
        yield path or "state", _format(tree, depth)
        return
    for key, item in _child_items(tag, inner if tag else tree):
        yield from _iter_values(item, f"{path}/{key}" if path else key, depth + 1)


def _split_tag(tree: JSON) -> tuple[str, JSON]:
    """("$x", content) of a tagged value, else ("", None)."""
    if isinstance(tree, dict) and len(tree) == 1:
        ((key, inner),) = tree.items()
        if key.startswith("$"):
            return key, inner
    return "", None


def _child_items(tag: str, inner: JSON) -> Iterator[tuple[str, JSON]]:
    if tag in _NEST_TAGS and isinstance(inner, dict | list):
        yield from _child_items("", inner)
    elif tag == "$m" and isinstance(inner, list) and inner:
        yield from _child_items("", inner[0])
    elif tag == "$d" and isinstance(inner, list):
        yield from ((_format(pair[0], 0), pair[1]) for pair in inner if isinstance(pair, list) and len(pair) == 2)
    elif isinstance(inner, dict):
        yield from inner.items()
    elif isinstance(inner, list):
        yield from ((str(index), item) for index, item in enumerate(inner))


def _has_tensor(tree: JSON, depth: int) -> bool:
    if depth > _MAX_DEPTH or not isinstance(tree, dict | list):
        return False
    items = tree.values() if isinstance(tree, dict) else tree
    return _split_tag(tree)[0] in _TENSOR_TAGS or any(_has_tensor(item, depth + 1) for item in items)


def _is_small(tree: JSON) -> bool:
    """Whether a value is shown on one line: a scalar, or a sequence of at most 8; a dict gets a line for each value."""
    tag, inner = _split_tag(tree)
    content = inner if tag in ("$u", "$z") else tree
    if isinstance(content, list):
        return len(content) <= 8 and all(not isinstance(item, list) and _is_small(item) for item in content)
    return tag not in ("", "$o", "$c", "$d", "$m") or not isinstance(tree, dict) or not tree


def _format(tree: JSON, depth: int) -> str:
    tag, inner = _split_tag(tree)
    if tag == "$f":  # nan or an infinity, as the bits of a double in hex
        return {"7ff0000000000000": "inf", "fff0000000000000": "-inf"}.get(str(inner), "nan")
    if tag == "$i":
        return f"0x{inner}"
    if tag == "$b":
        return f"bytes in base64: {inner}"
    if tag == "$g":
        return _format_numpy_scalar(inner)
    if tag in ("$u", "$z") and isinstance(inner, list) and depth < _MAX_DEPTH:
        items = ", ".join(_format(item, depth + 1) for item in inner)
        return f"({items},)" if len(inner) == 1 else f"({items})"
    if isinstance(tree, list) and depth < _MAX_DEPTH:
        return "[" + ", ".join(_format(item, depth + 1) for item in tree) + "]"
    return repr(tree)


def _format_numpy_scalar(inner: Any) -> str:
    """Formats a numpy scalar, given as dtype and little-endian bytes in hex, by its value if `struct` has the type."""
    dtype, digits = inner if isinstance(inner, list) and len(inner) == 2 else ("?", inner)
    try:
        (value,) = struct.unpack("<" + _STRUCT_CODES[str(dtype)[1:]], bytes.fromhex(str(digits)))
        return f"{value!r} (numpy {dtype})"
    except (KeyError, ValueError, struct.error):
        return f"numpy {dtype} 0x{digits}"
