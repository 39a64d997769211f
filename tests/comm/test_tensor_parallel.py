"""Tensor parallelism in encoded messages: real processes, real gloo groups."""

from __future__ import annotations

import pytest
import torch
from helpers.processes import ranks
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from shrinkpoint.comm import compress_tensor_parallel
from shrinkpoint.errors import PolicyError

START = """
    import copy
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor import parallel
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel, SequenceParallel, parallelize_module)
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint
    from helpers.replica_search import caught, digest, join, leave
    from shrinkpoint.comm import compress_fsdp, compress_tensor_parallel

    class Perceptron(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return self.down(self.up(x).relu())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.token, self.norm, self.inner = nn.Embedding(20, 32), nn.LayerNorm(32), Perceptron()
            self.head, self.again = nn.Linear(32, 20), False

        def forward(self, x):
            x = self.token(x)
            y = self.norm(x)
            x = x + (checkpoint(self.inner, y, use_reentrant=False) if self.again else self.inner(y))
            return self.head(x)

    def whole_plan():
        "Activations between modules are on all ranks."
        return {"inner.up": ColwiseParallel(), "inner.down": RowwiseParallel()}

    def sequence_plan():
        "Activations between modules are split along the sequence, as in torch's tutorial."
        return {
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(use_local_output=True),
            "inner": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "inner.up": ColwiseParallel(),
            "inner.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }

    def module_plan():
        "The perceptron's inputs by name and by place, and its outputs, are redistributed by styles of the module."
        made = {"inner.up": ColwiseParallel(), "inner.down": RowwiseParallel(use_local_output=False)}
        if hasattr(parallel, "PrepareModuleInputOutput"):
            made["inner"] = parallel.PrepareModuleInputOutput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),), output_layouts=(Replicate(),),
                desired_output_layouts=(Shard(1),), use_local_output=False)
        else:
            made["inner"] = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),),
                                                use_local_output=False)
        made["norm"] = PrepareModuleInput(input_kwarg_layouts={}, desired_input_kwarg_layouts={})
        made["head"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),),
                                          use_local_output=True)
        return made

    class Residual(Model):
        "Without the sum after the perceptron, whose output is a DTensor."
        def forward(self, x):
            return self.head(self.inner(self.norm(self.token(x))))

    def built(mesh, plan, spec=None, model=Model, backward="same", **arguments):
        handle, net = None, model()
        if spec is not None or backward != "same":
            handle = compress_tensor_parallel(plan, spec, spec if backward == "same" else backward, **arguments)
            plan = handle.plan
        return parallelize_module(net, mesh, plan), handle

    def batch(step):
        x = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step))
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    def trained(model, steps=3, begin=0, optimizer=None):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)
        for step in range(begin, begin + steps):
            optimizer.zero_grad()
            x, y = batch(step)
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
        return loss.item()

    def bits(model):
        return digest(*(p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()))
"""

