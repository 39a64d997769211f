"""Tensors of one kind are coded as the first of them, for some saves of a chain, unless that serves them badly."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers.round_trip import Loop, Written, nudged, write
from helpers.strategies import difference

from shrinkpoint import Lossless
from shrinkpoint.schemes.encode.records import ChainChoices, CoderChoice

SHAPE = (300, 300)


def normal(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 0.02


def noise(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 256, (*SHAPE, 4), generator=generator, dtype=torch.uint8).view(torch.float32)[..., 0].clone()
    )


def chain(states: list[Any], *, scheme: Lossless, threads: int = 1) -> list[Written]:
    """Files of a chain by one scheme; each is read back."""
    out: list[Written] = []
    for state in states:
        out.append(write(state, out[-1] if out else None, scheme=scheme, threads=threads))
        assert difference(state, out[-1].read()) is None
    return out


def random_walk(count: int, tensors: int = 4) -> list[dict[str, torch.Tensor]]:
    states = [{f"{i}.weight": normal(i) for i in range(tensors)}]
    for step in range(1, count):
        states.append({name: x + 1e-4 * normal(100 * step) for name, x in states[-1].items()})
    return states


@pytest.mark.parametrize("threads", [2, 5])
def test_any_number_of_threads_writes_the_same_files(threads: int) -> None:
    states: list[Any] = random_walk(4)
    states[2]["1.weight"] = noise(1)  # what is chosen for this kind does not serve it
    loop = Loop()
    for other in (states, [copy.deepcopy(loop.steps(2)) for _ in range(4)]):
        alone = chain(other, scheme=Lossless())
        together = chain(other, scheme=Lossless(), threads=threads)
        assert [file.data[-1000:] for file in alone] == [file.data[-1000:] for file in together]
        assert [file.report.stored_bytes for file in alone] == [file.report.stored_bytes for file in together]


def test_a_tensor_unlike_the_first_of_its_kind_is_coded_by_itself() -> None:
    plain, constant = noise(2), torch.full(SHAPE, 0.5)
    first = write({"0.weight": normal(0), "1.weight": plain, "2.weight": constant}, scheme=Lossless())
    assert difference(first.read(), {"0.weight": normal(0), "1.weight": plain, "2.weight": constant}) is None
    assert first.recipes()["1.weight"] == {"kind": "plain"}
    assert first.bytes_of("2.weight") < 2000
    last = write({"0.weight": plain, "1.weight": normal(0), "2.weight": constant}, scheme=Lossless())
    assert last.bytes_of("1.weight") < 0.9 * plain.nbytes


def test_a_choice_that_turns_bad_is_made_again() -> None:
    states: list[Any] = random_walk(3)
    scheme = Lossless()
    files = chain(states, scheme=scheme)
    jump = {name: noise(i) for i, name in enumerate(states[0])}
    after = write(jump, files[-1], scheme=scheme)
    assert difference(after.read(), jump) is None
    assert after.report.stored_bytes < 1.001 * after.report.raw_bytes + 1024 * len(jump)
    again = {name: nudged(x) for name, x in jump.items()}
    later = write(again, after, scheme=scheme)
    assert difference(later.read(), again) is None
    assert later.report.stored_bytes <= write(again, after, scheme=Lossless()).report.stored_bytes * 1.01


def test_choices_are_made_again_by_the_2nd_4th_and_8th_delta_and_by_each_keyframe() -> None:
    choices, made = ChainChoices(), list[int]()
    for number in (*range(20), 0, 1):
        choices.by_kind["kind"] = CoderChoice(1, (), 1.0)  # type: ignore[index]
        choices.begin_save(is_delta=number > 0)
        made += [] if choices.by_kind else [number]
    assert made == [0, 1, 2, 4, 8, 16, 0, 1]


def test_what_the_first_delta_of_a_run_chose_is_not_held_where_another_coder_becomes_smaller() -> None:
    """Twenty steps after the start second moments are coded by their level; later the gradient predicts them."""
    states, loop = [], Loop(width=300)
    for steps in (2, 2, 20, 20):
        states.append(copy.deepcopy(loop.steps(steps)))
    held = chain(states, scheme=Lossless())
    fresh = [write(state, before, scheme=Lossless()) for state, before in zip(states[1:], held, strict=False)]
    for number in (1, 2):  # the first two deltas
        assert held[number].report.stored_bytes == fresh[number - 1].report.stored_bytes


def test_bits_that_only_later_values_use_are_kept() -> None:
    scheme = Lossless()
    narrow = [x.bfloat16().float().abs() for x in (normal(5), normal(6), normal(7))]
    wide = [x.clone() for x in narrow]
    wide[1][77, 77] = -0.1  # no sample has it
    wide[2][1, 3] = 0.1234567
    for tensors in (narrow, wide):
        state = {f"{i}.weight": x for i, x in enumerate(tensors)}
        assert difference(write(state, scheme=scheme).read(), state) is None


def test_a_scheme_that_has_chosen_is_copied_and_pickled_like_a_new_one() -> None:
    scheme = Lossless()
    states: list[Any] = random_walk(2)
    files = chain(states, scheme=scheme)
    for other in (copy.deepcopy(scheme), pickle.loads(pickle.dumps(scheme))):
        assert other == scheme == Lossless() and hash(other) == hash(scheme)
        assert difference(write(states[1], files[0], scheme=other).read(), states[1]) is None


@pytest.mark.parametrize("seed", [3, 4, 7])  # ten steps apart, parents predict the weights of these best
def test_a_step_after_the_parent_is_predicted_whatever_was_chosen_for_several(seed: int) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    optimizer, scheme = torch.optim.AdamW(model.parameters(), lr=1e-3), Lossless()
    states = []
    for steps in (100, 10, 1):
        for _ in range(steps):
            x = torch.randn(32, 256)
            optimizer.zero_grad()
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
        states.append(copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}))
    files = chain(states, scheme=scheme)
    assert files[2].report.stored_bytes <= 1.05 * write(states[2], files[1], scheme=Lossless()).report.stored_bytes
