"""What a package index reads of a release, and what the source distribution carries. Nothing is compiled here."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import shrinkpoint

ROOT = Path(__file__).parents[2]
tomllib = pytest.importorskip("tomllib")  # since Python 3.11
backend = pytest.importorskip("scikit_build_core.build")


@pytest.fixture(scope="module", autouse=True)
def in_the_root() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """As in the METADATA of a wheel."""
    where = tmp_path_factory.mktemp("metadata")
    return Parser().parsestr((where / backend.prepare_metadata_for_build_wheel(str(where)) / "METADATA").read_text())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("sdist")
    return where / backend.build_sdist(str(where))


def test_every_place_names_the_same_version(metadata: Message) -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"(?m)^version: (.+)$", citation) == [shrinkpoint.__version__]
    assert re.findall(r"(?m)^## ([\d.]+)", changelog)[0] == shrinkpoint.__version__
    assert metadata["Version"] == shrinkpoint.__version__
    assert tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]["version"] == shrinkpoint.__version__


def test_the_metadata_says_who_what_and_for_which_pythons(metadata: Message) -> None:
    assert metadata["Author"] == "The shrinkpoint developers"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not metadata.get_all("Project-URL") and not metadata["Home-page"]
    extras = {"accelerate", "cli", "cloud", "lightning", "torchtitan", "transformers"}
    assert extras <= {*metadata.get_all("Provides-Extra", [])}
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.match(r"\w+", line)[0] for line in needed} == {"torch", "numpy", "safetensors"}  # type: ignore[index]


def test_the_licenses_of_all_that_is_compiled_in_come_along(metadata: Message) -> None:
    texts = {"LICENSE": "Apache License", "LICENSE.xxhash": "xxHash", "LICENSE.nanobind": "Wenzel Jakob"}
    texts["LICENSE.robin_map"] = "MIT License"
    files = {Path(name).name: ROOT / name for name in metadata.get_all("License-File", [])}
    assert files.keys() == texts.keys()
    assert all(text in files[name].read_text() for name, text in texts.items())


def test_classifiers_are_of_the_index_s_list(metadata: Message) -> None:
    trove = pytest.importorskip("trove_classifiers")
    assert {*metadata.get_all("Classifier", [])} <= trove.classifiers


def test_the_source_distribution_has_what_git_tracks_and_nothing_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"native/entropy/rans.cpp", "src/shrinkpoint/py.typed", "tests/golden/make.py", "CITATION.cff", "PKG-INFO"}
    assert wanted <= names
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return
    tracked = git_files("--cached")
    assert names - tracked - git_files("--others", "--exclude-standard") == {"PKG-INFO"}
    assert {name for name in tracked - names if not name.startswith(".")} == set()


def git_files(*options: str) -> set[str]:
    """Files that exist and that `git ls-files` lists."""
    listed = subprocess.run(["git", "ls-files", *options], check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