TWO = """
    PLANS = {"whole": (whole_plan, Model), "sequence": (sequence_plan, Model), "module": (module_plan, Residual)}

    def of_rank(rank, width, folder):
        reports, mesh = join(rank, width, folder), init_device_mesh("cpu", (width,))
        for name, (plan, net) in PLANS.items():
            own, ours = built(mesh, plan(), model=net)[0], built(mesh, plan(), "exact", net)[0]
            coded, handle = built(mesh, plan(), "q4:64", net)
            losses = [trained(one) for one in (own, ours, coded)]
            reports[name] = {"own": [losses[0], bits(own)], "ours": [losses[1], bits(ours)],
                             "coded": [losses[2], bits(coded)],
                             "stats": {way: one.as_dict() for way, one in handle.link_stats.items()}}

        # one direction alone
        alone = {"forward": {"spec": "q2:64", "backward": None}, "backward": {"spec": None, "backward": "q2:64"}}
        for name, how in alone.items():
            model, handle = built(mesh, whole_plan(), **how)
            trained(model, 1)
            reports[name] = [bits(model), [one.messages for one in handle.link_stats.values()]]

        # one style for one module; a plan for two modules; small tensors
        linear = parallelize_module(nn.Linear(32, 64), mesh, compress_tensor_parallel(ColwiseParallel()).plan)
        reports["one style"] = list(linear(torch.ones(2, 32)).shape)
        handle, first, second = compress_tensor_parallel(whole_plan()), Model(), Model()
        for model in (first, second):
            parallelize_module(model, mesh, handle.plan)
        trained(first), trained(second)
        reports["two models"] = [bits(first), bits(second)]
        model, handle = built(mesh, whole_plan(), "q2:64", min_numel=1 << 20)
        trained(model)
        reports["small"] = [bits(model), handle.link_stats["forward"].messages]

        # given back; and evaluation without compression
        model, handle = built(mesh, whole_plan(), "q2:64")
        handle.detach()
        trained(model)
        reports["detached"] = [bits(model), handle.link_stats["forward"].messages]
        own, (model, handle) = built(mesh, whole_plan())[0], built(mesh, whole_plan(), "q2:64")
        x = batch(0)[0]
        with torch.no_grad():
            reports["evaluation"] = [digest(own(x)), digest(model(x)), digest(model.eval()(x))]
            handle.inference = False
            reports["evaluation"] += [digest(model(x)), digest(model.train()(x))]

        # an activation that is computed again has the same bits
        for spec in ("q4:64:dither", "h64(q4:64)", "rand50"):
            found = []
            for again in (False, True):
                model = built(mesh, whole_plan(), spec)[0]
                model.again = again
                trained(model)
                found.append(bits(model))
            reports[f"again {spec}"] = found

        # compiled; and a gradient of a gradient
        model, handle = built(mesh, whole_plan(), "q4:64")
        model.inner = torch.compile(model.inner, backend="aot_eager")
        reports["compiled"] = [trained(model), [one.messages for one in handle.link_stats.values()]]
        x = torch.ones(2, 32, requires_grad=True)
        [gradient] = torch.autograd.grad(built(mesh, whole_plan(), "q4:64")[0].inner(x).sum(), x, create_graph=True)
        try:
            gradient.sum().backward()
        except RuntimeError as error:
            reports["twice"] = str(error)

        # bfloat16, other shapes, and no gradient of the input
        model = built(mesh, whole_plan(), "q8:64", lambda: Model().bfloat16())[0]
        trained(model)
        reports["bfloat16"] = bits(model)
        rows = parallelize_module(nn.Linear(6, 5), mesh, compress_tensor_parallel(RowwiseParallel(), "q8:64").plan)
        reports["odd"] = [list(rows(torch.ones(*shape, 3)).shape) for shape in ((), (1,), (0,), (3, 5, 7))]

        # uneven sequences are torch's own messages
        model, handle = built(mesh, sequence_plan(), "q2:64")
        own = built(mesh, sequence_plan())[0]
        plan = {"inner": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
                "inner.up": ColwiseParallel(), "inner.down": RowwiseParallel(use_local_output=True)}
        uneven, (model, handle) = built(mesh, plan)[0], built(mesh, plan, "q2:64")
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
        reports["uneven"] = [list(uneven.inner(x).shape), list(model.inner(x).shape)]

        # not finite
        for how in ("pass", "raise"):
            model = built(mesh, whole_plan(), "q8:64", nonfinite=how)[0]
            with torch.no_grad():
                model.inner.down.bias.fill_(float("nan"))
            reports[f"not finite {how}"] = caught(lambda: trained(model, 1))
            if how == "pass":
                reports["nan"] = model.norm.weight.grad.isnan().any().item()

        # ranks that were not set up alike
        def unlike(*hows, **arguments):
            trained(built(mesh, whole_plan(), hows[rank], timeout=300)[0], 1)

        reports["unlike"] = caught(lambda: unlike("q4:64", "q8:64"))
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(START + TWO, 2, tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize("plan", ["whole", "sequence", "module"])
def test_exact_messages_are_what_torch_sends(reports, plan):
    for report in reports:
        assert report[plan]["ours"] == report[plan]["own"]


@pytest.mark.parametrize("plan", ["whole", "sequence", "module"])
def test_what_is_replicated_has_the_same_bits_on_every_rank(reports, plan):
    assert reports[0][plan]["coded"] == reports[1][plan]["coded"]
    assert reports[0][plan]["coded"] != reports[0][plan]["own"]
    assert reports[0][plan]["coded"][0] == pytest.approx(reports[0][plan]["own"][0], rel=0.03)


@pytest.mark.parametrize("plan", ["whole", "sequence", "module"])
def test_both_directions_are_compressed(reports, plan):
    for report in reports:
        for stats in report[plan]["stats"].values():
            assert stats["messages"] > 0 and stats["ratio"] > 6 and 0 < stats["relative_error"] < 0.2


def test_a_direction_alone_is_compressed(reports):
    assert reports[0]["forward"][1][1] == 0 < reports[0]["forward"][1][0]
    assert reports[0]["backward"][1][0] == 0 < reports[0]["backward"][1][1]
    assert (
        reports[0]["forward"][0] == reports[1]["forward"][0] != reports[0]["backward"][0] == reports[1]["backward"][0]
    )


def test_a_plan_is_one_style_or_serves_several_models(reports):
    assert reports[0]["one style"] == [2, 32]
    assert len({one for report in reports for one in report["two models"]}) == 1


def test_small_tensors_and_a_detached_model_are_torchs_own_messages(reports):
    for report in reports:
        for name in ("small", "detached"):
            assert report[name] == [report["whole"]["own"][1], 0]


def test_evaluation_is_compressed_unless_inference_is_off(reports):
    own, trains, evaluates, without, again = reports[0]["evaluation"]
    assert trains == evaluates == again != own == without


@pytest.mark.parametrize("spec", ["q4:64:dither", "h64(q4:64)", "rand50"])
def test_an_activation_that_is_computed_again_has_the_same_bits(reports, spec):
    assert len({one for report in reports for one in report[f"again {spec}"]}) == 1


def test_a_compiled_module_sends_what_it_sends_otherwise(reports):
    loss, messages = reports[0]["compiled"]
    stats = reports[0]["whole"]["stats"]
    assert loss == pytest.approx(reports[0]["whole"]["coded"][0], rel=1e-4)
    assert messages == [stats["forward"]["messages"], stats["backward"]["messages"]]


def test_second_derivatives_are_an_error_on_every_rank(reports):
    """torch leaves them out of gradients without a word."""
    for report in reports:
        assert "once_differentiable" in report["twice"]


def test_tensors_of_any_shape_and_dtype(reports):
    assert reports[0]["bfloat16"] == reports[1]["bfloat16"]
    assert reports[0]["odd"] == [[5], [1, 5], [0, 5], [3, 5, 7, 5]]
    assert reports[0]["uneven"][0] == reports[0]["uneven"][1]


def test_what_is_not_finite_stays_so_or_is_an_error_on_every_rank(reports):
    for report in reports:
        assert report["not finite pass"][0] == "none" and report["nan"]
        kind, text = report["not finite raise"]
        assert kind == "PolicyError" and "inner.down 1 forward" in text and "not finite" in text


def test_ranks_that_are_not_configured_alike_all_get_an_error(reports):
    for report in reports:
        kind, text = report["unlike"]
        assert kind == "MismatchError" and "q4:64" in text and "q8:64" in text


ABSENT = """
    def of_rank(rank, width, folder):
        reports, mesh = join(rank, width, folder), init_device_mesh("cpu", (width,))
        model = built(mesh, whole_plan(), "q4:64" if rank == 0 else None, timeout=3)[0]
        if rank == 0:
            reports["found"] = caught(lambda: trained(model, 1))
        leave(reports, rank, folder)
