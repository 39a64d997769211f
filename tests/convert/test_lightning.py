"""Checkpoints of Lightning, written and read by Lightning itself."""

from __future__ import annotations

import pytest
import torch
from helpers.foreign_files import same
from helpers.lightning_runs import QUIET, every, points, small, trainer

from shrinkpoint.train.lightning import ShrinkIO

pytestmark = [pytest.mark.filterwarnings(line) for line in (*QUIET, "ignore:The dirpath has changed:UserWarning")]


def _fitted(root, *plugins, epochs=2, path=None):
    torch.manual_seed(1)
    model = small()
    run = trainer(root, *plugins, epochs=epochs, callbacks=[every(root / "checkpoints", filename=None)])
    run.fit(model, points(), ckpt_path=path)
    return model.state_dict()


def test_a_run_of_lightning_comes_back_and_goes_on_bit_for_bit(convert, tmp_path):
    _fitted(tmp_path / "a")
    said = convert(tmp_path / "a", tmp_path / "store")
    assert [row["name"] for row in said["checkpoints"]] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
    convert(tmp_path / "store", tmp_path / "b")
    for one in (tmp_path / "a" / "checkpoints").iterdir():
        found = torch.load(tmp_path / "b" / one.name, weights_only=True)
        assert same(found, torch.load(one, weights_only=True))
    other = _fitted(tmp_path / "c", epochs=3, path=tmp_path / "b" / "epoch=1-step=8.ckpt")
    again = _fitted(tmp_path / "d", epochs=3, path=tmp_path / "a" / "checkpoints" / "epoch=1-step=8.ckpt")
    assert same(other, again)


def test_checkpoints_of_ours_are_loaded_by_lightning(convert, tmp_path):
    _fitted(tmp_path / "a", ShrinkIO())
    convert(tmp_path / "a", tmp_path / "b")
    ours = _fitted(tmp_path / "c", ShrinkIO(), epochs=3, path=tmp_path / "a" / "checkpoints" / "epoch=1-step=8.ckpt")
    stock = _fitted(tmp_path / "d", epochs=3, path=tmp_path / "b" / "epoch=1-step=8.ckpt")
    assert same(ours, stock)
