"""What a part of `device_all.py` is given: a device, a time limit, and a file that its rows go to as they are measured.

A row is a dict of figures whose names have the unit, such as {"model": "350M", "stall, s": 0.012}. A row with "error"
says what failed, a row with "note" why a measurement was left out.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

Row = dict[str, Any]
OUT_OF_TIME = "not run: out of time"
MAX_ERROR = 300
"""Characters of an error in a row; the log has all of it."""


@dataclass
class Job:
    """One part of the measurements, in a process of its own.

    Attributes:
        part: its name, which every row has.
        device: where tensors are.
        is_quick: toys, to see that everything runs.
        rows: the JSON Lines file that rows are appended to.
        out: the folder of results.
        folder: for checkpoints and other files, deleted after the part.
        deadline: by `time.monotonic`; after it the part is killed.
    """

    part: str
    device: torch.device
    is_quick: bool
    rows: Path
    out: Path
    folder: Path
    deadline: float

    @property
    def is_cuda(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """Seconds until the part is killed."""
        return self.deadline - time.monotonic()

    def add(self, **figures: Any) -> None:
        """Append a row to the file, so that it stays whatever happens next."""
        row = {"part": self.part, **{name: _rounded(value) for name, value in figures.items()}}
        print(json.dumps(row), flush=True)
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @contextmanager
    def attempt(self, **names: Any) -> Iterator[None]:
        """Turn an error into a row with these names, so that the next measurement runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(**names, error=last_line(error))

    def fits(self, seconds: float, **names: Any) -> bool:
        """True if so many seconds are left; otherwise a row says that there were not."""
        if self.seconds_left >= seconds:
            return True
        self.add(**names, note=OUT_OF_TIME)
        return False

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds_of(self, work: Callable[[], object], repeats: int = 1) -> float:
        """Median seconds of a call, from an idle device until the device is idle again."""
        times = []
        for _ in range(repeats):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return median(times)


def last_line(error: BaseException) -> str:
    """Type and message of an error in one line."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]} ..."


def _rounded(value: Any) -> Any:
    """A number in four digits; anything else unchanged."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    return value if isinstance(value, str | bool | int | None) else str(value)


def run(settings: dict[str, Any], *, is_forked: bool = False) -> None:
    """Run the part that the settings name; an error is its last row.

    Args:
        is_forked: torch was imported by the process that this one is a copy of.
    """
    module, _, function = settings["target"].partition(":")
    job = Job(
        settings["part"],
        torch.device(settings["device"]),
        settings["is_quick"],
        *(Path(settings[name]) for name in ("rows", "out", "folder")),
        deadline=settings["deadline"],
    )
    try:
        if job.is_cuda:
            _start_device(job.device, settings, is_forked=is_forked)
        getattr(importlib.import_module(module), function)(job)
    except Exception as error:
        traceback.print_exc()
        job.add(error=last_line(error))


def _start_device(device: torch.device, settings: dict[str, Any], *, is_forked: bool) -> None:
    """Initialize CUDA; where an import before the fork has done so, begin again as a program of its own."""
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except RuntimeError:
        if not is_forked:
            raise
        os.execv(sys.executable, [sys.executable, __file__, json.dumps(settings)])


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
