"""What a save costs in each framework: the tables of two pages out of the results that are committed.

    python -m benchmarks.frameworks.table            # writes them between the marks of each page
    python -m benchmarks.frameworks.table --check    # says whether they are what the results give

`run.py` measures; its output is results/frameworks.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lab.studies.harness import DOCS, RESULTS, document_tables

RESULT = RESULTS / "frameworks.json"
METHODS = {
    "transformers": {
        "stock": "stock",
        "shrinkpoint": "`ShrinkTrainer`",
        "background": "`ShrinkConfig(background=True)`",
        "fisher": '`ShrinkConfig(scheme=Fisher(budget="1%", evaluate=...))`',
    },
    "accelerate": {
        "stock": "`accelerator.save_state`",
        "shrinkpoint": "`save_state`",
        "background": "`save_state`, `background=True`",
        "fisher": '`save_state`, `Fisher(budget="1%", evaluate=...)`',
    },
    "lightning": {
        "stock": "stock",
        "shrinkpoint": "`ShrinkIO()`",
        "background": "`ShrinkIO(background=True)`",
        "fisher": '`ShrinkIO(sp.Fisher(budget="1%", evaluate=...))`',
    },
    "dcp": {
        "stock": "`dcp.save`",
        "shrinkpoint": "`dcp.save(storage_writer=Writer(path))`",
        "stock async": "`dcp.async_save`",
        "shrinkpoint async": "`dcp.async_save(storage_writer=Writer(path))`",
        "fisher": '`Writer(path, scheme=Fisher(budget="1%", evaluate=...), model=model)`',
    },
}
"""How a page calls each method of `run.py`."""
TITLES = {
    "transformers": "transformers",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "dcp": "torch.distributed.checkpoint, 2 ranks, FSDP2",
}
HEAD = (
    "| | bytes of all {saves} | first | later | stall of the first save, s | of later ones: median | worst "
    "| made durable afterwards, s |\n|---|---|---|---|---|---|---|---|"
)
SUMMARY_HEAD = (
    "| | lossless: first / later | `Fisher`: later | `Fisher`: rise of the loss, mean, worst "
    "| stall, s: stock / lossless / in the background | `Fisher`: stall, s, first / later |\n|---|---|---|---|---|---|"
)

Figures = Mapping[str, Any]


def ratios(figures: Figures, name: str) -> tuple[float, float]:
    """How many times smaller the first checkpoint and the later ones of a method are than the stock ones."""
    stock, own = figures["bytes"]["stock"], figures["bytes"][name]
    return stock[0] / own[0], (stock[-1] - stock[0]) / (own[-1] - own[0])


def seconds(value: float) -> str:
    """
    >>> seconds(0.0256), seconds(0.34), seconds(2.426)
    ('0.026', '0.34', '2.4')
    """
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 1 else f"{value:.1f}"


def rise(figures: Figures) -> str:
    """Mean and worst rise of the loss, in per cent."""
    rises = figures["rise"]
    return f"{100 * fmean(rises):+.2f}%, {100 * max(rises):+.2f}%"


def table(figures: Figures, names: Mapping[str, str]) -> str:
    """A line a method, beside the stock one; bytes in MB."""
    lines = [HEAD.format(saves=len(figures["seconds"]["stock"]))]
    for name, label in names.items():
        first, later = ratios(figures, name)
        took, flush = figures["seconds"][name], median(figures["flush"][name][1:])
        cells = [
            f"{label}: rise {rise(figures)}" if name == "fisher" else label,
            f"{figures['bytes'][name][-1] / 1e6:.1f} MB",
            *(f"{ratio:.3g}x" if ratio >= 100 else f"{ratio:.2f}x" for ratio in (first, later)),
            *(seconds(value) for value in (took[0], median(took[1:]), max(took[1:]), flush)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(result: Figures) -> str:
    """A line a framework."""
    lines = [SUMMARY_HEAD]
    for part, title in TITLES.items():
        figures = result[part]
        first, later = ratios(figures, "shrinkpoint")
        stalls = {name: median(took[1:]) for name, took in figures["seconds"].items()}
        background = "shrinkpoint async" if part == "dcp" else "background"
        stock = seconds(stalls["stock"]) + (f" (async {seconds(stalls['stock async'])})" if part == "dcp" else "")
        cells = [
            title,
            f"{first:.2f}x / {later:.2f}x smaller",
            f"{ratios(figures, 'fisher')[1]:.0f}x smaller",
            rise(figures),
            f"{stock} / {seconds(stalls['shrinkpoint'])} / {seconds(stalls[background])}",
            f"{seconds(figures['seconds']['fisher'][0])} / {seconds(stalls['fisher'])}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pages(document: Figures) -> dict[Path, str | dict[str, str]]:
    """What stands between the marks of each page."""
    result = document["result"]
    tables = {part: table(result[part], names) for part, names in METHODS.items()}
    return {DOCS / "store_studies.md": tables, DOCS / "benchmarks.md": summary(result)}


if __name__ == "__main__":
    document_tables.main(__doc__, __file__, pages(json.loads(RESULT.read_text())))
