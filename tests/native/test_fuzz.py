"""The native core under sanitizers; `make fuzz` runs longer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus")
FLAGS = ["-fsanitize=address,undefined", "-pthread"]


def missing(where: Path) -> str | None:
    """Why the sanitizers cannot be used here, or None."""
    for tool in ("make", "g++"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    source, program = where / "probe.cpp", where / "probe"
    source.write_text("int main() { return 0; }\n")
    for command in (["g++", *FLAGS, str(source), "-o", str(program)], [str(program)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return f"sanitizers do not work: {done.stderr.strip()[:200]}"
    return None


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fuzzer, built with sanitizers."""
    where = tmp_path_factory.mktemp("fuzz")
    reason = missing(where)
    if reason is not None:
        pytest.skip(reason)
    command = ["make", "-s", "-j2", str(where / "fuzz"), "CXX=g++", f"FUZZ={where}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return where / "fuzz"


@pytest.mark.nightly  # the fuzzer's build under sanitizers takes minutes
def test_no_stream_makes_the_native_core_leave_its_buffers(program: Path) -> None:
    done = subprocess.run([program, "10", "1"], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "seed 1:" in done.stdout


@pytest.mark.nightly  # zig compiles for some minutes
def test_the_native_core_is_built_for_aarch64_and_gives_the_same_there(tmp_path: Path) -> None:
    """With NEON, by zig; run where there is qemu-aarch64 (apt-get install qemu-user)."""
    zig = Path(pytest.importorskip("ziglang", reason="make wheel installs zig").__file__).with_name("zig")
    program = tmp_path / "fuzz"
    flags = "-std=gnu++17 -O1 -ffp-contract=off -Wall -Wextra -Wno-missing-field-initializers -Werror -pthread -Inative"
    compiler = f"{zig} c++ -target aarch64-linux-musl"
    command = ["make", "-s", "-j2", program, f"FUZZ={tmp_path}", f"CXX={compiler}", f"FUZZ_FLAGS={flags}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        return
    done = subprocess.run([emulator, program, "10", "1"], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "seed 1:" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["chunks", "codes", "lattice", "wire"])
def test_what_libfuzzer_found_is_read_again(program: Path, target: str) -> None:
    """Inputs that `make libfuzzer` found to reach different code, and those that once ended the program."""
    inputs = sorted((CORPUS / target).iterdir())
    done = subprocess.run([program, target, *inputs], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert f"{target}: {len(inputs)} inputs" in done.stdout and len(inputs) >= 30


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 40_000
