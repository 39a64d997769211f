"""A release, built as `make wheel` does, is installed into fresh environments and used there. Takes minutes."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
GOLDEN_STORE = ROOT / "tests" / "golden" / "v2" / "stores" / "0.1.0_store"
NUMPY_ONLY = ["checksum", "code_contexts", "cyclic_delta", "damage", "kmeans", "reference", "round_trip", "simd"]
"""Tests of the native core that need no torch: only for some Pythons has that a build without gigabytes of CUDA."""
TEST_PACKAGES = ["hypothesis", "pytest", "pytest-timeout", "xxhash"]

EM_AARCH64 = 183
"""The processor in the header of an ELF file."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="wheels of other systems are built by cibuildwheel"),
]


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command prints; the test fails with its last words if it fails."""
    done = subprocess.run([*map(str, command)], env=os.environ | (env or {}), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """release/build.py as a module."""
    pytest.importorskip("ziglang", reason="make wheel installs what builds a release")
    spec = importlib.util.spec_from_file_location("release_build", ROOT / "release" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A folder that is not in memory: environments with torch take a gigabyte each."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as where:
        yield Path(where)


@pytest.fixture(scope="module")
def stable_python(build: ModuleType) -> Path | None:
    """An interpreter whose wheel has the stable ABI, or None."""
    try:
        return build.find_pythons()[-1]
    except SystemExit:
        return None


@pytest.fixture(scope="module")
def dist(disk: Path, stable_python: Path | None) -> Path:
    """The source distribution, a wheel for this Python and one of the stable ABI if it can be built; none needs git."""
    git = disk / "no_git" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexit 1\n")
    git.chmod(0o755)
    pythons = {Path(sys._base_executable), *([stable_python] if stable_python else [])}  # type: ignore[attr-defined]
    asked = [word for python in sorted(pythons) for word in ("--python", str(python))]
    without_git = {"PATH": f"{git.parent}:{os.environ['PATH']}"}
    run(sys.executable, ROOT / "release" / "build.py", "--out", disk / "dist", *asked, env=without_git)
    return disk / "dist"


def environment(where: Path, python: Path | str, *packages: str | Path) -> Path:
    """The folder of the executables of a new virtual environment with these packages."""
    run(python, "-m", "venv", where)
    run(where / "bin" / "pip", "install", "--quiet", *packages)
    return where / "bin"


def wheels(dist: Path) -> list[Path]:
    return sorted(dist.glob("*.whl"))


def test_wheels_run_on_an_old_glibc(dist: Path) -> None:
    """auditwheel gave the tag by the symbols that the native core needs."""
    for wheel in wheels(dist):
        assert f"manylinux_2_17_{platform.machine()}" in wheel.name
        assert re.search(r"-cp31[01]-cp31[01]-|-cp312-abi3-", wheel.name), wheel.name


def test_a_wheel_has_the_package_and_neither_tests_nor_sources(dist: Path) -> None:
    for wheel in wheels(dist):
        names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
        modules = {f"shrinkpoint/{path.relative_to(ROOT / 'src' / 'shrinkpoint')}" for path in package_files()}
        extra = {name for name in names if not name.startswith("shrinkpoint-0")} - modules
        assert len(extra) == 1 and re.fullmatch(r"shrinkpoint/_native\.[\w-]+\.so", extra.pop())
        assert modules | {"shrinkpoint/py.typed", "shrinkpoint/_native.pyi"} <= {*names}


def package_files() -> list[Path]:
    paths = (ROOT / "src" / "shrinkpoint").rglob("*")
    return [path for path in paths if path.suffix != ".so" and "__pycache__" not in path.parts and path.is_file()]


def test_a_wheel_for_aarch64_is_built_on_this_machine(
    build: ModuleType, stable_python: Path | None, disk: Path
) -> None:
    """It cannot be imported here: its module is one for that processor, beside the files of the other wheels."""
    if stable_python is None or platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 machine with Python 3.12 or newer")
    out = disk / "aarch64"
    asked = ("--python", stable_python, "--machine", "aarch64")
    run(sys.executable, ROOT / "release" / "build.py", "--out", out, *asked)
    (wheel,) = wheels(out)
    check_aarch64(wheel)


def record_of(archive: zipfile.ZipFile) -> str:
    return next(archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/RECORD"))


def check_aarch64(wheel: Path) -> None:
    assert re.search(r"-cp312-abi3-.*manylinux_2_17_aarch64", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        module, listed = archive.read("shrinkpoint/_native.abi3.so"), record_of(archive)
        assert module[:4] == b"\x7fELF" and int.from_bytes(module[18:20], "little") == EM_AARCH64
        assert all(f"{name}," in listed for name in archive.namelist() if not name.endswith("/"))
        assert {"shrinkpoint/_native.pyi", "shrinkpoint/py.typed"} <= {*archive.namelist()}


def test_it_saves_loads_and_has_its_command_in_a_fresh_environment(dist: Path, disk: Path) -> None:
    """With torch and the extra `cli` only."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = [*dist.glob(f"*-{tag}-{tag}-*.whl"), *dist.glob("*-abi3-*.whl")][0]
    python = sys._base_executable  # type: ignore[attr-defined]
    bin = environment(disk / "fresh", python, f"torch=={torch.__version__.partition('+')[0]}")
    run(bin / "pip", "install", "--quiet", f"{wheel}[cli]")
    run(bin / "pip", "check")
    assert run(bin / "python", ROOT / "release" / "smoke_test.py", cwd=disk).endswith("fine\n")


