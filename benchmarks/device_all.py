"""All that is to be known of a GPU in one command: saves, training, messages, replicas, weight sync, tests.

    python benchmarks/device_all.py --out results/device                   # eight minutes on one GPU, without network
    python benchmarks/device_all.py --out results/device --quick           # toys: does everything run there?
    python benchmarks/device_all.py --out results/device --quick --device cpu

The library is the one that can be imported, else a wheel in dist/, else it is built from this tree, without network.
Parts run in the order of their value, each in a process of its own with a time limit. A part that fails or takes too
long is a row with its error, and the next part runs. OUT gets:

    rows.jsonl     every row as soon as it is measured
    results.json   rows by part, with the machine; replaced after each part
    results.md     the same as tables
    log.txt        the last lines that each part printed
    junit.xml      the tests marked gpu

To put the tables into docs/gpu.md: copy results.json to benchmarks/results/device.json and run device_tables.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUT_OF_TIME = "not run: out of time"
LOG_BYTES = 200_000
"""Bytes of a part's output that stay in the log."""
GRACE = 5.0
"""Seconds between what a part is told of its limit, and the moment it is killed."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One part of the measurements.

    Attributes:
        name: in results.
        title: of its table.
        target: "module:function", which is called with a `Job`.
        seconds: that it takes on a GPU; it is not started with less than a third of them.
    """

    name: str
    title: str
    target: str
    seconds: float


PARTS = (
    Part("machine", "Machine and versions", "device_checks:machine", 20),
    Part("tests", "Tests marked gpu", "device_checks:tests", 75),
    Part("saves", "Saves from device memory", "device_saves:saves", 110),
    Part("training", "A training with Fisher(budget='1%')", "device_training:training", 100),
    Part("messages", "Messages", "device_messages:messages", 35),
    Part("dcp", "Saves from device memory with torch.distributed.checkpoint", "device_saves:dcp_saves", 45),
    Part("throughput", "Tokens a second while a save is written", "device_training:throughput", 30),
    Part("replicas", "Steps with one rank", "device_replicas:replicas", 30),
    Part("sync", "Weight sync", "device_replicas:sync", 25),
    Part("sanitizer", "compute-sanitizer", "device_checks:sanitizer", 30),
)


