"""What link.py measured, as tables and verdicts.

python benchmarks/link_tables.py            # writes the steps of pipelines between the marks of docs/wire_studies.md
python benchmarks/link_tables.py --check    # says whether they are what the results give
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median
from typing import Any

import document_tables
from workloads import REPO

DOCUMENT = REPO / "docs" / "wire_studies.md"
RESULT = REPO / "benchmarks" / "results" / "link.json"
NONE = "none"
OURS = ("q8:64", "q4:64 / q8:64", "q4:64", "n3:64")
"""Whose steps are to be shorter than the uncompressed ones'."""
BYTES = 0.03
"""By how much the kernel may have counted more than the ledgers."""
SPEEDS = ("q8", "q4", "q8:64", "q4:64")
LEAST = 2.0
"""GB/s of float32, encoding and decoding one after the other, on one core."""
SLOW = 1000
"""Mbit/s at which, and below which, compression is to pay."""


def evaluate(found: dict[str, Any]) -> None:
    """Add the rows of the table to what a part measured: one for each rate and case."""
    rows = [
        _row(int(rate), name, [rank[name] for rank in ranks])
        for rate, ranks in found["rates"].items()
        for name in ranks[0]
    ]
    uncompressed = {row["rate"]: row["seconds"] for row in rows if row["name"] == NONE}
    for row in rows:
        row["gain"] = uncompressed[row["rate"]] / row["seconds"]
    found["rows"] = rows


