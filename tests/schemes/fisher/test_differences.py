"""A fine-tune in a file alone: its differences to an exact base are quantized, with and without error feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.lattice import LatticeTensor
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


def kinds(path: Path) -> set[type]:
    return {type(codes) for codes in decode_file(path)[0].reference.quantized.values()}


def test_a_budget_holds_and_unchanged_weights_are_the_bases(states, base, tmp_path):
    fed = {"budget": "1%", "evaluate": loss, "calibrate": calibrate}
    report, state = saved(states[1], tmp_path / "tuned", base, **fed)
    tuned = loss(states[1]).mean()
    assert float(loss(state).mean() / tuned) - 1 == pytest.approx(report.loss_increase, abs=1e-6)
    assert report.loss_increase <= 0.01 and kinds(tmp_path / "tuned") == {CodebookTensor}
    assert all(torch.equal(state[name], states[0][name]) for name in ("3.weight", "3.bias"))


def test_the_smaller_of_points_and_differences_is_written(states, base, tmp_path):
    fed = {"budget": "1%", "evaluate": loss, "calibrate": calibrate}
    sizes = [saved(states[1], tmp_path / "points", base, budget="1%", evaluate=loss)[0].stored_bytes]
    assert kinds(tmp_path / "points") == {LatticeTensor}  # nothing to feed errors back by
    sizes.append(saved(states[1], tmp_path / "smaller", base, **fed)[0].stored_bytes)
    assert sizes[1] < sizes[0]
    target = saved(states[1], tmp_path / "target", base, relative_error=0.3, calibrate=calibrate)[0]
    assert target.stored_bytes < sizes[0] and kinds(tmp_path / "target") == {LatticeTensor}


def test_errors_are_fed_back_in_float32_within_autocast(states, base, tmp_path):
    plain = torch.autocast("cpu", enabled=False)
    fed = {"budget": "1%", "evaluate": plain(loss), "calibrate": plain(calibrate)}
    expected = saved(states[1], tmp_path / "without", base, **fed)[1]
    with torch.autocast("cpu", torch.bfloat16):
        state = saved(states[1], tmp_path / "within", base, **fed)[1]
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_an_instance_serves_one_fine_tune_after_the_other(states, base, tmp_path):
    one = sp.Fisher(budget="1%", evaluate=loss, calibrate=calibrate)
    sizes = [sp.save(states[1], tmp_path / name, base=base, scheme=one).stored_bytes for name in ("a", "b")]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.3)
    assert loss(sp.load(tmp_path / "b")).mean() <= 1.01 * loss(states[1]).mean()


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

    def evaluate(state: State) -> Tensor:
        return loss({name: tensor for name, tensor in state.items() if name != "head.weight"})

    def run(state: State) -> list[Tensor]:
        return calibrate({name: tensor for name, tensor in state.items() if name != "head.weight"})

    _, state = saved(tuned, tmp_path / "tuned", base, budget="1%", evaluate=evaluate, calibrate=run)
    assert torch.equal(state["head.weight"], tuned["head.weight"])
    assert abs(state["2.weight"][3, 4] - tuned["2.weight"][3, 4]) < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_decoded_to_their_dtype(states, tmp_path, dtype):
    base, tuned = ({name: tensor.to(dtype) for name, tensor in state.items()} for state in states)
    sp.save(base, tmp_path / "base")

    def evaluate(state: State) -> Tensor:
        return loss({name: tensor.float() for name, tensor in state.items()})

    def run(state: State) -> list[Tensor]:
        model = net().to(dtype)
        model.load_state_dict(state)
        return [(model(INPUTS.to(dtype)).float() - INPUTS.roll(1, 1)).square().mean()]

    report, state = saved(tuned, tmp_path / "tuned", tmp_path / "base", budget="2%", evaluate=evaluate, calibrate=run)
    assert all(tensor.dtype == dtype for tensor in state.values())
    assert evaluate(state).mean() <= 1.02 * evaluate(tuned).mean() and report.loss_increase <= 0.02


def test_fine_tunes_of_one_base_need_it_alone(states, base, tmp_path):
    fed = {"budget": "1%", "evaluate": loss, "calibrate": calibrate}
    for number, scale in enumerate((1.0, 0.5)):
        tuned = {name: states[0][name] + scale * (x - states[0][name]) for name, x in states[1].items()}
        saved(tuned, tmp_path / f"tuned{number}", base, **fed)
    (tmp_path / "tuned0").unlink()
    assert squared(states, sp.load(tmp_path / "tuned1"), "0.weight") > 0.1  # it has gone half as far
    _, state = saved(states[1], tmp_path / "next", tmp_path / "tuned1", **fed)
    assert loss(state).mean() <= 1.01 * loss(states[1]).mean()
    base.rename(tmp_path / "moved")
    with pytest.raises(ChainError, match="expected the base of"):
        sp.load(tmp_path / "tuned1")
    assert sp.load(tmp_path / "tuned1", base=tmp_path / "moved").keys() == states[1].keys()