@dataclass
class Run:
    """The settings and results of one run.

    Attributes:
        out: the folder of results.
        environment: of the processes of parts.
        parts: what was measured, in JSON.
    """

    out: Path
    device: str
    is_quick: bool
    seconds: float
    environment: Mapping[str, str]
    parts: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def run(self, parts: Sequence[Part]) -> None:
        """Run all parts, the first ones first; what is left of the time of one goes to those behind it."""
        (self.out / "rows.jsonl").unlink(missing_ok=True)
        (self.out / "log.txt").unlink(missing_ok=True)
        for number, part in enumerate(parts):
            wanted = sum(later.seconds for later in parts[number:])
            limit = min(self.seconds_left, part.seconds * max(1.0, self.seconds_left / wanted))
            began = time.monotonic()
            if limit < part.seconds / 3:
                rows: list[Row] = [{"note": OUT_OF_TIME}]
            else:
                print(f"{part.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
                error = self._run_part(part, limit)
                rows = list(self._rows(part.name))
                rows += [{"error": error}] if error else []
            seconds = round(time.monotonic() - began, 1)
            self.parts.append({"name": part.name, "title": part.title, "seconds": seconds, "rows": rows})
            self.write()

    def _run_part(self, part: Part, limit: float) -> str:
        """Run a part in a process of its own; return its error, or nothing."""
        with tempfile.TemporaryDirectory(prefix="device-", ignore_cleanup_errors=True) as folder:
            settings = {"part": part.name, "target": part.target, "device": self.device, "is_quick": self.is_quick}
            settings |= {"rows": str(self.out / "rows.jsonl"), "out": str(self.out), "folder": folder}
            settings["deadline"] = time.monotonic() + max(limit - GRACE, limit / 2)
            output = Path(folder, "output.txt")
            output.touch()
            process = _context().Process(target=_start, args=(settings, {**self.environment, "TMPDIR": folder}, output))
            process.start()
            process.join(limit)
            code = process.exitcode
            with suppress(ProcessLookupError):  # what it has started ends, too
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            text = output.read_bytes()[-LOG_BYTES:].decode(errors="replace")
        with (self.out / "log.txt").open("a") as log:
            log.write(f"===== {part.name}: {part.target}\n{text}\n")
        if code is None:
            return f"ended by its limit of {limit:.0f} s; {_last_lines(text)}"
        return f"ended with {code}; {_last_lines(text)}" if code else ""

    def _rows(self, name: str) -> Iterator[Row]:
        """The rows that a part has written; the last line may be cut."""
        path = self.out / "rows.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):
                row = json.loads(line)
                if row.pop("part") == name:
                    yield row

    def write(self) -> None:
        """Replace results.json and results.md by what there is now."""
        from device_tables import markdown

        document = {
            "command": f"benchmarks/device_all.py {' '.join(sys.argv[1:])}",
            "date": date.today().isoformat(),
            "device": self.device,
            "quick": self.is_quick,
            "host": platform.platform(),
            "seconds": round(time.monotonic() - self.began, 1),
            "parts": self.parts,
        }
        for name, text in (("results.json", json.dumps(document, indent=1)), ("results.md", markdown(document))):
            path = self.out / f"{name}.part"
            path.write_text(text + "\n")
            path.replace(self.out / name)


def _context() -> Any:
    """Processes are forked from one that has imported torch and the library, but has not touched the device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["device_job", "device_saves", "device_training", "device_messages"])
    return context


def _start(settings: dict[str, Any], environment: Mapping[str, str], output: Path) -> None:
    """Run a part in this process, the first of a group of its own."""
    os.setsid()
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    tempfile.tempdir = None  # it is read again
    import device_job

    device_job.run(settings, is_forked=True)


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith('{"part"')]
    return " / ".join(lines[-2:])[-300:]


def find_library(folder: Path) -> tuple[dict[str, str], str]:
    """The environment in which parts import the library, and where it comes from; nothing is fetched from a network.

    Args:
        folder: where it is installed, unless it can be imported already.
    """
    laboratory = str(ROOT / "lab" / "src")
    sys.path.insert(0, laboratory)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, (laboratory, os.environ.get("PYTHONPATH"))))}
    if _can_import(environment):
        return environment, "importable"
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment['PYTHONPATH']}"
    wheels = sorted((ROOT / "dist").glob("shrinkpoint-*.whl"), key=lambda wheel: wheel.stat().st_mtime, reverse=True)
    errors = []
    for source in (*wheels, ROOT):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        command += ["--no-build-isolation", "--target", str(folder), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 and _can_import(environment):
            return environment, "built from the tree" if source == ROOT else f"dist/{source.name}"
        errors.append(f"{source.name}: {_last_lines(done.stdout + done.stderr)}")
    print("\n".join(errors), file=sys.stderr)
    return environment, f"not installed: {'; '.join(errors)}"


def _can_import(environment: Mapping[str, str]) -> bool:
    command = [sys.executable, "-c", "import shrinkpoint._native"]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, env=env, cwd=tempfile.gettempdir()).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for results; those that are there go")
    parser.add_argument("--seconds", type=float, default=480, help="of all parts together (480)")
    parser.add_argument("--quick", action="store_true", help="toys, to see that everything runs")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="library-") as folder:
        began = time.monotonic()
        environment, source = find_library(Path(folder))
        environment["DEVICE_LIBRARY"] = source
        sys.path.insert(0, folder)
        run = Run(asked.out.resolve(), asked.device, asked.quick, asked.seconds, environment, began=began)
        run.run([part for part in PARTS if part.name in asked.only])
    print((run.out / "results.md").read_text())


if __name__ == "__main__":
    main()
