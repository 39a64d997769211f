"""The scheme as a user meets it: by name, with any state, in any chain; and what it refuses."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.adam_states import adam, normal, squares
from helpers.small_training import LettersRun, Run, Silent
from helpers.strategies import bits, difference, from_bytes, same
from helpers.strategies import states as any_states
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shrinkpoint as sp
from shrinkpoint.codec.lattice import LatticeTensor
from shrinkpoint.errors import LossWarning, PolicyError
from shrinkpoint.schemes import get_scheme
from shrinkpoint.schemes.select import TensorSelection, select_tensors
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.storage import MemoryStorage, Storage
from shrinkpoint.store import SaveReport
from shrinkpoint.tensors.dtypes import TORCH_DTYPES
from shrinkpoint.tensors.flat_state import flatten

WEIGHTS = {"a.weight": normal(48, 64, scale=0.05), "b.weight": normal(64, 48, seed=1), "b.bias": normal(64, seed=2)}


def select(state: Any, optimized_names: Any = None) -> TensorSelection:
    tensors = GlobalTensors.from_state(state)
    return select_tensors(state, tensors, min_numel=16, min_dims=1, optimized_names=optimized_names)


def saved(state: Any, **options: Any) -> tuple[Any, SaveReport]:
    """What a reader gets, and the report."""
    store = sp.Store(MemoryStorage())
    report = store.save(1, state, scheme=sp.Fisher(**{"relative_error": 0.1, **options}))
    return store.load(1), report


def errors(model: dict[str, torch.Tensor], weights: dict[str, torch.Tensor] = WEIGHTS) -> dict[str, float]:
    return {name: float((model[name].float() - x.float()).norm() / x.float().norm()) for name, x in weights.items()}


# what is asked for


@pytest.mark.parametrize("names", [("nats", "ratio"), ("ratio", "relative_error"), ("nats", "relative_error")])
def test_how_much_may_be_lost_is_said_in_one_way(names):
    with pytest.raises(PolicyError, match=" and ".join(names)):
        sp.Fisher(**dict.fromkeys(names, 2.0))


def test_a_recorder_that_records_no_squares_is_refused_once_that_is_seen():
    run = Run()
    recorder = sp.train.GradientRecorder(run.model)
    with sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(gradients=recorder)) as manager:
        manager.save(1, **run.parts)  # nothing was recorded yet
        run.steps(2, recorder)
        with pytest.raises(PolicyError, match="squares=True"):
            manager.save(2, **run.parts)
        assert manager.store.steps() == [1]


def test_it_says_what_was_asked_for():
    for name, value in {"nats": 0.01, "ratio": 30.0, "relative_error": 0.1}.items():
        assert repr(sp.Fisher(**{name: value})) == f"fisher({name}={value!r})"
    assert repr(sp.Fisher()) == "fisher(nats=0.001)"


def test_a_budget_in_per_cent_is_a_number_with_a_sign():
    for budget in ("0.1", "%", "-1%", "0%", "inf%", "nan%", "1%%", "one%", ""):
        with pytest.raises(PolicyError, match="budget"):
            sp.Fisher(budget=budget, evaluate=lambda state: 1.0)


def test_a_budget_in_per_cent_needs_an_evaluation():
    with pytest.raises(PolicyError, match="evaluate="):
        sp.Fisher(budget="0.1%", terms=100)
    with pytest.raises(PolicyError, match="budget and ratio"):
        sp.Fisher(budget="0.1%", ratio=3, evaluate=lambda state: 1.0)


# by name


@pytest.mark.parametrize("text", ["fisher", "fisher()", "fisher(seed=1)", 'fisher(budget="1%")'])
def test_by_name_alone_it_is_refused_as_nothing_measures_the_loss(tmp_path, text):
    saves = {
        "manager": lambda: sp.CheckpointManager(tmp_path / "run", scheme=text),
        "store": lambda: sp.Store(MemoryStorage()).save(1, adam(WEIGHTS), scheme=text),
        "file": lambda: sp.save(adam(WEIGHTS), tmp_path / "a.safetensors", scheme=text),
    }
    for save in saves.values():
        with pytest.raises(PolicyError, match=r"nothing that measures the loss.*RecentBatches.*relative_error=0\.3"):
            save()
    assert not [*tmp_path.iterdir()]
    assert isinstance(get_scheme("fisher(terms=64)"), sp.Fisher)  # predicts


def test_without_arguments_it_has_steps_of_one_standard_deviation(tmp_path):
    report = sp.save(adam(WEIGHTS), tmp_path / "a.safetensors", scheme=sp.Fisher())
    assert report.scheme == "fisher" == sp.inspect(tmp_path / "a.safetensors").scheme
    assert report.loss_report["chosen"] == {"step_in_deviations": 1.0, "moments": "coded"} and report.ratio > 8
    found = errors(sp.load(tmp_path / "a.safetensors")["model"])
    assert all(0.1 < error < 0.7 for name, error in found.items() if name != "b.bias")
    later = {name: x + 0.1 for name, x in WEIGHTS.items()}
    sp.save(adam(later), tmp_path / "b.safetensors", scheme=sp.Fisher(), base=tmp_path / "a.safetensors")
    assert max(errors(sp.load(tmp_path / "b.safetensors")["model"], later).values()) < 0.7


def test_the_report_and_the_manifest_say_what_was_tried_and_chosen():
    run, storage = Run(steps=20), MemoryStorage()
    with sp.CheckpointManager(storage, scheme=sp.Fisher(nats=0.01, evaluate=run.evaluate)) as manager:
        report = manager.save(1, **run.parts)
    manifest = sp.Store(storage).manifest(1)
    assert manifest.loss == report.loss_report and manifest.is_lossy and manifest.scheme == "fisher"
    said = report.loss_report
    assert said["scheme"] == "fisher" and said["budget"] == 0.01 and said["optimizer"] == "coded"
    assert 2.0 ** (said["size"] / 8) == pytest.approx(said["chosen"]["step_in_deviations"], rel=1e-3)
    assert said["terms"] > 0 and said["left_out"] == [] and said["seconds"] >= 0
    opposite = sum("opposite" in line for line in said["tried"])
    assert run.calls == len(said["tried"]) + opposite + 2  # the state itself, twice, since it is one number
    first, *others = said["tried"]
    assert {*first} == {"step", "hold", "curvature", "slope", "rise"} and opposite == 0
    assert all({*line} == {*first} | {"predicted", "interval"} for line in others)
    assert said["chosen"]["step_in_deviations"] in [line["step"] for line in said["tried"]]


def test_where_nothing_is_lost_nothing_was_chosen():
    state = {"model": {"a.weight": torch.zeros(8, 8)}, "step": 3}
    loaded, report = saved(state)
    assert same(state, loaded) and report.loss_report["chosen"] is None


# what is in a state


DTYPES = [name for name in TORCH_DTYPES if name not in ("F32", "BF16", "F16")]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=20, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from([(), (0,), (16, 0), (40,), (7, 9)]), st.integers(0, 99))
def test_what_is_no_float_of_training_comes_back_bit_for_bit(dtype, shape, seed):
    size = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, size, np.uint8).tobytes()
    x = from_bytes(data, dtype, shape)
    state = adam(WEIGHTS) | {"beside": x}
    state["model"] = state["model"] | {"x.weight": x}
    loaded, _ = saved(state)
    assert bits(loaded["model"]["x.weight"]) == bits(x) == bits(loaded["beside"])
    assert loaded["model"]["x.weight"].dtype == x.dtype and loaded["model"]["x.weight"].shape == x.shape


@settings(max_examples=20, deadline=None)
@given(any_states())
def test_any_state_is_saved_and_all_but_its_weights_and_moments_come_back(state):
    flat = flatten(state)
    with Silent():
        loaded, _ = saved(state)
    after = flatten(loaded)
    assert after.tree == flat.tree and {*after.tensors} == {*flat.tensors}
    selection = select(flat)
    picked = {*selection.tensors, *selection.cast_sources}
    for name, x in flat.tensors.items():
        assert name in picked or bits(x) == bits(after.tensors[name])


@pytest.mark.parametrize("shape", [(), (1,), (15,), (3, 5)])
def test_small_and_wide_weights_come_back_bit_for_bit(shape):
    for dtype in [torch.float32, torch.bfloat16, torch.float64]:
        state = {"model": WEIGHTS | {"x.weight": normal(*shape).to(dtype), "wide.weight": normal(40, 40).double()}}
        loaded, _ = saved(state)
        assert same(loaded["model"]["x.weight"], state["model"]["x.weight"])
        assert same(loaded["model"]["wide.weight"], state["model"]["wide.weight"])
        assert not same(loaded["model"]["a.weight"], state["model"]["a.weight"])


@pytest.mark.parametrize("layout", ["transposed", "channels last", "expanded", "sliced", "parameter"])
def test_weights_may_lie_in_memory_in_any_way(layout):
    x = {
        "transposed": normal(60, 40).t(),
        "channels last": normal(8, 4, 3, 3).to(memory_format=torch.channels_last),
        "expanded": normal(1, 40).expand(20, 40),
        "sliced": normal(60, 40)[::2, 3:],
        "parameter": nn.Parameter(normal(40, 60)),
    }[layout]
    plain, _ = saved({"x.weight": x.detach().clone(memory_format=torch.contiguous_format)})
    found, _ = saved({"x.weight": x})
    if layout != "expanded":  # which is stored once, and so is a vector
        assert torch.equal(found["x.weight"].detach(), plain["x.weight"])
    assert 0.01 < errors({"x.weight": found["x.weight"].detach()}, {"x.weight": x.detach()})["x.weight"] < 0.15


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_exact_and_named(value):
    weights = copy.deepcopy(WEIGHTS)
    weights["a.weight"][3, 5] = value
    with pytest.warns(LossWarning, match=r"nan or infinite values .*model/a\.weight"):
        loaded, report = saved(adam(weights))
    assert same(loaded["model"]["a.weight"], weights["a.weight"]) and report.loss_report["left_out"] == [
        "model/a.weight"
    ]
    assert not same(loaded["model"]["b.weight"], weights["b.weight"])


@pytest.mark.parametrize("broken", ["momentum", "second", "sum"])
def test_a_run_that_diverges_is_saved(broken):
    """Moments whose squares, or whose sum, are no float32: nothing is known of the loss then."""
    state = adam({"a.weight": normal(48, 64), "b.weight": normal(64, 48)})
    if broken == "momentum":
        state["optimizer"]["state"] = {
            i: {"momentum_buffer": normal(*s, scale=1e25)} for i, s in ((0, (48, 64)), (1, (64, 48)))
        }
        state["optimizer"]["param_groups"] = [{"lr": 0.1, "momentum": 0.9, "dampening": 0, "params": [0, 1]}]
    elif broken == "second":
        state["optimizer"]["state"][0]["exp_avg_sq"].fill_(math.inf)
    else:
        state["optimizer"]["state"][0]["exp_avg_sq"].fill_(3e38)
    loaded, report = saved(state, terms=100)
    found = errors(loaded["model"], state["model"])
    assert (
        all(0.01 < error < (0.6 if broken == "second" else 0.3) for error in found.values())
        and report.weights_ratio > 4
    )


def test_half_precision_stays_finite_to_its_end():
    weights = {
        "a.weight": normal(40, 40, scale=25_000).clamp(-65_504, 65_504).half(),
        "b.weight": normal(40, 40).half(),
    }
    with pytest.warns(LossWarning, match=r"too large for the grid .*a\.weight"):
        loaded, report = saved(weights, relative_error=0.2)
    assert same(loaded["a.weight"], weights["a.weight"]) and report.loss_report["left_out"] == ["a.weight"]
    assert 0.01 < errors(loaded, weights)["b.weight"] < 0.3 and loaded["b.weight"].dtype == torch.float16


# copies of weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_follows_its_masters_whose_steps_follow_the_loss(dtype):
    masters = {"0.weight": normal(48, 64), "1.weight": normal(64, 48, seed=1)}
    v = torch.ones(48, 64)
    v[:24] = 256.0
    narrow = {name: x.to(dtype) for name, x in masters.items()}
    state = adam(narrow, {"0.weight": v, "1.weight": torch.full((64, 48), 128.5)})
    state["masters"] = masters
    flat = flatten(state)
    kept = sp.Fisher(relative_error=0.1).plan(flat, None).quantize(flat, None)
    for name, x in masters.items():
        found = kept.state.tensors[f"masters/{name}"]
        assert torch.equal(kept.state.tensors[f"model/{name}"], found.to(dtype)) and not torch.equal(found, x)
        assert f"model/{name}" not in kept.quantized
    rows = kept.quantized["masters/0.weight"].lattice.rows
    assert bool((rows[24:] - rows[:24] == 16).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_without_masters_has_points_of_its_own(dtype):
    weights = {name: x.to(dtype) for name, x in WEIGHTS.items()}
    loaded, report = saved(adam(weights))
    assert all(x.dtype == dtype for x in loaded["model"].values())
    assert all(0.001 < error < 0.2 for error in errors(loaded["model"], weights).values()) and report.ratio > 5


def test_a_tied_weight_that_is_saved_twice_follows_the_one_that_is_trained():
    run = LettersRun(steps=10)
    model = {name: x.clone() for name, x in run.model.state_dict().items()}
    state = {"model": model, "optimizer": run.optimizer.state_dict()}
    loaded, _ = saved(state)
    assert torch.equal(loaded["model"]["wte.weight"], loaded["model"]["lm_head.weight"])
    assert not torch.equal(loaded["model"]["wte.weight"], model["wte.weight"])
    model["lm_head.weight"][0, 0] += 1  # no longer the same
    loaded, _ = saved(state)
    assert float((loaded["model"]["wte.weight"] - loaded["model"]["lm_head.weight"]).abs().max()) > 0.5


def test_copies_are_folded_only_into_what_an_optimizer_knows():
    x = normal(32, 32)
    state = adam({"a.weight": x}) | {"ema": {"a.weight": x.clone(), "b.weight": normal(32, 32, seed=1)}}
    flat = flatten(state)
    assert {*select(flat, ()).tensors} == {"model/a.weight", "ema/a.weight", "ema/b.weight"}
    folded = select(flat, {"model/a.weight"})
    assert {*folded.tensors} == {"model/a.weight", "ema/b.weight"}
    assert folded.cast_sources == {"ema/a.weight": "model/a.weight"}


# what it leaves as it was


@pytest.mark.parametrize("options", [{}, {"nats": 0.01, "terms": 100}, {"ratio": 20}, {"moments": "drop"}])
def test_nothing_of_the_caller_is_touched(options):
    def evaluate(state: Any) -> float:
        torch.rand(3), random.random(), np.random.rand()
        return float(sum(x.square().sum() for x in state["model"].values()))

    state = adam(WEIGHTS)
    before, addresses = copy.deepcopy(state), [x.data_ptr() for x in state["model"].values()]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    for more in ({}, {"evaluate": evaluate}):
        store, scheme = sp.Store(MemoryStorage()), sp.Fisher(**options, **more)
        with Silent():
            for step in (1, 2):
                store.save(step, state, scheme=scheme)
        assert difference(before, state) is None and addresses == [x.data_ptr() for x in state["model"].values()]
        assert torch.equal(generators[0], torch.get_rng_state()) and random.getstate() == generators[1]
        assert np.array_equal(generators[2], np.random.get_state()[1])


def payload(storage: Storage, step: int) -> bytes:
    (key,) = [key for key in storage.list(f"step-{step:09d}/") if "rank" in key]
    return storage.get(key)


def chain(**options: Any) -> list[bytes]:
    storage = MemoryStorage()
    store, scheme = sp.Store(storage), sp.Fisher(**options)
    for step in range(3):
        state = adam({name: x + 0.02 * step * normal(*x.shape, seed=9) for name, x in WEIGHTS.items()}, step=100 + step)
        store.save(step, state, scheme=scheme)
    return [payload(storage, step) for step in range(3)]


def test_the_same_states_become_the_same_bytes():
    assert chain(relative_error=0.1) == chain(relative_error=0.1)
    others = chain(relative_error=0.1, seed=1)
    assert all(a != b for a, b in zip(chain(relative_error=0.1), others, strict=True))  # moments are dithered


# in a chain


BINS = {"bins": 16, "embedding_bins": 32, "prune": 0.1, "protect": 0.005}
OTHERS = {
    "lossless": sp.Lossless,
    "lc": sp.LCCheckpoint,
    "excp": sp.ExCP,
    "inshrinkerator": lambda: sp.Inshrinkerator(config=BINS),
}


@pytest.mark.parametrize("other", OTHERS)
def test_any_scheme_may_come_before_and_after(other):
    weights = {"a.weight": normal(96, 64, scale=0.05), "b.weight": normal(64, 96, seed=1)}
    storage = MemoryStorage()
    store, ours = sp.Store(storage), sp.Fisher(relative_error=0.1)
    states = [adam({name: x + 0.01 * i * normal(*x.shape, seed=i) for name, x in weights.items()}) for i in range(5)]
    with Silent():
        reports = [
            store.save(i, state, scheme=OTHERS[other]() if i in (0, 3) else ours) for i, state in enumerate(states)
        ]
    assert [report.keyframe for report in reports] == [True, False, False, False, False]
    for i, state in enumerate(states):
        fresh = sp.Store(storage)
        assert max(errors(fresh.load(i)["model"], state["model"]).values()) < (0.3 if i in (0, 3) else 0.15)
    assert sp.Store(storage).verify(deep=True) == []


def test_shapes_and_names_may_change_between_saves():
    store, scheme = sp.Store(MemoryStorage()), sp.Fisher(relative_error=0.1)
    shapes = [(64, 48), (96, 48), (96, 32), (96, 32), (64, 48)]
    for step, (rows, columns) in enumerate(shapes):
        bias = normal(64).repeat(2)[:rows]  # of about the same spread, so of the same lattice
        weights = {"a.weight": normal(rows, columns), "a.bias": bias, f"{step // 3}.weight": normal(40, 40)}
        with Silent():
            store.save(step, adam(weights), scheme=scheme)
        assert max(errors(store.load(step)["model"], weights).values()) < 0.2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("generation", [0, 2])
def test_points_of_a_state_on_a_gpu_are_those_of_one_on_the_cpu(generation):
    """But for the few that rounding in another order may move."""
    states = {}
    for device in ("cpu", "cuda"):
        scheme = sp.Fisher(relative_error=0.1)
        scheme.resume(None, generation)
        state = adam(
            {name: x.to(device) for name, x in WEIGHTS.items()},
            {name: squares(*x.shape).to(device) for name, x in WEIGHTS.items()},
        )
        for slot in state["optimizer"]["state"].values():
            slot["exp_avg"] = slot["exp_avg"].to(device)
        flat = flatten(state)
        kept = scheme.plan(flat, None).quantize(flat, None)
        states[device] = kept
    assert {*states["cpu"].symbols} == {*states["cuda"].symbols}
    for name, one in states["cpu"].symbols.items():
        other = states["cuda"].symbols[name]
        assert isinstance(one, LatticeTensor) and isinstance(other, LatticeTensor) and other.codes.device.type == "cpu"
        if name.startswith("model"):
            assert one.lattice == other.lattice
            assert float((one.codes != other.codes).float().mean()) < 1e-3
