"""Lattices and points for tests, what they are in the reference's words, and their way into a record and back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from helpers import codebooks
from helpers.round_trip import Written
from helpers.strategies import bits, difference, shapes, tensors
from hypothesis import strategies as st
from reference.lattice_record import Floats, Grid, Member, guess, sides, spans
from torch import Tensor

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.lattice import Lattice, LatticeTensor
from shrinkpoint.codec.lattice_record import LatticeInput, encode_lattice_record
from shrinkpoint.codec.reference import QuantizedTensor, Reference
from shrinkpoint.errors import LossWarning
from shrinkpoint.schemes import QuantizationPlan
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store.checkpoint_file import read_file, write_file
from shrinkpoint.tensors.dtypes import torch_dtype
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.tensors.info import EncodedRecord, TensorInfo

DTYPES = ("F32", "BF16", "F16")
LAWS = ("linear", "relative", "log")
NOTHING, MOST_CODE = -127, 32766
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (1, 9), (9, 1), (1, 1), (5, 6), (2, 3, 2, 2)]
"""No axes, no values, a vector, one row, one column, matrices, a kernel."""


def lattice_of(
    law: str,
    shape: tuple[int, ...],
    *,
    seed: int = 0,
    step: int = 1,
    at: int = 0,
    spread: int = 8,
    random: int = 0,
    axes: int = 1,
) -> Lattice:
    """A lattice whose exponents lie within `spread` of `at`, in eighths of an octave."""
    generator = torch.Generator().manual_seed(random)
    rows, columns = (
        torch.randint(-spread, spread + 1, (n,), generator=generator, dtype=torch.int16)
        for n in spans(law, shape, axes)
    )
    log = law == "log"  # where there is no dither
    return Lattice(law, rows // 2 + at, columns // 2, step if log else 1, 0 if log else seed)  # type: ignore[arg-type]


def codes_of(law: str, shape: tuple[int, ...], kind: str = "near", *, random: int = 0, nothing: float = 0.1) -> Tensor:
    """Codes: "none" but 0, "near" 0, or "far", where a byte does not reach; of the law "log", some are zeros."""
    generator = torch.Generator().manual_seed(random)
    most = {"none": 0, "near": 3, "far": MOST_CODE}[kind]
    codes = torch.randint(-most, most + 1, shape, generator=generator)
    if law == "log":
        zeros = torch.rand(shape, generator=generator) < nothing
        codes = torch.where(zeros, NOTHING, codes)
    return codes.to(torch.int16)


def points_of(
    law: str, shape: tuple[int, ...], kind: str = "near", *, random: int = 0, **lattice: int
) -> LatticeTensor:
    made = lattice_of(law, shape, random=random, **lattice)
    return LatticeTensor(codes_of(law, shape, kind, random=random), made, "v" if law == "relative" else "")


def nearest(x: Tensor, lattice: Lattice, other: Tensor | None = None) -> LatticeTensor:
    """The points that a scheme without any idea would take; of the laws "linear" and "relative"."""
    shape = sides(tuple(x.shape))
    scales = lattice.scales(None if other is None else other.reshape(shape))
    codes = (x.float().reshape(shape) / scales - lattice.dither(shape)).round()
    return LatticeTensor(codes.to(torch.int16).reshape(x.shape), lattice, "" if other is None else "v")


def squares(shape: tuple[int, ...], *, random: int = 0) -> Tensor:
    """Second moments, some of them zero; as a file has them that has first moments relative to them."""
    return points_of("log", shape, random=random, at=-160, step=5).dequantize(torch.float32)


def alike(a: LatticeTensor, b: LatticeTensor) -> bool:
    """True if two tensors are the same points, in codes of either width."""
    return a.has_equal_codes(b) and a.relative_to == b.relative_to


def same_origin(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    if isinstance(a, LatticeTensor) and isinstance(b, LatticeTensor):
        return alike(a, b)
    return isinstance(a, CodebookTensor) and isinstance(b, CodebookTensor) and codebooks.alike(a, b)


def same_reference(a: Reference, b: Reference) -> bool:
    """Law 3: whether writer and reader hold the same, to the bit."""
    if a.tensors.keys() != b.tensors.keys() or a.quantized.keys() != b.quantized.keys():
        return False
    tensors = all(
        bits(x) == bits(b.tensors[name]) and x.dtype == b.tensors[name].dtype for name, x in a.tensors.items()
    )
    return tensors and all(same_origin(one, b.quantized[name]) for name, one in a.quantized.items())


@dataclass
class File:
    """A file of quantized tensors, what stands below it, and what its writer thinks a reader holds."""

    data: bytes
    parent: Reference | None = None
    reference: Reference | None = None

    def read(self, threads: int = 2) -> Reference:
        storage = MemoryStorage()
        storage.put("file", self.data)
        return read_file(storage.open("file"), "file", self.parent, threads=threads).reference

    def records(self) -> list[Any]:
        return Written(self.data, None, None).records()  # type: ignore[arg-type]

    def recipes(self) -> dict[str, Any]:
        return {info.name: record.recipe for record in self.records() for info in record.infos}

    def kinds(self) -> dict[str, str]:
        return {name: recipe["kind"] for name, recipe in self.recipes().items()}


def put(state: Any, scheme: Any, parent: File | None = None, *, threads: int = 2) -> File:
    """Write a file, and hold that the state stays as it is and that writer and reader go on with the same."""
    flat, reference = flatten(state), None if parent is None else parent.read()
    before = {name: bits(x) for name, x in flat.tensors.items()}
    storage, where = MemoryStorage(), None if parent is None else {"name": "parent", "digest": "0" * 32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        kept = scheme.quantize(flat, reference)
        written = write_file(storage, "file", kept, scheme=scheme, reference=reference, parent=where, threads=threads)
    file = File(storage.get("file"), reference, written.reference)
    decoded = file.read()
    assert same_reference(decoded, written.reference)
    tree = kept.state.tree
    assert difference(unflatten(tree, kept.state.tensors), unflatten(tree, decoded.tensors)) is None
    assert {name: bits(x) for name, x in flat.tensors.items()} == before
    return file


def settled(symbols: dict[str, Any], **options: Any) -> QuantizationPlan:
    return QuantizationPlan("settled", symbols, **options)


def zeros(symbols: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.codes.shape, dtype=dtype) for name, tensor in symbols.items()}


def untouched(*held: object) -> bytes:
    """All bits that an encoder or a decoder is given, so that they can be compared with those after it."""
    return b"".join(_bits(one) for one in held)


def _bits(one: object) -> bytes:
    if isinstance(one, Tensor):
        return bits(one)
    if isinstance(one, LatticeTensor):
        return bits(one.codes) + bits(one.lattice.rows) + bits(one.lattice.columns)
    if isinstance(one, Mapping):
        return b"".join(_bits(value) for value in one.values())
    assert isinstance(one, Reference)
    return _bits(one.tensors) + _bits(one.quantized)


@dataclass(frozen=True)
class Made:
    """A record, what it must give, and what a reader needs for it."""

    encoded: EncodedRecord
    points: dict[str, LatticeTensor]
    values: dict[str, Tensor]
    parent: Reference | None
    decoded: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return len(self.encoded.parts["points"])


def made(
    named: Mapping[str, LatticeTensor],
    dtype: str = "F32",
    parent: Reference | None = None,
    *,
    others: Sequence[Tensor] = (),
    threads: int = 1,
) -> Made:
    """A record of these points; `others` are tensors of the same file, one for each, which come first."""
    infos = tuple(TensorInfo(name, tuple(one.codes.shape), dtype) for name, one in named.items())
    beside = others or [None] * len(infos)
    values = {
        name: one.dequantize(torch_dtype(dtype), other)
        for (name, one), other in zip(named.items(), beside, strict=True)
    }
    decoded = {("v" if len(others) == 1 else f"v{i}"): one for i, one in enumerate(others)}
    points = {
        name: replace(one, relative_to=other)
        for (name, one), other in zip(named.items(), decoded or [""] * len(infos), strict=True)
    }
    material = LatticeInput(
        "record",
        infos,
        tuple(values.values()),
        tuple(points.values()),
        parent,
        tuple(others),
        tuple(range(len(others))),
    )
    encoded = encode_lattice_record(material, threads=threads)
    encoded = replace(encoded, recipe=json.loads(json.dumps(encoded.recipe)))
    return Made(encoded, points, values, parent, decoded)


def comes_back(found: Reference, one: Made) -> None:
    assert found.tensors.keys() == found.quantized.keys() == one.points.keys()
    for name, expected in one.points.items():
        held = found.quantized[name]
        assert isinstance(held, LatticeTensor) and alike(held, expected)
        assert bits(found.tensors[name]) == bits(one.values[name])
        assert found.tensors[name].dtype == one.values[name].dtype


# in the reference's words


def grid(one: Lattice) -> Grid:
    return Grid(one.spacing, one.rows.tolist(), one.columns.tolist(), one.step, one.seed)


def floats(x: Tensor | None) -> Floats | None:
    """As F32, seen as a matrix."""
    return None if x is None else x.float().reshape(sides(tuple(x.shape))).numpy()


def members(one: Made) -> list[Member]:
    held = one.parent if one.encoded.recipe.get("base") else None
    out = []
    for i, (name, points) in enumerate(one.points.items()):
        before = None if held is None else held.quantized.get(name)
        lattice = grid(before.lattice) if isinstance(before, LatticeTensor) else None
        other = [*one.decoded.values()][i] if one.decoded else None
        parent = None if held is None else floats(held.tensors[name])
        out.append(Member(tuple(points.codes.shape), parent, floats(other), lattice))
    return out


def by_the_document(points: LatticeTensor, dtype: str, other: Tensor | None = None) -> Tensor:
    shape = points.lattice.matrix_shape(tuple(points.codes.shape))
    with np.errstate(all="ignore"):
        others = None if other is None else other.float().reshape(shape).numpy()
        values = grid(points.lattice).values(points.codes.long().reshape(shape).numpy(), others)
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(points.codes.shape).to(torch_dtype(dtype))


def told_by_contexts(one: Made) -> Made:
    """A record's only tensor with points that say nothing but which context they have: neighbours need other tables."""
    ((name, points),) = one.points.items()
    (member,) = members(one)
    guesses, contexts = guess(grid(points.lattice), member)
    codes = torch.from_numpy(np.clip(guesses + 10 * (contexts % 12) - 55, -126, None)).to(torch.int16)
    told = replace(points, codes=codes.reshape(points.codes.shape), relative_to="")
    return made({name: told}, one.encoded.infos[0].dtype, one.parent, others=[*one.decoded.values()])


