"""Kill a training at every file event of its saves and see what comes back, by ckpt-chaos (PyPI, MIT).

    python benchmarks/crash_points.py                                  # every framework, stock and ours, every kill
    point
    python benchmarks/crash_points.py --only lightning --points 10     # a part

ckpt-chaos runs `crash_points_train.py` once to see its file events (a file opened for writing, renamed or removed, a
directory made), then once for each of them and kills it there; where a file is written by torch.save, safetensors or
Python's `open`, a second time with the file cut in half. It starts the same command again and compares with the run
that was never killed: HARD_FAIL, the resume raised; SILENT_DIVERGENCE, the last weights differ; LOST_WORK, it went on
from an older checkpoint than the newest whole one; PASS.

ckpt-chaos does not see files that are opened without Python's `open`, as ours are: of these it kills the rename, not
the writing; `crash_recovery.py` kills at any moment. The stock runs resume as their documentation says,
and as most programs do:
from the newest by name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crash_points_train import RUNS

PROGRAM = Path(__file__).with_name("crash_points_train.py")
CHECKPOINTS = {
    "loop": "{out}/step-*",
    "transformers": "{out}/checkpoint-*",
    "lightning": "{out}/step=*",
    "dcp": "{out}/step-*",
}
TORN = ("transformers",)
"""Where files beside ours are written by what ckpt-chaos can cut in half; it shares the kills out among both kinds."""
EVERY_POINT = 10_000


@dataclass
class Trial:
    """One framework, stock or ours, killed again and again.

    Attributes:
        framework, saves: what was run.
        events: of files, in a run that was not killed.
        kills: runs that were killed.
        verdicts: how many resumes were PASS, HARD_FAIL, SILENT_DIVERGENCE, LOST_WORK.
        control: the verdict on a run that was not killed.
        failures: kill point and verdict of those that were no PASS.
    """

    framework: str
    saves: str
    events: int = 0
    kills: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    control: str = ""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def right(self) -> int:
        return self.verdicts.get("PASS", 0)


def trial(framework: str, saves: str, work: Path, *, points: int = EVERY_POINT, jobs: int = 1) -> Trial:
    """Kill one training at `points` of its file events, evenly chosen, and judge every resume.

    Args:
        work: a directory that does not exist; everything is written there.
    """
    from ckpt_chaos.byo import run_byo

    began = time.perf_counter()
    rows = run_byo(
        [sys.executable, str(PROGRAM), framework, saves, "{out}"],
        None,
        work,
        jobs=jobs,
        max_points=points,
        result_file="{out}/../final.txt",
        step_regex=r"resumed from step (\d+)",
        checkpoint_glob=CHECKPOINTS[framework],
        modes=("before",) if saves != "stock" and framework not in TORN else ("before", "torn"),
        ignore_size=saves != "stock",  # numbers in a manifest differ in length; what is there is whole
    )
    control, kills = rows[0], rows[1:]
    return Trial(
        framework,
        saves,
        events=len((work / "reference" / "events.log.rank0").read_text().splitlines()),
        kills=len(kills),
        verdicts=dict(Counter(row.verdict for row in kills)),
        control=control.verdict,
        failures=[f"{row.label}: {row.verdict}" for row in kills if row.verdict != "PASS"],
        seconds=round(time.perf_counter() - began, 1),
    )


def table(trials: list[Trial]) -> str:
    """In Markdown."""
    lines = [
        "| | file events | kills | resumed right | resume raised | other weights | an older checkpoint |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in trials:
        counts = (one.verdicts.get(name, 0) for name in ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK"))
        cells = " | ".join(str(count) for count in (one.events, one.kills, *counts))
        lines.append(f"| {one.framework}, {one.saves} | {cells} |")
    return "\n".join(lines)


def about() -> dict[str, Any]:
    from importlib.metadata import version

    names = ("ckpt-chaos", "torch", "transformers", "lightning")
    return {
        "machine": f"{platform.system()}, {os.cpu_count()} cores, {platform.machine()}",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKPOINTS), default=list(CHECKPOINTS))
    parser.add_argument("--saves", nargs="+", choices=("stock", "ours", "background"), default=None)
    parser.add_argument("--points", type=int, default=EVERY_POINT, help="kills of each training at most")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at the same time")
    parser.add_argument("--out", type=Path, default=Path("results/chaos.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        for framework, saves in RUNS:
            if framework in args.only and (args.saves is None or saves in args.saves):
                work = Path(folder, f"{framework}-{saves}")
                trials.append(trial(framework, saves, work, points=args.points, jobs=args.jobs))
                args.out.write_text(json.dumps({**about(), "trials": [asdict(one) for one in trials]}, indent=1))
    print(table(trials))
    return 1 if any(one.right < one.kills for one in trials if one.saves != "stock") else 0


if __name__ == "__main__":
    sys.exit(main())
