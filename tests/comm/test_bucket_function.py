"""Functions that change gradients before they are compressed, and models that have a hook already."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

PROGRAM = """
    import warnings
    from functools import partial
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.nn.parallel.distributed import _MixedPrecision
    from helpers.replica_search import batch, caught, digest, join, leave, plain_net
    from shrinkpoint.comm import compress_ddp

    def gradients(rank, before=None, hook=None, spec="exact", steps=3, **arguments):
        model = DDP(plain_net(), bucket_cap_mb=0.005, **arguments)
        if hook is None:
            compress_ddp(model, spec, before=before, segment_numel=700)
        elif hook != "torch":
            model.register_comm_hook(None, hook)
        for step in range(steps):
            model.zero_grad()
            x, y = batch(step, rank)
            mse_loss(model(x), y).backward()
        return [p.grad.clone() for p in model.parameters()]

    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)

        # what it does, in each of the ways that it may
        own = gradients(rank, hook="torch")
        half = digest(*(0.5 * gradient for gradient in own))

        def later(bucket):
            done = torch.futures.Future()
            done.set_result(0.5 * bucket.buffer())
            return done

        ways = {
            "in a buffer": lambda bucket: bucket.set_buffer(0.5 * bucket.buffer()),
            "a tensor": lambda bucket: 0.5 * bucket.buffer(),
            "of another dtype": lambda bucket: 0.5 * bucket.buffer().double(),
            "a future": later,
            "a list": lambda bucket: [0.5 * bucket.buffer()],
        }
        ways["in place"] = lambda bucket: None if bucket.buffer().mul_(0.5) is not None else None
        for name, way in ways.items():
            reports[name] = digest(*gradients(rank, before=way)) == half
        reports["nothing"] = digest(*gradients(rank, before=lambda bucket: None)) == digest(*own)

        # torch's hooks: their averages are the same on all ranks, and so are those of our exact messages
        for name, hook in (("fp16", fp16_compress_hook), ("allreduce", allreduce_hook)):
            ours = digest(*gradients(rank, before=partial(hook, None)))
            reports[name] = ours == digest(*gradients(rank, hook=hook))

        # a function of one rank changes the average on all
        alone = gradients(rank, before=(lambda bucket: bucket.buffer().zero_()) if rank else None, spec="q8:64")
        reports["alone"] = digest(*alone)
        first = gradients(rank, before=lambda bucket: bucket.buffer().mul_(rank == 0), spec="q8:64")
        reports["first"] = digest(*first)

        # every parameter once a step, with the local gradient
        seen = []
        local = plain_net()
        x, y = batch(0, rank)
        mse_loss(local(x), y).backward()

        def note(bucket):
            seen.extend((p, gradient.clone()) for p, gradient in zip(bucket.parameters(), bucket.gradients()))

        model = DDP(plain_net(), bucket_cap_mb=0.005)
        compress_ddp(model, "q4:64", before=note)
        mse_loss(model(x), y).backward()
        expected = {id(p): q.grad for p, q in zip(model.parameters(), local.parameters())}
        reports["seen"] = [len(seen) == len(expected) == len({id(p) for p, _ in seen}),
                           all(torch.equal(gradient, expected[id(p)]) for p, gradient in seen)]

        # what it must not return
        for name, result in (("shape", torch.zeros(3)), ("kind", "gradients"), ("two", [torch.zeros(2)] * 2)):
            reports[name] = caught(lambda: gradients(rank, before=lambda bucket: result))
        reports["no function"] = caught(lambda: compress_ddp(DDP(plain_net()), before="fp16"))

        # its own error
        def broken(bucket):
            raise ZeroDivisionError("of the user")
        try:
            gradients(rank, before=broken)
        except ZeroDivisionError as error:
            reports["own"] = str(error)

        # models with a hook
        taken = [DDP(plain_net()) for _ in range(3)]
        taken[0].register_comm_hook(None, fp16_compress_hook)
        taken[1]._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        compress_ddp(taken[2])
        reports["taken"] = [caught(lambda: compress_ddp(model)) for model in taken]
        try:
            taken[2].register_comm_hook(None, fp16_compress_hook)
        except RuntimeError as error:
            reports["after"] = str(error)
        half = _MixedPrecision(param_dtype=torch.bfloat16)
        reports["mixed"] = caught(lambda: compress_ddp(DDP(plain_net(), mixed_precision=half)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own scripts
            from torch.distributed.optim import _apply_optimizer_in_backward
        net = plain_net()
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        reports["in backward"] = caught(lambda: compress_ddp(DDP(net)))
        x, y = batch(0, rank)
        mse_loss(taken[0](x), y).backward()  # a refused call changes nothing
        reports["as before"] = digest(*(p.grad for p in taken[0].parameters())) == digest(
            *gradients(rank, hook=fp16_compress_hook, steps=1))
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(PROGRAM, 2, tmp_path_factory.mktemp("before"))


WAYS = ("in place", "in a buffer", "a tensor", "of another dtype", "a future", "a list", "nothing")


@pytest.mark.parametrize("way", WAYS)
def test_a_function_changes_what_is_sent(reports, way):
    assert all(report[way] for report in reports)


@pytest.mark.parametrize("hook", ["fp16", "allreduce"])
def test_hooks_of_torch_run_first(reports, hook):
    assert all(report[hook] for report in reports)


def test_what_one_rank_does_reaches_the_average_of_all(reports):
    assert reports[0]["alone"] == reports[1]["alone"] == reports[0]["first"] == reports[1]["first"]


def test_it_sees_each_local_gradient_once_a_step(reports):
    assert all(report["seen"] == [True, True] for report in reports)


@pytest.mark.parametrize("result", ["shape", "kind", "two", "no function"])
def test_what_is_no_gradient_is_refused(reports, result):
    for report in reports:
        kind, text = report[result]
        assert kind == "PolicyError" and "before" in text


def test_its_own_error_ends_the_backward_pass(reports):
    assert all(report["own"] == "of the user" for report in reports)


def test_a_model_with_a_hook_is_refused_by_its_name_and_left_as_it_is(reports):
    for report in reports:
        names = ("fp16_compress_hook", "FP16_COMPRESS", "compress_ddp")
        for (kind, text), name in zip(report["taken"], names, strict=True):
            assert kind == "PolicyError" and f"hook {name}" in text.replace("BuiltinCommHookType.", "")
        assert "only be called once" in report["after"]
        assert report["as before"]


def test_hooks_that_torch_adds_itself_are_named_by_what_asks_for_them(reports):
    for report in reports:
        assert [report[case][0] for case in ("mixed", "in backward")] == ["PolicyError"] * 2
        assert "Leave out mixed_precision= of DistributedDataParallel, and use torch.autocast" in report["mixed"][1]
        assert "optimizers in the backward pass" in report["in backward"][1]
