"""`export` writes files that need no shrinkpoint to read."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from helpers.parameters import each_value
from safetensors.torch import load_file

import shrinkpoint as sp
from shrinkpoint.store import Store

SMALL = ("--scheme", "fisher(relative_error=0.3)")


def test_safetensors_holds_every_tensor_under_its_name(run, store, tmp_path, state_at):
    out = tmp_path / "all.safetensors"
    done = run("export", store, out)
    assert done.code == 0
    assert "plain values left out" in done.stderr
    tensors, state = load_file(out), state_at(40)
    assert torch.equal(tensors["model/weight"], state["model"]["weight"])
    assert torch.equal(tensors["optimizer/state/1/exp_avg_sq"], state["optimizer"]["state"][1]["exp_avg_sq"])
    assert torch.equal(tensors["extra/order"], torch.arange(7))


def test_a_link_leads_to_what_is_exported(run, store, tmp_path, state_at):
    link, target = tmp_path / "link.safetensors", tmp_path / "target"
    link.symlink_to(target)
    assert run("export", store, link).code == 0
    assert link.is_symlink() and torch.equal(load_file(target)["model/weight"], state_at(40)["model"]["weight"])


def test_a_torch_file_holds_the_whole_state_and_opens_with_weights_only(run, store, tmp_path, state_at):
    out = tmp_path / "all.pt"
    done = run("export", store, out, "--step", 30)
    assert done.code == 0
    assert "numpy" in done.stderr
    loaded, state = torch.load(out, weights_only=True), state_at(30)
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert loaded["extra"]["epoch"] == 1
    assert loaded["extra"]["scale"] == 0.5
    assert torch.equal(loaded["extra"]["order"], torch.arange(7))
    torch.optim.AdamW(torch.nn.Linear(64, 32).parameters()).load_state_dict(loaded["optimizer"])
    torch.nn.Linear(64, 32).load_state_dict(loaded["model"])


def test_everything_a_state_may_hold_opens_with_weights_only(run, tmp_path):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    numpy = [np.float64(2), np.int8(-3), np.bool_(True), np.arange(6).reshape(2, 3)[:, ::2], np.zeros((), ">f8")]
    state = {
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "size": torch.Size([2, 3]),
        "bytes": b"\x00\xff" * 200,
        "module": module.state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "big": 1 << 90,
        3: (None, True, 1.5),
        "numpy": numpy,
        "texts": np.array(["a", "bc"]),
        "arguments": Namespace(rate=0.1, table=torch.ones(2)),
    }
    with Store(tmp_path / "run") as store:
        store.save(1, state)
    assert run("export", tmp_path / "run", tmp_path / "all.pt").code == 0
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert list(loaded["ordered"]) == ["b", "a"]
    assert loaded["module"]._metadata["0"] == {"version": 2}
    assert loaded["counter"] == state["counter"]
    assert loaded["size"] == torch.Size([2, 3])
    assert (loaded["bytes"], loaded["big"], loaded[3]) == (state["bytes"], 1 << 90, (None, True, 1.5))
    assert loaded["numpy"][:3] == [2.0, -3, True]
    assert loaded["numpy"][3].tolist() == [[0, 2], [3, 5]]
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert loaded["texts"] == ["a", "bc"]
    assert loaded["arguments"]["rate"] == 0.1 and loaded["arguments"]["table"].tolist() == [1, 1]


def test_tied_tensors_have_all_their_names_in_safetensors_and_stay_tied_in_torch(run, tmp_path):
    w = torch.randn(4, 4)
    with Store(tmp_path / "run") as store:
        store.save(1, {"wte": w, "head": w, "row": w[1], "transposed": w.T})
    for out in ("all.safetensors", "all.pt"):
        assert run("export", tmp_path / "run", tmp_path / out).code == 0
    tensors = load_file(tmp_path / "all.safetensors")
    assert torch.equal(tensors["wte"], w)
    assert torch.equal(tensors["head"], w)
    assert torch.equal(tensors["row"], w[1])
    assert torch.equal(tensors["transposed"], w.T)
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded["wte"].data_ptr() == loaded["head"].data_ptr()


def test_a_pattern_selects_by_name_and_the_nest_stays(run, store, tmp_path):
    out = tmp_path / "model.pt"
    assert run("export", store, out, "--only", "model/*", "--only", "extra/epoch").code == 0
    loaded = torch.load(out, weights_only=True)
    assert loaded.keys() == {"model", "extra"}
    assert loaded["extra"] == {"epoch": 2}
    torch.nn.Linear(64, 32).load_state_dict(loaded["model"])
    for number, pattern in enumerate(("model", "model.*", "model/*")):  # as `shrinkpoint.load` takes them
        assert run("export", store, tmp_path / f"{number}.pt", "--only", pattern).code == 0
        assert torch.load(tmp_path / f"{number}.pt", weights_only=True)["model"].keys() == loaded["model"].keys()
    document = json.loads(run("export", store, tmp_path / "m.safetensors", "--only", "*/exp_avg", "--json").stdout)
    assert document["tensors"] == 2
    assert load_file(tmp_path / "m.safetensors").keys() == {f"optimizer/state/{i}/exp_avg" for i in (0, 1)}


def test_a_pattern_that_matches_nothing_is_not_found(run, store, tmp_path):
    done = run("export", store, tmp_path / "x.pt", "--only", "modle/*")
    assert done.code == 3
    assert not (tmp_path / "x.pt").exists()


def test_the_suffix_says_the_format_unless_told(run, store, tmp_path):
    assert run("export", store, tmp_path / "weights").code == 2
    assert run("export", store, tmp_path / "weights", "--to", "torch").code == 0
    assert torch.load(tmp_path / "weights", weights_only=True).keys() == {"model", "optimizer", "frozen", "extra"}


def test_a_file_that_exists_is_replaced_only_by_force(run, store, tmp_path):
    out = tmp_path / "x.pt"
    out.write_text("mine")
    assert run("export", store, out).code == 2
    assert out.read_text() == "mine"
    assert run("export", store, out, "--force").code == 0


@pytest.mark.parametrize("name, options", [("all.pt", ()), ("all.safetensors", ()), ("f.safetensors", SMALL)])
def test_missing_directories_are_made(run, store, tmp_path, name, options):
    out = tmp_path / "new" / "deeper" / name
    assert run("export", store, out, *options).code == 0
    assert out.is_file()


def test_a_dtype_safetensors_lacks_is_refused_by_name(run, tmp_path):
    with Store(tmp_path / "run") as store:
        store.save(1, {"z": torch.zeros(2, dtype=torch.complex128)})
    done = run("export", tmp_path / "run", tmp_path / "x.safetensors")
    assert done.code == 2
    assert "z: " in done.stderr
    assert run("export", tmp_path / "run", tmp_path / "x.pt").code == 0


def test_a_failed_write_leaves_nothing(run, store, tmp_path):
    (tmp_path / "file").touch()
    done = run("export", store, tmp_path / "file" / "x.pt")
    assert done.code == 6 and f"{tmp_path / 'file' / 'x.pt'}: writing failed" in done.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x.safetensors").mkdir()
    done = run("export", store, tmp_path / "full" / "x.safetensors", "--force")
    assert done.code == 2 and "a directory; expected a file to write" in done.stderr
    assert [one.name for one in (tmp_path / "full").iterdir()] == ["x.safetensors"]


def test_a_delta_file_is_exported_with_the_bases_it_names(run, payload, tmp_path, state_at):
    assert run("export", payload(30), tmp_path / "x.safetensors").code == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["model/weight"], state_at(30)["model"]["weight"])


def test_a_model_is_exported_for_hugging_face(run, tmp_path):
    from helpers.huggingface import gpt2
    from transformers import AutoModelForCausalLM

    models = {step: gpt2(layers=step) for step in (1, 2)}
    with Store(tmp_path / "run") as opened:
        for step, model in models.items():
            opened.save(step, {"model": model.state_dict(), "optimizer": {"m": torch.ones(3)}})
    models[2].save_pretrained(tmp_path / "stock")
    out = tmp_path / "out"
    assert run("export", tmp_path / "run", out, "--hf").code == 3  # no configuration
    done = run("export", tmp_path / "run", out, "--hf", "--config", tmp_path / "stock", "--max-shard-size", "20KB")
    assert done.code == 0 and "for from_pretrained" in done.stdout
    assert (out / "model.safetensors.index.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in models[2].state_dict().items())
    models[1].save_pretrained(tmp_path / "stock")
    refused = run("export", tmp_path / "run", out, "--hf")
    assert (refused.code, "Add --force to replace it" in refused.stderr) == (2, True)
    arguments = ("--hf", "--config", tmp_path / "stock" / "config.json", "--force", "--json")
    again = json.loads(run("export", f"{tmp_path / 'run'}@1", out, *arguments).stdout)
    assert again["files"] == ["config.json", "generation_config.json", "model.safetensors"] and again["to"] == "hf"
    assert again["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    for wrong in (["--hf", "--to", "torch"], ["--hf", "--only", "model"], ["--to", "torch", "--config", "x"]):
        assert run("export", tmp_path / "run", tmp_path / "other.pt", *wrong).code == 2
    assert not (tmp_path / "other.pt").exists()


CALIBRATION = """
import torch

