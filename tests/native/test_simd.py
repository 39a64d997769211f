"""Which instruction sets the native core uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from shrinkpoint import _native

AVX2 = {"avx2", "bmi1", "bmi2", "fma", "popcnt"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}


def flags() -> set[str]:
    """What Linux says that the processor can do."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(({*line.split(":")[1].split()} for line in lines if line.startswith("flags")), set())


@pytest.mark.skipif(not flags(), reason="no list of the processor's flags here")
def test_the_widest_instruction_set_of_the_machine_is_used() -> None:
    """With another compiler too: the runtime of one says that no processor has any."""
    expected = 2 if flags() >= AVX512 else 1 if flags() >= AVX2 else 0
    assert _native._use_simd(2) == expected
