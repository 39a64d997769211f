"""The public face: what `import shrinkpoint` gives, and save, load and inspect on files that people move about."""

from __future__ import annotations

import importlib
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.round_trip import Loop
from helpers.strategies import difference

import shrinkpoint as sp
from shrinkpoint.container import FileWriter
from shrinkpoint.errors import (
    ChainError,
    CorruptError,
    FormatError,
    NotFoundError,
    PolicyError,
    StateError,
    StorageError,
    TruncatedError,
)
from shrinkpoint.storage import LocalStorage


def state(seed: int) -> dict[str, Any]:
    base = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    return {"model": {"w.weight": base * (1 + seed * 1e-4)}, "frozen": torch.arange(99.0), "step": seed}


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """Three files, each a delta against the one before."""
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for i, path in enumerate(paths):
        sp.save(state(i), path, base=paths[i - 1] if i else None)
    return paths


# ---- the module ------------------------------------------------------------------------------------------------------


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_every_name_resolves_in_a_fresh_process_and_is_listed():
    assert len(set(sp.__all__)) == len(sp.__all__)
    code = "import shrinkpoint as sp; print(all(getattr(sp, name) is getattr(sp, name) for name in sp.__all__))"
    assert child(code) == "True"
    assert set(sp.__all__) <= set(dir(sp))
    with pytest.raises(AttributeError, match="nonsense"):
        sp.nonsense


def test_names_are_the_objects_of_their_rooms():
    for name, home in sp._MODULES.items():
        found = getattr(importlib.import_module(f"shrinkpoint.{home}"), name)
        assert getattr(sp, name) is found and found.__name__ == name and found.__doc__


def test_every_error_is_one_of_our_tree_and_says_what_to_do(tmp_path):
    with pytest.raises(sp.ShrinkpointError) as caught:
        sp.load(tmp_path / "nothing")
    assert isinstance(caught.value, KeyError) and caught.value.where and caught.value.do


# ---- save, load, inspect ---------------------------------------------------------------------------------------------


def test_a_state_comes_back(tmp_path):
    loop = Loop()
    for path in (tmp_path / "a.safetensors", str(tmp_path / "new" / "directory" / "b")):
        report = sp.save(loop.state(), path)
        assert difference(loop.state(), sp.load(path)) is None
        assert report.path == str(path) and report.keyframe and report.scheme == "lossless"
        assert report.stored_bytes == Path(path).stat().st_size
        assert report.raw_bytes == sum(role.raw for role in report.roles.values())
        assert report.ratio == report.raw_bytes / report.stored_bytes


def test_paths_are_taken_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sp.save(state(0), "a")
    sp.save(state(1), "b", base="a")
    monkeypatch.chdir("/")
    assert sp.load(tmp_path / "b")["step"] == 1


def test_a_chain_of_three_is_found_beside_each_other(chain, tmp_path):
    for i, path in enumerate(chain):
        assert difference(state(i), sp.load(path)) is None
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in chain:
        path.rename(moved / path.name)
    assert difference(state(2), sp.load(moved / "c.safetensors")) is None


def test_a_delta_is_smaller_and_says_what_it_stands_on(chain):
    a, b, _ = map(sp.inspect, chain)
    assert a.parent is None and b.parent == "a.safetensors" and b.scheme == "lossless"
    assert b.stored_bytes < a.stored_bytes == chain[0].stat().st_size
    assert a.raw_bytes == 40 * 50 * 4 + 99 * 4 and a.ratio == a.raw_bytes / a.stored_bytes
    assert {info.name: (info.shape, info.dtype) for info in b.tensors} == {
        "model/w.weight": ((40, 50), "F32"),
        "frozen": ((99,), "F32"),
    }


def test_inspect_reads_no_more_than_the_header_and_the_index(chain):
    with chain[1].open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(length, os.SEEK_CUR)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
    assert sp.inspect(chain[1]).parent == "a.safetensors"
    with pytest.raises(CorruptError):
        sp.load(chain[1])


def test_a_base_in_another_directory_is_found_where_it_was(chain, tmp_path):
    far = tmp_path / "far" / "d"
    sp.save(state(3), far, base=chain[2])
    assert difference(state(3), sp.load(far)) is None
    assert sp.inspect(far).parent == str(chain[2])


def test_a_base_that_was_moved_is_given(chain, tmp_path):
    base = tmp_path / "moved"
    chain[0].rename(base)
    with pytest.raises(ChainError) as caught:
        sp.load(chain[1])
    assert "a.safetensors" in caught.value.message and "base=" in caught.value.do
    assert difference(state(1), sp.load(chain[1], base=base)) is None
    assert difference(state(0), sp.load(base, base="anything")) is None  # a keyframe needs none


