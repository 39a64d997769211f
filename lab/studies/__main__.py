"""Run the studies of the papers, one after the other, within a budget that is stated for each.

    python -m lab.studies                  # everything: see --list for the hours
    python -m lab.studies --quick          # the same code on toys or on a part: half an hour
    python -m lab.studies --list           # what would run, and the minutes of each
    python -m lab.studies --only wire      # one of them

Each study is a module of its folder. Those with a ledger go on where they were stopped. Results go to results/, of
quick runs to results/quick/. A study that fails is named at the end, and the others run all the same.
docs/reproduction.md says which table or figure of which paper each one is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from lab.studies.harness import environment, program

WEEK = 7 * 24 * 60
"""Minutes that all studies may take together."""
QUICK = 30
"""The same of quick runs."""


@dataclass(frozen=True)
class Study:
    """One command, whole and quick.

    Attributes:
        module: below lab.studies; a name without a dot is that of a folder with a run.py.
        minutes: of the whole study, on two cores of 2.6 GHz.
        quick: arguments of a quick run.
        quick_minutes: its minutes.
        suffix: of what it writes: ".jsonl" is a ledger, of a line a run, "" a folder.
        root: it makes network namespaces, and is skipped by other users.
    """

    module: str
    minutes: float
    quick: Sequence[str] = ("--quick",)
    quick_minutes: float = 1
    suffix: str = ".json"
    root: bool = False

    def command(self, *, quick: bool, out: Path) -> list[str]:
        """The command, with a file of its own for the results of a quick run."""
        chosen = (*self.quick, "--out", str(out / f"{self.module}{self.suffix}")) if quick else ()
        module = self.module if "." in self.module else f"{self.module}.run"
        return program(f"lab.studies.{module}", *chosen)


STUDIES = (
    Study("fisher", 30),
    Study("schemes.long_run", 60, suffix=""),
    Study("schemes", 50, suffix=""),
    Study("recovery", 800, suffix=".jsonl"),
    Study("transfer", 130, suffix=".jsonl"),
    Study("transfer.fine_tunes", 40, ("--quick", "--seeds", "0", "--tasks", "sst2"), 2, suffix=".jsonl"),
    Study("rework", 90, suffix=".jsonl"),
    Study("wire", 1400, suffix=".jsonl"),
    Study("retention", 12),
    Study("gradients", 7, ("--steps", "20", "--seeds", "1", "--only", "none", "q4:64", "lowrank4"), 1),
    Study("gradients.local_steps", 120, ("--quick", "--seeds", "0", "--ranks", "2", "--tasks", "gpt"), 1),
    Study("gradients.moments", 20, ("--quick", "--seeds", "0", "--tasks", "gpt"), 1),
    Study("weight_sync", 15),
    Study("link", 15, ("--smoke",), 2, root=True),
)


def run(study: Study, *, quick: bool, out: Path) -> dict[str, object]:
    """Run one study; its output goes where ours goes."""
    row: dict[str, object] = {"study": study.module}
    if study.root and os.geteuid() != 0:
        return row | {"skipped": "it makes network namespaces, which takes root"}
    began = time.perf_counter()
    done = subprocess.run(study.command(quick=quick, out=out), check=False, env=environment())
    return row | {"minutes": (time.perf_counter() - began) / 60, "exit": done.returncode}


def show(quick: bool) -> None:
    """The commands, and what they take."""
    for study in STUDIES:
        minutes = study.quick_minutes if quick else study.minutes
        command = study.command(quick=quick, out=Path("results/quick"))
        print(f"{minutes:6g} min  python {' '.join(command[1:])}")
    total = sum(study.quick_minutes if quick else study.minutes for study in STUDIES)
    print(f"{total:6g} min  together; the budget is {QUICK if quick else WEEK:,} minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="toys, or a part, by the same code")
    parser.add_argument("--only", nargs="+", choices=[study.module for study in STUDIES], help="these alone")
    parser.add_argument("--list", action="store_true", help="print the commands and their minutes, run nothing")
    args = parser.parse_args()
    if args.list:
        show(args.quick)
        return
    out = Path("results/quick")
    out.mkdir(parents=True, exist_ok=True)
    began, rows = time.perf_counter(), []
    for study in STUDIES:
        if not args.only or study.module in args.only:
            print(f"\n== {study.module}", flush=True)
            rows.append(run(study, quick=args.quick, out=out))
    report = Path("results") / f"studies{'-quick' if args.quick else ''}.json"
    minutes = (time.perf_counter() - began) / 60
    report.write_text(json.dumps({"date": date.today().isoformat(), "minutes": minutes, "studies": rows}, indent=1))
    failed = [str(row["study"]) for row in rows if row.get("exit")]
    skipped = [f"{row['study']} ({row['skipped']})" for row in rows if "skipped" in row]
    print(f"\n{len(rows)} studies, {minutes:.0f} minutes")
    for what, names in (("skipped", skipped), ("failed", failed)):
        if names:
            print(f"{what}: {', '.join(names)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
