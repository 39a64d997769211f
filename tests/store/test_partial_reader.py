"""Any box of any tensor is what it is in the whole checkpoint, and no more of the chain is decoded than it needs."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import torch
from helpers.malformed import changed, file, plain
from helpers.round_trip import Loop
from helpers.stores import payload_start
from helpers.strategies import DTYPES, bits, from_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint import Lossless, save
from shrinkpoint.errors import (
    ChainError,
    CorruptError,
    FormatError,
    LossWarning,
    MismatchError,
    NotFoundError,
    PolicyError,
)
from shrinkpoint.schemes import Scheme
from shrinkpoint.store.partial_reader import PartialReader, contiguous_ranges
from shrinkpoint.store.single_file import decode_file
from shrinkpoint.tensors.info import TensorInfo

CHUNK = 100
WEIGHT = "model/2.weight"
"""Of shape (96, 64), in a record with others."""


FOLDERS: list[Path] = []
"""Of the chains that several tests read."""


@pytest.fixture(scope="module", autouse=True)
def folders_are_removed() -> Iterator[None]:
    """Workers of pytest end without calling what is registered for the exit."""
    yield
    for folder in FOLDERS:
        shutil.rmtree(folder)


def written(states: list[Any], scheme: Scheme) -> list[Path]:
    """The files of a chain, keyframe first."""
    folder, out = Path(mkdtemp()), list[Path]()
    FOLDERS.append(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        for i, state in enumerate(states):
            save(state, folder / f"{i}", scheme=scheme, base=out[-1] if out else None, threads=1)
            out.append(folder / f"{i}")
    return out


def whole(chain: list[Path]) -> dict[str, Tensor]:
    return dict(decode_file(chain[-1], threads=1)[0].reference.tensors)


@cache
def trained() -> tuple[list[Path], dict[str, Tensor]]:
    """A keyframe and three deltas, one step apart: moments as contexts, factors, copies, what never changes."""
    loop, states = Loop(), []
    frozen = torch.randn(50, 40, generator=torch.Generator().manual_seed(5))
    for _ in range(4):
        state = loop.steps(1)
        state["half"] = {name: x.bfloat16() for name, x in state["model"].items()}
        states.append({**state, "frozen": frozen, "again": state["model"]["3.weight"].clone()})
    chain = written(states, Lossless(chunk=CHUNK))
    return chain, whole(chain)


@cache
def mixed() -> tuple[list[Path], dict[str, Tensor]]:
    """Every dtype, as large and small tensors, without axes and without values, in a chain of four."""
    source, states = random.Random(0), []
    shapes = {"large": (37, 29), "kernel": (6, 5, 3, 3), "row": (700,), "one": (), "none": (4, 0, 2)}
    data = {
        (name, kind): bytearray(source.randbytes(torch.Size(shape).numel() * from_bytes(b"", name, (0,)).itemsize))
        for name in DTYPES
        for kind, shape in shapes.items()
    }
    for key, values in data.items():
        values[:] = bytes(value & 1 for value in values) if key[0] == "BOOL" else bytes(b & 0x3F for b in values)
    for _ in range(4):
        states.append(
            {f"{name}/{kind}": from_bytes(bytes(data[name, kind]), name, shapes[kind]) for name, kind in data}
        )
        for key, values in data.items():
            for i in range(0, len(values), 11):
                values[i] ^= 1 if key[0] == "BOOL" or i % 2 else 3
                values[i] &= 1 if key[0] == "BOOL" else 0xFF
    chain = written(states, Lossless(chunk=CHUNK))
    return chain, whole(chain)


def cut(x: Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return x[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def is_the_slice(found: Tensor, x: Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    expected = cut(x, starts, sizes)
    alike = found.dtype == expected.dtype and found.shape == expected.shape and found.is_contiguous()
    return alike and bits(found) == bits(expected)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Any box, often one that is whole along some axes."""
    starts, sizes = [], []
    for length in shape:
        start = 0 if draw(st.booleans()) else draw(st.integers(0, length))
        starts.append(start)
        sizes.append(length - start if draw(st.booleans()) else draw(st.integers(0, length - start)))
    return tuple(starts), tuple(sizes)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([trained, mixed]), st.sampled_from([0, 5_000, 1 << 27]))
