"""Everything that studies and benchmarks share: paths, the machine, a ledger of runs, committed results, tables.

Programs are modules, which are started in the repository: `python -m lab.studies.recovery.run`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
DOCS = REPO / "docs"
RESULTS = REPO / "benchmarks" / "results"
"""The results that documents quote, which are committed."""


def default_data() -> Path:
    """Where the published data lie: SHRINKPOINT_DATA, or beside the repository."""
    return Path(os.environ.get("SHRINKPOINT_DATA") or REPO.parent / "shared" / "data")


def program(module: str, *arguments: object) -> list[str]:
    """The command that runs a module of the repository, with `environment`."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment(**settings: str) -> dict[str, str]:
    """The variables of this process and `settings`, with which Python finds the repository from every directory."""
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **settings}


def fork_ranks(
    count: int, work: Callable[[int, str], None], *, collect: Callable[[str], None] = lambda folder: None
) -> bool:
    """Run `work` with each rank and a folder that all share, in forked processes; return True if one failed.

    Forked, since importing torch takes longer than a short run.

    Args:
        collect: reads the folder at the end, if no process failed.
    """
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(count):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    work(rank, folder)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
        has_failed = max(os.waitpid(child, 0)[1] for child in children) > 0
        if not has_failed:
            collect(folder)
        return has_failed


def machine() -> dict[str, Any]:
    """The processor, the load and the versions that figures depend on."""
    import numpy
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(names)) or "unknown",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *others]).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])