def test_one_wheel_serves_every_python_from_3_12_on(build: ModuleType, dist: Path, disk: Path) -> None:
    """Coding, listing and verifying, which need no torch, in the newest Python that is here."""
    wheel = next(iter(dist.glob("*-cp312-abi3-*.whl")), None)
    if wheel is None:
        pytest.skip("there is no Python 3.12 or newer here")
    pythons = {build._version(path): path for path in build._candidates()}
    newest = max(version for version in pythons if version)
    bin = environment(disk / "stable", pythons[newest], "numpy", "safetensors", "typer", "rich", *TEST_PACKAGES)
    run(bin / "pip", "install", "--quiet", "--no-deps", wheel)
    assert "every byte is what was written" in run(bin / "shrinkpoint", "verify", GOLDEN_STORE)
    run(bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *native_tests(NUMPY_ONLY))


def native_tests(names: list[str]) -> list[Path]:
    return [ROOT / "tests" / "native" / f"test_{name}.py" for name in names]


def test_a_wheel_needs_no_newer_processor_than_its_architecture_says(dist: Path, disk: Path) -> None:
    """Nothing but functions that are chosen at run time may use AVX: an emulated processor of 2008 has none."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None or platform.machine() != "x86_64":
        pytest.skip("needs qemu-x86_64 (apt-get install qemu-user)")
    wheel = wheels(dist)[0]
    python = sys._base_executable  # type: ignore[attr-defined]
    bin = environment(disk / "old", python, "numpy", "safetensors", *TEST_PACKAGES)
    run(bin / "pip", "install", "--quiet", "--no-deps", wheel)
    old = [emulator, "-cpu", "Nehalem", bin / "python"]
    assert run(*old, "-c", "from shrinkpoint import _native; print(_native._use_simd(2))") == "0\n"
    run(
        *old,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *native_tests(["checksum", "code_contexts", "cyclic_delta"]),
    )


def test_cibuildwheel_reads_its_configuration(build: ModuleType) -> None:
    pytest.importorskip("cibuildwheel")
    for system, archs in (("linux", ("x86_64", "aarch64")), ("macos", ("arm64",))):
        command = ["-m", "cibuildwheel", "--print-build-identifiers", "--platform", system, "--archs", ",".join(archs)]
        tags = {"linux": "manylinux", "macos": "macosx"}
        expected = {f"{python}-{tags[system]}_{arch}" for python in ("cp310", "cp311", "cp312") for arch in archs}
        assert {*run(sys.executable, *command, ROOT).split()} == expected
