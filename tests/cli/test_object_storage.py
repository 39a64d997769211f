"""Every command that takes a store or a file takes a URL of one."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import torch
from helpers.stores import flip, payloads, state
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
    payload = f"{url}/{payloads(sp.Store(url).storage, 2)[0]}"
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
    flip(store.storage, payloads(store.storage, 3)[0])
    assert run("verify", url, code=1)["findings"][0]["step"] == 3
    for command in (("show", f"{url}9"), ("verify", f"{url}9"), ("prune", f"{url}9"), ("diff", f"{url}@1", f"{url}9")):
        assert f"{url}9" in run(*command, code=3)
    assert "one of 1, 2, 3" in run("show", f"{url}@7", code=3)
    assert "s3://bucket/path" in run("show", "s3://key:SECRET@bucket/a", code=2)
    assert "file system of this machine" in run("report", url, "--out", "s3://checkpoints/page.html", code=2)


def test_converting_commands(url, tmp_path):
    base = f"{url}-others"
    for step in (10, 20):
        path = tmp_path / "run" / f"step-{step}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save({"model": {"w": torch.arange(1000.0) + step}, "step": step}, path)
    run("convert", tmp_path / "run", f"{base}/store")
    assert sp.Store(f"{base}/store").load(20)["state"]["step"] == 20
    result = run("convert", f"{base}/store", f"{base}/back")
    assert [row["out"] for row in result["written"]] == [f"{base}/back/step-{step}.pt" for step in (10, 20)]
    assert (result["from"], result["to"]) == (f"{base}/store", f"{base}/back")
    run("convert", f"{base}/back", tmp_path / "store", "--step", 20)
    assert sp.Store(tmp_path / "store").load()["state"]["step"] == 20
    run("convert", f"{base}/back/step-10.pt", f"{base}/one.safetensors")
    assert sp.load(f"{base}/one.safetensors")["state"]["step"] == 10
    assert run("convert", f"{base}/back", "--dry-run")["checkpoints"][0]["name"] == "step-10.pt"
    assert run("convert", url, f"{base}/stores/torch", "--to", "torch", "--step", 2)["written"][0]["step"] == 2
    assert run("export", url, f"{base}/out.pt")["out"] == f"{base}/out.pt"
    assert "--force" in run("export", url, f"{base}/out.pt", code=2)
    run("export", url, f"{base}/out.pt", "--force")
    assert "--force" in run("convert", f"{base}/store", f"{base}/back", code=2)
    assert "other things" in run("convert", tmp_path / "run", f"{base}/back", code=2)
    assert "outside" in run("convert", f"{base}/store", f"{base}/store/below", code=2)
    assert f"{base}/nothing" in run("convert", f"{base}/nothing", tmp_path / "out", code=3)


def test_directories_of_frameworks(url):
    from shrinkpoint.train import Checkpointer

    base = f"{url}-run"
    with Checkpointer() as checkpointer:
        for step in (9, 10):
            checkpointer.save(f"{base}/step-{step}", state(step), step=step)
    assert [row["folder"] for row in run("list", base)["checkpoints"]] == ["step-9", "step-10"]
    assert run("show", base)["step"] == 10
    assert run("show", f"{base}/step-9")["step"] == 9
    assert run("verify", base, "--deep")["checked"] == 2
    assert not run("diff", f"{base}/step-9", f"{base}/step-10", code=1)["equal"]
    assert sp.load(base)["seed"] == 10
    assert sp.load(base, step=9, only="seed") == {"seed": 9}
    storage = sp.Store(f"{base}/step-9").storage
    storage.delete(storage.list("rank-")[0])
    assert run("verify", base, code=1)["findings"]
