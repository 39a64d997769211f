"""Promise: what the studies of the papers print follows from what they measured, and each study has a quick run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.paths import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def _options(script: str) -> set[str]:
    """The options that a script's parser has, from its source."""
    tree = ast.parse((BENCHMARKS / f"{script}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {str(one.value) for call in added for one in call.args if isinstance(one, ast.Constant)}


def test_every_study_has_the_options_of_its_whole_and_quick_run_and_the_budgets_hold(load: Load) -> None:
    studies = load("studies")
    for study in studies.STUDIES:
        used = {argument for argument in (*study.quick, "--out") if argument.startswith("--")}
        assert used <= _options(study.script), study.script
    assert sum(study.minutes for study in studies.STUDIES) <= studies.WEEK
    assert sum(study.quick_minutes for study in studies.STUDIES) <= studies.QUICK


def test_a_quick_run_writes_apart_from_the_whole_one(load: Load) -> None:
    studies = load("studies")
    for study in studies.STUDIES:
        source = (BENCHMARKS / f"{study.script}.py").read_text()
        quick = study.command(quick=True, out=REPOSITORY / "results" / "quick")
        assert any("results/quick" in word for word in quick)
        assert not any("quick" in word for word in study.command(quick=False, out=REPOSITORY))
        ledger, folder = "Ledger(args.out" in source or "Ledger(out" in source, 'metavar="FOLDER"' in source
        assert Path(quick[-1]).suffix == (".jsonl" if ledger else "" if folder else ".json"), study.script


def _record(workload: str, quality: float, *, higher: bool | None, **more: Any) -> dict[str, Any]:
    facts = {} if higher is None else {"higher_is_better": higher}
    settings = {"workload": workload, "system": "none", "seed": 0, "paper": False, "threshold": 0.0, "restores": 0}
    settings |= {"optimizer": "exact", "keyframe_every": 20, "quick": False}
    record = {"settings": settings | more.pop("settings", {}), "quality": quality, "facts": facts, "saves": []}
    return record | {"restores": [], **more}


def test_a_run_does_not_depend_on_whether_its_process_has_pre_trained_the_reader(load: Load) -> None:
    variants, sentence = load("workload_variants"), load("workload_sentence")
    variants._reader.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentence, "pretrain", lambda data, steps: (torch.rand(7), sentence.Reader())[1])
        patch.setattr(sentence, "stream", lambda *_: None)
        empty = torch.zeros(0, 4).long()
        texts = SimpleNamespace(dev_sentences=empty, dev_labels=empty, labels=empty)
        patch.setattr(sentence, "corpus", lambda data: texts)
        build = variants.fine_tuned(REPOSITORY, quick=True).build
        heads = [build(3).model.state_dict()["head.weight"] for _ in range(2)]
    variants._reader.cache_clear()
    assert torch.equal(*heads)


def test_a_lower_score_is_worse_and_a_lower_loss_is_better(load: Load) -> None:
    report = load("lossy_recovery_report")
    for record, worse in (
        (_record("resnet adamw", 0.0, higher=None), 0.1),
        (_record("new", 0.0, higher=True), 0.1),
        (_record("gpt", 0.0, higher=None), -0.1),
        (_record("new", 0.0, higher=False), -0.1),
    ):
        assert report.degradation(record, 9.0, 10.0) == pytest.approx(worse)


def test_scars_bound_has_the_constants_of_a_geometric_course(load: Load) -> None:
    bound = load("recomputation_bound").Bound
    steps = range(0, 100, 10)
    fitted = bound.fit(steps, [5 * 0.9**step for step in steps])
    assert (fitted.c, fitted.start) == (pytest.approx(0.9), pytest.approx(5))
    # a perturbation as large as what is left doubles the distance, which is what log(2) / log(1 / c) iterations halve
    assert fitted.iterations(20, 5 * 0.9**20) == pytest.approx(math.log(2) / math.log(1 / 0.9))
    assert bound.fit(steps, [1.1**step for step in steps]).iterations(20, 1.0) is None


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_takes_from_the_library_is_there(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    for one in imports:
        if str(one.module).partition(".")[0] == "shrinkpoint":
            module = importlib.import_module(str(one.module))
            missing = [name.name for name in one.names if not hasattr(module, name.name)]
            packages = {name for name in missing if importlib.util.find_spec(f"{one.module}.{name}")}
            assert not {*missing} - packages, f"{one.module}: {missing}"
