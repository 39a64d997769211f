"""Lossless checkpoints: sizes beside the rivals' and the entropies, and speed. Method: README.md beside this file.

python -m benchmarks.lossless.run [--cache DIR] [--data DIR] [--out results/lossless.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lossless import compressors, entropy, ours, report, series, speed
from benchmarks.lossless.compressors import Array, Rival
from benchmarks.lossless.entropy import Fields
from benchmarks.lossless.series import Checkpoint, Series

Streams = dict[str, dict[str, Any]]


def bf16(values: Array) -> Array:
    """The bits of these float32 rounded to bfloat16, as uint16."""
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


class Table:
    """Collects, per stream, bytes by codec (summed over checkpoints) and entropies (averaged over values)."""

    def __init__(self, found: list[Rival]) -> None:
        self.rivals = found
        self.streams: Streams = {}

    def stream(self, name: str) -> dict[str, Any]:
        empty = {"raw": 0, "values": 0, "rivals": {r.name: 0 for r in self.rivals}, "bits": {}}
        return self.streams.setdefault(name, empty)

    def add(self, name: str, raw: int, values: int, sizes: Mapping[str, int], bits: Mapping[str, float]) -> None:
        """One more checkpoint of a stream. `bits` are estimates of bits per value; they are weighted by `values`."""
        stream = self.stream(name)
        stream["raw"] += raw
        stream["values"] += values
        for rival, size in sizes.items():
            stream["rivals"][rival] += size
        for estimate, one in bits.items():
            stream["bits"][estimate] = stream["bits"].get(estimate, 0.0) + one * values

    def add_ours(self, name: str, stored: float, raw: int) -> None:
        stream = self.stream(name)
        stream["ours"] = stream.get("ours", 0) + stored
        stream["ours_raw"] = stream.get("ours_raw", 0) + raw

    def finish(self) -> Streams:
        for stream in self.streams.values():
            stream["bits"] = {name: total / stream["values"] for name, total in stream["bits"].items()}
            stream["entropy"] = entropy.smallest(stream["bits"])
            stream["entropy without taps"] = entropy.smallest(stream["bits"], taps=False)
        return self.streams


def sizes(found: list[Rival], array: Array, base: Array | None = None) -> dict[str, int]:
    return {rival.name: rival.checked(array, base) for rival in found}


def smallest(*alternatives: Mapping[str, int]) -> dict[str, int]:
    return {name: min(one[name] for one in alternatives) for name in alternatives[0]}


def total(*parts: Mapping[str, int]) -> dict[str, int]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def state_bits(*parts: Mapping[str, float]) -> dict[str, float]:
    """The mean over equally large parts of a state, each at its smallest."""
    return {
        "sum": statistics.mean(entropy.smallest(part, taps=False) for part in parts),
        entropy.TAPS + "sum": statistics.mean(entropy.smallest(part) for part in parts),
    }


def fields(checkpoint: Checkpoint) -> tuple[Fields, Fields, Fields]:
    w, m, v = (Fields.of(checkpoint.tensors[stream]) for stream in "Wmv")
    return w, m, v


def keyframe(out: Table, checkpoint: Checkpoint) -> None:
    """Every stream of one checkpoint that stands alone, by the rivals and by entropy."""
    w, m, v = fields(checkpoint)
    half = bf16(w.values)
    bits = {
        "W fp32": entropy.parameters(w, w.values),
        "W bf16": entropy.parameters(w, half),
        "m": entropy.first_moments(m, v),
        "v": entropy.second_moments(v),
    }
    parts = {}
    for name, array in (("W fp32", w.values), ("W bf16", half), ("m", m.values), ("v", v.values)):
        parts[name] = sizes(out.rivals, array)
        out.add(name, array.nbytes, array.size, parts[name], bits[name])
    n = w.values.size
    whole = total(parts["W fp32"], parts["m"], parts["v"])
    out.add("W + m + v", 12 * n, 3 * n, whole, state_bits(bits["W fp32"], bits["m"], bits["v"]))


def delta(out: Table, distance: str, base: Checkpoint, new: Checkpoint) -> None:
    """Every stream of one checkpoint whose base is known. Rivals take, for each of W, m and v, what is smaller."""
    w, m, v = fields(new)
    old = base.flat("W")
    half, old_half = bf16(w.values), bf16(old)
    bits = entropy.delta(w.values, old, m, v)
    weights = sizes(out.rivals, w.values, old)
    n = w.values.size
    out.add(f"W fp32, {distance} later", 4 * n, n, weights, bits)
    narrow = sizes(out.rivals, half, old_half)
    out.add(f"W bf16, {distance} later", 2 * n, n, narrow, entropy.delta(half, old_half, m, v))
    parts = [smallest(weights, sizes(out.rivals, w.values))]
    for stream, now in (("m", m), ("v", v)):
        parts.append(smallest(sizes(out.rivals, now.values), sizes(out.rivals, now.values, base.flat(stream))))
    whole = state_bits(bits, entropy.first_moments(m, v), entropy.second_moments(v))
    out.add(f"W + m + v, {distance} later", 12 * n, 3 * n, total(*parts), whole)


def measure_ours(out: Table, one: Series) -> None:
    """Our sizes on the same streams. Deltas stand on the decoded keyframe of their base."""
    for checkpoint in one.keyframes:
        saved = ours.save(checkpoint)
        for stream, role in ours.ROLES.items():
            name = "W fp32" if stream == "W" else stream
            out.add_ours(name, saved.stored[role], saved.raw[role])
        out.add_ours("W + m + v", saved.file, saved.file_raw)
        narrow = ours.save(checkpoint.half())
        out.add_ours("W bf16", narrow.stored["parameter"], narrow.raw["parameter"])
    for distance, pairs in one.pairs.items():
        for base, new in pairs:
            saved = ours.save(new, ours.save(base).reference)
            out.add_ours(f"W fp32, {distance} later", saved.stored["parameter"], saved.raw["parameter"])
            out.add_ours(f"W + m + v, {distance} later", saved.file, saved.file_raw)
            narrow = ours.save(new.half(), ours.save(base.half()).reference)
            out.add_ours(f"W bf16, {distance} later", narrow.stored["parameter"], narrow.raw["parameter"])


def study(one: Series, found: list[Rival]) -> Streams:
    began = time.perf_counter()
    out = Table(found)
    for checkpoint in one.keyframes:
        keyframe(out, checkpoint)
    for distance, pairs in one.pairs.items():
        for base, new in pairs:
            delta(out, distance, base, new)
    measure_ours(out, one)
    streams = out.finish()
    print(f"\n{one.name} ({time.perf_counter() - began:.0f} s)\n{report.ratios(streams)}", flush=True)
    return streams


def speeds(base: Checkpoint, new: Checkpoint, repeats: int) -> dict[str, Any]:
    found = speed.study(new.flat("W"), ours.jobs(base, new), repeats)
    return {
        threads: {name: {way: dataclasses.asdict(one) for way, one in ways.items()} for name, ways in subjects.items()}
        for threads, subjects in found.items()
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = os.environ.get("SHRINKPOINT_DATA")
    parser.add_argument("--cache", type=Path, default=series.default_cache(), help="where the demo's checkpoints lie")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None, help="holds series_ssl_adamw")
    parser.add_argument("--every", type=int, default=1, help="take every n-th pair of published epochs")
    parser.add_argument("--repeats", type=int, default=5, help="of each timing")
    parser.add_argument("--only", nargs="+", choices=("sizes", "speed"), default=("sizes", "speed"))
    parser.add_argument("--out", type=Path, default=Path("results/lossless.json"))
    return parser.parse_args()


def main() -> int:
    args = arguments()
    began = time.perf_counter()
    torch.set_num_threads(1)
    ends = series.demo(args.cache)
    found = compressors.installed()
    result: dict[str, Any] = {
        "machine": speed.machine(),
        "rivals": {r.name: r.version for r in found},
        "series": {},
    }
    print("rivals:", ", ".join(f"{name} {version}" for name, version in result["rivals"].items()))
    if "sizes" in args.only:
        for one in (*ends, *series.published(args.data, args.every)):
            result["series"][one.name] = study(one, found)
    base, new = ends[-1].pairs["10"][0]
    if "speed" in args.only:
        result["speed"] = speeds(base, new, args.repeats)
        print("\n" + report.speeds(result["speed"]), flush=True)
    result["verdicts"] = list(report.verdicts(result))
    result["seconds"] = time.perf_counter() - began
    print("\n" + "\n".join(result["verdicts"]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))
    print(f"\n{result['seconds']:.0f} s; written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
