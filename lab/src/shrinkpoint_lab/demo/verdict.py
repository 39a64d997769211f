"""The verdict of a demo: whether every bit is equal, and if not, what differs first and what is at fault.

States are compared by the digests that every process logs after each step. A process that restored nothing and differs
from another one shows that the training itself is not deterministic; a checkpoint that decodes to another state than
its process had shows that the store is at fault; and so on, in the order in which a fault would come about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from shrinkpoint_lab.demo.digests import StateDigests, differing_names
from shrinkpoint_lab.demo.training_log import Divergence, TrainingLog

Replay = Callable[[TrainingLog, int], TrainingLog | None]
"""Trains once more from the checkpoint that a process restored, up to a step; None if that cannot be done."""


class Cause(Enum):
    """What is at fault."""

    NOTHING = "nothing"
    TRAINING = "the training: it is not deterministic on this machine"
    STORED_STATE = "the store: it gives back another state than was saved"
    DAMAGE = "damage: the store says that a file of it is not as it was written"
    RESTORE = "the restore: a process began with another state than was saved"
    MISSING_STATE = "the checkpoints: the next steps depend on something that they do not have"
    UNKNOWN = "unknown: the last states differ, though all steps agree"


@dataclass(frozen=True)
class CheckpointCheck:
    """A checkpoint, decoded, against the state of its process when it was saved.

    Attributes:
        step: its step.
        names: the tensors and values that differ.
        error: why it cannot be decoded; "" if it can.
    """

    step: int
    names: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_exact(self) -> bool:
        return not self.names and not self.error


@dataclass(frozen=True)
class Verdict:
    """What came out.

    Attributes:
        passed: the resumed run ended where the other did, and every checkpoint gives back what was saved.
        cause: what is at fault; also of a difference that did no harm.
        findings: what was found, a sentence or two each.
    """

    passed: bool
    cause: Cause
    findings: tuple[str, ...] = ()


def judge(
    reference: TrainingLog,
    processes: Sequence[TrainingLog],
    *,
    after_kill: Sequence[CheckpointCheck],
    at_end: Sequence[CheckpointCheck],
    differences: Sequence[str],
    replay: Replay,
) -> Verdict:
    """Find what is at fault where something differs.

    Args:
        reference: of the process that was never killed.
        processes: those that were killed, in their order, and the last one, which ran to the end.
        after_kill, at_end: the checkpoints of the store, after the last kill and at the end.
        differences: paths at which the last states of both runs differ, or the last checkpoint and its state.
        replay: called where only another training from the same checkpoint can tell.
    """
    passed = not differences and all(check.is_exact for check in at_end)
    checks = {check.step: check for check in (*at_end, *after_kill)}.values()
    faults = [*_store_faults(checks), *_restore_faults(processes), *_training_faults(reference, processes, replay)]
    damaged = {check.step: check.error for check in (*after_kill, *at_end) if check.error}
    faults += [(Cause.DAMAGE, f"The checkpoint of step {step} cannot be read: {why}") for step, why in damaged.items()]
    if not faults and not passed:
        faults.append((Cause.UNKNOWN, f"The last states differ at {differences[0]}, and no step before shows it."))
    cause = faults[0][0] if faults else Cause.NOTHING
    return Verdict(passed, cause, tuple(text for _, text in faults))


Fault = tuple[Cause, str]


def _store_faults(checks: Iterable[CheckpointCheck]) -> Iterator[Fault]:
    for check in checks:
        if check.names:
            found = f"gives back another state than its process had when it saved it: {describe_names(check.names)}"
            yield Cause.STORED_STATE, f"The checkpoint of step {check.step} {found}."


def _restore_faults(processes: Sequence[TrainingLog]) -> Iterator[Fault]:
    saved: dict[int, StateDigests] = {}
    for process in processes:
        step, state = process.restored_step, process.restored_state
        if step is not None and state is not None and step in saved:
            names = differing_names(saved[step], state)
            if names:
                found = f"began with another state than was saved at step {step}: {describe_names(names)}"
                yield Cause.RESTORE, f"The {process.name} process {found}."
        saved.update(process.states)


def _training_faults(reference: TrainingLog, processes: Sequence[TrainingLog], replay: Replay) -> Iterator[Fault]:
    """The first difference of any process from the one that was never killed; what comes after follows from it."""
    for process in processes:
        divergence = process.first_divergence(reference)
        if divergence is None:
            continue
        where = f"After step {divergence.step} the {process.name} process differs from the one never killed: "
        where += f"{describe_names(divergence.names)}. "
        step = process.restored_step
        if step is None:
            where += "It had restored nothing, so the same start gave other steps."
            yield Cause.TRAINING, where
        else:
            where += f"It had begun at step {process.first_step} with the very state that was saved at step {step}. "
            yield _replayed_fault(reference, process, divergence, where, replay)
        return


def _replayed_fault(
    reference: TrainingLog, process: TrainingLog, divergence: Divergence, where: str, replay: Replay
) -> Fault:
    """Tells a training that is not deterministic from a checkpoint that lacks something, by training once more."""
    again = replay(process, divergence.step)
    if again is None or divergence.step not in again.states:
        found = "Training once more from that checkpoint did not get there, so that what is at fault stays open."
        return Cause.UNKNOWN, where + found
    if again.first_divergence(reference) is None:
        return Cause.TRAINING, where + "Another process from the same checkpoint came out as the one never killed."
    if again.first_divergence(process) is not None:
        return Cause.TRAINING, where + "Another process from the same checkpoint differs from both."
    return Cause.MISSING_STATE, where + "Another process from the same checkpoint came out the same way."


def describe_names(names: Sequence[str]) -> str:
    """The first of some names, and how many there are.

    >>> describe_names(["model/w"]), describe_names(["model/w", "model/b"])
    ('model/w', 'model/w and 1 more')
    """
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
