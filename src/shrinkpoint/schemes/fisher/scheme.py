"""The scheme."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from shrinkpoint import arguments
from shrinkpoint.codec import Origin, Points, Reference
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.record import JSON, Role
from shrinkpoint.schemes import moments as others
from shrinkpoint.schemes.base import Kept
from shrinkpoint.schemes.calibration import Calibration, Problem, disturbed
from shrinkpoint.schemes.fisher.curvature import Curvature, Recorder
from shrinkpoint.schemes.fisher.dial import Answer, ByBudget, ByError, ByRatio, Dial, Learned, Room, finite
from shrinkpoint.schemes.fisher.drafts import Drafts, multiplier_of
from shrinkpoint.schemes.fisher.moments import FEWEST, Steps
from shrinkpoint.schemes.fisher.pool import ALONE, Pool
from shrinkpoint.schemes.fisher.probes import Rise
from shrinkpoint.schemes.picks import Picks
from shrinkpoint.schemes.quality import Quality
from shrinkpoint.schemes.records import Coding
from shrinkpoint.schemes.settled import Settled
from shrinkpoint.schemes.shardedtarget import ShardTarget
from shrinkpoint.schemes.spelling import Spelled, recorder, seeded
from shrinkpoint.schemes.target import Evaluate, ModelTarget, Target, unwrapped
from shrinkpoint.schemes.unmeasured import Unmeasured
from shrinkpoint.state import FlatState

Moments = Literal["coded", "exact", "drop"]
MOMENTS = (Role.MOMENT1, Role.MOMENT2)
MAX_ERROR = 2.0
"""Standard deviations of a tensor: more than that leaves no more than signs does."""
BUDGET = 1e-3
"""Nats."""


class Fisher(Spelled, Coding):
    """The fewest bits that keep a stated rise of the loss, or the least rise for a stated number of bits.

    Weights go on a uniform grid whose steps follow, by row and by column, what the optimizer knows of the loss: Adam's
    second moment is, up to a factor, its curvature. Codes are coded under the points of the checkpoint before. After a
    restore, dither keeps what training has done since. Moments go on grids of their own. docs/fisher.md.

    One instance serves one training run: it remembers its steps and what it has learned.

    Args:
        budget: by how much a checkpoint may raise the loss that `evaluate` measures, in per cent of it: "1%"; at most
            "100%".
        nats: instead of that: the same in the loss's own unit. 0.001 where nothing is asked.
        ratio: instead of both: how many times smaller the whole state shall be; above 1.
        relative_error: instead of all: the root mean square of the error, in standard deviations of a tensor (.3, or
            "30%"; at most 2): the geometric mean over all weights, of a keyframe; weights held at their points may add
            a fifth. Nothing need be known of the loss; what is known distributes it.
        evaluate: called with what is being saved (a manager's `model`; else the state); returns a loss or a score, or a
            1-D tensor of each example's. Then the measured rise decides, and the prediction saves trials. As with every
            scheme that measures, it must look at what it is given, and give the same answer for the same weights.
        higher_is_better: `evaluate` returns a score, and `budget` and `nats` are of that.
        terms: how many loss terms (tokens, images) a batch averages: with it the prediction is one of nats, and
            without `evaluate` it decides. Where there is neither, steps are one standard deviation.
        gradients: a recorder of squared gradients, for optimizers that have none.
        moments: of the optimizer: "coded" on grids, "exact" bit for bit, or "drop": zero after a restore.
        seed: of the dither.

    Raises:
        PolicyError: an argument that makes no sense, or two ways to say how much may be lost.
    """

    id: ClassVar[str] = "fisher"

    def __init__(
        self, *, budget: str | None = None, nats: float | None = None, ratio: float | None = None,
        relative_error: float | str | None = None, evaluate: Evaluate | None = None, higher_is_better: bool = False,
        terms: float | None = None, gradients: Recorder | None = None, moments: Moments = "coded", seed: int = 0,
    ) -> None:  # fmt: skip
        self._evaluate: Evaluate | None = arguments.function_or_none("evaluate", evaluate)
        self._dial = _dial(budget, nats, ratio, relative_error, measured=evaluate is not None)
        self._higher = arguments.flag("higher_is_better", higher_is_better)
        self._recorder: Recorder | None = recorder("gradients", gradients, "square")
        self._moments: Moments = arguments.choice("moments", moments, get_args(Moments))
        self._terms = None if terms is None else arguments.number("terms", terms, do="leave it out")
        self._seed, self._generation, self._saves = seeded(seed), 0, 0
        self._learned = Learned(terms=self._terms)
        self._probed: dict[str, float] = {}
        self._calibration, self._unmeasured = Calibration(), Unmeasured()

    @property
    def arguments(self) -> dict[str, object]:
        """See `Spelled`."""
        dial = self._dial
        said = dial.settings
        if isinstance(dial, ByBudget) and dial.share is None:
            said = {"nats": dial.budget}
        return {
            **said, "evaluate": self._evaluate, "higher_is_better": self._higher, "terms": self._terms,
            "gradients": self._recorder, "moments": self._moments, "seed": self._seed,
        }  # fmt: skip

    # what a manager calls

    @property
    def evaluate(self) -> Evaluate | None:
        return self._evaluate

    @property
    def measures(self) -> bool:
        """Whether it asks `evaluate` before it decides."""
        return self._evaluate is not None

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes."""
        return True

    def together(self, compute: Callable[[], None]) -> None:
        """Do something where one process leads and others follow; here there is one."""
        compute()

    def resume(self, loss: JSON, generation: int = 0) -> None:
        """Go on from a checkpoint: with its steps and what was known then, and another dither; see `Resuming`."""
        self._generation = generation
        self._learned, self._probed, self._calibration = Learned(terms=self._terms), {}, Calibration()
        if not isinstance(loss, dict) or loss.get("scheme") != self.id:
            return
        size, terms = loss.get("size"), loss.get("terms")
        if type(size) is int and abs(size) < 1 << 10:
            self._learned.size = size
        if isinstance(terms, float) and 0 < terms < math.inf:
            self._learned.terms = terms
        found = loss.get("probed")
        if isinstance(found, dict) and all(isinstance(x, float) and 0 < x < math.inf for x in found.values()):
            self._probed = dict(found)

    @torch.no_grad()
    def settle(
        self, flat: FlatState, reference: Reference | None, target: Target | None = None, pool: Pool = ALONE
    ) -> Settled:
        """Decide for this state.

        Args:
            reference: what is held of the checkpoint before; None: nothing.
            target: what to measure on; None: on copies of the state.
            pool: what there is of these tensors on other ranks, all of which decide at the same time.

        Raises:
            PolicyError: `evaluate` raised, or returned no number.
        """
        began = time.perf_counter()
        alive = None if target is None else target.alive
        self._agree(pool)
        picks = pool.picks(flat, reference, alive)
        picks.warn()
        kept = pool.unmoved([*picks.tensors], flat, reference)
        picks, known = picks.without(kept), reference
        if reference is not None and not reference.base:
            reference = None
        values: dict[str, Tensor] = {}
        with self._measuring(flat, picks, target, pool) as (quality, problem):
            if problem is not None:
                _warn(f"{problem.found}, so this checkpoint is exact, weights and moments: {problem.do}")
                self._learned.size, self._saves = None, self._saves + 1
                record = self._record(Answer(None), picks, quality, began) | {"exact": problem.found}
                held: dict[str, Origin] = {name: one.cpu() for name, one in kept.items()}
                return Settled(self.id, held, {}, "exact", self.coders, record, least=_least(pool))
            further = self._of_moments(flat, known, values, pool)
            answer = self._of_weights(flat, picks, reference, target, kept | further, pool, quality)
        if answer.left_out:
            _warn(f"weights that no points of these steps reach are kept as they are: {', '.join(answer.left_out)}")
        symbols: dict[str, Origin] = (
            {} if answer.draft is None else {n: p.cpu() for n, p in answer.draft.points.items()}
        )
        symbols |= {name: one.cpu() for name, one in (kept | further).items()}
        self._saves += 1
        loss = self._record(answer, picks, quality, began)
        loss["chosen"] = self._chosen(any(pool.total(len(symbols))))
        if loss["chosen"] is not None and self._evaluate is None:
            self._unmeasured.tell(self, quiet=not pool.leads)
        optimizer: others.Mode = "reset" if self._moments == "drop" else "exact"
        if answer.draft is not None:
            values |= answer.draft.values
        values = {name: x for name, x in values.items() if x.device.type == "cpu"}
        return Settled(self.id, symbols, picks.casts, optimizer, self.coders, loss, values, least=_least(pool))

    def _record(self, answer: Answer, picks: Picks, quality: Quality | None, began: float) -> dict[str, Any]:
        """What the manifest says of what was lost, but for what was chosen."""
        idle = quality is None and self._evaluate is not None  # no weight has moved: there is nothing to measure
        record: dict[str, Any] = {
            "scheme": self.id, **self._dial.settings, "optimizer": self._moments, "tried": answer.tried,
            "terms": self._learned.terms, "size": self._learned.size, "probed": self._probed or None,
            "left_out": [*picks.refused, *answer.left_out], "chosen": None,
            "rise": 0.0 if idle else finite(answer.rise),
            "measured": self._evaluate is not None,
        }  # fmt: skip
        if quality is not None:
            record |= {"quality": finite(quality.base.value), "noise": self._calibration.noise}
        if answer.interval is not None:
            record["interval"] = [finite(end) for end in answer.interval]
        return record | {"seconds": round(time.perf_counter() - began, 3)}

    def _agree(self, pool: Pool) -> None:
        """What processes do not remember alike is forgotten."""
        learned = self._learned
        self._generation = pool.largest(self._generation) or 0
        self._saves = pool.largest(self._saves) or 0
        learned.size, learned.terms = pool.agreed(learned.size), pool.agreed(learned.terms) or self._terms
        self._probed = pool.agreed(self._probed) or {}
        self._calibration.learn(pool.agreed(self._calibration.known))

    def _chosen(self, lossy: bool) -> JSON:
        """What every manifest says of a choice; None where nothing was lost."""
        if not lossy and self._moments != "drop":
            return None
        size = self._learned.size
        return {"step_in_deviations": None if size is None else round(multiplier_of(size), 4), "moments": self._moments}

    # what a store calls

    def quantize(self, flat: FlatState, reference: Reference | None) -> Kept:
        """Decide and quantize; see `schemes.Scheme`."""
        return self.settle(flat, reference).quantize(flat, reference)

    def _of_moments(
        self, flat: FlatState, reference: Reference | None, values: dict[str, Tensor], pool: Pool
    ) -> dict[str, Origin]:
        """Fills `values` with those of second moments."""
        if self._moments != "coded":
            return {}
        updates = [facts.step for facts in flat.optim.values() if facts.step is not None]
        number = pool.largest(max(updates, default=None))
        if number is None:
            number = self._saves + (self._generation << 20)
        kept = pool.unmoved([n for n, info in flat.infos.items() if info.role in MOMENTS], flat, reference)
        kept = {name: one for name, one in kept.items() if isinstance(one, Points)}
        values.update((name, flat.tensors[name]) for name in kept if flat.infos[name].role is Role.MOMENT2)
        return kept | dict(pool.moments(flat, number, self._seed, Steps(), values, kept))

    def _of_weights(
        self, flat: FlatState, picks: Picks, reference: Reference | None, target: Target | None,
        further: Mapping[str, Origin], pool: Pool, quality: Quality | None,
    ) -> Answer:  # fmt: skip
        if not pool.count(picks.tensors):
            return Answer(None)
        recorded = self._recorded(target)
        for name, master in picks.casts.items():
            if name in recorded:
                recorded.setdefault(master, recorded[name])
        known = pool.curvatures(picks.tensors, replace(flat, optim=picks.handed_on(flat)), recorded)
        if reference is None:
            self._learned.size = None
        size = self._learned.size
        kinds = {} if target is None else target.kinds
        change = None if quality is None else lambda values: quality.change(picks.replaced(values, flat))
        if change is not None and pool.usual(known, picks.tensors) <= 0:
            known = self._by_probes(picks.tensors, lambda values: change(values).rise, pool) or known
        drafts = Drafts(picks.tensors, known, reference, size, self._generation, self._seed, kinds, pool)
        codes = {name: one.codes for name, one in further.items() if not _is_held(name, one, reference)}
        room = self._room(flat, {*drafts.weights, *picks.casts, *further}, codes, pool)
        dial = self._dial
        if quality is not None and isinstance(dial, ByBudget):
            allowed, noise = dial.relative(quality.scale), (self._calibration.noise or 0.0) * quality.scale
            if warning := self._calibration.warning(allowed):
                _warn(warning)
            dial = dial.of(quality.scale, noise)
        answer = dial.turn(drafts, self._learned, None if change is None else lambda draft: change(draft.values), room)
        if answer.interval is not None and quality is not None and isinstance(dial, ByBudget):
            scale = quality.scale
            ends = answer.interval[0] / scale, answer.interval[1] / scale
            if doubt := self._calibration.doubt((answer.rise or 0.0) / scale, ends, dial.relative(scale)):
                _warn(doubt)
        if answer.draft is None:
            _warn(f"no steps keep the loss within {self}: this checkpoint's weights are exact")
            self._learned.size = None
        else:
            self._learned.size = answer.draft.size
        return answer

    def _room(self, flat: FlatState, coded: set[str], codes: Mapping[str, Tensor], pool: Pool) -> Room:
        """What a whole state has beside the weights: moments, and what stays exact. Only a ratio asks for it.

        Args:
            coded: names of all that does not stay exact.
            codes: of the moments; what a reader has already costs nothing.
        """
        if not isinstance(self._dial, ByRatio):
            return Room(math.inf, 0.0, first=False)
        drop = self._moments == "drop"
        coded = coded | {name for name, info in flat.infos.items() if drop and info.role in MOMENTS}
        exact = 8 * sum(info.nbytes for name, info in flat.infos.items() if name not in coded and pool.counts(name))
        raw = 8 * sum(info.nbytes for name, info in flat.infos.items() if pool.counts(name))
        both = pool.total(exact, raw)
        return Room(both[1], both[0] + pool.bits(codes), first=self._saves == 0)

    def _by_probes(self, weights: Mapping[str, Tensor], rise: Rise, pool: Pool) -> dict[str, Curvature]:
        """What the loss says of each kind of weights, asked once in a run; nothing where it minds none of them."""
        if not self._probed:
            self._probed = pool.probe(weights, rise)
            if self._learned.terms is None:
                self._learned.terms = 1.0
        return pool.probed(weights, self._probed) if self._probed else {}

    @contextmanager
    def _measuring(
        self, flat: FlatState, picks: Picks, target: Target | None, pool: Pool
    ) -> Iterator[tuple[Quality | None, Problem | None]]:
        """How to measure what other values of some weights do, and why that is of no use, if it is not.

        None where nothing was asked for, or there is nothing to measure.
        """
        if self._evaluate is None or not pool.count(picks.tensors):
            yield None, None
            return
        target = Target(flat, self._evaluate) if target is None else target
        with target:
            quality = Quality(target.measure, higher=self._higher)
            allowed = self._dial.relative if isinstance(self._dial, ByBudget) else None
            yield quality, self._calibration.problem(quality, disturbed(picks, flat, pool.title), allowed)

    def _recorded(self, target: Target | None) -> dict[str, Tensor]:
        """What was recorded, by the names of the state."""
        if self._recorder is None or not isinstance(target, ModelTarget | ShardTarget):
            return {}
        squares = self._recorder.square  # a copy, made by every look at it
        if not squares and self._recorder.ready:
            do = "make the recorder with squares=True"
            raise PolicyError("gradients", found="a recorder without squares", expected="one with squares", do=do)
        if isinstance(target, ShardTarget):
            return target.recorded(squares)
        recorded = {unwrapped(name): square for name, square in squares.items()}
        return {target.names[name]: square for name, square in recorded.items() if name in target.names}


def _least(pool: Pool) -> tuple[int, int] | None:
    return (FEWEST, 1) if pool is ALONE else None


def _is_held(name: str, origin: Origin, reference: Reference | None) -> bool:
    return reference is not None and reference.symbols.get(name) is origin


def _dial(
    budget: str | None, nats: float | None, ratio: float | None, relative_error: float | str | None, *, measured: bool
) -> Dial:
    asked = {"budget": budget, "nats": nats, "ratio": ratio, "relative_error": relative_error}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        found = " and ".join(given)
        raise PolicyError("Fisher", found=found, expected="one of them", do="say in one way how much may be lost")
    if budget is not None:
        return ByBudget(BUDGET, 100 * _share(budget, measured=measured))
    if ratio is not None:
        return ByRatio(arguments.number("ratio", ratio, least=1.0, do="say how many times smaller the state shall be"))
    if relative_error is not None:
        return ByError(arguments.share("relative_error", relative_error, most=MAX_ERROR))
    return ByBudget(BUDGET if nats is None else arguments.number("nats", nats))


def _share(budget: Any, *, measured: bool) -> float:
    """Of the loss, as a fraction."""
    if not isinstance(budget, str):
        expected, do = 'a share of the loss such as "1%"', "write nats= for a rise in the loss's own unit"
        raise arguments.wrong("budget", budget, expected, do)
    if arguments.percent(budget) is None:
        raise arguments.wrong("budget", budget, 'a share of the loss such as "1%"', "write a number and %")
    share = arguments.share("budget", budget)
    if not measured:
        found, do = f"{budget!r} of a loss that nobody measures", "pass evaluate=, or nats= in the loss's own unit"
        raise PolicyError("budget", found=found, expected="evaluate=", do=do)
    return share


def _warn(text: str) -> None:
    warnings.warn(text, LossWarning, stacklevel=4)
