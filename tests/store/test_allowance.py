"""What a file may cost: memory and time are bounded by its size, and what cannot be read is an error of our tree."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.malformed import changed, file, plain, reader, sealed
from helpers.mutations import canonical
from helpers.processes import run_forked

import shrinkpoint as sp
from shrinkpoint._native import xxh3_128
from shrinkpoint.container import strict_json
from shrinkpoint.container.header import PREFIX
from shrinkpoint.errors import CorruptError, PolicyError, StateError
from shrinkpoint.store.checkpoint_file import ENV_VARIABLE, MAX_EXPANSION, MIN_LIMIT
from shrinkpoint.store.partial_reader import PartialReader


def forged(tmp_path: Path, tree: Any, **tensors: torch.Tensor) -> Path:
    """A small file whose digests are right, and whose tree says anything."""
    path = tmp_path / "forged.safetensors"
    sp.save(tensors or {"w": torch.zeros(4, dtype=torch.uint8)}, path)
    path.write_bytes(changed(path.read_bytes(), lambda _, document: document.__setitem__("tree", tree)))
    return path


BOMBS = {
    "numpy array of 8 GB": {"$n": ["|u1", ["w", 0, [2**33], [0]]]},
    "numpy array of 2^50": {"$n": ["|u1", ["w", 0, [2**50], [0]]]},
    "numpy array of 2^59": {"$n": ["|u1", ["w", 0, [2**58, 2], [0, 0]]]},
    "bytes of 8 GB": {"$B": ["w", 0, [2**33], [0]]},
    "many arrays": [{"$n": ["|u1", ["w", 0, [2**22 + i], [0]]]} for i in range(20)],
}


@pytest.mark.parametrize("tree", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.parametrize("tie", [True, False])
def test_what_a_tree_copies_is_counted_before_it_is_made(tmp_path, monkeypatch, tree, tie):
    monkeypatch.setenv(ENV_VARIABLE, str(1 << 26))
    with pytest.raises(CorruptError, match="max_bytes="):
        sp.load(forged(tmp_path, tree), tie=tie)


def test_an_expanded_tensor_stays_a_view_and_costs_nothing(tmp_path):
    wide = torch.arange(3.0)[:, None].expand(3, 2**40)
    sp.save({"wide": wide}, tmp_path / "a")
    for tie in (True, False):
        found = sp.load(tmp_path / "a", tie=tie, max_bytes=1 << 20)["wide"]
        assert found.shape == wide.shape and found.stride() == wide.stride() and found.untyped_storage().nbytes() < 100


def test_an_array_in_many_places_loads_as_one_and_without_ties_within_a_limit_that_a_caller_sets(tmp_path):
    array = np.zeros(1 << 18)
    sp.save({"a": [array] * 8}, tmp_path / "a")
    tied = sp.load(tmp_path / "a", max_bytes=5 << 20)["a"]
    assert len(tied) == 8 and all(one is tied[0] for one in tied)
    with pytest.raises(CorruptError, match="max_bytes="):
        sp.load(tmp_path / "a", max_bytes=9 << 20, tie=False)
    untied = sp.load(tmp_path / "a", max_bytes=18 << 20, tie=False)["a"]
    assert len({id(one) for one in untied}) == 8


UNTYPED = {
    "a shape that overflows on its way to 0": {"$t": ["w", 0, [2**62 - 1, 2**62 - 1, 0], [1, 1, 1]]},
    "another": {"$t": ["w", 0, [2**31, 2**31, 2**31, 0], [1, 1, 1, 1]]},
    "a stride of 2^61": {"$t": ["w", 0, [1, 0], [2**61, 1]]},
    "a size of many digits": {"$z": [{"$i": "f" * 5000}]},
    "a key of many digits over what is no tensor": {"$d": [[{"$i": "f" * 5000}, {"$t": []}]]},
    "a pair of keys of many digits": {"$d": [[{"$i": "f" * 5000}, 1], [{"$i": "f" * 5000}, 2]]},
    "keys made to collide": {"$d": [[{"$i": f"{(2**61 - 1) * i:x}"}, 0] for i in range(2000)]},
    "a nested tensor of arrays": {"$n": ["<f4", [[]]]},
}


@pytest.mark.parametrize("tree", UNTYPED.values(), ids=UNTYPED.keys())
def test_a_tree_that_no_release_writes_is_an_error_of_ours_and_verify_tells(tmp_path, tree):
    path = forged(tmp_path, tree)
    try:
        sp.load(path)
    except CorruptError as error:
        assert str(path) in error.where
    assert _stored(tmp_path, path) == (_loads(path), [])


def _loads(path: Path) -> bool:
    try:
        sp.load(path)
    except CorruptError:
        return False
    return True


def _stored(tmp_path: Path, path: Path) -> tuple[bool, list[int]]:
    """Saves a store with that file; returns if verify passes it, and the steps that do not do what it says."""
    store = sp.Store(tmp_path / "store")
    store.save(1, {"w": torch.ones(2)})
    store.save(2, {"w": torch.zeros(3)}, keyframe=True)
    payload = next((tmp_path / "store").glob("*2/*.safetensors"))
    payload.unlink()
    payload.write_bytes(path.read_bytes())
    with path.open("rb") as opened:
        digest = reader(opened.read()).digest
    rewrite(payload.parent / "manifest.json", files=[[payload.name, path.stat().st_size, digest]])
    passes = not store.verify(deep=True)
    restored = store.restore(keep=False)
    wrong = [] if restored.step == (2 if passes else 1) else [restored.step]
    return passes, wrong


def rewrite(path: Path, **values: Any) -> None:
    document = {**json.loads(path.read_text()), **values}
    del document["digest"]
    path.write_bytes(canonical({**document, "digest": xxh3_128(canonical(document))}))


def test_whole_numbers_of_any_length_are_keys_and_values(tmp_path):
    far = 10**5000
    state = {
        far: torch.ones(2),
        -far: {"x": torch.zeros(3)},
        (far, 1): [far, -far],
        10**1000: {far: torch.ones(1)},
        far + 1: torch.zeros(1),
    }
    sp.save(state, tmp_path / "a")
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)  # less than when it was saved
    try:
        found = sp.load(tmp_path / "a")
        assert [*found] == [*state] and found[far, 1] == [far, -far]
        assert torch.equal(found[far], state[far]) and torch.equal(found[10**1000][far], torch.ones(1))
    finally:
        sys.set_int_max_str_digits(limit)


def test_a_tensor_whose_memory_was_freed_is_no_state(tmp_path):
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"state\['model'\]\[1\].*0 bytes"):
        sp.save({"model": [torch.ones(2), freed]}, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "key, value",
    [
        ("raw_bytes", 10**400),
        ("raw_bytes", 2**63),
        ("stored_bytes", 10**400),
        ("lossy_restores", 10**400),
        ("metrics", {"loss": 10**400}),
        ("created", "0001-01-01T00:00:00+23:59"),
        ("created", "9999-12-31T23:59:59-23:59"),
        ("id", "\ud800"),
        ("loss", {"chosen": [[[]]] * 3}),
    ],
)
def test_a_manifest_of_strange_numbers_breaks_its_own_step_alone(tmp_path, key, value):
    store = sp.Store(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"w": torch.zeros(3)}, keyframe=True)
    store.forget(1)
    rewrite(tmp_path / "step-000000002" / "manifest.json", **{key: value})
    listing = store.scan()
    assert {1, 3} <= listing.manifests.keys() and {*listing.manifests, *listing.broken} == {1, 2, 3}
    assert store.restore().step == 3
    store.verify(deep=True)
    store.prune(sp.Keep(last=1, within="1d"))


def test_a_coded_shape_at_the_limit_of_its_bytes_is_refused_before_memory_is_taken(tmp_path):
    zeros = {"w": torch.zeros(1 << 28, dtype=torch.uint8)}  # an honest file: 256 MiB in some kilobytes
    path = tmp_path / "a"
    sp.save(zeros, path)
    assert path.stat().st_size < 200_000
    assert sp.load(path)["w"].numel() == 1 << 28
    with pytest.raises(CorruptError, match=r"268,435,456 bytes of tensors.*max_bytes="):
        sp.load(path, max_bytes=1 << 20)
    with pytest.raises(CorruptError, match="max_bytes="):
        small_limit(path)


def small_limit(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_VARIABLE, str(1 << 20))
        with PartialReader([path]):
            pass


def test_copies_of_one_tensor_are_bounded_by_the_size_of_the_file(tmp_path):
    path = tmp_path / "a"
    tensor = torch.randn(1 << 18)
    sp.save({"w": tensor, "x": {f"{i:03d}": tensor.clone() for i in range(40)}}, path)
    assert path.stat().st_size < 2 * tensor.nbytes
    assert len(sp.load(path)["x"]) == 40
    most = 41 * tensor.nbytes
    sp.load(path, max_bytes=most)
    with pytest.raises(CorruptError, match=f"{most:,} bytes of tensors.*at most {most - 1:,}"):
        sp.load(path, max_bytes=most - 1)


def test_the_default_limit_follows_the_bytes_of_the_whole_chain(tmp_path, monkeypatch):
    from shrinkpoint.store import checkpoint_file

    monkeypatch.setattr(checkpoint_file, "MIN_LIMIT", 1)
    monkeypatch.setattr(checkpoint_file, "MAX_EXPANSION", 3)
    monkeypatch.setattr(checkpoint_file, "available_bytes", lambda: 0)
    state = {"w": torch.randn(20_000)}
    sp.save(state, tmp_path / "a")
    sp.save({**state, "step": 1}, tmp_path / "b", base=tmp_path / "a")
    assert 3 * (tmp_path / "b").stat().st_size < 80_000
    assert torch.equal(sp.load(tmp_path / "b")["w"], state["w"])  # the delta says little, its base has the bytes
    sp.save({"w": torch.zeros(200_000)}, tmp_path / "c")
    with pytest.raises(CorruptError, match="in a chain of"):
        sp.load(tmp_path / "c")


def test_limits_are_positive_whole_numbers(tmp_path, monkeypatch):
    sp.save({"w": torch.zeros(2)}, tmp_path / "a")
    assert MIN_LIMIT == 1 << 30 and MAX_EXPANSION == 1000  # docs/format.md
    for wrong in (0, -1, 1.5, True, "1"):
        with pytest.raises(PolicyError, match="max_bytes"):
            sp.load(tmp_path / "a", max_bytes=wrong)
    for wrong in ("0", "-1", "1e9", "many", "9" * 30):
        monkeypatch.setenv(ENV_VARIABLE, wrong)
        with pytest.raises(PolicyError, match=ENV_VARIABLE):
            sp.load(tmp_path / "a")


def test_a_store_and_its_fallback_know_the_limit(tmp_path):
    store = sp.Store(tmp_path)
    store.save(1, {"w": torch.zeros(10)})
    store.save(2, {"w": torch.zeros(1000)}, keyframe=True)
    with pytest.raises(CorruptError, match="max_bytes="):
        store.load(max_bytes=100)
    restored = store.restore(max_bytes=100)
    assert restored.step == 1 and [one.step for one in restored.skipped] == [2]


def test_a_recipe_names_no_more_tensors_than_its_record_has(tmp_path):
    sp.save({"w": torch.ones(300), "x": torch.ones(300)}, tmp_path / "a")

    def change(entries, document):
        copied = next(recipe for recipe in document["recipes"] if recipe["kind"] == "copy")
        copied["of"] = [[0, 0, 1 << 20]] * 2

    (tmp_path / "a").write_bytes(changed((tmp_path / "a").read_bytes(), change))
    with pytest.raises(CorruptError, match="2097152 ordinals for 1 tensors"):
        sp.load(tmp_path / "a")


LISTS = 1_500_000
TEXTS = {
    "empty lists": b'","shrinkpoint":"{}"},"a":[' + b"[]," * LISTS + b"[]]}",
    "empty lists in the document": b'","shrinkpoint":"[' + b"[]," * LISTS + b'[]]"}}',
    "empty objects": b'","shrinkpoint":"{}"},"a":[' + b"{}," * LISTS + b"{}]}",
}


@pytest.mark.parametrize("inside", TEXTS.values(), ids=TEXTS.keys())
def test_a_header_of_millions_of_lists_is_refused_before_it_is_parsed(inside):
    with pytest.raises(CorruptError, match="lists and objects"):
        reader(sealed(PREFIX + b"0" * 32 + inside))


def test_a_state_of_more_lists_than_readers_take_is_refused_when_it_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_NESTS", 1000)
    with pytest.raises(PolicyError, match="lists and objects"):
        sp.save({"a": [[] for _ in range(1500)]}, tmp_path / "a")
    text = "[1]," * 1500  # brackets in a text are none
    sp.save({"a": text}, tmp_path / "a")
    assert sp.load(tmp_path / "a")["a"] == text


def test_a_key_twice_among_many_is_found_in_a_time_that_grows_as_the_text_does():
    names = ",".join(f'"{i}":0' for i in range(100_000))
    with pytest.raises(CorruptError, match="duplicate key '7'"):
        reader(sealed(PREFIX + b"0" * 32 + b'","shrinkpoint":"{}"},' + f'"a":{{{names},"7":1}}}}'.encode()))


PROGRAM = """
import resource, sys
from pathlib import Path
import shrinkpoint as sp
from shrinkpoint.errors import CorruptError
sp.load(sys.argv[2], threads=1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (50 << 20),) * 2)
try:
    sp.load(sys.argv[1], threads=1, max_bytes=1 << 40)
except CorruptError as error:
    print(error.found, type(error.__cause__).__name__)
"""


def test_a_lack_of_memory_is_an_error_of_ours(tmp_path):
    sp.save({"w": torch.zeros(3 << 25, dtype=torch.uint8)}, tmp_path / "a")
    sp.save({"w": torch.zeros(1 << 10)}, tmp_path / "b")
    said = run_forked(PROGRAM, str(tmp_path / "a"), str(tmp_path / "b"))
    assert "out of memory" in said and said.endswith("MemoryError\n")


def test_a_shape_that_torch_cannot_count_is_refused_in_a_record():
    def change(_, document):
        document["kinds"][0][1] = [2**62, 2**62, 0]

    data = file([plain("w", "F32", (0,))])
    with pytest.raises(CorruptError, match="a known dtype and size"):
        reader(changed(data, change))
