"""Models in shards with an index: whole and back, and no index leads out of its directory."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.foreign_files import bytes_of, same
from safetensors.torch import save_file

from shrinkpoint.convert import directory, sharded_index
from shrinkpoint.errors import CorruptError, NotFoundError, ShrinkpointError

TENSORS = {f"h.{i}.weight": torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)}


def written(path, kind="safetensors"):
    """Three tensors in two shards."""
    path.mkdir()
    names = list(TENSORS)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    weight_map = {}
    for number, held in enumerate((names[:2], names[2:]), 1):
        file = f"{stem}-{number:05d}-of-00002.{kind}"
        rows = {name: TENSORS[name] for name in held}
        save_file(rows, path / file, {"format": "pt"}) if kind == "safetensors" else torch.save(rows, path / file)
        weight_map |= dict.fromkeys(held, file)
    index = path / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 144}, "weight_map": weight_map}, indent=2))
    (path / "config.json").write_text('{"n": 3}')
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_sharded_directory_is_one_model_and_goes_back_as_it_was(tmp_path, kind):
    index = written(tmp_path / "a", kind)
    part = directory.read(tmp_path / "a")
    assert same(part.content[index.name], TENSORS)
    assert part.content["config.json"] == b'{"n": 3}'
    (tmp_path / "b").mkdir()
    directory.write(tmp_path / "b", part.content, part.info)
    assert (
        directory.scan_directory(tmp_path / "b").files[0].name == directory.scan_directory(tmp_path / "a").files[0].name
    )
    assert same(directory.read(tmp_path / "b").content, part.content)
    if kind == "safetensors":
        assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_a_missing_shard_is_named(tmp_path):
    index = written(tmp_path / "a")
    (tmp_path / "a" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"model-00002-of-00002\.safetensors: no such file"):
        sharded_index.read(index)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "", ".", "a\0b", 3, None])
def test_an_index_that_leads_out_of_its_directory_is_refused(tmp_path, name):
    index = written(tmp_path / "a")
    save_file({"stolen": torch.ones(1)}, tmp_path / "secret.safetensors")
    index.write_text(json.dumps({"weight_map": {"stolen": name}}))
    with pytest.raises(CorruptError):
        directory.read(tmp_path / "a")


def test_an_index_and_shards_that_contradict_each_other_are_refused(tmp_path):
    index = written(tmp_path / "a")
    document = json.loads(index.read_text())
    moved = {**document["weight_map"], "h.0.weight": "model-00002-of-00002.safetensors"}
    for said in (moved, {**document["weight_map"], "h.9.weight": "model-00001-of-00002.safetensors"}):
        index.write_text(json.dumps({"weight_map": said}))
        with pytest.raises(CorruptError, match="no tensor"):
            sharded_index.read(index)


def test_a_name_in_two_shards_is_refused(tmp_path):
    index = written(tmp_path / "a")
    save_file(TENSORS, tmp_path / "a" / "model-00002-of-00002.safetensors")
    with pytest.raises(CorruptError, match="two shards"):
        sharded_index.read(index)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_an_index_that_is_none_is_an_error_of_ours(tmp_path, text):
    index = written(tmp_path / "a")
    index.write_text(text)
    with pytest.raises(ShrinkpointError):
        sharded_index.read(index)


def test_shards_in_a_directory_of_their_own_go_back(tmp_path):
    (tmp_path / "a" / "parts").mkdir(parents=True)
    save_file({"w": torch.ones(3)}, tmp_path / "a" / "parts" / "1.safetensors")
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "parts/1.safetensors"}}))
    part = sharded_index.read(index)
    (tmp_path / "b").mkdir()
    sharded_index.write(tmp_path / "b" / index.name, part.content, part.info)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
