"""Saves beside a training loop: one at a time, each of the state at the moment of its call, no error lost.

`StateCopy` brings the state to the host while the loop goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import PolicyError, StorageError, error_text, find_user_line, warn_at, warn_user
from shrinkpoint.schemes.base import Scheme, resume_scheme
from shrinkpoint.schemes.evaluate import ModelEvaluator, iter_modules
from shrinkpoint.schemes.plan import QuantizationPlan, exact_plan, plan_within_memory
from shrinkpoint.schemes.planner import Planner
from shrinkpoint.schemes.registry import get_scheme
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.save_report import SaveReport
from shrinkpoint.store.save_settings import OnSave, SaveSettings
from shrinkpoint.tensors.flat_state import FlatState, allocate_like, can_copy_on_devices, copy_on_devices, snapshot
from shrinkpoint.tensors.memory import SideStreams, is_out_of_memory
from shrinkpoint.threads import reset_in_children
from shrinkpoint.train.default_evaluation import DefaultEvaluation

if TYPE_CHECKING:
    from typing_extensions import Self


class SavePlan(NamedTuple):
    """Plan for writing one state."""

    scheme: Scheme  # writes the state, or a copy of it, unless there is `plan_copy`
    # Plans for a copy of the state, beside the loop, where the copy is.
    plan_copy: Callable[[FlatState], Scheme] | None = None

    def scheme_for(self, copy: FlatState) -> Scheme:
        """The scheme that writes a copy of the state, or the state."""
        return self.scheme if self.plan_copy is None else self.plan_copy(copy)


def require_single_process(scheme: Scheme, caller: str) -> None:
    """Raise if a scheme would wait for other processes that never use it.

    Args:
        caller: the name of the caller, for the message.

    Raises:
        PolicyError: the scheme shares its trials with a group of replicas.
    """
    if isinstance(scheme, Planner) and scheme.shares_trials:
        found, do = f"{scheme!r} with a group of replicas", "leave group= out"
        raise PolicyError(caller, found=found, expected="a scheme for the one process that saves", do=do)


def make_save_plan(
    scheme: Scheme,
    state: FlatState,
    reference: Reference | None,
    objects: Mapping[str, Any],
    model: str = "model",
    *,
    defer: bool,
) -> SavePlan | None:
    """Plan how a state is written: by a quantization plan if the scheme plans, else by the scheme itself.

    A state is planned for on a copy, beside the loop, if nothing is measured and there is memory for the copy where the
    state is; else at once. On an accelerator that is done there, so that codes cross to the host and not values.

    Args:
        reference: the tensors of the previous checkpoint; None if there are none.
        objects: the live objects behind the state, by their name in it.
        model: name of the object that the scheme evaluates.
        defer: the state is written in another thread while training goes on.

    Returns:
        None if another process writes.

    Raises:
        PolicyError: the scheme evaluates a model, and there is none; or the evaluation failed.
    """
    if not isinstance(scheme, Planner):
        return SavePlan(scheme)
    evaluator, evaluate = None, scheme.evaluate
    if evaluate is not None and model not in objects and not isinstance(evaluate, DefaultEvaluation):
        found, do = "a save without it", f"pass {model}=, which {scheme!r} evaluates"
        raise PolicyError(model, found=found, expected="a model", do=do)
    if (evaluate is not None and model in objects) or [*iter_modules(objects.get(model))]:
        evaluator = ModelEvaluator(state, evaluate, objects[model], f"{model}/")
    if defer and not scheme.needs_live_model and can_copy_on_devices(state):
        if evaluator is not None:
            evaluator.recordings = scheme.recordings()
        return SavePlan(scheme, partial(_plan, scheme, reference, evaluator, stays_on_cpu=True))
    plan = _plan(scheme, reference, evaluator, state, stays_on_cpu=not defer)
    return SavePlan(plan) if scheme.is_writer else None


def _plan(
    scheme: Any, reference: Reference | None, evaluator: ModelEvaluator | None, state: FlatState, *, stays_on_cpu: bool
) -> Scheme:
    """Plan a state, with the sampled rows that the writer needs after the state has changed or its copy is freed.

    Args:
        stays_on_cpu: a state in host memory is the one that is written.
    """

    def plan(values: FlatState) -> Scheme:
        made: Scheme = scheme.plan(values, reference, evaluator)
        stays = state.is_on_cpu and stays_on_cpu
        return made if stays or not isinstance(made, QuantizationPlan) else made.with_samples(values)

    return plan_within_memory(plan, state, scheme)


class StateCopy:
    """Begins to copy a state; the loop may change it as soon as this returns.

    On a CUDA device with memory for it, the copy is made there, which takes a thousandth of a second for each few
    gigabytes, and is planned for and brought to the host by `finish`. Otherwise what is not planned yet comes to the
    host at once. Nothing waits for that here: on the devices, what the loop enqueues next waits until the state was
    read, and codes cross while it runs.

    Args:
        state: on any device.
        plan: how it is written.
        reuse: tensors of earlier copies, for `snapshot`.
        streams: on which it is read; they must be those of `finish`.
        background: `finish` is called beside the loop.
    """

    def __init__(
        self, state: FlatState, plan: SavePlan, reuse: Mapping[str, Tensor], streams: SideStreams, *, background: bool
    ) -> None:
        self._streams, self._plan, self._reuse = streams, plan, reuse
        self._copy: FlatState | None = None
        names = _replaced_names(plan.scheme)
        self._device_copy = None if state.is_on_cpu or names or not background else copy_on_devices(state)
        if self._device_copy is not None:
            streams.fork(self._device_copy.tensors.values())
            return
        streams.fork(state.tensors.values())
        with streams.use():
            self._copy = snapshot(state, reuse=reuse, without=names, wait=False)
        streams.join()
        with streams.use():
            self._plan = plan._replace(scheme=_to_host(plan.scheme))
        self._reuse = {}

    def finish(self) -> tuple[FlatState, Scheme]:
        """Wait until the copy is in host memory; return it with the scheme that writes it. Called once."""
        device_copy, self._device_copy = self._device_copy, None
        copy, self._copy = self._copy, None
        if copy is not None:
            self._streams.synchronize()
            return copy, self._plan.scheme_for(copy)
        assert device_copy is not None
        with self._streams.use():
            scheme = self._plan.scheme_for(device_copy)
            copy = snapshot(device_copy, reuse=self._reuse, without=_replaced_names(scheme), wait=False)
            scheme, self._reuse = _to_host(scheme), {}
        self._streams.synchronize()
        return copy, scheme


def _replaced_names(scheme: Scheme) -> frozenset[str]:
    """Names of tensors whose values a scheme has quantized already, and which a copy need not have."""
    return scheme.replaced_names if isinstance(scheme, QuantizationPlan) else frozenset()


def _to_host(scheme: Scheme) -> Scheme:
    return scheme.to_host() if isinstance(scheme, QuantizationPlan) else scheme


_log = logging.getLogger("shrinkpoint")
WriteState: TypeAlias = Callable[[FlatState, Scheme, bool], SaveReport]
"""Writes a state by a scheme; if the last argument is true, the state is a copy that the writer may keep."""


class BackgroundSaver:
    """Base class of what saves a training loop's states, at once or in the background, one at a time.

    A state that is written in the background or is not in host memory is copied first (`StateCopy`), but for values
    whose codes have been planned already. What the writer holds of the copy, as the reference of the next delta, is
    kept; the memory of the rest, and of the copy before, is reused by the next one.

    Args:
        settings: of the saves.
    """

    def __init__(self, settings: SaveSettings) -> None:
        self.stall_seconds = 0.0  # seconds for which the last `save` held up the loop
        self._stalls_since: float | None = None  # when `save` was called, while it has not returned
        self._settings, self._scheme, self._background = settings, get_scheme(settings.scheme), settings.background
        self._worker, self._streams = BackgroundWorker(), SideStreams()
        self._last_report: SaveReport | None = None
        self._lossy_restores = 0  # behind the state that is being trained
        self._held_copies: dict[str, torch.Tensor] = {}  # which the writer holds as its reference
        self._free_copies: dict[str, torch.Tensor] = {}  # whose memory is free
        reset_in_children(self)

    def _take_scheme(self, place: object) -> None:
        """Take a copy of the scheme if that saves another run, elsewhere."""
        if isinstance(self._scheme, Planner):
            self._scheme = self._scheme.of_run(self, place)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: a copy has no save that is running, and no memory of its own."""
        own: dict[str, Any] = {
            "_worker": BackgroundWorker(),
            "_stalls_since": None,
            "_held_copies": {},
            "_free_copies": {},
        }
        return {**vars(self), **own}

    def reset_after_fork(self) -> None:
        """In a forked child: a save that was running is the parent's, and so are its copies."""
        self._worker, self._stalls_since = BackgroundWorker(), None
        self._drop_snapshots()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def scheme(self) -> Scheme:
        """The scheme of the saves."""
        return self._scheme

    @property
    def last_report(self) -> SaveReport | None:
        """The report of the last save that is committed, without waiting; None if there is none yet."""
        return self._last_report

    def wait(self) -> SaveReport | None:
        """Wait until the last save is durable.

        Returns:
            The report of the last save that succeeded; None if there is none yet.

        Raises:
            Exception: whatever a save raised in the background, once.
        """
        self._worker.wait()
        return self._last_report

    def close(self) -> None:
        """Wait, release the lock of a store, and free the memory. A later `save` opens a store again, and begins a new
        chain elsewhere.

        Raises:
            Exception: whatever a save raised in the background, once.
            PolicyError: `on_save` calls this in the background, where the save is not over.
        """
        self._worker.refuse_own_thread("close")
        try:
            self._worker.wait()
        finally:
            self._drop_snapshots()
            self._release()

    def join(self) -> None:
        """Wait for the save that runs, if any; its error is kept for `wait`. Any thread may call this."""
        self._worker.join()

    @contextmanager
    def _next_save(self) -> Iterator[None]:
        """Wait for the save before, and set `stall_seconds` to the duration of the block."""
        self._worker.refuse_own_thread("save")
        self._stalls_since = start = time.perf_counter()
        try:
            self.wait()
            with torch.inference_mode(False), torch.no_grad():  # a save outside that mode writes over the copies
                yield
        finally:
            self.stall_seconds, self._stalls_since = time.perf_counter() - start, None

    def _stall(self) -> float:
        """Seconds for which the save that is being written has held up the loop until now."""
        start = self._stalls_since
        return self.stall_seconds if start is None else time.perf_counter() - start

    def _save(
        self,
        description: str,
        state: FlatState,
        plan: SavePlan,
        write: WriteState,
        after: Callable[[], object] = lambda: None,
    ) -> SaveReport | None:
        """Write a state, which the caller may change afterwards; the thread that wrote it calls `after`."""
        if not self._background and state.is_on_cpu:
            return self._write_state(lambda: (state, plan.scheme_for(state)), write, after, adopt=False)
        reuse, self._free_copies = self._free_copies, {}
        try:
            copy = StateCopy(state, plan, reuse, self._streams, background=self._background)
        except Exception as error:
            if not (state.is_on_cpu and is_out_of_memory(error)):
                raise
            text = "out of memory while copying the state, so the loop waits until this checkpoint is written"
            warn_user(f"{text}: free memory, or save without background=True", UserWarning)
            return self._write_state(lambda: (state, plan.scheme_for(state)), write, after, adopt=False)
        del reuse  # what was not reused
        if not self._background:
            return self._write_state(copy.finish, write, after, adopt=True)
        user_line, is_on_cpu, pending = find_user_line(), state.is_on_cpu, PendingReport(description, self.join)

        def write_copy() -> None:
            with warn_at(user_line):
                pending.set(self._write_state(copy.finish, write, after, adopt=True))
            if is_on_cpu:  # take what memory the next copy needs now: in the loop its page faults would be waited for
                missing = {name: copy for name, copy in self._held_copies.items() if name not in self._free_copies}
                with suppress(MemoryError):
                    self._free_copies |= allocate_like(missing)

        self._worker.start(description, write_copy)
        return cast(SaveReport, pending)

    def _resume_from(self, manifest: Manifest[Any]) -> None:
        self._lossy_restores = manifest.lossy_restores + manifest.is_lossy
        resume_scheme(self._scheme, manifest.loss, self._lossy_restores)

    def _drop_snapshots(self) -> None:
        """Free the memory of the copies; the writer must not use them any more."""
        self._held_copies, self._free_copies = {}, {}

    def _last_reference(self) -> Reference | None:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def _write_state(
        self,
        finish: Callable[[], tuple[FlatState, Scheme]],
        write: WriteState,
        after: Callable[[], object],
        *,
        adopt: bool,
    ) -> SaveReport:
        # If writing fails, either copy may be the writer's reference: neither is reused then.
        previous, self._held_copies = self._held_copies, {}
        state, scheme = finish()
        report, shortage = None, ""
        try:
            report = write(state, scheme, adopt)
        except Exception as error:  # it holds the frames, and so the memory, of what has failed: not beyond this block
            if not is_out_of_memory(error):
                raise
            shortage = f"out of memory while writing this checkpoint ({error_text(error)})"
        if report is None:
            previous = {}
            if isinstance(scheme, QuantizationPlan) and not scheme.replaced_names:
                scheme = exact_plan(scheme, shortage)
            warn_user(f"{shortage}, so it is written again: free memory, or save less often", UserWarning)
            report = write(state, scheme, adopt)
        if adopt:
            reference = self._last_reference()
            held = set() if reference is None else reference.data_addresses()
            self._held_copies = {name: copy for name, copy in state.tensors.items() if copy.data_ptr() in held}
            copies = previous | {name: copy for name, copy in state.tensors.items() if name not in self._held_copies}
            self._free_copies = {name: copy for name, copy in copies.items() if copy.data_ptr() not in held}
        self._last_report = report
        call_on_save(self._settings.on_save, report)
        after()
        return report


