"""`on_save`: every committed checkpoint is told of, with plain numbers; whoever is told cannot harm a save."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.errors import PolicyError
from shrinkpoint.store import SaveReport
from shrinkpoint.train import Checkpointer, TensorBoardHook


def model() -> torch.nn.Linear:
    return torch.nn.Linear(64, 64)


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_there_when_its_report_is(tmp_path: Path, background: bool) -> None:
    seen: list[tuple[int | None, list[int], bool]] = []

    def note(report: SaveReport) -> None:
        is_loop = threading.current_thread() is threading.main_thread()
        seen.append((report.step, list(sp.Store(tmp_path).steps()), is_loop))

    with sp.CheckpointManager(tmp_path, background=background, on_save=note) as manager:
        manager.save(1, model=model())
        manager.save(2, model=model())
    assert seen == [(1, [1], not background), (2, [1, 2], not background)]


def test_it_is_called_before_retention_deletes(tmp_path: Path) -> None:
    held: list[list[int]] = []
    keep = sp.Keep(last=1)
    with sp.CheckpointManager(
        tmp_path, keyframe_every=1, keep=keep, on_save=lambda report: held.append([*sp.Store(tmp_path).steps()])
    ) as manager:
        manager.save(1, model=model())
        manager.save(2, model=model())
    assert held == [[1], [1, 2]] and [*sp.Store(tmp_path).steps()] == [2]


@pytest.mark.parametrize("background", [False, True])
def test_an_exception_is_a_warning_and_costs_no_checkpoint(tmp_path: Path, background: bool) -> None:
    def fail(report: SaveReport) -> None:
        raise ConnectionError("the dashboard is gone")

    manager = sp.CheckpointManager(tmp_path, background=background, keep=sp.Keep(last=1), on_save=fail)
    with pytest.warns(UserWarning, match="on_save failed for .*ConnectionError: the dashboard is gone") as caught:
        manager.save(1, model=model())
        report = manager.wait()
    assert caught[0].filename == __file__ and report is not None and report.step == 1
    with pytest.warns(UserWarning, match="on_save failed"):
        manager.save(2, model=model())
        manager.close()
    assert [*sp.Store(tmp_path).steps()][-1] == 2


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"on_save.*a function of a SaveReport"):
        sp.CheckpointManager(tmp_path, on_save="wandb")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="add_scalar"):
        TensorBoardHook(print)  # type: ignore[arg-type]


def test_metrics_are_floats_and_agree_with_the_manifest(tmp_path: Path) -> None:
    reports: list[SaveReport] = []
    with sp.CheckpointManager(tmp_path, on_save=reports.append) as manager:
        for step in (1, 2):
            manager.save(step, model=model())
    for report, depth in zip(reports, (0, 1), strict=True):
        metrics, manifest = report.metrics(), sp.Store(tmp_path).manifest(report.step)
        assert all(type(value) is float for value in metrics.values())
        assert (metrics["bytes"], metrics["raw_bytes"]) == (manifest.stored_bytes, manifest.raw_bytes)
        assert metrics["ratio"] == pytest.approx(manifest.raw_bytes / manifest.stored_bytes)
        assert (metrics["depth"], metrics["keyframe"]) == (depth, float(depth == 0)) and metrics["rise"] == 0
        assert manifest.stats["stall"] == pytest.approx(metrics["stall_seconds"], abs=1e-6)
        assert metrics["step"] == report.step and "retention" not in metrics
        assert report.metrics("a/") == {f"a/{name}": value for name, value in metrics.items()}


def test_what_is_not_measured_has_no_key(tmp_path: Path) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    schemes = {
        "blind": sp.Fisher(relative_error=0.3),
        "seeing": sp.Fisher(budget="5%", evaluate=lambda model: 1 + (model(x) - x).square().mean()),
    }
    reports: dict[str, list[SaveReport]] = {name: [] for name in schemes}
    for name, scheme in schemes.items():
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        with sp.CheckpointManager(tmp_path / name, scheme=scheme, on_save=reports[name].append) as manager:
            for step in (1, 2):
                (net(x) - x).square().mean().backward()
                optimizer.step()
                manager.save(step, model=net, optimizer=optimizer)
    keys = {name: [{"rise", "retention"} & report.metrics().keys() for report in reports[name]] for name in schemes}
    assert keys == {"blind": [set(), {"retention"}], "seeing": [{"rise"}, {"rise", "retention"}]}
    assert -0.05 < reports["seeing"][0].metrics()["rise"] <= 0.05


def test_directories_report_too(tmp_path: Path) -> None:
    reports: list[SaveReport] = []
    with Checkpointer(on_save=reports.append) as checkpointer:
        for step in (5, 6):
            checkpointer.save(tmp_path / f"step-{step}", {"w": torch.ones(1000)}, step=step)
    assert [(report.step, report.depth, report.path) for report in reports] == [
        (5, 0, str(tmp_path / "step-5")),
        (6, 1, str(tmp_path / "step-6")),
    ]
    assert all(report.metrics()["stall_seconds"] > 0 for report in reports)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_report_what_their_manifest_says(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from shrinkpoint.train.dcp import Writer

    reports: list[SaveReport] = []
    for step in (5, 6):
        writer = Writer(tmp_path / f"step-{step}", step=step, on_save=reports.append)
        dcp.save({"w": torch.arange(1000.0) + step}, storage_writer=writer)
    first, second = (report.metrics() for report in reports)
    assert (first["step"], first["depth"], first["raw_bytes"]) == (5, 0, 4000)
    assert (second["step"], second["depth"], second["keyframe"]) == (6, 1, 0)
    assert second["seconds"] > 0


def test_tensorboard_gets_each_number_at_its_step(tmp_path: Path) -> None:
    written: list[tuple[str, float, int | None]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None) -> None:
            written.append((tag, scalar_value, global_step))

    with sp.CheckpointManager(tmp_path, on_save=TensorBoardHook(Writer(), "ckpt/")) as manager:
        report = manager.save(7, model=model())
    assert report is not None
    tags = {tag for tag, _, _ in written}
    assert {"ckpt/bytes", "ckpt/ratio", "ckpt/rise"} <= tags and "ckpt/step" not in tags
    assert {step for _, _, step in written} == {7}
    assert ("ckpt/bytes", float(report.stored_bytes), 7) in written


def test_a_save_and_a_load_are_a_line_each_and_decisions_are_for_debugging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shrinkpoint"), sp.CheckpointManager(tmp_path) as manager:
        manager.save(1, model=model())
        manager.restore(model=model())
    levels = [(record.levelname, record.getMessage().partition(" ")[0]) for record in caplog.records]
    assert levels == [("INFO", "saved"), ("INFO", "loaded")]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "shrinkpoint"):
        sp.save({"weight": torch.randn(64, 64)}, tmp_path / "a.safetensors", scheme="fisher(relative_error=.3)")
    assert any("fisher decides" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("background", [False, True])
def test_a_hook_may_ask_its_manager_for_what_is_saved(tmp_path: Path, background: bool) -> None:
    source, seen = model(), []

    def look(report: SaveReport) -> None:
        manager.wait()
        manager.flush()
        copy = model()
        manager.restore(report.step, model=copy, rng=False)
        seen.append(torch.equal(copy.weight, source.weight))

    with sp.CheckpointManager(tmp_path, background=background, on_save=look) as manager:
        manager.save(1, model=source)
        manager.save(2, model=source)
    assert seen == [True, True]


@pytest.mark.parametrize("call", ["save", "close"])
def test_a_hook_in_the_background_that_would_wait_for_itself_is_told(tmp_path: Path, call: str) -> None:
    def again(report: SaveReport) -> None:
        manager.save(2, model=model()) if call == "save" else manager.close()

    manager = sp.CheckpointManager(tmp_path, background=True, on_save=again)
    with pytest.warns(UserWarning, match=f"PolicyError: {call}: a call in the background, from on_save"):
        manager.save(1, model=model())
        manager.wait()
    manager.close()
    assert [*sp.Store(tmp_path).steps()] == [1]
