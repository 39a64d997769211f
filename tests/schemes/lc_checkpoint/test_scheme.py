"""LC-Checkpoint: buckets of differences to what a reader has; which are kept, over what, and what becomes of them."""

from __future__ import annotations

import pytest
import torch
from helpers.exponents import quantize_exponents
from helpers.round_trip import write
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes import QuantizedState
from shrinkpoint.tensors.flat_state import flatten

RANDOM = torch.Generator()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=RANDOM.manual_seed(seed))


def kept_of(scheme: sp.LCCheckpoint, differences: dict[str, Tensor]) -> QuantizedState:
    """What is kept of these differences to zero."""
    base = {name: torch.zeros_like(x) for name, x in differences.items()}
    return scheme.quantize(flatten(differences), Reference(base))


def moves(scheme: sp.LCCheckpoint, differences: dict[str, Tensor]) -> dict[str, Tensor]:
    return kept_of(scheme, differences).state.tensors


def wide(*shape: int, seed: int = 0, octaves: float = 60.0) -> Tensor:
    """Values of both signs over many powers of two."""
    return noise(*shape, seed=seed).sign() * torch.exp2(octaves * (noise(*shape, seed=seed + 1).sigmoid() - 1))


# the tracked state


def contraction(steps: int) -> list[Tensor]:
    """The paper's model of SGD: a linear contraction towards an optimum, with noise."""
    optimum, out = noise(64, 64, seed=1), [noise(64, 64, seed=2)]
    for step in range(steps):
        out.append(optimum + 0.9 * (out[-1] - optimum) + 0.05 * noise(64, 64, seed=3 + step))
    return out


@pytest.mark.parametrize("settings", [{"bits": 2, "paper": True}, {"bits": 3}, {"bits": 1}])
def test_the_error_does_not_grow_with_the_chain_and_that_of_the_naive_chain_does(settings):
    """The naive chain sums up differences between the states themselves, each quantized in the same way."""
    scheme, states = sp.LCCheckpoint(**settings), contraction(120)
    representative = scheme.settings["representative"]
    held: QuantizedState | None = None
    naive, tracked_errors, naive_errors = states[0], [], []
    for before, now in zip([states[0], *states], states, strict=False):
        reference = None if held is None else Reference(held.state.tensors, held.quantized)
        held = scheme.quantize(flatten({"a.weight": now}), reference)
        (symbols,) = quantize_exponents([now - before], scheme.settings["bits"], representative=representative)
        naive = symbols.dequantize(torch.float32, naive)
        tracked_errors.append(float((held.state.tensors["a.weight"] - now).norm()))
        naive_errors.append(float((naive - now).norm()))
    assert tracked_errors[0] == naive_errors[0] == 0
    late = max(tracked_errors[-20:])
    assert late < 1.1 * max(tracked_errors[20:40])
    assert min(naive_errors[-20:]) > max(naive_errors[20:40]) and min(naive_errors[-20:]) > 3 * late


# what is kept


def test_with_eight_bits_all_codes_of_a_byte_are_used():
    exponent = torch.arange(128, dtype=torch.float64).repeat(40) - 64
    x = torch.stack([torch.exp2(exponent), -torch.exp2(exponent)]).float() * (1 + noise(2, 5120).sigmoid() / 2)
    state, base = (
        {"a.weight": x, "b.weight": noise(64, 64)},
        {"a.weight": torch.zeros(2, 5120), "b.weight": noise(64, 64)},
    )
    first = write(base)
    written = write(state, first, scheme=sp.LCCheckpoint(bits=8))
    recipe = written.recipes()["a.weight"]
    assert (recipe["first"], recipe["bins"]) == (0, 256)
    found = written.read()["a.weight"]
    assert len(found.unique()) == 256 and int((found == 0).sum()) == 40  # one bucket of the 256 was one too many
    assert float(((found - x).abs() / x.abs())[found != 0].max()) < 0.5


@pytest.mark.parametrize("representative", ["mean", "middle"])
def test_a_bucket_becomes_what_was_asked_for(representative):
    x = noise(64, 64)
    found = moves(sp.LCCheckpoint(bits=3, representative=representative), {"a.weight": x})["a.weight"]
    (symbols,) = quantize_exponents([x], 3, representative=representative)
    assert torch.equal(found, symbols.dequantize(torch.float32, torch.zeros_like(x)))


# over what it is chosen


@pytest.mark.parametrize("representative", ["mean", "middle"])
def test_a_layer_that_moves_a_thousand_times_less_is_written_by_tensor_and_never_over_the_model(representative):
    model, tensor = (
        sp.LCCheckpoint(bits=3, scope=scope, representative=representative) for scope in ("model", "tensor")
    )
    calm, wild = 1e-2 * noise(64, 64, seed=1), noise(64, 64, seed=2)
    written = {scheme: write({"calm.weight": calm, "wild.weight": wild}, scheme=scheme) for scheme in (model, tensor)}
    for step in range(3):
        calm_step, wild_step = noise(64, 64, seed=3), noise(64, 64, seed=4 + step)
        truth = {
            "calm.weight": calm + 1e-4 * (step + 1) * calm_step,
            "wild.weight": wild + 1e-1 * (step + 1) * wild_step,
        }
        written = {scheme: write(truth, one, scheme=scheme) for scheme, one in written.items()}
        assert written[model].recipes()["calm.weight"] == {"kind": "same"}
    assert torch.equal(written[model].read()["calm.weight"], calm)
    for scheme, one in written.items():
        left = {name: float((x - one.read()[name]).norm()) for name, x in truth.items()}
        assert left["wild.weight"] < 0.4 * float((truth["wild.weight"] - wild).norm())
        assert (left["calm.weight"] < 0.4 * float((truth["calm.weight"] - calm).norm())) is (scheme is tensor)


def test_by_the_paper_the_model_shares_its_buckets_and_codes_are_huffman():
    state = {"a.weight": noise(64, 64) + wide(64, 64), "b.weight": noise(80, 80, seed=5) + wide(80, 80, seed=6)}
    first = write({"a.weight": noise(64, 64), "b.weight": noise(80, 80, seed=5)})
    for scheme in (sp.LCCheckpoint(bits=2, paper=True), sp.LCCheckpoint(bits=2)):
        written = write(state, first, scheme=scheme)
        huffman = {"cyclic": [5, False, False]}  # with neither rearranging nor runs
        assert (written.recipes()["a.weight"]["codes"] == huffman) is scheme.settings["paper"]
    assert sp.LCCheckpoint(paper=True).settings["representative"] == "middle"
    free = sp.LCCheckpoint(paper=True, scope="tensor", representative="mean")
    assert (free.settings["scope"], free.settings["representative"]) == ("tensor", "mean")
    shared = moves(sp.LCCheckpoint(bits=2, paper=True), {"a.weight": noise(64, 64), "b.weight": noise(64, 64, seed=1)})
    assert len(torch.cat([*shared.values()]).unique()) == 4
