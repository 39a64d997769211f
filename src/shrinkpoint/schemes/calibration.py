"""Checks whether `evaluate` can be trusted: its answer is finite, repeats itself and depends on the weights, and which.

Also warns, once in a run, where a scheme loses something and no `evaluate` measures it."""

from __future__ import annotations

import math
import re
import statistics
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shrinkpoint import humanize
from shrinkpoint.codec.lattice import dither
from shrinkpoint.errors import UnmeasuredLossWarning, warn_user
from shrinkpoint.schemes.evaluate import MEASURE_ADVICE, DegradationMetric, Reading, TrialValues, scale_of
from shrinkpoint.schemes.influence import InfluenceRecorder
from shrinkpoint.schemes.select import TensorSelection
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState
from shrinkpoint.tensors.info import JSON

MakeValues = Callable[[], TrialValues]
ComputeOnAll = Callable[[Callable[[], Any]], list[Any]]
"""Runs a function in every process and returns the results of all."""

REPEAT_INTERVAL = 16  # Saves after which an `evaluate` that has always repeated itself is asked twice again
NOISE_WARNING_SHARE = 0.25  # Share of what may be lost: for noise above it, a warning is logged
NOISE_ADVICE = "fix its batches and its seed, and call model.eval()"  # What to do about noise
_MIN_NOISE_RATIO = 2.0  # Times the noise by which an answer for other weights differs at least, where there is noise
MAX_INTERVAL_RATIO = 1.25
"""Times what may be lost: an interval that reaches further is that of too few examples. A search goes to the limit, so
that the interval around what it chooses always reaches a little beyond."""
_NOISE_DECAY = 0.9
"""The share of earlier noise that remains where answers differ less now: a single bad moment must not make a whole run
lossless."""
MAX_ENTRIES = 8
"""Entries of a state that are perturbed one by one: each costs an evaluation, once a run. Smaller ones count as one."""
_ENTRY_DEVIATIONS = 4.0
"""Standard deviations of the noise of a single entry, so that its effect is larger than the noise of `evaluate`."""
_MIN_COMPARED_EXAMPLES, _MIN_CORRELATION = 8, 0.9
"""Examples that are enough to tell whether two answers are of the same ones, and the correlation of their losses."""
_MIN_MATCHES, _METRIC_ERROR = 2, 1e-6
"""Saves in a row at which a metric was the answer for the unchanged weights, from which it replaces that answer, and by
how much it may differ, relative to it."""
_CLEARLY_BETTER = 4.0  # Times what may be lost by which a trial is better that is no chance
_EXTRA_REPEATS = 3  # Further answers for the same weights, the first time, where noise deserves a warning


class UnmeasuredLossNotice:
    """Warns once in a run that a scheme loses something that nothing measures."""

    def __init__(self) -> None:
        self._was_given = False

    def warn_once(self, scheme: object, *, quiet: bool = False) -> None:
        """Warn, the first time; `quiet`: another process does."""
        if self._was_given or quiet:
            return
        self._was_given = True
        text = f"the loss is not measured: {scheme} sets a precision of values, no bound on the loss. {MEASURE_ADVICE}"
        warn_user(text, UnmeasuredLossWarning)


class EvaluateProblem(NamedTuple):
    """Reason for which nothing may be lost: what `evaluate` did, and what the user can do about it."""

    observation: str
    advice: str


