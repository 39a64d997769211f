"""What a weight's history would be worth as context of its codes in a chain of `fisher`.

    python benchmarks/code_history.py --recordings DIR    # ten chains; a quarter of an hour once trainings are recorded
    python benchmarks/code_history.py --only "gpt 50"     # some of them
    python benchmarks/code_history.py --quick             # a toy

Recorded trainings are written as real chains. Of each delta record of weights that stay on their lattice, the codes are
coded again by the same coder (tables, and what these cost, included) under more context than today's size of the step:

* age: how many saves ago the code moved last, up to 6; or not since its lattice began in the chain;
* direction: of the last move, up, down or none. With hysteresis it tells on which side of its cell a weight is;
* both: age and direction;
* displacement: how far the code is from the one with which the lattice began, up to 3 either way. Reader and writer
  hold that already, for gains;
* all: both, and whether the displacement is more than one.

"coder" bits are those, at most 16 tables a record. "adaptive" bits are of an ideal coder that learns each context's
frequencies as it goes (Dirichlet-multinomial, 1/256 of a count for each symbol), with any number of contexts, so what a
context must learn is paid for as well. "entropy" is the bound of one that knew all frequencies in advance, at no cost:
no coder under these contexts can be below it. "written" are the bits of the records as they are in the files, coded
under today's context, with seeds, gains and escapes. Histories save per cents of these.

A second table is of distances from the origin alone, which take no more memory: the sign of the displacement, with one
to four classes of its size; and "best", what is least for each record, none of them included. Bits are of the coder,
and where a record is coded so, of a field of its recipe (an upper bound). Per cents are of the weights' bits, and of
the bytes of whole files.

Writes results/code_history.json, beside what is there of other chains.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import lgamma
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import fisher
import numpy as np
import workloads
from lossless_report import table
from lossless_speed import machine
from numpy.typing import NDArray
from workloads import Workload

import shrinkpoint as sp
from shrinkpoint.codec import lattice_record
from shrinkpoint.codec.coder import BYTE_FORMAT, CoderConfig, CodingContext
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.codec.lattice_record import LatticeInput
from shrinkpoint.schemes.encode import records
from shrinkpoint.tensors.info import EncodedRecord, Role

STEP_CLASSES, ON_POINT = 8, 16 * 8
"""Today's contexts of codes whose parent lies on its point: `ON_POINT` + the class of the step's size."""
MAX_AGE, MAX_DISPLACEMENT = 6, 3
HISTORIES = ("none", "age", "direction", "both", "displacement", "all")
DISTANCES = {"sign": (), "2": (2,), "3": (2, 3), "4": (2, 3, 4), "4, doubling": (2, 3, 5)}
"""Classes of the displacement's size: the least sizes of all but the first class, which begins at 1."""
FIELD_BITS = 8 * len(',"distance":3')
"""What a recipe would say of it."""
PRIOR = 1 / 256
"""Counts of each of 256 symbols that the adaptive model begins with."""
ERRORS = (0.34, 0.58)


class Chain(NamedTuple):
    """One kind of chain.

    Attributes:
        every: steps between checkpoints; 0: an eighth of a half, as `budgets.py` has it.
    """

    workload: str
    every: int
    count: int
    seeds: tuple[int, ...] = (0,)


CHAINS = {
    "gpt 50": Chain("gpt", 50, 7, (0, 1, 2)),
    "gpt 16": Chain("gpt", 16, 20),
    **{name: Chain(name, 0, 8) for name in ("vae rmsprop", "lstm adam", "vit adamw", "vit fine-tuned")},
    "gpt words .999": Chain("gpt words .999", 0, 8),
    "resnet loss adamw": Chain("resnet loss adamw", 0, 8),
}


