"""Torch files: everything plain comes through, nothing is ever run, and what cannot be read says why."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from helpers.foreign_files import Malice, forged, malice, same, training
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.convert import torch_file
from shrinkpoint.errors import CorruptError, FormatError, ShrinkpointError, StateError, TruncatedError


@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_comes_through_as_torch_saved_it_numpy_and_all(tmp_path, zipped):
    state = training(20)
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert torch_file.is_torch_file(tmp_path / "a.pt")
    assert same(torch_file.read(tmp_path / "a.pt").content, state)


def test_arrays_of_every_order_and_byte_order_come_through(tmp_path):
    state = {
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "point": np.array(5),
        "none": np.zeros((0, 3)),
        "truth": np.array([True]),
        "number": np.float64(3),
        "complex": np.complex64(1 + 2j),
        "deep": [(np.ones(2, np.float16), {"x": np.uint8(3)})],
    }
    torch.save(state, tmp_path / "a.pt")
    found = torch_file.read(tmp_path / "a.pt").content
    assert same(found, state)
    assert found["fortran"].flags.f_contiguous
    found["big"][0] = 7  # memory of its own


def test_a_file_whose_name_is_no_unicode_is_read(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.pt")
    with path.open("wb") as file:
        torch.save({"a": torch.ones(4)}, file)
    assert torch.equal(torch_file.read(path).content["a"], torch.ones(4))


def test_tied_tensors_stay_tied(tmp_path):
    weight = torch.ones(4)
    torch.save({"a": weight, "b": weight, "part": weight[1:3]}, tmp_path / "a.pt")
    found = torch_file.read(tmp_path / "a.pt").content
    assert found["a"].data_ptr() == found["b"].data_ptr() == found["part"].data_ptr() - 4


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_refused_by_name_and_does_not_run(tmp_path, zipped):
    mark = tmp_path / "mark"
    torch.save({"w": torch.ones(2), "x": Malice(mark)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(StateError, match=r"posix\.system") as caught:
        torch_file.read(tmp_path / "a.pt")
    assert not mark.exists()
    assert caught.value.where == str(tmp_path / "a.pt")
    assert caught.value.do
    torch.load(tmp_path / "a.pt", weights_only=False)  # it would have worked
    assert mark.exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_bare_malicious_pickle_does_not_run_either(tmp_path, protocol):
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Malice(tmp_path / "mark"), protocol))
    with pytest.raises((StateError, CorruptError)):
        torch_file.read(tmp_path / "a.pt")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "value",
    [np.array([object()], dtype=object), np.array(["x"]), np.zeros(2, dtype=[("a", "f4")]), torch.nn.Linear(1, 1)],
)
def test_what_is_neither_tensor_nor_plain_is_refused(tmp_path, value):
    torch.save({"x": value}, tmp_path / "a.pt")
    with pytest.raises(StateError):
        torch_file.read(tmp_path / "a.pt")


def test_an_array_whose_bytes_do_not_fit_its_shape_is_refused(tmp_path):
    torch.save({"x": np.arange(7.0)}, tmp_path / "a.pt")
    forged(tmp_path / "a.pt", tmp_path / "b.pt", b"K\x07", b"J\xff\xff\xff\x7f")
    with pytest.raises(StateError, match="array of shape"):
        torch_file.read(tmp_path / "b.pt")


def test_a_size_that_is_only_claimed_takes_no_memory(tmp_path):
    torch.save({"x": torch.arange(7.0)}, tmp_path / "a.pt")
    forged(tmp_path / "a.pt", tmp_path / "b.pt", b"K\x07", b"J\xff\xff\xff\x7f")
    with pytest.raises(CorruptError):
        torch_file.read(tmp_path / "b.pt")


@settings(max_examples=40, deadline=None)
@given(part=st.floats(0, 1, exclude_max=True))
def test_every_prefix_is_an_error_of_ours(tmp_path_factory, part):
    folder = tmp_path_factory.mktemp("cut")
    torch.save(training(10), folder / "a.pt")
    data = (folder / "a.pt").read_bytes()
    (folder / "b.pt").write_bytes(data[: int(len(data) * part)])
    with pytest.raises(FormatError):
        torch_file.read(folder / "b.pt")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_file_is_read_or_is_an_error_of_ours(tmp_path_factory, at, value):
    folder = tmp_path_factory.mktemp("damaged")
    torch.save({"x": torch.arange(7.0), "y": np.arange(3), "z": [1, "two"]}, folder / "a.pt")
    data = bytearray((folder / "a.pt").read_bytes())
    data[at % len(data)] = value
    (folder / "a.pt").write_bytes(data)
    try:
        torch_file.read(folder / "a.pt")
    except ShrinkpointError as error:
        assert str(folder) in error.where


def test_a_damaged_end_of_the_archive_is_an_error_of_ours(tmp_path):
    torch.save({"x": torch.arange(7.0)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(b"PK\x06\x07") + 4] = 1  # the disk of the ZIP64 locator, at which torch does not look
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptError, match=r"a damaged record .*multiple disks"):
        torch_file.read(tmp_path / "a.pt")


@pytest.mark.parametrize("has_crc", [True, False])
def test_a_flipped_bit_of_a_tensor_is_found_where_the_file_can_tell(tmp_path, has_crc):
    path = tmp_path / "a.pt"
    torch.serialization.set_crc32_options(has_crc)
    try:
        torch.save({"w": torch.zeros(5000)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(torch_file.read(path).content["w"], torch.zeros(5000))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    if has_crc:
        with pytest.raises(CorruptError, match=r"a damaged record .*a/data/0"):
            torch_file.read(path)
    else:
        assert torch_file.read(path).content["w"].any()


def test_an_empty_file_and_one_that_is_cut_say_so(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"")
    malice(tmp_path / "b.pt", tmp_path / "mark")
    (tmp_path / "b.pt").write_bytes((tmp_path / "b.pt").read_bytes()[:-30])
    for name in ("a.pt", "b.pt"):
        with pytest.raises(TruncatedError):
            torch_file.read(tmp_path / name)


@pytest.mark.filterwarnings("ignore")
def test_a_program_is_refused_for_what_it_is(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "a.pt"))
    with pytest.raises(StateError, match="a TorchScript archive"):
        torch_file.read(tmp_path / "a.pt")


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_nest_that_is_endless_to_walk_through_is_refused(tmp_path, kind):
    nest = kind()
    for _ in range(45):
        nest = kind([nest, nest])
    torch.save(nest, tmp_path / "a.pt")
    with pytest.raises(StateError, match="more values than its file has bytes"):
        torch_file.read(tmp_path / "a.pt")