class Calibration:
    """Knowledge of a run about its `evaluate`; forgotten where the run goes on from a checkpoint.

    Attributes:
        noise: the largest difference between answers for the same weights, relative to these, with slow decay; None if
            unknown.
        has_reacted: True if clearly different weights had another answer.
        num_saves: number of saves that were measured.
        is_measured: by global name of a weight, True if `evaluate` looks at it; without an entry, it is not known.
        is_directed: clearly different weights were worse than the state, though a trial was clearly better.
        is_tested: `is_measured` is what this process has found out, with this `evaluate`.

    Args:
        unmeasured: global names of weights that `evaluate` did not look at in the run that goes on.
    """

    def __init__(self, unmeasured: Iterable[str] = ()) -> None:
        self.noise: float | None = None
        self.has_reacted, self.num_saves = False, 0
        self.is_measured, self.is_tested = dict.fromkeys(unmeasured, False), False
        self.is_directed = False
        self._sample_text, self._is_interval_warned = "", False
        self._matches = dict[str, int]()  # saves in a row at which a metric was the answer

    @property
    def state(self) -> tuple[Any, ...]:
        """Message that processes exchange."""
        return self.noise, self.has_reacted, self.num_saves, self.is_measured, self.is_tested

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Take over the `state` of another process."""
        self.noise, self.has_reacted, self.num_saves, self.is_measured, self.is_tested = state

    def forget_differences(self, tensors: GlobalTensors) -> None:
        """Forget everything unless all ranks remember the same; a collective."""
        digest = zlib.crc32(repr(self.state).encode())
        if tensors.collectives.value_if_equal(digest) is None:
            self.set_state(Calibration().state)

    @property
    def unmeasured(self) -> list[str]:
        """Global names of weights that `evaluate` does not look at, in order."""
        return sorted(name for name, is_measured in self.is_measured.items() if not is_measured)

    @property
    def recorded(self) -> list[JSON] | None:
        """The `unmeasured` names for a manifest; None if nothing is known yet."""
        return [*self.unmeasured] if self.is_tested or self.is_measured else None

    def measured_part(self, selection: TensorSelection, tensors: GlobalTensors) -> TensorSelection:
        """The selection without the weights that `evaluate` does not look at, which stay exact; a collective."""
        unmeasured = frozenset(self.unmeasured)
        return selection.exclude(
            [name for name in selection.tensors if tensors.global_names[name] in unmeasured], tensors
        )

    @property
    def num_checks(self) -> int:
        """Probable number of evaluations of `find_problem`."""
        return 1 + (self.noise is None) + (not self.has_reacted)

    def find_problem(
        self,
        metric: DegradationMetric,
        perturbations: Sequence[MakeValues],
        max_rise: Callable[[float], float] | None = None,
        compute_on_all: ComputeOnAll = lambda compute: [compute()],
        is_followed: Callable[[], bool] = lambda: False,
        metrics: Mapping[str, float] | None = None,
    ) -> EvaluateProblem | None:
        """Measure the unchanged weights, which is `metric.baseline` from then on, and say why nothing may be lost.

        The first time, `evaluate` is called twice, and then with clearly different weights, one set after the other
        until it answers something else.

        Args:
            perturbations: each makes such weights.
            max_rise: by how much an answer may become worse, relative to its `scale`, of which this is a function;
                None if unknown.
            compute_on_all: replicas each measure, and all decide from all answers.
            is_followed: says after the first call whether the answer was computed from all weights; then the trials of
                this save tell the rest, and `find_late_problem` asks them.
            metrics: of this save alone; one that has been the answer at the saves before is taken for it.

        Returns:
            None where `evaluate` can be trusted.
        """
        readings: list[Reading] = []

        def ask() -> list[float]:
            given = self._given_reading(metrics or {})
            readings[:] = self._repeat_evaluation(metric, max_rise, is_followed) if given is None else [given]
            known = metrics or {}
            # At how many saves in a row each metric was the answer, but for the rounding of a float32.
            matches = (name for name, x in known.items() if math.isclose(x, readings[0].value, rel_tol=_METRIC_ERROR))
            self._matches = {name: self._matches.get(name, 0) + 1 for name in matches}
            return [reading.value for reading in readings]

        values = [value for answers in compute_on_all(ask) for value in answers]
        broken = next((value for value in values if not math.isfinite(value)), None)
        if failure := find_failure(metric, compute_on_all):
            return failure
        if broken is not None:
            observation = f"evaluate returned {broken} for the state itself"
            return EvaluateProblem(observation, "check whether training has diverged")
        # The median of all answers; with examples only if all are equal, since otherwise they are of other examples.
        first = readings[0]
        are_equal = all(reading.equals(first) for reading in readings) and all(value == first.value for value in values)
        metric.baseline = first if are_equal else Reading(statistics.median(values))
        if (examples := metric.baseline.examples) is not None:
            self._sample_text = f"{examples.numel()} {metric.baseline.unit}"
        decay = _NOISE_DECAY if len(readings) > 1 else 1.0
        if self.noise is not None or len(values) > 1:
            self.noise = max(decay * (self.noise or 0.0), (max(values) - min(values)) / metric.scale)
        self.num_saves += 1
        limit = math.inf if max_rise is None else max_rise(metric.scale)
        if self.noise is not None and 0 < limit <= self.noise:
            return EvaluateProblem(f"{self.noise_text}, and only {limit:.2%} may be lost", NOISE_ADVICE)
        if self.has_reacted or is_followed():
            return None
        return self._find_reaction(metric, perturbations, compute_on_all)

    def find_late_problem(
        self,
        metric: DegradationMetric,
        perturbations: Sequence[MakeValues],
        max_rise: Callable[[float], float] | None = None,
    ) -> EvaluateProblem | None:
        """Find out from the trials of a save what `find_problem` has left to them; arguments as there.

        Other weights have another answer, and clearly different ones no better one than a trial does.
        Where examples keep their losses but for a little, they are the same ones; otherwise `evaluate` is called again
        with the unchanged weights, and noise makes this checkpoint exact.
        """
        trial, failure = metric.first_trial, find_failure(metric)
        if trial is None or failure is not None:
            return failure
        if self.noise is None and not _are_same_examples(metric.baseline, trial):
            again = metric.evaluate({})
            difference = 0.0
            if not again.equals(metric.baseline):
                difference = abs(again.value - metric.baseline.value) / metric.scale
            self.noise = difference if math.isfinite(difference) else None
            if not difference <= _METRIC_ERROR:  # which is that of the same examples in another order
                return find_failure(metric) or EvaluateProblem(self.noise_text, NOISE_ADVICE)
        if not self.has_reacted and not self._differs(metric, trial, metric.baseline):
            return self._find_reaction(metric, perturbations, lambda compute: [compute()])
        self.has_reacted = True
        return self.find_inversion(metric, perturbations, max_rise)

    def find_inversion(
        self,
        metric: DegradationMetric,
        perturbations: Sequence[MakeValues],
        max_rise: Callable[[float], float] | None,
    ) -> EvaluateProblem | None:
        """Find out from the trials of a save whether a score is taken for a loss, or a loss for a score.

        Then the coarsest steps are the best: a trial was clearly better, and all clearly different weights, noise and
        zeros, are better still. Arguments as of `find_problem`.
        """
        limit = math.inf if max_rise is None else max_rise(metric.scale) * metric.scale
        if self.is_directed or not metric.least_rise < -_CLEARLY_BETTER * limit:
            return None
        readings = list[Reading]()

        def is_better(make: MakeValues) -> bool:
            readings.append(metric.evaluate(make()))
            return metric.rise_of(readings[-1]) < metric.least_rise

        is_inverted = all(map(is_better, perturbations))
        if failure := find_failure(metric):
            return failure
        self.is_directed = not is_inverted
        if not is_inverted:
            return None
        before, noisy = metric.baseline.value, readings[0].value
        answers = f"{before:g} for the state, and {noisy:g}, which counts as better, for weights with noise"
        do = (
            "leave higher_is_better out for a loss"
            if metric.higher_is_better
            else "pass higher_is_better=True for a score"
        )
        return EvaluateProblem(f"evaluate returns {answers}", do)

    def _find_reaction(
        self, metric: DegradationMetric, perturbations: Sequence[MakeValues], compute_on_all: ComputeOnAll
    ) -> EvaluateProblem | None:
        """A problem if clearly different weights have the same answer."""

        def differs(make: MakeValues) -> bool:
            return self._differs(metric, metric.evaluate(make()), metric.baseline)

        has_reacted = any(all(compute_on_all(partial(differs, make))) for make in perturbations)
        if failure := find_failure(metric, compute_on_all):
            return failure
        self.has_reacted = has_reacted
        if has_reacted:
            return None
        observation = f"evaluate returns {metric.baseline.value:g} for clearly different weights as well"
        advice = "compute the loss anew at each call, from the model or state that evaluate gets, on enough examples"
        return EvaluateProblem(observation, advice)

    def test_entries(
        self,
        metric: DegradationMetric,
        influence: Influence,
        selection: TensorSelection,
        state: FlatState,
        tensors: GlobalTensors,
        compute_on_all: ComputeOnAll = lambda compute: [compute()],
    ) -> EvaluateProblem | None:
        """Find out at which weights `evaluate` looks: a budget says nothing of the others, which stay exact.

        Called after `find_problem` has found none. Weights from which the answer was computed are not perturbed. The
        others are, entry by entry: by themselves and, if the answer stays the same, together with all others (a weight
        behind a zero has no effect alone). Weights that no evaluation has read are perturbed together. A collective.

        Args:
            influence: of the weights on the answer, as far as it was followed.

        Returns:
            A problem if an evaluation failed.
        """
        names = [name for name in selection.global_names if self._is_due(name)]
        if not names:
            return None
        paths = tensors.reduce(
            {source: tensors.global_names[cast] for cast, source in selection.cast_sources.items()},
            lambda shards: shards[0],
        )
        entries = top_level_entries({name: paths.get(name, name) for name in names}, tensors.shapes)
        test = _EntryTest(metric, selection, state, tensors, compute_on_all, self._differs)
        unread, used = frozenset(names) - influence.read, influence.used.intersection(names)
        known = used | unread
        if unread and test.reacts(unread, unread):  # something computes where nothing is seen: in another thread, say
            used = known = frozenset()
        is_only_one = len(entries) == 1 and len(names) == len(selection.global_names)
        measured = used
        for members in entries.values():
            others = frozenset(members) - known
            if others and (is_only_one or test.reacts(others, unread)):
                measured |= others
        if failure := find_failure(metric, compute_on_all):
            return failure
        news = [name for name in names if self.is_measured.get(name, True) and name not in measured]
        self.is_measured |= {name: name in measured for name in names}
        self.is_tested = True
        if news and tensors.collectives.rank == 0:
            _warn_unmeasured(entries, measured, news)
        return None

    def needs_test(self, names: Iterable[str]) -> bool:
        """True if `test_entries` would evaluate, or use recorded reads."""
        return any(map(self._is_due, names))

    def _is_due(self, name: str) -> bool:
        """True if it is not known that `evaluate` looks at a weight; what it did not look at is asked now and then."""
        if not self.is_tested or name not in self.is_measured:
            return True
        return not self.is_measured[name] and self.num_saves % REPEAT_INTERVAL == 0

    @property
    def noise_text(self) -> str:
        return f"evaluate differs by {self.noise or 0.0:.2%} between calls with the same weights"

    def noise_warning(self, max_rise: float) -> str:
        """The warning about noise if so much may be lost, relative to the answer; "" if there is none."""
        if self.noise is None or self.noise <= NOISE_WARNING_SHARE * max_rise:
            return ""
        share = f"large beside the allowed {max_rise:.2%}, and is subtracted from it"
        return f"{self.noise_text}, which is {share}: {NOISE_ADVICE}"

    def interval_warning(self, rise: float, interval: tuple[float, float], max_rise: float) -> str:
        """The warning, once in a run, about too few examples for a rise; "" if there is none. All is relative."""
        if self._is_interval_warned or rise <= 0 or interval[1] <= MAX_INTERVAL_RATIO * max_rise:
            return ""
        self._is_interval_warned = True
        ends = " to ".join(f"{end:+.2%}" for end in interval)
        option = " (batches=)" if self._sample_text.endswith("batches") else ""
        return (
            f"evaluate measures a rise of {rise:+.2%} on {self._sample_text} (95% confidence: {ends}), "
            f"so on others it may exceed the allowed {max_rise:.2%}. Measure more of them{option}"
        )

    def _given_reading(self, metrics: Mapping[str, float]) -> Reading | None:
        """The answer for the unchanged weights as a metric has it; None if no metric can be trusted at this save."""
        if self.noise != 0 or not self.has_reacted or self.num_saves % REPEAT_INTERVAL == 0:
            return None
        trusted = [value for name, value in metrics.items() if self._matches.get(name, 0) >= _MIN_MATCHES]
        return Reading(trusted[0]) if trusted else None

    def _repeat_evaluation(
        self, metric: DegradationMetric, max_rise: Callable[[float], float] | None, is_followed: Callable[[], bool]
    ) -> list[Reading]:
        """Answers for the unchanged weights: two, where noise is unknown or matters; more, where these differ.

        At a run's first save one is enough where it has the losses of examples, which trials can be compared with.
        """
        readings = [metric.evaluate({})]
        examples = readings[0].examples
        is_first = self.noise is None and self.num_saves == 0
        has_enough = examples is not None and examples.numel() >= _MIN_COMPARED_EXAMPLES
        if not readings[0].is_finite or (is_first and has_enough and is_followed()):
            return readings
        tolerance = 0.0 if max_rise is None else NOISE_WARNING_SHARE * max_rise(scale_of(readings[0].value))
        if self.noise is None or self.num_saves % REPEAT_INTERVAL == 0 or self.noise > tolerance / 4:
            readings.append(metric.evaluate({}))
        if len(readings) == 2 and readings[1].is_finite and not readings[1].equals(readings[0]):
            readings.append(metric.evaluate({}))
            values = [reading.value for reading in readings]
            if self.noise is None and max(values) - min(values) > tolerance * scale_of(values[0]):
                readings += [metric.evaluate({}) for _ in range(_EXTRA_REPEATS)]
        return readings

    def _differs(self, metric: DegradationMetric, reading: Reading, other: Reading) -> bool:
        """True if two readings differ by more than noise; False where one has failed."""
        min_difference = _MIN_NOISE_RATIO * (self.noise or 0.0) * metric.scale
        if reading.failure or other.failure:
            return False
        if not (reading.is_finite and other.is_finite):
            return reading.is_finite != other.is_finite
        if min_difference <= 0:
            return not reading.equals(other)
        return abs(reading.value - other.value) > min_difference


class _EntryTest:
    """Tests whether `evaluate` looks at some weights.

    Args:
        differs: True if two readings differ by more than noise.
    """

    def __init__(
        self,
        metric: DegradationMetric,
        selection: TensorSelection,
        state: FlatState,
        tensors: GlobalTensors,
        compute_on_all: ComputeOnAll,
        differs: Callable[[DegradationMetric, Reading, Reading], bool],
    ) -> None:
        self._metric, self._selection, self._state, self._tensors = metric, selection, state, tensors
        self._compute_on_all, self._differs = compute_on_all, differs
        self._all: Reading | None = None  # of all weights with noise

    def reacts(self, names: Iterable[str], unread: frozenset[str]) -> bool:
        """True if `evaluate` answers something else for other values of weights, on every process.

        Args:
            names: global names.
            unread: names of weights that evaluations have not read: together with others they change nothing either.
        """
        names = frozenset(names)

        def alone() -> bool:
            reading = self._perturb(names, _ENTRY_DEVIATIONS)
            return self._differs(self._metric, reading, self._metric.baseline)

        def at_zero() -> bool:
            return self._differs(self._metric, self._perturb(names, zero=True), self._metric.baseline)

        def among_others() -> bool:
            everything = frozenset(self._selection.global_names)
            self._all = self._all or self._perturb(everything)
            return self._differs(self._metric, self._perturb(everything - names), self._all)

        tests = (alone,) if names <= unread else (alone, at_zero, among_others)
        return any(all(self._compute_on_all(test)) for test in tests)

    def _perturb(self, names: frozenset[str], deviations: float = 1.0, *, zero: bool = False) -> Reading:
        chosen = {n: x for n, x in self._selection.tensors.items() if self._tensors.global_names[n] in names}
        selection = replace(self._selection, tensors=chosen)
        noise, zeros = make_perturbations(selection, self._state, self._tensors.global_names, deviations)
        return self._metric.evaluate(zeros() if zero else noise())


def top_level_entries(paths: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """Names of weights by the top-level entry of the state or the model that they are in: where their paths branch.

    Args:
        paths: the path of each weight by its name.
        shapes: by name; of more than `MAX_ENTRIES` entries the smallest are joined.

    >>> paths = {name: name for name in ("model/net/0.weight", "model/net/2.weight", "model/ema/0.weight")}
    >>> top_level_entries(paths, dict.fromkeys(paths, (2, 2)))
    {'model/net': ['model/net/0.weight', 'model/net/2.weight'], 'model/ema': ['model/ema/0.weight']}
    """
    parts = {name: re.findall(r"[^/.]+[/.]?", path) for name, path in paths.items()}
    modules = {name: split[:-1] or split for name, split in parts.items()}  # without the leaf
    depth, shortest = 0, min(map(len, modules.values()))
    while depth < shortest and len({split[depth] for split in modules.values()}) == 1:
        depth += 1
    entries: dict[str, list[str]] = {}
    for name, split in modules.items():
        entries.setdefault("".join(split[: depth + 1]).rstrip("/."), []).append(name)
    if len(entries) <= MAX_ENTRIES:
        return entries
    by_size = sorted(entries, key=lambda entry: -sum(math.prod(shapes[name]) for name in entries[entry]))
    rest = by_size[MAX_ENTRIES - 1 :]
    joined = {entry: entries[entry] for entry in by_size[: MAX_ENTRIES - 1]}
    return joined | {humanize.names(rest): [name for entry in rest for name in entries[entry]]}


def _warn_unmeasured(entries: Mapping[str, Sequence[str]], measured: Collection[str], news: Collection[str]) -> None:
    """Warn of weights that nothing measures: by their entry, or by name in an entry that is measured."""
    unseen = {entry: members for entry, members in entries.items() if not any(name in measured for name in members)}
    names = humanize.names([*unseen, *sorted({*news}.difference(*unseen.values()))])
    text = f"evaluate does not depend on {names}, so these weights stay exact"
    warn_user(f"{text}: compute the loss from them, too, or save them apart from the model that evaluate gets")


def _are_same_examples(reading: Reading, other: Reading) -> bool:
    """True if the losses of the examples of two readings correlate."""
    if reading.examples is None or other.examples is None or reading.examples.shape != other.examples.shape:
        return False
    pair = torch.stack([reading.examples, other.examples])
    return reading.equals(other) or bool(torch.corrcoef(pair)[0, 1] >= _MIN_CORRELATION)


class Influence(NamedTuple):
    """Influence of weights on an answer, as far as it was followed through torch's operations."""

    read: frozenset[str] = frozenset()  # global names of the weights that an evaluation has read
    used: frozenset[str] = frozenset()  # those from which the answer was computed

    @classmethod
    def from_recorder(
        cls, recorder: InfluenceRecorder, tensors: GlobalTensors, compute_on_all: ComputeOnAll
    ) -> Influence:
        """The influence that was recorded on any process; a collective."""
        parts = tensors.union(recorder.read_names), tensors.union(recorder.influential_names)
        return cls(*(frozenset().union(*each) for each in zip(*compute_on_all(lambda: parts), strict=True)))


