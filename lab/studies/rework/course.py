"""One course of the rework study: an undisturbed run, what each system's checkpoints of it hold, and the failures.

Saving does not change a run, so one recorded run serves all systems: its states are given to `sp.Store` with each
scheme, and what the store then loads is where a failure throws the run back to.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import shrinkpoint as sp
from lab.studies.rework.bound import Bound, flat, optimum
from lab.studies.rework.trainings import Small, Training
from lab.studies.workloads import fingerprint
from shrinkpoint.container import FileReader
from shrinkpoint.errors import LossWarning
from shrinkpoint.report.files import TensorRow, file_report
from shrinkpoint.schemes.lossless import Lossless
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL
from shrinkpoint.storage import MemoryStorage, Storage

State = dict[str, Any]
LOST = (0.25, 0.5, 0.75)
SPARSE = 8
"""Intervals between two checkpoints of everything, for partial failures; SCAR writes an eighth every interval."""
PATIENCE = 12
"""Intervals after which a run that has not regained its level is given up."""
NEAR, WINDOW = 0.05, 11
"""How close the bytes of a partial scheme come to those that they are to equal, and on how many checkpoints."""
TIMED = 7
"""Checkpoints, the first of them a keyframe, on which seconds are measured."""

FIXED: dict[str, Callable[[], Any]] = {
    "lossless": Lossless,
    **{f"lc paper x={x}": partial(sp.LCCheckpoint, bits=x, paper=True) for x in (1, 2, 3, 4)},
    **{f"lc x={x}": partial(sp.LCCheckpoint, bits=x) for x in (1, 2, 3, 4)},
    "scar 1/8": lambda: sp.SCAR(),
}
FITTED: dict[str, Callable[[float], Any]] = {
    "scar largest": lambda fraction: sp.SCAR(fraction=fraction),
    "scar round robin": lambda fraction: sp.SCAR(fraction=fraction, order="round robin"),
    "scar random": lambda fraction: sp.SCAR(fraction=fraction, order="random"),
    "topn": lambda fraction: sp.TOPN(fraction=fraction),
}
"""By a fraction that makes their bytes those of `BUDGET`."""
BUDGET = "lc x=3"


class Recorded:
    """An undisturbed run: its level at every look, and its state at every checkpoint and failure.

    Attributes:
        failures: iterations, one drawn at random from each of four parts of the run; looks fall on them.
        levels: by iteration.
        least: the lowest level so far, by iteration.
        bound: SCAR's, with the constants of this run.
    """

    def __init__(self, small: Small, seed: int, optimizer: str) -> None:
        self.small, self.seed, self.optimizer = small, seed, optimizer
        self.failures = _failures(small, seed)
        self.states: dict[int, State] = {}
        self.levels: dict[int, float] = {}
        self.seconds = self.cpu = 0.0
        self._train()
        self.bound = self._bound()
        best, self.least = float("inf"), {}
        for step, level in self.levels.items():
            best = self.least[step] = min(best, level)

    def _train(self) -> None:
        small, run = self.small, self.training()
        for step in range(0, small.steps + 1, small.every):
            self.levels[step] = run.level()
            if step % small.interval == 0 or step in self.failures:
                self.states[step] = run.state()
            if step < small.steps:
                wall, cpu = time.perf_counter(), time.process_time()
                run.advance(small.every)
                self.seconds += time.perf_counter() - wall
                self.cpu += time.process_time() - cpu

    def _bound(self) -> Bound:
        """The constants of SCAR's bound, from the checkpoints and from a run that goes on behind the last one."""
        run = self.training()
        run.load(self.states[self.small.steps], self.small.steps)
        best = optimum(run, self.small.steps)
        far = [float((flat(self.states[step]["model"]) - best).norm()) for step in self.checkpoints]
        return Bound.fit(self.checkpoints, far)

    def training(self) -> Training:
        return self.small.start(self.seed, self.optimizer)

    @property
    def checkpoints(self) -> range:
        return range(0, self.small.steps + 1, self.small.interval)

    def before(self, failure: int, intervals: int = 1) -> int:
        """The last checkpoint at a failure, where one is made every so many intervals."""
        spacing = intervals * self.small.interval
        return failure // spacing * spacing

    def wait(self, failure: int) -> int | None:
        """Iterations until the undisturbed run itself is at its lowest level again: what is noise in all the rest."""
        regained = (step for step in self.levels if step >= failure and self.levels[step] <= self.least[failure])
        return next((step - failure for step in regained), None)

    @property
    def target(self) -> tuple[int, float]:
        """The lowest level of the run, and the iteration at which it was reached."""
        level = self.least[self.small.steps]
        return next(step for step, one in self.levels.items() if one <= level), level


