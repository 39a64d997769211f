"""From what messages cost to how long a step takes on a link, and to what should be sent. Nothing here is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from shrinkpoint import validate

Parallelism = Literal["pipeline", "ddp"]
"""What crosses the link: activations and their gradients between stages; gradients that are averaged over ranks."""
Schedule = Literal["1F1B", "GPipe"]
NO_COMPRESSION = "off"
MIN_GAIN = 0.05
"""What counts as a gain: the forecast itself was seen to be off by so much."""


@dataclass(frozen=True)
class MessageCost:
    """One message.

    Attributes:
        raw, wire: bytes of the tensor, and of the message.
        encode, decode: seconds.
        error: Euclidean norm of what is lost, over that of the tensor.
    """

    raw: int
    wire: int
    encode: float = 0.0
    decode: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class CandidateCost:
    """What might be sent: of a pipeline an activation and its gradient, of ddp all gradients (twice the same)."""

    name: str
    forward: MessageCost
    backward: MessageCost

    @property
    def pair(self) -> tuple[MessageCost, MessageCost]:
        return self.forward, self.backward


@dataclass(frozen=True)
class Workload:
    """A training step without its operators.

    Attributes:
        mbps: millions of bits that a rank's link carries a second, in each direction.
        compute: seconds that a step takes where nothing need be sent, waiting for other stages included.
        world_size: stages of a pipeline, or ranks.
        micro_batches: of a step; each crosses every boundary once in each direction.
        overlap: whether sending goes on while the rank computes and encodes. Schedules of torch's pipelines mostly wait
            for what they send, and encoded gradients are sent when they are complete. What torch itself averages is
            overlapped in any case.
        schedule: "1F1B": neighbours exchange an activation and a gradient, and then compute; "GPipe": all activations
            go first. Others are between the two.
        duplex: whether both messages of an exchange cross at the same time where they are not encoded. On gloo one
            waits for the other: what says that a rank is ready to receive goes behind what it sends. Encoded messages
            always do.
    """

    parallelism: Parallelism
    mbps: float
    compute: float = 0.0
    world_size: int = 2
    micro_batches: int = 1
    overlap: bool = False
    schedule: Schedule = "1F1B"
    duplex: bool = False

    def __post_init__(self) -> None:
        validate.check_choice("advise, kind", self.parallelism, get_args(Parallelism))
        validate.check_float(
            "advise, mbps", self.mbps, do="give the rate of a rank's link, in millions of bits a second"
        )
        validate.check_float("advise, compute", self.compute, exclusive=False, do="give the seconds of a step")
        validate.check_int("advise, world", self.world_size, minimum=2, do="give two ranks or more")
        validate.check_int("advise, micro_batches", self.micro_batches)
        validate.check_choice("advise, schedule", self.schedule, get_args(Schedule))
        for name in ("overlap", "duplex"):
            validate.check_bool(f"advise, {name}", getattr(self, name))

    def nbytes(self, forward: float, backward: float) -> float:
        """Bytes of a step, from those of one message of each direction: of a pipeline what crosses one boundary, of ddp
        what each rank sends: twice a part (world - 1) / world."""
        if self.parallelism == "pipeline":
            return self.micro_batches * (forward + backward)
        return 2 * forward * (self.world_size - 1) / self.world_size

    def transfer_seconds(self, forward: float, backward: float, *, is_encoded: bool = False) -> float:
        """Seconds of a step in which something crosses, from the bytes of one message of each direction.

        In a pipeline the first micro-batch goes all the way and back, and each further one follows at an interval: that
        of a middle stage, if there is one, which exchanges with both its neighbours in turn.
        """
        if self.parallelism == "ddp":
            return 8 * self.nbytes(forward, backward) / (self.mbps * 1e6)
        both, interval = forward + backward, forward + backward
        if self.schedule == "1F1B":
            at_once = is_encoded or self.duplex
            interval = (max(forward, backward) if at_once else both) * min(self.world_size - 1, 2)
        return 8 * ((self.world_size - 1) * both + (self.micro_batches - 1) * interval) / (self.mbps * 1e6)

    def codec_seconds(self, candidate: CandidateCost) -> float:
        """Seconds of a step in which a rank encodes or decodes while others wait."""
        there, back = candidate.pair
        if self.parallelism == "ddp":  # the others' shards out and theirs in, the own sum out, all sums in
            return there.encode + there.decode * (2 - 1 / self.world_size)
        first, last = there.encode + back.decode, there.decode + back.encode
        interval = max(first, last) if self.world_size == 2 else first + last
        return (self.world_size - 1) * (first + last) + (self.micro_batches - 1) * interval

    def uncompressed_seconds(self, forward: int, backward: int) -> float:
        """Seconds of a step that sends everything as it is, from the bytes of one message of each direction."""
        return self._overlapped_seconds(
            self.compute, self.transfer_seconds(forward, backward), self.overlap or self.parallelism == "ddp"
        )

    def step_seconds(self, candidate: CandidateCost) -> float:
        """Of a step that encodes."""
        there, back = candidate.pair
        work = self.compute + self.codec_seconds(candidate)
        return self._overlapped_seconds(
            work, self.transfer_seconds(there.wire, back.wire, is_encoded=True), self.overlap
        )

    @staticmethod
    def _overlapped_seconds(work: float, wire: float, overlap: bool) -> float:
        return max(work, wire) if overlap else work + wire

    def break_even(self, candidate: CandidateCost) -> float:
        """Mbit/s of the link at which messages take as long encoded as they are; below that they arrive sooner.

        For one direction with speeds `enc` and `dec` of raw bytes and the ratio r, (1 - 1/r) / (1/enc + 1/dec).
        """
        saved = self.nbytes(*(one.raw - one.wire for one in candidate.pair))
        each = self.micro_batches * sum(one.encode + one.decode for one in candidate.pair)
        spent = self.codec_seconds(candidate) if self.parallelism == "ddp" else each
        if saved <= 0:
            return 0.0
        return 8 * saved / spent / 1e6 if spent else math.inf


@dataclass(frozen=True)
class Estimate:
    """One candidate.

    Attributes:
        nbytes: of a step; of a pipeline over one boundary, of ddp from each rank.
        ratio: by how much fewer that is than without.
        error: the larger one of both directions.
        codec: seconds of a step in which a rank encodes or decodes.
        seconds: what a step is predicted to take.
        gain: the step without, over this one.
        break_even: Mbit/s below which it pays where nothing is overlapped.
    """

    name: str
    nbytes: float
    ratio: float
    error: float
    codec: float
    seconds: float
    gain: float
    break_even: float


@dataclass(frozen=True)
class Recommendation:
    """What to send, and why. Printing it gives a table.

    Attributes:
        best: the spec of an operator, of a pair of them ("there / back"), or "off".
        estimates: the fastest first, "off" among them.
    """

    best: str
    estimates: tuple[Estimate, ...]
    workload: Workload
    description: str = ""

    def estimate(self, name: str) -> Estimate:
        """What is known of a candidate.

        Raises:
            KeyError: it is not one.
        """
        return {row.name: row for row in self.estimates}[name]

    @property
    def pays(self) -> bool:
        return self.best != NO_COMPRESSION

    def table(self) -> str:
        """Aligned text: a head, and a line for each row."""
        head = ("operator", "MB a step", "ratio", "error", "codec s", "step s", "gain", "pays below Mbit/s")
        cells = [head, *(_format_cells(row) for row in self.estimates)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
        return "\n".join("  ".join(line) for line in lines)

    def __str__(self) -> str:
        return "\n".join(line for line in (self._headline(), self.table(), self._verdict()) if line)

    def _headline(self) -> str:
        load = self.workload
        parts = [
            self.description,
            load.parallelism,
            f"{load.world_size} {'stages' if load.parallelism == 'pipeline' else 'ranks'}",
        ]
        if load.parallelism == "pipeline":
            parts.append(f"{load.micro_batches} micro-batches")
        parts += [f"{load.mbps:g} Mbit/s", f"{load.compute:.4g} s of computing"]
        return ", ".join(part for part in parts if part)

    def _verdict(self) -> str:
        if not self.pays:
            seconds = self.estimate(NO_COMPRESSION).seconds
            return f"best: off. Nothing is {MIN_GAIN:.0%} faster than a step of {seconds:.4g} s without"
        row = self.estimate(self.best)
        return f"best: {row.name}, {row.gain:.2f} times as fast as without"


def rank_candidates(
    workload: Workload,
    candidates: Sequence[CandidateCost],
    *,
    uncompressed: tuple[int, int],
    max_error: float | None = None,
    description: str = "",
) -> Recommendation:
    """What to send.

    A later candidate is chosen over an earlier one, and the first over nothing, only where it makes the step 5 %
    faster: what is merely smaller never wins.

    Args:
        candidates: the most careful first.
        uncompressed: bytes of one message of each direction as they are.
        max_error: a candidate that loses more, or whose loss is not a number, is listed and never chosen.
    """
    off = Estimate(
        NO_COMPRESSION,
        workload.nbytes(*uncompressed),
        1.0,
        0.0,
        0.0,
        workload.uncompressed_seconds(*uncompressed),
        1.0,
        math.inf,
    )
    rows = [_make_estimate(workload, one, off) for one in candidates]
    best = off
    for row in rows:
        allowed = max_error is None or row.error <= max_error
        if allowed and row.seconds < best.seconds * (1 - MIN_GAIN):
            best = row
    return Recommendation(best.name, tuple(sorted([off, *rows], key=lambda row: row.seconds)), workload, description)


def _make_estimate(workload: Workload, candidate: CandidateCost, baseline: Estimate) -> Estimate:
    nbytes, seconds = workload.nbytes(candidate.forward.wire, candidate.backward.wire), workload.step_seconds(candidate)
    errors = [side.error for side in candidate.pair]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    ratio = baseline.nbytes / nbytes if nbytes else 1.0
    gain = baseline.seconds / seconds if seconds else 1.0
    return Estimate(
        candidate.name,
        nbytes,
        ratio,
        error,
        workload.codec_seconds(candidate),
        seconds,
        gain,
        workload.break_even(candidate),
    )


def _format_cells(estimate: Estimate) -> tuple[str, ...]:
    limit = "" if estimate.name == NO_COMPRESSION else f"{estimate.break_even:.0f}"
    figures = (
        f"{estimate.nbytes / 1e6:.3f}",
        f"{estimate.ratio:.2f}",
        f"{estimate.error:.4f}",
        f"{estimate.codec:.4f}",
        f"{estimate.seconds:.4f}",
    )
    return (estimate.name, *figures, f"{estimate.gain:.2f}", limit)