def record_influence(selection: TensorSelection, state: FlatState) -> InfluenceRecorder:
    """A recorder of the selected weights, which evaluations read themselves or as a narrower copy."""
    weights = {name: [x] for name, x in selection.tensors.items()}
    for cast, source in selection.cast_sources.items():
        weights[source].append(state.tensors[cast])
    return InfluenceRecorder(weights)


def find_failure(
    metric: DegradationMetric, compute_on_all: ComputeOnAll = lambda compute: [compute()]
) -> EvaluateProblem | None:
    """The first evaluation that failed on any process, as a problem; None if none did."""
    failed = next(filter(None, compute_on_all(lambda: metric.failure)), None)
    return failed and EvaluateProblem(f"the loss could not be measured: {failed.failure}", failed.advice)


def make_perturbations(
    selection: TensorSelection, state: FlatState, global_names: Mapping[str, str], deviations: float = 1.0
) -> tuple[MakeValues, ...]:
    """Makers of clearly different weights, for those selected: with noise of some standard deviations, and zeros.

    Args:
        global_names: of local weights; shards and copies of one global tensor get noise of the same seed.
    """

    def noise() -> TrialValues:
        seeds = {name: zlib.crc32(global_names[name].encode()) for name in selection.tensors}
        return {name: _add_noise(x, seeds[name], deviations) for name, x in selection.tensors.items()}

    def zeros() -> TrialValues:
        return {name: torch.zeros_like(x) for name, x in selection.tensors.items()}

    return lambda: selection.with_casts(noise(), state), lambda: selection.with_casts(zeros(), state)


def _add_noise(x: Tensor, seed: int, deviations: float) -> Tensor:
    """Add uniform noise: as large as the values where all are equal, 1 where they are zero."""
    plain = x.detach().to(torch.float32)
    spread = float(plain.std(correction=0)) if x.numel() else 0.0
    if not 0 < spread < math.inf:
        spread = abs(float(plain.reshape(-1)[0])) if x.numel() else 0.0
    width = math.sqrt(12.0) * spread if 0 < spread < math.inf else 1.0  # that of uniform noise with this deviation
    noise = dither(seed, (1, x.numel()), x.device).reshape(x.shape)
    return (plain + deviations * width * noise).to(x.dtype)
