"""The recorder holds a moving average of the last gradients before a save, and of no others."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shrinkpoint as sp
from shrinkpoint.errors import PolicyError
from shrinkpoint.train import GradientRecorder


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


def batches(count: int, device: str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = torch.randn(32, 8, generator=generator)
        yield inputs.to(device), torch.randint(0, 4, (32,), generator=generator).to(device)


class Loop:
    """A training loop with the two calls in it, or with a recorder attached; keeps all gradients by step."""

    def __init__(
        self, *, attached: bool = False, to_none: bool = True, device: str = "cpu", **settings: object
    ) -> None:
        self.model = network().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.recorder = GradientRecorder(self.model, **settings)
        self.attached, self.to_none, self.device = attached, to_none, device
        self.seen: list[dict[str, Tensor]] = []
        if attached:
            assert self.recorder.attach(self.optimizer) is self.recorder

    def steps(self, count: int) -> Loop:
        for inputs, labels in batches(count, self.device):
            F.cross_entropy(self.model(inputs), labels).backward()
            self.seen.append({name: x.grad.cpu().clone() for name, x in self.model.named_parameters()})
            if not self.attached:
                self.recorder.after_backward()
            self.optimizer.step()
            if not self.attached:
                self.recorder.before_zero_grad()
            self.optimizer.zero_grad(set_to_none=self.to_none)
        return self

    def by_hand(self, first: int, last: int, keep: float = 0.9, take: float = 0.1) -> dict[str, Tensor]:
        """The average of the gradients of some steps, counted from 1."""
        mean = {name: x.clone() for name, x in self.seen[first - 1].items()}
        for gradients in self.seen[first:last]:
            mean = {name: keep * mean[name] + take * x for name, x in gradients.items()}
        return mean


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("attached", [True, False])
def test_the_mean_is_the_one_computed_by_hand_to_the_last_bit(attached, to_none):
    loop = Loop(attached=attached, to_none=to_none).steps(12)
    assert same(loop.recorder.mean, loop.by_hand(1, 12, 0.9, 1 - 0.9))
    assert loop.recorder.step == 12
    assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in loop.recorder.mean.values())


def test_the_papers_form_weighs_the_newest_gradient_most():
    loop = Loop(paper=True).steps(5)
    assert same(loop.recorder.mean, loop.by_hand(1, 5, 1 - 0.9, 0.9))
    far = [sum((m[n] - x).norm() for n, x in loop.seen[-1].items()) for m in (loop.recorder.mean, loop.by_hand(1, 5))]
    assert far[0] < far[1] / 2


def test_a_scheme_as_printed_gets_the_printed_average():
    loop = Loop()
    sp.Inshrinkerator(threshold=0.05, evaluate=lambda _: 0.0, gradients=loop.recorder, paper=True)
    loop.steps(5)
    assert same(loop.recorder.mean, loop.by_hand(1, 5, 1 - 0.9, 0.9))
    sp.Inshrinkerator(threshold=0.05, evaluate=lambda _: 0.0, gradients=Loop(paper=True).recorder, paper=True)
    with pytest.raises(PolicyError, match="paper"):
        sp.Inshrinkerator(threshold=0.05, evaluate=lambda _: 0.0, gradients=Loop(paper=False).recorder, paper=True)


@pytest.mark.parametrize("attached", [True, False])
def test_only_the_last_steps_before_a_planned_save_are_recorded_each_time_afresh(attached):
    loop = Loop(attached=attached, save_interval=10, batches=4)
    recorded = []
    for _ in range(30):
        recorded.append(loop.recorder.is_recording)
        loop.steps(1)
        if loop.recorder.step % 10 == 0:
            last = loop.recorder.step
            assert same(loop.recorder.mean, loop.by_hand(last - 3, last, 0.9, 1 - 0.9))
    assert [i + 1 for i, on in enumerate(recorded) if on] == [7, 8, 9, 10, 17, 18, 19, 20, 27, 28, 29, 30]


def test_between_windows_the_last_average_is_kept_and_a_new_one_starts_empty():
    loop = Loop(save_interval=10, batches=4).steps(10)
    at_the_save = loop.recorder.mean
    loop.steps(6)
    assert loop.recorder.ready and same(loop.recorder.mean, at_the_save)
    loop.steps(1)
    assert same(loop.recorder.mean, loop.seen[16])


@pytest.mark.parametrize(
    "settings", [{"save_interval": 3, "batches": 3}, {"save_interval": 3, "batches": 50}, {"save_interval": None}]
)
def test_windows_that_touch_are_one(settings):
    loop = Loop(**settings).steps(8)
    assert same(loop.recorder.mean, loop.by_hand(1, 8, 0.9, 1 - 0.9))


def test_nothing_is_ready_before_the_first_window():
    loop = Loop(save_interval=10, batches=4).steps(6)
    assert not loop.recorder.ready and loop.recorder.mean == {}
    assert loop.steps(1).recorder.ready


def test_a_run_that_resumes_at_a_step_records_before_the_same_saves():
    loop = Loop(save_interval=10, batches=4)
    loop.steps(2)
    loop.recorder.set_step(28)
    assert loop.recorder.step == 28 and not loop.recorder.ready and loop.recorder.is_recording
    loop.steps(2)
    assert same(loop.recorder.mean, loop.by_hand(3, 4, 0.9, 1 - 0.9))
    assert not loop.recorder.is_recording


def test_what_the_optimizer_clips_or_clears_afterwards_is_recorded_as_it_was():
    model = nn.Linear(3, 2)
    recorder = GradientRecorder(model)
    model(torch.ones(1, 3)).sum().backward()
    before = model.weight.grad.clone()
    recorder.after_backward()
    model.weight.grad.mul_(0)
    recorder.before_zero_grad()
    assert torch.equal(recorder.mean["weight"], before)


def test_a_mean_that_was_read_stays_as_it_was():
    loop = Loop().steps(3)
    mean = loop.recorder.mean
    kept = {name: x.clone() for name, x in mean.items()}
    loop.steps(3)
    assert same(mean, kept) and not same(mean, loop.recorder.mean)


def test_recording_changes_no_bit_of_the_training():
    with_it, without = Loop(attached=True).steps(6), Loop(save_interval=1000, batches=1).steps(6)
    assert with_it.recorder.ready and not without.recorder.ready
    assert same(with_it.model.state_dict(), without.model.state_dict())


def test_tied_parameters_are_recorded_once_and_frozen_and_unused_ones_not():
    model = nn.ModuleDict({"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5), "frozen": nn.Linear(3, 3)})
    model["unused"] = nn.Linear(3, 3)
    model["head"].weight = model["table"].weight
    model["frozen"].requires_grad_(False)
    recorder = GradientRecorder(model)
    model["head"](model["frozen"](model["table"](torch.tensor([1, 2])))).sum().backward()
    model["frozen"].weight.grad = torch.ones(3, 3)  # a parameter that was frozen after a backward pass
    recorder.after_backward()
    assert set(recorder.mean) == {"table.weight", "head.bias"}
    assert torch.equal(recorder.mean["table.weight"], model["table"].weight.grad)


def test_sparse_gradients_are_recorded_dense():
    table = nn.Embedding(6, 3, sparse=True)
    recorder = GradientRecorder(table)
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert table.weight.grad.is_sparse
    recorder.after_backward()
    assert recorder.mean["weight"].tolist() == [[0.0] * 3, [2.0] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_for_its_parameter_and_batch(bad):
    model = nn.Linear(3, 2)
    recorder = GradientRecorder(model, beta=0.5)
    for weight in (4.0, bad, 8.0):
        model.weight.grad, model.bias.grad = torch.full((2, 3), 1.0), torch.full((2,), 2.0)
        model.weight.grad[1, 1] = weight
        recorder.after_backward()
        recorder.before_zero_grad()
    assert recorder.mean["weight"].tolist() == [[1.0, 1.0, 1.0], [1.0, 6.0, 1.0]]
    assert recorder.mean["bias"].tolist() == [2.0, 2.0]
    assert recorder.step == 3


def test_low_precision_and_empty_gradients_are_recorded_in_float32():
    model = nn.ParameterDict({"bf16": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))})
    model["empty"] = nn.Parameter(torch.empty(0, 3))
    recorder = GradientRecorder(model)
    for value in (1.0, 2.0):
        model["bf16"].grad, model["empty"].grad = torch.full((3,), value, dtype=torch.bfloat16), torch.empty(0, 3)
        recorder.after_backward()
    assert set(recorder.mean) == {"bf16"}
    assert torch.equal(recorder.mean["bf16"], torch.ones(3) * 0.9 + torch.full((3,), 2.0) * (1 - 0.9))


def test_a_detached_recorder_hears_nothing_more_and_a_cleared_one_holds_nothing():
    loop = Loop(attached=True).steps(2)
    mean = loop.recorder.mean
    loop.recorder.detach()
    loop.steps(2)
    assert loop.recorder.step == 2 and same(loop.recorder.mean, mean)
    loop.recorder.clear()
    assert not loop.recorder.ready and loop.recorder.step == 2


def test_attaching_again_does_not_count_twice():
    loop = Loop(attached=True)
    loop.recorder.attach(loop.optimizer)
    assert loop.steps(3).recorder.step == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("attached", [True, False])
def test_gradients_on_a_gpu_arrive_on_the_host_before_they_are_cleared(attached, to_none):
    loop = Loop(attached=attached, to_none=to_none, device="cuda", save_interval=10, batches=4).steps(10)
    assert same(loop.recorder.mean, loop.by_hand(7, 10, 0.9, 1 - 0.9))
    assert all(not x.is_cuda for x in loop.recorder.mean.values())


def test_squares_are_averaged_with_the_gradients_on_request() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    recorder, plain = GradientRecorder(model, beta=0.5, squares=True), GradientRecorder(model, beta=0.5)
    wanted: Tensor | None = None
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(3, 8)).square().mean().backward()
        for one in (recorder, plain):
            one.after_backward()
            one.before_zero_grad()
        assert model.weight.grad is not None
        square = model.weight.grad.square()
        wanted = square.clone() if wanted is None else wanted * 0.5 + square * 0.5
    assert wanted is not None
    assert torch.equal(recorder.square["weight"], wanted)
    assert not plain.square
    recorder.clear()
    assert not recorder.square
