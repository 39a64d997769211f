"""Moments on grids: zeros stay zero, no division by nothing, errors that average out."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers.adam_states import adam, normal, squares
from helpers.parameters import each_value
from helpers.small_training import Run, Silent
from helpers.strategies import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.codec.lattice import Lattice, LatticeTensor, as_matrix
from shrinkpoint.quantize.lattice import quantize_second_moment, quantize_to_lattice
from shrinkpoint.quantize.statistics import relative_squares, second_moment_sums
from shrinkpoint.schemes.fisher.moment_lattices import (
    MIN_LATTICE_NUMEL,
    MomentPrecision,
    first_row_exponents,
    moments_to_lattices,
    own_momentum_exponents,
    quantize_momentum,
    round_stochastically,
    second_exponents,
)
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.tensors.flat_state import flatten, unflatten

STEPS = MomentPrecision()
MOMENTUM_STEP = 4.0
SHAPES = [(48, 32), (700,), (12, 4, 3, 3), (1, 200), (200, 1)]


def kept(state: dict, **options) -> dict:
    """What a reader gets."""
    flat = flatten(state)
    found = sp.Fisher(**options).plan(flat, None).quantize(flat, None)
    return unflatten(found.state.tree, found.state.tensors)


def slots(state: dict) -> list[dict[str, Tensor]]:
    return [*state["optimizer"]["state"].values()]


def beside(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both as a reader gets them."""
    slot = slots(kept(adam({"a": normal(*m.shape)}, {"a": v}, {"a": m})))[0]
    return slot["exp_avg"], slot["exp_avg_sq"]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 99), st.integers(-24, 24), st.floats(0, 6))
def test_second_moments_stay_positive_where_they_are_and_zero_where_they_are_not(shape, seed, level, octaves):
    v = squares(*shape, seed=seed, octaves=octaves) * 10.0**level
    v[normal(*shape, seed=seed + 1) > 1.5] = 0.0
    v[:1] = 0.0
    m = normal(*shape, seed=seed + 2, scale=0.1) * v.sqrt()
    first_, second_ = beside(m, v)
    assert bool((second_ >= 0).all()) and torch.equal(second_ == 0, (v == 0) & (m == 0))
    assert not first_[v == 0].any() and bool(first_.isfinite().all() and second_.isfinite().all())


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 99), st.sampled_from(["some", "rows", "all"]))
def test_second_moments_are_never_zero_where_first_ones_are_not(shape, seed, where):
    """Adam would divide by its epsilon alone: squares of small gradients underflow before these do."""
    m, v = normal(*shape, seed=seed, scale=1e-3), squares(*shape, seed=seed)
    chosen = {
        "some": normal(*shape, seed=seed + 1) > 1,
        "rows": torch.zeros(shape, dtype=torch.bool),
        "all": torch.ones(shape, dtype=torch.bool),
    }[where]
    chosen[:2] = True
    v[chosen], m[chosen] = 0.0, m[chosen] * 1e-18
    first_, second_ = beside(m, v)
    assert bool((second_ > 0)[m != 0].all()) and bool((second_ > 0)[first_ != 0].all())


def test_second_moments_are_within_a_factor_of_what_they_were():
    v = squares(64, 96)
    logs = (beside(v * 0, v)[1] / v).log2()
    assert float(logs.abs().max()) <= STEPS.second_step / 8 * STEPS.second_zones.dead + 5 / 8
    assert abs(float(logs.mean())) < 0.1


@pytest.mark.parametrize("key", ["max_exp_avg_sq", "sum", "exp_inf"])
def test_what_never_forgets_has_finer_steps(key):
    state, v = adam({"a": normal(64, 96)}), squares(64, 96)
    slots(state)[0][key] = v.clone()
    logs = (slots(kept(state))[0][key] / v).log2()
    assert 0.1 < float(logs.abs().max()) <= STEPS.accumulator_step / 16 + 1 / 8 < 0.5


def test_rows_and_columns_keep_their_means():
    v = squares(128, 96, octaves=4)
    found = beside(v * 0, v)[1]
    for axis in (0, 1):
        assert float((found.log2().mean(axis) - v.log2().mean(axis)).abs().max()) < 0.75


