"""Nothing is lost, and nothing stays exact, in silence: of every tensor of floats it is known which, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.adam_states import adam, normal
from helpers.small_state import SCHEMES
from helpers.small_training import Silent
from helpers.strategies import bits
from torch import nn

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import SaveReport
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.tensors.info import Role


class Rooted(nn.Module):
    """Parameters at the root of the module, as vision transformers have them; and buffers there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 96)), nn.Parameter(torch.randn(1, 64, 96))
        self.logit_scale = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(96, 64)
        self.register_buffer("freqs_cis", torch.randn(64, 96))
        self.register_buffer("attention_mask", torch.ones(64, 96))


def state() -> dict[str, Any]:
    weights = {"a.weight": normal(80, 80), "a.bias": normal(80, seed=1), "wide.weight": normal(80, 80, seed=2).double()}
    weights["broken.weight"] = torch.full((80, 80), float("nan"))
    out = adam(weights, {name: x.float().square().nan_to_num(1.0) for name, x in weights.items()})
    return out | {"extra": {"table": normal(90, 80, seed=3), "ids": torch.arange(6000).reshape(60, 100)}}


def loaded(state: Any, scheme: Any, times: int = 1) -> tuple[Any, SaveReport]:
    store = sp.Store(MemoryStorage())
    with Silent():
        for step in range(times):
            report = store.save(step, state, scheme=scheme)
    return store.load(times - 1), report


@pytest.mark.parametrize("name", [name for name in SCHEMES if "ratio" not in name])  # most of this state stays exact
def test_every_tensor_of_floats_is_lossy_or_in_the_list_with_its_reason(name):
    scheme, first, now = SCHEMES[name](), state(), state()
    for x in (first["model"]["a.weight"], first["model"]["a.bias"]):
        x.mul_(0.99)
    store = sp.Store(MemoryStorage())
    with Silent():
        store.save(0, first, scheme=scheme)
        report = store.save(1, now, scheme=scheme)
    before, after = flatten(now), flatten(store.load(1))
    floats = {name for name, x in before.tensors.items() if x.is_floating_point()}
    lossy = {name for name in floats if bits(before.tensors[name]) != bits(after.tensors[name])}
    assert lossy and lossy.isdisjoint(report.exact) and {*report.exact} <= floats
    quantized = {*store.reference.quantized} if store.reference is not None else set()
    dropped = {name for name in floats if name.startswith("optimizer") and bool((after.tensors[name] == 0).all())}
    assert floats <= lossy | {*report.exact} | quantized | dropped
    assert report.exact["extra/table"] == "not known to be a weight"
    assert report.exact["model/wide.weight"] == "of dtype F64" and report.exact["model/broken.weight"] == "not finite"
    said = store.manifest(1).loss["stayed_exact"]
    assert sum(one["tensors"] for one in said.values()) == len(report.exact)
    assert said["not known to be a weight"]["largest"] == ["extra/table"]


def test_lossless_has_no_list():
    _, report = loaded(state(), "lossless")
    assert report.exact == {} and report.loss_report is None


@pytest.mark.parametrize("make", [lambda: sp.Fisher(relative_error=0.3), SCHEMES["inshrinkerator"]])
def test_parameters_at_the_root_of_a_bare_state_dict_are_weights(make):
    model = Rooted()
    found, report = loaded(dict(model.state_dict()), make())
    assert bits(found["pos_embed"]) != bits(model.pos_embed.detach()) and "pos_embed" not in report.exact
    assert bits(found["freqs_cis"]) == bits(model.freqs_cis) and "freqs_cis" in report.exact
    assert report.exact["attention_mask"] == "a buffer"


@pytest.mark.parametrize("make", [lambda: sp.Fisher(relative_error=0.3), SCHEMES["inshrinkerator"]])
def test_a_state_of_which_nothing_is_known_to_be_a_weight_warns(make, tmp_path):
    with pytest.warns(LossWarning, match=r"no tensor is known to be a weight, so nothing is lossy: w1, w2\. Save"):
        sp.save({"w1": normal(80, 80), "w2": normal(80, 80)}, tmp_path / "state.safetensors", scheme=make())


@pytest.mark.parametrize("beside", ["other", "extra"])
def test_what_lies_beside_models_of_one_optimizer_is_no_weight(tmp_path, beside):
    """The optimizer knows two models, so that what it belongs to is the whole state, with what else is in it."""
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(64, 80), nn.Linear(80, 64)
    frozen = nn.Linear(64, 64).requires_grad_(False)
    decoder.add_module("frozen", frozen)
    optimizer = torch.optim.AdamW([*encoder.parameters(), decoder.weight, decoder.bias])
    decoder(encoder(torch.randn(4, 64))).sum().backward()
    optimizer.step()
    table = torch.randn(90, 90)
    with sp.CheckpointManager(tmp_path, scheme=sp.Fisher(relative_error=0.3)) as manager, Silent():
        report = manager.save(1, encoder=encoder, decoder=decoder, optimizer=optimizer, extra={beside: table})
        restored = manager.store.load(1)
    assert bits(restored["extra"][beside]) == bits(table)
    assert report.exact[f"extra/{beside}"] == "not known to be a weight"
    assert bits(restored["decoder"]["frozen.weight"]) != bits(frozen.weight)


@pytest.mark.parametrize(
    "nest",
    [
        {"table": torch.randn(70, 70), "more": {"w.weight": torch.randn(70, 70)}},
        {"data": {"inputs": torch.randn(70, 70), "labels": torch.arange(70)}},
        {"w.weight": torch.randn(70, 70), "vector": torch.randn(5000)},
        {"w.weight": torch.randn(70, 70), "rng_state": torch.randint(0, 255, (70, 70), dtype=torch.uint8)},
    ],
)
def test_what_does_not_look_like_a_state_dict_is_none(nest):
    roles = {name: info.role for name, info in flatten(nest).infos.items()}
    assert all(role is Role.OTHER for name, role in roles.items() if not name.endswith(".weight"))
