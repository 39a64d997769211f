"""Kernels give the bits of native code. Triton interprets them on a CPU: tests/device/test_kernels.py runs this file.

By hand: TRITON_INTERPRET=1 python -m pytest -n 0 tests/device/interpreted.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernel_bits import FLOATS, check_rows, compressor_of, edge_values, kernels_on, some_rows
from helpers.lattice_devices import PARAMETERS, SHAPES, check_moments, check_plans, check_sums, check_weights, sgd
from helpers.parameters import each_value
from helpers.stand_in_device import DEVICE, DeviceTensor, StandInDevice, on_host
from helpers.strategies import bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce
from shrinkpoint.comm.compressors.index_coding import index_code
from shrinkpoint.errors import MismatchError

DITHERS = [f"q{bits}:{group}:dither" for bits, group in ((1, 64), (2, 32), (4, 64), (7, 16), (8, 100))]
UNIFORM = [f"q{bits}:64" for bits in range(1, 9)] + DITHERS
GROUPS = ["q4:1", "q4:7", "q3:16", "q5:512", "q2:4096", "q4:5000", "q6:100", "q4", "q8", "q2:dither"]
SHAPED = ["q4:row", "q4:channel", "q3:row:dither"]
NORMAL = ["n1:64", "n2:16", "n3:256", "n4:64", "n4:4096"]
BLOCKS = ["block2:16", "block3:32", "block4:32", "block5:64", "block6:256", "block7:32", "block8:4096"]
ROTATED = ["h16(q4:64)", "h64(q4:64)", "h256(n4:64)", "h64(block4:32)", "h64(q2:64:dither)"]
FLAT = [*UNIFORM, *GROUPS, *NORMAL, *BLOCKS, *ROTATED]


@pytest.fixture(autouse=True)
def numpy_computes_with_nan() -> Iterator[None]:
    """numpy, which the interpreter computes with, warns of what a GPU does silently."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("spec", FLAT)
def test_kernels_give_the_bits_of_native_code(spec: str) -> None:
    index = FLAT.index(spec)
    count, numel = 1 + index % 3, (1234, 2100, 700)[index % 3]
    check_rows(spec, some_rows(count, (numel,), FLOATS[index % 4], seed=index))


@pytest.mark.parametrize("spec", SHAPED)
def test_rows_and_channels_have_ranges_of_their_own(spec: str) -> None:
    check_rows(spec, some_rows(2, (3, 5, 4, 33), torch.float32))
    check_rows(spec, some_rows(1, (2, 3, 128), torch.bfloat16))


@pytest.mark.parametrize("numel", [1, 63, 65])
def test_short_tensors_and_tails_have_the_bits_of_native_code(numel: int) -> None:
    for spec in ("q4:64", "q3:64:dither", "n4:64", "block4:32", "h64(q4:64)", "q4"):
        check_rows(spec, some_rows(2, (numel,), torch.float32))


@pytest.mark.parametrize("spec", ["q4:64", "h16(q2:64)", "q4:row"])
def test_strides_do_not_change_a_bit(spec: str) -> None:
    rows = [row.t() for row in some_rows(2, (40, 31), torch.float32)]
    check_rows(spec, rows)
    spread = some_rows(5, (130,), torch.bfloat16)
    check_rows(spec, [spread[row] for row in (0, 1, 3, 4)])  # one place is left out, as that of an own rank
    check_rows(spec, [spread[row] for row in (3, 0, 1)])
    check_rows(spec, [row.clone() for row in spread])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spec", FLAT)
def test_all_dtypes_and_many_values_have_the_bits_of_native_code(spec: str, dtype: torch.dtype) -> None:
    for seed, numel in enumerate((1, 64, 100, 4096, 20_011)):
        check_rows(spec, some_rows(2, (numel,), dtype, seed))


def test_scales_halfway_between_two_bfloat16_round_to_the_even_one() -> None:
    factor = torch.tensor(math.sqrt(math.pi / 2) / 64, dtype=torch.float32)
    for word in (0x3F808000, 0x3F818000):
        scale = torch.tensor(word, dtype=torch.int32).view(torch.float32)
        near = (scale / factor).view(torch.int32) + torch.arange(-2, 3, dtype=torch.int32)
        (value, *_) = near.view(torch.float32)[near.view(torch.float32) * factor == scale]
        rows = [value.expand(64).contiguous()]  # 64 equal magnitudes add up exactly
        check_rows("n1:64", rows)
        assert int(compressor_of("n1:64").encode(rows[0])[0]) == {0x3F808000: 0x80, 0x3F818000: 0x82}[word]


