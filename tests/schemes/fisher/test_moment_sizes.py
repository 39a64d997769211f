"""What moments take: at every age, where few values move, and of stacked matrices."""

from __future__ import annotations

import pytest
import torch
from helpers.small_training import Silent
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.schemes.fisher.moment_statistics import MomentSamples, choose_matrix
from shrinkpoint.storage import MemoryStorage
from shrinkpoint.store import SaveReport
from shrinkpoint.tensors.flat_state import flatten


def bits(report: SaveReport, role: str) -> float:
    """Bits a value, of float32."""
    return 32 * report.roles[role].stored / report.roles[role].raw


class Noise:
    """A weight whose gradients are noise, with a manager that saves it."""

    def __init__(self, shape: tuple[int, ...] = (256, 128), size: Tensor | None = None, **settings: object) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape, generator=self.random))
        self.model, self.size = nn.ParameterDict({"weight": self.weight}), size
        self.optimizer = torch.optim.AdamW([self.weight], lr=1e-4, **settings)
        self.storage, self.steps = MemoryStorage(), 0
        self.manager = sp.CheckpointManager(self.storage, scheme=sp.Fisher(relative_error=0.3), threads=1)

    def train(self, steps: int) -> Noise:
        for _ in range(steps):
            gradient = torch.randn(self.weight.shape, generator=self.random).to(self.weight.dtype)
            self.weight.grad = gradient if self.size is None else gradient * self.size
            self.optimizer.step()
        self.steps += steps
        return self

    def save(self) -> SaveReport:
        with Silent():
            return self.manager.save(self.steps, model=self.model, optimizer=self.optimizer)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.999), (0.8, 0.99), (0.98, 0.999), (0.0, 0.999)])
def test_first_moments_take_at_most_two_fifths_of_a_bit_from_step_20_on(betas):
    run = Noise(betas=betas)
    for steps in (20, 60, 120):
        assert bits(run.train(steps).save(), "moment1") < 0.4


@pytest.mark.parametrize("dead_columns", [0, 16])
def test_momentum_takes_no_more_in_a_delta_than_in_a_keyframe(dead_columns):
    run = Noise(size=torch.cat([torch.zeros(dead_columns), torch.ones(128 - dead_columns)]))
    run.optimizer = torch.optim.SGD([run.weight], lr=1e-4, momentum=0.9)
    first, *others = (bits(run.train(30).save(), "moment1") for _ in range(3))
    assert run.manager.store.manifest().depth == 2
    assert max(others) < 1.05 * first < 0.65


def test_momentum_of_which_large_values_alone_are_coded_takes_less_right_after_a_save():
    run = Noise()
    run.optimizer = torch.optim.Muon([run.weight], lr=1e-4)
    first, later, next_step = (bits(run.train(steps).save(), "moment1") for steps in (60, 60, 1))
    assert next_step < 0.7 * later and later < 1.1 * first


def test_the_noise_of_a_first_moment_moves_its_weight_alike_at_every_age_and_decay():
    """By at most 18 updates: a step of two roots of the second moment where beta1 is 0.9."""
    for betas, age in (((0.9, 0.999), 20), ((0.9, 0.999), 300), ((0.5, 0.99), 50)):
        run = Noise(betas=betas).train(age)
        run.save()
        before = {name: x.clone() for name, x in run.optimizer.state[run.weight].items()}
        run.manager.restore(run.steps, model=run.model, optimizer=run.optimizer)
        error = (run.optimizer.state[run.weight]["exp_avg"] - before["exp_avg"]).abs()
        unbiased = (before["exp_avg_sq"] / (1 - betas[1] ** age)).sqrt()
        moved = error / unbiased * betas[0] / (1 - betas[0])
        assert float(moved.quantile(0.5)) + 1 > 1.0 and float(moved.quantile(0.99)) < 20


def test_ten_moved_rows_of_many_cost_what_ten_rows_cost():
    torch.manual_seed(0)
    table = nn.Embedding(3000, 16, sparse=True)
    optimizer = torch.optim.SparseAdam([*table.parameters()], lr=1e-2)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        (table(rows) - 1).square().mean().backward()
        optimizer.step()

    for _ in range(60):
        step(torch.randint(3000, (100,)))
    with Silent(), sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(relative_error=0.3), threads=1) as manager:
        first = manager.save(0, model=table, optimizer=optimizer)
        for number in range(1, 4):
            step(torch.arange(10))
            report = manager.save(number, model=table, optimizer=optimizer)
            for role in ("moment1", "moment2"):
                assert report.roles[role].stored < first.roles[role].stored / 15
        restored = []
        for number in (1, 3):
            manager.restore(number, model=table, optimizer=optimizer)
            slots = optimizer.state[table.weight]
            restored.append({name: slots[name][10:].clone() for name in ("exp_avg", "exp_avg_sq")})
        for name, early in restored[0].items():  # what has not moved decodes to the same values, but where a step has
            assert float((early != restored[1][name]).float().mean()) < 0.02


def test_rows_that_are_looked_up_for_the_first_time_cost_a_few_bits_a_value():
    """A code above 0 has no difference of a byte to the code of zero: each would take 40 bits."""
    torch.manual_seed(0)
    table = nn.Embedding(3000, 32, sparse=True)
    optimizer = torch.optim.SparseAdam([*table.parameters()], lr=1e-2)
    with Silent(), sp.CheckpointManager(MemoryStorage(), scheme=sp.Fisher(relative_error=0.3), threads=1) as manager:
        for number in range(4):
            rows = torch.arange(number * 500, number * 500 + 500)
            optimizer.zero_grad()
            (table(rows) * torch.randn(500, 32)).sum().backward()
            optimizer.step()
            report = manager.save(number, model=table, optimizer=optimizer)
            if number:
                assert 8 * report.roles["moment2"].stored / rows.numel() / 32 < 8