def quantize_second(v: Tensor) -> LatticeTensor:
    exponents = second_exponents(v.numel(), second_moment_sums(v))
    return quantize_second_moment(v, None, Lattice("log", *exponents, step=STEPS.second_step), STEPS.second_zones)[0]


def quantize_beside(m: Tensor, v: LatticeTensor, seed: int) -> LatticeTensor | None:
    means = relative_squares(m, v.dequantize(torch.float32)).mean(1)
    rows = first_row_exponents(means, torch.full_like(means, STEPS.first_step), STEPS)
    lattice = Lattice("relative", rows, torch.zeros(1, dtype=torch.int16), seed=seed)
    return quantize_to_lattice(m, lattice, second_moment=v, relative_to="v")


def quantize_alone(m: Tensor, seed: int) -> LatticeTensor | None:
    exponents = own_momentum_exponents(m, MOMENTUM_STEP)
    return None if exponents is None else quantize_momentum(m, Lattice("linear", *exponents, seed=seed))


def relative(shape: tuple[int, ...]) -> tuple[Tensor, LatticeTensor, Tensor]:
    """A first moment, the second one beside it, and what a reader decodes of that."""
    v = squares(*shape)
    points = quantize_second(v)
    return normal(*shape, seed=9, scale=0.3) * v.sqrt(), points, points.dequantize(torch.float32)


@pytest.mark.parametrize(("alone", "shape"), each_value([False, True], SHAPES))
def test_the_error_of_first_moments_is_at_most_half_a_step_and_zero_on_average(shape, alone):
    m, second, v = relative(shape)
    total, count = torch.zeros(shape), 200
    for seed in range(1, count + 1):
        points = quantize_alone(m, seed) if alone else quantize_beside(m, second, seed)
        assert points is not None
        half = points.lattice.scales(None if alone else as_matrix(v)).expand(as_matrix(m).shape).reshape(shape) / 2
        error = points.dequantize(torch.float32, None if alone else v) - m
        assert bool((error.abs() <= half * 1.001).all())
        total += error / half
    spread = 1 / math.sqrt(3 * count)
    assert float((total / count).abs().max()) < 6 * spread and abs(float((total / count).mean())) < spread


def test_each_save_and_each_tensor_has_a_dither_of_its_own():
    def seeds(save: int, seed: int) -> set[int]:
        flat = flatten(adam({"a": normal(9, 9), "b": normal(9, 9)}))
        return {
            points.lattice.seed
            for name, points in moments_to_lattices(GlobalTensors.from_state(flat), flat, save, seed, STEPS).items()
            if name.endswith("exp_avg")
        }

    assert len(seeds(1, 0) | seeds(2, 0) | seeds(1, 1)) == 6 and 0 not in seeds(1, 0)


@pytest.mark.parametrize("alone", [False, True])
def test_rows_that_hardly_move_get_little_noise(alone):
    """At most half a step of 10 root mean squares of the row, a quarter of an octave more or less."""
    m, second, v = relative((40, 64))
    m[:10] *= 1e-3
    m[10] *= 1e-6 if alone else 1e-4
    points = quantize_alone(m, 3) if alone else quantize_beside(m, second, 3)
    assert points is not None
    error = points.dequantize(torch.float32, None if alone else v) - m
    error, usual = (error, m) if alone else (error / v.sqrt(), m / v.sqrt())
    noise, rows = error.square().mean(1).sqrt(), usual.square().mean(1).sqrt()
    assert bool((noise <= 5.3 * rows).all())
    if not alone:
        assert bool((error.abs().amax(1) <= 6.3 * rows).all())


