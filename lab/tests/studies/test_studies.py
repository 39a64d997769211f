"""Promise: each study has a whole and a quick run, and takes from the library what is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.paths import REPOSITORY

from lab.studies import __main__ as studies
from lab.studies.workloads import sentence, variants

PROGRAMS = [path for folder in ("lab/studies", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")]


def test_studies_have_the_options_of_their_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for study in studies.STUDIES:
        quick = study.command(quick=True, out=Path("results/quick"))
        assert quick[-1].startswith("results/quick/")
        assert not any("quick" in word for word in study.command(quick=False, out=Path("results/quick")))
        monkeypatch.setattr(sys, "argv", [study.module, "--help"])
        with pytest.raises(SystemExit):
            importlib.import_module(quick[2]).main()
        known = capsys.readouterr().out
        assert [word for word in quick if word.startswith("--") and word not in known] == [], study.module


def test_studies_fit_their_budgets() -> None:
    assert sum(study.minutes for study in studies.STUDIES) <= studies.WEEK
    assert sum(study.quick_minutes for study in studies.STUDIES) <= studies.QUICK


def test_runs_do_not_depend_on_who_pretrained_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    variants._reader.cache_clear()
    monkeypatch.setattr(sentence, "pretrain", lambda data, steps: (torch.rand(7), sentence.Reader())[1])
    monkeypatch.setattr(sentence, "stream", lambda *_: None)
    empty = torch.zeros(0, 4).long()
    texts = SimpleNamespace(dev_sentences=empty, dev_labels=empty, labels=empty)
    monkeypatch.setattr(sentence, "corpus", lambda data: texts)
    build = variants.fine_tuned(REPOSITORY, quick=True).build
    heads = [build(3).model.state_dict()["head.weight"] for _ in range(2)]
    variants._reader.cache_clear()
    assert torch.equal(*heads)


def test_imported_names_of_the_library_exist() -> None:
    missing = []
    for path in PROGRAMS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "shrinkpoint":
                module = importlib.import_module(str(node.module))
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name) and importlib.util.find_spec(f"{node.module}.{name}") is None:
                        missing.append(f"{path}: {node.module}.{name}")
    assert missing == []
