"""What is there after `import shrinkpoint`, and what is said where an extra is not installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import run_forked

import shrinkpoint as sp
from shrinkpoint.errors import EXTRAS, MissingExtraError, ShrinkpointError

ROOT = Path(__file__).resolve().parents[1]


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)


def answer_forked(code: str) -> Any:
    """From a process where torch and the package are imported, and no framework."""
    code = f"import json, warnings\nwarnings.simplefilter('ignore')\n{code}"
    return json.loads(run_forked(code))


def test_a_framework_is_an_attribute_too():
    """As the others are: without their extras, the error tells so for each."""
    pytest.importorskip("accelerate")
    assert "save_state" in answer_forked("import shrinkpoint\nprint(json.dumps([*vars(shrinkpoint.train.accelerate)]))")


def test_rooms_are_listed_without_heavy_imports_and_are_attributes_after_a_plain_import():
    """In one process, in this order."""
    code = """
import sys, shrinkpoint
found = [shrinkpoint.schemes.SearchScheme, shrinkpoint.comm.recommend, shrinkpoint.comm.compress_pipeline,
         shrinkpoint.train.CheckpointManager, shrinkpoint.train.dcp.Writer]
print(json.dumps([one.__name__ for one in found]))"""
    before = """
import sys, shrinkpoint
listed = dir(shrinkpoint), dir(shrinkpoint.comm)
print(json.dumps([*listed, [name for name in ("torch", "numpy", "transformers") if name in sys.modules]]))
listed, frameworks = dir(shrinkpoint.train), ("transformers", "lightning", "accelerate", "torchft", "torchtitan")
print(json.dumps([listed, [name for name in frameworks if name in sys.modules]]))"""
    done = child(f"import json\n{before}{code}")
    assert done.returncode == 0, done.stderr
    (face, comm, heavy), (train, frameworks), names = map(json.loads, done.stdout.splitlines())
    assert {"comm", "train", "schemes"} <= {*face} and "compress_ddp" in comm and heavy == []
    assert {"dcp", "transformers", "accelerate", "lightning", "torchft", "torchtitan", "CheckpointManager"} <= {*train}
    assert frameworks == []
    assert names == ["SearchScheme", "recommend", "compress_pipeline", "CheckpointManager", "Writer"]


def test_a_lossless_manager_loads_no_lossy_scheme():
    code = """
import json, sys, shrinkpoint
from shrinkpoint.storage import MemoryStorage
shrinkpoint.CheckpointManager(MemoryStorage()).close()
print(json.dumps([name for name in sys.modules if name.startswith("shrinkpoint.schemes.fisher")]))"""
    done = child(code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_what_is_no_room_is_no_attribute():
    with pytest.raises(AttributeError, match="nonsense"):
        sp.train.nonsense


def test_the_names_that_documents_use_after_a_plain_import_are_there():
    """Such as `shrinkpoint.train.dcp.load`."""
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    names = {
        name
        for text in texts
        for name in re.findall(r"(?<!from )(?<!import )\bshrinkpoint\.((?:comm|train|schemes)(?:\.\w+)*)", text)
    }
    assert "train.dcp.load" in names
    for name in sorted(names):
        if not any(extra in name for extra in ("transformers", "lightning", "accelerate", "torchft", "torchtitan")):
            found: Any = sp
            for part in name.split("."):
                found = getattr(found, part)


# an extra that is not installed


@pytest.mark.parametrize(
    ("room", "package"),
    [
        ("transformers", "transformers"),
        ("transformers", "accelerate"),
        ("accelerate", "accelerate"),
        ("lightning", "lightning"),
        ("torchft", "torchft"),
        ("torchtitan", "torchtitan"),
    ],
)
def test_without_its_extra_a_framework_says_what_to_install(room, package):
    ways = f"import shrinkpoint.train.{room}", f"from shrinkpoint.train import {room}", f"shrinkpoint.train.{room}"
    code = f"""
import sys, shrinkpoint
from shrinkpoint.errors import MissingExtraError
sys.modules[{package!r}] = None
told = []
for way in {ways}:
    try:
        exec(way)
    except ImportError as error:
        told.append([type(error) is MissingExtraError, str(error), error.name])
print(json.dumps(told))"""
    extra = "elastic" if room == "torchft" else room
    if package != room:
        pytest.importorskip(room)
    told = answer_forked(code)
    assert len(told) == len(ways)
    for typed, text, name in told:
        assert typed and f'pip install "shrinkpoint[{extra}]"' in text and name.partition(".")[0] == package


def test_another_missing_module_is_no_missing_extra():
    from shrinkpoint.errors import missing_extra

    error = ModuleNotFoundError("no tokenizers", name="tokenizers")
    assert missing_extra(error, "transformers") is error


def test_a_missing_extra_is_an_error_of_our_tree_and_an_import_error():
    assert issubclass(MissingExtraError, ShrinkpointError) and issubclass(MissingExtraError, ModuleNotFoundError)


def test_extras_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    for extra, packages in EXTRAS.items():
        (line,) = re.findall(rf"^{extra} = \[(.*)\]$", text, re.M)
        first = re.match(r"[a-z]+", packages[0])
        assert first is not None and f'"{first[0]}>=' in line


# the command line without its extra


@pytest.mark.parametrize("blocked", [("typer",), ("rich",), ("typer", "rich")])
def test_the_version_needs_no_extra(blocked):
    code = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\nsys.argv[1:] = ARGS\n"
    code += "from shrinkpoint.cli import main\nmain()"
    done = child(code.replace("ARGS", "['--version']"))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"shrinkpoint {sp.__version__}\n", "")
    for arguments in ("['verify', 'x']", "[]", "['--help']"):
        done = child(code.replace("ARGS", arguments))
        assert done.returncode == 2 and done.stdout == "" and 'pip install "shrinkpoint[cli]"' in done.stderr
        assert "Traceback" not in done.stderr
