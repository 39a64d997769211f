"""Points do to a model what the links of a pipeline do, and nothing else."""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from helpers.comm_links import same
from torch import Tensor, nn

from shrinkpoint.comm import Link, MessageContext, insert_compression, parse
from shrinkpoint.errors import LossWarning, MismatchError, PolicyError

Pair = namedtuple("Pair", ["left", "right"])


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(a=nn.Linear(8, 32), b=nn.ReLU(), c=nn.Linear(32, 32), d=nn.Tanh(), e=nn.Linear(32, 3))
    )


def batch(seed: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def stages(net: nn.Sequential) -> list[nn.Sequential]:
    return [net[:1], net[1:4], net[4:]]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("q4:64", "q4:16:dither"),
        ("bf16", "top10"),
        ("n3:64", "rand10"),
        ("h64(q4:64)", "block4:32"),
        ("ef(top10)", "ef(q2:16)"),
        ("ef21(q2:16:dither)", "ef21(top20)"),
        ("efmixed(top10)", None),
        (None, "q8:row"),
        ("aq(q2:64, warmup=1)", "q8:64"),
        ("aq(top10, dtype=bf16)", "efmixed(rand20)"),
        ("top10", "aq(q2:64)"),
    ],
)
def test_a_model_with_points_is_stages_with_links(forward, backward):
    """Three stages by hand, with messages between them, two micro-batches: the same losses and gradients."""
    net, other = model(), model()
    points = insert_compression(net, after=["a", "d"], forward=forward, backward=backward, micro_batches=2)
    names = [f"{i} {way}" for i in (0, 1) for way in ("forward", "backward")]
    hows = {name: forward if name.endswith("forward") else backward for name in names}
    links = {name: None if how is None else (Link(how, name=name), Link(how, name=name)) for name, how in hows.items()}

    def cross(name: str, x: Tensor, context: MessageContext) -> Tensor:
        pair = links[name]
        return x if pair is None else pair[1].unpack(pair[0].pack(x, context), torch.empty_like(x), context)

    for step in range(3):
        x, ids = batch(step), torch.arange(6) + step
        points.set_sample_ids(ids)
        net.zero_grad(), other.zero_grad()
        for slot, (part, known) in enumerate(zip(x.tensor_split(2), ids.tensor_split(2), strict=True)):
            context, held = MessageContext(slot, ids=known), []
            loss = net(part).square().sum()
            for number, stage in enumerate(stages(other)):
                part = part if number == 0 else cross(f"{number - 1} forward", part.detach(), context).requires_grad_()
                held.append((part, stage(part)))
                part = held[-1][1]
            assert torch.equal(part.square().sum(), loss)
            loss.backward()
            gradient = torch.autograd.grad(part.square().sum(), part, retain_graph=True)[0]
            for number in (2, 1, 0):
                held[number][1].backward(gradient)
                if number:
                    gradient = cross(f"{number - 1} backward", held[number][0].grad, context)
        for a, b in zip(gradients(net), gradients(other), strict=True):
            assert same(a, b)
    assert set(points.link_stats()) == {name for name, how in hows.items() if how is not None}


def test_without_compressors_or_switched_off_it_is_the_plain_model():
    x, plain = batch(0), model()
    expected = plain(x)
    expected.sum().backward()
    for options in ({}, {"forward": "q2", "backward": "q2"}):
        net = model()
        points = insert_compression(net, after=["a", "b", "d"], **options)
        points.enabled = not options
        out = net(x)
        out.sum().backward()
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients(net), gradients(plain), strict=True))
        assert all(ledger.messages == 0 for ledger in points.link_stats().values())


def test_second_derivatives_are_an_error():
    """A link has none: a gradient penalty would lose its part of every parameter before the point."""
    net, x = model(), batch(0).requires_grad_()
    insert_compression(net, after=["c"], forward="exact", backward="exact")
    [gradient] = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_removed_points_are_gone():
    net = model()
    points = insert_compression(net, after=["a"], forward="q1")
    assert not torch.equal(net(batch(0)), model()(batch(0)))
    points.remove()
    assert torch.equal(net(batch(0)), model()(batch(0)))


def test_a_module_differentiates_what_it_really_put_out():
    """The gradient of tanh is that of its own output, not of the message; the message's gradient passes through."""
    net = nn.Sequential(nn.Tanh())
    insert_compression(net, after=["0"], forward="q1")
    x = torch.linspace(-2, 2, 12).requires_grad_()
    weights = torch.arange(12.0)
    (net(x) * weights).sum().backward()
    assert torch.allclose(x.grad, weights * (1 - x.detach().tanh().square()))


