"""Never larger than the tensors are, but for 0.1% and a kilobyte each; and small tensors do not cost a kilobyte."""

from __future__ import annotations

import torch
from helpers.round_trip import nudged, write
from helpers.strategies import DTYPES, TORCH_DTYPES, difference, tensors
from hypothesis import given, settings
from hypothesis import strategies as st


def noise(name: str, count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(count)
    high = 2 if name == "BOOL" else 256
    return torch.randint(0, high, (count * TORCH_DTYPES[name].itemsize,), generator=random, dtype=torch.uint8).view(
        TORCH_DTYPES[name]
    )


def bound(raw: int, count: int = 1) -> float:
    return raw * 1.001 + 1024 * count


def test_a_file_of_one_incompressible_tensor_is_hardly_larger_than_it():
    for name in DTYPES:
        for count in [0, 1, 7, 500, 20_000, 70_001]:
            x = noise(name, count)
            before = write({"x.weight": x})
            assert before.report.stored_bytes <= bound(x.nbytes)
            other = noise(name, count + 1)[:-1]
            assert write({"x.weight": other}, before).report.stored_bytes <= bound(x.nbytes)


@settings(deadline=None, max_examples=60)
@given(st.lists(tensors(layouts=("dense",)), max_size=4), st.booleans())
def test_no_state_is_larger_than_its_tensors_and_a_kilobyte_for_each(some, delta):
    state = {f"{i}.weight": x for i, x in enumerate(some)}
    written = write(state, write({name: nudged(x) for name, x in state.items()}) if delta else None)
    assert written.report.stored_bytes <= bound(written.report.raw_bytes, max(1, len(some)))


def test_noise_among_what_compresses_does_not_pay_for_it():
    state = {"noise": noise("U8", 100_000), "zero.weight": torch.zeros(100_000)}
    assert write(state).report.stored_bytes < bound(100_000, 2)


def test_many_tiny_tensors_cost_little_more_than_their_header_entries():
    """Measured: 56 bytes a scalar, its 4 bytes of value and its name of 4 or 5 letters included."""
    state = {f"a{i}": torch.tensor(float(i)) for i in range(2000)}
    written = write(state)
    assert written.report.stored_bytes < 2000 * 70
    assert difference(state, written.read()) is None


def test_unchanged_tiny_tensors_cost_only_their_header_entries():
    state = {f"a{i}": torch.tensor(float(i)) for i in range(2000)}
    assert write(state, write(state)).report.stored_bytes < 2000 * 65


def test_an_empty_state_is_a_small_file():
    assert write({}).report.stored_bytes < 640 and write([]).report.stored_bytes < 640
