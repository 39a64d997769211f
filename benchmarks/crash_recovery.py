"""Kill a saving loop with SIGKILL at random moments, again and again, and check after each kill what is left.

    python benchmarks/crash_recovery.py --kills 200

The loop writes two lines beside every save: `begin STEP DIGEST DIGEST` before it, with the digests of all and of the
weights, and `done STEP` once the library has said that the checkpoint is committed. In the background retention
deletes the moments of older checkpoints (`Keep(moments_last=2)`), else it writes them again as deltas against newer
ones. After a kill all of this must hold, or the kill counts as failed:

* the store opens, and `restore` skips nothing;
* what it returns is not older than the last `done`, and has the digest of that step's `begin`;
* every other checkpoint in the store, too, is bit for bit what its `begin` said;
* training from there repeats the steps that were lost with the same digests;
* after the next save no file or empty directory is left that no checkpoint names, and what `Keep` promises is there.

SIGKILL takes the process and leaves the kernel: this shows that the order of operations is right and nothing of what
a power cut does to a disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import shrinkpoint as sp

EVERY, LAST = 100, 3
MOST_SAVES = 12
"""After its first save a loop is killed somewhere in one of so many: by the clock a busy machine may not get there."""
SAVE_SECONDS = 0.025
"""What a save takes, before one was seen."""


def make() -> tuple[nn.Module, AdamW]:
    """A model whose checkpoint is some 200 kB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 8))
    return model, AdamW(model.parameters(), lr=1e-3)


def manager_of(store: Path, background: bool) -> sp.CheckpointManager:
    if background:  # each chain is written again without moments once it has ended
        keep = sp.Keep(last=2 * LAST, every=EVERY, moments_last=2)
        return sp.CheckpointManager(store, keep=keep, keyframe_every=4, background=True)
    return sp.CheckpointManager(store, keep=sp.Keep(last=LAST, every=EVERY))  # as deltas against newer ones


def advance(model: nn.Module, optimizer: AdamW, step: int) -> None:
    """One step of training: a function of the state and the step alone, so that a repeated step repeats its bits."""
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randn(16, 64, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def digest(nest: Any) -> str:
    """sha-256 over every key, type and bit of a nest of dicts, lists, tensors and plain values."""
    hasher = hashlib.sha256()
    for part in _parts(nest):
        hasher.update(part)
    return hasher.hexdigest()


def digests(model: nn.Module, optimizer: AdamW) -> str:
    """The digests of all, and of the weights."""
    return f"{digest([model.state_dict(), optimizer.state_dict()])} {digest(model.state_dict())}"


def _parts(nest: Any) -> Iterator[bytes]:
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield repr(key).encode()
            yield from _parts(value)
    elif isinstance(nest, (list, tuple)):
        for value in nest:
            yield from _parts(value)
    elif isinstance(nest, Tensor):
        yield repr((nest.dtype, tuple(nest.shape))).encode() + nest.detach().contiguous().numpy().tobytes()
    else:
        yield repr(nest).encode()


def loop(store: Path, log: Path, background: bool) -> None:
    """Train and save after every step until killed."""
    torch.set_num_threads(1)
    model, optimizer = make()
    manager = manager_of(store, background)
    at = manager.restore(model=model, optimizer=optimizer)
    step = at.step if at is not None else 0
    with log.open("a", buffering=1) as lines:
        while True:
            step += 1
            advance(model, optimizer, step)
            lines.write(f"begin {step} {digests(model, optimizer)}\n")
            manager.save(step, model=model, optimizer=optimizer)
            # one save is in flight at most: when this one returned, the one before it was committed
            lines.write(f"done {step - background}\n")


@dataclass
class Diary:
    """What the loop wrote beside its saves.

    Attributes:
        begun: by step, the digests of all and of the weights.
        done: the newest step reported as committed; 0 when there is none.
        changed: steps that came out different when they were repeated.
    """

    begun: dict[int, list[str]] = field(default_factory=dict)
    done: int = 0
    changed: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, log: Path) -> Diary:
        diary = cls()
        for line in log.read_text().splitlines():
            word, step, *rest = line.split()
            if word == "begin" and [*map(len, rest)] == [64, 64]:  # the kill may have cut the last line
                if diary.begun.setdefault(int(step), rest) != rest:
                    diary.changed.append(int(step))
            elif word == "done":
                diary.done = max(diary.done, int(step))
        return diary


