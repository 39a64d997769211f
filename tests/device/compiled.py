"""Kernels compile for GPUs that are not there, and keep one rounding for each operation.

tests/device/test_kernels.py runs this file. By hand: python -m pytest -n 0 tests/device/compiled.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from helpers.kernel_bits import kernels_on
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from shrinkpoint.codec.lattice import Lattice
from shrinkpoint.comm import CompressorContext, parse
from shrinkpoint.comm.compressors.index_coding import index_code
from shrinkpoint.device import block_float, feedback, hadamard, indices, kernels, lattices, normal_float, uniform
from shrinkpoint.device.rows import flat_rows

MODULES = (block_float, feedback, hadamard, indices, lattices, normal_float, uniform)
EVERY = ("q4:64", "q7:100:dither", "q8:16:dither", "q3", "n4:64", "n1:16", "block8:4096", "h256(q1:row)")
"""Specs that start every kernel."""
LARGE = {"_merge_extents", "_encode_indices", "_unpack_fields", "_unpack_bits", "_place_indices"}
"""Kernels that one value does not start."""
TARGETS = {"sm_90": ("cuda", 90, 32), "sm_80": ("cuda", 80, 32), "gfx942": ("hip", "gfx942", 64)}


def is_kernel(name: str, value: object) -> bool:
    """True for a kernel of a module, which asks for its program's number, and False for a function that it calls."""
    return name.startswith("_") and isinstance(value, JITFunction) and "program_id" in value.src


class Driver:
    """The driver of a GPU that only compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


Programs: TypeAlias = list[tuple[str, str]]
"""The names of kernels that were compiled, and their assembly."""


@pytest.fixture
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Kernels that are started are compiled for a GPU, and nothing runs."""
    found, run = [], JITFunction.run

    def compile_only(kernel: JITFunction, *arguments: Any, warmup: bool, **options: Any) -> None:
        compiled = run(kernel, *arguments, warmup=True, **options)
        assert compiled.asm.get("cubin") or compiled.asm["hsaco"]
        found.append((kernel.fn.__name__, compiled.asm.get("ptx") or compiled.asm["amdgcn"]))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    driver.set_active(Driver(GPUTarget(*TARGETS[request.param])))
    with kernels_on("cpu"):
        yield found


def compile_all(specs: Iterable[str], count: int, numel: int) -> None:
    """Encode and decode some rows with each compressor, and add up two rows."""
    values = torch.zeros(2, numel, dtype=torch.bfloat16)
    for spec in specs:
        compressor, counter = parse(spec), torch.zeros((), dtype=torch.int64)
        rows, contexts = list(values[:count]), [CompressorContext(key=1)] * count
        wires = compressor.encode_rows(rows, contexts, counter)
        assert compressor.decode_rows(list(wires), rows, contexts)
    kernels.sum_rows(values[0], flat_rows([values[1]]), 1, torch.float32)
    residuals = torch.zeros(2, numel)
    sums = kernels.add_residuals(flat_rows(values), flat_rows(residuals), 0.5, None)
    kernels.store_residuals(sums, values, flat_rows(residuals))
    for n, k in ((1000, 501), (70_000, 3), (2, 1)) if numel > 1 else ():
        code = index_code(n, k)
        code._read_kernel(code._encode_kernel(torch.zeros(k, dtype=torch.int64)))


def compile_lattices(rows: int, columns: int) -> None:
    """Quantize a weight and its moments, with and without what they may have beside them."""
    sides = torch.zeros(rows, dtype=torch.int16), torch.zeros(columns, dtype=torch.int16)
    powers, linear = Lattice("log", *sides, step=40), Lattice("linear", *sides, seed=7)
    m = torch.zeros(rows, columns)
    v, codes = m.bfloat16(), m.to(torch.int8)
    kernels.sum_values(m)
    kernels.sum_moments(v, m, (1, rows * columns), False, False)
    for first, parent in ((m, (codes, powers)), (None, None)):
        kernels.sum_moments(v, first, (rows, columns), first is None, True)
        kernels.quantize_powers(v, first, powers, (0.5, 0.5, 0.8), parent)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kernels.decode_points(codes, linear, dtype, codes, 0.25)
    relative = Lattice("relative", sides[0], sides[1][:1], seed=7)
    kernels.quantize_points(m, relative, torch.int8, (codes, powers, True))
    kernels.quantize_points(m, linear, torch.int16, None, (codes, 0.6), (m, v, codes, 0.25))
    kernels.quantize_points(v, Lattice("linear", *sides), torch.int8, None, None, (None, None, None, 0.0))


def check_rounding(programs: Programs) -> None:
    """Assert that nothing is fused, flushed or approximated."""
    for name, text in programs:
        divisions = len(re.findall(r"v_div_fmas_f", text))  # AMD's division, rounded once, has at most seven of them
        assert len(re.findall(r"\bfma\.|v_fma_f|v_fmac_f|v_pk_fma|v_mad_f", text)) <= 7 * divisions, name
        assert ".ftz" not in text.replace("div.rn.ftz", "") and "div.full" not in text and ".approx" not in text, name


@pytest.mark.parametrize("programs", ["sm_90"], indirect=True)
def test_kernels_are_compiled_and_round_after_each_operation(programs: Programs) -> None:
    compile_all(["q4:64", "n1:64"], 2, 5000)
    compile_lattices(33, 40)
    names = {name for name, _ in programs}
    assert names >= {"_encode_groups", "_encode_normal", "_decode", "_sum_rows", "_quantize_points", "_quantize_powers"}
    check_rounding(programs)


@pytest.mark.nightly
@pytest.mark.parametrize("programs", TARGETS, indirect=True)
@pytest.mark.parametrize(("count", "numel"), [(2, 5000), (1, 5000), (2, 1)])
def test_every_kernel_is_compiled_and_rounds_after_each_operation(programs: Programs, count: int, numel: int) -> None:
    """An argument of 1 becomes a constant; one seed is an argument, and two are a tensor."""
    compile_all(EVERY, count, numel)
    compile_lattices(*((1, 1) if numel == 1 else (300, 4100)))
    wanted = {name for module in MODULES for name, value in vars(module).items() if is_kernel(name, value)}
    assert wanted - {name for name, _ in programs} <= (LARGE if numel == 1 else set())
    check_rounding(programs)