def losses(state):
    model = torch.nn.Linear(64, 32)
    model.load_state_dict(state["model"])
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(8, 64, generator=generator)
    return (model(torch.randn(64, 8, generator=generator) @ mixing).square().mean() for _ in range(2))

def nothing(state):
    return None
"""


def test_a_scheme_writes_a_small_file_of_ours_with_error_feedback(run, store, tmp_path, state_at, monkeypatch):
    (tmp_path / "calibration_of_export.py").write_text(CALIBRATION)
    monkeypatch.syspath_prepend(tmp_path)
    scheme = ("--scheme", "fisher(relative_error=.6)")
    calibrated = (*scheme, "--calibrate", "calibration_of_export:losses")
    fed, plain = tmp_path / "fed.safetensors", tmp_path / "plain.safetensors"
    document = json.loads(run("export", store, fed, *calibrated, "--json").stdout)
    assert document["to"] == "shrinkpoint" and document["scheme"] == "fisher"
    assert document["bytes"] == fed.stat().st_size < document["raw_bytes"] / 2
    done = run("export", store, plain, *scheme)
    assert done.code == 0 and "x smaller (fisher)" in done.stdout and "the loss is not measured" in done.stderr
    weight = state_at(40)["model"]["weight"]
    mixing = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    errors = [float((mixing @ (sp.load(path)["model"]["weight"] - weight).T).square().sum()) for path in (fed, plain)]
    assert 0 < errors[0] < 0.7 * errors[1]
    assert sp.load(fed)["extra"]["epoch"] == 2
    assert run("export", store, fed, *calibrated).code == 2  # it exists
    assert run("export", store, tmp_path / "w", *calibrated, "--only", "model/*").code == 0
    assert sp.load(tmp_path / "w").keys() == {"model"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--calibrate", "calibration_of_export:losses"], "Add --scheme"),
        (["--scheme", "fisher(relative_error=.6)", "--to", "torch"], "one form"),
        (["--scheme", "lossless", "--calibrate", "calibration_of_export:losses"], "expected the scheme fisher"),
        (["--scheme", "fisher(relative_error=.6)", "--calibrate", "calibration_of_export:none"], "calibrate"),
        (["--scheme", "fisher(relative_error=.6)", "--calibrate", "calibration_of_export:nothing"], "ran no layer"),
        (["--scheme", "fisher", "--calibrate", "calibration_of_export:losses"], "--evaluate"),
    ],
)
def test_a_scheme_without_what_it_needs_writes_nothing(run, store, tmp_path, monkeypatch, arguments, text):
    (tmp_path / "calibration_of_export.py").write_text(CALIBRATION)
    monkeypatch.syspath_prepend(tmp_path)
    done = run("export", store, tmp_path / "a.safetensors", *arguments)
    assert done.code == 2 and text in " ".join(done.stderr.split())
    assert not (tmp_path / "a.safetensors").exists()


def test_a_file_of_a_checkpoint_is_not_replaced(run, store, payload):
    before = payload(40).read_bytes()
    for out in (payload(40), payload(40).parent / "manifest.json", store / "step-000000050" / "rank-00000.safetensors"):
        done = run("export", store, out, "--force", "--to", "torch")
        assert done.code == 2 and "a file of a checkpoint; expected another place" in done.stderr
    assert payload(40).read_bytes() == before
    assert run("verify", store, "--deep").code == 0


@pytest.mark.parametrize(
    ("option", "hf"), each_value([["--higher-is-better"], ["--threshold", "5%"], ["--evaluate", "a:b"]], [[], ["--hf"]])
)
def test_what_only_a_scheme_needs_is_refused_without_one(run, store, tmp_path, option, hf):
    done = run("export", store, tmp_path / "a.safetensors", *option, *hf)
    text = " ".join(done.stderr.split())
    assert done.code == 2 and f"{option[0]}; expected --scheme as well. Add --scheme, or leave out {option[0]}" in text
    assert not (tmp_path / "a.safetensors").exists()