@pytest.mark.parametrize("forward", ["top30", "top30:tensor", "rand30", "ef21(top30)"])
def test_with_the_same_indices_gradients_are_those_of_the_masked_function(forward):
    net, masked = model(), model()
    insert_compression(net, after=["a"], forward=forward, backward="same")
    compressor, key = Link(forward).compressor, Link(forward)._message_info(MessageContext()).context
    hidden = masked.a(batch(0))
    mask = torch.zeros(hidden.numel())
    mask[compressor.indices(compressor.encode(hidden.detach(), key), hidden.shape, key)] = 1
    masked[1:](hidden * mask.reshape(hidden.shape)).square().sum().backward()
    net(batch(0)).square().sum().backward()
    for a, b in zip(gradients(net), gradients(masked), strict=True):
        assert torch.equal(a, b)


def test_indices_are_those_of_the_micro_batch():
    """Both forward calls come before both backward ones."""
    together, apart = model(), model()
    insert_compression(together, after=["a"], forward="top20", backward="same", micro_batches=2)
    insert_compression(apart, after=["a"], forward="top20", backward="same")
    losses = [together(batch(n)).square().sum() for n in (0, 1)]
    for loss in losses:
        loss.backward()
    for n in (0, 1):
        apart(batch(n)).square().sum().backward()
    for a, b in zip(gradients(together), gradients(apart), strict=True):
        assert torch.equal(a, b)


