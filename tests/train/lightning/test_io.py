"""The plugin by itself: writing beside the loop, removal, loading without a Trainer, values that are no tensors."""

from __future__ import annotations

import errno
import pickle
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.lightning_runs import QUIET, Gate, Small, every, names, points, small, trainer
from helpers.strategies import same
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from shrinkpoint.errors import ChainError, CorruptError, NotFoundError, StorageError
from shrinkpoint.store.directory import verify_directory
from shrinkpoint.train.lightning import ShrinkIO, latest_valid, load_from_checkpoint

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def state(value: float) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((64,), value)}, "global_step": int(value)}


# beside the loop


def test_a_name_is_taken_as_soon_as_it_is_saved_to(tmp_path):
    """Or ModelCheckpoint would give it to another one."""
    gate = Gate()
    ours = ShrinkIO(gate, background=True)
    ours.save_checkpoint(state(1), tmp_path / "deep" / "1.ckpt")
    assert (tmp_path / "deep" / "1.ckpt").exists() and latest_valid(tmp_path / "deep") is None
    gate.open.set()
    ours.wait()
    assert latest_valid(tmp_path / "deep") == tmp_path / "deep" / "1.ckpt"


def test_what_is_removed_meanwhile_goes_once_its_successor_stands(tmp_path):
    gate = Gate()
    gate.open.set()
    ours = ShrinkIO(gate, background=True)
    ours.save_checkpoint(state(1), tmp_path / "1.ckpt")
    ours.wait()
    gate.open.clear()
    ours.save_checkpoint(state(2), tmp_path / "2.ckpt")
    ours.remove_checkpoint(tmp_path / "1.ckpt")
    assert (tmp_path / "1.ckpt").exists()
    gate.open.set()
    ours.wait()
    assert names(tmp_path) == ["2.ckpt"]


def test_what_is_removed_stays_if_its_successor_was_not_written(tmp_path, caplog):
    gate = Gate()
    gate.open.set()
    ours = ShrinkIO(gate, background=True)
    ours.save_checkpoint(state(1), tmp_path / "1.ckpt")
    ours.wait()
    gate.fails = True
    ours.save_checkpoint(state(2), tmp_path / "2.ckpt")
    ours.remove_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(StorageError, match="smoke"):
        ours.save_checkpoint(state(3), tmp_path / "3.ckpt")
    assert names(tmp_path) == ["1.ckpt"] == [latest_valid(tmp_path).name] and "1.ckpt is not removed" in caplog.text
    gate.fails = False
    ours.save_checkpoint(state(3), tmp_path / "3.ckpt")
    ours.teardown()
    assert names(tmp_path) == ["1.ckpt", "3.ckpt"]


def test_a_failed_save_is_heard_of_at_the_end(tmp_path):
    gate = Gate()
    gate.open.set()
    gate.fails = True
    run = trainer(tmp_path, ShrinkIO(gate, background=True), epochs=1, callbacks=[every(tmp_path / "all")])
    with pytest.raises(StorageError, match="smoke"):
        run.fit(small(), points())
    assert names(tmp_path / "all") == []


def test_a_save_after_the_end_is_waited_for(tmp_path):
    plugin = ShrinkIO(background=True)
    run = trainer(tmp_path, plugin, epochs=1, callbacks=[every(tmp_path / "all")])
    run.fit(small(), points())
    for name in ("first", "second"):
        (tmp_path / name / "shrinkpoint.json").mkdir(parents=True)
        with pytest.raises(StorageError, match=r"shrinkpoint\.json"):
            run.save_checkpoint(tmp_path / name)
    run.save_checkpoint(tmp_path / "third")
    verify_directory(tmp_path / "third")
    plugin.save_checkpoint({"global_step": 99, "state_dict": {}}, tmp_path / "later")  # training goes on
    assert plugin._writing_dir == tmp_path / "later"
    plugin.teardown()


def test_a_save_before_the_process_is_ended_is_waited_for(tmp_path):
    plugin = ShrinkIO(background=True)
    plugin.save_checkpoint(state(1), tmp_path / "hpc_ckpt_1.ckpt")
    verify_directory(tmp_path / "hpc_ckpt_1.ckpt")
    plugin.teardown()