def test_second_moments_that_vary_by_octaves_keep_their_points():
    """As in experts that few tokens reach."""
    run = Noise(betas=(0.9, 0.98), size=torch.randn(256, 128, generator=torch.Generator().manual_seed(1)).mul(2).exp2())
    taken = []
    for _ in range(4):
        run.size = run.size * torch.randn(256, 128, generator=run.random).exp2()
        taken.append(bits(run.train(40).save(), "moment2"))
    assert max(taken[1:]) < 0.75 * taken[0]


def test_stacked_matrices_take_the_bits_of_one_matrix():
    size = torch.randn(8, 32, 1, generator=torch.Generator().manual_seed(1)).exp()
    size = size * torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(2)).exp()
    runs = [Noise((8, 32, 64), size, betas=(0.9, 0.98)), Noise((256, 64), size.reshape(256, 64), betas=(0.9, 0.98))]
    for steps in (50, 50, 50):
        stacked, flat = (run.train(steps).save() for run in runs)
        assert stacked.stored_bytes < 1.02 * flat.stored_bytes + 50
    for run in runs:
        run.manager.restore(run.steps, model=run.model, optimizer=run.optimizer)
    stacked, flat = ([run.weight.detach(), *run.optimizer.state[run.weight].values()] for run in runs)
    assert all(torch.equal(one.reshape(-1), other.reshape(-1)) for one, other in zip(stacked, flat, strict=True))


@pytest.mark.parametrize("shape, flat", [((64, 32, 3, 3), (64, 288)), ((8, 64, 32), (512, 32))])
def test_weights_beside_momentum_have_the_fewest_scales(shape, flat):
    """By the spread of momentum, which has one sign in each kernel, three weights of a kernel would have one."""
    size = torch.randn(shape[0], shape[1], *(1 for _ in shape[2:]), generator=torch.Generator().manual_seed(1))
    runs = [Noise(shape, size), Noise(flat, size.expand(shape).reshape(flat))]
    for run in runs:
        run.optimizer = torch.optim.SGD([run.weight], lr=1e-4, momentum=0.9)
        run.weight.grad = size.expand(shape).reshape(run.weight.shape) * 10
        run.optimizer.step()
    stacked, plain = (bits(run.train(1).save(), "parameter") for run in runs)
    assert stacked < 1.02 * plain


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_a_matrix_is_chosen_by_how_far_second_moments_spread_around_it(dims):
    noise = torch.randn(6, 20, 30, 10, generator=torch.Generator().manual_seed(0)).square()
    by_row = torch.randn(6, 20, 1, 1, generator=torch.Generator().manual_seed(1)).mul(6).exp2()
    by_first = torch.randn(6, 1, 1, 1, generator=torch.Generator().manual_seed(2)).mul(6).exp2()
    by_column = torch.randn(1, 20, 30, 10, generator=torch.Generator().manual_seed(3)).mul(6).exp2()
    if dims == 2:
        assert choose_matrix((noise * by_row)[:, :, 0]) == (120, 10)
    elif dims == 3:
        assert choose_matrix(noise * by_first * by_column) == (6, 6000)
    else:
        assert choose_matrix(noise * by_row) in [(120, 300), (3600, 10)]


def test_kernels_that_differ_by_an_octave_have_no_scales_of_their_own():
    random = torch.Generator().manual_seed(0)
    kernels = torch.randn(3, 128, 64, 3, 3, generator=random).square().sum(0)
    size = torch.randn(128, 64, 1, 1, generator=random)
    assert choose_matrix(kernels * size.mul(1.2).exp2()) == (128, 576)
    assert choose_matrix(kernels * size.mul(3).exp2()) == (8192, 9)


def test_samples_tell_what_rests_from_what_moves():
    run = Noise(betas=(0.9, 0.999)).train(3)
    samples = MomentSamples()

    def update() -> set[str]:
        return samples.update(flatten({"model": dict(run.model), "optimizer": run.optimizer.state_dict()}))

    moment, name = run.optimizer.state[run.weight]["exp_avg"], "optimizer/state/0/exp_avg"
    assert update() == set() and update() == {name}
    moment[:50] += 1
    assert update() == {name}
    moment[:100] += 1
    assert update() == set() and update() == {name}
    moment[0, 0] = torch.nan
    assert update() == {name}


def test_moments_of_bfloat16_take_no_more_bits_and_come_back_as_near():
    run = Noise(betas=(0.9, 0.99))
    run.weight.data = run.weight.data.bfloat16()
    report = run.train(60).save()
    assert report.roles["moment1"].stored * 8 / run.weight.numel() < 0.45
    before = {name: x.clone() for name, x in run.optimizer.state[run.weight].items()}
    run.manager.restore(60, model=run.model, optimizer=run.optimizer)
    after = run.optimizer.state[run.weight]
    assert after["exp_avg"].dtype == torch.bfloat16
    error = (after["exp_avg"].float() - before["exp_avg"].float()) / after["exp_avg_sq"].float().sqrt()
    assert float(error.abs().max()) < 1.1 * 2 / (1 - 0.99**60) ** 0.5 and abs(float(error.mean())) < 0.02


def test_two_saves_of_one_step_have_other_dither_where_moments_differ():
    run = Noise(betas=(0.9, 0.999)).train(30)
    sizes = []
    for number in range(3):
        with Silent():
            report = run.manager.save(number, model=run.model, optimizer=run.optimizer)
        sizes.append(report.roles["moment1"].stored)
        run.optimizer.state[run.weight]["exp_avg"].mul_(-1)
    assert sizes[2] < 1.2 * sizes[1] < 1.2 * 1.2 * sizes[0]  # the first one has finer steps, beside no weights
