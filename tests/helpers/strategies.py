"""Hypothesis strategies for tensors and states, and the comparison that all round trips are judged by."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from shrinkpoint.tensors.dtypes import TORCH_DTYPES, materialize

DTYPES = tuple(TORCH_DTYPES)
"""Names of all dtypes this torch has."""

FLOATS = ("F16", "BF16", "F32", "F64")

# Bit patterns that codecs get wrong: zeros of both signs, infinities, nans with payloads (quiet and signalling),
# denormals, the largest finite value, one.
_SPECIAL = {
    "F16": [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0xFE2A, 0x7C01, 0x0001, 0x83FF, 0x7BFF, 0x3C00],
    "BF16": [0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC5, 0x7F81, 0x0001, 0x807F, 0x7F7F, 0x3F80],
    "F32": [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F800001, 1, 0x807FFFFF, 0x7F7FFFFF],
    "F64": [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0xFFF8 << 48) + 77, (0x7FF << 52) + 1, 1],
}


def bits(tensor: torch.Tensor) -> bytes:
    """The values of a tensor as bytes, in row-major order."""
    tensor = materialize(tensor.detach()).cpu()
    if 1 < tensor.element_size() <= 8:
        tensor = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    elif tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)
    return tensor.numpy().tobytes()


def difference(a: Any, b: Any, path: str = "state") -> str | None:
    """Where two states differ in type or by a single bit, or None. Strides do not count, the order of keys does."""
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} is not {type(b).__name__}"
    if isinstance(a, dict):
        if len(a) != len(b):
            return f"{path}: {len(a)} keys are not {len(b)}"
        keys = difference(list(a), list(b), f"keys of {path}")
        values = zip(a, a.values(), b.values(), strict=True)
        return keys or next(filter(None, (difference(v, w, f"{path}[{key!r}]") for key, v, w in values)), None)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{path}: {len(a)} items are not {len(b)}"
        found = (difference(v, w, f"{path}[{i}]") for i, (v, w) in enumerate(zip(a, b, strict=True)))
        return next(filter(None, found), None)
    return None if _fingerprint(a) == _fingerprint(b) else f"{path}: {a!r} is not {b!r}"


def same(a: Any, b: Any) -> bool:
    """True if two states are equal in every type and every bit."""
    return difference(a, b) is None


def _fingerprint(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.requires_grad, bits(value))
    if type(value) is np.ndarray:
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return (value.dtype.str, value.tobytes())
    return struct.pack("d", value) if isinstance(value, float) else value


def from_bytes(data: bytes, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor of dtype `name` with exactly these bits."""
    tensor = torch.empty(len(data), dtype=torch.uint8)
    tensor[:] = torch.tensor(list(data), dtype=torch.uint8)
    return tensor.view(TORCH_DTYPES[name]).reshape(shape)


def shapes(max_dims: int = 3, max_side: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0-d, empty and small tensors."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


@st.composite
def tensors(
    draw: st.DrawFn,
    dtypes: tuple[str, ...] = DTYPES,
    shape: st.SearchStrategy[tuple[int, ...]] | None = None,
    layouts: tuple[str, ...] = ("dense", "transposed", "sliced", "expanded", "conjugated"),
) -> torch.Tensor:
    """A tensor of any dtype, shape, content and layout.

    Args:
        dtypes: names to choose from.
        shape: its shapes (before the layout changes them); small ones by default.
        layouts: what may be done to it: "dense" is contiguous.
    """
    name = draw(st.sampled_from(dtypes))
    size = draw(shapes() if shape is None else shape)
    tensor = from_bytes(draw(_contents(name, int(np.prod(size)))), name, size)
    layout = draw(st.sampled_from(layouts))
    if layout == "transposed":
        return tensor.permute(tuple(range(tensor.dim() - 1, -1, -1)))
    if layout == "sliced" and tensor.dim():
        return tensor[draw(st.integers(0, 2)) :: draw(st.integers(1, 3))]
    if layout == "expanded":
        return tensor.expand(draw(st.integers(0, 3)), *tensor.shape)
    if layout == "conjugated" and tensor.dtype.is_complex:
        return tensor.conj()
    return tensor


@st.composite
def _contents(draw: st.DrawFn, name: str, count: int) -> bytes:
    itemsize = TORCH_DTYPES[name].itemsize
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["random", "constant", "special", "weights", "counts"]))
    if name == "BOOL":
        return random.integers(0, 2, count, np.uint8).tobytes()
    if kind == "constant":
        return random.bytes(itemsize) * count
    if kind == "special" and name in _SPECIAL:
        return random.choice(np.array(_SPECIAL[name], f"<u{itemsize}"), count).tobytes()
    if kind == "weights" and name in ("F16", "F32", "F64", "BF16"):
        values = torch.from_numpy(random.standard_normal(count) * 10.0 ** random.integers(-6, 1))
        return bits(values.to(TORCH_DTYPES[name]))
    if kind == "counts":
        small = random.integers(0, 4, count, np.uint8)
        return b"".join(int(value).to_bytes(itemsize, "little") for value in small)
    return random.bytes(itemsize * count)


