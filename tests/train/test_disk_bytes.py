"""Promise: what retention holds on the disk never exceeds as many plain checkpoints, whoever writes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from helpers import accelerate_runs
from helpers.command_line import invoke
from helpers.huggingface import gpt2, made
from helpers.lightning_runs import QUIET, Small, points, trainer
from helpers.parameters import each_value
from helpers.stores import Linkless
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from transformers import TrainerCallback

from shrinkpoint import CheckpointManager, Keep, Store, humanize
from shrinkpoint.cli.app import app
from shrinkpoint.report.checkpoints import run_report
from shrinkpoint.storage import object_size
from shrinkpoint.store import scan
from shrinkpoint.store.chain import payload_bytes
from shrinkpoint.train.accelerate import save_state
from shrinkpoint.train.dcp import Manager, Writer, reset_chains
from shrinkpoint.train.lightning import ShrinkIO
from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::shrinkpoint.errors.LossWarning"),
]
SAVES = 7
SCHEMES = ("lossless", "fisher(relative_error=.3)")
Saves = Iterator[tuple[int, int]]
"""After each save, the bytes on the disk and those of one plain checkpoint."""


def disk_bytes(root: Path) -> int:
    """Bytes of all files below a directory, each once whatever number of names it has."""
    files = [path.stat() for path in root.rglob("*") if path.is_file()]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


def plain_bytes(*objects: Any) -> int:
    """Bytes of a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save([obj.state_dict() for obj in objects], buffer)
    return buffer.tell()


