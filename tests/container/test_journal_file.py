"""Promise: of a journal file that was cut or damaged anywhere, a reader gets whole records of the run, or an error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.container.journal_file import (
    JOURNAL_MAGIC,
    JournalFile,
    encode_journal_header,
    encode_journal_record,
)
from shrinkpoint.errors import CorruptError, FormatError, TruncatedError, VersionError
from shrinkpoint.storage.base import MemorySource

BLOBS = [{"gradients": [bytes(range(40)), b"", b"abc"], "rng/torch": [b"seed" * 9]}, {}, {"gradients": [b"\0" * 64]}]
Row = tuple[int, dict, dict[str, bytes]]


def written(fields: dict = {"rank": 0}) -> tuple[bytes, list[int], list[Row]]:  # noqa: B006
    """A file of three records, the offsets at which its header and records end, and the records."""
    data, digest = encode_journal_header(fields)
    ends, rows = [len(data)], []
    for step, blobs in enumerate(BLOBS):
        buffers, digest = encode_journal_record(step, {"count": 7 * step}, blobs, digest)
        data += b"".join(buffers)
        ends.append(len(data))
        rows.append((step, {"count": 7 * step}, {name: b"".join(parts) for name, parts in blobs.items()}))
    return data, ends, rows


def read(data: bytes) -> list[Row]:
    file = JournalFile(MemorySource(data), "a.journal")
    return [(r.step, r.fields, {name: bytes(blob) for name, blob in r.blobs.items()}) for r in file.records()]


DATA, ENDS, ROWS = written()


def test_what_was_written_is_read():
    assert read(DATA) == ROWS
    assert JournalFile(MemorySource(DATA), "a").fields == {"rank": 0}


def test_a_file_that_is_cut_at_any_byte_has_all_records_before_it():
    for size in range(len(DATA)):
        if size < ENDS[0]:
            with pytest.raises(TruncatedError):
                read(DATA[:size])
            continue
        assert read(DATA[:size]) == ROWS[: sum(end <= size for end in ENDS[1:])]


def test_a_reader_says_where_a_writer_goes_on():
    for size in range(ENDS[0], len(DATA)):
        file = JournalFile(MemorySource(DATA[:size]), "a")
        whole = list(file.records())
        assert file.end == max(end for end in ENDS if end <= size)
        buffers, _ = encode_journal_record(len(whole), {}, {}, file.digest)
        longer = DATA[: file.end] + b"".join(buffers)
        assert read(longer) == [*ROWS[: len(whole)], (len(whole), {}, {})]


def test_a_flipped_bit_is_found():
    for place in range(len(DATA) * 8):
        damaged = bytearray(DATA)
        damaged[place // 8] ^= 1 << place % 8
        try:
            rows = read(bytes(damaged))
        except FormatError:
            continue
        # in the body of the last record it looks as a power cut does: that record is not there
        assert rows == ROWS[:-1] and place // 8 >= ENDS[-2]


def test_a_flipped_bit_before_the_last_record_is_an_error_that_names_the_byte():
    for place in range(ENDS[0], ENDS[-2]):
        damaged = bytearray(DATA)
        damaged[place] ^= 0x10
        begin = max(end for end in ENDS if end <= place)
        with pytest.raises(CorruptError, match=f"byte {begin}:"):
            read(bytes(damaged))


def test_records_are_not_left_out_repeated_exchanged_or_taken_from_another_file():
    header, *records = [DATA[begin:end] for begin, end in zip([0, *ENDS], ENDS, strict=False)]
    other, ends, _ = written({"rank": 1})
    for order in ([0, 2, 1, 1], [1, 0, 2], [0, 0, 1, 2], [1, 2, 0]):
        with pytest.raises(CorruptError):
            read(header + b"".join(records[i] for i in order))
    with pytest.raises(CorruptError):
        read(header + other[ends[0] :])


@pytest.mark.parametrize("tail", [1, 40, 5000, 3 << 20])
def test_zeros_at_the_end_are_what_a_power_cut_leaves(tail):
    assert read(DATA + bytes(tail)) == ROWS
    with pytest.raises(CorruptError):
        read(DATA + bytes(tail + 60) + b"x")


def test_a_record_asks_for_no_more_memory_than_the_file_has():
    # all numbers are right, but there is less than they say
    buffers, _ = encode_journal_record(3, {}, {"gradients": [bytes(1 << 20)]}, b"")
    assert read(DATA + buffers[0]) == ROWS


def test_a_newer_format_and_another_file_are_named():
    data, _ = encode_journal_header({"format": 2})
    with pytest.raises(VersionError, match="release that wrote it"):
        read(data)
    with pytest.raises(CorruptError, match="journal"):
        read(b"PK\3\4" * 40)
    with pytest.raises(CorruptError, match="at most"):
        read(JOURNAL_MAGIC + b"\xff" * 60)


@pytest.mark.parametrize(
    "blobs", [None, 3, [3], [["a"]], [["a", -1]], [["a", 1.0]], [["a", 99]], [["a", 1], ["a", 1]], []]
)
def test_blobs_that_do_not_fill_a_record_are_refused(blobs, monkeypatch):
    import json

    from shrinkpoint.container import journal_file

    header, digest = encode_journal_header({})
    dumps = json.dumps
    monkeypatch.setattr(journal_file.json, "dumps", lambda value, **how: dumps({**value, "blobs": blobs}, **how))
    buffers, _ = encode_journal_record(0, {}, {"a": [b"xy"]}, digest)
    with pytest.raises(CorruptError):
        read(header + b"".join(buffers))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(0, len(DATA)), st.integers(0, len(DATA)))
def test_whatever_the_bytes_are_records_are_those_of_the_run_or_an_error_is_raised(noise, begin, end):
    try:
        rows = read(DATA[:begin] + noise + DATA[end:])
    except FormatError:
        return
    assert rows == ROWS[: len(rows)]
