"""A manifest says what it said, or nothing."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest
from helpers.manifests import run
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint._native import xxh3_128
from shrinkpoint.errors import CorruptError, FormatError, PolicyError, TruncatedError, VersionError
from shrinkpoint.store.manifest import Manifest, decode_store_manifest, encode_store_manifest

NAME = "rank-00000.safetensors"
DELTA = replace(run(3)[2], metrics={"val_loss": 1.71, "ü": math.nan, "top": math.inf}, note="after the crash")


def sealed(document: dict[str, object]) -> bytes:
    """A document under a digest that is right, so that a test reaches what lies behind the digest."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    rest["digest"] = xxh3_128(canonical)
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


def document() -> dict[str, object]:
    return dict(json.loads(encode_store_manifest(DELTA)))


def same(a: Manifest, b: Manifest) -> bool:
    return repr(sorted(a.metrics.items())) == repr(sorted(b.metrics.items())) and all(
        getattr(a, f.name) == getattr(b, f.name) for f in fields(a) if f.name != "metrics"
    )


def test_comes_back_as_it_was() -> None:
    back = decode_store_manifest(encode_store_manifest(DELTA), "here")
    assert same(back, DELTA)
    assert encode_store_manifest(back) == encode_store_manifest(DELTA)
    assert back.depth == 2
    assert back.bases[-1].step == 2


@settings(deadline=None, max_examples=60)
@given(
    metrics=st.dictionaries(st.text(max_size=8), st.floats(), max_size=4),
    note=st.text(max_size=20),
    raw=st.integers(0, 2**62),
)
def test_anything_a_loop_reports_comes_back(metrics: dict[str, float], note: str, raw: int) -> None:
    payload = replace(DELTA.payloads[0], raw_bytes=raw)
    made = replace(DELTA, metrics=metrics, note=note, payloads=(payload,))
    assert same(decode_store_manifest(encode_store_manifest(made), "here"), made)


def test_what_a_save_measured_of_itself_comes_back_and_may_be_missing() -> None:
    stats = {"seconds": 1.25, "stall": math.inf}
    back = decode_store_manifest(encode_store_manifest(replace(DELTA, stats=stats)), "here")
    assert back.stats == stats and "stats" not in document()


LOSSY = replace(DELTA, loss={"chosen": {"bins": 8}, "degradation": 0.01, "tried": [{"bins": 4}, [1, None, True, "x"]]})


def test_what_was_lost_comes_back() -> None:
    back = decode_store_manifest(encode_store_manifest(LOSSY), "here")
    assert same(back, LOSSY) and back.is_lossy
    assert encode_store_manifest(back) == encode_store_manifest(LOSSY)


def test_what_is_no_number_is_text_in_what_was_lost() -> None:
    """A search may measure a nan; the checkpoint must not fail for it, nor its JSON."""
    loss = {"worst": math.nan, "tried": [math.inf, (-math.inf, 1.5)], "chosen": None}
    back = decode_store_manifest(encode_store_manifest(replace(DELTA, loss=loss)), "here")
    assert back.loss == {"worst": "nan", "tried": ["inf", ["-inf", 1.5]], "chosen": None}
    assert not back.is_lossy


def test_a_manifest_of_which_nothing_was_lost_says_nothing_of_it() -> None:
    assert b',"loss":' not in encode_store_manifest(DELTA)
    assert not DELTA.is_lossy and not decode_store_manifest(encode_store_manifest(DELTA), "here").is_lossy
    with pytest.raises(CorruptError, match="spelling"):
        decode_store_manifest(sealed({**document(), "loss": None}), "here")


@pytest.mark.parametrize("loss", [0, 1.5, "x", [], {}, {"chosen": None}, {"chosen": 0}, True])
def test_whatever_stands_for_a_loss_can_be_looked_at(loss: object) -> None:
    back = decode_store_manifest(sealed({**document(), "loss": loss}), "here")
    assert back.loss == loss and back.is_lossy == (loss == {"chosen": 0})


def test_every_flipped_bit_is_found() -> None:
    data = encode_store_manifest(DELTA)
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(FormatError) as caught:
                decode_store_manifest(bytes(damaged), "here")
            assert not isinstance(caught.value, VersionError), "damage must not look like a newer release"