@dataclass
class CodeHistory:
    """The moves of a tensor's codes since its lattice began in the chain.

    Attributes:
        age: saves since the last move; 0: none yet. uint8.
        direction: of the last move; -1, 0 or 1. int8.
        displacement: of the codes, from those with which the lattice began. int32.
    """

    age: NDArray[np.uint8]
    direction: NDArray[np.int8]
    displacement: NDArray[np.int32]

    @classmethod
    def start(cls, count: int) -> CodeHistory:
        return cls(np.zeros(count, np.uint8), np.zeros(count, np.int8), np.zeros(count, np.int32))

    def advance(self, moves: NDArray[np.int32]) -> None:
        """Add the moves of one more save."""
        moved = moves != 0
        self.age = np.where(moved, 1, np.where(self.age > 0, np.minimum(self.age + 1, MAX_AGE), 0)).astype(np.uint8)
        self.direction = np.where(moved, np.sign(moves), self.direction).astype(np.int8)
        self.displacement = self.displacement + moves

    def classes(self, kind: str) -> NDArray[np.int64]:
        """The context of each code, below 32."""
        direction = self.direction.astype(np.int64) + 1
        both = np.where(self.age > 0, 2 * self.age.astype(np.int64) - (direction > 1), 0)
        held = np.clip(self.displacement, -MAX_DISPLACEMENT, MAX_DISPLACEMENT) + MAX_DISPLACEMENT
        by_kind = {
            "none": np.zeros_like(both),
            "age": self.age.astype(np.int64),
            "direction": direction,
            "both": both,
            "displacement": held.astype(np.int64),
            "all": 2 * both + (np.abs(self.displacement) > 1),
        }
        return by_kind[kind]

    def distance_classes(self, bounds: tuple[int, ...]) -> NDArray[np.int64]:
        """Which way the code lies from the origin and how far: 0 at the origin, odd below it, even above."""
        size = 1 + np.searchsorted(np.array(bounds), np.abs(self.displacement), side="right")
        return np.where(self.displacement == 0, 0, 2 * size - (self.displacement < 0)).astype(np.int64)


@dataclass
class SavedBits:
    """One delta: bits of its weights.

    Attributes:
        weights: how many there are.
        continued: how many of them are in records that stay on their lattices.
        file: bits a weight of all weights in the file, as the report of the save says.
        share: of the weights, in the bytes of the file's tensors.
        hold: the threshold of hysteresis, in steps.
        written: bits of all records of weights on lattices.
        continued_written: bits of the codes of those that stay, as they are in the file.
        coder, adaptive, entropy: the same by history.
        moved, back: shares of the codes that stay on their lattices: those that moved, and those that moved against
            their last direction.
        file_bytes: of the whole file.
        distance: bits of the codes that stay, under distances from the origin, by `DISTANCES`; "best": of each record.
    """

    weights: int = 0
    continued: int = 0
    file: float = 0.0
    share: float = 0.0
    hold: float = 0.5
    written: int = 0
    continued_written: int = 0
    coder: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HISTORIES, 0.0))
    adaptive: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HISTORIES, 0.0))
    entropy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HISTORIES, 0.0))
    moved: float = 0.0
    back: float = 0.0
    file_bytes: int = 0
    distance: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*DISTANCES, "best"), 0.0))


class Observer:
    """Takes the records of weights as they are coded, and codes them again under more context."""

    def __init__(self) -> None:
        self.saves = list[SavedBits]()
        self._histories = dict[str, CodeHistory]()
        self._coded = list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what is coded in one thread: a record's points are the first codes under a parent in it."""
        encode, encode_record = CoderConfig.encode, records.encode_lattice_record

        def coded(config: CoderConfig, form: Any, values: Any, context: CodingContext, threads: int) -> Any:
            if config.tokens == "codes" and config.predictor == "base" and context.base is not None:
                self._coded.append((values, context.base))
            return encode(config, form, values, context, threads)

        def observed(record: LatticeInput, *, threads: int | None = None) -> EncodedRecord:
            self._coded.clear()
            result = encode_record(record, threads=threads)
            if record.infos[0].role is Role.PARAMETER and self._coded:
                self._measure(record, result, *self._coded[0])
            return result

        with patch.object(CoderConfig, "encode", coded), patch.object(records, "encode_lattice_record", observed):
            yield

    def _measure(
        self, record: LatticeInput, result: EncodedRecord, tokens: NDArray[np.uint8], contexts: NDArray[np.uint8]
    ) -> None:
        save = self.saves[-1]
        save.weights += tokens.size
        save.written += 8 * sum(len(part) for part in result.parts.values())
        moves = [_moves(record, index) for index in range(len(record.infos))]
        known = all(info.name in self._histories for info in record.infos)
        if not known or any(one is None for one in moves):  # a new lattice: no history, and other contexts
            for info in record.infos:
                self._histories[info.name] = CodeHistory.start(info.numel)
            return
        if not bool((contexts >= ON_POINT).all()):
            raise AssertionError("a code that stays on its lattice, and whose parent is not on a point")
        histories = [self._histories[info.name] for info in record.infos]
        _, codes, side, escapes = lattice_record.PART_SIZES.unpack_from(bytes(result.parts["points"]))
        save.continued += tokens.size
        save.continued_written += 8 * (codes + side + 4 * escapes)
        differences = tokens - contexts  # of bytes, modulo 256
        for kind in HISTORIES:
            classes = np.concatenate([history.classes(kind) for history in histories])
            richer = (STEP_CLASSES * classes + (contexts - ON_POINT)).astype(np.uint8)
            save.coder[kind] += _coder_bits(differences, richer) + 32 * escapes
            counts = np.bincount(richer.astype(np.int64) * 256 + differences, minlength=1 << 16).reshape(256, 256)
            save.adaptive[kind] += _adaptive_bits(counts) + 32 * escapes
            save.entropy[kind] += _entropy_bits(counts) + 32 * escapes
        plain = _coder_bits(differences, contexts - np.uint8(ON_POINT))
        best = plain
        for kind, bounds in DISTANCES.items():
            classes = np.concatenate([history.distance_classes(bounds) for history in histories])
            richer = (STEP_CLASSES * classes + (contexts - ON_POINT)).astype(np.uint8)
            bits = _coder_bits(differences, richer) + FIELD_BITS
            save.distance[kind] += bits + 32 * escapes
            best = min(best, bits)
        save.distance["best"] += best + 32 * escapes
        for history, move in zip(histories, moves, strict=True):
            assert move is not None
            save.moved += int((move != 0).sum())
            save.back += int((move * history.direction < 0).sum())
            history.advance(move)


