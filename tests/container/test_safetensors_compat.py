"""A stock safetensors reader opens every file, and reads the tensors that are stored as they are."""

from __future__ import annotations

import pytest
import safetensors.numpy
import torch
from helpers.malformed import coded, file, plain, some
from safetensors import safe_open
from safetensors.torch import load, load_file

import shrinkpoint as sp
from shrinkpoint.container.header import MARKER_ENTRY

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


def opened(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    return safe_open(tmp_path / "a.safetensors", framework="pt")


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("spool", [None, 0])
def test_plain_tensors_of_every_shared_dtype_and_shape_are_read(tmp_path, spool):
    shapes = [(), (3,), (2, 3), (0,), (0, 2), (1, 1, 1)]
    records = [plain(f"{dtype}/{shape}", dtype, shape) for dtype in DTYPES for shape in shapes]
    with opened(tmp_path, file(records, spool=spool)) as stock:
        for record in records:
            (info,) = record.infos
            tensor = stock.get_tensor(info.name)
            assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[info.dtype], info.shape)
            assert raw(tensor) == record.parts["values"]


@pytest.mark.parametrize("spool", [None, 0])
@pytest.mark.parametrize("expected", [None, ()])
def test_parts_of_other_records_are_bytes(tmp_path, spool, expected):
    with opened(tmp_path, file(some(), spool=spool, expected=expected)) as stock:
        assert sorted(stock.keys()) == ["half", "mask", "step", "w", "~index", MARKER_ENTRY, "~parts/2", "~parts/4"]
        assert raw(stock.get_tensor("~parts/2")) == bytes(5)  # a filler
        assert raw(stock.get_tensor("~parts/4")) == b"\1\2\3" + b"12345" + bytes(32)
        assert stock.metadata()["format"] == "pt"
        assert set(stock.metadata()) == {"format", "shrinkpoint", "shrinkpoint.digest"}


@pytest.mark.parametrize(
    "name",
    ["__metadata__", "~pad/1", "~entry/0", "~", "", "\ud800", 'é\n"\\', "shrinkpoint.digest", '"shrinkpoint.digest":"'],
)
def test_any_tensor_name_makes_a_file_that_opens(tmp_path, name):
    data = file([plain(name), coded("__metadata__x", {}), plain("w", seed=1)])
    with opened(tmp_path, data) as stock:
        assert len(stock.keys()) == 4  # and the marker, and the index
        assert raw(stock.get_tensor("w")) == plain("w", seed=1).parts["values"]


def test_names_that_meet_make_a_file_that_opens(tmp_path):
    records = [coded("a", {"b": b"1", "b/c": b"2"}), coded("a/b", {"c": b"3"}), plain("a/b/c", "U8", (1,))]
    with opened(tmp_path, file(records)) as stock:
        assert [bytes(raw(stock.get_tensor(name))) for name in ("~parts/0", "a/b/c")] == [b"123", b"\0"]


@pytest.mark.parametrize("state", [{}, {"w": torch.ones(3)}, {"w": torch.zeros(1 << 16), "plain": torch.randn(3)}])
def test_a_loader_of_whole_files_fails_instead_of_returning_a_part(tmp_path, state):
    path = tmp_path / "a.safetensors"
    sp.save(state, path)
    stock_loaders = [load_file, torch.load, lambda path: load(path.read_bytes()), safetensors.numpy.load_file]
    for stock in stock_loaders:
        with pytest.raises((TypeError, ValueError, OverflowError, safetensors.SafetensorError, RuntimeError)):
            stock(path)
    with safe_open(path, framework="pt") as file:
        assert any("shrinkpoint.load()" in name for name in [*file.keys()])
    assert sp.load(path).keys() == state.keys()


def test_the_names_of_every_payload_say_what_reads_it(tmp_path):
    with sp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, model=torch.nn.Linear(2, 2))
    for path in (tmp_path / "run").rglob("*.safetensors"):
        with pytest.raises(TypeError):
            load_file(path)