def _failures(small: Small, seed: int) -> list[int]:
    chance = torch.Generator().manual_seed(911 * seed + 17)
    ends = [0.28, 0.45, 0.62, 0.79, 0.95]
    out = []
    for start, end in pairwise(ends):
        looks = range(int(start * small.steps) // small.every + 1, int(end * small.steps) // small.every + 1)
        out.append(small.every * looks[int(torch.randint(len(looks), (1,), generator=chance))])
    return out


class Chain:
    """Checkpoints of a recorded run by one scheme: the first a keyframe, all others deltas.

    Args:
        where: in memory, unless seconds are to be measured.
        steps: the checkpoints; None: all.
    """

    def __init__(
        self, recorded: Recorded, scheme: Any, where: Storage | Path | None = None, steps: Sequence[int] | None = None
    ) -> None:
        self._where = where or MemoryStorage()
        self._loaded: dict[int, State] = {}
        self.manager = sp.CheckpointManager(self._where, threads=1)
        self.saves: list[dict[str, Any]] = []
        with sp.Store(self._where, keyframe_every=None, threads=1) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore", LossWarning)
            for step in steps or recorded.checkpoints:
                wall, cpu = time.perf_counter(), time.process_time()
                report = store.save(step, recorded.states[step], scheme=scheme)
                spent = (time.perf_counter() - wall, time.process_time() - cpu)
                weights = report.roles["parameter"]
                self.saves.append(
                    {
                        "step": step,
                        "keyframe": report.keyframe,
                        "weights raw": weights.raw,
                        "weights stored": weights.stored,
                        "raw": report.raw_bytes,
                        "stored": report.stored_bytes,
                        "seconds": spent[0],
                        "cpu": spent[1],
                    }
                )

    @property
    def bytes(self) -> int:
        """Of the weights, keyframes apart."""
        return sum(save["weights stored"] for save in self.saves if not save["keyframe"])

    def load(self, step: int) -> State:
        """What a reader gets."""
        if step not in self._loaded:
            self._loaded[step] = sp.Store(self._where, threads=1).load(step, keep=False)
        return self._loaded[step]


def fraction_for(recorded: Recorded, make: Callable[[float], Any]) -> float:
    """The fraction whose checkpoints take the bytes of `BUDGET`, on some checkpoints from the middle of the run."""
    middle = recorded.checkpoints[len(recorded.checkpoints) // 3 :][:WINDOW]
    wanted = Chain(recorded, FIXED[BUDGET](), steps=middle).bytes
    low, high, fraction, best = 1e-4, 1.0, 0.05, (float("inf"), 0.0)
    for _ in range(8):
        found = Chain(recorded, make(fraction), steps=middle).bytes
        best = min(best, (abs(found / wanted - 1), fraction))
        if best[0] < NEAR:
            break
        low, high = (fraction, high) if found < wanted else (low, fraction)
        guess = fraction * wanted / found
        fraction = guess if low < guess < high else (low * high) ** 0.5
    return best[1]


def timed(recorded: Recorded, scheme: Any) -> dict[str, float]:
    """Of some durable deltas in a directory: median seconds, wall and CPU, and the bytes of what was quantized."""
    middle = recorded.checkpoints[len(recorded.checkpoints) // 3 :][:TIMED]
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-rework-") as folder:
        saves = Chain(recorded, scheme, Path(folder), middle).saves[1:]
        with sp.Store(folder) as store:
            rows = [row for step in middle[1:] for row in _rows(store, step) if not is_exact(row.shape)]
    sums = {f"quantized {key}": sum(getattr(row, f"{key}_bytes") for row in rows) for key in ("raw", "stored")}
    return {**sums, **{key: median(save[key] for save in saves) for key in ("seconds", "cpu")}}


def _rows(store: sp.Store, step: int) -> list[TensorRow]:
    """The weights of a checkpoint, and what each cost."""
    one = store.manifest(step)
    with store.storage.open(one.key(one.payloads[0].name)) as source:
        return [row for row in file_report(FileReader(source, ""), "").tensors if row.role == "parameter"]


class Play:
    """A recorded run, thrown back."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self.small = recorded, recorded.small
        self.run = recorded.training()
        self._known: dict[tuple[Any, ...], int | None] = {}

    def regain(self, state: State, failure: int, level: float, patience: int) -> int | None:
        """Iterations from a failure on until the level is reached again; None: not within `patience`.

        The run goes on with the batch of the failure's number. Equal weights are run once.
        """
        self.run.load(state, failure)
        return self._go_on(failure, level, patience)

    def _go_on(self, failure: int, level: float, patience: int) -> int | None:
        """The same from the run as it is."""
        step = float(self.run.optimizer.state_dict()["state"].get(0, {}).get("step", 0))
        key = (fingerprint(self.run.model), step, failure, level)
        if key not in self._known:
            self._known[key] = self._regained(failure, level, patience)
        return self._known[key]

    def _regained(self, failure: int, level: float, patience: int) -> int | None:
        while self.run.level() > level:
            if self.run.step - failure >= patience:
                return None
            self.run.advance(self.small.every)
        return self.run.step - failure

    def full(self, chain: Chain) -> Iterator[dict[str, Any]]:
        """Every failure throws everything back to the last checkpoint."""
        recorded = self.recorded
        reached, target = recorded.target
        for failure in recorded.failures:
            last = recorded.before(failure)
            state = chain.load(last)
            patience = PATIENCE * self.small.interval
            found = {"failure": failure, "age": failure - last, "error": self._error(state, last)}
            found["rework"] = self.regain(state, failure, recorded.least[failure], patience)
            moved = flat(state["model"]) - flat(recorded.states[failure]["model"])
            found["bound"] = recorded.bound.iterations(failure, float(moved.norm()))
            if failure == recorded.failures[-1]:
                taken = self.regain(state, failure, target, self.small.steps - failure + patience)
                found["to target"] = None if taken is None else failure + taken - reached
            yield found

    def _error(self, state: State, step: int) -> float:
        """How far the weights are from what they were, in units of one interval's move."""
        known, before = (self.recorded.states[at]["model"] for at in (step, step - self.small.interval))
        far = sum(float((state["model"][name] - x).square().sum()) for name, x in known.items())
        moved = sum(float((before[name] - x).square().sum()) for name, x in known.items())
        return float((far / moved) ** 0.5)

    def partial(self, arms: Mapping[str, tuple[Chain, int]]) -> Iterator[dict[str, Any]]:
        """Every failure loses a random part of the values; either these or all come from the last checkpoint.

        Args:
            arms: a chain, and how many of its intervals apart checkpoints are taken to be.
        """
        for failure in self.recorded.failures:
            for arm, (chain, intervals) in arms.items():
                last = self.recorded.before(failure, intervals)
                for lost in (*LOST, 1.0):
                    if lost < 1:
                        self._lose(chain, last, failure, lost)
                    else:
                        self.run.load(chain.load(last), failure)
                    rework = self._go_on(failure, self.recorded.least[failure], PATIENCE * self.small.interval)
                    yield {"arm": arm, "failure": failure, "age": failure - last, "lost": lost, "rework": rework}

    def _lose(self, chain: Chain, last: int, failure: int, lost: float) -> None:
        """Put the run at a failure, and bring what that took back from a checkpoint."""
        now, run = self.recorded.states[failure], self.run
        run.load(now, failure)
        shapes = {name: x.shape for name, x in now["model"].items()}
        only = lost_values(shapes, lost, 1000 * self.recorded.seed + failure)
        chain.manager.restore(last, model=run.model, optimizer=run.optimizer, only=only)


def lost_values(shapes: Mapping[str, Sequence[int]], share: float, seed: int) -> dict[str, Tensor]:
    """Which values a partial failure takes: a random share of all, by name."""
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.rand(tuple(shape), generator=chance) < share for name, shape in shapes.items()}


def is_exact(shape: Sequence[int]) -> bool:
    """Whether no lossy scheme quantizes a weight of this shape: one axis, or below 4096 values."""
    return len(shape) < 2 or prod(shape) < MIN_WEIGHT_NUMEL


def exact_share(state: State) -> dict[str, float]:
    shapes = [tuple(x.shape) for x in state["model"].values()]
    total = sum(map(prod, shapes))
    return {"parameters": total, "exact share": sum(prod(shape) for shape in shapes if is_exact(shape)) / total}


def play(small: Small, optimizer: str, seed: int) -> dict[str, Any]:
    """A whole course."""
    began = time.perf_counter()
    recorded = Recorded(small, seed, optimizer)
    fractions = {system: fraction_for(recorded, make) for system, make in FITTED.items() if system != "topn"}
    fractions["topn"] = fractions["scar largest"]
    makers = FIXED | {system: partial(FITTED[system], fraction) for system, fraction in fractions.items()}
    player = Play(recorded)
    chains = {system: Chain(recorded, make()) for system, make in makers.items()}
    systems = {
        system: {
            "fraction": fractions.get(system),
            "saves": chain.saves,
            "failures": list(player.full(chain)) if system != "scar 1/8" else [],
            "save": timed(recorded, makers[system]()),
        }
        for system, chain in chains.items()
    }
    arms = {"full checkpoints": (chains["lossless"], SPARSE)} | {arm: (chains[arm], 1) for arm in ("scar 1/8", BUDGET)}
    found = list(player.partial(arms))
    reached, target = recorded.target
    return {
        "systems": systems,
        "partial": found,
        "levels": [[step, level] for step, level in recorded.levels.items()],
        "target": {"level": target, "reached": reached},
        "bound": asdict(recorded.bound),
        "waits": [recorded.wait(failure) for failure in recorded.failures],
        "iteration": {"seconds": recorded.seconds / small.steps, "cpu": recorded.cpu / small.steps},
        "facts": {
            **small.facts,
            **exact_share(recorded.states[0]),
            "steps": small.steps,
            "interval": small.interval,
            "every": small.every,
            "rate": small.rates[optimizer],
            "patience": PATIENCE * small.interval,
        },
        "seconds": time.perf_counter() - began,
    }
