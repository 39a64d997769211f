"""What saves and loads on R ranks cost, from constants that were measured on a few ranks; part of `scale_out.py`.

Three kinds of figures. Messages, manifests and metadata are made by the library's own code for the R ranks and measured
(`scale_out_plans.py`). Bytes, seconds and memory are sums of terms, each a constant times bytes of the state, tensors
or ranks; the constants are fitted to runs of two models. One rank has constants of its own: it plans a lossy save as a
process without shards does, on another path. The coordinator's seconds for an entry rise with the logarithm of the
number of entries."""

from __future__ import annotations

import math
import pickle
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scale_out_plans import Job, Shapes, numel
from scipy.optimize import nnls

STATE_BYTES = 12
"""Of a parameter: float32, and two moments."""
SAVES = ("keyframe", "delta", "delta, warm")
Row = dict[str, Any]


@dataclass(frozen=True)
class Linear:
    """y = the sum of constants times features.

    Attributes:
        constants: one of each feature; none is negative.
    """

    constants: tuple[float, ...]

    @classmethod
    def fit(cls, points: Sequence[tuple[tuple[float, ...], float]], sizes: Sequence[float] | None = None) -> Linear:
        """The least squares of the errors of y at points (features, y), relative to `sizes`, else to y."""
        sizes = [abs(y) for _, y in points] if sizes is None else sizes
        rows = [
            ([u / size for u in features], y / size) for (features, y), size in zip(points, sizes, strict=True) if size
        ]
        if not rows:
            return cls((0.0,) * len(points[0][0]))
        features, values = (np.array(side, dtype=float) for side in zip(*rows, strict=True))
        scale = np.abs(features).max(axis=0)
        scale[scale == 0] = 1
        return cls(tuple(map(float, nnls(features / scale, values)[0] / scale)))

    def at(self, *features: float) -> float:
        return sum(constant * feature for constant, feature in zip(self.constants, features, strict=True))


@dataclass(frozen=True)
class Operation:
    """The constants of one operation, such as "lossless, delta".

    Attributes:
        stored: bytes of all files, from bytes of the state and ranks x tensors; None: nothing is written.
        processor: seconds of all ranks, from bytes of the state, ranks x tensors, and ranks.
        coordinator: seconds that rank 0 takes more than others, for each rank and entry.
        memory: of a rank, beyond its state: from bytes of its part of all and of the largest parameter, and 1.
        waits: seconds by the clock beyond those of the processor, if cores shared them evenly: from 1 and ranks.
        calls: how often each collective of torch is called.
        exchanged: bytes that a scheme's statistics take on any number of ranks: from rows and columns of the weights,
            and from tensors.
        overhead: bytes that the headers of gloo, TCP and IP take of a message.
    """

    stored: Linear | None
    processor: Linear
    coordinator: float
    memory: Linear
    waits: Linear
    calls: Mapping[str, int]
    exchanged: Linear
    overhead: float


def rows_and_columns(shapes: Shapes) -> int:
    """Rows and columns of all weights that are matrices."""
    return sum(shape[0] + math.prod(shape[1:]) for _, shape in shapes if len(shape) > 1)


def mean(rows: Iterable[float]) -> float:
    values = list(rows)
    return sum(values) / len(values)


def median(repeats: Sequence[Any]) -> Any:
    """The medians of all numbers of results that are alike: of lists and dictionaries, entry by entry."""
    first = repeats[0]
    if isinstance(first, dict):
        return {key: median([each[key] for each in repeats]) for key in first}
    if isinstance(first, list):
        return [median(parts) for parts in zip(*repeats, strict=True)]
    return statistics.median(repeats) if isinstance(first, int | float) else first


def find_row(run: Sequence[Row], rank: int, operation: str) -> Row:
    """The row of an operation on a rank."""
    return next(row for row in run[rank]["rows"] if row["operation"] == operation)


