"""Every way in which this package writes checkpoints, as a short training each: for kills, power cuts and damage.

A program of its own: `python -m helpers.writers NAME FOLDER`. After each save that has returned it tells what a reader
finds now: "done STEP DIGEST".
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from helpers.fingerprint import fingerprint
from torch import distributed as dist
from torch import nn

import shrinkpoint as sp

Newest = tuple[int, str]
"""The step that a run would resume from, and the digest of all that is loaded."""
SAVES = 6


@dataclass(frozen=True)
class Writer:
    """One way to write.

    Attributes:
        train: a training that saves below a folder, and calls a function after each save.
        newest: what a resume finds there; None: nothing.
        check: raises if something that a reader is shown there is damaged.
    """

    train: Callable[[Path, Callable[[], None]], None]
    newest: Callable[[Path], Newest | None]
    check: Callable[[Path], object] = lambda root: None


def digest(state: Any) -> str:
    return hashlib.sha256(repr(sorted(fingerprint(state).items())).encode()).hexdigest()[:24]


class Loop:
    """A model with an optimizer, whose every step follows from its number."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> None:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        (self.model(x) - x).square().mean().backward()
        self.optimizer.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def state(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.objects.items()}


def _store(root: Path) -> sp.Store:
    return sp.Store(root, threads=1)


def _newest_of_store(root: Path) -> Newest | None:
    if not _store(root).steps():
        return None
    found = _store(root).restore()
    return found.step, digest(found.state)


def _check_store(root: Path) -> None:
    """All that is shown is whole, and the next save leaves no file that nothing names."""
    with _store(root) as store:
        problems = [found for found in store.verify(deep=True) if not found.loads]
        assert problems == [], problems
        store.save(SAVES + 1, Loop().state)
        assert store.scan().orphans() == []


def _manager(root: Path, done: Callable[[], None], **options: Any) -> None:
    loop = Loop()
    keep = sp.Keep(last=2, every=4, moments_last=1)
    with sp.CheckpointManager(root, keep=keep, keyframe_every=3, threads=1, **options) as manager:
        for step in range(1, SAVES + 1):
            loop.step(step)
            manager.save(step, **loop.objects)
            manager.flush()
            done()


def _store_changes(root: Path, done: Callable[[], None]) -> None:
    """Saves again, forgets, prunes and compacts."""
    loop = Loop()
    with _store(root) as store:
        for step in (1, 2, 3, 3, 4):
            loop.step(step)
            store.save(step, loop.state)
            done()
        store.compact(3)
        done()
        store.prune(sp.Keep(last=2), dry_run=False)
        done()
        store.save(5, loop.state, keyframe=True)
        done()


def _files(root: Path, done: Callable[[], None]) -> None:
    """A file that is written again and again, and a delta on it."""
    loop = Loop()
    root.mkdir(exist_ok=True)
    for step in range(1, SAVES + 1):
        loop.step(step)
        sp.save({**loop.state, "step": step}, root / "newest.safetensors")
        done()


def _newest_file(root: Path) -> Newest | None:
    path = root / "newest.safetensors"
    if not path.exists():
        return None
    state = sp.load(path)
    return state["step"], digest(state)


def _dcp_writer(root: Path, done: Callable[[], None]) -> None:
    import torch.distributed.checkpoint as dcp

    from shrinkpoint.train.dcp import Writer as DcpWriter

    loop = Loop()
    for step in range(1, 4):
        loop.step(step)
        dcp.save({**loop.state, "step": step}, storage_writer=DcpWriter(root / f"step-{step}", threads=1), no_dist=True)
        done()


@contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _dcp_manager(root: Path, done: Callable[[], None]) -> None:
    from shrinkpoint.train.dcp import Manager

    with _one_rank():
        loop, manager = Loop(), Manager(root, threads=1)
        for step in range(1, SAVES + 1):
            loop.step(step)
            manager.save(step, **loop.objects)
            done()


def _journal(root: Path, done: Callable[[], None]) -> None:
    from helpers.journal_training import make

    with _one_rank():
        run = make(root, sync_every=1)
        torch.manual_seed(100)
        run.journal.save(0, **run.objects)
        done()
        for step in range(1, 2 * SAVES):
            run.backward()
            run.journal.step(step)
            done()
            if step % 4 == 0:
                run.journal.save(step, **run.objects)
                done()
        run.close()


def _newest_in_journal(root: Path) -> Newest | None:
    """Replays a copy: the training itself holds the lock, and a replay cuts off what was torn."""
    from helpers.journal_training import make

    if not root.exists():
        return None
    with TemporaryDirectory() as folder, _one_rank():
        run = make(shutil.copytree(root, Path(folder) / "copy"), sync_every=1)
        try:
            found = run.journal.restore(**run.objects)
            state = {name: value.state_dict() for name, value in run.objects.items()}
            return (found.step, digest(state)) if found else None
        finally:
            run.close()


def _newest_dcp(root: Path) -> Newest | None:
    from shrinkpoint.train.dcp import latest_valid, load

    found = latest_valid(root, deep=True) if root.exists() else None
    return (int(str(found).rpartition("-")[2]), digest(load(found))) if found else None


