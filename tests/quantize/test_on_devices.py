"""Points of lattices are the same wherever a state is: by torch operations on a device, or by kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers.kernel_bits import kernels_on
from helpers.lattice_devices import DTYPES, SHAPES, check_moments, check_plans, check_sums, check_weights, sgd
from helpers.parameters import each_value
from helpers.stand_in_device import DeviceTensor, StandInDevice

import shrinkpoint.device


@pytest.mark.parametrize(("shape", "dtype"), each_value(SHAPES, DTYPES))
def test_torch_operations_choose_the_points_of_native_code(shape, dtype):
    check_weights(shape, dtype, DeviceTensor, StandInDevice)
    if dtype != torch.float16:
        check_moments(shape, dtype, DeviceTensor, StandInDevice)


def test_torch_operations_give_the_sums_and_plans_of_native_code():
    check_sums(DeviceTensor, StandInDevice)
    check_plans(3, DeviceTensor, StandInDevice)
    check_plans(3, DeviceTensor, StandInDevice, sgd, nats=30.0, terms=1000)


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
