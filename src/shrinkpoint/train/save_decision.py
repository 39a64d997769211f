"""When to save: policies that a training loop asks at every step, with one answer on all ranks.

The names are those of Orbax's save decision policies, which these follow; steps are whole numbers here.
`PreemptionWatch` notes the signal by which a scheduler announces that it will end the process.
"""

from __future__ import annotations

import math
import os
import signal
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakSet

from shrinkpoint import validate
from shrinkpoint.errors import PolicyError
from shrinkpoint.sharding.collectives import gather_or_raise
from shrinkpoint.store import layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shrinkpoint.store.manifest import DirectoryManifest


@dataclass(frozen=True)
class DecisionContext:
    """Inputs of a policy besides steps.

    Attributes:
        seconds: since the last save was decided; before the first one, since the schedule was made.
        is_saving_in_progress: a save is being written in the background.
        reached_preemption: the process will be ended, and nothing was saved since that was announced.
        metrics: of this step.
        previous_metrics: of each of the previous steps; empty where none were given.
    """

    seconds: float = 0.0
    is_saving_in_progress: bool = False
    reached_preemption: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    previous_metrics: Sequence[Mapping[str, float]] = ()


class SaveDecisionPolicy(Protocol):
    """Decides whether to save; for one of your own, this method is enough.

    Two attributes are optional: `is_by_step`, True if the answer depends on the step alone, so that ranks need not
    compare theirs; and `watches_preemption`, True if SIGTERM is to be watched for.
    """

    def should_save(self, step: int, previous_steps: Sequence[int], *, context: DecisionContext) -> bool:
        """True if this step is to be saved; it is none of the previous ones.

        Args:
            previous_steps: of the checkpoints there were at the beginning, and of those decided since.
        """
        ...


@dataclass(frozen=True)
class FixedIntervalPolicy:
    """Save every so many steps: at the multiples of `interval`.

    Raises:
        PolicyError: the interval is not a whole number from 1.
    """

    interval: int
    is_by_step = True

    def __post_init__(self) -> None:
        validate.check_int("FixedIntervalPolicy(interval=)", self.interval, do="pass a number of steps")

    def should_save(self, step: int, previous_steps: Sequence[int], *, context: DecisionContext) -> bool:
        return step % self.interval == 0


@dataclass(frozen=True)
class SpecificStepsPolicy:
    """Save at these steps.

    Raises:
        PolicyError: one of them is no step.
    """

    steps: Sequence[int]
    is_by_step = True

    def __post_init__(self) -> None:
        expected, do = "steps, such as [100, 200]", "pass them as a list"
        validate.check_instance("SpecificStepsPolicy(steps=)", self.steps, Iterable, expected=expected, do=do)
        object.__setattr__(self, "steps", tuple(layout.check_step(step) for step in self.steps))

    def should_save(self, step: int, previous_steps: Sequence[int], *, context: DecisionContext) -> bool:
        return step in self.steps


@dataclass(frozen=True)
class ContinuousCheckpointingPolicy:
    """Save whenever no save is in progress, and at least so many seconds have passed since the last one.

    Raises:
        PolicyError: the seconds are no number from 0.
    """

    minimum_interval_secs: float = 0.0

    def __post_init__(self) -> None:
        seconds = self.minimum_interval_secs
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            where, do = "ContinuousCheckpointingPolicy(minimum_interval_secs=)", "pass e.g. 600 for ten minutes"
            raise validate.argument_error(where, seconds, "a number of seconds from 0", do)

    def should_save(self, step: int, previous_steps: Sequence[int], *, context: DecisionContext) -> bool:
        return not context.is_saving_in_progress and context.seconds >= self.minimum_interval_secs


@dataclass(frozen=True)
class BestMetricPolicy:
    """Save when a metric is better than in every previous checkpoint; nan is no value.

    Args:
        metric: the name under which `should_save` and `save` get it.
        mode: "min" or "max".

    Raises:
        PolicyError: an unknown mode, or an empty name.
    """

    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        validate.check_str("BestMetricPolicy(metric=)", self.metric, do="pass the name of a metric")
        validate.check_choice("BestMetricPolicy(mode=)", self.mode, ("min", "max"))

    def should_save(self, step: int, previous_steps: Sequence[int], *, context: DecisionContext) -> bool:
        sign = 1.0 if self.mode == "min" else -1.0
        value = sign * context.metrics.get(self.metric, math.nan)
        return not math.isnan(value) and not any(
            sign * metrics.get(self.metric, math.nan) <= value for metrics in context.previous_metrics
        )


@dataclass(frozen=True)
class PreemptionCheckpointingPolicy:
    """Save once when the process is told to end, by SIGTERM; a process that uses this policy does not end by it."""

    watches_preemption = True

    def should_save(self, step: int, previous_steps: Sequence[int], *, context: DecisionContext) -> bool:
        return context.reached_preemption