def test_every_prefix_is_found() -> None:
    data = encode_store_manifest(DELTA)
    for length in range(len(data)):
        with pytest.raises((TruncatedError, CorruptError)):
            decode_store_manifest(data[:length], "here")


@pytest.mark.parametrize(
    "other", [b" ", b"{}", b"[]}", b"null}", b'{"digest":1}', b"{" * 100_000 + b"}", b"\xff}", b"1" * 9000 + b"}"]
)
def test_what_is_no_manifest_is_refused(other: bytes) -> None:
    with pytest.raises(FormatError):
        decode_store_manifest(other, "here")


def test_another_spelling_is_refused() -> None:
    with pytest.raises(CorruptError, match="spelling"):
        decode_store_manifest(json.dumps(document()).encode(), "here")


def test_a_newer_release_is_named_as_such() -> None:
    with pytest.raises(VersionError, match="format 4"):
        decode_store_manifest(sealed({**document(), "format": 4, "new": True}), "here")


def test_weights_only_is_format_2_and_all_else_format_1() -> None:
    light = replace(DELTA, weights_only=True)
    back = decode_store_manifest(encode_store_manifest(light), "here")
    assert same(back, light) and encode_store_manifest(back) == encode_store_manifest(light)
    assert b'"format":2,' in encode_store_manifest(light) and b'"format":1,' in encode_store_manifest(DELTA)
    assert b"weights_only" not in encode_store_manifest(DELTA)


def test_a_chain_that_goes_back_in_steps_is_format_3_and_has_no_step_twice() -> None:
    link = DELTA.bases[-1]
    back = replace(DELTA, bases=(replace(link, step=DELTA.step + 1),))
    for one in (back, replace(back, weights_only=True)):
        data = encode_store_manifest(one)
        assert b'"format":3,' in data and same(decode_store_manifest(data, "here"), one)
    with pytest.raises(PolicyError, match="a base of the same step"):
        encode_store_manifest(replace(DELTA, bases=(replace(link, step=DELTA.step),)))
    row = document()["bases"][-1]
    with pytest.raises(CorruptError, match="a step twice"):
        decode_store_manifest(sealed({**document(), "bases": [row, row]}), "here")


@pytest.mark.parametrize(
    "change",
    [{"weights_only": True}, {"weights_only": False}, {"format": 2}, {"format": 3}, {"format": 2, "weights_only": 1}],
)
def test_weights_only_and_the_format_agree(change: dict[str, object]) -> None:
    with pytest.raises(CorruptError, match="weights_only"):
        decode_store_manifest(sealed({**document(), **change}), "here")


def test_a_hostile_document_under_a_right_digest_is_refused() -> None:
    for change in [
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"step": 10**15},
        {"step": 2},  # not above its bases
        {"files": []},
        {"files": [["../rank-00000.safetensors", 1, "0" * 32]]},
        {"files": [["rank-00000.safetensors", -1, "0" * 32]]},
        {"files": [["rank-00000.safetensors", 1, "0" * 31 + "/"]]},
        {"files": [["rank-00000.safetensors", 1, "0" * 32]] * 2},
        {"files": [["rank-00000.safetensors", 1]]},
        {"files": 7},
        {"bases": [[1, "id", "0" * 32, 1, "/etc/passwd", ""]]},
        {"bases": [[1, "id", "0" * 32, 1, NAME, "bases/../../x"]]},
        {"bases": [[2, "i", "0" * 32, 1, NAME, ""], [1, "i", "1" * 32, 1, NAME, ""]]},
        {"created": "yesterday"},
        {"created": "2026-01-01T00:00:00.000"},
        {"metrics": {"val_loss": "low"}},
        {"metrics": []},
        {"raw_bytes": None},
        {"note": None},
    ]:
        with pytest.raises(CorruptError):
            decode_store_manifest(sealed({**document(), **change}), "here")


def test_a_missing_field_is_refused() -> None:
    for name in document():
        if name != "digest":
            with pytest.raises(FormatError):
                decode_store_manifest(sealed({key: value for key, value in document().items() if key != name}), "here")
