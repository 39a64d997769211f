"""Records and files for tests: whole ones, and ones that say what no writer of ours would."""

from __future__ import annotations

import io
import json
import re
import struct
import zlib

import pytest

from shrinkpoint._native import xxh3_128
from shrinkpoint.container import FileReader, FileWriter
from shrinkpoint.container.header import MARKER_ENTRY, MARKER_SHAPE, PREFIX
from shrinkpoint.errors import CorruptError, FormatError
from shrinkpoint.storage.base import MemorySource
from shrinkpoint.tensors.info import EncodedRecord, Role, TensorInfo

SEAL = slice(8 + len(PREFIX), 8 + len(PREFIX) + 32)


def plain(name, dtype="F32", shape=(2,), seed=0):
    """A plain record of one tensor."""
    info = TensorInfo(name, tuple(shape), dtype)
    data = bytes((seed + 7 * i) % 251 for i in range(info.nbytes)) if dtype != "BOOL" else bytes(info.nbytes)
    return EncodedRecord(name, (info,), {"kind": "plain"}, {"values": data}, xxh3_128(data))


def coded(name, parts, members=None, base=None, recipe=None):
    """A record of any recipe."""
    infos = tuple(members or [TensorInfo(name, (3, 5), "BF16", Role.MOMENT2)])
    is_plain = recipe == {"kind": "plain"}
    digest = xxh3_128(b"".join(parts.values()) if is_plain else name.encode())
    return EncodedRecord(name, infos, recipe or {"kind": "delta", "coder": "rans"}, parts, digest, base)


def some():
    """One record of each kind."""
    bundle = [TensorInfo("b/1", (2,), "F32", Role.BUFFER), TensorInfo("b/2", (1,), "F32", Role.BUFFER, (4,))]
    return [
        plain("step", "I64", ()),
        plain("mask", "BOOL", (3,)),
        plain("w", "F32", (2, 3)),
        coded("v", {"codes": b"\1\2\3", "side": b""}, base="0123456789abcdef" * 2),
        coded("~bundle", {"codes": b"12345"}, bundle),
        coded(
            "~plain",
            {"values": bytes(32)},
            [TensorInfo("x", (1,), "C128"), TensorInfo("y", (2,), "F64")],
            None,
            {"kind": "plain"},
        ),
        coded("same", {}, base="f" * 32),
        plain("half", "BF16", (1,)),
    ]


def file(records, *, spool=None, expected=None, tree=None, parent=None, report=None):
    """The bytes of a file."""
    sink = io.BytesIO()
    infos = [info for record in records for info in record.infos] if expected is None else expected
    writer = FileWriter(sink, scheme="lossless", parent=parent, tree=tree, expected=infos)
    writer.spool = writer.spool if spool is None else spool
    for record in records:
        writer.add(record)
    size, digest = writer.finish(report)
    data = sink.getvalue()
    assert size == len(data)
    assert digest == data[SEAL].decode()
    return data


def reader(data):
    return FileReader(MemorySource(data), "a.safetensors")


def contents(data):
    """All records of a file, with parts as bytes, in a form that compares."""
    opened = reader(data)
    assert list(opened.check()) == []
    return [comparable(opened.read(head)) for head in opened.records]


def comparable(record):
    parts = {name: bytes(memoryview(part)) for name, part in record.parts.items()}
    return (record.name, record.infos, record.recipe, parts, record.digest, record.base)


def split(data):
    """The header's text and the payload of a file."""
    (length,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + length], data[8 + length :]


