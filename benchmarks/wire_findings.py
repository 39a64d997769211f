"""What the runs of `wire.py` say of the paper's findings: rows, their noise, and verdicts computed from both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from wire_grid import FEEDBACKS, PLAIN, TOPS, Pair, aq, shown, topped

Record = Mapping[str, Any]
SEVERE = 0.1
"""Harm is severe where more than this part of what training brings is lost."""
ENOUGH = (4.01, 8.02)
"""Bits a value forward and backward: 8 and 4 times fewer bytes, but for the two numbers of a range."""
CLASSES = {"to 2.75": 2.75, "to 3.75": 3.75, "to 4.75": 4.75, "to 6.5": 6.5}
"""Bits a value, mean of both directions."""


@dataclass
class Row:
    """All seeds of one pair of operators.

    Attributes:
        warmup: share of the steps before compression begins.
        on, off: quality with compression on and off at the end; None: training was lost to values not finite.
        bits: sent for a value, of the whole run.
        late: the same, of the last epoch.
        error: relative, of activations, mean over the boundaries.
        seconds: of the CPU, for the training; the median.
        size: mean of both directions' bits.
    """

    pair: Pair
    seeds: list[int] = field(default_factory=list)
    on: list[float | None] = field(default_factory=list)
    off: list[float | None] = field(default_factory=list)
    bits: dict[str, float] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    seconds: float = 0.0
    warmup: float = 0.0

    def mean(self, way: str) -> float:
        values = self.on if way == "on" else self.off
        return fmean(value for value in values if value is not None)

    @property
    def finite(self) -> bool:
        return None not in self.on and None not in self.off

    @property
    def size(self) -> float:
        return fmean(self.bits.values())

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "pair": self.name}

    @property
    def name(self) -> str:
        return shown(self.pair, self.warmup)


class Study:
    """The rows of one task; those with a warm-up are apart."""

    def __init__(self, task: str, records: Sequence[Record]) -> None:
        self.task = task
        self.rows = {pair: row for (pair, warmup), row in _rows(records).items() if not warmup}
        self.warm = {at: row for at, row in _rows(records).items() if at[1]}
        self.higher = task != "text"
        self.quality = "top-1 %" if self.higher else "loss, nats a byte"
        self.start = fmean(record["start"] for record in records)
        base = self.rows.get(PLAIN)
        values = [value for value in base.on if value is not None] if base else []
        self.noise = stdev(values) if len(values) > 1 else 0.0

    def all_rows(self) -> list[Row]:
        return [*self.rows.values(), *self.warm.values()]

    def lost(self, row: Row) -> bool:
        """Not finite, or no better than before the training whether compression is on or off."""
        return not row.finite or max(self.gain(row, "on"), self.gain(row, "off")) <= 0

    def gain(self, row: Row, way: str) -> float:
        """What training brought, above zero is better."""
        return (row.mean(way) - self.start) * (1 if self.higher else -1) if row.finite else float("-inf")

    def away(self, row: Row, way: str = "on") -> float:
        """Quality less that of the uncompressed runs of the same seeds."""
        base = self.rows.get(PLAIN)
        if base is None or not row.finite:
            return float("nan")
        known = dict(zip(base.seeds, base.on, strict=True))
        paired = [known.get(seed) or base.mean("on") for seed in row.seeds]
        return row.mean(way) - fmean(paired)

    def apart(self, row: Row, way: str) -> str:
        """Quality less that of the uncompressed run of the same seed, seed by seed."""
        base, digits = self.rows[PLAIN], 1 if self.higher else 4
        known = dict(zip(base.seeds, base.on, strict=True))
        values = row.on if way == "on" else row.off
        pairs = [(value, known.get(seed)) for seed, value in zip(row.seeds, values, strict=True)]
        return " ".join(f"{a - b:+.{digits}f}" for a, b in pairs if a is not None and b is not None)

    def harm(self, row: Row, way: str = "on") -> float:
        """The part of what training brings that is lost."""
        base = self.gain(self.rows[PLAIN], "on")
        return 1 - self.gain(row, way) / base if row.finite else float("inf")

    def better(self, a: Row, b: Row, ways: tuple[str, str] = ("on", "on")) -> float:
        """How much better a is than b, in standard errors of the difference; each `on` or `off`.

        A row's deviation over seeds counts as at least that of the uncompressed runs, and with one seed as that.
        """
        if not a.finite or not b.finite:
            return 0.0 if a.finite == b.finite else float("inf" if a.finite else "-inf")
        error = sum(self._deviation(row, way) ** 2 / len(row.on) for row, way in zip((a, b), ways, strict=True)) ** 0.5
        difference = self.gain(a, ways[0]) - self.gain(b, ways[1])
        return difference / error if error else 0.0

    def worse(self, a: Row, b: Row, ways: tuple[str, str] = ("on", "on")) -> bool:
        return self.better(a, b, ways) < -2

    def classes(self) -> dict[str, list[Row]]:
        """Rows that compress both directions, by the bits of a value; the best first."""
        out: dict[str, list[Row]] = {}
        both = [row for row in self.rows.values() if all(row.pair) and not self.lost(row)]
        for row in sorted(both, key=lambda row: -self.gain(row, "on")):
            name = next((name for name, most in CLASSES.items() if row.size <= most), None)
            if name is not None:
                out.setdefault(name, []).append(row)
        return {name: out[name] for name in CLASSES if name in out}

    def _deviation(self, row: Row, way: str) -> float:
        values = [value for value in (row.on if way == "on" else row.off) if value is not None]
        return max(stdev(values) if len(values) > 1 else 0.0, self.noise)

    def line(self, row: Row, ways: Sequence[str] = ("on", "off")) -> str:
        digits = 1 if self.higher else 4
        return f"{row.name}: " + ", ".join(
            f"{way} {row.mean(way):.{digits}f}" if row.finite else f"{way} diverged" for way in ways
        )


def _rows(records: Sequence[Record]) -> dict[tuple[Pair, float], Row]:
    """Rows by operators and warm-up."""
    groups: dict[tuple[Pair, float], list[Record]] = {}
    for record in records:
        settings = record["settings"]
        at = (settings["forward"], settings["backward"]), settings.get("warmup", 0.0)
        groups.setdefault(at, []).append(record)
    return {at: _row(*at, sorted(found, key=lambda one: one["settings"]["seed"])) for at, found in groups.items()}


def _row(pair: Pair, warmup: float, found: Sequence[Record]) -> Row:
    ways = ("forward", "backward")
    errors = [
        link["relative_error"]
        for record in found
        for name, link in record["links"].items()
        if name.endswith("forward") and link["relative_error"] is not None
    ]
    return Row(
        pair,
        [record["settings"]["seed"] for record in found],
        [record["on"] for record in found],
        [record["off"] for record in found],
        {way: fmean(record["bits"][way] for record in found) for way in ways},
        {way: fmean(record["bits of the last epoch"][way] for record in found) for way in ways},
        fmean(errors) if errors else None,
        median(record["train CPU seconds"] for record in found),
        warmup,
    )


def studies(records: Sequence[Record]) -> dict[str, Study]:
    tasks = dict.fromkeys(record["settings"]["task"] for record in records)
    found = {task: Study(task, [one for one in records if one["settings"]["task"] == task]) for task in tasks}
    if {"image", "still"} <= found.keys():
        found["still"].noise = max(found["still"].noise, found["image"].noise)  # the same but for crops and mirrors
    return found


def family(pair: Pair) -> str:
    """What kind of operator the activations cross with."""
    names = {
        "n": "normal",
        "h": "rotated",
        "block": "block float",
        "aq": "AQ-SGD",
        "ef": "error feedback",
        "top": "TopK",
    }
    named = re.match("block|aq|ef|top|n|h", pair[0])
    return names[named[0]] if named else "groups" if ":" in pair[0] else "one range"


def findings(found: Mapping[str, Study]) -> list[dict[str, Any]]:
    """Each with its task, a verdict and the rows that decide it; those whose rows are missing are left out."""
    out: list[dict[str, Any]] = []
    for study in found.values():
        for claim in CLAIMS:
            try:
                one = claim(study)
            except KeyError:
                continue
            if one is not None:
                known = one["verdict"] if study.noise else "open: noise unknown"
                out.append({"task": study.task, **one, "verdict": known})
    return out


def _said(claim: str, verdict: str, because: Sequence[str]) -> dict[str, Any]:
    return {"claim": claim, "verdict": verdict, "because": list(because)}


def _verdict(errors: float) -> str:
    return "yes" if errors > 2 else "no, the contrary" if errors < -2 else "within noise"


def _milder(study: Study, name: str, pairs: Sequence[tuple[Pair, Pair]]) -> dict[str, Any]:
    """Pairs: activations coarse, then gradients coarse by as much."""
    because, verdicts = [], []
    for coarse_there, coarse_back in pairs:
        there, back = study.rows[coarse_there], study.rows[coarse_back]
        errors = study.better(there, back)
        because.append(f"{study.line(there)}  against  {study.line(back)}  ({errors:+.1f} standard errors)")
        verdicts.append(_verdict(errors))
    verdict = verdicts[0] if len(set(verdicts)) == 1 else " / ".join(verdicts)
    return _said(f"gradients need milder compression than activations: {name}", verdict, because)


def _milder_ranges(study: Study) -> dict[str, Any]:
    pairs = [((f"q{bits}", "q8"), ("q8", f"q{bits}")) for bits in (4, 2)]
    return _milder(study, "one range a tensor, 4 and 2 bits", pairs)


def _milder_groups(study: Study) -> dict[str, Any]:
    pairs = [((f"q{bits}:64", "q8:64"), ("q8:64", f"q{bits}:64")) for bits in (4, 2)]
    return _milder(study, "a range for each 64 values, 4 and 2 bits", pairs)


def _milder_topk(study: Study) -> dict[str, Any]:
    pairs = [((f"top{share}", ""), ("", f"top{share}")) for share in (10, 5)]
    return _milder(study, "TopK in one direction, 10 and 5 %", pairs)


def _groups_for_free(study: Study) -> dict[str, Any]:
    because, costs = [], []
    for pair, other in ((("q8:64", "q4:64"), PLAIN), (("q4:64", "q4:64"), ("q4:64", "q8:64"))):
        row, against = study.rows[pair], study.rows[other]
        costs.append(study.better(row, against))
        because.append(f"{study.line(row)}  against  {study.line(against)}  ({costs[-1]:+.1f} standard errors)")
    verdict = "no" if min(costs) < -2 else "yes"
    return _said("with a range for each 64 values, 4-bit gradients cost nothing measurable", verdict, because)


def _lowest(study: Study) -> dict[str, Any] | None:
    harms = {share: study.harm(study.rows[topped(share)]) for share in TOPS if topped(share) in study.rows}
    if 10 not in harms:
        return None
    bearable = [share for share, harm in harms.items() if harm <= SEVERE]
    lowest = min(bearable) if bearable else None
    verdict = (
        "yes" if lowest == 10 else f"no: {lowest:g} %" if lowest else f"no: none of {max(harms)} to {min(harms)} %"
    )
    because = [
        f"{study.line(study.rows[topped(share)])}, loses {harm:.1%} of the gain" for share, harm in harms.items()
    ]
    claim = f"10 % is the lowest TopK without severe harm (at most {SEVERE:.0%} of what training brings)"
    return _said(claim, verdict, because)


def _needs(study: Study) -> dict[str, Any]:
    row = study.rows[topped(10)]
    errors = study.better(row, row, ("on", "off"))
    return _said("a model trained with TopK 10 % needs compression at inference", _verdict(errors), [study.line(row)])


def _bits_inference(study: Study) -> dict[str, Any]:
    because, verdicts = [], []
    for pair in (("q4", "q8"), ("q2", "q8"), ("q4:64", "q4:64"), ("q2:64", "q8:64")):
        row = study.rows[pair]
        errors = study.better(row, row, ("on", "off"))
        verdicts.append(_verdict(errors))
        because.append(f"{study.line(row)} ({errors:+.1f} standard errors): {verdicts[-1]}")
    same = set(verdicts)
    return _said(
        "a model trained with few bits needs them at inference", same.pop() if len(same) == 1 else "mixed", because
    )


def _feedback_trains(study: Study) -> dict[str, Any]:
    plain = study.rows[topped(10)]
    because, gains = [study.line(plain)], []
    for name in FEEDBACKS:
        row = study.rows[(f"{name}(top10)",) * 2]
        way = max(("on", "off"), key=lambda way: study.gain(row, way))
        gains.append(study.better(row, plain, (way, "on")))
        because.append(f"{study.line(row)} ({way}: {gains[-1]:+.1f} standard errors)")
    verdict = "no: it does" if max(gains) > 2 else "yes"
    return _said(
        "error feedback does not improve training over plain TopK (10 %; the better of on and off)", verdict, because
    )


def _feedback_frees(study: Study) -> dict[str, Any]:
    plain = study.rows[topped(10)]
    because, freed = [study.line(plain)], []
    for name in FEEDBACKS:
        row = study.rows[(f"{name}(top10)",) * 2]
        good, gained = study.harm(row, "off") - study.harm(plain), study.better(row, plain, ("off", "off"))
        if good <= SEVERE / 2 and gained > 2:
            freed.append(name)
        because.append(f"{study.line(row)}; off, it loses {good:+.1%} of the gain more than TopK on")
    verdict = f"yes: {', '.join(freed)}" if freed else "no"
    return _said("error feedback allows inference without compression (10 %)", verdict, because)


def _aq_topk(study: Study) -> dict[str, Any]:
    because, hurt = [], {}
    for share in (50, 30, 20, 10):
        row, plain = study.rows[aq(f"top{share}"), f"top{share}"], study.rows[topped(share)]
        errors = [study.better(row, plain, (way, "on")) for way in ("on", "off")]
        hurt[share] = errors
        because.append(
            f"{study.line(row)}  against  {study.line(plain, ['on'])}  ({errors[0]:+.1f} on, {errors[1]:+.1f} off)"
        )
    low = [all(errors[way] < -2 for share, errors in hurt.items() if share < 30) for way in (0, 1)]
    verdict = "yes" if all(low) else "only with compression on at inference" if low[0] else "no"
    return _said("AQ-SGD with TopK below 30 % hurts, against plain TopK with compression on", verdict, because)


def _shared(study: Study) -> dict[str, Any]:
    because, wins = [], []
    for share in (50, 30, 10, 5):
        own, same = study.rows[topped(share)], study.rows[f"top{share}", "same"]
        wins.append(study.better(same, own))
        because.append(f"{study.line(same)}  against  {study.line(own)}  ({wins[-1]:+.1f} standard errors)")
    verdict = "yes" if min(wins) > 2 else "mixed" if max(wins) > 2 else "no"
    return _said("TopK with the activation's places for the gradient beats places of its own", verdict, because)


def _warmup(study: Study) -> dict[str, Any] | None:
    """Each beside the same operators without a warm-up; those without a partner are left out."""
    because, gains = [], []
    for (pair, _), row in study.warm.items():
        if pair not in study.rows:
            continue
        gains.append(study.better(row, study.rows[pair]))
        other = study.line(study.rows[pair])
        because.append(f"{study.line(row)}  against  {other}  ({gains[-1]:+.1f} standard errors)")
    if not gains:
        return None
    verdict = "yes" if min(gains) > 2 else "mixed" if max(gains) > 2 else "no"
    return _said("compression that begins after a warm-up is better than from the start", verdict, because)


def _reached(study: Study) -> dict[str, Any] | None:
    """Of the whole run and of the last epoch, so that an exact first epoch does not hide."""
    base = study.rows[PLAIN]
    rows = [
        row for row in study.rows.values() if row.bits["forward"] <= ENOUGH[0] and row.bits["backward"] <= ENOUGH[1]
    ]
    rows = sorted(
        (row for row in rows if not study.lost(row)),
        key=lambda row: -max(study.gain(row, way) for way in ("on", "off")),
    )
    if not rows:
        return None
    within, because = [], []
    for row in rows[:5]:
        for way in ("on", "off"):
            errors = study.better(row, base, (way, "on"))
            within += [f"{shown(row.pair)} ({way})"] if errors >= -2 else []
            because.append(
                f"{shown(row.pair)}, {way}, by seed: {study.apart(row, way)} ({errors:+.1f} standard errors)"
            )
    claim = "at least 8 times fewer bytes forward and 4 backward, within seed noise of uncompressed"
    return _said(claim, f"yes: {within[0]}" if within else "no", because)


CLAIMS = (
    _milder_ranges,
    _milder_groups,
    _milder_topk,
    _groups_for_free,
    _lowest,
    _needs,
    _bits_inference,
    _feedback_trains,
    _feedback_frees,
    _aq_topk,
    _shared,
    _warmup,
    _reached,
)