def test_a_momentum_with_zeros_keeps_them_and_its_error_is_zero_on_average():
    own = normal(40, 64)
    own[7], own[:, 5], own[2, 3] = 0.0, 0.0, 0.0
    lattice = Lattice("linear", *own_momentum_exponents(own, 8.0))
    total = torch.zeros_like(own)
    for seed in range(1, 201):
        found = round_stochastically(own, lattice, seed).dequantize(torch.float32)
        assert not found[own == 0].any()
        assert bool(((found - own).abs() <= lattice.scales() * 1.001).all())
        total += (found - own) / lattice.scales()
    assert float((total / 200).abs().max()) < 6 * 0.5 / math.sqrt(200) and abs(float((total / 200).mean())) < 1e-2


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adamax])
def test_a_momentum_with_zeros_is_coded_with_its_zeros(make):
    run, name = Run(), "momentum_buffer" if make is torch.optim.SGD else "exp_avg"
    run.optimizer = make(run.model.parameters(), 0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    run.steps(3)
    state = state_of(run)
    own = slots(state)[0][name]
    own.copy_(normal(*own.shape))
    own[0] = 0.0
    found = slots(kept(state))[0][name]
    assert not same(found, own) and not found[own == 0].any()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(-44, 37), st.integers(-37, 37), st.integers(0, 9))
def test_moments_of_any_size_come_back_finite(shape, level, other, seed):
    """Denormal ones, and those whose squares are no float32."""
    m, v = normal(*shape, seed=seed) * 10.0**level, squares(*shape, seed=seed) * 1e6 * 10.0**other / 1e3
    for found, x in zip(beside(m, v), (m, v), strict=True):
        assert bool(found[x.isfinite()].isfinite().all())
    points = quantize_alone(m, 3)
    assert points is None or bool(points.dequantize(torch.float32).isfinite().all())


def trained(make, steps: int = 6, **settings) -> Run:
    run = Run()
    run.optimizer = make(run.model.parameters(), **settings)
    return run.steps(steps)


