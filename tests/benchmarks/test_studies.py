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
from torch import nn

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


def test_code_lengths_are_those_of_a_best_prefix_code(load: Load) -> None:
    tables = load("code_tables")
    counts = torch.tensor([8, 4, 2, 0, 1, 1]).numpy()
    lengths = tables.huffman_bits(counts)
    assert lengths == {0: 1, 1: 2, 2: 3, 4: 4, 5: 4}
    assert tables.coded_bits(counts, lengths) == 8 + 8 + 6 + 8
    assert tables.huffman_bits(torch.tensor([0, 5]).numpy()) == {1: 1}


def test_a_choice_of_buckets_that_is_kept_loses_more_where_differences_shrink(load: Load) -> None:
    tracked = load("code_tables").Tracked(2)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(64, 64, generator=generator)
    for step in range(6):
        tracked.observe({"a": weights})
        weights = weights + 0.5**step * torch.randn(64, 64, generator=generator)
    figures = tracked.figures()
    assert figures["error with kept choices"] > 1
    assert 0 < figures["table, of a delta"] < 0.01 and figures["codes by a table 1 back"] >= 1


def test_parts_of_inshrinkerator_leave_the_model_as_it_was(load: Load) -> None:
    parts = load("inshrinkerator_parts")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    inputs, before = torch.randn(256, 64), [p.clone() for p in model.parameters()]
    with torch.no_grad():
        wanted = model(inputs)

    def loss(one: nn.Module) -> float:
        with torch.no_grad():
            return float((one(inputs) - wanted).square().mean()) + 1

    gradients = parts.Gradients({name: torch.randn(p.shape) for name, p in model.named_parameters()})
    stage = parts.Stage(model, gradients, loss)
    few, many = stage.quantized(bins=4), stage.quantized(bins=32)
    assert few["rise"] > many["rise"] > 0 and few["bits"] < many["bits"] and few["error"] > many["error"]
    for scope in parts.SCOPES:
        row = stage.pruned(scope, "magnitude", 0.3)
        assert row["pruned"] == pytest.approx(0.3, abs=0.02) and row["rise"] > 0
    same = parts.Stage(model, parts.Gradients({name: torch.ones_like(p) for name, p in model.named_parameters()}), loss)
    assert same.agreement() == {"spearman": 1, "chance": 1, "smallest 30 %": 1, "largest .5 %": 1}
    noise = stage.agreement()
    assert noise["spearman"] == pytest.approx(noise["chance"], abs=0.05)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_longer_chain_has_smaller_checkpoints_and_later_loads(load: Load, tmp_path: Any) -> None:
    depth = load("restore_depth")
    files = depth.write_chain(tmp_path, "fisher, .3", depth.TOY, 3, 2)
    times = depth.load_times({"fisher, .3": tmp_path}, (0, 1, 2), 1)["fisher, .3"]
    rows = depth.weigh(files, {0: 1.0, 2: 3.0})
    assert [row["chain"] for row in rows] == [1, 2]
    assert rows[1]["bytes"] == (files[0]["bytes"] + files[1]["bytes"]) / 2 < rows[0]["bytes"]
    assert (rows[1]["mean seconds"], rows[1]["last seconds"]) == (1.5, 2.0)
    assert set(times) == {0, 1, 2} and min(times.values()) > 0


def test_branch_and_bound_finds_the_smallest_point_that_holds(load: Load) -> None:
    trials = load("search_trials")
    lands = [trials.landscape(seed, "entropy", trials.METRICS) for seed in range(3)]
    found = trials.study(lands, 8)
    assert found["branch and bound"]["missed"] == found["exhaustive"]["missed"] == 0
    assert found["branch and bound"]["trials"] < found["exhaustive"]["trials"] == 216


def test_all_quantizers_whose_speed_is_compared_give_back_values(load: Load) -> None:
    speed = load("quantizer_speed")
    rows = speed.measure(speed.subjects(), speed.values(3000), 8, 1)
    assert all(0 < row["mse"] < 1e-3 for row in rows.values()), rows


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
