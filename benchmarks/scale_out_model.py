"""What saves and loads on R ranks cost, from constants that were measured on a few ranks; part of `scale_out.py`.

Three kinds of figures. Messages, manifests and metadata are made by the library's own code for the R ranks and measured
(`scale_out_plans.py`). Bytes, seconds and memory of a rank are linear in what it holds and in the number of tensors:
two constants for each, from three runs, a small model on 2 and on 8 ranks, and a larger one on 2. (One rank plans a
lossy save as a process without shards does, on another path.) The coordinator is linear in ranks x entries."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from scale_out_plans import Job, Shapes, numel

STATE_BYTES = 12
"""Of a parameter: float32, and two moments."""
SAVES = ("keyframe", "delta", "delta, warm")
Row = dict[str, Any]


@dataclass(frozen=True)
class Linear:
    """y = a u + b v, as near to what was measured as can be.

    Attributes:
        a, b: of bytes of a state, and of whatever else.
    """

    a: float
    b: float

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float, float]]) -> Linear:
        """The least squares of the relative errors of y at points (u, v, y); no constant is negative."""
        scaled = [(u / y, v / y) for u, v, y in points if y > 0]
        if not scaled:
            return cls(0.0, 0.0)
        uu, uv, vv = (sum(x[i] * x[j] for x in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
        u, v = (sum(x[i] for x in scaled) for i in (0, 1))
        determinant = uu * vv - uv * uv
        a, b = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
        if b < 0:
            return cls(u / uu, 0.0)
        return cls(a, b) if a > 0 else cls(0.0, v / vv)

    def at(self, u: float, v: float) -> float:
        return self.a * u + self.b * v


@dataclass(frozen=True)
class Operation:
    """The constants of one operation, such as "lossless, delta".

    Attributes:
        stored: bytes of all files, from bytes of the state and ranks x tensors; None: nothing is written.
        processor: seconds of all ranks, from the same.
        coordinator: seconds that rank 0 takes more than others, for each rank and entry.
        memory: of a rank, beyond its state: from bytes of its part, and 1.
        waits: seconds in which the processor is idle, as for the disk, at the least.
        calls: how often each collective of torch is called.
        exchanged: bytes that a scheme's statistics take, for each row and column of the weights, on any number of
            ranks.
        overhead: bytes that the headers of gloo, TCP and IP take of a message.
    """

    stored: Linear | None
    processor: Linear
    coordinator: float
    memory: Linear
    waits: float
    calls: Mapping[str, int]
    exchanged: float
    overhead: float


def rows_and_columns(shapes: Shapes) -> int:
    """Rows and columns of all weights that are matrices."""
    return sum(shape[0] + math.prod(shape[1:]) for _, shape in shapes if len(shape) > 1)


def mean(rows: Iterable[float]) -> float:
    values = list(rows)
    return sum(values) / len(values)


def find_row(run: Sequence[Row], rank: int, operation: str) -> Row:
    """The row of an operation on a rank."""
    return next(row for row in run[rank]["rows"] if row["operation"] == operation)


def measured(run: Sequence[Row], operation: str) -> Row:
    """The figures of an operation in a run, as `predict` names them."""
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
    }
    disk = next((row for row in run[0]["disk"] if row["operation"] == operation), {})
    names = {"stored_bytes": "bytes of all files", "largest_file": "bytes of the largest file"}
    names |= {"manifest_bytes": "bytes of the manifest", "files": "files", "links": "links"}
    return figures | {name: disk[key] for key, name in names.items() if disk}


def calibrate(runs: Sequence[tuple[Shapes, Sequence[Row]]], operation: str) -> Operation:
    """The constants of an operation from runs of some models; that of the most ranks says what messages take."""
    figures = [(shapes, len(run), measured(run, operation)) for shapes, run in runs]

    def line(name: str) -> Linear:
        return Linear.fit([(_raw(shapes), ranks * 3 * len(shapes), row[name]) for shapes, ranks, row in figures])

    memory = [(_raw(shapes) / n, 1.0, row["memory beyond the state, mean rank"]) for shapes, n, row in figures]
    waits = [row["seconds"] - row["processor seconds of all ranks"] / n for _, n, row in figures]
    shapes, run = max(runs, key=lambda one: len(one[1]))
    many, of_many = len(run), measured(run, operation)
    rows = [find_row(run, rank, operation) for rank in range(many)]
    excess = rows[0]["processor_seconds"] - mean(row["processor_seconds"] for row in rows[1:])
    calls = rows[0]["calls"]
    exchanges = calls.get("all_to_all_single", 0) // 2
    objects = 8 * (many - 1) * exchanges  # the sizes
    exchanged = 0.0
    if "fisher" in operation and exchanges > 3:
        job = Job(shapes, many)
        of_save = save_messages(job)
        exchanged = max(row["received"] - of_save["received"][bool(rank)] for rank, row in enumerate(rows)) - objects
        exchanged /= (1 - 1 / many) * rows_and_columns(shapes)
    in_all = sum(row["sent"] for row in rows)
    return Operation(
        line("bytes of all files") if "bytes of all files" in figures[0][2] else None,
        line("processor seconds of all ranks"),
        max(excess, 0.0) / (many * Job(shapes, many).items),
        Linear.fit(memory),
        max(0.0, min(waits)),
        calls,
        exchanged,
        max(0.0, of_many["bytes on the wire"] - in_all) / messages_in_all(calls, many),
    )


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
    processor = operation.processor.at(raw, ranks * tensors)
    coordinator = operation.coordinator * ranks * job.items
    beside = max(0.0, processor - coordinator) / min(ranks, cores)
    figures: Row = {
        "processor seconds of all ranks": processor,
        "seconds": beside + coordinator + operation.waits,
        "memory beyond the state, mean rank": operation.memory.at(raw / ranks, 1.0),
        "messages of rank 0": messages_of(operation.calls, ranks),
    }
    if operation.stored is None:
        return figures
    exchanges = operation.calls.get("all_to_all_single", 0) // 2
    exchanged = operation.exchanged * (1 - 1 / ranks) * rows_and_columns(shapes) + 8 * (ranks - 1) * exchanges
    if not operation.exchanged:
        exchanged = 0.0
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
    torch_seconds, our_seconds = (coordinator[key] * entries for key in ("torch", "ours"))
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
        "memory of rank 0 for plans": coordinator["memory"] * entries,
        "bytes rank 0 receives": figures["bytes rank 0 receives"],
        "bytes rank 0 sends": figures["bytes rank 0 sends"],
        "bytes another rank receives": figures["bytes the busiest other rank receives"],
        "messages of rank 0": figures["messages of rank 0"],
        "bytes of the manifest": _manifest_size(shapes, ranks, depth),
        "bytes of the metadata": _message_sizes(shapes, ranks)["metadata"],
        "files": ranks + 3,
        "links": links,
    }
