"""`bench` puts the user's own checkpoints through every scheme; `demo` replaces only a store of its own."""

from __future__ import annotations

import json
import os
import re
from functools import partial

import pytest
import torch
from helpers.command_line import invoke
from helpers.paths import REPOSITORY
from helpers.stores import payloads

import shrinkpoint as sp
from shrinkpoint.store import Store
from shrinkpoint_lab.cli import app

run = partial(invoke, app)


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(96, 64)
    with Store(tmp_path / "weights") as store:
        for step in (5, 10, 15):
            store.save(step, {"layer.weight": x})
            x = x + 0.01 * torch.randn(96, 64)
    return tmp_path / "weights"


@pytest.fixture
def quality(tmp_path, monkeypatch):
    """A module in the current directory."""
    text = (
        "def loss(state):\n    return 1 + float(state['layer.weight'].square().mean())\n\ndef bad(state):\n    1 / 0\n"
    )
    (tmp_path / "quality_of_bench.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return "quality_of_bench:loss"


def test_schemes_that_measure_nothing_run_without_a_quality(weights):
    done = run("bench", weights, columns=200)
    assert done.code == 0 and "no --evaluate" in done.stderr
    lines = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {"lossless", "lc-checkpoint(bits=3)", "scar", "topn", "excp"} <= set(lines) and "inshrinkerator" not in lines


def test_with_a_quality_the_others_do_too_and_the_rise_is_told(weights, quality, tmp_path):
    names = ("lossless", "inshrinkerator", "qd")
    wanted = [part for name in names for part in ("--scheme", name)]
    done = run("bench", weights, "--evaluate", quality, *wanted, "--json", "--out", tmp_path / "out" / "all")
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["checkpoints"] == 3 and [one["name"] for one in document["schemes"]] == list(names)
    rows = document["schemes"][1]["rows"]
    assert [row["step"] for row in rows] == [5, 10, 15] and all(row["rise"] <= 0.01 for row in rows)
    assert json.loads((tmp_path / "out" / "all.json").read_text()) == document


def test_a_quality_that_fails_is_named_for_each_scheme(weights, quality):
    done = run("bench", weights, "--evaluate", quality.replace("loss", "bad"), "--scheme", "qd", "--scheme", "scar")
    assert done.code == 1 and done.stderr.count("ZeroDivisionError") == 2


def test_mistakes_are_told(weights, tmp_path):
    assert run("bench", weights, "--scheme", "zip").code == 2
    assert run("bench", weights, "--scheme", "qd").code == 2
    assert run("bench", weights, "--evaluate", "nothing").code == 2
    assert run("bench", tmp_path / "gone").code == 3


def test_bench_takes_urls(s3, weights):
    url = f"s3://checkpoints/bench-{os.getpid()}"
    with sp.Store(url) as store:
        for step in (1, 2, 3):
            store.save(step, {"layer.weight": torch.full((9,), float(step))})
    payload = f"{url}/{payloads(store.storage, 1)[0]}"
    for places, count in (([url], 3), ([payload, payload], 2)):
        assert json.loads(run("bench", *places, "--scheme", "lossless", "--json").stdout)["checkpoints"] == count
    gone = run("bench", f"{url}9")
    assert gone.code == 3 and f"{url}9" in gone.stderr


def test_the_demo_refuses_a_directory_that_is_not_its_own(weights):
    before = sorted(weights.rglob("*"))
    done = run("demo", "--store", weights)
    assert (done.code, done.stdout) == (2, "")
    assert sorted(weights.rglob("*")) == before


def test_every_command_and_option_is_documented():
    text = (REPOSITORY / "docs" / "laboratory.md").read_text()
    for command in app.registered_commands:
        section = re.search(rf"^## {command.name}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        options = re.findall(r"--[a-z-]+", run(command.name, "--help", columns=200).stdout.partition("Options")[2])
        assert {*re.findall(r"^\| `(--[a-z-]+)", section[1], re.MULTILINE)} == {*options} - {"--help"}, command.name
