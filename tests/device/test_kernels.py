"""Kernels: the bits of native code, few launches, and torch operations where a kernel fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.kernel_bits import FLOATS, check_rows, compressor_of, some_rows
from helpers.parameters import each_value
from helpers.paths import REPOSITORY
from helpers.strategies import bits

import shrinkpoint.device
from shrinkpoint.codec.lattice import Lattice
from shrinkpoint.device import kernels_for, rows, run_kernels
from shrinkpoint.quantize.lattice import quantize_to_lattice

HERE = Path(__file__).parent
MIN_TRITON = "3.7"
"""Interpreters of earlier versions fail on loops with numpy 2.4; kernels compile with 3.2 and later."""
SPECS = (
    *("q1:64", "q4:64", "q7:16:dither", "q8:4096", "q4:100", "q4", "q3:row", "q8:dither"),
    *("n1:64", "n2:16", "n3:256", "n4:64", "block2:16", "block4:32", "block8:4096"),
    *("h16(q4:64)", "h64(n4:64)", "h256(q4:64)"),
)


def run_tests(*arguments: str, **environment: str) -> str:
    """Run pytest in a process that has not imported Triton; return what it prints."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    variables = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=variables)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def test_interpreted_kernels_give_the_bits_of_native_code_in_few_launches() -> None:
    pytest.importorskip("triton", minversion=MIN_TRITON)
    assert " passed" in run_tests(str(HERE / "interpreted.py"), TRITON_INTERPRET="1")


@pytest.mark.nightly
def test_interpreted_kernels_give_the_bits_of_native_code_for_many_values() -> None:
    pytest.importorskip("triton", minversion=MIN_TRITON)
    assert " passed" in run_tests(str(HERE / "interpreted.py"), "-m", "nightly", TRITON_INTERPRET="1")


def test_kernels_compile_for_a_gpu_without_fused_multiply_adds(tmp_path: Path) -> None:
    pytest.importorskip("triton", minversion=MIN_TRITON)
    assert " passed" in run_tests(str(HERE / "compiled.py"), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")


@pytest.mark.nightly
def test_kernels_compile_for_older_and_other_gpus(tmp_path: Path) -> None:
    pytest.importorskip("triton", minversion=MIN_TRITON)
    arguments = str(HERE / "compiled.py"), "-m", "nightly"
    assert " passed" in run_tests(*arguments, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")


def test_kernels_do_not_run_on_a_cpu_and_triton_is_not_imported() -> None:
    program = (
        "import sys, torch, shrinkpoint.device as device\n"
        "from shrinkpoint.comm import parse\n"
        "parse('q4:64').encode(torch.ones(64))\n"
        "assert device.kernels_for(torch.device('cpu')) is None\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_environment_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinkpoint.device, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setenv("SHRINKPOINT_TRITON", "0")
    shrinkpoint.device._load_kernels.cache_clear()
    assert kernels_for(torch.device("cpu")) is None
    shrinkpoint.device._load_kernels.cache_clear()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that cannot be launched."""

    class Kernels:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(shrinkpoint.device, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(shrinkpoint.device, "_load_kernels", Kernels)
    monkeypatch.setattr(shrinkpoint.device, "_failures", [])


@pytest.mark.parametrize("spec", ["q4:64", "n4:64", "block4:32", "h64(q4:64)"])
def test_a_kernel_that_fails_costs_one_warning_and_no_bit(broken: None, spec: str) -> None:
    values, compressor = torch.randn(300), compressor_of(spec)
    with pytest.warns(
        RuntimeWarning, match=r"Triton kernel failed \(RuntimeError: no kernel image is available\): tor"
    ):
        wire = compressor.encode(values)
    assert kernels_for(values.device) is None
    assert bits(wire) == bits(compressor.encode(values))  # warnings are errors: there is no second one
    assert compressor.decode(wire, torch.empty(300)).isfinite().all()


def test_points_do_not_change_where_a_kernel_fails(broken: None) -> None:
    values, side = torch.randn(300), torch.zeros(1, dtype=torch.int16)
    with pytest.warns(RuntimeWarning, match="Triton kernel failed"):
        found = quantize_to_lattice(values, Lattice("linear", side, side, seed=7))
    expected = quantize_to_lattice(values, Lattice("linear", side, side, seed=7))  # kernels are not tried again
    assert found is not None and expected is not None and found.has_equal_codes(expected)


def test_running_out_of_memory_is_not_a_failure_of_a_kernel(broken: None) -> None:
    def work(kernels: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        run_kernels(torch.device("cpu"), work)
    assert kernels_for(torch.device("cpu")) is not None


def test_rows_at_even_distances_are_used_in_place_and_others_are_copied() -> None:
    matrix = torch.arange(48.0).view(6, 8)
    even = rows.flat_rows([matrix[row] for row in (0, 1, 3, 4)])
    assert (even.first.data_ptr(), even.count, even.stride, even.hole) == (matrix.data_ptr(), 4, 8, 2)
    backward = rows.flat_rows([matrix[row] for row in (5, 3, 1)])
    assert (backward.stride, backward.hole) == (-16, 3)
    copied = rows.flat_rows([matrix[row] for row in (0, 1, 4)])
    assert copied.first.data_ptr() != matrix.data_ptr() and (copied.stride, copied.hole) == (8, 3)
    assert torch.equal(copied.first, matrix[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", SPECS)
def test_a_gpu_gives_the_bits_of_native_code_by_kernels(spec: str) -> None:
    assert kernels_for(torch.device("cuda")) is not None
    shapes = (1,), (65,), (3, 4096), (50_021,), (40, 31)
    for seed, (shape, dtype) in enumerate(each_value(shapes, FLOATS)):  # of all pairs, compiling would take minutes
        check_rows(spec, some_rows(3, shape, dtype, seed), "cuda")
    spread = some_rows(5, (130,), torch.bfloat16)
    check_rows(spec, [spread[row] for row in (0, 1, 3, 4)], "cuda")
    assert not shrinkpoint.device._failures