# anything


@st.composite
def lattices(draw: st.DrawFn, law: str, shape: tuple[int, ...]) -> Lattice:
    """Steps alike, unlike, or as far apart as they may be; with and without a seed; of one leading axis or of more."""
    at, spread = draw(st.sampled_from([(-40, 4), (0, 8), (-100, 200), (0, 960), (940, 20), (-940, 20), (900, 0)]))
    seed = draw(st.sampled_from([0, 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1))
    step = draw(st.integers(1, 1024) | st.just(24)) if law == "log" else 1
    axes, random = draw(st.integers(1, max(1, len(shape) - 1))), draw(st.integers(0, 99))
    return lattice_of(law, shape, seed=seed, step=step, at=at, spread=spread, random=random, axes=axes)


@st.composite
def cases(draw: st.DrawFn) -> Made:
    """A record of one to three tensors of one law: alone, or with a parent of any values, made on any lattice."""
    law, dtype = draw(st.sampled_from(LAWS)), draw(st.sampled_from(DTYPES))
    step = draw(st.integers(1, 1024) | st.just(24)) if law == "log" else 1
    shaped = draw(st.lists(st.sampled_from(SHAPES) | shapes(), min_size=1, max_size=3))
    now, others = {}, []
    for i, shape in enumerate(shaped):
        lattice = replace(draw(lattices(law, shape)), step=step)
        codes = codes_of(law, shape, draw(st.sampled_from(["none", "near", "far"])), random=draw(st.integers(0, 99)))
        now[str(i)] = LatticeTensor(codes, lattice)
        other_dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        others += [squares(shape, random=i).to(other_dtype)] if law == "relative" else []
    kind = draw(st.sampled_from(["alone", "any bits", "another law", "same lattice", "moved", "another seed", "equal"]))
    parent = None if kind == "alone" else draw(parents(kind, now, others, dtype))
    return made(now, dtype, parent, others=others)


@st.composite
def parents(draw: st.DrawFn, kind: str, now: dict[str, LatticeTensor], others: list[Tensor], dtype: str) -> Reference:
    values, symbols = {}, {}
    for i, (name, one) in enumerate(now.items()):
        shape = tuple(one.codes.shape)
        if kind == "any bits":  # nan, infinities, denormals, zeros of both signs, huge ones
            values[name] = draw(tensors((dtype,), st.just(shape), ("dense",)))
            continue
        moved = one if kind == "equal" else replace(one, codes=codes_of(one.lattice.spacing, shape, random=i + 1))
        if kind == "another law":
            law = draw(st.sampled_from(["linear", "log"]))
            moved = LatticeTensor(codes_of(law, shape), draw(lattices(law, shape)))
        if kind == "moved":
            rows = one.lattice.rows
            nearer = rows - rows.sign() * (torch.rand(rows.shape, generator=torch.Generator().manual_seed(i)) < 0.1)
            moved = replace(moved, lattice=replace(one.lattice, rows=nearer.to(torch.int16)))
        if kind == "another seed":
            seed = 0 if one.lattice.spacing == "log" else draw(st.integers(0, 2**32 - 1))
            moved = replace(moved, lattice=replace(one.lattice, seed=seed))
        other = others[i] if others and moved.lattice.spacing == "relative" else None
        values[name], symbols[name] = moved.dequantize(torch_dtype(dtype), other), moved
    return Reference(values, symbols)
