"""What an optimizer knows of the loss, and that the prediction made of it is right where it can be."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from helpers.adam_states import adam, global_weights, known_of, normal, squares
from helpers.small_training import Run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.codec.lattice import Lattice, LatticeTensor, as_matrix, scale_counts
from shrinkpoint.schemes.fisher.curvature import (
    Curvature,
    bias_factor,
    bnb_moment,
    estimate_curvatures,
    remote_owners,
)
from shrinkpoint.schemes.fisher.moment_statistics import MomentStatistics
from shrinkpoint.sharding.global_tensors import GlobalTensors
from shrinkpoint.tensors.flat_state import FlatState, flatten
from shrinkpoint.tensors.info import Role, TensorInfo

SHAPES = [(40,), (6, 9), (4, 3, 2, 2)]


def zeros_like(tensor: Tensor) -> LatticeTensor:
    """The quantized tensor that decodes to zeros."""
    rows, columns = (torch.zeros(count, dtype=torch.int16) for count in scale_counts("linear", tuple(tensor.shape)))
    return LatticeTensor(torch.zeros(tensor.shape, dtype=torch.int8), Lattice("linear", rows, columns))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.integers(0, 99),
    st.floats(1, 1e6),
    st.integers(1, 3000),
    st.sampled_from([(0.9, 0.999), (0.5, 0.95), (0.0, 0.99)]),
)
def test_the_prediction_is_exact_for_a_quadratic_loss_of_that_curvature(shape, random, terms, step, betas):
    """`sum(h (w - w0)^2) / 2`: its gradient is `h (w - w0)`, and squared gradients of a batch are `h / terms`."""
    w, w0, d = (normal(*shape, seed=3 * random + i) for i in range(3))
    h = squares(*shape, seed=random) * 1e6

    def loss(x: Tensor) -> float:
        return float((h.double() * (x.double() - w0.double()).square()).sum() / 2)

    m = h * (w - w0) * (1 - betas[0] ** step)
    v = h / terms * (1 - betas[1] ** step)
    slope, curved = known_of(adam({"a": w}, {"a": v}, {"a": m}, step=step, betas=betas))["a"].rise_terms(
        -d, zeros_like(d)
    )
    assert slope + terms * curved == pytest.approx(loss(w + d) - loss(w), rel=1e-3, abs=1e-4 * loss(w))


def test_one_square_for_all_weights_is_a_matrix_of_equal_ones():
    w, rows, columns = normal(6, 9), squares(6, 1).double()[:, 0], squares(1, 9).double()[0]
    number, matrix = Curvature(torch.full((1, 1), 0.25).expand(6, 9)), Curvature(torch.full((6, 9), 0.25))
    assert number.rise_terms(w, zeros_like(w)) == pytest.approx(matrix.rise_terms(w, zeros_like(w)))
    for weights in (columns, columns[:1]):
        assert number.weighted_sum(rows, weights) == pytest.approx(matrix.weighted_sum(rows, weights))


@pytest.mark.parametrize("step", [1, 2, 30, 5000])
def test_averages_that_have_just_begun_are_taken_for_what_they_are_averages_of(step):
    g = normal(5, 8)
    v, m = g.square() * (1 - 0.999**step), g * (1 - 0.9**step)
    known = known_of(adam({"a": g}, {"a": v}, {"a": m}, step=step))["a"]
    torch.testing.assert_close(known.squares, g.square(), rtol=1e-4, atol=0)
    torch.testing.assert_close(known.slope, g, rtol=1e-4, atol=0)
    assert known.mean == pytest.approx(float(g.square().mean()), rel=1e-4)
    for axis in (0, 1):
        torch.testing.assert_close(known.mean_along(axis), g.square().mean(axis), rtol=1e-4, atol=0)
    rows, columns = torch.arange(1.0, 6).double(), torch.arange(1.0, 9).double()
    expected = float((g.square().double() * rows[:, None] * columns).sum())
    assert known.weighted_sum(rows, columns) == pytest.approx(expected, rel=1e-4)


def momentum(weights: dict[str, Tensor], buffers: dict[str, Tensor], beta: float = 0.9) -> dict:
    state = {i: {"momentum_buffer": buffers[name]} for i, name in enumerate(weights)}
    group = {"lr": 0.1, "momentum": beta, "dampening": 0, "params": [*range(len(weights))]}
    return {"model": weights, "optimizer": {"state": state, "param_groups": [group]}}


def test_without_second_moments_the_momentum_s_square_serves():
    """SGD adds gradients up, so that its momentum is larger than their mean by `1 / (1 - beta)`."""
    g = normal(6, 9)
    known = known_of(momentum({"a": g}, {"a": g / (1 - 0.9)}))["a"]
    torch.testing.assert_close(known.slope, g)
    torch.testing.assert_close(known.squares, g.square())


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_squares_of_momentum_count_only_where_no_mean_of_squares_does(scale):
    a, b = normal(6, 9), normal(8, 5)
    moving, adamw = momentum({"a": a}, {"a": a}), adam({"b": b}, {"b": squares(8, 5) * scale})
    state = {"model": {"a": a, "b": b}, "optimizers": [moving["optimizer"], adamw["optimizer"]]}
    known = known_of(state)
    assert (known["a"].second is None) == bool(scale)
    torch.testing.assert_close(known["a"].slope, a * (1 - 0.9))
    assert known["b"].second is not None


def test_what_was_recorded_comes_before_the_momentum_and_after_the_second_moments():
    x, recorded = normal(6, 9), {"model/a": squares(6, 9, seed=5)}
    assert torch.equal(known_of(momentum({"a": x}, {"a": x}), recorded)["a"].squares, recorded["model/a"])
    assert not torch.equal(known_of(adam({"a": x}), recorded)["a"].squares, recorded["model/a"])
    other = {"model/a": squares(9, 6)}
    assert torch.equal(known_of(momentum({"a": x}, {"a": x}), other)["a"].squares, (x * (1 - 0.9)).square())


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
def test_a_recorder_of_squares_is_asked_where_the_optimizer_has_none(tmp_path, settings):
    """Rows whose gradients are recorded as a hundred times larger get finer steps."""
    run = Run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, **settings)
    recorder = sp.train.GradientRecorder(run.model, squares=True)
    run.steps(5, recorder)

    class Recorded:
        ready = True
        square: ClassVar = dict(recorder.square)

    Recorded.square["body.0.weight"] = torch.ones(96, 64)
    Recorded.square["body.0.weight"][:48] *= 100.0
    for gradients in (recorder, Recorded()):
        with sp.CheckpointManager(
            tmp_path / type(gradients).__name__, scheme=sp.Fisher(gradients=gradients)
        ) as manager:
            manager.save(1, **run.parts)
            rows = manager.store.reference.quantized["model/body.0.weight"].lattice.rows
            assert len(rows.unique()) == 2 if gradients is not recorder else len(rows.unique()) > 2
    assert (rows[48:] > rows[:48].max()).all()


def test_where_nothing_is_known_nothing_is_predicted():
    known = known_of({"model": {"a": normal(6, 9)}})["a"]
    assert known.squares is None and known.slope is None
    assert known.mean == 0 and known.rise_terms(normal(6, 9), zeros_like(normal(6, 9))) == (0.0, 0.0)


def broken(state: dict, key: str, value: float) -> dict:
    state["optimizer"]["state"][0][key] = torch.full((6, 9), value)
    return state


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_moments_that_are_not_finite_are_not_known(value):
    x = normal(6, 9)
    assert known_of(broken(adam({"a": x}), "exp_avg", value))["a"].slope is None
    known = known_of(broken(adam({"a": x}), "exp_avg_sq", value))["a"]
    assert known.squares is None or bool(known.squares.isfinite().all())


def test_squares_whose_sum_is_no_float32_are_not_known():
    known = known_of(broken(adam({"a": normal(6, 9)}), "exp_avg_sq", 3e38))["a"]
    assert known.squares is None and known.slope is None


def test_bias_is_only_removed_from_averages_that_have_some():
    assert bias_factor(0.9, 1) == pytest.approx(10) and bias_factor(0.9, 10_000) == 1
    for beta, step in ((None, 1), (0.9, None), (0.9, 0), (1.0, 1), (-0.1, 1)):
        assert bias_factor(beta, step) == 1


@pytest.mark.parametrize("change", ["shape", "codebook", "blocks", "values", "none"])
def test_codes_of_8_bits_that_do_not_fit_are_not_known(change):
    tensors = {"codes": torch.zeros(8, 64, dtype=torch.uint8), "map": torch.ones(256), "max": torch.ones(2)}
    wrong = {"shape": ("codes", (64, 8)), "codebook": ("map", 255), "blocks": ("max", 3)}
    if change in wrong:
        name, shape = wrong[change]
        tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)
    if change == "values":
        tensors["max"][0] = float("inf")
    found = bnb_moment(FlatState(None, tensors, {}, {}), ("codes", "map", "max"), torch.empty(8, 64))
    assert (found is None) == (change != "none")


def test_moments_of_another_shape_are_not_known():
    state = adam({"a": normal(6, 9)})
    state["optimizer"]["state"][0]["exp_avg_sq"] = torch.ones(6, 1)  # as factored optimizers have them
    known = known_of(state)["a"]
    assert known.squares is None or known.squares.shape == (6, 9)


def test_bfloat16_moments_are_as_good():
    x = normal(6, 9)
    state = adam({"a": x})
    exact = known_of(state)["a"].squares
    state["optimizer"]["state"][0]["exp_avg_sq"] = state["optimizer"]["state"][0]["exp_avg_sq"].bfloat16()
    found = known_of(state)["a"].squares
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("shape", [(24, 40), (6, 24, 8)])
def test_the_factors_of_adafactor_serve_in_the_place_of_second_moments(shape):
    weight = nn.Parameter(normal(*shape, seed=1))
    optimizer = torch.optim.Adafactor([weight])
    for step in range(3):
        weight.grad = normal(*shape, seed=step + 2) * torch.linspace(0.1, 3, shape[-1])
        optimizer.step()
    flat = flatten({"model": {"a.weight": weight.detach()}, "optimizer": optimizer.state_dict()})
    state = optimizer.state[weight]
    found = estimate_curvatures(global_weights({"model/a.weight": weight.detach()}), flat, {}, MomentStatistics(flat))[
        "model/a.weight"
    ]
    wanted = state["row_var"] * state["col_var"] / state["row_var"].mean(-2, keepdim=True)
    assert found.squares is not None
    assert not found.relative_only
    assert torch.allclose(found.squares, as_matrix(wanted))


@pytest.mark.parametrize("shape", [(128, 96), (50, 7), (300,)])
def test_second_moments_in_8_bits_serve_as_what_they_stand_for(shape):
    weight, block = normal(*shape, seed=1), 256
    count = weight.numel()
    codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    values, tops = torch.linspace(0, 1, 256).square(), squares(-(-count // block), seed=3)
    inner = {"state1": codes, "state2": codes, "qmap1": values, "qmap2": values, "absmax1": tops, "absmax2": tops}
    optimizer = {
        "state": {0: {"step": 7, "__bnb_optimizer_quant_state__": inner}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}],
    }
    flat = flatten({"model": {"a.weight": weight}, "optimizer": optimizer})
    found = estimate_curvatures(global_weights({"model/a.weight": weight}), flat, {}, MomentStatistics(flat))[
        "model/a.weight"
    ]
    wanted = values[codes.reshape(-1).long()] * tops[torch.arange(count) // block]
    assert found.squares is not None
    assert torch.equal(found.squares.reshape(-1), wanted)


@pytest.mark.parametrize(
    ("shapes", "owner"),
    [
        ({"model.layers.0.weight": (4, 6)}, "model.layers.0.weight"),
        ({"model.layers.0.weight": (6, 4)}, None),
        ({"model.layers.0.weight": (4, 6), "model.weight": (4, 6)}, None),  # it could be that of either
        ({"model.layers.0.weight": (4, 6), "model.weight": (6, 4)}, "model.layers.0.weight"),
        ({"model.layers.1.weight": (4, 6)}, None),
    ],
)
def test_a_second_moment_on_another_rank_is_that_of_the_one_weight_it_is_named_after(shapes, owner):
    moment = "optim.state.layers.0.weight.exp_avg_sq"
    tensors = {name: torch.zeros(shape) for name, shape in {**shapes, moment: (4, 6)}.items()}
    roles = {**dict.fromkeys(shapes, Role.PARAMETER), moment: Role.MOMENT2}
    infos = {name: TensorInfo(name, tuple(x.shape), "F32", roles[name]) for name, x in tensors.items()}
    global_tensors = GlobalTensors.from_state(FlatState({}, tensors, infos, {}, {}))
    assert remote_owners(global_tensors, [*shapes]) == ({moment: owner} if owner else {})