@dataclass(frozen=True)
class AnySavePolicy:
    """Save when any of several policies does.

    Raises:
        PolicyError: one of them is no policy.
    """

    policies: Sequence[SaveDecisionPolicy]

    def __post_init__(self) -> None:
        policies = self.policies if isinstance(self.policies, Sequence) else (self.policies,)
        object.__setattr__(self, "policies", tuple(map(check_policy, policies)))

    @property
    def is_by_step(self) -> bool:
        return all(getattr(policy, "is_by_step", False) for policy in self.policies)

    @property
    def watches_preemption(self) -> bool:
        return any(getattr(policy, "watches_preemption", False) for policy in self.policies)

    def should_save(self, step: int, previous_steps: Sequence[int], *, context: DecisionContext) -> bool:
        return any(policy.should_save(step, previous_steps, context=context) for policy in self.policies)


def check_policy(policy: Any) -> SaveDecisionPolicy:
    """Return a policy; raises PolicyError if it is something else."""
    if callable(getattr(policy, "should_save", None)) and not isinstance(policy, type):
        return policy  # type: ignore[no-any-return]
    expected = "an object with should_save(step, previous_steps, *, context)"
    raise validate.argument_error("save_decision_policy", policy, expected, "pass e.g. FixedIntervalPolicy(1000)")


