"""Where the laboratory is not installed, its schemes cannot be named, and everything that it has written is read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from helpers.fingerprint import fingerprint
from helpers.paths import REPOSITORY
from helpers.processes import run_forked
from helpers.small_training import Digits, Run

import shrinkpoint as sp

NOT_INSTALLED = """
import importlib.metadata, json, sys
import shrinkpoint as sp
sys.modules["shrinkpoint_lab"] = None  # an import of it fails
importlib.metadata.entry_points = lambda **_: []
"""
SCHEMES = [
    'qd(config={"least": 8, "most": 32})',
    'cnr(config={"bins": 16, "steps": 25, "range": 0.2})',
    'gobo(config={"bins": 16, "embedding_bins": 32})',
    "excp",
    'excp(paper=True, rule="released", paper_fp16=True)',
]


def read_without(paths: list[Path]) -> dict[str, dict[str, str]]:
    """The fingerprint of each file, as a process without the laboratory reads it."""
    program = f"""{NOT_INSTALLED}
from helpers.fingerprint import fingerprint
print(json.dumps({{path: fingerprint(sp.load(path)) for path in sys.argv[1:]}}))"""
    return json.loads(run_forked(program, *map(str, paths)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_chain_is_read(scheme, tmp_path):
    run, paths = Run(Digits, steps=20), [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, base in zip(paths, [None, *paths], strict=False):
        run.steps(5)
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sp.errors.UnmeasuredLossWarning)
            assert sp.save(state, path, base=base, scheme=scheme).scheme == scheme.partition("(")[0]
    assert read_without(paths) == {str(path): fingerprint(sp.load(path)) for path in paths}


def test_golden_files_are_read():
    for folder in (REPOSITORY / "tests" / "golden").glob("v*"):
        expected = json.loads((folder / "expected.json").read_text())["states"]
        read = read_without([folder / name for name in expected if "newest_dtypes" not in name])
        assert read == {str(folder / name): expected[name] for name in expected if "newest_dtypes" not in name}


def test_a_scheme_is_refused_with_where_it_is():
    program = f"""{NOT_INSTALLED}
from shrinkpoint.schemes import get_scheme
told = []
for scheme in ("qd", "excp(bits=3)", "zip"):
    try:
        get_scheme(scheme)
    except sp.errors.PolicyError as error:
        told.append(str(error))
print(json.dumps([told, [hasattr(room, "QD") for room in (sp, sp.schemes)]]))"""
    (qd, excp, other), has_names = json.loads(run_forked(program))
    assert "pip install ./lab" in qd and "pip install ./lab" in excp and "laboratory" not in other
    assert "'topn'" in qd and has_names == [False, False]