"""


def test_a_rank_that_is_not_compressed_is_named(tmp_path):
    kind, text = ranks(START + ABSENT, 2, tmp_path)[0]["found"]
    assert kind == "MismatchError" and "rank 1 published no configuration within 3 s" in text


FOUR = """
    class Apart(Model):
        "All parameters of the perceptron are split."
        def __init__(self):
            super().__init__()
            self.inner.down = nn.Linear(64, 32, bias=False)

    def sharded(mesh, spec, fsdp, net=Apart):
        model, handle = built(mesh["tp"], whole_plan(), spec, net)
        for part in (model.inner, model):
            fully_shard(part, mesh=mesh["dp"])
        fsdp and compress_fsdp(model, *fsdp)
        return model, handle

    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name, spec, fsdp in (("torch", None, None), ("exact", "exact", None), ("split", "q8:64", None),
                                 ("both", "q8:64", ("q8:64", "q4:64"))):
            model, handle = sharded(mesh, spec, fsdp)
            reports[name] = [trained(model, 12), bits(model)]
        reports["messages"] = [one.messages for one in handle.link_stats.values()]
        reports["mixed"] = caught(lambda: sharded(mesh, "q8:64", ("q8:64", "q4:64"), Model))
        sharded(mesh, "q8:64", ("exact", None), Model)
        four = init_device_mesh("cpu", (4,))
        for name, plan in (("whole", whole_plan), ("sequence", sequence_plan)):
            model = built(four, plan(), "q8:64")[0]
            reports[name] = [trained(model), bits(model)]
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return ranks(START + FOUR, 4, tmp_path_factory.mktemp("mesh"))


def test_it_composes_with_shards_on_a_mesh_of_two_dimensions(four):
    for report in four:
        assert report["exact"] == report["torch"]
        for name in ("split", "both"):
            assert report[name] == four[0][name]
            assert report[name][0] == pytest.approx(report["torch"][0], rel=0.05)
        assert min(report["messages"]) > 0


def test_shards_in_which_replicated_parameters_would_drift_are_refused(four):
    """A bias that all ranks of a split have, beside weights that are split."""
    for report in four:
        kind, text = report["mixed"]
        assert kind == "PolicyError" and "compress_fsdp, inner" in text and "norms by themselves" in text


@pytest.mark.parametrize("plan", ["whole", "sequence"])
def test_four_ranks_have_the_same_bits(four, plan):
    assert all(report[plan] == four[0][plan] for report in four)


class _Style(ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"forward": "ef(q4:64)"}, "Leave out the feedback"),
        ({"backward": "aq(q4:64)"}, "feedback by sample id"),
        ({"forward": "lowrank4"}, "a low rank"),
        ({"forward": "q44"}, "bits"),
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"min_numel": -1}, "min_numel"),
        ({"timeout": 0}, "timeout"),
        ({"plan": {"up": _Style()}}, "_Style"),
        ({"plan": {"up": None}}, "a plan of\\s+their own"),
        ({"plan": torch.nn.Linear(2, 2)}, "a style of torch"),
    ],
)
def test_what_cannot_be_compressed_is_refused(arguments, words):
    with pytest.raises(PolicyError, match=words):
        compress_tensor_parallel(**{"plan": {"up": ColwiseParallel()}, **arguments})