@dataclass
class Kill:
    """One kill and what was found after it.

    Attributes:
        background: how the loop saved.
        after: seconds from its first save to the kill.
        unfinished: a save or a deletion was cut short: files of a step are there, its manifest is not.
        done, restored: newest step reported as committed, and step that `restore` returned (0: none).
        checked: checkpoints loaded and compared.
        weights_only: of these, those whose moments retention had deleted.
        reversed: of these, deltas against newer ones.
        empty: empty directories in the store after the checks.
        seconds: that the checks took.
        problems: empty when all is well.
    """

    background: bool
    after: float
    unfinished: bool = False
    done: int = 0
    restored: int = 0
    checked: int = 0
    weights_only: int = 0
    reversed: int = 0
    empty: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def unfinished(store: Path) -> bool:
    """A step has files and no manifest: its save, or its deletion, was cut short."""
    return any(not (file.parent / "manifest.json").exists() for file in store.glob("step-*/*") if file.is_file())


def check(store: Path, log: Path, kill: Kill, *, tidy: bool) -> None:
    """Look at what a kill left; with `tidy`, also save once more and look for litter."""
    began = time.perf_counter()
    diary = Diary.read(log)
    kill.done = diary.done
    kill.problems += [f"step {step} came out different when it was repeated" for step in diary.changed]
    model, optimizer = make()
    with manager_of(store, background=False) as manager:
        at = manager.restore(model=model, optimizer=optimizer)
        kill.restored = at.step if at is not None else 0
        if at is not None and at.skipped:
            kill.problems.append(f"restore skipped {at.skipped}")
        if kill.restored < diary.done:
            kill.problems.append(f"restored step {kill.restored}, but step {diary.done} was committed")
        if at is not None:
            _compare(kill, diary, at.step, digests(model, optimizer).split())
        _check_others(store, diary, kill)
        if tidy:
            _save_and_sweep(store, log, kill, manager, model, optimizer)
    kill.empty = empty_directories(store)
    kill.seconds = time.perf_counter() - began


def _compare(kill: Kill, diary: Diary, step: int, found: list[str]) -> None:
    kill.checked += 1
    if diary.begun.get(step, [])[-len(found) :] != found:
        kill.problems.append(f"step {step} is not what was saved")


def _check_others(store: Path, diary: Diary, kill: Kill) -> None:
    """Every checkpoint in the store; of the old ones that `every` keeps, the newest few."""
    with sp.Store(store) as chain:
        for step in chain.steps()[-12:]:
            state = chain.load(step, keep=False)
            kill.reversed += any(base.step > step for base in chain.manifest(step).bases)
            if chain.manifest(step).weights_only:
                _compare(kill, diary, step, [digest(state["model"])])
                kill.weights_only += 1
            else:
                _compare(kill, diary, step, [digest([state["model"], state["optimizer"]]), digest(state["model"])])


def _save_and_sweep(
    store: Path, log: Path, kill: Kill, manager: sp.CheckpointManager, model: nn.Module, optimizer: AdamW
) -> None:
    step = kill.restored + 1
    advance(model, optimizer, step)
    with log.open("a") as lines:
        lines.write(f"begin {step} {digests(model, optimizer)}\n")
        manager.save(step, model=model, optimizer=optimizer)
        manager.wait()
        lines.write(f"done {step}\n")
    kill.problems += [f"litter: {name}" for name in litter(store)]
    kill.problems += [f"{count} empty directories" for count in [empty_directories(store)] if count]
    with sp.Store(store) as chain:
        there = set(chain.steps())
    promised = {*range(max(1, step - LAST + 1), step + 1), *range(EVERY, step, EVERY)}
    kill.problems += [f"step {step} should have been kept" for step in sorted(promised - there)]


