"""What all schemes that track a reader's state promise, whatever they write of a difference."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from helpers.round_trip import Written, write
from helpers.strategies import bits, difference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import LossWarning, UnmeasuredLossWarning
from shrinkpoint.schemes import QuantizedState, get_scheme
from shrinkpoint.tensors.flat_state import flatten

SCHEMES = {
    "lc": lambda: sp.LCCheckpoint(),
    "lc paper": lambda: sp.LCCheckpoint(bits=2, paper=True),
    "lc fine": lambda: sp.LCCheckpoint(bits=8),
    "scar": lambda: sp.SCAR(),
    "scar in turn": lambda: sp.SCAR(order="round robin", fraction=0.3),
    "scar random": lambda: sp.SCAR(order="random"),
    "topn": lambda: sp.TOPN(),
    "excp": lambda: sp.ExCP(),
    "excp released": lambda: sp.ExCP(rule="released", paper=True, paper_fp16=True),
}
KINDS = ("lc", "scar", "topn", "excp")
"""One of each class, for what no setting has a say in."""
RANDOM = torch.Generator()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=RANDOM.manual_seed(seed))


def after(scheme: Any, state: dict[str, Tensor], parent: QuantizedState | None = None) -> QuantizedState:
    """What is kept of a state whose parent is held."""
    reference = None if parent is None else Reference(parent.state.tensors, parent.quantized)
    return scheme.quantize(flatten(state), reference)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float((x.double() - b[key].double()).norm()) for key, x in a.items())


def two_states(dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    first = {"a.weight": noise(64, 80), "b.weight": noise(8, 8, 8, 9, seed=1), "a.bias": noise(80, seed=2)}
    second = {name: x + 0.01 * noise(*x.shape, seed=3) for name, x in first.items()}
    return [{name: x.to(dtype) for name, x in state.items()} for state in (first, second)]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_keyframe_is_exact_and_a_delta_comes_nearer(name):
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        first, second = two_states(dtype)
        scheme = SCHEMES[name]()
        written = write(first, scheme=scheme)
        assert difference(written.read(), first) is None and not written.report.loss_report
        delta = write(second, written, scheme=scheme)
        found = delta.read()
        now, before = (
            sum(float((x.double() - y[key].double()).norm()) for key, x in second.items()) for y in (found, first)
        )
        assert 0 < now < 0.95 * before and torch.equal(found["a.bias"], second["a.bias"])
        assert delta.report.loss_report["scheme"] == scheme.id == delta.report.scheme


@pytest.mark.filterwarnings("ignore:.*is a keyframe:shrinkpoint.errors.LossWarning")
@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), spread=st.sampled_from([0.0, 1.0, 9.0]), share=st.sampled_from([0.0, 0.01, 1.0]))
def test_a_reader_gets_what_the_writer_holds(name, seed, spread, share):
    """Differences over many orders of magnitude, few of them or all."""
    x = noise(48, 96, seed=seed)
    moved = torch.rand(x.shape, generator=RANDOM) < share
    step = noise(48, 96, seed=seed + 1) * torch.exp(spread * noise(48, 96, seed=seed + 2)) * 1e-3
    scheme, state = SCHEMES[name](), {"a.weight": x + step * moved}
    first = write({"a.weight": x}, scheme=scheme)
    kept = SCHEMES[name]().quantize(flatten(state), first.reference())
    second = write(state, first, scheme=scheme)
    assert bits(second.read()["a.weight"]) == bits(kept.state.tensors["a.weight"])
    third = write(state, second, scheme=scheme)
    assert (third.read()["a.weight"] - state["a.weight"]).norm() <= (
        second.read()["a.weight"] - state["a.weight"]
    ).norm()


@pytest.mark.parametrize("name", KINDS)
def test_strides_do_not_count_and_nothing_is_changed(name):
    first, second = two_states()
    kept = after(SCHEMES[name](), second, after(SCHEMES[name](), first))
    other = {
        key: x.t().contiguous().t() if x.dim() == 2 else x.to(memory_format=torch.channels_last)
        for key, x in second.items()
        if x.dim() > 1
    }
    assert not any(x.is_contiguous() for x in other.values())
    copies = {key: x.clone() for key, x in other.items()}
    strided = after(SCHEMES[name](), {**other, "a.bias": second["a.bias"]}, after(SCHEMES[name](), first))
    for key, one in kept.quantized.items():
        assert torch.equal(one.codes, strided.quantized[key].codes) and strided.quantized[key].codes.is_contiguous()
        assert torch.equal(kept.state.tensors[key], strided.state.tensors[key])
    assert len(kept.quantized) == 2 and all(torch.equal(copies[key], x) for key, x in other.items())


@pytest.mark.parametrize("name", KINDS)
def test_what_has_not_moved_stays_to_the_bit_and_costs_a_reference(name):
    first, second = two_states()
    first["a.weight"][0, :5] = -0.0
    second["a.weight"] = first["a.weight"].clone()
    scheme = SCHEMES[name]()
    delta = write(second, write(first, scheme=scheme), scheme=scheme)
    assert delta.recipes()["a.weight"] == {"kind": "same"}
    assert bits(delta.read()["a.weight"]) == bits(first["a.weight"])


def test_when_nothing_has_moved_nothing_is_lost():
    first, _ = two_states()
    for make in SCHEMES.values():
        kept = after(make(), first, after(make(), first))
        assert kept.loss is None and not kept.quantized


@pytest.mark.parametrize("name", KINDS)
def test_what_has_no_base_stays_exact(name):
    first, second = two_states()
    second["new.weight"] = noise(70, 70)
    second["a.weight"] = noise(80, 64)
    second["b.weight"] = second["b.weight"].double().to(torch.bfloat16)
    second["long"] = torch.arange(5000).reshape(50, 100)
    scheme = SCHEMES[name]()
    delta = write(second, write(first, scheme=scheme), scheme=scheme)
    assert difference(delta.read(), second) is None and delta.report.loss_report is None
    third = {key: x + 0.01 if x.is_floating_point() else x for key, x in second.items()}
    found = write(third, delta, scheme=scheme)
    kinds = {key: recipe["kind"] for key, recipe in found.recipes().items()}
    assert "quantized" in {kinds[key] for key in ("a.weight", "b.weight", "new.weight")} <= {"quantized", "same"}
    assert torch.equal(found.read()["long"], second["long"]) and torch.equal(found.read()["a.bias"], third["a.bias"])


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_finite_is_kept_until_it_is_again(name):
    """The base is not finite at the second save after it, so that one is exact, too."""
    for value in [math.nan, math.inf]:
        first, second = two_states()
        scheme, written = SCHEMES[name](), None
        states = [first, {**second, "a.weight": second["a.weight"].index_fill(0, torch.tensor([3]), value)}]
        states += [{**second, "a.weight": second["a.weight"] + 0.01 * step} for step in (1, 2)]
        exact: list[bool] = []
        for step, state in enumerate(states):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", LossWarning)
                warnings.simplefilter("ignore", UnmeasuredLossWarning)
                written = write(state, written, scheme=scheme)
            exact.append(bits(written.read()["a.weight"]) == bits(state["a.weight"]))
            assert ["stay exact: a.weight. " in str(one.message) for one in caught] == ([True] if step == 1 else [])
            if step:
                assert written.report.loss_report["left_out"] == (["a.weight"] if step == 1 else [])
        assert exact == [True, True, True, False]


@pytest.mark.parametrize("name", KINDS)
def test_what_might_become_infinite_is_kept_exact(name):
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        far = torch.finfo(dtype).max
        first, second = two_states(dtype)
        for sign in (1, -1):
            first["a.weight"][0, 0], second["a.weight"][0, 0] = far / 2, sign * far
            scheme = SCHEMES[name]()
            delta = write(second, write(first, scheme=scheme), scheme=scheme)
            assert torch.equal(delta.read()["a.weight"], second["a.weight"])
            assert delta.recipes()["a.weight"]["kind"] != "quantized" and bool(
                delta.read()["b.weight"].isfinite().all()
            )


@pytest.mark.parametrize("name", SCHEMES)
def test_settings_are_in_the_record_and_in_the_repr(name):
    scheme = SCHEMES[name]()
    first, second = two_states()
    kept = after(scheme, second, after(scheme, first))
    assert kept.loss["scheme"] == scheme.id and kept.loss["chosen"] == scheme.settings
    assert kept.loss["optimizer"] == "exact" and kept.loss["left_out"] == []
    again = get_scheme(repr(scheme))
    assert again.settings == scheme.settings and again.coders == scheme.coders


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SCHEMES)
def test_a_device_changes_nothing_but_where_it_happens(name):
    first, second = two_states()
    there = [{key: x.cuda() if key != "b.weight" else x for key, x in state.items()} for state in (first, second)]
    scheme, other = SCHEMES[name](), SCHEMES[name]()
    kept = after(scheme, second, after(scheme, first))
    written: Written | None = None
    for state in there:
        written = write(state, written, scheme=other)
    assert written is not None
    for key, x in written.read().items():
        assert torch.allclose(x, kept.state.tensors[key], rtol=1e-6, atol=1e-9)
