"""A fine-tune in a file alone: its differences to an exact base are quantized, with and without error feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.errors import ChainError
from shrinkpoint.schemes.fisher.differences import _round_with_feedback
from shrinkpoint.store.single_file import decode_file

State = dict[str, Tensor]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), nn.Linear(48, 48))


GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(256, 12, generator=GENERATOR) @ torch.randn(12, 48, generator=GENERATOR)


def loss(state: State) -> Tensor:
    """Of each example."""
    return (torch.func.functional_call(net(), dict(state), (INPUTS,)) - INPUTS.roll(1, 1)).square().mean(1)


def calibrate(state: State) -> list[Tensor]:
    model = net()
    model.load_state_dict(state)
    return [(model(INPUTS) - INPUTS.roll(1, 1)).square().mean()]


@pytest.fixture(scope="module")
def states() -> tuple[State, State]:
    """A base, and a fine-tune of all but its last layer."""
    model = net()

    def train(steps: int, lr: float) -> State:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        for _ in range(steps):
            optimizer.zero_grad()
            (model(INPUTS) - INPUTS.roll(1, 1)).square().mean().backward()
            optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    base = train(100, 1e-3)
    model[3].requires_grad_(False)
    return base, train(30, 3e-4)


@pytest.fixture
def base(states: tuple[State, State], tmp_path: Path) -> Path:
    sp.save(states[0], tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def saved(state: State, path: Path, base: Path | None, **arguments: Any) -> tuple[Any, State]:
    report = sp.save(state, path, base=base, scheme=sp.Fisher(**arguments))
    return report, sp.load(path)


def squared(states: tuple[State, State], state: State, name: str) -> float:
    """The error of a weight, relative to how far the fine-tune moved it; squared."""
    errors, moves = state[name] - states[1][name], states[0][name] - states[1][name]
    return float(errors.square().sum() / moves.square().sum())


def test_errors_are_relative_to_how_far_the_weights_moved(states, base, tmp_path):
    errors = {}
    for relative_error in (0.1, 0.3):
        _, state = saved(states[1], tmp_path / "tuned", base, relative_error=relative_error)
        errors[relative_error] = [squared(states, state, f"{layer}.weight") ** 0.5 for layer in (0, 2)]
        assert all(0.5 * relative_error < error < 1.5 * relative_error for error in errors[relative_error])
    frozen = ("3.weight", "3.bias")
    assert all(torch.equal(state[name], states[1][name]) for name in frozen)
    assert all(torch.equal(left, right) for left, right in zip(sp.load(base).values(), states[0].values(), strict=True))
    assert isinstance(decode_file(tmp_path / "tuned")[0].reference.quantized["0.weight"], CodebookTensor)


def test_a_budget_holds_and_takes_the_base_for_nothing(states, base, tmp_path):
    limit = loss(states[1]).mean() * 1.01
    report, state = saved(states[1], tmp_path / "tuned", base, budget="1%", evaluate=loss)
    alone, _ = saved(states[1], tmp_path / "alone", None, budget="1%", evaluate=loss)
    assert loss(state).mean() <= limit and report.loss_increase <= 0.01
    assert float(loss(state).mean() / loss(states[1]).mean()) - 1 == pytest.approx(report.loss_increase, abs=1e-6)
    assert report.stored_bytes < 0.6 * alone.stored_bytes


def test_feedback_costs_the_loss_less_than_rounding_does(states, base, tmp_path):
    plain = saved(states[1], tmp_path / "plain", base, relative_error=0.5)[1]
    fed = saved(states[1], tmp_path / "fed", base, relative_error=0.5, calibrate=calibrate)[1]
    tuned = loss(states[1]).mean()
    assert abs(loss(fed).mean() - tuned) < 0.5 * abs(loss(plain).mean() - tuned)


def test_errors_that_are_fed_back_cancel_in_what_a_layer_gives():
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(400, 20, generator=generator) @ torch.randn(20, 150, generator=generator)
    values = torch.randn(30, 150, generator=generator)
    moments = inputs.T @ inputs + 0.1 * torch.eye(150)
    factor = torch.linalg.cholesky(moments.flip(0, 1), upper=True)
    zones, limits = torch.full((1, 150), 0.5), torch.full((30, 1), 127.0)
    errors = _round_with_feedback(values, zones, limits, factor) - values
    rounded = values.round() - values
    assert float((errors @ inputs.T).square().sum()) < 0.1 * float((rounded @ inputs.T).square().sum())
    diagonal = torch.eye(150)  # nothing to cancel: as without
    assert torch.equal(_round_with_feedback(values, zones, limits, diagonal), values.round())


def test_tensors_without_a_base_are_exact_and_outliers_are_reached(states, base, tmp_path):
    tuned = {**states[1], "head.weight": torch.randn(8, 48), "2.weight": states[1]["2.weight"].clone()}
    tuned["2.weight"][3, 4] += 5.0
    _, state = saved(tuned, tmp_path / "tuned", base, relative_error=0.01)
    assert torch.equal(state["head.weight"], tuned["head.weight"])
    assert abs(state["2.weight"][3, 4] - tuned["2.weight"][3, 4]) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_decoded_to_their_dtype(states, tmp_path, dtype):
    base, tuned = ({name: tensor.to(dtype) for name, tensor in state.items()} for state in states)
    sp.save(base, tmp_path / "base")
    _, state = saved(tuned, tmp_path / "tuned", tmp_path / "base", relative_error=0.3)
    assert all(tensor.dtype == dtype for tensor in state.values())
    for layer in (0, 2):
        error = state[f"{layer}.weight"].float() - tuned[f"{layer}.weight"].float()
        moved = base[f"{layer}.weight"].float() - tuned[f"{layer}.weight"].float()
        assert float(error.square().sum()) < 0.3 * float(moved.square().sum())


def test_fine_tunes_of_one_base_need_it_alone(states, base, tmp_path):
    for number, scale in enumerate((1.0, 2.0)):
        tuned = {name: states[0][name] + scale * (x - states[0][name]) for name, x in states[1].items()}
        saved(tuned, tmp_path / f"tuned{number}", base, relative_error=0.3)
    (tmp_path / "tuned0").unlink()
    assert squared(states, sp.load(tmp_path / "tuned1"), "0.weight") > 0.5  # it has gone twice as far
    _, state = saved(states[1], tmp_path / "next", tmp_path / "tuned1", relative_error=0.3)
    assert squared(states, state, "0.weight") < 0.3
    base.rename(tmp_path / "moved")
    with pytest.raises(ChainError, match="expected the base of"):
        sp.load(tmp_path / "tuned1")
    assert sp.load(tmp_path / "tuned1", base=tmp_path / "moved").keys() == states[1].keys()