@pytest.mark.parametrize(
    ("n", "k", "form"),
    [
        (1000, 501, "bitmap"),
        (70_000, 3, "packed"),
        (1 << 30, 5, "packed"),
        (65_536, 6554, "split"),
        (3000, 31, "split"),
    ],
)
def test_codes_of_indices_have_the_bytes_of_native_code(n: int, k: int, form: str) -> None:
    code, generator = index_code(n, k), torch.Generator().manual_seed(n)
    assert code.form == form
    for _ in range(2):
        indices = torch.randint(n - k, (k,), generator=generator).sort().values + torch.arange(k)
        indices[-1] = n - 1
        with kernels_on("cpu"):
            message = code.encode_torch(indices)
            assert bits(message) == bits(code.encode(indices))
            assert torch.equal(code.decode_torch(message), indices)
            assert torch.equal(code.decode_torch(torch.cat([message[:1], message])[1:]), indices)
            for damaged in (message ^ 0xFF, torch.zeros_like(message), torch.full_like(message, 0xFF)):
                with pytest.raises(MismatchError):
                    code.decode_torch(damaged)


def test_sparse_messages_have_the_bits_of_native_code() -> None:
    values = some_rows(1, (3, 700), torch.float32)[0]
    for spec in ("top10", "top30:64", "top1:tensor:q4:64"):
        compressor: Any = compressor_of(spec)
        wire, out = compressor.encode(values), compressor.decode(compressor.encode(values), torch.empty_like(values))
        with kernels_on("cpu"):
            assert bits(compressor._encode_torch(values)) == bits(wire)
            found = compressor._decode_torch(wire, torch.empty_like(values))
        assert bits(found.nan_to_num(1.25)) == bits(out.nan_to_num(1.25))


def count_kernels(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]) -> None:
    """Call `note` with the name of each kernel that is started."""
    start = GridExecutor.__call__

    def counted(grid: GridExecutor, *arguments: object, **options: object) -> object:
        note(grid.fn.__name__)
        with _disable_current_modes():
            return start(grid, *on_host(arguments), **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)