def _moves(record: LatticeInput, index: int) -> NDArray[np.int32] | None:
    """By how many points the codes of a tensor have moved since the parent; None on another lattice."""
    tensor = record.quantized[index]
    parent = None if record.reference is None else record.reference.quantized.get(record.infos[index].name)
    if not isinstance(parent, LatticeTensor) or parent.lattice != tensor.lattice:
        return None
    now, before = (codes.reshape(-1).numpy().astype(np.int32) for codes in (tensor.codes, parent.codes))
    return now - before


def _coder_bits(differences: NDArray[np.uint8], contexts: NDArray[np.uint8]) -> int:
    """Bits of codes and tables as the native coder writes them."""
    config = CoderConfig("codes", predictor="base", top=int(contexts.max(initial=0)))
    side, coded = config.encode(BYTE_FORMAT, differences + contexts, CodingContext(base=contexts), 1)
    return 8 * (side.nbytes + coded.nbytes)


def _adaptive_bits(counts: NDArray[np.int64]) -> float:
    """Bits of a coder that counts the symbols of each context, a row, as they come."""
    nats = 0.0
    for row in counts[counts.any(axis=1)]:
        nats += lgamma(row.sum() + 256 * PRIOR) - lgamma(256 * PRIOR)
        nats -= sum(lgamma(n + PRIOR) - lgamma(PRIOR) for n in row[row > 0])
    return float(nats / np.log(2))


