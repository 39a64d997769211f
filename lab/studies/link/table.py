"""Tables of what run.py measured.

python -m lab.studies.link.table            # writes the steps of pipelines between the marks of docs/wire_studies.md
python -m lab.studies.link.table --check    # says whether they are what the results give
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import median
from typing import Any

from lab.studies.harness import DOCS, RESULTS, document_tables

DOCUMENT = DOCS / "wire_studies.md"
RESULT = RESULTS / "link.json"
NONE = "none"


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
    """Print the tables of these parts, and how far the kernel's bytes are from the ledgers'."""
    if "speed" in parts and "speed" in figures:
        _speed(figures["speed"])
    for part in ("pipeline", "stages"):
        for schedule, found in figures.get(part, {}).items() if part in parts else ():
            excess = max(abs(row["sent"] / row["wire"] - 1) for row in found["rows"] if row["wire"])
            print(f"\n{_table(schedule, found)}\n\nThe kernel counted within {excess:.1%} of the ledgers.")


def _speed(found: dict[str, Any]) -> None:
    """Print a table as docs/wire_studies.md has it, GB/s of tensor bytes."""
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
    document_tables.main(__doc__, __file__, {DOCUMENT: tables(json.loads(RESULT.read_text())["result"])})