class Launches(TorchDispatchMode):
    """Counts the kernels that are started, and the operations of torch that a device would launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        count_kernels(monkeypatch, lambda name: self.names.append(name))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func.name().startswith(
            ("aten::empty", "aten::new_empty", "aten::detach", "aten::promote")
        ):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[str]]:
    """Counts the launches of a call."""
    counter = Launches(monkeypatch)

    def count(work: Callable[[], object]) -> list[str]:
        counter.names = []
        with counter:
            work()
        return counter.names

    return count


RANKS = 8


def received(messages: list[Tensor | None]) -> list[Tensor]:
    """Messages as a collective receives them: one after another in one tensor, and nothing from the rank itself."""
    parts = [torch.empty(0, dtype=torch.uint8) if message is None else message for message in messages]
    return list(torch.cat(parts).split([part.numel() for part in parts]))


class Ranks:
    """The ranks of an average in one process; what they send is handed over. Kernels run for one of them, if any."""

    def __init__(self, spec: str, with_kernels: int | None) -> None:
        self.sides = [CompressedAllReduce(spec, name="loopback") for _ in range(RANKS)]
        self.with_kernels = with_kernels

    def run(self, rank: int, work: Callable[..., Any], *arguments: Any) -> Any:
        with kernels_on(*(["cpu"] if rank == self.with_kernels else [])):
            return work(*arguments)

    def average(self, rows: list[Tensor], run: Callable[..., Any]) -> None:
        """Average in place the rows of each rank.

        Args:
            run: calls what a rank does: `run(rank, what, work, *arguments)`, with "encode" or "decode".
        """
        hops = [(rank, *side.hops) for rank, side in enumerate(self.sides)]
        sent = [run(rank, "encode", hop.encode, rows[rank], rank) for rank, hop, _ in hops]
        gathered = []
        for rank, first, second in hops:
            messages = received([one.messages[rank] for one in sent])
            mean = run(rank, "decode", first.decode, sent[rank], messages, rank).div_(RANKS)
            gathered.append(run(rank, "encode", second.encode, mean.to(rows[rank].dtype), rank, RANKS))
        for rank, _, second in hops:
            messages = received([one.message for one in gathered])
            run(rank, "decode", second.decode, gathered[rank], messages, rows[rank])


COUNTS = {"q4:64": (2, 3), "n4:64": (2, 3), "block4:32": (2, 3), "q8:64:dither": (2, 3), "h64(q4:64)": (4, 5)}
COUNTS |= {"ef(q4:64, decay=0.5)": (10, 3), "ef(h16(n3:64))": (16, 5), "ef21(q4:64)": (60, 76)}
"""The most launches of a rank, of both hops together, to encode and to decode a segment; without copies of seeds. Error
feedback needs two less for a hop where the residuals lie at even distances in memory."""
DTYPES = {"n4:64": torch.bfloat16, "ef(h16(n3:64))": torch.bfloat16, "block4:32": torch.float16}
"""The dtypes of gradients, where it is not float32."""
QUICK, NIGHTLY = ("q4:64", "n4:64", "q8:64:dither", "ef(q4:64, decay=0.5)"), pytest.mark.nightly


@pytest.mark.parametrize("spec", [pytest.param(spec, marks=() if spec in QUICK else NIGHTLY) for spec in COUNTS])
def test_a_segment_of_eight_ranks_takes_a_few_launches_each_way(spec: str, launches) -> None:
    native, mixed, dtype = Ranks(spec, None), Ranks(spec, 3), DTYPES.get(spec, torch.float32)
    for step in range(3):  # the first one measures errors and makes counters
        made: dict[str, list[str]] = {"encode": [], "decode": []}
        ranks = [edge_values(RANKS * 192, seed).view(RANKS, 192).to(dtype) for seed in range(RANKS)]
        expected = [rows.clone() for rows in ranks]

        def counted(rank: int, what: str, *work: Any, made: dict[str, list[str]] = made) -> Any:
            if rank != mixed.with_kernels:
                return mixed.run(rank, *work)
            results: list[Any] = []
            made[what] += launches(lambda: results.append(mixed.run(rank, *work)))
            return results[0]

        native.average(expected, lambda rank, _, *work: native.run(rank, *work))
        mixed.average(ranks, counted)
        assert [bits(rows.nan_to_num(1.25)) for rows in ranks] == [bits(rows.nan_to_num(1.25)) for rows in expected]
        counts = zip((len(made["encode"]), len(made["decode"])), COUNTS[spec], strict=True)
        assert step != 1 or all(0 < count <= most for count, most in counts), made
    for ours, theirs in zip(mixed.sides, native.sides, strict=True):
        lost = [side.residuals().values() for side in (ours, theirs)]
        assert [bits(residual) for residual in lost[0]] == [bits(residual) for residual in lost[1]]
        for hop in ours.link_stats:
            found, wanted = ours.link_stats[hop].as_dict(), theirs.link_stats[hop].as_dict()
            for name in ("messages", "raw_bytes", "wire_bytes", "nonfinite", "relative_error"):
                assert found[name] == wanted[name], (hop, name)


@pytest.mark.parametrize(("spec", "count"), [("q4:64", 1), ("q4:64:dither", 1), ("n4:64", 1), ("q4:100", 2), ("q4", 3)])
def test_a_message_takes_one_to_three_launches(spec: str, count: int, launches) -> None:
    compressor, values = compressor_of(spec), torch.randn(5000)
    with kernels_on("cpu"):
        messages = []
        assert len(launches(lambda: messages.append(compressor.encode(values)))) == count
        assert len(launches(lambda: compressor.decode(messages[0], torch.empty(5000)))) == 1


def here(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize(("shape", "dtype"), each_value(SHAPES, FLOATS[:3]))
def test_kernels_choose_the_points_of_native_code(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_weights(shape, dtype, here, lambda: kernels_on("cpu"))
    if dtype != torch.float16:
        check_moments(shape, dtype, here, lambda: kernels_on("cpu"))


def test_kernels_give_the_sums_of_native_code() -> None:
    check_sums(here, lambda: kernels_on("cpu"))


def test_kernels_choose_the_points_of_momentum() -> None:
    check_plans(2, here, lambda: kernels_on("cpu"), sgd, nats=30.0, terms=1000)


def test_fisher_takes_six_launches_for_each_parameter_and_ten_waits_for_all(monkeypatch) -> None:
    devices: list[StandInDevice] = []
    count_kernels(monkeypatch, lambda name: devices[-1].launches.append(name))

    @contextmanager
    def there() -> Iterator[None]:
        devices.append(StandInDevice())
        with devices[-1], kernels_on(DEVICE.type):
            yield

    check_plans(4, DeviceTensor, there)
    for device in devices[1:]:  # the first save chooses the matrices of kernels; a vector takes five
        kernels = [name for name in device.launches if name.startswith("_")]
        assert len(kernels) == 6 * PARAMETERS - 1 and len(device.waits) <= 10, device.launches
        assert len(device.launches) - len(kernels) == len(device.waits)  # what is read at once is joined