def measured(run: Sequence[Row], operation: str) -> Row:
    """The figures of an operation in a run, as `predict` names them, and what only `calibrate` needs."""
    rows = [find_row(run, rank, operation) for rank in range(len(run))]
    figures: Row = {
        "seconds": max(row["seconds"] for row in rows),
        "processor seconds of all ranks": sum(row["processor_seconds"] for row in rows),
        "bytes rank 0 receives": rows[0]["received"],
        "bytes rank 0 sends": rows[0]["sent"],
        "bytes the busiest other rank receives": max((row["received"] for row in rows[1:]), default=0),
        "messages of rank 0": rows[0]["messages"],
        "bytes on the wire": max(row["loopback_bytes"] for row in rows),
        "memory beyond the state, mean rank": mean(row["beyond_live_bytes"] for row in rows),
        "processor seconds of rank 0": rows[0]["processor_seconds"],
        "bytes that all ranks send": sum(row["sent"] for row in rows),
        "calls": rows[0]["calls"],
    }
    disk = next((row for row in run[0]["disk"] if row["operation"] == operation), {})
    names = {"stored_bytes": "bytes of all files", "largest_file": "bytes of the largest file"}
    names |= {"manifest_bytes": "bytes of the manifest", "files": "files", "links": "links"}
    return figures | {name: disk[key] for key, name in names.items() if disk}


Measured = tuple[Shapes, int, Row]
"""A model, the number of ranks, and the figures of an operation."""


def calibrate(figures: Sequence[Measured], operation: str, cores: int) -> Operation:
    """The constants of an operation from runs of some models; that of the most ranks says what messages take."""

    def fit(name: str, features: Callable[[int, int, int], tuple[float, ...]]) -> Linear:
        """Of a figure, from features of bytes of the state, tensors and ranks."""
        return Linear.fit([(features(_raw(shapes), 3 * len(shapes), n), row[name]) for shapes, n, row in figures])

    shapes, many, row = max(figures, key=lambda one: one[1])
    others = (row["processor seconds of all ranks"] - row["processor seconds of rank 0"]) / max(many - 1, 1)
    excess = row["processor seconds of rank 0"] - others if many > 1 else 0.0
    coordinator = max(excess, 0.0) / (many * Job(shapes, many).items)
    stored, headers = "bytes of all files" in row, 0.0
    if stored and many > 1:
        beyond = row["bytes on the wire"] - row["bytes that all ranks send"]
        headers = max(0.0, beyond) / messages_in_all(row["calls"], many)
    return Operation(
        fit("bytes of all files", lambda raw, tensors, n: (raw, n * tensors)) if stored else None,
        fit("processor seconds of all ranks", lambda raw, tensors, n: (raw, n * tensors, n if n > 1 else 0)),
        coordinator,
        Linear.fit([(_memory_features(one, n), of["memory beyond the state, mean rank"]) for one, n, of in figures]),
        _waits(figures, coordinator, cores),
        row["calls"],
        _exchanged(figures) if "fisher" in operation and stored else Linear((0.0, 0.0)),
        headers,
    )


def _memory_features(shapes: Shapes, ranks: int) -> tuple[float, ...]:
    """Bytes of a rank's part of the state, and of its part of the largest parameter and its moments; and 1."""
    largest = STATE_BYTES * max(math.prod(shape) for _, shape in shapes)
    return _raw(shapes) / ranks, largest / ranks, 1.0


def _waits(figures: Sequence[Measured], coordinator: float, cores: int) -> Linear:
    """Of seconds by the clock beyond those of work, relative to all of them."""
    points, sizes = [], []
    for shapes, n, row in figures:
        work = clock_seconds(row["processor seconds of all ranks"], coordinator * n * Job(shapes, n).items, n, cores)
        points.append(((1.0, float(n)), row["seconds"] - work))
        sizes.append(row["seconds"])
    return Linear.fit(points, sizes)


def _exchanged(figures: Sequence[Measured]) -> Linear:
    """Of bytes of statistics, as if all ranks were others, from rows and columns, and from tensors."""
    points = []
    for shapes, n, row in figures:
        if n > 1:
            of_save = save_messages(Job(shapes, n))["received"]
            names = "bytes rank 0 receives", "bytes the busiest other rank receives"
            most = max(row[name] - save for name, save in zip(names, of_save, strict=True)) - _sizes(row["calls"], n)
            points.append(((rows_and_columns(shapes), float(len(shapes))), most / (1 - 1 / n)))
    return Linear.fit(points) if points else Linear((0.0, 0.0))