def litter(store: Path) -> list[str]:
    """Files that no manifest names; the store's lock is none."""
    found = []
    for path in sorted(store.iterdir()):
        if not path.is_dir():
            found += [path.name] if path.name != ".shrinkpoint-lock" else []
        else:
            there = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
            found += [f"{path.name}/{name}" for name in sorted(there - named(path / "manifest.json"))]
    return found


def named(manifest: Path) -> set[str]:
    """Files that belong to a checkpoint, relative to its directory; none without a manifest."""
    if not manifest.exists():
        return set()
    document = json.loads(manifest.read_text())
    return {manifest.name, *(row[0] for row in document["files"]), *(row[5] for row in document["bases"])}


def empty_directories(store: Path) -> int:
    return sum(path.is_dir() and not any(path.iterdir()) for path in store.rglob("*"))


def kill_loop(context: ForkServerContext, store: Path, log: Path, background: bool, saves: float) -> float:
    """Start the loop, let it begin so many saves after its first, the last one in part, and kill it.

    Returns:
        Seconds from its first save to the kill.

    Raises:
        RuntimeError: the loop ended by itself or does not save.
    """
    size = log.stat().st_size
    process: ForkServerProcess = context.Process(target=loop, args=(store, log, background), daemon=True)
    process.start()
    wait_for_saves(process, log, size, 1)
    first = time.monotonic()
    whole, part = divmod(saves, 1)
    wait_for_saves(process, log, size, 1 + int(whole))
    time.sleep(part * ((time.monotonic() - first) / whole if whole else SAVE_SECONDS))
    process.kill()
    after = time.monotonic() - first
    process.join()
    if process.exitcode != -9:
        raise RuntimeError(f"the loop ended by itself, exit code {process.exitcode}; see its output above")
    process.close()
    return after


def wait_for_saves(process: ForkServerProcess, log: Path, size: int, count: int) -> None:
    """Wait until so many saves have begun since the log had this size."""
    deadline = time.monotonic() + 600
    while log.read_bytes()[size:].count(b"begin") < count:
        if not process.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the loop does not save; see its output above")
        time.sleep(0.001)


def campaign(folder: Path, kills: int, seed: int = 0) -> Iterator[Kill]:
    """Kill `kills` times, saving in the background and not by turns, with a tidy save after every third kill."""
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    # forked from a process that has imported all of it, a loop begins to save within a tenth of a second
    context.set_forkserver_preload(["torch._dynamo", "shrinkpoint.train"])
    store, log = folder / "store", folder / "log"
    store.mkdir(parents=True)
    log.touch()
    for number in range(kills):
        background = number % 2 == 0
        kill = Kill(background, after=kill_loop(context, store, log, background, rng.uniform(0, MOST_SAVES)))
        kill.unfinished = unfinished(store)
        check(store, log, kill, tidy=number % 3 == 2)
        yield kill


def summary(kills: list[Kill]) -> dict[str, Any]:
    """The campaign in a few numbers."""
    return {
        "kills": len(kills),
        "in an unfinished save or deletion": sum(kill.unfinished for kill in kills),
        "  of these in the background": sum(kill.unfinished and kill.background for kill in kills),
        "steps saved": max((kill.restored for kill in kills), default=0),
        "checkpoints compared": sum(kill.checked for kill in kills),
        "  of these with weights only": sum(kill.weights_only for kill in kills),
        "  of these deltas against newer ones": sum(kill.reversed for kill in kills),
        "uncommitted steps restored": sum(kill.restored > kill.done for kill in kills),
        "empty directories at the end": kills[-1].empty if kills else 0,
        "failed": sum(bool(kill.problems) for kill in kills),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/kill.json"))
    args = parser.parse_args()
    began, kills = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for kill in campaign(Path(folder), args.kills, args.seed):
            kills.append(kill)
            for problem in kill.problems:
                print(f"kill {len(kills)}: {problem}", file=sys.stderr)
    figures = {**summary(kills), "seconds": round(time.perf_counter() - began, 1)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**figures, "each": [asdict(kill) for kill in kills]}, indent=1))
    for name, value in figures.items():
        print(f"{name:36}{value:>10}")
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
