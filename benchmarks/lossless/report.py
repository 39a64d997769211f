"""Tables and verdicts out of what `run.py` measured. Plain data in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lab.studies.harness import columns

WITHIN = 1.05  # of the held-out entropy
FASTER = 1.2  # than zipnn's encoder
SCALING = 1.8  # from one thread to two


def ratio(stream: Mapping[str, Any], stored: float | None, raw: float | None = None) -> float | None:
    return (raw or stream["raw"]) / stored if stored else None


def ours(stream: Mapping[str, Any]) -> float | None:
    """Our ratio: of the whole file, header included, where the stream is a whole state."""
    return ratio(stream, stream.get("ours"), stream.get("ours_raw"))


def entropy(stream: Mapping[str, Any], key: str = "entropy") -> float:
    """The ratio that an estimate of the entropy stands for."""
    return float(stream["raw"] * 8 / stream["values"] / stream[key])


def best(stream: Mapping[str, Any]) -> tuple[str, float]:
    name = min(stream["rivals"], key=stream["rivals"].get)
    return name, stream["raw"] / stream["rivals"][name]


def _ratio(value: float | None) -> str:
    return f"{value:.3f}" if value else "-"


def ratios(streams: Mapping[str, Mapping[str, Any]]) -> str:
    """One row per stream: every ratio, the entropy as a ratio and in bits per value, ours in bits and relative."""
    names = list(next(iter(streams.values()))["rivals"])
    head = ["stream", "raw MB", "ours", *names, "entropy", "bits/value", "ours bits", "ours/entropy"]
    rows = []
    for name, stream in streams.items():
        bits, mine = stream["entropy"], ours(stream)
        width = stream["raw"] * 8 / stream["values"]
        rows.append(
            [
                name,
                f"{stream['raw'] / 1e6:.1f}",
                _ratio(mine),
                *(_ratio(stream["raw"] / stream["rivals"][rival]) for rival in names),
                _ratio(entropy(stream)),
                f"{bits:.3f}",
                _ratio(mine and width / mine),
                f"{width / mine / bits:.3f}" if mine else "-",
            ]
        )
    return columns(head, rows)


def speeds(found: Mapping[str, Mapping[str, Any]]) -> str:
    head = ["GB/s of raw bytes", "threads", "encode cpu", "encode wall", "best", "decode cpu", "decode wall", "best"]
    rows = []
    for threads, subjects in found.items():
        for name, ways in subjects.items():
            figures = [f"{ways[way][key]:.2f}" for way in ("encode", "decode") for key in ("cpu", "wall", "best")]
            rows.append([name, threads, *figures])
    return columns(head, rows)


def verdicts(result: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing that was to be reached, `PASS` or `miss` first."""
    for series, streams in result["series"].items():
        for name, stream in streams.items():
            if stream.get("ours"):
                yield from _of_stream(f"{series}: {name}", stream)
    if result.get("speed"):
        yield from _of_speed(result["speed"])


def _of_stream(where: str, stream: Mapping[str, Any]) -> Iterator[str]:
    mine, (rival, theirs) = ours(stream), best(stream)
    assert mine is not None
    yield _line(mine > theirs, f"{where}, best of all", f"{mine:.3f} against {rival}'s {theirs:.3f}")
    for key in ("entropy without taps", "entropy"):
        if key == "entropy" and stream[key] == stream["entropy without taps"]:
            continue  # no convolution here
        bound = entropy(stream, key)
        excess = 100 * (bound / mine - 1)
        what = "entropy" if key != "entropy" else "entropy that knows of taps"
        yield _line(bound <= mine * WITHIN, f"{where}, {what}", f"{excess:+.1f}% bits against {bound:.3f}")


def _of_speed(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    one = found["1"]
    for name in ("ours: W, core alone", "ours: W in one piece", "ours: W"):
        for way, factor in (("encode", FASTER), ("decode", 1.0)):
            if "zipnn" not in one or name not in one:
                continue
            mine, theirs = one[name][way]["cpu"], one["zipnn"][way]["cpu"]
            text = f"{mine:.2f} GB/s per core against zipnn's {theirs:.2f}, at least {factor}x: {mine / theirs:.2f}x"
            yield _line(mine >= factor * theirs, f"{way} fp32 {name[6:]}", text)
    for name in ("ours: W, core alone", "ours: W in one piece", "ours: W", "ours: W + m + v", "ours: W + m + v delta"):
        if name in one:
            for way in ("encode", "decode"):
                gain = found["2"][name][way]["wall"] / one[name][way]["wall"]
                yield _line(gain >= SCALING, f"{way}, 1 to 2 threads, {name[6:]}", f"{gain:.2f}x, at least {SCALING}x")


def _line(reached: bool, what: str, figures: str) -> str:
    return f"{'PASS' if reached else 'miss'}  {what}: {figures}"
