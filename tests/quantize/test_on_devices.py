"""Points of lattices are the same wherever a state is: by torch operations on a device, or by kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.kernel_bits import kernels_on
from helpers.lattice_devices import DTYPES, SHAPES, check_moments, check_plans, check_sums, check_weights, sgd
from helpers.parameters import each_value
from helpers.stand_in_device import DeviceTensor, StandInDevice, on_host
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shrinkpoint.codec.lattice
import shrinkpoint.device
from shrinkpoint.codec.lattice import Lattice, dither
from shrinkpoint.quantize.lattice import (
    ErrorWeights,
    PowerZones,
    quantize_second_moment,
    quantize_to_lattice,
    quantize_with_errors,
)
from shrinkpoint.quantize.statistics import second_moment_sums, square_sums, value_sums


@pytest.mark.parametrize(("shape", "dtype"), each_value(SHAPES, DTYPES))
def test_torch_operations_choose_the_points_of_native_code(shape, dtype):
    check_weights(shape, dtype, DeviceTensor, StandInDevice)
    if dtype != torch.float16:
        check_moments(shape, dtype, DeviceTensor, StandInDevice)


def test_torch_operations_give_the_sums_and_plans_of_native_code():
    check_sums(DeviceTensor, StandInDevice)
    check_plans(3, DeviceTensor, StandInDevice)
    check_plans(3, DeviceTensor, StandInDevice, sgd, nats=30.0, terms=1000)


class LiveBytes(TorchDispatchMode):
    """Sums the memory of the tensors that operations have made and that are still alive; `peak` is the most of it."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._alive, self.peak = dict[int, tuple[StorageWeakRef, int]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive = {key: alive for key, alive in self._alive.items() if not alive[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = on_host(tensor).untyped_storage()
                if storage._cdata not in self._given:
                    self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out


@pytest.mark.parametrize("size", [9, 60])
def test_slabs_of_any_size_give_the_same_points(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = dither(2**32 - 5, (37, 61))
    monkeypatch.setattr(shrinkpoint.codec.lattice, "SLAB_VALUES", size)
    assert torch.equal(dither(2**32 - 5, (37, 61)), noise)
    assert torch.equal(dither(2**32 - 5, (1, 57), first=2200)[0], noise.view(-1)[2200:])
    for shape in [(13, 5), (3, 2, 3, 3), (70,)]:
        check_weights(shape, torch.float32, DeviceTensor, StandInDevice)
        check_moments(shape, torch.bfloat16, DeviceTensor, StandInDevice)


@pytest.mark.parametrize("shape", [(256, 1024), (1, 1 << 18)])
def test_torch_operations_on_a_device_take_a_slab_of_memory_and_the_codes(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shrinkpoint.codec.lattice, "SLAB_VALUES", 1 << 12)
    generator = torch.Generator().manual_seed(0)
    v = torch.rand(shape, generator=generator) * 1e-6
    m, weight = v.sqrt() * torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    rows, columns = torch.zeros(shape[0], dtype=torch.int16), torch.zeros(shape[1], dtype=torch.int16)
    columns = columns[:1] if shape[0] == 1 else columns
    log, linear = Lattice("log", rows - 160, columns, step=40), Lattice("linear", rows - 30, columns, seed=5)
    second = quantize_second_moment(v, m, log, PowerZones(0.5))[0]
    relative, zeros = Lattice("relative", rows, columns[:1], seed=7), torch.zeros(shape, dtype=torch.int8)
    w, first, squares, codes, before = (DeviceTensor(x) for x in (weight, m, v, second.codes, zeros))
    points, held = type(second)(codes, log), (weight, m, v, second.codes, zeros)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "value sums": (0, lambda: value_sums(w)),
        "moment sums": (0, lambda: second_moment_sums(squares, first, by_column=shape[0] > 1)),
        "square sums": (0 if shape[0] > 1 else 48, lambda: square_sums(first)),  # a vector has sums by column
        "second moment": (1, lambda: quantize_second_moment(squares, first, log, PowerZones(0.5, 0.5, 0.8), points)),
        "first moment": (1, lambda: quantize_to_lattice(first, relative, second_moment=points)),
        "weight": (
            1,
            lambda: quantize_with_errors(
                w, linear, ErrorWeights(first, squares), previous_codes=before, hysteresis=0.6
            ),
        ),
        "values": (4, lambda: points.dequantize(torch.float32)),
    }
    for name, (result, work) in works.items():
        with LiveBytes(*held) as memory, StandInDevice():
            work()
        assert memory.peak <= (result + 1.5) * weight.numel(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("there", [lambda: kernels_on("cuda"), kernels_on], ids=["kernels", "torch"])
def test_a_gpu_chooses_the_points_of_native_code(there):
    for shape, dtype in each_value(SHAPES, DTYPES):
        check_weights(shape, dtype, torch.Tensor.cuda, there)
        if dtype != torch.float16:
            check_moments(shape, dtype, torch.Tensor.cuda, there)
    check_sums(torch.Tensor.cuda, there)
    check_plans(3, torch.Tensor.cuda, there)
    check_plans(3, torch.Tensor.cuda, there, sgd)
    assert not shrinkpoint.device._failures
