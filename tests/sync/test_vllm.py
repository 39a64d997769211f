"""Promise: a vLLM server that follows a trainer answers bit for bit as one that has loaded the weights afresh."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv" / "rollouts" / "bin" / "python"  # `make .venv/.rollouts`
PROGRAM = ROOT / "tests" / "helpers" / "vllm_program.py"
WORKERS = ROOT / "tests" / "helpers" / "vllm_workers_program.py"
KINDS = ("base", "tied", "int8", "unstaged", "whole")

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed")]


def run(*arguments, cwd):
    ran = subprocess.run([PYTHON, *arguments], cwd=cwd, timeout=1500, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    run(PROGRAM, folder, cwd=folder)
    return folder


def test_server_over_http_answers_as_an_engine_that_loaded_the_last_weights(tmp_path):
    """The example: a real server, a trainer that publishes after each step, one call for each version."""
    printed = run(ROOT / "examples" / "vllm_follow.py", cwd=tmp_path).splitlines()
    served = json.loads(next(line for line in printed if line.startswith("{")))
    said = run(PROGRAM, tmp_path / "runs" / "vllm_follow" / "last", "say", cwd=tmp_path).splitlines()[-1]
    tokens, rows = json.loads(said)
    assert served["token_ids"] == tokens
    logarithms = [dict(map(tuple, row))[token] for token, row in zip(tokens, rows, strict=True)]
    assert served["logprobs"]["token_logprobs"] == logarithms
    assert sum("step" in line and "delta of" in line for line in printed) >= 2


def test_workers_write_one_version_and_all_raise_where_one_cannot_read(tmp_path):
    assert run(WORKERS, tmp_path, cwd=tmp_path).splitlines() == ["1 StorageError", "1 NotFoundError"]


def answers(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_engine_answers_as_one_that_loaded_the_same_weights(folder, kind):
    """Fused, tied and 8-bit layers; layers that the model's own loader quantizes; and a model that is loaded whole."""
    followed = answers(folder, f"{kind}-followed")
    assert followed["said"][-1] == answers(folder, f"{kind}-reloaded")
    assert len({json.dumps(said) for said in followed["said"]}) == 4  # each update has changed the answers
    assert followed["version"] == "3"


@pytest.mark.parametrize("kind", KINDS[:-1])  # what is loaded whole is verified, but not tried before
def test_refused_update_leaves_the_model_as_it_was(folder, kind):
    followed = answers(folder, f"{kind}-followed")
    errors, said = followed["refused"]
    assert said == followed["said"][-1]
    assert [error.partition(":")[0] for error in errors] == ["MismatchError", "CorruptError"]
