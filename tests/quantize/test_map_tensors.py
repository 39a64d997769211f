"""Something of each of many tensors, computed several at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from helpers.stand_in_device import DeviceTensor, StandInDevice

import shrinkpoint as sp
from shrinkpoint.codec.parallel import MIN_BATCH_NUMEL, map_tensors
from shrinkpoint.device.reads import Reads

SIZES = [3, 1, 2 * MIN_BATCH_NUMEL, 0, 5, 2 * MIN_BATCH_NUMEL + 1, 2]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tensors_of(sizes: list[int]) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.zeros(1).expand(size) for i, size in enumerate(sizes)}


def test_results_are_by_name_in_the_order_of_the_tensors(threads):
    for sizes in [[], [7], SIZES, [1] * 1000]:
        tensors = tensors_of(sizes)
        results = map_tensors(lambda name, count, of=tensors: (name, of[name].numel(), 1 <= count <= threads), tensors)
        assert [*results.items()] == [(name, (name, tensor.numel(), True)) for name, tensor in tensors.items()]


def test_an_error_of_any_tensor_is_raised(threads):
    def refuse(name: str, _: int) -> None:
        if name == "t4":
            raise ValueError(name)

    with pytest.raises(ValueError, match="t4"):
        map_tensors(refuse, tensors_of(SIZES))


def test_tensors_of_another_device_stay_in_the_callers_thread(threads):
    tensors = tensors_of(SIZES) | {"meta": torch.empty(4, device="meta")}
    places = map_tensors(lambda name, _: threading.get_ident(), tensors)
    assert {*places.values()} == {threading.get_ident()}


def test_what_tensors_on_a_device_are_asked_for_is_read_at_once(threads):
    def last_but_first(name: str, _: int) -> Reads[tuple[float, float]]:
        first = yield tensors[name][:1].to(torch.float64)
        last = yield tensors[name][-1:].to(torch.float64)
        return float(first), float(last)

    values = {f"t{i}": torch.arange(i, 2 * i) for i in range(2, 9)}
    with StandInDevice() as device:
        tensors = {name: DeviceTensor(x) for name, x in values.items()}
        found = map_tensors(last_but_first, tensors)
    assert found == {name: (float(x[0]), float(x[-1])) for name, x in values.items()} and len(device.waits) == 2
    tensors = values  # type: ignore[assignment]
    assert map_tensors(last_but_first, values) == found


def test_files_of_fisher_do_not_depend_on_the_number_of_threads(tmp_path):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (900, 700), "b": (64,), "c": (50, 60), "d": (700, 900)}
    before, sizes = torch.get_num_threads(), []
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    moments = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            with sp.Store(tmp_path / str(threads)) as store:
                scheme = sp.Fisher(relative_error=0.3)
                for step in range(3):
                    state = {
                        "model": {name: weight + 1e-2 * step * moments[name] for name, weight in weights.items()},
                        "optimizer": {
                            "state": {
                                i: {"step": step + 1.0, "exp_avg": moments[name] - 0.5, "exp_avg_sq": moments[name]}
                                for i, name in enumerate(shapes)
                            },
                            "param_groups": [{"params": [*range(len(shapes))], "betas": (0.9, 0.99)}],
                        },
                    }
                    store.save(step, state, scheme=scheme)
                files = sorted((tmp_path / str(threads)).glob("step-*/rank-*.safetensors"))
                sizes.append([path.read_bytes() for path in files])
        finally:
            torch.set_num_threads(before)
    assert len(sizes[0]) >= 3 and sizes[0] == sizes[1] == sizes[2]
