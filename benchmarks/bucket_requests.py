"""What a chain in a bucket costs where every request takes a while: seconds and requests of a save and of a restore.

    python benchmarks/bucket_requests.py --delay 0.03 --files 20
    python benchmarks/bucket_requests.py --pace 12.5e6 --values 12000000

With `--pace` each request moves so many bytes a second instead, and a manager saves in four ways: into the bucket, into
memory with the bucket as its mirror, and both in the background. What is printed is how long `save` holds up
the loop, and when the checkpoint is durable and in the bucket.

The service is moto's server on this machine, which waits before each answer. It takes some milliseconds itself, and all
requests of a moment share the processor with the client: what is measured is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import shrinkpoint as sp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.s3_server import S3Server, running_server

URL = "s3://checkpoints/run"
WAYS = (("bucket", False, False), ("background", True, False), ("mirror", False, True), ("both", True, True))
"""Name of a row, `background`, and whether the bucket is a mirror."""
TIMES = ("stall", "durable", "there")


def make_state(step: int, values: int) -> dict[str, torch.Tensor]:
    """A state of which every step changes a little."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(values, generator=generator)
    generator.manual_seed(step)
    return {"weight": base * (1 + 1e-6 * torch.randn(values, generator=generator))}


@contextmanager
def measured(server: S3Server, name: str, rows: dict[str, list[dict[str, object]]]) -> Iterator[None]:
    log = len(server.requests())
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    methods = Counter(method for method, path, _ in server.requests()[log:])
    rows.setdefault(name, []).append({"seconds": seconds, "requests": dict(methods)})


def run(server: S3Server, files: int, delay: float, values: int, repeats: int) -> dict[str, list[dict[str, object]]]:
    os.environ.update(server.environ)
    rows: dict[str, list[dict[str, object]]] = {}
    with sp.Store(URL, keyframe_every=None) as store:
        for step in range(files - 1):
            store.save(step, make_state(step, values))
        server.set_delay(delay)
        for repeat in range(repeats):
            with measured(server, "save", rows):
                store.save(files - 1 + repeat, make_state(files - 1 + repeat, values))
    actions: dict[str, Callable[[], object]] = {
        "restore": lambda: sp.Store(URL).restore(),
        "load": lambda: sp.load(URL),
        "list": lambda: sp.Store(URL).list(),
    }
    for name, act in actions.items():
        for _ in range(repeats):
            with measured(server, name, rows):
                act()
    return rows


def run_ways(server: S3Server, pace: float, values: int, repeats: int) -> dict[str, list[dict[str, object]]]:
    """The times of a manager's saves, each of which is alone."""
    os.environ.update(server.environ)
    server.set_pace(pace)
    rows: dict[str, list[dict[str, object]]] = {}
    for number, (name, background, is_mirror) in enumerate(WAYS):
        url = f"s3://checkpoints/way-{number}"
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            where, mirror = (directory, url) if is_mirror else (url, None)
            with sp.CheckpointManager(where, mirror=mirror, background=background) as manager:
                for step in range(repeats + 1):
                    state = make_state(step, values)
                    start = time.perf_counter()
                    manager.save(step, extra=state, rng=False)
                    times = {"stall": time.perf_counter() - start}
                    manager.wait()
                    times["durable"] = time.perf_counter() - start
                    manager.flush()
                    times["there"] = time.perf_counter() - start
                    stored = manager.store.manifest(step).stored_bytes
                    if step:  # the first one is a keyframe
                        rows.setdefault(name, []).append({**times, "stored_bytes": stored})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.03, help="seconds that each request waits")
    parser.add_argument("--pace", type=float, default=0.0, help="bytes a second that each request moves")
    parser.add_argument("--files", type=int, default=20, help="of the chain")
    parser.add_argument("--values", type=int, default=10_000, help="of the state, four bytes each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="JSON with all figures")
    options = parser.parse_args()
    with running_server() as server:
        if options.pace:
            rows = run_ways(server, options.pace, options.values, options.repeats)
        else:
            rows = run(server, options.files, options.delay, options.values, options.repeats)
    for name, results in rows.items():
        if options.pace:
            medians = [statistics.median(float(str(result[key])) for result in results) for key in TIMES]
            print(f"{name:10}", *(f"  {key} {median:6.2f} s" for key, median in zip(TIMES, medians, strict=True)))
            continue
        seconds = statistics.median(float(str(result["seconds"])) for result in results)
        requests = " ".join(f"{count} {method}" for method, count in sorted(results[-1]["requests"].items()))  # type: ignore[attr-defined]
        print(f"{name:8} {seconds:6.2f} s   {requests}")
    if options.out:
        options.out.write_text(json.dumps({**vars(options), "out": None, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
