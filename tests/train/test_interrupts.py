"""An interrupt at any line, or a thread that the system refuses, costs one save at most: the next one works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers.processes import run_forked
from helpers.stores import state
from helpers.timeouts import PATIENCE

import shrinkpoint as sp
from shrinkpoint.errors import StorageError
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.background import BackgroundWorker

OURS = str(Path(sp.__file__).parent)
MAX_STACK = 1 << 46
"""Bytes of a stack for which no system has room: a thread that asks for it is refused."""


class StoreRun:
    """A run in a store."""

    def __init__(self, path, background):
        self.path = path / "store"
        self.manager = sp.CheckpointManager(self.path, background=background)

    def save(self, step):
        self.manager.save(step, extra=state(step))

    def wait(self):
        self.manager.wait()

    def close(self):
        self.manager.close()

    def loads(self, step):
        return sp.Store(self.path).load(step)["extra"]["seed"] == step

    def is_free(self):
        """True if another one may save here."""
        with sp.Store(self.path) as other:
            other.save(999, {})
        return not sp.Store(self.path).verify()


class DirectoryRun:
    """A run in directories."""

    def __init__(self, path, background):
        self.path, self.checkpointer = path / "run", Checkpointer(background=background)

    def save(self, step):
        self.checkpointer.save(self.path / f"step-{step}", state(step), step=step)

    def wait(self):
        self.checkpointer.wait()

    def close(self):
        self.checkpointer.close()

    def loads(self, step):
        return Checkpointer().load(self.path / f"step-{step}").state["seed"] == step

    def is_free(self):
        return True


RUNS = {"manager": StoreRun, "checkpointer": DirectoryRun}


@contextmanager
def refusing_threads():
    """The system refuses every thread that Python asks for."""
    before = threading.stack_size(MAX_STACK)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("kind", RUNS)
def test_refused_thread_is_one_error_of_ours_and_the_next_save_works(tmp_path, kind):
    run = RUNS[kind](tmp_path, background=True)
    for step in (1, 3, 5):
        with refusing_threads(), pytest.raises(StorageError, match="no thread"):
            run.save(step)
        run.wait()
        run.save(step + 1)
        run.wait()
        assert run.loads(step + 1)
    run.close()
    assert run.is_free()


def test_worker_continues_after_a_refused_thread_and_runs_nothing_twice():
    worker, ran = BackgroundWorker(), []
    with refusing_threads(), pytest.raises(StorageError, match="no thread"):
        worker.start("saving", lambda: ran.append("refused"))
    worker.join()
    worker.start("saving", lambda: ran.append("taken"))
    worker.wait()
    assert ran == ["taken"]


@contextmanager
def interrupted_at(line, seen):
    """A KeyboardInterrupt at the first pass over one line, as a signal would raise it between two lines.

    Args:
        line: (file, number); None: only note which lines there are.
        seen: notes the lines that the calling thread runs, in their order.
    """

    def local(frame, event, _):
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
            if here not in seen:
                seen[here] = None
                if here == line:
                    raise KeyboardInterrupt
        return local

    def call(frame, event, _):
        name = frame.f_code.co_filename
        return local if name.startswith(OURS) or name == contextmanager.__code__.co_filename else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)


def lines_of(run, step):
    """Every line that saving, and waiting for it, runs in the caller's thread."""
    seen = {}
    with interrupted_at(None, seen):
        run.save(step)
        run.wait()
    return list(seen)


