"""Where nothing measures the loss that is said: once in a run, in the report, in the manifest, by every scheme."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.parameters import each_value
from helpers.processes import run_forked
from helpers.sharded_states import Ranks, cut
from helpers.small_state import run as tiny_run
from helpers.small_training import Run, Silent

import shrinkpoint as sp
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import LossWarning, UnmeasuredLossWarning, warn_user
from shrinkpoint.schemes.calibration import MAX_INTERVAL_RATIO, Calibration
from shrinkpoint.schemes.evaluate import Reading
from shrinkpoint.schemes.planner import plan_shards
from shrinkpoint.sharding.global_tensors import ShardLayout
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.train import Checkpointer

CONFIG = {"bins": 16, "embedding_bins": 32, "prune": 0.1, "protect": 0.005}
UNMEASURED: dict[str, Callable[[], Any]] = {
    "by its text": lambda: "fisher(relative_error=.3)",
    "fisher by error": lambda: sp.Fisher(relative_error=0.3),
    "fisher by ratio": lambda: sp.Fisher(ratio=8),
    "fisher by nats": lambda: sp.Fisher(nats=0.01),
    "fisher by prediction": lambda: sp.Fisher(nats=0.01, terms=128),
    "fisher, moments dropped": lambda: sp.Fisher(relative_error=0.3, moments="drop"),
    "inshrinkerator": lambda: sp.Inshrinkerator(config=CONFIG),
    "qd": lambda: sp.QD(config={"least": 16, "most": 64}),
    "cnr": lambda: sp.CNR(config={"bins": 16, "steps": 50, "range": 0.3}),
    "gobo": lambda: sp.GOBO(config={"bins": 16, "embedding_bins": 32}),
    "lc-checkpoint": sp.LCCheckpoint,
    "scar": sp.SCAR,
    "topn": sp.TOPN,
    "excp": sp.ExCP,
}
MEASURED: dict[str, Callable[..., Any]] = {
    "fisher": lambda evaluate: sp.Fisher(budget="5%", evaluate=evaluate),
    "fisher by error": lambda evaluate: sp.Fisher(relative_error=0.3, evaluate=evaluate),
    "inshrinkerator": lambda evaluate: sp.Inshrinkerator(threshold="5%", evaluate=evaluate),
    "qd": lambda evaluate: sp.QD(threshold="5%", evaluate=evaluate),
}


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, UnmeasuredLossWarning)]


@pytest.mark.parametrize("name", UNMEASURED)
def test_that_nothing_measures_is_said_once_in_a_run_and_with_every_checkpoint(name):
    run, storage = Run(steps=20), MemoryStorage()
    with (
        sp.CheckpointManager(storage, scheme=UNMEASURED[name]()) as manager,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        reports = [manager.save(step, **run.steps(5).parts) for step in range(4)]
    (text,) = said(caught)
    assert text.startswith("the loss is not measured: ") and "evaluate=" in text
    lossy = [report for report in reports if report.loss_report is not None]
    assert len(lossy) >= 3
    for report in lossy:
        assert report.loss_increase is None and not report.is_measured and report.loss_report["measured"] is False
        assert "loss not measured" in str(report) and f"({report.ratio:.3g}x)" in str(report)
    manifests = [one for one in sp.Store(storage).list() if one.is_lossy]
    assert len(manifests) == len(lossy) and all(one.loss["measured"] is False for one in manifests)


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_measured_stands_in_the_report_and_nothing_is_said(name):
    run, storage = Run(steps=60), MemoryStorage()
    with sp.CheckpointManager(storage, scheme=MEASURED[name](run.evaluate)) as manager, warnings.catch_warnings():
        warnings.simplefilter("error", UnmeasuredLossWarning)
        for step in range(2):
            report = manager.save(step, **run.steps(5).parts)
            other = Run()
            sp.CheckpointManager(storage).restore(step, **other.parts)
            assert report.is_measured and report.loss_report["measured"] is True
            assert report.loss_increase == pytest.approx(run.loss(other.model) / run.loss() - 1, abs=1e-6)
            assert f"loss {100 * report.loss_increase:+.2g}%" in str(report)


@pytest.mark.parametrize("name", ["fisher", "inshrinkerator"])
def test_what_has_not_moved_since_a_restore_costs_the_loss_nothing(name):
    run, storage = Run(steps=60), MemoryStorage()
    with sp.CheckpointManager(storage, scheme=MEASURED[name](run.evaluate)) as manager, Silent():
        manager.save(1, **run.parts)
        manager.restore(**run.parts)
        report = manager.save(2, **run.parts)
    assert report.loss_increase == 0 and report.is_measured and "loss 0%" in str(report)


def test_of_a_lossless_checkpoint_there_is_nothing_to_measure():
    run = Run(steps=5)
    with sp.CheckpointManager(MemoryStorage()) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        report = manager.save(1, **run.parts)
    assert report.loss_increase == 0 and report.is_measured and str(report).endswith("nothing lost")


def test_the_warning_can_be_silenced_by_its_class_and_leaves_the_others():
    state = {"a.weight": torch.randn(64, 64)}
    state["b.weight"] = torch.full((64, 64), float("nan"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", UnmeasuredLossWarning)
        sp.Store(MemoryStorage()).save(1, state, scheme=sp.Fisher(relative_error=0.1))
    assert [one.category for one in caught] == [LossWarning]


def test_a_folder_of_a_framework_says_it_too(tmp_path):
    run, trail = Run(steps=5), Checkpointer(scheme="fisher(relative_error=.3)")
    with trail, pytest.warns(UnmeasuredLossWarning):
        trail.save(tmp_path / "a", {"model": run.model.state_dict()}, objects={"model": run.model})
    assert trail.load(tmp_path / "a").manifest.loss["measured"] is False


@pytest.mark.parametrize("name", ["fisher by error", "inshrinkerator", "excp"])
def test_of_several_ranks_one_says_it(name):
    flats = tiny_run()
    cuts = [cut(flat, 3) for flat in flats]

    def work(rank: int, gather: Any) -> Any:
        scheme, reference = UNMEASURED[name](), None
        for parts in cuts:
            mine = parts[rank]
            made = plan_shards(scheme, mine.flat, reference, ShardLayout(mine.places, gather))
            reference = Reference(made.quantize(mine.flat, reference).state.tensors, {})
        return made.quantize(mine.flat, None if name != "excp" else reference).loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = Ranks(3).all(work)
    assert len(said(caught)) == 1 and all(loss["measured"] is False for loss in losses)


def test_without_any_filter_a_user_reads_one_line():
    code = (
        "import sys, torch, shrinkpoint as sp; from shrinkpoint.storage import MemoryStorage\n"
        "sys.stderr = sys.stdout\n"
        "store, scheme = sp.Store(MemoryStorage()), sp.Fisher(relative_error=.3)\n"
        "for step in range(3): store.save(step, {'a.weight': torch.randn(64, 64)}, scheme=scheme)"
    )
    text = run_forked(code)
    assert text.count("UnmeasuredLossWarning") == 1 and "fisher(relative_error=0.3)" in text


# how far a measurement can be trusted


def correct(run: Run, count: int, examples: bool = True) -> Callable[[Any], torch.Tensor]:
    """Evaluates on so few images; a loss for each of them."""
    images, labels = run.data()

    def evaluate(model: Any) -> torch.Tensor:
        run.calls += 1
        found = torch.nn.functional.cross_entropy(
            model.eval()(images[1200 : 1200 + count]), labels[1200 : 1200 + count], reduction="none"
        )
        return found if examples else found.mean()

    return evaluate


@pytest.mark.parametrize("name", ["fisher", "inshrinkerator", "qd"])
def test_too_few_examples_for_what_is_allowed_are_said_with_the_interval_once_in_a_run(name):
    run, storage = Run(steps=60), MemoryStorage()
    schemes = {
        "fisher": lambda evaluate: sp.Fisher(budget="1%", evaluate=evaluate),
        "inshrinkerator": lambda evaluate: sp.Inshrinkerator(threshold="1%", evaluate=evaluate),
        "qd": lambda evaluate: sp.QD(threshold="1%", evaluate=evaluate),
    }
    manager = sp.CheckpointManager(storage, scheme=schemes[name](correct(run, 24)))
    with manager, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = [manager.save(step, **run.steps(3).parts) for step in range(3)]
    texts = [str(one.message) for one in caught if "95% confidence" in str(one.message)]
    wide = [one for one in reports if "interval" in one.loss_report]
    assert wide and all(one.loss_report["interval"][0] < one.loss_report["interval"][1] for one in wide)
    assert len(texts) == any(one.loss_increase > 0 for one in wide)  # of a fall nothing is said
    assert all("on 24 examples" in text and "exceed the allowed 1.00%" in text for text in texts)
    assert " to " in str(wide[0])


def test_a_wide_interval_names_its_unit_and_warns_only_where_the_loss_rises():
    units = Reading.of_batches([1.0, 2.0]).unit, Reading.from_answer(torch.ones(3)).unit
    assert units == ("batches", "examples")
    calibration = Calibration()
    assert calibration.interval_warning(-0.01, (-0.05, 0.05), 0.001) == ""
    assert "95% confidence" in calibration.interval_warning(0.001, (-0.05, 0.05), 0.001)


def test_enough_examples_for_what_is_allowed_are_no_reason_to_warn():
    run = Run(steps=60)
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(budget="50%", evaluate=correct(run, 500))) as manager:
        report = manager.save(1, **run.parts)
    low, high = (end / report.loss_report["quality"] for end in report.loss_report["interval"])
    assert low < report.loss_increase <= 0.5 and report.loss_increase < high <= MAX_INTERVAL_RATIO * 0.5


def test_one_number_says_nothing_of_the_interval_and_decides_the_same():
    found = []
    for examples in (True, False):
        run = Run(steps=60)
        scheme = sp.Inshrinkerator(threshold="5%", evaluate=correct(run, 200, examples))
        with sp.CheckpointManager(MemoryStorage(), scheme=scheme) as manager, Silent():
            found.append(manager.save(1, **run.parts).loss_report)
    assert "interval" in found[0] and "interval" not in found[1] and found[0]["chosen"] == found[1]["chosen"]


@pytest.mark.parametrize(
    ("save", "scheme"),
    each_value(["file", "store", "manager"], ["fisher by error", "fisher by ratio", "inshrinkerator", "gobo"]),
)
def test_the_warning_names_the_line_that_saved(scheme, save, tmp_path):
    run = {"model": {"weight": torch.randn(200, 200)}}
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        if save == "file":
            sp.save(run, tmp_path / "a.safetensors", scheme=UNMEASURED[scheme]())
        elif save == "store":
            sp.Store(tmp_path).save(1, run, scheme=UNMEASURED[scheme]())
        else:
            sp.CheckpointManager(tmp_path, scheme=UNMEASURED[scheme]()).save(1, extra=run)
    assert [warning.filename for warning in record if warning.category is UnmeasuredLossWarning] == [__file__]


def test_a_warning_of_one_line_is_shown_once():
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        for _ in range(3):
            warn_user("the same text")
        warn_user("another text")
    assert [str(warning.message) for warning in record] == ["the same text", "another text"]