def test_any_box_is_the_slice_of_the_whole(data, make, cache):
    chain, tensors = make()
    with PartialReader(chain, threads=1, cache=cache) as boxes:
        assert list(boxes.infos) == list(tensors)
        for _ in range(3):
            name = data.draw(st.sampled_from(list(tensors)))
            starts, sizes = data.draw(boxes_of(tuple(tensors[name].shape)))
            assert is_the_slice(boxes.read(name, starts, sizes), tensors[name], starts, sizes)


@pytest.mark.parametrize("make", [trained, mixed])
def test_every_whole_tensor_is_that_of_the_whole_file(make):
    chain, tensors = make()
    with PartialReader(chain, threads=2) as boxes:
        for name, x in tensors.items():
            found = boxes.read(name, (0,) * x.dim(), tuple(x.shape))
            assert found.dtype == x.dtype and bits(found) == bits(x)


def lossy_chain(scheme: Any) -> list[Path]:
    loop, states = Loop(), []
    for _ in range(4):
        states.append(loop.steps(2))
    return written(states, scheme)


CONFIG = {"bins": 8, "embedding_bins": 32, "prune": 0.2, "protect": 0.005}
LOSSY = {
    "fisher": lambda: sp.Fisher(relative_error=0.05),
    "inshrinkerator": lambda: sp.Inshrinkerator(config=CONFIG),
    "lc-checkpoint": sp.LCCheckpoint,
    "lc-checkpoint as printed": lambda: sp.LCCheckpoint(paper=True),
    "excp": sp.ExCP,
}


@pytest.mark.parametrize("name", LOSSY)
def test_any_box_of_a_lossy_chain_is_the_slice_of_the_whole(name):
    chain = lossy_chain(LOSSY[name]())
    tensors, source = whole(chain), random.Random(1)
    with PartialReader(chain, threads=1, cache=source.choice([0, 1 << 20])) as boxes:
        kinds = {head.recipe["kind"] for file in boxes._chain for head in file.reader.records}
        assert kinds & {"gridded", "quantized"}
        for tensor, x in tensors.items():
            for _ in range(4):
                starts = tuple(source.randint(0, length) for length in x.shape)
                sizes = tuple(source.randint(0, n - start) for start, n in zip(starts, x.shape, strict=True))
                assert is_the_slice(boxes.read(tensor, starts, sizes), x, starts, sizes)


# what it costs


def test_rows_cost_the_chunks_that_cover_them_in_every_file_and_of_every_context():
    chain, tensors = trained()
    with PartialReader(chain, threads=1, cache=0) as boxes:
        assert boxes.numbers_decoded == 0
        found = boxes.read(WEIGHT, (10, 0), (2, 64))
        assert is_the_slice(found, tensors[WEIGHT], (10, 0), (2, 64))
        covered = 3 * CHUNK  # 128 values fall into no more chunks
        assert (
            0 < boxes.numbers_decoded <= 4 * 3 * (covered + CHUNK)
        )  # files; values and two moments, which begin elsewhere
        assert boxes.numbers_decoded < tensors[WEIGHT].numel()


def test_a_part_of_a_row_costs_one_chunk_of_a_keyframe_and_columns_all_that_they_cross():
    generator = torch.Generator().manual_seed(0)
    (chain,) = written([{"w": 0.02 * torch.randn(70, 1000, generator=generator)}], Lossless(chunk=CHUNK))
    for starts, sizes, expected in (
        ((3, 210), (1, 50), 100),
        ((3, 250), (1, 100), 200),
        ((3, 900), (2, 1000 - 900), 200),
        ((0, 400), (70, 100), 70 * 100),
        ((5, 0), (4, 1000), 4000),
        ((69, 999), (1, 1), 100),
        ((3, 3), (0, 9), 0),
    ):
        with PartialReader([chain], threads=1) as boxes:
            boxes.read("w", starts, sizes)
            assert boxes.numbers_decoded == expected


def test_what_was_decoded_is_not_decoded_again_while_it_is_held():
    chain, _ = trained()
    with PartialReader(chain, threads=1) as boxes:
        boxes.read(WEIGHT, (10, 0), (2, 64))
        before = boxes.numbers_decoded
        boxes.read(WEIGHT, (10, 5), (2, 40))
        boxes.read("half/2.weight", (11, 0), (1, 9))  # a cast of the same values
        assert boxes.numbers_decoded == before
        boxes.read(WEIGHT, (60, 0), (2, 64))
        assert boxes.numbers_decoded > before
    with PartialReader(chain, threads=1, cache=0) as boxes:
        boxes.read(WEIGHT, (10, 0), (2, 64))
        boxes.read(WEIGHT, (10, 0), (2, 64))
        assert boxes.numbers_decoded == 2 * before