@pytest.mark.parametrize("every", [40, pytest.param(5, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("kind", "background", "first"),
    [
        *(("manager", True, True), ("manager", False, False)),
        *(("checkpointer", True, False), ("checkpointer", False, True)),
    ],
)
def test_interrupt_at_any_line_of_a_save_leaves_all_of_it_working(tmp_path, kind, background, first, every):
    memory = Path("/dev/shm")  # some thousand saves are flushed to the disk here
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as path:
        code = f"""
            import sys, warnings
            warnings.simplefilter("ignore")
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import test_interrupts
            test_interrupts.sweep({path!r}, {kind!r}, {background}, {first}, {every})
        """  # tracing and interrupts confuse who watches over tests
        faults, hits, lines = json.loads(run_forked(code, timeout=PATIENCE if every > 5 else 2 * PATIENCE))
    assert faults == []
    assert hits >= 0.9 * lines > 9 / every  # a line that runs once a process is not reached again


def sweep(path, kind, background, first, every):
    """Interrupt a save at every so many lines; prints (line and error of what did not go on, interrupts, lines)."""
    quick = Path(path)
    run = RUNS[kind](quick / "lines", background)
    if not first:
        run.save(1)
        run.wait()
    lines = lines_of(run, 1 if first else 2)
    run.close()
    lines = lines[len(lines) % every :: every]
    faults, hits = [], 0
    for number, line in enumerate(lines):
        run = RUNS[kind](quick / f"{number}", background)
        step = 1
        if not first:
            run.save(step)
            run.wait()
            step += 1
        try:
            with interrupted_at(line, {}):
                run.save(step)
                run.wait()
        except KeyboardInterrupt:
            hits += 1
            try:
                go_on(run, step)
            except Exception as error:
                faults.append((line, f"{type(error).__name__}: {error}"))
        with suppress(Exception):
            run.close()
    print(json.dumps([faults, hits, len(lines)]))


def go_on(run, step):
    """What must work after an interrupt: wait, save, load, the same step again, close, and another one's save."""
    run.wait()
    run.save(step + 1)
    run.wait()
    assert run.loads(step + 1)
    run.close()
    run.save(step)
    run.close()
    assert run.loads(step)
    assert run.is_free()


def test_interrupt_while_a_thread_is_started_runs_the_job_once_or_never():
    for interrupted in range(200):
        worker, ran, seen = BackgroundWorker(), [], {}
        began = threading.Event()

        def job(ran=ran, began=began):
            began.set()
            ran.append(1)

        lines = getattr(test_interrupt_while_a_thread_is_started_runs_the_job_once_or_never, "lines", None)
        if lines is not None and interrupted >= len(lines):
            break
        target = None if lines is None else lines[interrupted]
        with suppress(KeyboardInterrupt), interrupted_at(target, seen):
            worker.start("saving", job)
        if lines is None:
            test_interrupt_while_a_thread_is_started_runs_the_job_once_or_never.lines = list(seen)
        worker.wait()
        before = list(ran)
        worker.start("saving", lambda ran=ran: ran.append(2))
        worker.wait()
        assert ran in ([*before, 2], [2]), target
        assert len(before) <= 1


LIMITED = """
    import os, resource, sys, torch
    import shrinkpoint as sp
    from shrinkpoint.errors import StorageError
    from shrinkpoint.storage import MemoryStorage

    torch.set_num_threads(1)
    state = {"w": torch.randn(1 << 20), "v": torch.randn(1 << 20)}
    manager = sp.CheckpointManager(MemoryStorage(), background=True, threads=8)
    manager.save(1, extra=state)
    manager.wait()
    if os.geteuid() == 0:
        os.setuid(65534)  # root is not limited
    resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    try:
        manager.save(2, extra=state)
    except StorageError as error:
        print("refused:", error)
    manager.wait()
    report = manager.store.save(3, state)
    print("saved", report.keyframe)
    loaded = manager.store.load(3)
    assert torch.equal(loaded["w"], state["w"])
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    manager.save(4, extra=state)
    manager.wait()
    print("and again", manager.store.steps())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_NPROC counts threads on Linux")
def test_process_that_may_start_no_threads_saves_and_loads_with_the_one_it_has():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("refused:")
    assert "no thread" in lines[0]
    assert lines[-1] == "and again [1, 3, 4]"