def test_what_cannot_be_removed_later_costs_no_checkpoint(tmp_path, monkeypatch, caplog):
    def busy(path, *args, **options):
        if Path(path).name == "epoch=0.ckpt":
            raise OSError(errno.EBUSY, "busy")
        return rmtree(path, *args, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", busy)
    keep = every(tmp_path / "kept", save_top_k=1)
    trainer(tmp_path, ShrinkIO(background=True), callbacks=[keep]).fit(small(), points())
    assert names(tmp_path / "kept") == ["epoch=0.ckpt", "epoch=2.ckpt"]
    assert "epoch=0.ckpt is not removed" in caplog.text


def test_a_plugin_goes_to_other_processes_and_on_after_its_end(tmp_path):
    ours = pickle.loads(pickle.dumps(ShrinkIO(background=True)))
    for i in (1, 2):
        ours.save_checkpoint(state(i), tmp_path / f"{i}.ckpt")
        ours.teardown()
    assert [ours.load_checkpoint(tmp_path / f"{i}.ckpt")["global_step"] for i in (1, 2)] == [1, 2]


# removal


def test_a_base_that_is_removed_still_carries_the_next_delta(tmp_path):
    ours = ShrinkIO()
    for i in range(4):
        ours.save_checkpoint(state(i), tmp_path / f"{i}.ckpt")
        ours.remove_checkpoint(tmp_path / f"{i}.ckpt")
    ours.save_checkpoint(state(4), tmp_path / "4.ckpt")
    assert ours.wait().keyframe is False and [path.name for path in tmp_path.iterdir()] == ["4.ckpt"]
    assert same(ShrinkIO().load_checkpoint(tmp_path / "4.ckpt"), state(4))


def test_files_and_links_are_removed_as_such(tmp_path):
    ours = ShrinkIO()
    ours.save_checkpoint(state(1), tmp_path / "1.ckpt")
    (tmp_path / "link.ckpt").symlink_to("1.ckpt")
    torch.save({}, tmp_path / "file.ckpt")
    assert latest_valid(tmp_path) == tmp_path / "1.ckpt" and latest_valid(tmp_path / "nowhere") is None
    for name in ("link.ckpt", "file.ckpt"):
        ours.remove_checkpoint(str(tmp_path / name))
    assert names(tmp_path) == ["1.ckpt"] == [latest_valid(tmp_path).name]


# what is whole, and what is not


def test_a_broken_one_says_what_to_do(tmp_path):
    ours = ShrinkIO(keyframe_every=None)
    ours.save_checkpoint(state(1), tmp_path / "1.ckpt")
    ours.save_checkpoint(state(2), tmp_path / "2.ckpt")
    shutil.rmtree(tmp_path / "2.ckpt/bases")
    with pytest.raises(ChainError, match="latest_valid"):
        ours.load_checkpoint(tmp_path / "2.ckpt")
    manifest = tmp_path / "2.ckpt/shrinkpoint.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":2', b'"step":3'))
    with pytest.raises(CorruptError, match="latest_valid"):
        ours.load_checkpoint(tmp_path / "2.ckpt")
    manifest.unlink()
    with pytest.raises(NotFoundError, match="latest_valid"):
        ours.load_checkpoint(tmp_path / "2.ckpt")


# without a Trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pl.Trainer]:
    """A run in a directory: ours as epoch=0.ckpt, and stock.ckpt of the same state."""
    root = tmp_path_factory.mktemp("saved")
    run = trainer(root, ShrinkIO(), epochs=1, callbacks=[every(root)])
    run.fit(small(width=16), points())
    run.strategy.checkpoint_io = TorchCheckpointIO()
    run.save_checkpoint(root / "stock.ckpt")
    return root, run


@pytest.mark.parametrize("name", ["epoch=0.ckpt", "stock.ckpt"])
def test_a_module_is_made_from_a_checkpoint(saved, name):
    root, run = saved
    module = load_from_checkpoint(Small, root / name)
    assert same(module.state_dict(), run.lightning_module.state_dict())
    assert module.hparams == run.lightning_module.hparams and module.hparams.width == 16
    assert load_from_checkpoint(Small, str(root / name), map_location="cpu", lr=0.5).hparams.lr == 0.5


class Compiled(Small):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]


@pytest.mark.parametrize("strict", [None, False])
def test_a_part_may_be_compiled_or_not(saved, tmp_path, strict):
    root, run = saved
    module = load_from_checkpoint(Compiled, root / "epoch=0.ckpt", strict=strict)
    plain = {name.replace("_orig_mod.", ""): value for name, value in module.state_dict().items()}
    assert same(plain, dict(run.lightning_module.state_dict()))


@pytest.mark.parametrize("name", ["epoch=0.ckpt", "stock.ckpt"])
def test_strictness_is_lightnings(saved, name):
    class Larger(Small):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.more = nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match="Missing key"):
        load_from_checkpoint(Larger, saved[0] / name)
    with pytest.warns(UserWarning, match=r"not in the checkpoint.*more.weight"):
        load_from_checkpoint(Larger, saved[0] / name, strict=False)


def test_hyperparameters_may_come_from_a_file(saved, tmp_path):
    (tmp_path / "h.yaml").write_text("width: 16\nlr: 0.25\n")
    assert load_from_checkpoint(Small, saved[0] / "epoch=0.ckpt", hparams_file=tmp_path / "h.yaml").hparams.lr == 0.25


def test_places_are_chosen_as_with_torch_load(saved):
    ours = ShrinkIO()
    nowhere = torch.empty(0, device="meta").untyped_storage()
    for place in ("meta", torch.device("meta"), {"cpu": "meta"}, lambda storage, _: nowhere):
        loaded = ours.load_checkpoint(saved[0] / "epoch=0.ckpt", map_location=place)
        assert {x.device.type for x in loaded["state_dict"].values()} == {"meta"}
    for place in ("cpu", {"cuda:0": "cuda:1"}, lambda storage, _: None):
        loaded = ours.load_checkpoint(saved[0] / "epoch=0.ckpt", map_location=place)
        assert {x.device.type for x in loaded["state_dict"].values()} == {"cpu"}


def test_nothing_is_unpickled(saved, tmp_path):
    """What only unpickling could read is not there; a stock file is read as it was asked for."""
    assert not [path for path in saved[0].glob("epoch=0.ckpt/**/*") if path.suffix in (".pt", ".pkl")]
    torch.save({"path": Path("x")}, tmp_path / "one.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        ShrinkIO().load_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert ShrinkIO().load_checkpoint(tmp_path / "one.ckpt", weights_only=False) == {"path": Path("x")}