class PendingReport:
    """The report of a save that is being written: it has every attribute of a `SaveReport`, and waits when asked.

    Args:
        description: of the save, for messages.
        join: waits for the save.
    """

    def __init__(self, description: str, join: Callable[[], None]) -> None:
        self._description, self._join = description, join
        self._report: SaveReport | None = None

    def done(self) -> bool:
        """True if the checkpoint is committed, so that nothing waits any more."""
        return self._report is not None

    def result(self) -> SaveReport:
        """The report, once the checkpoint is committed.

        Raises:
            StorageError: the save failed; its own error is raised by `wait()`, or by the next save.
        """
        if self._report is None:
            self._join()
        if self._report is None:
            do = "call wait(), which raises the error; in on_save, use the report that it gets"
            raise StorageError(self._description, found="no report", expected="a committed save", do=do)
        return self._report

    def set(self, report: SaveReport) -> None:
        self._report = report

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of copies, pickles and notebooks, which must not wait
            raise AttributeError(name)
        return getattr(self.result(), name)

    def __str__(self) -> str:
        return str(self.result())

    def __repr__(self) -> str:
        """The report, or without waiting that there is none yet."""
        return repr(self._report) if self.done() else f"<PendingReport {self._description}>"


def call_on_save(on_save: OnSave | None, report: SaveReport) -> None:
    """Call a user's `on_save`; an exception of it is a warning, since the checkpoint is saved."""
    if on_save is None:
        return
    try:
        on_save(report)
    except Exception as error:
        _log.info("on_save failed for %s", report.path, exc_info=True)
        warn_user(f"on_save failed for {report.path}, which is saved: {error_text(error)}", UserWarning)