class Nest(nn.Module):
    """Puts out whatever it is told to."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.made = make

    def forward(self, x: Tensor) -> Any:
        return self.made(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, None, x + 1),
        lambda x: [x, {"one": x * 2, "more": (x.argmax(1), "text")}],
        lambda x: Pair(x, x - 1),
        lambda x: OrderedDict(x=x, y=x + 1),
    ],
)
def test_nests_keep_their_form_and_their_integers(make):
    net = nn.Sequential(Nest(make))
    points = insert_compression(net, after=["0"], forward="q4:16")
    x = batch(0)
    plain, out = make(x), net(x)
    assert type(out) is type(plain)
    flat, expected = (torch.utils._pytree.tree_flatten(nest) for nest in (out, plain))
    assert flat[1] == expected[1]
    number = 0
    for a, b in zip(flat[0], expected[0], strict=True):
        if isinstance(b, Tensor) and b.is_floating_point():
            link = Link("q4:16")
            assert same(a, parse("q4:16").decode(link.pack(b), torch.empty_like(b))) and not torch.equal(a, b)
            number += 1
        else:
            assert a is b or torch.equal(a, b)
    assert points.link_stats()["0 forward"].messages == number


def test_tensors_of_a_tuple_have_their_own_memory():
    net = nn.Sequential(Nest(lambda x: (x, -x)))
    points = insert_compression(net, after=["0"], forward="ef21(top10)")
    for seed in range(4):
        a, b = net(batch(seed))
        assert torch.equal(a, -b)
    counts = points.state_dict()["0"]["forward"]["sender"]["counts"]
    assert counts == {"0.0": 4, "0.1": 4}


def test_low_precision_models_stay_so():
    net = model().bfloat16()
    points = insert_compression(net, after=["a", "d"], forward="ef(top20)", backward="q4:16")
    out = net(batch(0).bfloat16())
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and all(g.dtype == torch.bfloat16 for g in gradients(net))
    assert points.link_stats()["0 forward"].raw_bytes == 6 * 32 * 2


def test_what_comes_after_may_work_in_place():
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True))
    for options in ({"forward": "q4:16"}, {"backward": "q4:16"}):
        points = insert_compression(net, after=["0"], **options)
        net(batch(0)).sum().backward()
        points.remove()


def test_channels_last_stays_so():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Identity()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)
    insert_compression(net, after=["0"], forward="q4:16")
    assert net(x).is_contiguous(memory_format=torch.channels_last)


def test_each_point_may_have_its_own_compressors():
    net = model()
    points = insert_compression(
        net, after=["a", "d"], forward="q4:16", backward="q8:16", per_point={1: {"forward": None, "backward": "bf16"}}
    )
    net(batch(0)).sum().backward()
    assert set(points.link_stats()) == {"0 forward", "0 backward", "1 backward"}
    assert points.link_stats()["1 backward"].ratio == 2


def test_small_tensors_cross_as_they_are():
    net = model()
    points = insert_compression(net, after=["a", "e"], forward="q1", min_numel=20)
    net(batch(0))
    first, last = points.link_stats().values()
    assert first.ratio > 4 and last.ratio == 1


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["q2:16:dither", "ef21(top10)", "aq(q2:16)"])
def test_evaluation_compresses_and_changes_nothing_of_training(spec):
    def run(evaluate: bool) -> list[Tensor]:
        net = model()
        points = insert_compression(net, after=["a"], forward=spec, backward="ef(q2:16)", micro_batches=2)
        outs = []
        for step in range(4):
            points.set_sample_ids(torch.arange(12))
            for part in batch(step, 12).tensor_split(2):
                outs.append(net(part))
                outs[-1].sum().backward()
            if evaluate:
                with torch.no_grad():
                    first, again = (net(batch(50, 5)) for _ in range(2))
                assert not torch.equal(first, model()(batch(50, 5)))
                assert "dither" in spec or torch.equal(first, again)
        return [*outs, *gradients(net)]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("spec", ["q4:16:dither", "n3:64", "h64(q4:64)", "top10:bf16"])
def test_training_may_follow_inference_mode(spec):
    net = model()
    insert_compression(net, after=["a"], forward=spec, backward=spec)
    with torch.inference_mode():
        first = net(batch(0)).clone()
    net(batch(0)).sum().backward()
    with torch.no_grad():
        assert torch.equal(net(batch(0)), first)


def test_exact_first_steps_go_with_the_same_indices_on_the_way_back():
    net, plain = model(), model()
    points = insert_compression(net, after=["a"], forward="aq(top20, warmup=1)", backward="same")
    points.set_sample_ids(torch.arange(6))
    for each in (net, plain):
        each(batch(0)).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(net), gradients(plain), strict=True))
    net(batch(0)).sum().backward()
    assert points.link_stats()["0 backward"].wire_bytes < 1.3 * 6 * 32 * 4


def test_inference_may_go_without():
    net, plain = model(), model()
    points = insert_compression(net, after=["a"], forward="q2")
    points.inference = False
    with torch.no_grad():
        assert torch.equal(net(batch(0)), plain(batch(0)))
    assert not torch.equal(net(batch(0)), plain(batch(0)))


@pytest.mark.parametrize("name", ["enabled", "inference"])
def test_a_model_that_needs_compression_is_not_evaluated_without_a_warning(name):
    points = insert_compression(model(), after=["a"], forward="top10", backward="q4")
    with pytest.warns(LossWarning, match="usually much worse without"):
        setattr(points, name, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setattr(points, name, False)
        for how in ("q2:64", "ef21(top10)", "ef(rand10)", "bf16"):
            setattr(insert_compression(model(), after=["a"], forward=how), name, False)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_what_is_not_finite_is_passed_on_or_raised():
    net = model()
    insert_compression(net, after=["a"], forward="q4:16")
    bad = batch(0)
    bad[2, 3] = math.nan
    assert net(bad).isnan().any()
    strict = model()
    insert_compression(strict, after=["a"], forward="q4:16", nonfinite="raise")
    with pytest.raises(PolicyError, match="link 0 forward"):
        strict(bad)


def test_ids_are_asked_for_and_checked():
    net = model()
    points = insert_compression(net, after=["a"], forward="aq(q2:16)", micro_batches=2)
    with pytest.raises(PolicyError, match="set_sample_ids"):
        net(batch(0))
    wrong_tensors = torch.ones(4), torch.ones(2, 2, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    for bad in (*wrong_tensors, "abc", None, [1.5], [[1], [2, 3]]):
        with pytest.raises(PolicyError, match="one for each row of the batch"):
            points.set_sample_ids(bad)
    points.set_sample_ids(torch.arange(5))
    with pytest.raises(MismatchError):
        net(batch(0))


def test_names_and_numbers_that_are_not_there():
    for options in (
        {"after": ["z"]},
        {"after": ["a"], "per_point": {1: {}}},
        {"after": ["a"], "per_point": {0: {"up": "q4"}}},
        {"after": ["a"], "forward": "q99"},
        {"after": ["a"], "micro_batches": 0},
        {"after": ["a", "a"], "forward": "q4"},
        {"after": ["a"], "forward": "same"},
        {"after": ["a"], "forward": "q4", "backward": "same"},
        {"after": ["a"], "backward": "ef(same)"},
    ):
        net = model()
        with pytest.raises(PolicyError):
            insert_compression(net, **options)
        assert torch.equal(net(batch(0)), model()(batch(0)))


def test_a_module_is_compressed_once_until_its_points_are_removed():
    net = model()
    points = insert_compression(net, after=["a"], forward="q4")
    with pytest.raises(PolicyError, match="compressed already"):
        insert_compression(net, after=["b", "a"], backward="q4")
    insert_compression(net, after=["b"], forward="q4")
    points.remove()
    insert_compression(net, after=["a"], forward="q4")


def test_messages_name_modules_and_switches_take_flags():
    points = insert_compression(net := model(), after=["a"], forward="q4")
    with pytest.raises(PolicyError, match="expected one of a, b, c, d, e"):
        insert_compression(net, after=["7"])
    for name in ("enabled", "inference"):
        with pytest.raises(PolicyError, match=f"CompressionPoints, {name}: 'no'; expected True or False"):
            setattr(points, name, "no")
        assert getattr(points, name) is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("forward", ["q4:64", "ef21(top10)", "aq(q2:64)"])
def test_a_model_on_a_gpu_trains_with_points(forward):
    net = model().cuda()
    points = insert_compression(net, after=["a", "d"], forward=forward, backward="ef(q4:64)", micro_batches=2)
    first = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(6):
        points.set_sample_ids(torch.arange(6))
        for part in batch(step).cuda().tensor_split(2):
            net(part).square().sum().backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert not torch.equal(first["a.weight"], net.a.weight)
    for pair in points.state_dict().values():
        for way in ("forward", "backward"):
            assert pair[way]["sender"]["counts"] == pair[way]["receiver"]["counts"] == {"0.0": 6, "1.0": 6}
