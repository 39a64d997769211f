"""Checkpoints of one long run, kept for other benchmarks: a GPT of 31.7 M parameters on wikitext.

    python -m lab.studies.schemes.long_run             # an hour of a core with AMX; 6 GB; goes on where it was stopped

The run (`workloads/wikitext.py`) is 2000 steps of AdamW with a warm-up and a cosine. Three lossless stores are kept in
`--out`: "early" has steps 400, 401, 410 and 500, "late" 1700, 1701, 1710 and 1800, which are 1, 10 and 100 steps
from the first at either end of the schedule, and "middle" 1000, 1100, ... 1700. Each checkpoint is a training state
with its held-out loss. `run.py --subjects wikitext` and `shrinkpoint-lab bench OUT/middle` measure on them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shrinkpoint as sp
from benchmarks.lossless.series import default_cache
from lab.studies import workloads
from lab.studies.harness import default_data
from lab.studies.workloads import Course, Workload
from lab.studies.workloads.wikitext import wikitext

STORES: Mapping[str, Sequence[int]] = {
    "early": (400, 401, 410, 500),
    "middle": tuple(range(1000, 1701, 100)),
    "late": (1700, 1701, 1710, 1800),
}
QUICK: Mapping[str, Sequence[int]] = {"early": (2, 3), "middle": (4, 6, 8), "late": (8, 9)}


def default_folder() -> Path:
    """Where the series is kept: "wikitext" beside the other series (SHRINKPOINT_SERIES)."""
    return default_cache() / "wikitext"


def newest(folder: Path, stores: Mapping[str, Sequence[int]]) -> tuple[int, Path | None]:
    """The last step that is kept, and its store; 0 and None where nothing is."""
    found: list[tuple[int, Path | None]] = [(0, None)]
    for name in stores:
        if (folder / name).exists():
            with sp.Store(folder / name) as store:
                found += [(step, folder / name) for step in store.steps()]
    return max(found, key=lambda one: one[0])


def state_of(course: Course) -> dict[str, Any]:
    """All of a training."""
    return {
        "model": course.model.state_dict(),
        "optimizer": course.optimizer.state_dict(),
        "scheduler": course.scheduler.state_dict(),
        "stream": course.stream.state_dict(),
    }


def resume(course: Course, folder: Path, stores: Mapping[str, Sequence[int]]) -> int:
    """Take the newest state that is kept; its step, 0 where there is none."""
    step, place = newest(folder, stores)
    if place is not None:
        with sp.Store(place) as store:
            state = store.load(step, keep=False)
        for name, part in state.items():
            getattr(course, name).load_state_dict(part)
    return step


def make(folder: Path, workload: Workload, stores: Mapping[str, Sequence[int]], seed: int) -> None:
    """Train from what is there to the last step that is kept."""
    course = workload.build(seed)
    first, last = resume(course, folder, stores), max(max(steps) for steps in stores.values())
    began = time.perf_counter()
    for step in range(first + 1, last + 1):
        loss = workload.advance(course)
        if step % 50 == 0 or step == last:
            pace = (time.perf_counter() - began) / (step - first)
            print(f"step {step} of {last}: training loss {loss:.4f}, {pace:.2f} s a step", flush=True)
        for name in (name for name, steps in stores.items() if step in steps):
            held_out = workload.test(course.model)
            with sp.Store(folder / name, keyframe_every=None) as store:
                report = store.save(step, state_of(course), metrics={"loss": held_out})
            print(f"{name} {step}: held-out loss {held_out:.4f}, {report.stored_bytes / 1e6:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    about = "of the three stores; default: wikitext in SHRINKPOINT_SERIES"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=about)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    options = parser.parse_args()
    workloads.seed_everything(options.seed, options.threads)
    folder = options.out or default_folder().with_name(f"wikitext{'-quick' if options.quick else ''}")
    workload = wikitext(options.data, quick=options.quick)
    make(folder, workload, QUICK if options.quick else STORES, options.seed)
    print(f"kept in {folder}")


if __name__ == "__main__":
    main()