_NUMPY = ("?", "<i1", "<u2", ">i4", "<i8", ">u8", "<f2", ">f4", "<f8", "<c8", ">c16")


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """A numpy array of any storable dtype, byte order, shape and order."""
    dtype = np.dtype(draw(st.sampled_from(_NUMPY)))
    shape = draw(shapes())
    count = int(np.prod(shape))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    data = random.bytes(count * dtype.itemsize)
    if dtype.kind == "b":
        data = random.integers(0, 2, count, np.uint8).tobytes()
    array = np.frombuffer(data, dtype).reshape(shape)
    form = draw(st.sampled_from(["read-only", "C", "F", "reversed"]))
    if form == "reversed" and array.ndim:
        return array.copy()[::-1]
    return array if form == "read-only" else array.copy(order="F" if form == "F" else "C")


def numpy_scalars() -> st.SearchStrategy[np.generic]:
    return arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])


def floats() -> st.SearchStrategy[float]:
    """Floats of any bit pattern: nan payloads, infinities, -0.0."""
    return st.one_of(st.floats(), st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack("d", data)[0]))


def plain_values() -> st.SearchStrategy[Any]:
    integers = st.one_of(st.integers(-(2**70), 2**70), st.integers(1, 40).map(lambda k: -(3 ** (k * 100))))
    text = st.text(st.characters(), max_size=8)  # lone surrogates too
    data = st.one_of(st.binary(max_size=8), st.binary(min_size=257, max_size=300))
    return st.one_of(st.none(), st.booleans(), integers, floats(), text, st.just("$t"), data)


def keys() -> st.SearchStrategy[Any]:
    text = st.one_of(st.text(st.characters(), max_size=6), st.sampled_from(["", "$t", "a/b", "100%", "~pad", "0"]))
    plain = st.one_of(text, st.integers(-3, 2**65), st.booleans(), floats(), st.none())
    return st.one_of(plain, st.tuples(plain, plain), st.tuples(st.tuples(plain)))


class _Pool(list[torch.Tensor]):
    def __repr__(self) -> str:  # hypothesis prints arguments of strategies, and torch cannot print float4
        return f"<{len(self)} tensors>"


@st.composite
def _views(draw: st.DrawFn, pool: _Pool) -> torch.Tensor:
    """A view of one of a few tensors, so that states hold ties and overlaps."""
    tensor = pool[draw(st.integers(0, len(pool) - 1))]
    if not tensor.dim() or draw(st.booleans()):
        return tensor
    start = draw(st.integers(0, max(0, tensor.shape[0] - 1)))
    return tensor[start : start + draw(st.integers(0, 4))]


@st.composite
def states(draw: st.DrawFn, max_leaves: int = 12) -> Any:
    """A nest of everything a state may hold, with tied and overlapping tensors in it."""
    pool = _Pool(draw(st.lists(tensors(), min_size=1, max_size=3)))
    parameters = _views(pool).map(_as_parameter)
    leaves = st.one_of(_views(pool), parameters, tensors(), plain_values(), arrays(), numpy_scalars())
    sizes = st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
    counters = st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)

    def nests(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts = st.dictionaries(keys(), inner, max_size=4)
        lists = st.lists(inner, max_size=4)
        return st.one_of(dicts, dicts.map(OrderedDict), lists, lists.map(tuple), sizes, counters)

    return draw(st.recursive(leaves, nests, max_leaves=max_leaves))


def _as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return torch.nn.Parameter(tensor.detach(), requires_grad=floating and tensor.numel() % 2 == 0)
