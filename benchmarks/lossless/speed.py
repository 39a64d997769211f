"""GB/s of raw input: ours and the rivals', in turns, so that a busy moment of the machine meets all of them.

One thread: CPU time of the process and wall time. All threads: wall time. Medians. Every subject gets a fresh copy of
its input before the clock starts, and only its own call is timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.lossless import compressors
from benchmarks.lossless.compressors import Array


@dataclass(frozen=True)
class Subject:
    """Something that encodes and decodes.

    Attributes:
        nbytes: raw bytes of its input.
        prepare: a fresh input; not timed.
        encode, decode: timed; `decode` gets what `encode` gave.
    """

    name: str
    nbytes: int
    prepare: Callable[[], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    slow: bool = False


@dataclass(frozen=True)
class Speed:
    """GB/s of raw bytes: by CPU time, by wall time, and the best wall time seen."""

    cpu: float
    wall: float
    best: float


def of_rival(rival: compressors.Rival, array: Array) -> Subject:
    return Subject(rival.name, array.nbytes, lambda: rival.prepare(array), rival.pack, rival.unpack)


def of_ours(name: str, job: Any, threads: int) -> Subject:
    encode = job.encode(threads)
    return Subject(name, job.nbytes, lambda: None, lambda _: encode(), lambda records: job.decode(records, threads)())


def measure(subjects: list[Subject], repeats: int) -> dict[str, dict[str, Speed]]:
    """{name: {"encode": Speed, "decode": Speed}}; the first round is a warm-up that does not count."""
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(repeats + 1):
        for subject in subjects:
            packed, encoding = _timed(subject.encode, subject.prepare())
            _, decoding = _timed(subject.decode, packed)
            if turn:
                seen.setdefault((subject.name, "encode"), []).append(encoding)
                seen.setdefault((subject.name, "decode"), []).append(decoding)
    return {s.name: {way: _speed(s.nbytes, seen[s.name, way]) for way in ("encode", "decode")} for s in subjects}


def _timed(call: Callable[[Any], Any], argument: Any) -> tuple[Any, tuple[float, float]]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = call(argument)
    return result, (time.process_time() - cpu, time.perf_counter() - wall)


def _speed(nbytes: int, times: list[tuple[float, float]]) -> Speed:
    cpu, wall = zip(*times, strict=True)
    return Speed(*(nbytes / t / 1e9 for t in (statistics.median(cpu), statistics.median(wall), min(wall))))


def study(array: Array, jobs: dict[str, Any], repeats: int) -> dict[str, dict[str, dict[str, Speed]]]:
    """Speeds by number of threads: one, two, and all where that is more.

    Args:
        array: fp32 W of all tensors in one piece, for the rivals.
        jobs: ours by name; "W" is the one beside the rivals.
    """
    found = {}
    for threads in sorted({1, 2, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        ours = [of_ours(f"ours: {name}", job, threads) for name, job in jobs.items()]
        others = [r for r in compressors.installed(threads) if threads == 1 or r.threaded]
        found[str(threads)] = measure(ours + [of_rival(r, array) for r in others], repeats)
    return found
