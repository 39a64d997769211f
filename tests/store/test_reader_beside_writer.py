"""Readers beside a process that writes checkpoints again: none gets an older one, and none misses a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from helpers.command_line import invoke
from helpers.paths import TESTS
from helpers.stores import state
from helpers.timeouts import PATIENCE

import shrinkpoint as sp
from shrinkpoint import CheckpointManager, Keep, Store
from shrinkpoint.cli.app import app
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.train import Checkpointer

_NUM_READS = int(os.environ.get("SHRINKPOINT_READS", "60"))


def save_again(root: Path) -> None:
    with Store(root, threads=1) as store:
        while True:
            store.save(6, state(6))


def save_again_and_compact(root: Path) -> None:
    with Store(root, threads=1) as store:
        while True:
            store.save(6, state(6))
            store.compact(6)


def prune_moments(root: Path) -> None:
    step = 6
    with Store(root, threads=1) as store:
        while True:
            for keyframe in (True, False, False):
                store.save(step, state(6), keyframe=keyframe)
                step += 1
            store.prune(Keep(last=2, moments_last=1), dry_run=False)


def save_and_prune(root: Path) -> None:
    """Save rising steps, each of which replaces the one before."""
    step = 6
    with Store(root, threads=1) as store:
        while True:
            store.save(step, state(6))
            store.prune(Keep(last=1), dry_run=False)
            step += 1


def save_and_reverse(root: Path) -> None:
    """Save rising steps, and write ended chains again as deltas against newer checkpoints."""
    keep, step = Keep(last=3), 6
    with Store(root, threads=1, keyframe_every=2) as store:
        store.chain_limit.keep = keep
        while True:
            store.save(step, state(6))
            store.prune(keep, dry_run=False)
            step += 1


def save_run(root: Path) -> None:
    """As `save_and_reverse`, in directories."""
    step = 7
    with Checkpointer(threads=1, keyframe_every=2) as checkpointer:
        checkpointer.retain(Keep(last=3), deletes=True)
        while True:
            checkpointer.save(root / f"step-{step}", state(6), step=step)
            step += 1


def save_directory(root: Path) -> None:
    with Checkpointer(threads=1) as checkpointer:
        while True:
            checkpointer.save(root / "last", state(6), step=6)


def save_shards(root: Path) -> None:
    from shrinkpoint.train.dcp import Writer

    warnings.simplefilter("ignore")  # of torch: a single process
    while True:
        dcp.save(state(6)["model"], storage_writer=Writer(root / "last", threads=1))


def save_file(root: Path) -> None:
    base = root / "base.safetensors"
    sp.save(state(5), base)
    while True:
        sp.save(state(6), root / "file.safetensors", base=base)


def restore(root: Path) -> int:
    restored = Store(root, threads=1).restore()
    assert restored.step >= 6
    return restored.state["seed"]


def restore_with_manager(root: Path) -> int:
    restored = CheckpointManager(root, threads=1).restore(rng=False, optimizer=dict[str, Any]())
    assert restored is not None
    assert restored.step >= 6
    return 6


def load_shards(root: Path) -> int:
    from shrinkpoint.train.dcp import Reader

    target = {name: tensor.clone().zero_() for name, tensor in state(6)["model"].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=Reader(root / "last", threads=1))
    assert all((target[name] == tensor).all() for name, tensor in state(6)["model"].items())
    return 6


def verify(root: Path) -> int:
    assert [finding for finding in Store(root, threads=1).verify() if not finding.loads] == []
    return 6


def verify_deep(root: Path) -> int:
    assert [finding for finding in Store(root, threads=1).verify(deep=True) if not finding.loads] == []
    return 6


def verify_run(root: Path) -> int:
    outcome = invoke(app, "verify", root, "--deep")
    assert not outcome.code, outcome.stdout
    return 6


STORE_READERS: dict[str, Callable[[Path], Any]] = {
    "restore": restore,
    "load": lambda root: Store(root, threads=1).load()["seed"],
    "load_part": lambda root: sp.load(root, only="seed")["seed"],
    "verify": verify,
}
CASES = [
    *((writer, reader) for writer in (save_again, save_again_and_compact) for reader in STORE_READERS.values()),
    (prune_moments, restore),
    (prune_moments, STORE_READERS["load_part"]),
    (save_and_prune, restore),
    (save_and_prune, STORE_READERS["load"]),
    (save_and_reverse, restore),
    (save_and_reverse, verify_deep),
    (save_run, verify_run),
    (save_directory, lambda root: sp.load(root / "last")["seed"]),
    (save_directory, lambda root: Checkpointer(threads=1).load(root / "last").state["seed"]),
    (save_shards, load_shards),
    (save_file, lambda root: sp.load(root / "file.safetensors")["seed"]),
]


@contextmanager
def writing(writer: Callable[[Path], None], root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that writes until the block ends."""
    program = f"from store.test_reader_beside_writer import *; {writer.__name__}(Path({str(root)!r}))"
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
        assert process.poll() is None, process.communicate()[1]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


def prepare(writer: Callable[[Path], None], root: Path) -> None:
    """Write what the readers look for, once."""
    if writer is save_run:
        Checkpointer(threads=1).save(root / "step-6", state(6), step=6)
    elif writer is save_directory:
        Checkpointer(threads=1).save(root / "last", state(6), step=6)
    elif writer is save_shards:
        from shrinkpoint.train.dcp import Writer

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state(6)["model"], storage_writer=Writer(root / "last", threads=1))
    elif writer is save_file:
        sp.save(state(6), root / "file.safetensors")
    else:
        with Store(root, threads=1) as store:
            for step in range(1, 7):
                store.save(step, state(step))


def written_again(root: Path) -> Callable[[], bool]:
    """A function that tells if a file below a directory is another one than before."""

    def inodes() -> set[int]:
        """Of what is there; nothing where a directory goes meanwhile."""
        with suppress(FileNotFoundError):
            found = [*root.rglob("*.json"), *root.glob("file.safetensors")]
            return {path.stat().st_ino for path in found}
        return set()

    before = inodes()
    return lambda: inodes() != before


@pytest.mark.nightly
@pytest.mark.parametrize(("writer", "reader"), CASES, ids=lambda value: value.__name__)
def test_no_read_is_older_or_misses_a_file(tmp_path, writer, reader):
    prepare(writer, tmp_path)
    has_begun = written_again(tmp_path)
    with writing(writer, tmp_path) as process:
        reads = 0
        while reads < _NUM_READS and process.poll() is None:
            assert reader(tmp_path) == 6
            reads += has_begun()


class Pruned(MemoryStorage):
    """Deletes two of three checkpoints at the n-th time that a file is opened."""

    store: Store | None = None
    n = 0

    def open(self, key: str) -> Any:
        self.n -= 1
        if self.store is not None and not self.n:
            self.store.prune(Keep(last=1), dry_run=False)
        return super().open(key)


@pytest.mark.parametrize("n", range(1, 10))
def test_verify_finds_nothing_wrong_with_what_is_pruned_meanwhile(n):
    storage = Pruned()
    with Store(storage, threads=1) as store:
        for step in range(3):
            store.save(step, state(step), keyframe=True)
        storage.store, storage.n = store, n
        assert store.verify(deep=True) == []
        storage.store = None
        assert store.steps() == [2]
