"""Saving beside the loop: what is saved is the state of the call, and no error is lost or told twice."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.faulty_storage import FaultyStorage
from helpers.timeouts import PATIENCE

from shrinkpoint.errors import StorageError
from shrinkpoint.storage import LocalStorage, MemoryStorage, Sink
from shrinkpoint.train import CheckpointManager


class Gate(MemoryStorage):
    """A storage that lets nobody write while it is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    @contextmanager
    def create(self, key: str) -> Iterator[Sink]:
        assert self.opened.wait(PATIENCE)
        with super().create(key) as sink:
            yield sink


def big(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), value), "wide": torch.full((3,), value).expand(4, 3)}


def test_what_is_saved_is_the_state_of_the_call() -> None:
    gate = Gate()
    manager = CheckpointManager(gate, background=True)
    model = torch.nn.Linear(8, 8)
    numbers, history = big(1.0), [1]
    weight = model.weight.detach().clone()
    manager.save(1, model=model, extra={"numbers": numbers, "history": history})
    with torch.no_grad():  # the writer has not begun
        model.weight.zero_()
        numbers["weight"].zero_()
        history.append(2)
    gate.opened.set()
    manager.wait()
    at = manager.restore(model=model)
    assert at is not None
    assert torch.equal(model.weight, weight)
    assert at.extra["history"] == [1]
    assert at.extra["numbers"]["weight"].sum() == 1000
    manager.close()


def test_the_next_save_waits_for_the_one_before() -> None:
    gate = Gate()
    manager = CheckpointManager(gate, background=True)
    manager.save(1, extra=big(1.0))
    second = threading.Thread(target=lambda: manager.save(2, extra=big(2.0)))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    gate.opened.set()
    second.join(PATIENCE)
    report = manager.wait()
    assert report is not None and "000000002" in report.path
    assert manager.store.steps() == [1, 2]
    manager.close()


def test_reused_memory_never_spoils_a_delta() -> None:
    manager = CheckpointManager(MemoryStorage(), background=True, keyframe_every=4)
    for step in range(10):
        manager.save(step, extra=big(float(step)))
    manager.wait()
    for step in range(10):
        at = manager.restore(step)
        assert at is not None and at.extra["weight"].unique().tolist() == [step]
    manager.save(10, extra=big(10.0))
    manager.close()
    assert manager.restore().extra["wide"].tolist() == [[10.0] * 3] * 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults of one thread are counted on Linux")
def test_the_second_save_waits_for_no_new_memory() -> None:
    """The first one's copy is the reference of the second: its own was taken and touched beside the loop."""
    tensors = {f"part {index}": torch.full((225_000,), 1.0 + index) for index in range(4)}
    with CheckpointManager(MemoryStorage(), background=True) as manager:
        manager.save(0, extra=tensors)
        manager.wait()
        before = _page_faults()
        manager.save(1, extra=tensors)
        assert _page_faults() - before < sum(tensor.nbytes for tensor in tensors.values()) / 4096 / 2


def _page_faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize("tell", ["save", "wait", "close"])
def test_an_error_surfaces_once_at_the_next_call(tmp_path: Path, tell: str) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path), dead=True)
    manager = CheckpointManager(storage, background=True)
    manager.save(1, extra=big(1.0))
    manager.wait()
    storage.fail_at = storage.calls + 1
    manager.save(2, extra=big(2.0))
    manager.join()
    storage.fail_at = 0
    with pytest.raises(StorageError):
        manager.save(3, extra=big(3.0)) if tell == "save" else getattr(manager, tell)()
    assert manager.store.steps() == [1]
    manager.save(4, extra=big(4.0))
    manager.wait()
    manager.close()
    assert manager.store.steps() == [1, 4]
    assert manager.restore().extra["weight"].sum() == 4000


def test_every_background_failure_is_raised_and_none_persists(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(tmp_path))
    with CheckpointManager(storage, background=True) as manager:
        for step in range(0, 40, 2):
            manager.save(step, extra=big(float(step)))
            manager.wait()
            storage.fail_at = storage.calls + 1 + step // 2
            manager.save(step + 1, extra=big(step + 1.0))
            try:
                manager.wait()
            except StorageError:
                pass
            else:
                assert step + 1 in manager.store.steps()
            storage.fail_at = 0
        steps = manager.store.steps()
    assert set(range(0, 40, 2)) <= set(steps)
    for step in steps:
        at = CheckpointManager(tmp_path).restore(step)
        assert at is not None and at.extra["weight"].unique().tolist() == [step]


def test_a_store_that_is_gone_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    where = tmp_path / "store"
    manager = CheckpointManager(where, background=True)
    manager.save(1, extra=big(1.0))
    manager.wait()
    for path in sorted(where.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    where.rmdir()
    where.write_text("in the way")
    manager.save(2, extra=big(2.0))
    with pytest.raises(StorageError):
        manager.wait()
    where.unlink()
    manager.save(3, extra=big(3.0))
    manager.close()
    assert CheckpointManager(where).restore().extra["weight"].sum() == 3000


def test_a_report_is_there_before_the_checkpoint_and_waits_when_asked() -> None:
    gate = Gate()
    with CheckpointManager(gate, background=True) as manager:
        report = manager.save(1, extra=big(1.0))
        assert report is not None and not report.done() and "saving step 1" in repr(report)
        threading.Timer(0.1, gate.opened.set).start()
        assert report.ratio > 1 and report.done() and report.metrics("save/")["save/step"] == 1
        assert str(report) == str(manager.wait()) and repr(report) == repr(manager.last_report)
        second = manager.save(2, extra=big(2.0))
        assert second.step == 2 and report.step == 1
        with pytest.raises(AttributeError):
            _ = report.nothing


def test_a_report_of_a_save_that_failed_says_where_the_reason_is(tmp_path: Path) -> None:
    faulty = FaultyStorage(LocalStorage(tmp_path))
    manager = CheckpointManager(faulty, background=True)
    manager.save(0, extra=big(0.0))
    manager.wait()
    faulty.fail_at, faulty.dead = faulty.calls + 1, True
    report = manager.save(1, extra=big(1.0))
    with pytest.raises(StorageError, match="Call wait"):
        _ = report.ratio
    faulty.dead = False
    with pytest.raises(StorageError, match="Input/output error"):
        manager.wait()
    manager.close()