def _sizes(calls: Mapping[str, int], ranks: int) -> int:
    """Bytes that a rank receives to know how much others send."""
    return 8 * (ranks - 1) * (calls.get("all_to_all_single", 0) // 2)


def clock_seconds(processor: float, coordinator: float, ranks: int, cores: int) -> float:
    """Seconds of work that ranks share evenly between cores, but for what rank 0 does alone."""
    return max(0.0, processor - coordinator) / min(ranks, cores) + coordinator


def _raw(shapes: Shapes) -> int:
    """Bytes of a training state."""
    return STATE_BYTES * numel(shapes)


@cache
def _message_sizes(shapes: Shapes, ranks: int) -> dict[str, int]:
    """Bytes of each message of a save on so many ranks."""
    job = Job(shapes, ranks)
    plan = job.plan(0)
    answer = pickle.dumps(plan.__class__(plan.items, storage_data=(0, ranks), planner_data=plan.planner_data))
    return {
        "plan": len(pickle.dumps(plan)),
        "answer": len(answer) - _moved(job),
        "result": len(pickle.dumps(job.results([plan], [_some_payload()])[0])),
        "metadata": len(pickle.dumps(job.metadata())),
    }


@cache
def _manifest_size(shapes: Shapes, ranks: int, depth: int) -> int:
    return len(Job(shapes, ranks).manifest(depth))


def _moved(job: Job) -> int:
    """Bytes of a rank's answer that are not there, as torch gives each step to one rank alone."""
    plan = job.plan(0)
    steps = [item.index.fqn for item in plan.items if item.index.fqn.endswith(".step")]
    others = {*steps[len(steps) // job.ranks :]} if job.ranks > 1 else set()
    left = [item for item in plan.items if item.index.fqn not in others]
    return len(pickle.dumps(plan.items)) - len(pickle.dumps(left))


def _some_payload() -> Any:
    from shrinkpoint.store.manifest import Payload

    return Payload("rank-00000.safetensors", 10**8, "0" * 32, 10**8)


def save_messages(job: Job) -> Row:
    """Bytes that rank 0, and any other rank, sends and receives in torch's collectives of a save."""
    size, others = _message_sizes(job.shapes, job.ranks), job.ranks - 1
    gathered, scattered = size["plan"] + size["result"], size["answer"]
    small = 8 * (2 * others + 2)  # sizes of objects
    received = (others * gathered + small, scattered + size["metadata"] + small) if others else (0, 0)
    sent = (others * (scattered + size["metadata"]) + small, gathered + small) if others else (0, 0)
    wire = others * (gathered + scattered + size["metadata"])
    return {"received": received, "sent": sent, "wire": wire}


def messages_of(calls: Mapping[str, int], ranks: int) -> int:
    """Messages that rank 0 sends or receives."""
    each = {"broadcast": math.ceil(math.log2(ranks)) if ranks > 1 else 0}
    return sum(count * each.get(name, ranks - 1) for name, count in calls.items())


def messages_in_all(calls: Mapping[str, int], ranks: int) -> int:
    """Messages that all ranks send."""
    senders = {"all_gather": ranks, "all_to_all_single": ranks}
    return sum(count * (ranks - 1) * senders.get(name, 1) for name, count in calls.items())


def predict(operation: Operation, name: str, shapes: Shapes, ranks: int, cores: int) -> Row:
    """The figures of an operation of so many ranks, coded by one thread each on so many cores."""
    job, raw = Job(shapes, ranks), _raw(shapes)
    tensors = 3 * len(shapes)
    processor = operation.processor.at(raw, ranks * tensors, ranks)
    coordinator = operation.coordinator * ranks * job.items
    figures: Row = {
        "processor seconds of all ranks": processor,
        "seconds": clock_seconds(processor, coordinator, ranks, cores) + operation.waits.at(1.0, ranks),
        "memory beyond the state, mean rank": operation.memory.at(*_memory_features(shapes, ranks)),
        "messages of rank 0": messages_of(operation.calls, ranks),
    }
    if operation.stored is None:
        return figures
    exchanged = operation.exchanged.at(rows_and_columns(shapes), len(shapes)) * (1 - 1 / ranks)
    if exchanged:
        exchanged += _sizes(operation.calls, ranks)
    messages = save_messages(job)
    depth = SAVES.index(name.partition(", ")[2])
    stored = operation.stored.at(raw, ranks * tensors)
    return figures | {
        "bytes of all files": stored,
        "bytes of the largest file": stored / ranks,
        "bytes of the manifest": _manifest_size(shapes, ranks, depth),
        "files": ranks + 3,
        "links": ranks * depth,
        "bytes rank 0 receives": messages["received"][0] + exchanged,
        "bytes rank 0 sends": messages["sent"][0] + exchanged,
        "bytes the busiest other rank receives": messages["received"][1] + exchanged if ranks > 1 else 0,
        "bytes on the wire": messages["wire"]
        + exchanged * ranks
        + operation.overhead * messages_in_all(operation.calls, ranks),
    }


def compare(figures: Row, truth: Row) -> Iterable[Row]:
    """Each predicted figure beside the measured one; those that are nothing in both are left out."""
    for name, value in figures.items():
        if name in truth and (truth[name] or value):
            error = value / truth[name] - 1 if truth[name] else math.inf
            yield {"figure": name, "predicted": value, "measured": truth[name], "error": error}


def coordinator_seconds(an_entry: Linear, entries: int) -> float:
    """Seconds of a part of the coordinator: an entry takes longer the more there are, as caches hold less of them."""
    return entries * an_entry.at(1.0, math.log2(entries))


@dataclass(frozen=True)
class Cluster:
    """What is not measured here but stated.

    Attributes:
        cores: of a rank.
        disk, disk_of_all: bytes a second that a rank, and all ranks together, write to a file system or read from it.
        bucket, bucket_of_all: the same of object storage.
        wire: bytes a second between ranks; latency: seconds of a message.
        names: names that the file system makes or removes in a second.
    """

    cores: int = 4
    disk: float = 2e9
    disk_of_all: float = 2e11
    bucket: float = 5e8
    bucket_of_all: float = 1e11
    wire: float = 2.5e9
    latency: float = 2e-5
    names: float = 2e4


def forecast(
    operation: Operation, name: str, shapes: Shapes, ranks: int, coordinator: Row, cluster: Cluster, depth: int
) -> Row:
    """A row of the table for a cluster, with so many bases a rank."""
    job, raw = Job(shapes, ranks), _raw(shapes)
    figures = predict(operation, name, shapes, ranks, ranks)
    stored, read = figures["bytes of all files"], figures["bytes of all files"] / ranks
    own = max(0.0, figures["processor seconds of all ranks"] / ranks - operation.coordinator * job.items)
    entries = ranks * job.items
    torch_seconds, our_seconds = (coordinator_seconds(coordinator[key], entries) for key in ("torch", "ours"))
    links = ranks * depth
    traffic = figures["bytes rank 0 receives"] + figures["bytes rank 0 sends"]
    exchange = traffic / cluster.wire + figures["messages of rank 0"] * cluster.latency
    return {
        "operation": name,
        "ranks": ranks,
        "state bytes a rank": raw / ranks,
        "bytes of all files": stored,
        "bytes of a file": read,
        "coding, seconds": own / cluster.cores,
        "disk, seconds": max(read / cluster.disk, stored / cluster.disk_of_all),
        "bucket, seconds": max(read / cluster.bucket, stored / cluster.bucket_of_all),
        "names, seconds": (2 * (ranks + links)) / cluster.names,
        "rank 0 in torch, seconds": torch_seconds,
        "rank 0 in shrinkpoint, seconds": our_seconds,
        "messages, seconds": exchange,
        "memory of a rank": figures["memory beyond the state, mean rank"],
        "memory of rank 0 for plans": coordinator["memory"].at(entries, 1.0),
        "bytes rank 0 receives": figures["bytes rank 0 receives"],
        "bytes rank 0 sends": figures["bytes rank 0 sends"],
        "bytes another rank receives": figures["bytes the busiest other rank receives"],
        "messages of rank 0": figures["messages of rank 0"],
        "bytes of the manifest": _manifest_size(shapes, ranks, depth),
        "bytes of the metadata": _message_sizes(shapes, ranks)["metadata"],
        "files": ranks + 3,
        "links": links,
    }