class Loop:
    """A few steps between two saves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(200, 200), nn.GELU(), nn.Linear(200, 200))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self) -> None:
        for _ in range(5):
            x = torch.randn(16, 200)
            self.optimizer.zero_grad()
            (self.model(x) - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def plain_bytes(self) -> int:
        return plain_bytes(self.model, self.optimizer)


def save_with_manager(root: Path, last: int, scheme: str, **options: Any) -> Saves:
    loop = Loop()
    with CheckpointManager(root / "run", scheme=scheme, keep=Keep(last=last), **options) as manager:
        for step in range(SAVES):
            loop.train()
            manager.save(step, rng=False, **loop.objects)
            manager.flush()
            yield disk_bytes(root), loop.plain_bytes


def save_with_mirror(root: Path, last: int, scheme: str) -> Saves:
    for _, plain in save_with_manager(root, last, scheme, mirror=root / "mirror"):
        yield disk_bytes(root / "mirror"), plain


def save_without_links(root: Path, last: int, scheme: str) -> Saves:
    loop, place = Loop(), Linkless()
    with CheckpointManager(place, scheme=scheme, keep=Keep(last=last)) as manager:
        for step in range(SAVES):
            loop.train()
            manager.save(step, rng=False, **loop.objects)
            yield sum(object_size(place, key) for key in place.list("")), loop.plain_bytes


def save_with_dcp(root: Path, last: int, scheme: str) -> Saves:
    loop, manager = Loop(), Manager(root, keep=last)
    reset_chains()
    for step in range(SAVES):
        loop.train()
        manager.save(step, **loop.objects)
        yield disk_bytes(root), loop.plain_bytes


def save_with_accelerate(root: Path, last: int, scheme: str) -> Saves:
    accelerate_runs.forget()
    naming = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=last)
    loop, accelerator = Loop(), Accelerator(cpu=True, project_config=naming)
    accelerator.prepare(loop.model, loop.optimizer)
    for _ in range(SAVES):
        loop.train()
        save_state(accelerator, scheme=scheme)
        yield disk_bytes(root), loop.plain_bytes
    accelerate_runs.forget()


def save_with_lightning(root: Path, last: int, scheme: str, epochs: int = SAVES, **saver: Any) -> Saves:
    seen: list[tuple[int, int]] = []

    class Measure(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.current_epoch:
                seen.append((disk_bytes(root), plain_bytes(module, trainer.optimizers[0])))

    def score(module: Small) -> None:
        module.log("score", float(module.current_epoch))

    module = Small(width=9000)
    module.on_train_epoch_end = lambda: score(module)
    saver = {"monitor": "score", "mode": "max", "save_on_train_epoch_end": True, **saver}
    best = ModelCheckpoint(root, save_top_k=last, **saver)
    trainer(root, ShrinkIO(scheme), epochs=epochs, callbacks=[best, Measure()]).fit(module, points())
    yield from seen


def save_with_transformers(root: Path, last: int, scheme: str) -> Saves:
    seen: list[tuple[int, int]] = []

    class Measure(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if state.global_step:
                seen.append((disk_bytes(root), plain_bytes(objects["model"], objects["optimizer"])))

    made(
        ShrinkTrainer,
        root,
        save_steps=1,
        max_steps=SAVES,
        save_total_limit=last,
        trainer_model=gpt2(width=96),
        trainer_callbacks=[Measure()],
        trainer_shrink=ShrinkConfig(scheme),
    ).train()
    yield from seen


WRITERS: dict[str, Callable[[Path, int, str], Saves]] = {
    "manager": save_with_manager,
    "background": lambda root, last, scheme: save_with_manager(root, last, scheme, background=True),
    "mirror": save_with_mirror,
    "no links": save_without_links,
    "dcp": save_with_dcp,
    "accelerate": save_with_accelerate,
    "lightning": save_with_lightning,
    "transformers": save_with_transformers,
}
SMALL_FILES = 60_000
"""Bytes of all that frameworks write beside a checkpoint: arguments, tokenizers, metrics."""


@pytest.mark.parametrize(("writer", "scheme", "last"), each_value(WRITERS, SCHEMES, [1, 2, 3]))
def test_no_more_is_held_than_as_many_plain_checkpoints(tmp_path: Path, writer: str, scheme: str, last: int) -> None:
    held = [*WRITERS[writer](tmp_path, last, scheme)]
    assert len(held) >= SAVES - 1
    for number, (disk, plain) in enumerate(held, 1):
        assert disk <= min(number, last) * (plain + SMALL_FILES), (number, [round(d / p, 2) for d, p in held])


@pytest.mark.parametrize("saver", [{}, {"save_last": True}])
def test_the_best_of_lightning_share_a_keyframe(tmp_path: Path, saver: dict[str, Any]) -> None:
    held = [*save_with_lightning(tmp_path, 3, SCHEMES[1], 12, **saver)]
    keyframe = held[0][0]
    assert min(disk for disk, _ in held[-6:]) < 2.1 * keyframe  # as a chain that has ended was written again


def test_the_last_checkpoint_of_lightning_beside_the_best_costs_next_to_nothing(tmp_path: Path) -> None:
    held = [*save_with_lightning(tmp_path, 1, "lossless", save_last=True)]
    assert all(disk <= plain for disk, plain in held)


@pytest.mark.parametrize("last", [1, 3, 6])
def test_at_any_time_there_is_one_checkpoint_more_at_most(tmp_path: Path, last: int) -> None:
    peaks: list[int] = []
    held = [*save_with_manager(tmp_path, last, "lossless", on_save=lambda report: peaks.append(disk_bytes(tmp_path)))]
    plain = held[0][1]
    assert max(peaks) <= (last + 1) * plain


@pytest.mark.parametrize("keep", [Keep(best=1), Keep(every=3), Keep(within="1h"), Keep(last=2, best=1)])
def test_other_rules_hold_no_more_than_what_they_keep(tmp_path: Path, keep: Keep) -> None:
    loop = Loop()
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step in range(SAVES):
            loop.train()
            manager.save(step, metrics={"val_loss": abs(step - 2)}, rng=False, **loop.objects)
            selected = manager.store.prune(keep)
            count = len(selected.keep) - len(selected.bases)
            assert disk_bytes(tmp_path) <= count * loop.plain_bytes + SMALL_FILES


@pytest.mark.parametrize(
    ("scheme", "last"), [("lossless", 1), ("lossless", 2), *((SCHEMES[1], last) for last in (1, 2, 4))]
)
def test_a_store_holds_hardly_more_than_one_keyframe_and_deltas(tmp_path: Path, scheme: str, last: int) -> None:
    """Or than keyframes alone, where they are smaller together."""
    loop, saves = Loop(), 12
    places = {"kept": {"keep": Keep(last=last)}, "keyframes": {"keyframe_every": 1}, "deltas": {"keyframe_every": None}}
    managers = {name: CheckpointManager(tmp_path / name, scheme=scheme, **kwargs) for name, kwargs in places.items()}
    held = []
    for step in range(saves):
        loop.train()
        reports = {name: manager.save(step, rng=False, **loop.objects) for name, manager in managers.items()}
        held.append(disk_bytes(tmp_path / "kept"))
    keyframe, delta = (reports[name].stored_bytes for name in ("keyframes", "deltas"))
    best = min(last * keyframe, keyframe + (last - 1) * delta)
    # What an ended chain of `fisher` leaves has the points with which it began, once.
    share = 1.06 if scheme == "lossless" else 1.12
    assert sum(held[-4:]) / 4 <= share * best + last * 2_000  # and a manifest each
    assert {manager.close() for manager in managers.values()} == {None}


def test_deltas_that_gain_much_are_written_whatever_is_kept(tmp_path: Path) -> None:
    loop = Loop()
    loop.train()
    with CheckpointManager(tmp_path, keep=Keep(last=2)) as manager:
        for step in range(4):
            next(loop.model.parameters()).data[0] += 1e-3
            report = manager.save(step, rng=False, **loop.objects)
    assert report is not None and not report.keyframe and report.ratio > 20


def test_chains_are_as_long_as_ever_where_nothing_is_deleted(tmp_path: Path) -> None:
    loop = Loop()
    with CheckpointManager(tmp_path) as manager:
        reports = [manager.save(step, rng=False, **loop.objects) for step in range(4) if loop.train() is None]
    assert [report.keyframe for report in reports if report is not None] == [True, False, False, False]


def test_an_attempt_that_fails_leaves_nothing_and_is_not_made_at_every_save(tmp_path: Path) -> None:
    loop, counts = Loop(), []
    with CheckpointManager(tmp_path, keep=Keep(last=1)) as manager:
        accepts = manager.store.chain_limit.accepts_delta
        manager.store.chain_limit.accepts_delta = lambda *args: (counts.append(1), accepts(*args))[1]  # type: ignore
        for step in range(20):
            loop.train()
            manager.save(step, rng=False, **loop.objects)
            assert len([*tmp_path.rglob("*.safetensors")]) == 1
    assert len(counts) <= 6


def test_reports_count_every_byte_of_the_bases(tmp_path: Path) -> None:
    loop, root = Loop(), tmp_path / "run"
    for step in range(3):
        loop.train()
        state = {name: obj.state_dict() for name, obj in loop.objects.items()}
        reports: list[Any] = []
        torch.distributed.checkpoint.save(
            state, storage_writer=Writer(root / f"step-{step}", step=step, on_save=reports.append)
        )
    for step in range(2):
        for path in (root / f"step-{step}").rglob("*"):
            if path.is_file():
                path.unlink()
    on_disk = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
    (row,) = run_report(root).checkpoints
    assert (
        run_report(root).stored_bytes
        == row.disk_bytes
        == reports[0].disk_bytes
        == on_disk
        > 2 * row.manifest.stored_bytes
    )
    assert f"{on_disk:,} with its bases" in str(reports[0])


def payloads_on_disk(root: Path) -> int:
    """Bytes of the payloads below a directory as `du` counts them, each inode once."""
    files = [path.stat() for path in root.rglob("*.safetensors")]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


@pytest.mark.parametrize(
    ("writer", "scheme", "last"), each_value(["manager", "dcp", "transformers", "accelerate"], SCHEMES, [2, 10])
)
def test_every_total_is_what_a_walk_over_the_disk_finds(tmp_path: Path, writer: str, scheme: str, last: int) -> None:
    for _ in WRITERS[writer](tmp_path, last, scheme):
        pass
    root = tmp_path / "run" if writer == "manager" else tmp_path
    on_disk = payloads_on_disk(root)
    listed = json.loads(invoke(app, "list", root, "--json").stdout)
    raw = sum(row["raw_bytes"] for row in listed["checkpoints"])
    assert len(listed["checkpoints"]) == min(last, SAVES)
    assert (listed["stored_bytes"], listed["raw_bytes"]) == (on_disk, raw)
    ratio, size = humanize.ratio(raw, on_disk), humanize.size(on_disk)
    assert f"{humanize.size(raw)} of state in {size} ({ratio})" in invoke(app, "list", root).stdout
    assert invoke(app, "report", root, "--out", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert f'<dd class="big">{ratio}</dd><dd class="note">{size}, bases included' in page
    if writer == "manager":
        shown = Store(root)._repr_html_()
        assert f"<dd>{size}</dd>" in shown and f"<dd>{ratio}</dd>" in shown
    newest = json.loads(invoke(app, "show", root, "--json").stdout)
    own = {path for path in root.rglob("*.safetensors") if path.stat().st_ino in _inodes(newest)}
    assert newest["disk_bytes"] == sum({path.stat().st_ino: path.stat().st_size for path in own}.values())


def _inodes(shown: dict[str, Any]) -> set[int]:
    """The inodes of a checkpoint's own files and of its links to bases."""
    return {path.stat().st_ino for file in shown["files"] for path in Path(file["where"]).parent.rglob("*.safetensors")}


