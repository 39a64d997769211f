"""Power cuts, kills and damage for every way of writing checkpoints.

A program of its own: `python -m helpers.writer_trials KIND [--count N] [--seed S] [--only NAME ...]` with
PYTHONPATH=tests prints the outcome of N trials of each writer, as JSON. KIND is one of

* power: after every change of a file, what a disk may hold is restored from (`shadow_tree.py`); --count is ignored.
* kills: the training is killed by SIGKILL at a random moment.
* damage: one bit of a file is changed, or a file is cut short or removed.

A trial is right if a resume finds the last checkpoint whose save has returned, or the one that was being written. After
damage it may also find an older one, or the reader raises an error of ours; it never finds other bits.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
from helpers.paths import TESTS
from helpers.shadow_tree import MODES, ShadowTree, environment, write_image
from helpers.timeouts import PATIENCE
from helpers.writers import CARELESS, WRITERS, Newest, Writer, run

from shrinkpoint.errors import ShrinkpointError


def command(name: str, root: Path) -> list[str]:
    return [sys.executable, "-m", "helpers.writers", name, str(root)]


def environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}


def parse(lines: list[str]) -> list[Newest]:
    """(step, digest) of each "done STEP DIGEST"."""
    words = (line.split() for line in lines if line.startswith("done "))
    return [(int(step), digest) for _, step, digest in words]


def power(name: str, folder: Path, seed: int = 0, every: int = 1) -> Counter[str]:
    """Cut the power after every record of one training, or every n-th, in every mode; raise at the first failure."""
    writer, root, log, chance = (WRITERS | CARELESS)[name], folder / "run", folder / "log", random.Random(seed)
    subprocess.run(command(name, root), env=environ() | environment(root, log), check=True, stdout=subprocess.DEVNULL)
    whole = ShadowTree(root)
    for _ in whole.replay(log):
        pass
    assert_same(whole, root)
    expected, tree, counts, seen = parse(whole.marks), ShadowTree(root), Counter[str](), set()
    for number, record in enumerate(tree.replay(log)):
        counts["records"] += 1
        done = len(parse(tree.marks))
        for mode in MODES if number % every == seed % every else ():
            image = tree.image(mode, chance)
            key = (done, repr([(path, value and value[-1]) for path, value in image.items()]))
            if hash(key) in seen:
                continue
            seen.add(hash(key))
            place = folder / "cut"
            write_image(image, place)
            try:
                check(writer, place, expected, done)
            except BaseException as error:
                error.add_note(f"{name}: power cut after record {number}, {record!r}, mode {mode!r}: see {place}")
                raise
            shutil.rmtree(place)
            counts[mode] += 1
    return counts


def assert_same(tree: ShadowTree, root: Path) -> None:
    """The records are all that changed the disk, or the trial would show nothing."""
    image = tree.image("all", random.Random())
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    recorded = {path: value[1] for path, value in image.items() if isinstance(value, tuple)}
    assert recorded.keys() == files.keys(), recorded.keys() ^ files.keys()
    assert all(path.read_bytes() == recorded[name] for name, path in files.items())


def check(writer: Writer, root: Path, expected: list[Newest], done: int) -> None:
    """Raise unless a resume finds the last checkpoint that was done, or the next one."""
    found = writer.newest(root)
    allowed = {None} if done == 0 else {expected[done - 1]}
    if done < len(expected):
        allowed.add(expected[done])
    assert found in allowed, f"found {found}, expected one of {allowed}"
    writer.check(root)


@cache
def forkserver() -> ForkServerContext:
    """Starts processes that have imported everything already: an import takes longer than most trainings."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.writers", "helpers.huggingface", "helpers.lightning_runs"])
    return context


class Training:
    """A training in a process of its own, which may be killed."""

    def __init__(self, name: str, root: Path) -> None:
        self._told, told = forkserver().Pipe(duplex=False)
        self.process = forkserver().Process(target=_train, args=(name, root, told))
        self.process.start()
        told.close()
        until = time.monotonic() + PATIENCE
        while not root.exists() and self.process.is_alive() and time.monotonic() < until:
            time.sleep(0.002)

    def lines(self) -> list[str]:
        """What it has told until its end."""
        lines = []
        with suppress(EOFError), self._told:
            while True:
                lines.append(self._told.recv())
        self.process.join()
        return lines


def _train(name: str, root: Path, told: Connection) -> None:
    with Path(os.devnull).open("w") as silence, redirect_stdout(silence):
        run(name, root, told.send)


def kills(name: str, folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Kill trainings, each at a random moment between its first file and the time that a whole one takes."""
    chance, root, counts = random.Random(seed), folder / "run", Counter[str]()
    Training(name, root).lines()  # the first one starts the server
    shutil.rmtree(root)
    training, begin = Training(name, root), time.monotonic()
    expected = parse(training.lines())
    seconds = time.monotonic() - begin
    for _ in range(count):
        shutil.rmtree(root, ignore_errors=True)
        training = Training(name, root)
        time.sleep(chance.uniform(0, seconds))
        training.process.kill()
        done = len(parse(training.lines()))
        check(WRITERS[name], root, expected, done)
        counts["killed" if training.process.exitcode == -signal.SIGKILL else "ended"] += 1
    return counts


def damages(root: Path, chance: random.Random) -> Iterator[str]:
    """Damage one file below `root`, and put it back."""
    path = chance.choice(sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size))
    whole = path.read_bytes()
    kind = chance.choice(("bit", "bit", "bit", "cut", "removed"))
    damaged = bytearray(whole)
    if kind == "bit":
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del damaged[chance.randrange(len(damaged)) :]
    path.unlink()  # it may have other names, which stay whole
    if kind != "removed":
        path.write_bytes(damaged)
    yield f"{kind} of {path.relative_to(root)}"
    path.unlink(missing_ok=True)
    path.write_bytes(whole)


def damage(name: str, folder: Path, count: int, seed: int = 0) -> Counter[str]:
    writer, root, chance, counts = WRITERS[name], folder / "run", random.Random(seed), Counter[str]()
    expected = parse(Training(name, root).lines())
    for _ in range(count):
        for what in damages(root, chance):
            try:
                found = writer.newest(root)
            except ShrinkpointError:
                counts["refused"] += 1
                continue
            except BaseException as error:
                error.add_note(f"{name}: {what}")
                raise
            assert found is None or found in expected, f"{name}, {what}: {found}, expected one of {expected}"
            counts["nothing" if found is None else "newest" if found == expected[-1] else "older"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("power", "kills", "damage"))
    parser.add_argument("--count", type=int, default=20, help="trials of each writer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=WRITERS, default=list(WRITERS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            if args.kind == "power":
                counts = power(name, Path(folder), args.seed)
            else:
                trial = kills if args.kind == "kills" else damage
                counts = trial(name, Path(folder), args.count, args.seed)
        line = {"kind": args.kind, "writer": name, "seconds": round(time.monotonic() - begin, 1), **counts}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
