"""A model of a training step on a link: how long computing, encoding, transfers and latency take together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from shrinkpoint import validate

Parallelism = Literal["pipeline", "ddp"]
"""What is sent: activations and their gradients between stages, or gradients that are averaged over ranks."""
Schedule = Literal["1F1B", "GPipe"]
Transport = Literal["messages", "factors", "all-reduce"]
"""How a candidate averages gradients: in two hops, as factors with two hops each, or by torch's own all-reduce."""
_RING_PIECE = 1 << 20
"""Bytes that gloo sends around the ring in one piece, at most."""


@dataclass(frozen=True)
class MessageCost:
    """The cost of one message: bytes of the tensor and of the message, seconds of encoding and decoding.

    The error is relative: the Euclidean norm of the difference over that of the tensor.
    """

    raw: int
    wire: int
    encode: float = 0.0
    decode: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class CandidateCost:
    """The cost of a candidate: in a pipeline of an activation and its gradient, in ddp of all gradients, twice.

    In ddp the seconds are those of a whole step at one rank.
    """

    name: str
    forward: MessageCost
    backward: MessageCost
    transport: Transport = "messages"

    @property
    def pair(self) -> tuple[MessageCost, MessageCost]:
        return self.forward, self.backward


@dataclass(frozen=True)
class Workload:
    """A training step without its compressors.

    In ddp gradients are sent beside the backward pass, compressed or not: in torch's buckets, or in segments of ours.

    Attributes:
        mbps: rate of a rank's link in each direction, in Mbit/s.
        compute: seconds of a step on links that cost nothing, waiting for other stages included.
        world_size: the number of stages of a pipeline, or of ranks.
        micro_batches: of a step; each crosses every boundary once in each direction.
        overlap: True if a rank of a pipeline sends while it computes and encodes. Schedules of torch's pipelines mostly
            wait for their messages.
        schedule: "1F1B": neighbours exchange an activation and a gradient, and then compute; "GPipe": all activations
            are sent first. Others are between the two.
        duplex: True if both messages of an exchange cross at the same time if they are uncompressed. On gloo one waits
            for the other: the notice that a rank is ready to receive is queued behind its sends. Compressed messages
            always cross at the same time.
        latency: seconds that a packet takes from one rank to another.
        buckets: the number of buckets in which torch averages gradients.
        segments: the number of segments in which we do.
        all_reduce_seconds: processor seconds of torch's all-reduce for a byte that a rank sends, with the one that it
            receives. In ddp those of all uncompressed bytes are part of `compute`; a candidate that sends fewer bytes
            saves what these would have taken.
        window: bytes that one connection may have on their way at a time; None for any number. More than these wait for
            what was sent to be acknowledged, which takes two latencies. Of ddp's compressed messages: torch's ring has
            fewer on their way.
    """

    parallelism: Parallelism
    mbps: float
    compute: float = 0.0
    world_size: int = 2
    micro_batches: int = 1
    overlap: bool = False
    schedule: Schedule = "1F1B"
    duplex: bool = False
    latency: float = 0.0
    buckets: int = 1
    segments: int = 1
    all_reduce_seconds: float = 0.0
    window: float | None = None

    def __post_init__(self) -> None:
        validate.check_choice("recommend, parallelism", self.parallelism, get_args(Parallelism))
        advice = "give the rate of a rank's link, in millions of bits a second"
        validate.check_float("recommend, mbps", self.mbps, do=advice)
        validate.check_float("recommend, compute", self.compute, exclusive=False, do="give the seconds of a step")
        validate.check_float("recommend, latency", self.latency, exclusive=False, do="give half of what ping says")
        advice = "give what a byte takes"
        validate.check_float("recommend, all_reduce_seconds", self.all_reduce_seconds, exclusive=False, do=advice)
        if self.window is not None:
            validate.check_float("recommend, window", self.window, do="give the bytes of a send buffer, or None")
        validate.check_int("recommend, world_size", self.world_size, minimum=2, do="give two ranks or more")
        for name in ("micro_batches", "buckets", "segments"):
            validate.check_int(f"recommend, {name}", getattr(self, name))
        validate.check_choice("recommend, schedule", self.schedule, get_args(Schedule))
        for name in ("overlap", "duplex"):
            validate.check_bool(f"recommend, {name}", getattr(self, name))

    def nbytes(self, forward: float, backward: float) -> float:
        """Bytes of a step, from those of one message of each direction: in a pipeline over one boundary, in ddp from
        each rank, which sends twice a fraction (world_size - 1) / world_size."""
        if self.parallelism == "pipeline":
            return self.micro_batches * (forward + backward)
        return 2 * forward * (self.world_size - 1) / self.world_size

    def transfer_seconds(self, forward: float, backward: float, *, is_encoded: bool = False) -> float:
        """Seconds that a step's messages take on the wire without latency, from the bytes of one of each direction.

        In a pipeline the first micro-batch crosses all boundaries in both directions, and each further one follows at
        the interval of a middle stage, if there is one, which exchanges with one neighbour after the other.
        """
        if self.parallelism == "ddp":
            nbytes = self.nbytes(forward, backward)
            return 8 * nbytes / (self.mbps * 1e6) + (self._window_seconds(nbytes) if is_encoded else 0.0)
        round_trip, interval = forward + backward, forward + backward
        if self.schedule == "1F1B":
            is_duplex = is_encoded or self.duplex
            interval = (max(forward, backward) if is_duplex else round_trip) * min(self.world_size - 1, 2)
        return 8 * ((self.world_size - 1) * round_trip + (self.micro_batches - 1) * interval) / (self.mbps * 1e6)

    def _window_seconds(self, nbytes: float) -> float:
        """Seconds that the bytes which a rank sends to the others wait for acknowledgements: one wait a window."""
        if self.window is None:
            return 0.0
        waits = max(0.0, nbytes / (self.world_size - 1) / self.window - 1)
        return waits * max(0.0, 2 * self.latency - 8 * self.window / (self.mbps * 1e6))

    def latency_seconds(self, nbytes: float, *, is_encoded: bool = False) -> float:
        """Seconds that a step waits for the latency of its messages.

        In a pipeline the first micro-batch waits at every boundary, there and back. With 1F1B, which has `world_size`
        micro-batches on their way, each further one waits for that fraction of it.

        In ddp a rank says that it is ready to receive, and then two hops follow each other. The second hop of the first
        compressed segment waits until the first hop of all of them is sent; on a slow link that hides the latency of
        one hop. Torch's buckets wait one after the other; gloo sends a bucket around the ring in pieces of at most a
        mebibyte, two at a time. That a piece waits once for each other rank is what was measured.

        Args:
            nbytes: of a message forward; in ddp of all gradients.
        """
        others = self.world_size - 1
        if self.parallelism == "pipeline":
            waits = 2 * others * (1 + (self.micro_batches - 1) / self.world_size * (self.schedule == "1F1B"))
            return waits * self.latency
        if is_encoded:
            hop = self.transfer_seconds(nbytes, nbytes) / 2
            return 2 * self.latency + max(0.0, self.latency - hop * (1 - 1 / self.segments))
        pieces = max(2, math.ceil(nbytes / self.buckets / self.world_size / _RING_PIECE))
        return self.buckets * pieces * others * self.latency

    def codec_seconds(self, candidate: CandidateCost) -> float:
        """Seconds of a step spent on encoding and decoding."""
        forward, backward = candidate.pair
        if self.parallelism == "ddp":
            return forward.encode + forward.decode
        first_stage, last_stage = forward.encode + backward.decode, forward.decode + backward.encode
        interval = max(first_stage, last_stage) if self.world_size == 2 else first_stage + last_stage
        return (self.world_size - 1) * (first_stage + last_stage) + (self.micro_batches - 1) * interval

    def uncompressed_seconds(self, forward: int, backward: int) -> float:
        """Seconds of a step without compression, from the bytes of one message of each direction."""
        wire = self.transfer_seconds(forward, backward) + self.latency_seconds(forward)
        return self._seconds(self.compute, wire, self.buckets)

    def step_seconds(self, candidate: CandidateCost) -> float:
        """Seconds of a step with compression."""
        forward, backward = candidate.forward.wire, candidate.backward.wire
        is_encoded = candidate.transport != "all-reduce"
        exchanges = 2 if candidate.transport == "factors" else 1  # right factors follow the averages of left ones
        wire = self.transfer_seconds(forward, backward, is_encoded=is_encoded)
        wire += exchanges * self.latency_seconds(forward / exchanges, is_encoded=is_encoded)
        if self.parallelism == "pipeline" and self.schedule == "GPipe" and not self.overlap:
            wire -= self._hidden_seconds(forward, backward)
        work = self.compute + self.codec_seconds(candidate) - self._saved_seconds(candidate.forward)
        return self._seconds(work, wire, self.segments if is_encoded else self.buckets)

    def _saved_seconds(self, cost: MessageCost) -> float:
        """Processor seconds of `compute` that bytes which are not sent would have taken: in ddp."""
        if self.parallelism != "ddp":
            return 0.0
        saved_bytes = self.nbytes(cost.raw, cost.raw) - self.nbytes(cost.wire, cost.wire)
        return min(self.compute, self.all_reduce_seconds * saved_bytes)

    def _hidden_seconds(self, forward: float, backward: float) -> float:
        """Seconds in which GPipe's compressed messages cross beside computing: all but the first one of a direction,
        each for as long as a stage computes with a micro-batch, of which the backward pass is two thirds."""
        forward_compute = self.compute / (self.micro_batches + self.world_size - 1) / 3
        transfers = [8 * nbytes / (self.mbps * 1e6) for nbytes in (forward, backward)]
        hidden = min(forward_compute, transfers[0]) + min(2 * forward_compute, transfers[1])
        return (self.micro_batches - 1) * hidden

    def _seconds(self, work: float, wire: float, parts: int) -> float:
        """Seconds of a step that computes and encodes for `work` seconds, and whose messages take `wire` seconds.

        In ddp half of the work is done before the first gradient is ready, or after the last average has come, and so
        is what makes one of the `parts` in which gradients are sent.
        """
        if self.parallelism == "ddp":
            return max(work, work * (1 + 1 / parts) / 2 + wire)
        return max(work, wire) if self.overlap else work + wire

    def break_even(self, candidate: CandidateCost) -> float:
        """The rate in Mbit/s below which compressed messages arrive sooner than uncompressed ones, without latency and
        computing.

        For one direction with speeds `enc` and `dec` of raw bytes and the ratio r, (1 - 1/r) / (1/enc + 1/dec).
        """
        saved_bytes = self.nbytes(*(cost.raw - cost.wire for cost in candidate.pair))
        pipeline_seconds = self.micro_batches * sum(cost.encode + cost.decode for cost in candidate.pair)
        seconds = self.codec_seconds(candidate) if self.parallelism == "ddp" else pipeline_seconds
        if saved_bytes <= 0:
            return 0.0
        return 8 * saved_bytes / seconds / 1e6 if seconds else math.inf
