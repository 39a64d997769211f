"""Damage is found: a cut anywhere, a flipped byte anywhere, a byte too many; and it is told so that one can act."""

from __future__ import annotations

import pytest
from helpers.malformed import coded, contents, file, plain, reader, some, split, unpacked

from shrinkpoint.container import FileReader
from shrinkpoint.errors import CorruptError, FormatError, ShrinkpointError, TruncatedError
from shrinkpoint.storage.base import MemorySource

DATA = file(some(), tree={"a": [1, "two"]}, report={"r": 1})
SPILLED = file(some(), spool=0)
HEAD = len(DATA) - len(split(DATA)[1])
PARTS_END = HEAD + len(unpacked(DATA)[2])


def read_all(data):
    opened = reader(data)
    for head in opened.records:
        opened.read(head)


@pytest.mark.parametrize("data", [DATA, SPILLED], ids=["exact", "reserved"])
def test_every_prefix_is_truncated(data):
    for cut in range(len(data)):
        with pytest.raises(TruncatedError) as caught:
            reader(data[:cut])
        assert caught.value.expected
        assert caught.value.do


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
@pytest.mark.parametrize("data", [DATA, SPILLED], ids=["exact", "reserved"])
def test_every_flipped_byte_is_found(data, mask):
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= mask
        with pytest.raises(FormatError) as caught:
            read_all(flipped)
        assert all([caught.value.where, caught.value.found, caught.value.expected, caught.value.do])


def test_every_flipped_byte_of_the_payload_is_found_by_a_check():
    for position in range(HEAD, PARTS_END):
        flipped = bytearray(DATA)
        flipped[position] ^= 0x10
        (error,) = reader(flipped).check()
        assert "tensor '" in error.where
        assert isinstance(error, CorruptError)


def test_check_names_every_damaged_record_and_goes_on():
    data = file([plain("a"), plain("b"), coded("c", {"x": b"1234", "y": b"5678"}), plain("d")])
    damaged = bytearray(data)
    end = len(data) - len(split(data)[1]) + len(unpacked(data)[2])
    for tensor in range(0, 32, 8):
        damaged[end - 32 + tensor] ^= 1
    places = [error.where for error in reader(damaged).check()]
    assert [place.partition("tensor ")[2][:3] for place in places] == ["'a'", "'b'", "'c'", "'d'"]


def test_check_reads_large_parts_in_windows(monkeypatch):
    monkeypatch.setattr("shrinkpoint.container.reader.WINDOW_BYTES", 7)
    assert contents(file([plain("a", "F32", (9,)), plain("b", "U8", (14,))]))


@pytest.mark.parametrize("more", [b"\0", b"x" * 8, DATA])
def test_file_with_more_than_it_announces_is_corrupt(more):
    with pytest.raises(CorruptError, match=f"{len(DATA) + len(more)} bytes; expected {len(DATA)}"):
        reader(DATA + more)


def test_message_names_file_and_tensor_and_both_digests():
    damaged = bytearray(DATA)
    damaged[PARTS_END - 1] ^= 1
    opened = reader(damaged)
    with pytest.raises(CorruptError) as caught:
        opened.read(opened.records[-1])
    assert caught.value.where == "a.safetensors: tensor 'half', part 'values'"
    assert caught.value.expected == opened.records[-1].digest
    assert opened.records[-1].digest not in caught.value.found
    assert "verify" in caught.value.do


class Cut(MemorySource):
    """Loses its end after it was opened."""

    def read(self, offset, length):
        if HEAD + 8 < offset < PARTS_END:
            raise TruncatedError("a", found="the end", expected="more", do="nothing")
        return super().read(offset, length)


def test_check_reports_what_cannot_be_read():
    errors = list(FileReader(Cut(DATA), "a").check())
    assert errors
    assert all(isinstance(error, TruncatedError) for error in errors)


class Watched(MemorySource):
    """Refuses to be asked for what it does not have."""

    def read(self, offset, length):
        assert offset + length <= self.size
        return super().read(offset, length)


def test_nothing_is_read_that_the_file_does_not_have():
    for cut in range(len(DATA)):
        with pytest.raises(ShrinkpointError):
            FileReader(Watched(DATA[:cut]), "a")
    for position in range(8):
        for value in (1, 0x7F, 0xFF):
            data = bytearray(DATA)
            data[position] ^= value
            with pytest.raises(FormatError):
                FileReader(Watched(data), "a")