class BackgroundWorker:
    """Runs one job at a time in a thread of its own, and raises the error of each job exactly once.

    The thread is no daemon: an interpreter that exits waits for the job.
    """

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._error: BaseException | None = None

    def start(self, description: str, job: Callable[[], object]) -> None:
        """Run a job; the one before must have been waited for.

        If this call is interrupted by a signal, either the job never runs, or it runs and `wait` waits for it.

        Args:
            description: names the job in error messages and, if it fails, in the log.

        Raises:
            StorageError: the system gives no thread; the job does not run.
        """
        new_job = _Job(description, job)
        try:
            self._job = new_job
            new_job.thread.start()
            new_job.is_launched = True
        except (RuntimeError, MemoryError) as error:
            self._revoke(new_job)
            do = "free memory, or allow more threads (`ulimit -u`), and save again; or save without background"
            raise StorageError(description, found=f"no thread to write in ({error})", do=do) from error
        except BaseException:
            self._revoke(new_job)
            raise

    @property
    def is_running(self) -> bool:
        """True if a job runs, or is about to."""
        job = self._job
        return job is not None and not job.done.is_set()

    def join(self) -> None:
        """Wait for the job that runs, if any; its error is kept for `wait`.

        Any thread may call this. That of the job itself does not wait: a user's function that the job calls after its
        work may ask for what is saved.
        """
        job = self._job
        if job is None or job.thread is threading.current_thread():
            return
        if not job.is_launched and job.starter_thread_id == threading.get_ident():
            self._revoke(job)  # `start` was interrupted, and so was its error handling
        if self._job is job:
            job.done.wait()  # `Thread.join` would take the thread for ended after an interrupt
            # Keep the error of a finished job, once: several threads may have waited for it
            with job.lock:
                error, job.error = job.error, None
            if error is not None:
                self._error = error
            if self._job is job:
                self._job = None

    def wait(self) -> None:
        """Wait for the job that runs, if any.

        Raises:
            Exception: whatever a job raised, once.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def refuse_own_thread(self, call: str) -> None:
        """Raise `PolicyError` if the job itself makes a call that only another thread can make."""
        job = self._job
        if job is not None and job.thread is threading.current_thread():
            found, expected = "a call in the background, from on_save", "a call of the thread that trains"
            do = f"put the report in a queue, and {call} from the training loop"
            raise PolicyError(call, found=found, expected=expected, do=do)

    def _revoke(self, job: _Job) -> None:
        if job.revoke() and self._job is job:
            self._job = None


class _Job:
    """Work for a thread, which can be revoked until the thread runs it."""

    def __init__(self, description: str, work: Callable[[], object]) -> None:
        self.lock, self.done = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"shrinkpoint: {description}")
        self.starter_thread_id, self.is_launched = threading.get_ident(), False
        self.error: BaseException | None = None
        self._description, self._work = description, work
        self._is_running = self._is_revoked = False

    def revoke(self) -> bool:
        """Cancel the work unless it has begun; whether it is cancelled."""
        with self.lock:
            if not self._is_running and not self._is_revoked:
                self._is_revoked = True
                self.done.set()
        return self._is_revoked

    def _run(self) -> None:
        with self.lock:
            if self._is_revoked:
                return
            self._is_running = True
        try:
            self._work()
        except BaseException as error:
            self.error = error
            _log.warning("%s failed: %s", self._description, error)
        finally:
            del self._work  # frees what it refers to, such as a copy of the state
            self.done.set()