def test_what_never_changed_costs_its_keyframe_alone():
    chain, tensors = trained()
    with PartialReader(chain, threads=1) as boxes:
        found = boxes.read("frozen", (7, 0), (3, 40))
        assert is_the_slice(found, tensors["frozen"], (7, 0), (3, 40)) and boxes.numbers_decoded <= 3 * CHUNK


def test_what_is_read_is_the_callers_own():
    chain, tensors = trained()
    with PartialReader(chain, threads=1) as boxes:
        for sizes in ((2, 64), (96, 64)):
            boxes.read(WEIGHT, (0, 0), sizes).zero_()
            assert is_the_slice(boxes.read(WEIGHT, (0, 0), sizes), tensors[WEIGHT], (0, 0), sizes)


def test_several_threads_may_read_at_once():
    chain, tensors = trained()
    with PartialReader(chain, threads=2, cache=20_000) as boxes, ThreadPoolExecutor(4) as pool:

        def read(row: int) -> bool:
            return is_the_slice(boxes.read(WEIGHT, (row, 1), (3, 60)), tensors[WEIGHT], (row, 1), (3, 60))

        assert all(pool.map(read, range(0, 93, 4)))


# boxes that are none


@pytest.mark.parametrize(
    ("starts", "sizes"),
    [((0,), (1,)), ((0, 0), (97, 1)), ((96, 0), (1, 1)), ((-1, 0), (1, 1)), ((0, 0), (1, -1)), ((0, 0, 0), (1, 1, 1))],
)
def test_a_box_that_is_not_inside_its_tensor_is_refused(starts, sizes):
    with PartialReader(trained()[0], threads=1) as boxes, pytest.raises(MismatchError, match=r"2\.weight.*\[96, 64\]"):
        boxes.read(WEIGHT, starts, sizes)


def test_a_tensor_that_is_not_there_is_named():
    with PartialReader(trained()[0], threads=1) as boxes, pytest.raises(NotFoundError, match="no tensor 'weights'"):
        boxes.read("weights", (), ())


def test_nothing_is_read_after_the_end():
    boxes = PartialReader(trained()[0], threads=1)
    boxes.close()
    with pytest.raises(PolicyError, match="closed"):
        boxes.read(WEIGHT, (0, 0), (1, 1))


def test_stretches_of_a_box_are_as_long_as_they_can_be():
    info = TensorInfo("x", (4, 5, 6), "F16")
    for starts, sizes, places, size in (
        ((0, 0, 0), (4, 5, 6), [0], 240),
        ((1, 0, 0), (2, 5, 6), [60], 120),
        ((1, 2, 0), (2, 2, 6), [84, 144], 24),
        ((3, 1, 2), (1, 3, 2), [196, 208, 220], 4),
    ):
        found, length = contiguous_ranges(info, starts, sizes)
        assert found.tolist() == places and length == size


# chains that are none, and damage


def copied(chain: list[Path], folder: Path) -> list[Path]:
    return [Path(shutil.copy(path, folder / path.name)) for path in chain]