def state_of(run: Run) -> dict:
    return copy.deepcopy({"model": dict(run.model.state_dict()), "optimizer": run.optimizer.state_dict()})


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, {"momentum_buffer": "linear"}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}, {"sum": "log"}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-4, "momentum": 0.9}, {"square_avg": "log", "momentum_buffer": "linear"}),
    "amsgrad": (
        torch.optim.AdamW,
        {"lr": 1e-3, "amsgrad": True},
        {"exp_avg": "relative", "exp_avg_sq": "log", "max_exp_avg_sq": "log"},
    ),
    "rmsprop centered": (torch.optim.RMSprop, {"lr": 1e-4, "centered": True}, {}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-4}, {}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}, {}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}, {"exp_avg": "linear", "exp_inf": "log"}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}, {"exp_avg": "relative", "exp_avg_sq": "log"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_has_its_moments_coded_and_all_else_exact_and_trains_on(name):
    make, options, laws = OPTIMIZERS[name]
    run = trained(make, **options)
    state = state_of(run)
    symbols = sp.Fisher().plan(flatten(state), None).quantized
    found = {key.rpartition("/")[2]: one.lattice.spacing for key, one in symbols.items() if key.startswith("optim")}
    assert found == laws
    after = kept(state)
    for old, new in zip(slots(state), slots(after), strict=True):
        for key in old:
            exact = (
                key not in laws
                or old[key].numel() < MIN_LATTICE_NUMEL
                or (name == "adamax" and key == "exp_avg" and old[key].dim() < 2)
            )
            assert same(old[key], new[key]) is exact, key
            assert laws.get(key) != "log" or torch.equal(new[key] > 0, old[key] > 0)
    assert same(state["optimizer"]["param_groups"], after["optimizer"]["param_groups"])
    losses = []
    for one in (state, after):
        torch.manual_seed(1)
        run.optimizer.load_state_dict(copy.deepcopy(one["optimizer"]))
        run.model.load_state_dict(state["model"])
        losses.append(run.steps(20).loss())
    assert losses[1] < 1.05 * losses[0]


def noise_of_momentum(group: dict[str, Any]) -> float:
    """The error of a momentum, relative to it, where the settings of its group are these."""
    m = normal(64, 96)
    state = {"model": {"a": normal(64, 96, seed=1)}}
    slot = {"exp_avg" if "betas" in group else "momentum_buffer": m}
    state["optimizer"] = {"state": {0: slot}, "param_groups": [group | {"lr": 0.1, "params": [0]}]}
    (found,) = slots(kept(state))[0].values()
    return float((found - m).norm() / m.norm())


def test_the_noise_of_a_momentum_is_what_its_optimizer_bears():
    x = normal(64, 96)
    rounded = torch.where(x.abs() <= 0.8 * 2.4, 0.0, (x / 2.4).round() * 2.4)
    expected = float((rounded - x).norm() / x.norm())
    assert 0.8 < expected < 0.9
    sgd = {"momentum": 0.9, "dampening": 0.0}
    muon = {"momentum": 0.95, "ns_coefficients": (3.4, -4.8, 2.0), "ns_steps": 5}
    lion = {"betas": (0.9, 0.99)}
    assert noise_of_momentum(sgd) == pytest.approx(8 / math.sqrt(12), rel=0.1)  # of dither
    for group in (muon, lion):
        assert noise_of_momentum(group) == pytest.approx(expected, rel=0.05)
    assert noise_of_momentum({"momentum": 0.9}) == 0.0


@pytest.mark.parametrize("name", ["Muon", "SGD"])
def test_momentum_that_is_rounded_is_coded_finer_after_restores(name):
    torch.manual_seed(0)
    net, moments = nn.Linear(96, 64, bias=False), list[Tensor]()
    optimizer = torch.optim.Muon(net.parameters()) if name == "Muon" else torch.optim.SGD(net.parameters(), 0.1, 0.9)
    net(torch.randn(99, 96)).square().mean().backward()
    optimizer.step()
    momentum = optimizer.state[net.weight]["momentum_buffer"]
    for restores in (0, 1, 3, 9):
        scheme = sp.Fisher(relative_error=0.3)
        scheme.resume({"scheme": "fisher"}, restores)
        planned = scheme.plan(flatten({"model": net.state_dict(), "optimizer": optimizer.state_dict()}), None)
        (points,) = (x for key, x in planned.quantized.items() if key.endswith("momentum_buffer"))
        moments.append(points.dequantize(torch.float32))
    errors = [float((x - momentum).norm() / momentum.norm()) for x in moments]
    if name == "Muon":
        assert errors[1] < 0.9 * errors[0] and errors[2] < 0.6 * errors[0] and errors[3] == errors[2]
    else:
        assert max(errors) < 1.1 * min(errors)


def test_a_state_with_muon_and_adamw_has_both_coded_and_nothing_else():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48))
    muon, adamw = torch.optim.Muon([net[0].weight]), torch.optim.AdamW([net[0].bias, *net[1].parameters()])
    for optimizer in (muon, adamw):
        net(torch.randn(9, 48)).square().mean().backward()
        optimizer.step()
    state = {"model": net.state_dict(), "optimizer": {"muon": muon.state_dict(), "adamw": adamw.state_dict()}}
    symbols = sp.Fisher().plan(flatten(state), None).quantized
    spacings = {name.split("/", 1)[1]: x.lattice.spacing for name, x in symbols.items() if name.startswith("optim")}
    expected = {"muon/state/0/momentum_buffer": "linear"}
    for i in range(3):
        expected |= {f"adamw/state/{i}/exp_avg": "relative", f"adamw/state/{i}/exp_avg_sq": "log"}
    assert spacings == expected


def test_moments_of_an_optimizer_that_is_not_known_stay_exact_and_say_so():
    state = adam({"a.weight": normal(48, 64)})
    slots(state)[0]["exp_avg_slow"] = normal(48, 64, seed=1)
    flat = flatten(state)
    quantized = sp.Fisher().plan(flat, None).quantize(flat, None)
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_slow"):
        full = f"optimizer/state/0/{name}"
        assert same(quantized.state.tensors[full], flat.tensors[full])
        assert quantized.exact[full] == "of an optimizer that is not known"
    assert "model/a.weight" not in quantized.exact


def test_nothing_of_lbfgs_is_lost():
    """An error of the weights would be in its next difference of gradients, and a step of any length follow."""
    torch.manual_seed(0)
    net = nn.Linear(48, 64)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(9, 48)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (
        sp.Fisher().plan(flatten({"model": net.state_dict(), "optimizer": optimizer.state_dict()}), None).quantized
        == {}
    )


