"""A search in the middle of training: it leaves no trace, is recorded, and goes on where it was."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from helpers.small_training import Digits, LettersRun, Run, Silent, unchanged
from helpers.strategies import difference, same
from torch import nn

import shrinkpoint as sp
from shrinkpoint.schemes.inshrinkerator.scheme import SPACE
from shrinkpoint.schemes.search.space import Axis, Space

CONFIG = {"bins": 16, "embedding_bins": 32, "prune": 0.1, "protect": 0.005}


def restored(where, make=Run, step=None) -> Run:
    run = make()
    with sp.CheckpointManager(where) as manager:
        assert manager.restore(step, **run.parts) is not None
    return run


@pytest.mark.parametrize(("make", "background"), [(Run, False), (LettersRun, True)])
def test_a_run_does_not_notice_that_it_was_saved(tmp_path, make, background):
    run, other = make(steps=40), make(steps=40)
    scheme = sp.Inshrinkerator(threshold=0.05, evaluate=run.evaluate)
    with sp.CheckpointManager(tmp_path, scheme=scheme, background=background) as manager:
        for step in (40, 60, 80):
            before, addresses = run.photo(), run.addresses()
            manager.save(step, **run.parts)
            assert unchanged(run, before) and run.addresses() == addresses
            for one in (run, other):  # both from the same random generators
                torch.manual_seed(step)
                one.steps(20)
    assert difference(run.model.state_dict(), other.model.state_dict()) is None
    assert difference(run.optimizer.state_dict(), other.optimizer.state_dict()) is None
    assert run.calls > 5


def test_what_is_saved_is_as_good_as_was_asked_for(tmp_path):
    run = Run(steps=60)
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(threshold=0.02, evaluate=run.evaluate)) as manager:
        for step in (1, 2, 3):
            plain = run.loss()
            report = manager.save(step, **run.parts)
            assert run.loss(restored(tmp_path).model) <= plain * 1.02 * (1 + 1e-6)
            assert report.weights_ratio > 4 and report.keyframe is (step == 1)
            run.steps(20)


def test_an_interrupted_search_leaves_no_trace_and_saves_nothing(tmp_path):
    run, calls = Run(steps=20), []

    def evaluate(model):
        calls.append(torch.rand(1))
        model.train()
        model.body[1].running_mean.add_(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run.evaluate(model)

    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(evaluate=evaluate)) as manager:
        before = run.photo()
        with pytest.raises(KeyboardInterrupt):
            manager.save(1, **run.parts)
        assert unchanged(run, before) and manager.store.steps() == []
        run.steps(3)
        assert manager.save(2, **run.parts).loss_report["chosen"]
    assert sp.Store(tmp_path).steps() == [2]


def methods(report) -> list[str]:
    return [trial["method"] for trial in report.loss_report["searches"]]


def test_after_a_restart_the_search_resumes_near_what_was_chosen(tmp_path):
    run = Run(steps=60)
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(threshold=0.05, evaluate=run.evaluate)) as manager:
        first = manager.save(1, **run.parts)
        assert methods(first) == ["branch and bound"]
        run.steps(10)
        assert methods(manager.save(2, **run.parts))[0] == "neighbourhood"
    again = Run()
    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(threshold=0.05, evaluate=again.evaluate)) as manager:
        at = manager.restore(**again.parts)
        assert at.report.scheme == "inshrinkerator" and at.report.lossy_restores == 1
        again.steps(10)
        report = manager.save(3, **again.parts)
        assert methods(report)[0] == "neighbourhood" and not report.keyframe
    near = [SPACE.point(manifest.loss["chosen"]) for manifest in sp.Store(tmp_path).list()]
    if methods(report) == ["neighbourhood"]:
        assert all(abs(i - j) <= 1 for i, j in zip(near[1].index, near[2].index, strict=True))


def test_gradients_make_sensitivity_a_metric(tmp_path):
    run = Run(steps=30)
    recorder = sp.train.GradientRecorder(run.model, save_interval=20, batches=10)
    scheme = sp.Inshrinkerator(threshold=0.05, evaluate=run.evaluate, gradients=recorder)
    with sp.CheckpointManager(tmp_path, scheme=scheme) as manager:
        metrics = []
        for step in (20, 40):
            if step == 40:
                run.steps(20, recorder)
                assert recorder.ready
            report = manager.save(step, **run.parts)
            trials = [
                one["settings"]["metric"] for search in report.loss_report["searches"] for one in search["trials"]
            ]
            metrics.append({*trials})
    assert metrics == [{"magnitude"}, {"magnitude", "sensitivity"}]


def test_gradients_of_a_wrapped_model_are_its_own(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    run = Run(steps=5)
    wrapped = Wrapper(run.model)
    recorder = sp.train.GradientRecorder(wrapped)
    run.steps(5, recorder)
    scheme = sp.Inshrinkerator(config=CONFIG | {"metric": "sensitivity"}, gradients=recorder)
    plain = sp.Inshrinkerator(config=CONFIG | {"metric": "magnitude"})
    files = []
    for name, one in (("a", scheme), ("b", plain)):
        with sp.CheckpointManager(tmp_path / name, scheme=one) as manager:
            manager.save(1, model=run.model)
        files.append(sp.Store(tmp_path / name).load()["model"])
    assert not same(files[0], files[1])


def test_a_better_metric_is_switched_to(tmp_path):
    """Where the gradients say what matters, and sizes nothing."""
    torch.manual_seed(0)
    model = nn.Linear(128, 64, bias=False)
    nn.init.uniform_(model.weight, 0.5, 1.0)
    matters = torch.rand(64, 128) < 0.4
    origin = model.weight.detach().clone()

    class Recorder:
        mean: ClassVar = {"weight": torch.where(matters, 1.0, 1e-6)}

    def evaluate(one):
        return 1 + float(((one.weight - origin).square() * matters).sum() / origin.square().sum())

    many = tuple(Axis(one.name, (32,) if one.name == "bins" else one.values) for one in SPACE.axes)
    space = Space(many, SPACE.variants)  # where there are few bins, pruning saves nothing
    scheme = sp.Inshrinkerator(threshold=0.2, evaluate=evaluate, space=space)
    with sp.CheckpointManager(tmp_path, scheme=scheme) as manager, Silent():
        chosen = manager.save(1, model=model).loss_report["chosen"]
        assert chosen["metric"] == "magnitude" and chosen["prune"] > 0  # without pruning, metrics do the same
        scheme._recorder = Recorder()
        report = manager.save(2, model=model)
    trials = report.loss_report["searches"][0]["trials"]
    assert [trial["settings"]["metric"] for trial in trials[:2]] == ["magnitude", "sensitivity"]
    assert trials[0]["degradation"] - trials[1]["degradation"] > 0.02
    assert report.loss_report["chosen"]["metric"] == "sensitivity"


def test_dropout_in_train_mode_is_no_noise_for_randomness_is_put_back(tmp_path):
    run = Run(steps=30)

    def careless(model):
        return float(run.evaluate(model.train()))

    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(threshold=0.1, evaluate=careless)) as manager:
        assert manager.save(1, **run.parts).loss_report["noise"] == 0


def test_models_of_one_run_are_evaluated_together(tmp_path):
    torch.manual_seed(0)
    models = {"a": Digits(), "b": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))}
    origin = {key: [x.detach().clone() for x in model.parameters()] for key, model in models.items()}

    @torch.no_grad()
    def evaluate(nest):
        parts = [
            float((x - y).square().sum() / y.square().sum())
            for key, model in nest.items()
            for x, y in zip(model.parameters(), origin[key], strict=True)
            if x.dim() == 2
        ]
        return 1 + max(parts)

    with sp.CheckpointManager(tmp_path, scheme=sp.Inshrinkerator(threshold=0.01, evaluate=evaluate)) as manager:
        report = manager.save(1, model=models)
        assert 0 < report.loss_report["degradation"] <= 0.01
        others = {"a": Digits(), "b": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))}
        manager.restore(model=others)
    assert evaluate(others) == pytest.approx(1 + report.loss_report["degradation"])