def test_a_wrong_base_is_refused_whether_given_or_found(chain, tmp_path):
    sp.save(state(7), tmp_path / "other")
    for wrong in (tmp_path / "other", chain[1], chain[2]):
        with pytest.raises(ChainError):
            sp.load(chain[1], base=wrong)
    sp.save(state(7), chain[0])
    for path in chain[1:]:
        with pytest.raises(ChainError, match="digest"):
            sp.load(path)


def test_a_delta_whose_base_was_deleted_names_it(chain):
    chain[0].unlink()
    for path in chain[1:]:
        with pytest.raises(ChainError, match=r"a\.safetensors"):
            sp.load(path)
        with pytest.raises(ChainError):
            sp.save(state(9), chain[2].with_name("d"), base=path)
    assert not chain[2].with_name("d").exists()


def test_a_damaged_base_is_reported_as_such(chain):
    data = bytearray(chain[0].read_bytes())
    data[-1] ^= 1
    chain[0].write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        sp.load(chain[2])
    assert "a.safetensors" in caught.value.where


def test_a_file_is_not_saved_over_what_its_base_needs(chain, tmp_path):
    before = [path.read_bytes() for path in chain]
    link = tmp_path / "link"
    link.symlink_to(chain[0])
    for target, base in [(0, 0), (0, 1), (0, 2), (1, 2)]:
        with pytest.raises(PolicyError, match="base"):
            sp.save(state(9), chain[target], base=chain[base])
    with pytest.raises(PolicyError):
        sp.save(state(9), chain[0], base=link)
    assert [path.read_bytes() for path in chain] == before


def test_a_save_over_a_link_writes_the_file_that_the_link_names(tmp_path):
    """As `torch.save` does, and readers of that file see the new state; who may read it stays."""
    (tmp_path / "disk").mkdir()
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    sp.save(state(0), tmp_path / "a")
    (tmp_path / "disk" / "a").chmod(0o600)
    sp.save(state(1), tmp_path / "a")
    sp.save(state(2), tmp_path / "b", base=tmp_path / "a")
    assert (tmp_path / "disk" / "a").stat().st_mode & 0o777 == 0o600
    (tmp_path / "a").unlink()  # the base is found beside the file that the link names
    for place in (tmp_path, tmp_path / "disk"):
        assert difference(sp.load(place / "b"), state(2)) is None
    assert (tmp_path / "b").is_symlink() and not (tmp_path / "disk" / "b").is_symlink()


def test_a_chain_that_names_itself_ends_in_an_error(tmp_path):
    for parent in ("a", "b"):
        forge(tmp_path / "a", {"name": parent, "digest": "0" * 32})
        forge(tmp_path / "b", {"name": "a", "digest": "0" * 32})
        with pytest.raises(ChainError):
            sp.load(tmp_path / "a")


def forge(path: Path, parent: Any) -> None:
    with LocalStorage(path.parent).create(path.name) as sink:
        FileWriter(sink, scheme="lossless", parent=parent, tree={}).finish()


@pytest.mark.parametrize(
    "parent",
    [
        {},
        {"name": "a"},
        {"digest": "0" * 32},
        {"name": 1, "digest": "0" * 32},
        {"name": "a", "digest": None},
        {"name": ["a"], "digest": "0" * 32},
        {"name": {}, "digest": {}},
    ],
    ids=str,
)
def test_a_parent_that_is_none_is_corrupt(tmp_path, parent):
    forge(tmp_path / "x", parent)
    for verb in (sp.load, sp.inspect):
        with pytest.raises(CorruptError, match="parent"):
            verb(tmp_path / "x")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/", "a" * 5000, "a\0b", "\ud800", "../" * 2000, "no/such/place", "/dev/null"]
)
def test_a_parent_of_a_hostile_name_is_an_error_of_our_tree(tmp_path, name):
    forge(tmp_path / "x", {"name": name, "digest": "0" * 32})
    assert sp.inspect(tmp_path / "x").parent == name
    with pytest.raises(sp.ShrinkpointError):
        sp.load(tmp_path / "x")


def test_what_is_no_file_of_ours_is_an_error_of_our_tree(tmp_path):
    (tmp_path / "text").write_text("hello, this is no checkpoint\n")
    (tmp_path / "empty").touch()
    (tmp_path / "tree" / "below").mkdir(parents=True)
    cases = [
        (tmp_path, NotFoundError),
        (tmp_path / "tree", NotFoundError),
        (tmp_path / "tree" / "below", NotFoundError),
        (tmp_path / "nothing", NotFoundError),
        (tmp_path / "no" / "thing", NotFoundError),
        (tmp_path / "text", FormatError),
        (tmp_path / "empty", TruncatedError),
        (tmp_path / "text" / "inside", sp.ShrinkpointError),
        ("a" * 300, StorageError),
    ]
    for path, error in cases:
        for verb in (sp.load, sp.inspect):
            with pytest.raises(error):
                verb(path)
        with pytest.raises(error):
            sp.save({}, tmp_path / "target", base=path)
    assert not (tmp_path / "target").exists()