def _entropy_bits(counts: NDArray[np.int64]) -> float:
    """Bits of all symbols, each under its context's own frequencies."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float(-(counts * np.log2(np.where(counts > 0, shares, 1.0))).sum())


def measured(workload: Workload, seed: int, series: list[tuple[int, Any, Any]], error: float) -> list[SavedBits]:
    """The deltas of a series, written as a chain; each save as the one after the one before it."""
    course, observer = workload.build(seed), Observer()
    with fisher.quiet(), observer.watching(), tempfile.TemporaryDirectory() as folder:
        scheme = sp.Fisher(relative_error=error)
        manager = sp.CheckpointManager(folder, scheme=scheme, keyframe_every=None, threads=1)
        for step, model, optimizer in series:
            course.model.load_state_dict(model)
            course.optimizer.load_state_dict(copy.deepcopy(optimizer))
            observer.saves.append(SavedBits())
            report = manager.save(step, model=course.model, optimizer=course.optimizer)
            weights = report.roles[Role.PARAMETER]
            save, sizes = observer.saves[-1], [role.stored for role in report.roles.values()]
            save.file_bytes = report.stored_bytes
            save.file, save.share = 32 * weights.stored / weights.raw, weights.stored / sum(sizes)
            save.hold = (report.loss_report or {})["tried"][-1]["hold"]
        manager.close()
    for save in observer.saves[1:]:
        save.moved, save.back = save.moved / max(1, save.continued), save.back / max(1, save.continued)
    return observer.saves[1:]


def gain(saves: list[dict[str, Any]], kind: str, coder: str = "coder") -> float:
    """Per cent of all bits of the weights that a history saves, over some deltas together."""
    saved = sum(save[coder]["none"] - save[coder][kind] for save in saves)
    return 100 * saved / sum(save["written"] for save in saves)


CODERS = ("coder", "adaptive", "entropy")
HEAD = [
    "", "W bits", "of the file %", "h", "moved %", "back %", "coder / written", "adaptive /", "entropy /",
    *HISTORIES[1:], "adaptive: both", "entropy: both", "entropy: all",
]  # fmt: skip


def row(name: str, saves: list[dict[str, Any]]) -> list[str]:
    """A line of the table: bits a weight, and by how many per cent each history lowers them."""
    stay = sum(save["continued_written"] for save in saves)
    return [
        name,
        f"{statistics.mean(save['file'] for save in saves):.3f}",
        f"{100 * statistics.mean(save['share'] for save in saves):.0f}",
        f"{statistics.mean(save['hold'] for save in saves):.3f}",
        f"{100 * statistics.mean(save['moved'] for save in saves):.2f}",
        f"{100 * statistics.mean(save['back'] for save in saves):.2f}",
        *(f"{sum(save[coder]['none'] for save in saves) / max(1, stay):.3f}" for coder in CODERS),
        *(f"{-gain(saves, kind):+.1f}" for kind in HISTORIES[1:]),
        f"{-gain(saves, 'both', 'adaptive'):+.1f}",
        f"{-gain(saves, 'both', 'entropy'):+.1f}",
        f"{-gain(saves, 'all', 'entropy'):+.1f}",
    ]


def distance_row(name: str, saves: list[dict[str, Any]]) -> list[str]:
    """A line of the second table: by how many per cent distances change the weights' bits, and the best the files."""
    written, files = (sum(save[key] for save in saves) for key in ("written", "file_bytes"))
    changes = {
        kind: sum(save["distance"][kind] - save["coder"]["none"] for save in saves) for kind in saves[0]["distance"]
    }
    by_save = [100 * (save["distance"]["best"] - save["coder"]["none"]) / (8 * save["file_bytes"]) for save in saves]
    return [
        name,
        f"{files / len(saves):.0f}",
        *(f"{100 * change / written:+.2f}" for change in changes.values()),
        *(f"{100 * changes[kind] / (8 * files):+.2f}" for kind in ("3", "best")),
        f"{min(by_save):+.2f} to {max(by_save):+.2f}",
    ]


DISTANCE_HEAD = ["", "bytes of a delta", *DISTANCES, "best", "3 classes: of the file", "best: of the file", "by save"]


def report(found: dict[str, Any]) -> str:
    """All chains, and below them each save of the first seed, by its number in the chain."""
    chains = [row(name, saves) for name, saves in found.items()]
    by_save = [
        [f"{name}, save {number}", *row("", [save])[1:]]
        for name, saves in found.items()
        for number, save in enumerate(saves, 1)
        if ", seed 0" in name
    ]
    distances = [distance_row(name, saves) for name, saves in found.items() if "distance" in saves[0]]
    return "\n\n".join([table(HEAD, chains), table(HEAD, by_save), table(DISTANCE_HEAD, distances)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--only", nargs="*", choices=list(CHAINS), default=list(CHAINS))
    parser.add_argument("--errors", nargs="*", type=float, default=ERRORS)
    parser.add_argument("--recordings", type=Path, help="a folder of recorded trainings, which are used again")
    parser.add_argument("--quick", action="store_true", help="a toy: does it run?")
    parser.add_argument("--out", type=Path, default=Path("results/code_history.json"))
    options = parser.parse_args()
    workloads.seed_everything(0, 1)
    document: dict[str, Any] = {"machine": machine(), "quick": options.quick, "chains": {}}
    if options.out.exists():
        document["chains"] = json.loads(options.out.read_text())["chains"]
    found = document["chains"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        chain = CHAINS[name]
        workload = workloads.named(chain.workload, options.data, quick=options.quick)
        half = workload.steps // 2
        every = half // chain.count if options.quick else chain.every or half // chain.count
        for seed in chain.seeds:
            series = fisher.recorded(workload, seed, half, every, chain.count, options.recordings)
            for error in options.errors:
                key = f"{name}, seed {seed}, error {error:g}"
                found[key] = [vars(save) for save in measured(workload, seed, series, error)]
                options.out.write_text(json.dumps(document))
                print(table(HEAD, [row(key, found[key])]), flush=True)
    print(report(found))
    print("written:", options.out)


if __name__ == "__main__":
    main()
