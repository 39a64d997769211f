"""Promise: checkpoints of a store are decoded once each, however their chains are asked for."""

from __future__ import annotations

import pytest
from helpers.stores import state

from shrinkpoint.codec.decoder import RecordDigests
from shrinkpoint.errors import CorruptError
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import Store, decode
from shrinkpoint.tensors.flat_state import unflatten


@pytest.fixture
def store():
    """Chains of three: steps 1 to 3, 4 to 6 and 7 alone."""
    with Store(MemoryStorage(), keyframe_every=3) as store:
        for step in range(1, 8):
            store.save(step, state(step))
        yield store


def decoded_files(store, monkeypatch, steps=None):
    """The checkpoints that are yielded, and how many files were decoded for them."""
    calls, decode_records = [], decode.decode_records
    monkeypatch.setattr(
        decode, "decode_records", lambda *args, **options: (calls.append(1), decode_records(*args, **options))[1]
    )
    return [*decode.iter_checkpoints(store.storage, store.list(), steps=steps)], len(calls)


def test_every_checkpoint_comes_once_as_it_was_saved(store, monkeypatch):
    checkpoints, count = decoded_files(store, monkeypatch)
    assert [manifest.step for manifest, _ in checkpoints] == [1, 2, 3, 4, 5, 6, 7] and count == 7
    for manifest, decoded in checkpoints:
        restored = unflatten(decoded.tree, decoded.reference.tensors, where="here")
        expected = state(manifest.step)
        assert restored["seed"] == manifest.step and restored["model"]["w"].equal(expected["model"]["w"])


def test_chains_without_a_requested_step_are_not_decoded(store, monkeypatch):
    checkpoints, count = decoded_files(store, monkeypatch, steps={5, 7, 99})
    assert [manifest.step for manifest, _ in checkpoints] == [5, 7] and count <= 4
    assert decoded_files(store, monkeypatch, steps=()) == ([], 0)


def test_values_that_nobody_wants_are_not_decoded_and_bases_not_compared(store, monkeypatch):
    options, compared, decode_records = [], [], decode.decode_records

    def spy(*arguments, **more):
        options.append((more["with_values"], more["trust_base"]))
        return decode_records(*arguments, **more)

    monkeypatch.setattr(decode, "decode_records", spy)
    monkeypatch.setattr(RecordDigests, "check_base", lambda self, digest: compared.append(digest))
    ((_, decoded),) = decode.iter_checkpoints(store.storage, store.list(), steps={6})
    assert options == [(False, True), (False, True), (True, True)]
    assert len(compared) == 1  # the values that are the same as in the base
    assert unflatten(decoded.tree, decoded.reference.tensors)["model"]["w"].equal(state(6)["model"]["w"])


def test_a_chain_that_is_decoded_file_by_file_says_why(store, monkeypatch, caplog):
    assert store.load(3)["seed"] == 3 and "file by file" not in caplog.text

    def fail(*_):
        raise CorruptError("here", found="a mistake of ours", do="nothing")

    monkeypatch.setattr(decode, "_decode_last", fail)
    assert store.load(3)["seed"] == 3
    assert "decoded file by file" in caplog.text and "a mistake of ours" in caplog.text