def test_a_chain_that_is_none_is_refused(tmp_path):
    chain = trained()[0]
    for wrong in (chain[1:], chain[::-1], [chain[0], *chain[2:]], [chain[0], *chain], chain[:1] * 2):
        with pytest.raises(ChainError):
            PartialReader(wrong)
    with pytest.raises(PolicyError):
        PartialReader([])
    with pytest.raises(NotFoundError):
        PartialReader([*chain[:-1], tmp_path / "none"])
    with pytest.raises(ChainError, match="no such file"):
        PartialReader([tmp_path / "none", *chain[1:]])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_turned_bit_is_refused_or_not_met(data):
    chain, tensors = trained()
    with TemporaryDirectory() as folder:
        damaged = copied(chain, Path(folder))
        path = data.draw(st.sampled_from(damaged))
        stored = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(stored) - 1))
        stored[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(stored)
        name = data.draw(st.sampled_from(list(tensors)))
        starts, sizes = data.draw(boxes_of(tuple(tensors[name].shape)))
        with suppress(FormatError, ChainError), PartialReader(damaged, threads=1) as boxes:
            assert is_the_slice(boxes.read(name, starts, sizes), tensors[name], starts, sizes)


def test_a_damaged_base_is_named(tmp_path):
    damaged = copied(trained()[0], tmp_path)
    with PartialReader(damaged, threads=1) as boxes:
        head = boxes._chain[1].head(boxes._chain[1].records[WEIGHT])
    stored = bytearray(damaged[1].read_bytes())
    stored[head.parts["codes"].offset + head.parts["codes"].size // 2] ^= 16
    damaged[1].write_bytes(stored)
    with PartialReader(damaged, threads=1) as boxes, pytest.raises(CorruptError, match=f"{damaged[1]}.*'codes'"):
        boxes.read(WEIGHT, (0, 0), (1, 1))


def test_an_empty_part_does_not_vouch_for_the_one_behind_it(tmp_path):
    data = bytearray(file([plain("empty", "F32", (0, 3)), plain("w", "F32", (4, 3))]))
    data[payload_start(data)] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    with PartialReader([tmp_path / "damaged"], threads=1) as boxes:
        boxes._chain[0].reader.read_part(boxes._chain[0].head(0), "values", 0, 0)
        with pytest.raises(CorruptError, match="'w', part 'values': stored digest"):
            boxes.read("w", (0, 0), (1, 1))


def test_a_file_that_is_cut_while_it_is_open_is_refused(tmp_path):
    damaged = copied(trained()[0], tmp_path)
    with PartialReader(damaged, threads=1) as boxes:
        with damaged[0].open("r+b") as file:
            file.truncate(damaged[0].stat().st_size // 2)
        with pytest.raises(FormatError, match="only"):
            boxes.read(WEIGHT, (95, 0), (1, 64))


def test_other_values_than_were_meant_are_found_when_a_tensor_is_read_as_a_whole(tmp_path):
    """The bytes are as they were written; what they stand for is not what the writer was given."""

    def forge(outer: Any, document: Any) -> None:
        document["digests"][0] = "0" * 32

    generator = torch.Generator().manual_seed(0)
    (chain,) = written([{"w": 0.02 * torch.randn(70, 1000, generator=generator)}], Lossless(chunk=CHUNK))
    (tmp_path / "forged").write_bytes(changed(chain.read_bytes(), forge))
    with PartialReader([tmp_path / "forged"], threads=1) as boxes:
        boxes.read("w", (0, 0), (69, 1000))
        with pytest.raises(CorruptError, match="expected 0000"):
            boxes.read("w", (0, 0), (70, 1000))


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    64,
    2**31,
    2**62,
    1.5,
    "base",
    "square",
    "plain",
    "same",
    [],
    [0],
    [[0, 0, 1]],
    [[0, 1, 3]],
    [[5, -1, 6]],
    [[[0, 1, 6]], [[6, 1, 6]]],
    [[[20, 0, 1]], [[21, 0, 1]]],
    {},
    {"packed": 5},
]


@pytest.mark.parametrize("make", [lambda: trained()[0][:2], lambda: lossy_chain(sp.Fisher(relative_error=0.05))[:2]])
def test_a_forged_recipe_is_refused_or_read(make, tmp_path):
    chain, source = make(), random.Random(0)
    last, forged = chain[-1].read_bytes(), tmp_path / "forged"
    for _ in range(60):

        def forge(outer: Any, document: Any) -> None:
            recipe = source.choice(document["recipes"])
            target = recipe["runs"][-1] if "runs" in recipe and source.random() < 0.5 else recipe
            target[source.choice([*target, "base", "moments", "taps"])] = source.choice(JUNK)

        forged.write_bytes(changed(last, forge))
        with suppress(FormatError), PartialReader([*chain[:-1], forged], threads=1) as boxes:
            for name, info in boxes.infos.items():
                sizes = tuple(min(2, length) for length in info.shape)
                with suppress(FormatError, ChainError):
                    assert boxes.read(name, (0,) * len(sizes), sizes).shape == sizes


def test_a_delta_in_the_place_of_a_keyframe_is_refused(tmp_path):
    """It says that it stands alone, and its records need a parent."""

    def forge(outer: Any, document: Any) -> None:
        document["parent"] = None

    (tmp_path / "forged").write_bytes(changed(trained()[0][1].read_bytes(), forge))
    with PartialReader([tmp_path / "forged"], threads=1) as boxes:
        for name in (WEIGHT, "frozen"):
            with pytest.raises(ChainError, match="without its base"):
                boxes.read(name, (0, 0), (1, 1))
