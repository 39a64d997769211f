"""A checkpoint in a directory of somebody else's: it exists when its manifest does, and needs no other directory."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from helpers.stores import state
from helpers.strategies import difference
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint import Lossless
from shrinkpoint.errors import ChainError, CorruptError, FormatError, NotFoundError, ShrinkpointError, StorageError
from shrinkpoint.schemes import Scheme
from shrinkpoint.schemes.planner import plan_shards
from shrinkpoint.sharding.collectives import LocalCollectives
from shrinkpoint.sharding.global_tensors import ShardLayout, ShardSpec
from shrinkpoint.store import chain_limit, directory
from shrinkpoint.store.decode import decode_directory
from shrinkpoint.store.delta_writer import DeltaWriter
from shrinkpoint.store.manifest import (
    DirectoryManifest,
    Manifest,
    Payload,
    decode_directory_manifest,
    encode_directory_manifest,
)
from shrinkpoint.tensors.flat_state import FlatState, flatten, snapshot, unflatten


def save(tip: DeltaWriter, path: Path, seed: int, **options: object) -> DirectoryManifest:
    tip.write(path, snapshot(flatten(state(seed))), scheme=Lossless(), adopt=True)
    made = directory.commit(path, [tip.payload], scheme="lossless", step=seed, **options)
    tip.commit_reference()
    return made


def load(path: Path) -> object:
    decoded = decode_directory(path)
    return unflatten(decoded.tree, decoded.reference.tensors)


def has(path: Path, seed: int) -> bool:
    return difference(load(path), state(seed)) is None


def chain(root: Path, length: int, **options: int) -> DeltaWriter:
    tip = DeltaWriter(**options)
    for seed in range(1, length + 1):
        save(tip, root / f"c{seed}", seed)
    return tip


def test_a_copy_elsewhere_loads_and_any_reader_of_single_files_reads_it(tmp_path):
    chain(tmp_path, 3)
    shutil.copytree(tmp_path / "c3", tmp_path / "elsewhere" / "deep")
    for seed in (1, 2, 3):
        shutil.rmtree(tmp_path / f"c{seed}")
    assert has(tmp_path / "elsewhere" / "deep", 3)
    assert difference(sp.load(tmp_path / "elsewhere/deep/rank-00000.safetensors"), state(3)) is None


def test_what_is_gone_before_the_next_save_makes_that_a_keyframe(tmp_path):
    tip = chain(tmp_path, 2)
    shutil.rmtree(tmp_path / "c2")
    assert tip.reference is None
    assert save(tip, tmp_path / "c3", 3).depth == 0
    assert save(tip, tmp_path / "c4", 4).depth == 1
    assert has(tmp_path / "c4", 4)


def test_what_is_released_before_it_is_deleted_serves_the_next_delta_and_no_longer(tmp_path):
    tip = chain(tmp_path, 2)
    tip.keep_base(tmp_path / "c2")
    shutil.rmtree(tmp_path / "c2")
    shutil.rmtree(tmp_path / "c1")
    assert save(tip, tmp_path / "c3", 3).depth == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c3"]
    assert has(tmp_path / "c3", 3)


def test_a_damaged_base_is_not_built_on(tmp_path):
    tip = chain(tmp_path, 1)
    payload = tmp_path / "c1" / "rank-00000.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1])
    assert save(tip, tmp_path / "c2", 2).depth == 0
    assert not (tmp_path / "c2" / "bases").exists()


def test_where_links_are_impossible_every_checkpoint_is_a_keyframe(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    tip = chain(tmp_path, 3)
    assert [directory.read_directory_manifest(tmp_path / f"c{seed}").depth for seed in (1, 2, 3)] == [0, 0, 0]
    assert not (tmp_path / "c3" / "bases").exists()
    assert has(tmp_path / "c3", 3)
    tip.drop()


def test_a_chain_ends_where_its_files_are_several_times_the_state(tmp_path, monkeypatch):
    monkeypatch.setattr(chain_limit, "MIN_CHAIN_BYTES", 0)
    monkeypatch.setattr(chain_limit, "MAX_CHAIN_STATES", 0)  # one file is enough
    chain(tmp_path / "a", 3)
    chain(tmp_path / "b", 3, keyframe_every=None)
    depths = [directory.read_directory_manifest(tmp_path / name).depth for name in ("a/c2", "a/c3", "b/c2", "b/c3")]
    assert depths == [0, 0, 1, 2]


def test_until_the_commit_there_is_no_checkpoint_and_abandoning_leaves_nothing(tmp_path):
    tip = chain(tmp_path, 1)
    tip.write(tmp_path / "c2", snapshot(flatten(state(2))), scheme=Lossless(), adopt=True)
    assert not directory.is_checkpoint(tmp_path / "c2")
    with pytest.raises(NotFoundError):
        directory.verify_directory(tmp_path / "c2")
    tip.rollback()
    assert not [path for path in (tmp_path / "c2").rglob("*") if path.is_file()]
    assert save(tip, tmp_path / "c3", 3).depth == 1


def test_saving_into_a_folder_again_replaces_what_is_there_and_leaves_foreign_files_alone(tmp_path):
    tip = chain(tmp_path, 2)
    (tmp_path / "c2" / "trainer_state.json").write_text("{}")
    save(tip, tmp_path / "c2", 5)
    assert has(tmp_path / "c2", 5)
    assert (tmp_path / "c2" / "trainer_state.json").read_text() == "{}"
    made = directory.verify_directory(tmp_path / "c2", deep=True)
    bases = {f"bases/{digest}.safetensors" for digest, _ in made.payloads[0].bases}
    assert directory.own_keys(tmp_path / "c2") == {made.payloads[0].name} | bases
    save(DeltaWriter(), tmp_path / "c2", 6)
    assert directory.own_keys(tmp_path / "c2") == {directory.read_directory_manifest(tmp_path / "c2").payloads[0].name}
    assert not (tmp_path / "c2" / "bases").exists()


@pytest.mark.parametrize("which", ["payload", "base"])
def test_every_damage_is_found_and_told(tmp_path, which):
    chain(tmp_path, 2)
    payload = directory.read_directory_manifest(tmp_path / "c2").payloads[0]
    path = directory.chain_places(tmp_path / "c2", payload)[-1 if which == "payload" else 0].path
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        path.unlink()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises((FormatError, ChainError)):
            directory.verify_directory(tmp_path / "c2", deep=True)
        with pytest.raises((FormatError, ChainError)):
            decode_directory(tmp_path / "c2")
    for size in range(0, len(whole), 61):
        path.write_bytes(whole[:size])
        with pytest.raises((FormatError, ChainError)):
            directory.verify_directory(tmp_path / "c2")
    path.unlink()
    with pytest.raises(CorruptError if which == "payload" else ChainError, match="no such file"):
        directory.verify_directory(tmp_path / "c2")


def test_a_payload_of_a_rank_that_is_not_there_is_no_checkpoint(tmp_path):
    tip = chain(tmp_path, 1)
    tip.write(tmp_path / "c2", snapshot(flatten(state(2))), scheme=Lossless(), adopt=True)
    elsewhere = Payload("rank-00001.safetensors", 100, "0" * 32, 100)
    with pytest.raises(StorageError, match="Let all ranks write to one file system"):
        directory.commit(tmp_path / "c2", [tip.payload, elsewhere], scheme="lossless")
    assert not directory.is_checkpoint(tmp_path / "c2")
    with pytest.raises(NotFoundError, match="no payload of rank 1"):
        decode_directory(tmp_path / "c1", 1)


class Dying:
    """Lets the n-th change of the file system, and all after it, fail, as when the disk is gone. Heard by Python's own
    audit, which cannot be removed, only be told to be silent."""

    EVENTS = frozenset({"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir"})
    listening: Dying | None = None

    def __init__(self, root: Path, fail_at: int) -> None:
        self.root, self.fail_at, self.calls = str(root), fail_at, 0

    def heard(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in self.EVENTS or not str(arguments[0]).startswith(self.root):
            return
        self.calls += 1
        if self.fail_at and self.calls >= self.fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


sys.addaudithook(lambda event, arguments: Dying.listening and Dying.listening.heard(event, arguments))


@contextmanager
def dying(root: Path, fail_at: int) -> Iterator[Dying]:
    Dying.listening = one = Dying(root, fail_at)
    try:
        yield one
    finally:
        Dying.listening = None


def attempt(root: Path, fail_at: int, into: str) -> int:
    """Save again after two checkpoints, with the disk dying at some moment; how many moments there were."""
    tip = chain(root, 2)
    with dying(root, fail_at) as disk, suppress(ShrinkpointError):
        save(tip, root / into, 3)
    for seed in (1, 2):
        if f"c{seed}" != into:
            assert has(root / f"c{seed}", seed)
    if into == "c2":
        assert has(root / "c2", 2) or has(root / "c2", 3)
    if directory.is_checkpoint(root / into):
        directory.verify_directory(root / into, deep=True)
    save(tip, root / "c9", 9)
    assert has(root / "c9", 9)
    return disk.calls


@pytest.mark.parametrize("into", ["c3", "c2"])
def test_a_disk_that_dies_at_any_moment_takes_no_checkpoint_with_it(tmp_path, into):
    moments = attempt(tmp_path / "0", 0, into)
    assert moments > 10
    for fail_at in range(1, moments + 1):
        attempt(tmp_path / str(fail_at), fail_at, into)


_DIGEST = st.text("0123456789abcdef", min_size=32, max_size=32)
_BASES = st.lists(st.tuples(_DIGEST, st.integers(0, 2**40)), max_size=3, unique_by=lambda base: base[0])
_PAYLOAD = st.builds(
    Payload,
    st.integers(0, 99999).map("rank-{:05d}.safetensors".format),
    st.integers(0, 2**40),
    st.just("f" * 32),
    st.integers(0, 2**40),
    _BASES.map(lambda bases: tuple(base for base in bases if base[0] != "f" * 32)),
)
_MANIFEST = st.builds(
    Manifest,
    id=st.text(max_size=20),
    created=st.just("2026-11-22T00:00:00.000+00:00"),
    scheme=st.text(),
    payloads=st.lists(_PAYLOAD, min_size=1, max_size=3, unique_by=lambda one: one.name).map(tuple),
    step=st.none() | st.integers(0, 10**15 - 1),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
    lossy_restores=st.integers(0, 9),
    note=st.text(),
    extra=st.none() | st.lists(st.integers()),
)


@given(_MANIFEST)
def test_a_manifest_comes_back_as_it_was(manifest):
    assert decode_directory_manifest(encode_directory_manifest(manifest), "here") == manifest


@given(_MANIFEST, st.data())
def test_a_manifest_with_any_flipped_bit_is_refused(manifest, data):
    good = encode_directory_manifest(manifest)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = good[:at] + bytes([good[at] ^ (1 << data.draw(st.integers(0, 7)))]) + good[at + 1 :]
    with pytest.raises(FormatError):
        decode_directory_manifest(bad, "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("payloads", []),
        ("payloads", [["../x.safetensors", 1, "0" * 32, 1, []]]),
        ("payloads", [["rank-00000.safetensors", -1, "0" * 32, 1, []]]),
        ("payloads", [["rank-00000.safetensors", 1, "0" * 32, 1, [["0" * 32, 1]]]]),
        ("payloads", [["rank-00000.safetensors", 1, "../" * 11, 1, []]]),
        ("step", -1),
        ("step", True),
        ("created", "2026-11-22"),
        ("metrics", []),
        ("format", 2),
        ("lossy_restores", 10**30),
    ],
)
def test_a_manifest_that_no_release_writes_is_refused(key, value):
    from shrinkpoint.store.manifest import dump_with_digest

    payload = Payload("rank-00000.safetensors", 1, "0" * 32, 1)
    manifest = Manifest("i", "2026-11-22T00:00:00+00:00", "lossless", (payload,), step=None)
    document = json.loads(encode_directory_manifest(manifest))
    del document["digest"]
    with pytest.raises(FormatError):
        decode_directory_manifest(dump_with_digest({**document, key: value}), "here")


@pytest.mark.parametrize("which", [0, 1])
def test_nothing_stands_on_a_chain_of_which_a_file_has_become_shorter(tmp_path, which):
    tip = chain(tmp_path, 3)
    manifest = directory.read_directory_manifest(tmp_path / "c3")
    base = directory.chain_places(tmp_path / "c3", manifest.payloads[0])[which].path
    data = base.read_bytes()
    base.unlink()
    base.write_bytes(data[:-1])
    assert save(tip, tmp_path / "c4", 4).depth == 0
    assert has(tmp_path / "c4", 4)


def test_what_was_decided_for_a_delta_is_kept_where_it_has_to_be_a_keyframe(tmp_path, monkeypatch):
    def moved(seed: int) -> FlatState:
        return snapshot(flatten({"model": {"w.weight": state(1)["model"]["w"].repeat(9) + 0.01 * seed}}))

    def settled(flat: FlatState, tip: DeltaWriter) -> Scheme:
        name = "model/w.weight"
        places = {name: ShardSpec(name, tuple(flat.tensors[name].shape), (0,))}
        return plan_shards(sp.LCCheckpoint(), flat, tip.reference, ShardLayout(places, LocalCollectives()))

    tip = DeltaWriter()
    tip.write(tmp_path / "c1", moved(0), scheme=settled(moved(0), tip), adopt=True)
    directory.commit(tmp_path / "c1", [tip.payload], scheme="lc-checkpoint")
    tip.commit_reference()
    decided = settled(moved(1), tip)
    expected = decided.quantize(moved(1), tip.reference).state.tensors["model/w.weight"]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    assert tip.reference is not None
    tip.write(tmp_path / "c2", moved(1), scheme=decided, adopt=True)
    assert directory.commit(tmp_path / "c2", [tip.payload], scheme="lc-checkpoint").depth == 0
    tip.commit_reference()
    assert torch.equal(decode_directory(tmp_path / "c2").reference.tensors["model/w.weight"], expected)
    assert tip.reference is None