def sealed(text, payload=b""):
    """A file of this header text, with a right length and, where it begins as it must, a right digest."""
    text = text.ljust(-(-len(text) // 8) * 8)
    data = bytearray(struct.pack("<Q", len(text)) + text + payload)
    data[SEAL] = b"0" * 32
    head = bytes(data[: 8 + len(text)])
    data[SEAL] = xxh3_128(head).encode()
    return bytes(data)


def unpacked(data):
    """The entries, the document and the payload of a file of any format.

    Of formats 2 and 3 the document is the index with the members of the header's own, and with `digests` in hex;
    neither entries nor payload hold the index, and entries not the marker.
    """
    text, payload = split(data)
    entries = json.loads(text)
    document = json.loads(entries.pop("__metadata__")["shrinkpoint"])
    if document["format"] == 1:
        return entries, document, payload
    begin, _ = entries.pop("~index")["data_offsets"]
    entries.pop(MARKER_ENTRY, None)
    inflater = zlib.decompressobj()
    index = json.loads(inflater.decompress(payload[begin:]))
    digests = [inflater.unused_data[i : i + 16].hex() for i in range(0, len(inflater.unused_data), 16)]
    del document["index"]
    return entries, {**document, **index, "digests": digests}, payload[:begin]


def repacked(entries, document, payload):
    """A file of these, sealed: the inverse of `unpacked`, which takes anything that JSON can say."""
    metadata = {"format": "pt", "shrinkpoint.digest": "0" * 32}
    if "digests" not in document:
        metadata["shrinkpoint"] = json.dumps(document)
        return sealed(_json_bytes({"__metadata__": metadata, **entries}), payload)
    outer = {key: document[key] for key in ("format", "writer") if key in document}
    index = {key: document[key] for key in document if key not in ("format", "writer", "digests")}
    return with_index(entries, outer, zlib.compress(_json_bytes(index)) + _digest_bytes(document["digests"]), payload)


def with_index(entries, outer, index, payload):
    """A file of format 2 or 3 with this index; `outer` are the other members of the document in the header."""
    metadata = {"format": "pt", "shrinkpoint.digest": "0" * 32}
    metadata["shrinkpoint"] = json.dumps({**outer, "index": xxh3_128(index)})
    begin = len(payload)
    entry = {"dtype": "U8", "shape": [len(index)], "data_offsets": [begin, begin + len(index)]}
    marker = {MARKER_ENTRY: {"dtype": "U8", "shape": MARKER_SHAPE, "data_offsets": [begin, begin]}}
    marker = marker if outer.get("format") == 3 else {}
    return sealed(_json_bytes({"__metadata__": metadata, **entries, **marker, "~index": entry}), payload + index)


def _json_bytes(value):
    return json.dumps(value, separators=(",", ":")).encode()


def _digest_bytes(digests):
    """The digests of an index; those that are none are left out."""
    listed = digests if isinstance(digests, list) else []
    return b"".join(bytes.fromhex(d) for d in listed if isinstance(d, str) and re.fullmatch("([0-9a-f]{2})*", d))


def changed(data, change):
    """A file whose header `change(entries, document)` has altered, sealed again."""
    entries, document, payload = unpacked(data)
    change(entries, document)
    return repacked(entries, document, payload)


def assert_corrupt(data, change):
    """A sound file is refused, in few words, for what `change(entries, document)` alters in its header."""
    assert reader(changed(data, lambda *_: None)).records
    with pytest.raises(CorruptError) as caught:
        reader(changed(data, change))
    assert all([caught.value.where == "a.safetensors", caught.value.found, caught.value.expected, caught.value.do])
    assert len(str(caught.value)) < 1000


def read_or_refused(data, payload):
    """Whatever is not refused has the types it should have."""
    try:
        opened = reader(data)
    except FormatError as error:
        assert all([error.where, error.found, error.expected, error.do])
        return
    assert type(opened.scheme) is type(opened.writer) is str
    assert type(opened.parent) in (type(None), dict)
    for head in opened.records:
        assert {type(head.name), type(head.digest)} == {str}
        assert all(type(info.name) is str and info.nbytes >= 0 for info in head.infos)
        assert {type(size) for info in head.infos for size in (*info.shape, *(info.offsets or ()))} <= {int}
        assert all(entry.offset + entry.size <= opened.size for entry in head.parts.values())
    assert sum(head.stored for head in opened.records) == len(payload)