class SaveSchedule:
    """Asks a policy at every step, and remembers what it decided; on several ranks, all get the same answer.

    A rank's yes is everyone's: they compare their answers at every step, in one small exchange, unless the policy goes
    by the step alone. `CheckpointManager.should_save` is one of these; loops that save by other means make their own.

    Args:
        policy: says when to save.
        group: the ranks, all of which ask at every step; None: this process alone.

    Raises:
        PolicyError: no policy; a policy that watches for SIGTERM, in another thread than the main one.
    """

    def __init__(self, policy: SaveDecisionPolicy, *, group: ProcessGroup | None = None) -> None:
        self._policy, self._group = check_policy(policy), group
        self._metrics: dict[int, Mapping[str, float]] = {}  # by step, in the order of the saves
        self._last_save = time.monotonic()
        self._is_preempted = self._is_saved_since = False
        self._watch = PreemptionWatch() if getattr(policy, "watches_preemption", False) else None

    def __enter__(self) -> SaveSchedule:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def reached_preemption(self) -> bool:
        """True if the process was told to end when `should_save` was called last; the same on all ranks."""
        return self._is_preempted

    def should_save(
        self, step: int, *, metrics: Mapping[str, Any] | None = None, is_saving_in_progress: bool = False
    ) -> bool:
        """True if this step is to be saved; False if that has been decided for it, or `note_saved` was called with it.

        Args:
            metrics: numbers by name, of this step.
            is_saving_in_progress: a save is being written in the background.

        Raises:
            PolicyError: no step; ranks that ask for different steps; a metric that is no number.
            Exception: whatever a policy raises, on all ranks.
        """
        step, values = layout.check_step(step), validate.as_floats(metrics)

        def decide() -> tuple[int, bool, bool]:
            is_signalled = self._watch is not None and self._watch.is_signalled
            context = DecisionContext(
                time.monotonic() - self._last_save,
                is_saving_in_progress,
                is_signalled and not self._is_saved_since,
                values,
                tuple(self._metrics.values()),
            )
            is_new = step not in self._metrics
            is_due = is_new and self._policy.should_save(step, tuple(self._metrics), context=context)
            return step, bool(is_due), is_signalled

        is_local = self._group is None or getattr(self._policy, "is_by_step", False)
        answers = [decide()] if is_local else gather_or_raise(decide, self._group)
        steps = sorted({other for other, _, _ in answers})
        if len(steps) > 1:
            found, do = f"ranks at steps {', '.join(map(str, steps))}", "call should_save on all ranks at every step"
            raise PolicyError("should_save", found=found, expected="the same step on all ranks", do=do)
        self._is_preempted = any(is_signalled for _, _, is_signalled in answers)
        is_due = any(is_due for _, is_due, _ in answers)
        if is_due:
            self.note_saved(step, values)
        return is_due

    def note_previous(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a checkpoint of an earlier process; no seconds are counted from it."""
        self._metrics.setdefault(step, dict(metrics))

    def go_back(self, step: int) -> None:
        """Forget the saves after a step that was restored: the run makes these steps again."""
        self._metrics = {other: metrics for other, metrics in self._metrics.items() if other <= step}

    def note_saved(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Count a step as saved, with its metrics; what `should_save` has decided is counted already."""
        self._metrics[step] = {**self._metrics.get(step, {}), **(metrics or {})}
        self._last_save, self._is_saved_since = time.monotonic(), self._is_preempted

    def close(self) -> None:
        """Let SIGTERM do what it did before."""
        if self._watch is not None:
            self._watch.close()


class ScheduledSaver:
    """The part of a saver that says when to save, by a policy.

    Args:
        policy: None: the loop decides itself.
        group: see `SaveSchedule`.
    """

    def __init__(self, policy: SaveDecisionPolicy | None, group: ProcessGroup | None) -> None:
        self._schedule = None if policy is None else SaveSchedule(policy, group=group)
        self._has_read_steps = False  # of the checkpoints there are, for the schedule
        self._restored_step: int | None = None

    def should_save(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> bool:
        """True if the `save_decision_policy` wants this step saved; False for a step that is saved already.

        After a restore, steps beyond the restored one count as not saved.

        Args:
            step: number of the training step.
            metrics: numbers of this step, for `BestMetricPolicy`.

        Raises:
            PolicyError: there is no policy; no step; ranks that ask for different steps; a metric that is no number.
            StorageError: the checkpoints that are there cannot be read.
            Exception: whatever a policy raises, on all ranks.
        """
        if self._schedule is None:
            do = "pass save_decision_policy=, such as shrinkpoint.train.FixedIntervalPolicy(1000)"
            raise PolicyError("should_save", found="no policy", expected="a policy", do=do)
        if not self._has_read_steps:
            for manifest in self._previous_manifests():
                is_past = self._restored_step is None or (manifest.step or 0) <= self._restored_step
                if manifest.step is not None and is_past:  # else the run makes it again
                    self._schedule.note_previous(manifest.step, manifest.metrics)
            self._has_read_steps = True
        return self._schedule.should_save(step, metrics=metrics, is_saving_in_progress=self._is_saving)

    @property
    def reached_preemption(self) -> bool:
        """True if the process was told to end (SIGTERM) when `should_save` was called last; the same on all ranks.

        Always False without a `PreemptionCheckpointingPolicy`.
        """
        return self._schedule is not None and self._schedule.reached_preemption

    def _note_saved(self, step: int | None, metrics: Mapping[str, float]) -> None:
        if self._schedule is not None and step is not None:
            self._schedule.note_saved(step, metrics)

    def _note_restored(self, step: int | None) -> None:
        self._restored_step = step
        if self._schedule is not None and step is not None:
            self._schedule.go_back(step)

    def _close_schedule(self) -> None:
        if self._schedule is not None:
            self._schedule.close()

    @property
    def _is_saving(self) -> bool:
        return False

    def _previous_manifests(self) -> Iterable[DirectoryManifest]:
        return ()


_SIGNAL = signal.SIGTERM


class PreemptionWatch:
    """Notes SIGTERM, which then does not end the process, until it is closed or freed.

    The handler that was there before is called, too, and is put back by `close`. In forked processes, such as those of
    a data loader, SIGTERM does what it did before.

    Raises:
        PolicyError: this is not the main thread, which alone may set handlers; or the handler that is there cannot be
            called, as it was not set in Python.
    """

    def __init__(self) -> None:
        self.is_signalled = False  # the signal has come
        self._pid = os.getpid()
        previous = signal.getsignal(_SIGNAL)
        do = "make the manager in the main thread, before other libraries set handlers"
        if previous is None:
            found, expected = "a handler of SIGTERM that was not set in Python", "a handler that can be called"
            raise PolicyError("PreemptionCheckpointingPolicy", found=found, expected=expected, do=do)
        try:
            signal.signal(_SIGNAL, _Handler(self, previous))
        except ValueError as error:
            where, found = "PreemptionCheckpointingPolicy", "a thread that may not handle signals"
            raise PolicyError(where, found=found, expected="the main thread", do=do) from error
        _WATCHES.add(self)

    @property
    def is_active(self) -> bool:
        """True if the signal is noted: this is not closed, and not the copy in a forked process."""
        return self in _WATCHES and self._pid == os.getpid()

    def close(self) -> None:
        """Put the handlers back that were there before, as far as no later one stands in front of them."""
        _WATCHES.discard(self)
        try:
            while isinstance(handler := signal.getsignal(_SIGNAL), _Handler) and not handler.is_active:
                signal.signal(_SIGNAL, handler.previous)
        except ValueError:  # another thread than the main one: the handler stays, and only calls the one before
            return


_WATCHES: WeakSet[PreemptionWatch] = WeakSet()


class _Handler:
    """A handler of a signal that notes it for a watch and calls the handler before.

    A watch that is closed while a later handler stands in front of this one leaves it there; it then only passes on.

    Args:
        watch: is not kept alive.
        previous: the handler before, as `signal.getsignal` returns it.
    """

    def __init__(self, watch: PreemptionWatch, previous: Any) -> None:
        self._watch, self.previous = weakref.ref(watch), previous

    @property
    def is_active(self) -> bool:
        watch = self._watch()
        return watch is not None and watch.is_active

    def __call__(self, number: int, frame: FrameType | None) -> None:
        watch = self._watch()
        if watch is not None and watch.is_active:
            watch.is_signalled = True
        if callable(self.previous):
            self.previous(number, frame)
        elif self.previous == signal.SIG_DFL and not any(other.is_active for other in [*_WATCHES]):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
