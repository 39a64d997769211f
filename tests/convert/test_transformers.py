"""Directories of the Hugging Face Trainer and of save_pretrained, written and read by transformers itself."""

from __future__ import annotations

import torch
from helpers.foreign_files import bytes_of
from helpers.huggingface import ended, gpt2, lay, made, whole
from helpers.strategies import same
from transformers import GPT2LMHeadModel, Trainer

from shrinkpoint.store import Store
from shrinkpoint.train.transformers import ShrinkTrainer


def test_a_run_of_the_trainer_comes_back_and_is_resumed_from_bit_for_bit(convert, tmp_path):
    stock = lay(tmp_path / "stock", Trainer)
    assert convert(stock, tmp_path / "store")["verified"] == 2
    assert Store(tmp_path / "store").manifest(4).depth == 1
    convert(tmp_path / "store", tmp_path / "back")
    here, back = bytes_of(stock), bytes_of(tmp_path / "back")
    assert here.keys() == back.keys()
    assert all(here[name] == back[name] for name in here if not name.endswith((".pt", ".pth")))
    wanted = ended(made(Trainer, stock), stock / "checkpoint-4")
    assert same(ended(made(Trainer, tmp_path / "back"), tmp_path / "back" / "checkpoint-4"), wanted)


def test_a_run_of_ours_is_resumed_from_by_the_stock_trainer(convert, tmp_path):
    convert(lay(tmp_path / "ours", ShrinkTrainer), tmp_path / "stock")
    folder = tmp_path / "stock" / "checkpoint-4"
    assert {path.name for path in folder.iterdir()} >= {"model.safetensors", "optimizer.pt", "rng_state.pth"}
    assert not (folder / "shrinkpoint.json").exists()
    assert same(ended(made(Trainer, tmp_path / "stock"), folder), whole())


def test_a_model_in_shards_comes_back_and_loads(convert, tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path / "a", max_shard_size="30KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    convert(tmp_path / "a", tmp_path / "store")
    convert(tmp_path / "store", tmp_path / "b")
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "b").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
