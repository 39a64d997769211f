"""Every command that takes a store or a file takes a URL of one."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from helpers.stores import flip, state
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app

_numbers = itertools.count()


@pytest.fixture
def url(s3) -> str:
    url = f"s3://checkpoints/cli-{os.getpid()}-{next(_numbers)}"
    with sp.Store(url) as store:
        for step in (1, 2, 3):
            store.save(step, state(step), metrics={"val_loss": 1 / step})
    return url


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, (result.stdout, result.stderr)
    return json.loads(result.stdout) if code in (0, 1) else result.stderr


def test_reading_commands(url, tmp_path):
    assert [row["step"] for row in run("list", url)["checkpoints"]] == [1, 2, 3]
    assert run("show", url)["step"] == 3
    assert run("show", f"{url}@2")["step"] == run("show", url, "--step", 2)["step"] == 2
    assert run("verify", url, "--deep")["checked"] == 3
    assert run("diff", f"{url}@1", f"{url}@1")["equal"]
    assert not run("diff", f"{url}@1", url, code=1)["equal"]
    run("export", url, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").is_file()
    run("report", url, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000
    payload = f"{url}/step-000000002/rank-00000.safetensors"
    assert run("show", payload)["scheme"] == "lossless"
    assert run("verify", payload)["checked"] == 1
    assert run("diff", payload, f"{url}@2")["equal"]
    result = CliRunner().invoke(app, ["list", url])
    assert result.stdout.startswith(f"{url}: 3 checkpoints")


def test_writing_commands(url):
    assert run("forget", url, 2)["forgotten"] == [2]
    assert [row["step"] for row in run("compact", url)["rewritten"]] == [3]
    assert run("compact", url, "--step", 3)["applied"]
    assert run("prune", url, "--apply")["delete"] == [2]
    assert run("prune", url, "--keep-last", 1, "--apply")["delete"] == [1]
    store = sp.Store(url)
    assert [*store.steps()] == [3]
    assert store.load()["seed"] == 3
    store.lock()
    assert "is saving here already" in run("forget", url, 3, code=5)
    store.close()


def test_what_is_wrong_is_said(url):
    store = sp.Store(url)
    flip(store.storage, "step-000000003/rank-00000.safetensors")
    assert run("verify", url, code=1)["findings"][0]["step"] == 3
    for command in (("show", f"{url}9"), ("verify", f"{url}9"), ("prune", f"{url}9"), ("diff", f"{url}@1", f"{url}9")):
        assert f"{url}9" in run(*command, code=3)
    assert "one of 1, 2, 3" in run("show", f"{url}@7", code=3)
    assert "s3://bucket/path" in run("show", "s3://key:SECRET@bucket/a", code=2)
    for command in (("export", url, "s3://checkpoints/out.pt"), ("convert", url, "out"), ("bench", url)):
        assert "file system of this machine" in run(*command, code=2)