def test_a_directory_with_a_link_to_it_counts_once(tmp_path: Path) -> None:
    loop = Loop()
    loop.train()
    state = {name: obj.state_dict() for name, obj in loop.objects.items()}
    torch.distributed.checkpoint.save(state, storage_writer=Writer(tmp_path / "step-1", step=1))
    once = run_report(tmp_path)
    (tmp_path / "last").symlink_to("step-1")
    twice = run_report(tmp_path)
    assert len(twice.checkpoints) == 2
    assert (twice.raw_bytes, twice.stored_bytes) == (once.raw_bytes, once.stored_bytes)


def test_a_store_counts_bases_of_steps_that_were_forgotten(tmp_path: Path) -> None:
    loop = Loop()
    with CheckpointManager(tmp_path) as manager:
        for step in range(3):
            loop.train()
            report = manager.save(step, rng=False, **loop.objects)
        for step in range(2):
            manager.store.forget(step)
        store: Store = manager.store
    listed = json.loads(invoke(app, "list", tmp_path, "--all", "--json").stdout)
    assert (len(listed["checkpoints"]), listed["raw_bytes"]) == (3, report.raw_bytes)  # no plain one of a forgotten
    assert f"<dd>{humanize.size(report.disk_bytes)}</dd>" in store._repr_html_()
    assert f"{humanize.size(report.disk_bytes)} with its bases" in repr(report)
    on_disk = disk_bytes(tmp_path) - sum(path.stat().st_size for path in tmp_path.rglob("*.json"))
    assert payload_bytes(store.storage, scan(store.storage)) == report.disk_bytes
    assert 0 <= on_disk - report.disk_bytes < 500