def _transformers(root: Path, done: Callable[[], None]) -> None:
    from helpers.huggingface import made
    from transformers import TrainerCallback

    from shrinkpoint.train.transformers import ShrinkTrainer

    class Tell(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            done()

    options = {"save_total_limit": 2, "max_steps": 6, "trainer_callbacks": [Tell()]}
    made(ShrinkTrainer, root, **options).train()


def _newest_transformers(root: Path) -> Newest | None:
    from shrinkpoint.train.transformers import latest_valid

    return _of_directory(latest_valid(root) if root.exists() else None)


def _lightning(root: Path, done: Callable[[], None]) -> None:
    from helpers.lightning_runs import every, points, small, trainer
    from lightning.pytorch.callbacks import Callback

    from shrinkpoint.train.lightning import ShrinkIO

    class Tell(Callback):
        saved = 0

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step:  # the checkpoint of the step before is written
                done()

    keep = every(root, save_top_k=2, monitor="step", mode="max", every_n_train_steps=1, filename="{step}")
    trainer(root, ShrinkIO(), epochs=1, callbacks=[keep, Tell()]).fit(small(), points(4))
    done()


def _newest_lightning(root: Path) -> Newest | None:
    from shrinkpoint.train.lightning import latest_valid

    return _of_directory(latest_valid(root))


def _accelerate(root: Path, done: Callable[[], None]) -> None:
    from helpers.accelerate_runs import Loop as AcceleratedLoop

    from shrinkpoint.train.accelerate import save_state

    loop = AcceleratedLoop(root, limit=2)
    for _ in range(4):
        loop.steps(2)
        save_state(loop.accelerator)
        done()


def _newest_accelerate(root: Path) -> Newest | None:
    from shrinkpoint.train import latest_valid

    folders = (root / "checkpoints").glob("checkpoint_*")
    found, _ = latest_valid(sorted(folders, key=lambda path: -int(path.name.rpartition("_")[2])))
    return _of_directory(found)


def _of_directory(path: Any) -> Newest | None:
    if path is None:
        return None
    from shrinkpoint.store.directory import read_directory_manifest

    return read_directory_manifest(Path(path)).step, digest(sp.load(path))


def _unflushed(root: Path, done: Callable[[], None]) -> None:
    """A careless writer: it flushes nothing, so that a power cut takes what it has written."""
    root.mkdir()
    for step in range(1, 4):
        (root / "step").write_text(f"{step} {step:024}")
        done()


def _newest_unflushed(root: Path) -> Newest | None:
    words = (root / "step").read_text().split() if (root / "step").exists() else []
    return (int(words[0]), words[1]) if len(words) == 2 else None


def _publisher(root: Path, done: Callable[[], None]) -> None:
    from shrinkpoint.sync import Publisher

    loop = Loop()
    with Publisher(root, keep=2) as publisher:
        for step in range(1, SAVES + 1):
            loop.step(step)
            publisher.publish(loop.model, step)
            done()


def _newest_published(root: Path) -> Newest | None:
    from shrinkpoint.sync import Subscriber

    if not root.exists():
        return None
    model = Loop().model
    with suppress(sp.errors.NotFoundError):
        found = Subscriber(root).update(model)
        return (found.version, digest(model.state_dict())) if found else None
    return None


WRITERS: dict[str, Writer] = {
    "manager": Writer(_manager, _newest_of_store, _check_store),
    "background fisher": Writer(
        lambda root, done: _manager(root, done, background=True, scheme=sp.Fisher(relative_error=0.3)),
        _newest_of_store,
        _check_store,
    ),
    "mirror": Writer(
        lambda root, done: _manager(root / "run", done, mirror=root / "mirror"),
        lambda root: _newest_of_store(root / "mirror"),
        lambda root: _check_store(root / "mirror"),
    ),
    "store": Writer(_store_changes, _newest_of_store, _check_store),
    "file": Writer(_files, _newest_file),
    "dcp": Writer(_dcp_writer, _newest_dcp),
    "dcp manager": Writer(_dcp_manager, _newest_dcp),
    "journal": Writer(_journal, _newest_in_journal),
    "transformers": Writer(_transformers, _newest_transformers),
    "lightning": Writer(_lightning, _newest_lightning),
    "accelerate": Writer(_accelerate, _newest_accelerate),
    "publisher": Writer(_publisher, _newest_published),
}
CARELESS = {"unflushed": Writer(_unflushed, _newest_unflushed)}
"""Writers that are not ours: trials must see what they lose."""


def run(name: str, root: Path, tell: Callable[[str], None]) -> None:
    """Train; after each save `tell` gets "done STEP DIGEST", or "done" if a reader finds nothing."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    random.seed(0)  # its state is saved, and every fork has another
    np.random.seed(0)
    writer = (WRITERS | CARELESS)[name]

    def done() -> None:
        found = writer.newest(root)
        tell(f"done {found[0]} {found[1]}" if found else "done")

    writer.train(root, done)


def main(name: str, folder: str) -> None:
    mark = getattr(ctypes.CDLL(None), "shadow_mark", None)

    def tell(line: str) -> None:
        if mark is not None:
            mark(line.encode())
        print(line, flush=True)

    run(name, Path(folder), tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