def test_a_first_moment_whose_second_one_is_not_coded_beside_it_has_no_noise_where_that_is_least():
    """Biases of keys have next to no gradient: one step for them and their neighbours would be thousands of theirs."""
    v = squares(96).to(torch.float64)
    m = (normal(96) * v.float().sqrt()).to(torch.bfloat16)
    state = adam({"a": normal(96)}, {"a": v}, {"a": m})
    assert same(slots(kept(state))[0]["exp_avg"], m)


@pytest.mark.parametrize("which", ["both", "second", "first"])
def test_bfloat16_moments_are_coded_too(which):
    m, _, v = relative((48, 32))
    m, v = m.bfloat16() if which != "second" else m, v.bfloat16() if which != "first" else v
    first_, second_ = beside(m, v)
    assert first_.dtype == m.dtype and second_.dtype == v.dtype
    assert torch.equal(second_ > 0, v > 0) and not torch.equal(first_, m) and not torch.equal(second_, v)
    error = (first_.float() - m.float()) / v.float().sqrt().clamp(min=1e-12)
    assert float(error.square().mean().sqrt()) < 2 * float((m / v.sqrt()).float().square().mean().sqrt())
    assert abs(float(error.mean())) < 0.05


def test_exact_moments_are_exact_bit_for_bit():
    state = state_of(trained(torch.optim.AdamW))
    after = kept(state, moments="exact")
    assert same(state["optimizer"], after["optimizer"]) and not same(state["model"], after["model"])


def test_dropped_moments_are_what_they_are_before_the_first_step():
    run = trained(torch.optim.AdamW)
    after = kept(state_of(run), moments="drop")
    assert not any(x.any() for slot in slots(after) for x in slot.values())
    run.optimizer.load_state_dict(after["optimizer"])
    run.steps(2)
    assert all(slot["step"] == 2 for slot in run.optimizer.state.values())


def test_second_moments_alone_are_kept_with_their_counts_and_cost_what_they_cost():
    run = trained(torch.optim.AdamW)
    state = state_of(run)
    coded, after = kept(state), kept(state, moments="second")
    for before, beside, slot in zip(slots(state), slots(coded), slots(after), strict=True):
        assert not slot["exp_avg"].any() and before["exp_avg"].any()
        assert same(slot["exp_avg_sq"], beside["exp_avg_sq"]) and same(slot["step"], before["step"])
    with Silent():
        flat = flatten(state)
        plan = sp.Fisher(relative_error=0.3, moments="second").plan(flat, None)
        assert plan.loss["chosen"]["steps_lost_by_a_restore"] == 9.0
        storage = [MemoryStorage(), MemoryStorage()]
        sizes = [
            sp.Store(place).save(1, state, scheme=sp.Fisher(relative_error=0.3, moments=mode)).roles["moment1"].stored
            for place, mode in zip(storage, ("coded", "second"), strict=True)
        ]
    assert sizes[1] < 200 and sizes[1] < sizes[0]
    run.optimizer.load_state_dict(after["optimizer"])
    run.steps(2)
    assert all(slot["step"] == 8 for slot in run.optimizer.state.values())


def test_moments_that_are_small_or_not_as_they_should_be_stay_exact():
    state = adam({name: normal(*shape) for name, shape in {"a": (15,), "b": (6, 6), "c": (6, 6)}.items()})
    slots(state)[1]["exp_avg"][2, 2] = math.nan
    slots(state)[2]["exp_avg_sq"][2, 2] = -1e-9
    after = kept(state)
    small, broken, negative = zip(slots(state), slots(after), strict=True)
    assert same(*small) and same(broken[0]["exp_avg"], broken[1]["exp_avg"])
    assert not same(broken[0]["exp_avg_sq"], broken[1]["exp_avg_sq"])
    assert same(negative[0]["exp_avg_sq"], negative[1]["exp_avg_sq"])
    assert not same(negative[0]["exp_avg"], negative[1]["exp_avg"])


def test_dead_rows_of_a_second_moment_have_no_say_in_the_others():
    v = squares(32, 48)
    dead = v.clone()
    dead[4] = 0.0
    found, other = (quantize_second(x).dequantize(torch.float32) for x in (v, dead))
    assert not other[4].any()
    live = torch.arange(32) != 4
    assert float((found[live].log2() - other[live].log2()).abs().mean()) < 0.3
