"""A stock safetensors reader opens every file, and reads the tensors that are stored as they are."""

from __future__ import annotations

import pytest
import torch
from helpers.malformed import coded, file, plain, some
from safetensors import safe_open
from safetensors.torch import load

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
        assert sorted(stock.keys()) == ["half", "mask", "step", "w", "~index", "~parts/2", "~parts/4"]
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
    assert len(load(data)) == 3  # and the index
    with opened(tmp_path, data) as stock:
        assert raw(stock.get_tensor("w")) == plain("w", seed=1).parts["values"]


def test_names_that_meet_make_a_file_that_opens():
    records = [coded("a", {"b": b"1", "b/c": b"2"}), coded("a/b", {"c": b"3"}), plain("a/b/c", "U8", (1,))]
    stock = load(file(records))
    assert [bytes(raw(stock[name])) for name in ("~parts/0", "a/b/c")] == [b"123", b"\0"]