def test_flipped_bytes_and_prefixes_of_a_delta_are_errors(tmp_path):
    """Every seventh of each; `container/test_damage.py` has every byte."""
    small = [{"w.weight": torch.linspace(-1, 1, 300) * factor, "i": torch.arange(9)} for factor in (1, 1.001)]
    sp.save(small[0], tmp_path / "a")
    sp.save(small[1], tmp_path / "b", base=tmp_path / "a")
    whole, path = (tmp_path / "b").read_bytes(), tmp_path / "c"
    damaged = [whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :] for i in range(0, len(whole), 7)]
    for data in [*damaged, *(whole[:length] for length in range(0, len(whole), 7)), whole + b"\0"]:
        path.write_bytes(data)
        with pytest.raises(FormatError):
            sp.load(path)
    path.write_bytes(whole)
    assert difference(small[1], sp.load(path)) is None


def test_a_failing_save_leaves_what_was_there(tmp_path, chain):
    before = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    hopeless: list[tuple[Any, Path, dict[str, Any], type]] = [
        ({"a": {"b": object()}}, chain[0], {}, StateError),
        ({}, chain[0], {"scheme": "nonsense"}, PolicyError),
        ({}, chain[0], {"base": tmp_path / "nothing"}, NotFoundError),
        ({}, tmp_path, {}, StorageError),
        ({}, chain[0] / "inside", {}, StorageError),
    ]
    for what, path, options, error in hopeless:
        with pytest.raises(error):
            sp.save(what, path, **options)
    assert {path: path.read_bytes() for path in sorted(tmp_path.iterdir())} == before


def test_a_file_that_is_there_is_replaced_and_never_written_into(tmp_path):
    path, witness = tmp_path / "a", tmp_path / "witness"
    sp.save(state(0), path)
    witness.hardlink_to(path)
    sp.save(state(1), path)
    assert sp.load(path)["step"] == 1 and sp.load(witness)["step"] == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "witness"]


def test_tensors_go_to_the_device_that_is_asked_for(tmp_path):
    x = torch.randn(30, 40)
    sp.save({"a.weight": x, "tied": x, "none": None}, tmp_path / "a")
    for device in ("meta", torch.device("meta")):
        back = sp.load(tmp_path / "a", device=device)
        assert back["a.weight"].device.type == "meta" and back["a.weight"].shape == x.shape
    assert sp.load(tmp_path / "a", device="cpu")["a.weight"].device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_on_a_gpu_is_saved_and_comes_back_there(tmp_path):
    x = torch.randn(300, 400, device="cuda")
    sp.save({"a.weight": x, "tied": x, "copy": x.bfloat16()}, tmp_path / "a")
    back = sp.load(tmp_path / "a", device="cuda")
    assert back["a.weight"].is_cuda and torch.equal(back["a.weight"], x) and torch.equal(back["copy"], x.bfloat16())
    assert back["tied"].data_ptr() == back["a.weight"].data_ptr()
    sp.save({"a.weight": x * 1.001, "tied": x, "copy": x.bfloat16()}, tmp_path / "b", base=tmp_path / "a")
    assert torch.equal(sp.load(tmp_path / "b")["a.weight"], (x * 1.001).cpu())


def test_ties_are_kept_or_cut(tmp_path):
    x = torch.randn(30, 40)
    sp.save({"a.weight": x, "b.weight": x, "row": x[3]}, tmp_path / "a")
    tied, apart = sp.load(tmp_path / "a"), sp.load(tmp_path / "a", tie=False)
    for back in (tied, apart):
        back["a.weight"].zero_()
    assert not tied["b.weight"].any() and not tied["row"].any()
    assert torch.equal(apart["b.weight"], x) and torch.equal(apart["row"], x[3])


def test_loaded_tensors_can_be_changed_without_changing_each_other(tmp_path):
    state = {f"{i}.weight": torch.full((100,), float(i)) for i in range(5)} | {"copy": torch.full((100,), 1.0)}
    sp.save(state, tmp_path / "a")
    back = sp.load(tmp_path / "a")
    for value in back.values():
        assert value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        value += 1
    assert all(torch.equal(back[name], state[name] + 1) for name in state)


def test_threads_change_nothing(tmp_path):
    loop = Loop()
    for threads in (1, 2):
        sp.save(loop.state(), tmp_path / str(threads), threads=threads)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert difference(sp.load(tmp_path / "1", threads=2), sp.load(tmp_path / "1", threads=1)) is None


def test_schemes_are_named_or_given(tmp_path):
    for scheme in ("lossless", sp.Lossless(), sp.Lossless(chunk=100)):
        sp.save(state(0), tmp_path / "a", scheme=scheme)
        assert difference(state(0), sp.load(tmp_path / "a")) is None
