"""Whether processes can go on with a store of `torch.distributed` after one that wrote to it was killed.

    python benchmarks/store_kills.py [--kills 300] [--out results/store_kills.json]

For each kill: a process writes signs of life to a new store and does nothing else, it is killed by SIGKILL at a random
moment, and then another process has five seconds to add to a key of the same store and to read a key that was there
before. One that does not end in this time counts as stuck; torch's FileStore has no timeout there, so it waits for
ever. Three stores: torch's FileStore, torch's TCPStore (hosted by a process that is not killed), and SharedFileStore.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lossless_speed
import torch.distributed as dist
from lossless_report import table

from shrinkpoint.comm import SharedFileStore

STORES = "FileStore", "TCPStore", "SharedFileStore"
PATIENCE = 5.0
"""Seconds of a process that goes on, in which it does what takes a millisecond."""


class Place:
    """Where the processes of one kill find their store."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.path = kind, folder / "store"
        self.host = dist.TCPStore("127.0.0.1", 0, is_master=True) if kind == "TCPStore" else None

    def open(self) -> dist.Store:
        if self.host is not None:
            return dist.TCPStore("127.0.0.1", self.host.port)
        return dist.FileStore(str(self.path)) if self.kind == "FileStore" else SharedFileStore(self.path)


def start(work: Callable[[], object]) -> int:
    """Fork a process; its exit code is 0 if the work ends without an error."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def write_until_killed(place: Place, begun: int) -> None:
    store = place.open()
    store.set("there before", "value")
    os.write(begun, b"x")
    count = 0
    while True:
        count += 1
        store.set("alive/a process with a name", f"{count}")


def can_go_on(place: Place) -> None:
    store = place.open()
    assert store.get("there before") == b"value" and store.add("next", 1) == 1 and store.check(["next"])


def waits_in_vain(pid: int) -> bool:
    """Whether a process is not at its end after some seconds; then it is killed."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, "a process could not go on and said so"
            return False
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def is_stuck_after_a_kill(kind: str, delay: float) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        place, (reading, begun) = Place(kind, Path(folder)), os.pipe()
        pid = start(lambda: write_until_killed(place, begun))
        os.read(reading, 1)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading), os.close(begun)
        return waits_in_vain(start(lambda: can_go_on(place)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="of each store")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "store_kills.json")
    args = parser.parse_args()
    draws = random.Random(0)
    stuck = dict.fromkeys(STORES, 0)
    for _ in range(args.kills):
        for kind in STORES:  # in turns
            stuck[kind] += is_stuck_after_a_kill(kind, draws.random() * 0.02)
    head = ["store", "kills of a process that writes", "others wait for ever"]
    print(table(head, [[kind, str(args.kills), str(count)] for kind, count in stuck.items()]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": lossless_speed.machine(), "kills": args.kills, "others wait for ever": stuck}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
