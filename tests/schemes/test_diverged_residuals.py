"""After weights that were saved and then rolled back in memory: what is saved next is as good as without them."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from helpers.adam_states import adam, normal
from helpers.parameters import each_value
from helpers.sharded_states import after, columns, rows, saved, whole
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.errors import LossWarning
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import SaveReport
from shrinkpoint.store.delta_base import retained_fraction
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.train import Checkpointer

BINS = {"bins": 16, "embedding_bins": 16}
TRACKED = {
    "lc": sp.LCCheckpoint,
    "lc of 2 bits": lambda: sp.LCCheckpoint(bits=2),
    "lc as printed": lambda: sp.LCCheckpoint(paper=True),
    "scar": sp.SCAR,
    "scar in turn": lambda: sp.SCAR(order="round robin"),
    "topn": sp.TOPN,
    "excp": sp.ExCP,
    "excp as released": lambda: sp.ExCP(rule="released", paper=True, paper_fp16=True),
}
SCHEMES: dict[str, Any] = TRACKED | {
    "lossless": lambda: "lossless",
    "fisher": lambda: sp.Fisher(relative_error=0.3),
    "fisher by prediction": lambda: sp.Fisher(terms=1000),
    "fisher by ratio": lambda: sp.Fisher(ratio=9),
    "inshrinkerator": lambda: sp.Inshrinkerator(config={**BINS, "prune": 0.1, "protect": 0.005}),
    "inshrinkerator as printed": lambda: sp.Inshrinkerator(config={**BINS, "prune": 0.1, "protect": 0.005}, paper=True),
    "qd": lambda: sp.QD(config={"least": 8, "most": 64}),
    "cnr": lambda: sp.CNR(config={"bins": 16, "steps": 50, "range": 0.3}),
    "gobo": lambda: sp.GOBO(config=BINS),
}
SAVES = 4


def states(spike: float, at: int) -> list[dict[str, Any]]:
    """A run that moves by a hundredth a save; at one of them the weights are so many times too large."""
    weights = {"a.weight": normal(64, 80, scale=0.05), "b.weight": normal(80, 64, seed=1, scale=0.02)}
    out = []
    for i in range(SAVES):
        weights = {
            name: x + 0.01 * x.std() * normal(*x.shape, seed=100 + 2 * i + k)
            for k, (name, x) in enumerate(weights.items())
        }
        out.append(adam({name: x * (spike if i == at else 1.0) for name, x in weights.items()}, step=10 + i))
    return out


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - x).norm() / x.norm()) for name, x in expected.items())


def errors(make: Any, spike: float, at: int, keyframe_every: int = 20) -> tuple[list[float], list[SaveReport]]:
    """Of every save, as a reader gets it; and the reports."""
    scheme, out, reports = make(), [], []
    with sp.Store(MemoryStorage(), keyframe_every=keyframe_every) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", LossWarning)
        for step, state in enumerate(states(spike, at)):
            reports.append(store.save(step, state, scheme=scheme))
            out.append(error(store.load(step, keep=False)["model"], state["model"]))
    return out, reports


@functools.cache
def errors_of(name: str) -> list[float]:
    """Without a spike."""
    return errors(SCHEMES[name], 1.0, 0)[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_spike_that_was_rolled_back_leaves_no_error_behind(name):
    """The spike is saved as a delta, as a keyframe in the midst of a run, or first of all."""
    usual = errors_of(name)
    for at, keyframe_every, spike in [(2, 20, 5.0), (2, 20, 1e8), (2, 2, 1e8), (0, 20, 100.0)]:
        found, _ = errors(SCHEMES[name], spike, at, keyframe_every)
        assert max(found[at + 1 :]) <= 1.5 * max(usual) + 0.02


@pytest.mark.parametrize(("name", "spike"), each_value(TRACKED, [100.0, 1e4, 1e8]))
def test_where_a_difference_is_worth_nothing_a_keyframe_is_written_and_said(name, spike):
    scheme, now = TRACKED[name](), states(spike, 0)
    storage = MemoryStorage()
    with sp.Store(storage) as store:
        store.save(0, now[0], scheme=scheme)
        with pytest.warns(LossWarning, match=r"a.weight.*times the weights, which .*\. This checkpoint is a keyframe"):
            report = store.save(1, now[1], scheme=scheme)
        assert report.keyframe and store.manifest(1).depth == 0
        assert error(store.load(1, keep=False)["model"], now[1]["model"]) == 0
        said = store.manifest(1).loss
        assert said == report.loss_report and {*said["far"]} == {"model/a.weight", "model/b.weight"}
        assert all(float(one) > 0.01 for one in said["far"].values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LossWarning)
            warnings.filterwarnings("error", message=".*is a keyframe", category=LossWarning)
            later = store.save(2, now[2], scheme=scheme)
        assert not later.keyframe and "far" not in later.loss_report and later.retention < 1.5


@pytest.mark.parametrize("name", TRACKED)
def test_it_is_said_in_folders_and_files_too(tmp_path, name):
    now = states(1e4, 0)
    with Checkpointer(scheme=TRACKED[name]()) as trail:
        trail.save(tmp_path / "0", now[0])
        with pytest.warns(LossWarning, match="is a keyframe"):
            report = trail.save(tmp_path / "1", now[1])
        assert report is not None and report.keyframe and not [*(tmp_path / "1").glob("*base*")]
        loaded = trail.load(tmp_path / "1")
        assert error(loaded.state["model"], now[1]["model"]) == 0 and loaded.manifest.loss["far"]
    sp.save(now[0], tmp_path / "a.safetensors", scheme=TRACKED[name]())
    with pytest.warns(LossWarning, match="is a keyframe"):
        sp.save(now[1], tmp_path / "b.safetensors", base=tmp_path / "a.safetensors", scheme=TRACKED[name]())
    assert sp.inspect(tmp_path / "b.safetensors").parent is None
    assert error(sp.load(tmp_path / "b.safetensors")["model"], now[1]["model"]) == 0


@pytest.mark.parametrize(("name", "cutter"), each_value(["lc", "scar", "excp"], [rows, columns]))
def test_several_ranks_agree_that_it_is_one(name, cutter):
    flats = [flatten(state) for state in states(1e4, 1)[:3]]
    with pytest.warns(LossWarning, match="is a keyframe"):
        found = saved(TRACKED[name], flats, 3, cutter)
        expected = whole(TRACKED[name](), flats)
    assert [[kept.keyframe for kept in one.kept] for one in found] == [[False] * 3, [False] * 3, [True] * 3]
    assert [one.kept[0].keyframe for one in expected] == [False, False, True]
    for key, x in flats[2].tensors.items():
        if key.startswith("model/"):
            assert torch.equal(found[2].tensors[key], x)


@pytest.mark.parametrize("name", TRACKED)
def test_weights_that_move_as_far_as_they_are_large_are_still_differences(name):
    """Training from the start on: slow schemes are far behind, which is theirs to be, and retention says so."""
    first, step = {"a.weight": normal(64, 80)}, {"a.weight": normal(64, 80, seed=1)}
    scheme = TRACKED[name]()
    kept = scheme.quantize(flatten(first), None)
    reference = after(kept, flatten(first))
    second = {"a.weight": first["a.weight"] + 3 * step["a.weight"]}
    made = scheme.quantize(flatten(second), reference)
    assert made.quantized and not made.keyframe


def test_retention_is_that_of_the_present_weights():
    """The step back from a spike is thousands of times what the weights are, and would hide that they are gone."""
    x = normal(64, 80)
    spike = {"a": 1e4 * x}
    assert retained_fraction(spike, spike, {"a": x}, {"a": torch.zeros_like(x)}) == pytest.approx(0, abs=1e-6)
    assert retained_fraction(spike, spike, {"a": x}, {"a": 0.5 * x}) == pytest.approx(0.5)
    near = {"a": 0.9 * x}
    assert retained_fraction(near, near, {"a": x}, near) == pytest.approx(0, abs=1e-6)
