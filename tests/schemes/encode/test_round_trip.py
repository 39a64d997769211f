"""Nothing is lost: any state comes back bit by bit, as a keyframe and as a delta, and is not changed by being saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.round_trip import Loop, nudged, write
from helpers.strategies import DTYPES, TORCH_DTYPES, bits, difference, states, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint import Lossless

SIZES = [0, 1, 2, 31, 32, 33, 2047, 2048, 2049, 9000]


@settings(deadline=None, max_examples=20)
@given(states())
def test_any_state_comes_back(state):
    assert difference(state, write(state).read()) is None


def mutated(state: Any, draw: st.DataObject) -> Any:
    """The state with some of its tensors slightly, and some entirely, other."""
    if isinstance(state, dict) and type(state) is dict:
        return {key: mutated(value, draw) for key, value in state.items() if draw.draw(st.integers(0, 9))}
    if type(state) is list:
        return [mutated(value, draw) for value in state]
    if type(state) is torch.Tensor and draw.draw(st.booleans()):
        return draw.draw(tensors()) if draw.draw(st.booleans()) else nudged(state)
    return state


@settings(deadline=None, max_examples=20)
@given(states(), st.data())
def test_any_state_comes_back_from_a_delta_against_another(state, data):
    before = write(mutated(state, data))
    assert difference(state, write(state, before).read()) is None


def arrays(name: str, count: int) -> dict[str, torch.Tensor]:
    """What coders get wrong, of one dtype."""
    random = torch.Generator().manual_seed(count)
    size = count * TORCH_DTYPES[name].itemsize
    byte = torch.randint(0, 2 if name == "BOOL" else 256, (size,), generator=random, dtype=torch.uint8)
    out = {"noise": byte.view(TORCH_DTYPES[name]), "zero": torch.zeros_like(byte).view(TORCH_DTYPES[name])}
    if name != "BOOL":
        out["ones"] = torch.full_like(byte, 255).view(TORCH_DTYPES[name])  # nans with all bits set, or -1
        pattern = torch.tensor([0, 0, 0x80, 0x7F, 0, 0, 0, 0x80, 1, 0, 0xC0, 0xFF], dtype=torch.uint8)
        out["special"] = pattern.repeat(size // 12 + 1)[:size].clone().view(TORCH_DTYPES[name])
    if TORCH_DTYPES[name].is_floating_point and TORCH_DTYPES[name].itemsize > 1:
        out["weights"] = (torch.randn(count, generator=random) * 0.02).to(TORCH_DTYPES[name])
        out["denormal"] = (torch.randn(count, generator=random).double() * torch.finfo(TORCH_DTYPES[name]).tiny / 9).to(
            TORCH_DTYPES[name]
        )
        out["squares"] = torch.randn(count, generator=random).square().to(TORCH_DTYPES[name])
    return out


def test_every_dtype_and_size_comes_back_with_and_without_a_base():
    for name in DTYPES:
        for count in SIZES:
            state = {"model": {f"{kind}.weight": x for kind, x in arrays(name, count).items()}}
            before = write(state)
            assert difference(state, before.read()) is None, count
            after = {"model": {key: nudged(x) if name != "BOOL" else ~x for key, x in state["model"].items()}}
            assert difference(after, write(after, before).read()) is None, count


@pytest.mark.parametrize(
    "shape", [(3, 2), (2, 3, 5), (6, 4, 3, 3), (4, 3, 2, 3, 3), (2, 2, 8, 8), (2, 2, 9, 8), (0, 3, 3)]
)
def test_weights_of_any_number_of_axes_come_back(shape):
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        many = (30 * shape[0], *shape[1:])
        kernels = torch.randn(*many[:2], *[1] * (len(shape) - 2), generator=random)
        state = {"a.weight": (kernels * (1 + 1e-3 * torch.randn(many, generator=random))).to(dtype)}
        before = write(state)
        assert difference(state, before.read()) is None
        after = {"a.weight": state["a.weight"] * (1 + 2**-7)}
        assert difference(after, write(after, before).read()) is None


@pytest.mark.parametrize("first", ["narrow", "positive", "zero", "tiny", "huge", "nan"])
def test_a_first_tap_that_is_unlike_the_others_decides_nothing_for_them(first):
    weight = torch.randn(64, 64, 3, 3, generator=torch.Generator().manual_seed(0)) * 0.02
    tap = weight[..., 0, 0]
    change = {
        "narrow": tap.bfloat16().float(),
        "positive": tap.abs(),
        "zero": tap * 0,
        "tiny": tap * 1e-36,
        "huge": tap * 1e36,
        "nan": tap * float("nan"),
    }
    weight[..., 0, 0] = change[first]
    before = write({"w.weight": weight})
    assert difference({"w.weight": weight}, before.read()) is None
    moved = {"w.weight": weight * 1.001}
    moved["w.weight"][..., 0, 0] = weight[..., 0, 0]
    assert difference(moved, write(moved, before).read()) is None


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_arrays_of_many_chunks_come_back(chunk):
    """With the smallest chunks, an array of thousands is what one of billions is with the usual ones."""
    scheme, loop = Lossless(chunk=chunk), Loop()
    first, second = loop.steps(2), loop.steps(1)
    before = write(first, scheme=scheme)
    assert difference(first, before.read()) is None
    after = write(second, before, scheme=scheme)
    assert difference(second, after.read()) is None
    runs = [run for recipe in after.recipes().values() for run in recipe.get("runs", [])]
    assert chunk == 1 or (runs and all(run["chunk"] == chunk for run in runs))


def test_the_same_state_gives_the_same_file_whatever_the_threads():
    loop = Loop()
    first, second = loop.steps(2), loop.steps(1)
    before = [write(copy.deepcopy(first), threads=threads, scheme=Lossless(chunk=512)) for threads in (1, 2, 1)]
    assert before[0].data == before[1].data == before[2].data
    after = [write(copy.deepcopy(second), before[0], threads=threads) for threads in (1, 2, 1)]
    assert after[0].data == after[1].data == after[2].data
    assert difference(second, after[0].read(threads=2)) is None


def test_saving_changes_no_tensor():
    random = torch.Generator().manual_seed(0)
    base = torch.randn(200, 50, generator=random)
    state = {
        "dense.weight": base,
        "turned.weight": base.t(),
        "sliced": base[3::2, ::3],
        "same": torch.randn(3, 1).expand(3, 999),
        "nan": base * float("nan"),
        "complex": torch.complex(base, base).conj(),
        "one": base[:1, 7:8],
    }
    memory = base.clone(), state["complex"].conj().clone()
    strides = {key: x.stride() for key, x in state.items()}
    later = {key: x * 1.0001 for key, x in state.items()}
    before = write(state)
    write(later, before)
    assert torch.equal(base, memory[0]) and torch.equal(state["complex"].conj(), memory[1])
    assert {key: x.stride() for key, x in state.items()} == strides
    assert difference(state, before.read()) is None


def test_a_parent_is_not_changed_by_what_stands_on_it():
    loop = Loop()
    before = write(loop.steps(2))
    reference = before.reference()
    original_bits = {name: bits(x) for name, x in reference.tensors.items()}
    after = write(loop.steps(1), before)
    after.read(reference)
    assert {name: bits(x) for name, x in reference.tensors.items()} == original_bits


def test_nan_and_infinities_in_weights_moments_and_parent_come_back():
    loop = Loop()
    first, second = loop.steps(2), loop.steps(1)
    broken = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-42]
    for state, start in ((first, 0), (second, 3)):
        targets = [*state["model"].values()]
        targets += [slot[key] for slot in state["optimizer"]["state"].values() for key in ("exp_avg", "exp_avg_sq")]
        for x in targets:
            for i, value in enumerate(broken):
                x.view(-1)[start + i :: 29] = value
    before = write(first)
    assert difference(first, before.read()) is None
    assert difference(second, write(second, before).read()) is None


@pytest.mark.parametrize("writing, reading", [(True, False), (False, True)])
def test_denormals_flushed_on_either_side_change_nothing(writing, reading):
    loop = Loop()
    first, second = loop.steps(2), loop.steps(1)
    for state, factor in ((first, 1.0), (second, 1.001)):
        state["tiny"] = {
            f"{scale}.weight": torch.linspace(-1, 1, 3000) * factor * scale for scale in (1e-38, 1e-40, 1e-44)
        }
        for slot in state["optimizer"]["state"].values():
            slot["exp_avg_sq"] *= 1e-34
            slot["exp_avg"] *= 1e-33
        state["half"] = {name: x.bfloat16() for name, x in state["tiny"].items()}
    expected = [write(first), write(second, write(first))]
    try:
        torch.set_flush_denormal(writing)
        before = write(first)
        after = write(second, before)
        torch.set_flush_denormal(reading)
        decoded = [before.read(), after.read()]
    finally:
        torch.set_flush_denormal(False)
    assert [before.data, after.data] == [file.data for file in expected]
    assert difference(first, decoded[0]) is None and difference(second, decoded[1]) is None