def _row(rate: int, name: str, ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Of all rounds: the first rank's steps, all ranks' bytes."""
    seconds = [value for turn in ranks[0] for value in turn["seconds"]]
    turns = [turn for rank in ranks for turn in rank]
    row = {"rate": rate, "name": name, "seconds": median(seconds), "least": min(seconds), "most": max(seconds)}
    row |= {"steps": len(seconds), "sent": sum(turn["sent"] for turn in turns) / len(seconds)}
    for key in ("raw", "wire", "encode", "decode"):
        row[key] = sum(turn["ledger"].get(key, 0) for turn in turns) / len(seconds)
    row["loss"] = next((turn["loss"] for turn in reversed(turns) if turn["loss"] is not None), None)
    return row


def show(figures: dict[str, Any], parts: list[str]) -> None:
    verdicts: list[tuple[bool, str]] = []
    if "speed" in parts and "speed" in figures:
        verdicts += _speed(figures["speed"])
    for part in ("pipeline", "stages"):
        for schedule, found in figures.get(part, {}).items() if part in parts else ():
            verdicts += _steps(f"pipeline, {schedule}", found)
    print()
    for passed, text in verdicts:
        print(f"{'PASS' if passed else 'miss'}  {text}")


def _speed(found: dict[str, Any]) -> list[tuple[bool, str]]:
    """Prints a table as docs/wire_studies.md has it, GB/s of tensor bytes; and what is promised of it."""
    print(f"\n{found['machine']}, torch {found['torch']}, {found['date']}; least of {found['repeats']} turns\n")
    wide, narrow = (
        {(row["name"], row["path"]): row for row in found[name]["rows"]} for name in ("float32", "bfloat16")
    )
    ways = "float32: encode | decode | both | bfloat16: encode | decode | both"
    print(f"| | {ways} | torch ops: both | error | pays below |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (name, path), row in wide.items():
        if path == "torch":
            continue
        figures = [f"{row[key]:.2f}" for row in (row, narrow[name, path]) for key in ("encode", "decode", "both")]
        by_torch = f"{wide[name, 'torch']['both']:.2f}" if (name, "torch") in wide else ""
        cells = (f"`{name}`" if path == "native" else name, *figures, by_torch, f"{row['error']:.3f}")
        limit = row["break_even"] / 1000
        print("|", " | ".join(cells), f"| {limit:.{int(limit < 10)}f} Gbit/s |" if limit > 0 else "| |")
    text = "encode + decode of {} on one core: {:.2f} GB/s of float32 (at least {:g})"
    both = {name: row["both"] for (name, path), row in wide.items() if path == "native"}
    return [(both[name] >= LEAST, text.format(name, both[name], LEAST)) for name in SPEEDS if name in both]


def _steps(title: str, found: dict[str, Any]) -> list[tuple[bool, str]]:
    job, verdicts = found["job"], []
    title = f"{title}, {job['world']} processes"
    print(f"\n{title}: seconds of a step, medians of {found['rows'][0]['steps']}; MB a step, all ranks together\n")
    head = ("Mbit/s", "", "step s", "least", "most", "gain", "kernel MB", "ledger MB", "enc s", "dec s")
    _print(head, [_cells(row) for row in found["rows"]], texts=2)
    worst = max((abs(_excess(row)), row["name"], row["rate"]) for row in found["rows"] if row["wire"])
    text = f"{title}: the kernel counted within {worst[0]:.1%} of the ledgers (at most {BYTES:.0%})"
    verdicts.append((worst[0] <= BYTES, f"{text}; worst: {worst[1]} at {worst[2] or 'no limit'}"))
    for row in found["rows"]:
        if 0 < row["rate"] <= SLOW and row["name"] in OURS:
            text = f"{title}: {row['name']} at {row['rate']} Mbit/s: {row['gain']:.2f} times as fast as uncompressed"
            verdicts.append((row["gain"] > 1, text))
    return verdicts


def _excess(row: dict[str, Any]) -> float:
    return float(row["sent"] / row["wire"] - 1)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = [f"{row[key]:.4f}" for key in ("seconds", "least", "most")]
    ledger = [f"{row['wire'] / 1e6:.3f}" if row["wire"] else "", *(f"{row[way]:.4f}" for way in ("encode", "decode"))]
    head = (str(row["rate"] or "no limit"), row["name"], *times, f"{row['gain']:.2f}")
    return (*head, f"{row['sent'] / 1e6:.3f}", *ledger)


def _print(head: tuple[str, ...], rows: list[tuple[str, ...]], *, texts: int) -> None:
    """Aligned; so many columns to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        pairs = zip(row, widths, strict=True)
        print("  ".join(text.ljust(w) if i < texts else text.rjust(w) for i, (text, w) in enumerate(pairs)).rstrip())


def tables(figures: Mapping[str, Any]) -> str:
    """The steps of every pipeline, as they stand between the marks."""
    every = [(schedule, found) for part in ("pipeline", "stages") for schedule, found in figures[part].items()]
    return "\n\n".join(_table(schedule, found) for schedule, found in every)


def _table(schedule: str, found: Mapping[str, Any]) -> str:
    """A line a case, from the slowest link to one without a limit; MB a step of all ranks, as the kernel counted."""
    rows, figure = {(row["name"], row["rate"]): row for row in found["rows"]}, document_tables.figure
    rates = sorted({rate for _, rate in rows}, key=lambda rate: rate or float("inf"))
    lines = []
    for name in dict.fromkeys(name for name, _ in rows):
        mine = [rows[name, rate] for rate in rates]
        gains = ["" if name == NONE else f" ({row['gain']:.1f})" for row in mine]
        seconds = [figure(row["seconds"]) + gain for row, gain in zip(mine, gains, strict=True)]
        label = "uncompressed" if name == NONE else " / ".join(f"`{spec}`" for spec in name.split(" / "))
        lines.append([label, *seconds, figure(mine[0]["sent"] / 1e6)])
    stages, steps = found["job"]["world"], found["rows"][0]["steps"]
    title = (
        f"**{schedule}, {stages} stages** (seconds of a step, medians of {steps}; in brackets how many times as fast "
        f"as uncompressed; {found['machine']}, {found['date']})"
    )
    return f"{title}\n\n{document_tables.table(['', *map(_link, rates), 'MB'], lines)}"


def _link(rate: int) -> str:
    """How a table names a link of so many Mbit/s."""
    if not rate:
        return "no limit"
    return f"{rate} Mbit/s" if rate < 1000 else f"{rate // 1000} Gbit/s"


if __name__ == "__main__":
    document_tables.main(__doc__, "link_tables", {DOCUMENT: tables(json.loads(RESULT.read_text())["result"])})
