"""Steps from second moments: which optimizers have them, and where they lie beside gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shrinkpoint.comm import LinkStats, MomentSteps, parse
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce
from shrinkpoint.comm.compressors.step_codes import SMALLEST_ROOT
from shrinkpoint.comm.gradient_layout import GradientLayout
from shrinkpoint.comm.moment_allreduce import FIRST_SCALE, MomentAllReduce
from shrinkpoint.comm.moment_steps import SecondMoments, SegmentRoots
from shrinkpoint.errors import MismatchError, PolicyError

ADAPTIVE = ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adadelta")
OTHERS = ("SGD", "Adagrad", "Adamax", "ASGD", "Rprop", "LBFGS", "Adafactor")


class Shapes(nn.Module):
    """Parameters of several memory orders and dtypes, with a gradient of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(30, 20))
        self.last = nn.Parameter(torch.zeros(4, 3, 2, 5).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.zeros(8, 9).t())
        self.complex = nn.Parameter(torch.zeros(7, dtype=torch.complex64))


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters())


def test_setting_is_no_compressor_of_a_link():
    with pytest.raises(PolicyError, match="moment steps; expected a compressor or feedback"):
        CompressedAllReduce(parse("v0.7"), name="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ADAPTIVE)
def test_optimizer_with_a_mean_of_squares_is_known(name):
    model = nn.Linear(5, 3)
    optimizer = getattr(torch.optim, name)(model.parameters())
    moments = SecondMoments(optimizer)
    assert moments.find(model.parameters()) == [None, None]
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    found = moments.find(model.parameters())
    assert [moment.shape for moment in found if moment is not None] == [(3, 5), (3,)]
    assert all(bool((moment > 0).all()) for moment in found if moment is not None)


def test_centered_rmsprop_has_one_too():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.9)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    found = SecondMoments(optimizer).find(model.parameters())
    assert all(moment is optimizer.state[x]["square_avg"] for moment, x in zip(found, model.parameters(), strict=True))


def test_optimizer_of_another_model_is_refused():
    model = nn.Linear(8, 8)
    other = SecondMoments(torch.optim.Adam(nn.Linear(8, 8).parameters()))
    with pytest.raises(PolicyError, match="Adam of other parameters; expected the optimizer of this model"):
        SegmentRoots(GradientLayout(named(model), 0, 1 << 20), model.parameters(), other)


@pytest.mark.parametrize("name", OTHERS)
def test_optimizer_without_one_is_refused(name):
    model = nn.Linear(5, 3)
    with pytest.raises(PolicyError, match=f"{name}, which keeps no mean of squares"):
        SecondMoments(getattr(torch.optim, name)(model.parameters()))


def test_unknown_optimizer_is_refused_once_its_state_is_there():
    class Sign(torch.optim.Optimizer):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["ema"] = torch.ones_like(parameter)

    model = nn.Linear(5, 3)
    optimizer = Sign(model.parameters(), {})
    moments = SecondMoments(optimizer)
    assert moments.find(model.parameters()) == [None, None]
    optimizer.step()
    with pytest.raises(PolicyError, match="Sign, whose state has no mean of squares"):
        moments.find(model.parameters())
    with pytest.raises(PolicyError, match="expected a torch"):
        SecondMoments(model)


def test_roots_lie_as_gradients_do():
    model = Shapes()
    optimizer = torch.optim.Adam(model.parameters())
    for index, (_, parameter) in enumerate(named(model)):
        generator = torch.Generator().manual_seed(index)
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    optimizer.step()
    layout = GradientLayout(named(model), 0, 200)
    roots = SegmentRoots(layout, model.parameters(), SecondMoments(optimizer))
    assert roots.begin() == frozenset(range(len(layout.segments)))
    assert len(layout.segments) > 3
    for _, parameter in named(model):
        flat = parameter.grad.as_strided((parameter.numel(),), (1,))
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        for segment, piece in layout.pieces(parameter):
            made = roots.roots(segment, segment.numel)[piece.offset : piece.offset + piece.numel]
            expected = flat[piece.start : piece.start + piece.numel].abs() * 0.001**0.5
            torch.testing.assert_close(made, expected)


def test_moments_that_are_zero_or_not_finite_give_the_smallest_root():
    model = nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(1, 8)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg_sq"][0, :4] = torch.tensor([0.0, float("inf"), float("nan"), -1.0])
    layout = GradientLayout(named(model), 0, 1 << 20)
    roots = SegmentRoots(layout, model.parameters(), SecondMoments(optimizer))
    assert roots.begin() == {0}
    made = roots.roots(layout.segments[0], 64)
    assert bool((made[:4] == SMALLEST_ROOT).all()) and bool((made[8:] == SMALLEST_ROOT).all())
    assert bool((made[4:8] > 0.01).all())


def test_segment_with_a_parameter_outside_of_the_optimizer_is_left_out():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.Adam(model[0].parameters())
    model[0].weight.grad = torch.ones(64, 64)
    optimizer.step()
    layout = GradientLayout(named(model), 0, 1024)
    served = SegmentRoots(layout, model.parameters(), SecondMoments(optimizer)).begin()
    assert served == {4, 5, 6, 7}  # gradients are laid out from the last parameter on


def made_all_reduce() -> MomentAllReduce:
    model = nn.Linear(8, 8)
    layout = GradientLayout(named(model), 0, 1 << 20)
    roots = SegmentRoots(layout, model.parameters(), SecondMoments(torch.optim.Adam(model.parameters())))
    stats = {"first hop": LinkStats(), "second hop": LinkStats()}
    return MomentAllReduce(MomentSteps(), roots, layout, (2, 0, 1), stats)


def test_state_comes_back_and_a_broken_one_is_refused():
    one = made_all_reduce()
    state = {"steps": 5, "scales": {"0": FIRST_SCALE}, "hops": {"first": {}, "second": {}}}
    one.load_state_dict(state)
    assert one.state_dict() == state
    broken = [{"steps": -1}, {"scales": {"0": 0.0}}, {"scales": {"0": "x"}}, {"scales": None}, {"hops": None}]
    for change in broken:
        with pytest.raises(MismatchError):
            one.load_state_dict(state | change)
    with pytest.raises(MismatchError):
        one.load_state_dict({"steps": 5})
    assert one.state_dict() == state
