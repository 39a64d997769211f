"""Sharded weights and their gradients in encoded messages: real processes, a real gloo group."""

from __future__ import annotations

import pytest
import torch
from helpers.processes import ranks

from shrinkpoint.comm import compress_fsdp
from shrinkpoint.errors import PolicyError

START = """
    import math
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.functional import mse_loss
    from helpers.replica_search import batch, caught, digest, drawn, join, leave, plain_net
    from shrinkpoint.comm import compress_fsdp


    def sharded(mesh, model=None, **arguments):
        model = model or plain_net(width=47)  # uneven: shards are filled up
        for one in (model[0], model[2], model):
            fully_shard(one, mesh=mesh, **arguments)
        return model


    def steps(model, rank, which, optimizer=None, parts=1):
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in which:
            optimizer.zero_grad()
            for part in range(parts):
                model.set_requires_gradient_sync(part == parts - 1)
                x, y = batch(parts * step + part, rank)
                loss = mse_loss(model(x), y)
                loss.backward()
            optimizer.step()
        return loss.item()


    def bits(model):
        return digest(*(one.full_tensor() for one in model.parameters()))


    def gradients(mesh, how, prepare, rank):
        "All gradients after one step, by torch's own communication (how is None) or ours."
        model = sharded(mesh)
        how and compress_fsdp(model, how, how)
        prepare(model)
        x, y = batch(0, rank)
        mse_loss(model(x), y).backward()
        return torch.cat([one.grad.full_tensor().flatten() for one in model.parameters()])
"""

RANKS = """
    def of_rank(rank, width, folder):
        reports, mesh = join(rank, width, folder), init_device_mesh("cpu", (width,))

        # with exact messages all is as it was
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for name, arguments, parts in (("plain", {}, 1), ("parts", {}, 2), ("bf16", {"mp_policy": bf16}, 1),
                                       ("kept", {"reshard_after_forward": False}, 1)):
            own, ours = sharded(mesh, **arguments), sharded(mesh, **arguments)
            compress_fsdp(ours, "exact", "exact")
            for model in (own, ours):
                steps(model, rank, range(4), parts=parts)
            reports[name] = bits(own) == bits(ours)

        # what the reduction asks for
        prepares = {
            "avg": lambda model: None,
            "sum": lambda model: model.set_force_sum_reduction_for_comms(True),
            "factor": lambda model: [one.set_gradient_divide_factor(5.0) for one in (model, model[0], model[2])],
            "forced factor": lambda model: [(one.set_gradient_divide_factor(5.0),
                one.set_force_sum_reduction_for_comms(True)) for one in (model, model[0], model[2])],
        }
        found = {name: gradients(mesh, "exact", prepare, rank) for name, prepare in prepares.items()}
        own = gradients(mesh, None, prepares["avg"], rank)
        reports["reduced"] = [torch.equal(found["avg"], own), torch.allclose(found["sum"], own),
            torch.allclose(found["factor"] * 5 / width, own), torch.allclose(found["forced factor"] * 5 / width, own)]

        # lossy messages: near, and the same weights on every rank
        for how in (None, "q4:64", "ef(q3:64)"):
            model = sharded(mesh)
            handle = compress_fsdp(model, how and "q8:64", how)
            reports[f"loss {how}"] = steps(model, rank, range(30))
            for one in (model, model[0], model[2]):
                one.unshard()
            reports[f"weights {how}"] = digest(*model.parameters())
            for one in (model, model[0], model[2]):
                one.reshard()
            reports[f"bytes {how}"] = [one.ratio for one in handle.link_stats.values()]

        # weights of two dtypes come as bytes
        mixed = []
        for how in (None, "q2"):
            model = plain_net(width=48)
            model.register_parameter("frozen", nn.Parameter(drawn(10, seed=1).half(), requires_grad=False))
            fully_shard(model, mesh=mesh)
            handle = how and compress_fsdp(model, how, None)
            steps(model, rank, range(2))
            mixed.append(digest(*(one.full_tensor() for one in model.parameters())))
        reports["mixed"] = [mixed[0] == mixed[1], handle.link_stats["all-gather"].messages]

        # small shards; work that is waited for later
        own, ours = sharded(mesh), sharded(mesh)
        compress_fsdp(ours, "q2", "q2", min_numel=1 << 20)
        reports["small"] = [steps(own, rank, range(2)) == steps(ours, rank, range(2)), bits(own) == bits(ours)]
        model, x = sharded(mesh), batch(0, 0)[0]
        compress_fsdp(model, "q4:64", "q4:64")
        model(x)
        now = model(x)
        for one in (model, model[0], model[2]):
            one.reshard()
        works = [one.unshard(async_op=True) for one in (model, model[0], model[2])]
        for work in works:
            work.wait()
        reports["async"] = torch.equal(now, model(x))

        # given back
        model = sharded(mesh)
        groups = [part for one in (model, model[0], model[2]) for part in one._get_fsdp_state()._fsdp_param_groups]
        before = [(part._all_gather_comm, part._reduce_scatter_comm) for part in groups]
        handle = compress_fsdp(model, "q4", "q4")
        steps(model, rank, range(1))
        sent = handle.link_stats["all-gather"].messages
        handle.detach()
        steps(model, rank, range(1))
        reports["detached"] = [before == [(part._all_gather_comm, part._reduce_scatter_comm) for part in groups],
                            sent > 0, handle.link_stats["all-gather"].messages == sent]

        # ranks that were not set up alike, and what is not finite
        def unlike(*hows):
            model = sharded(mesh)
            compress_fsdp(model, *hows[rank], timeout=300)
            steps(model, rank, range(1))

        reports["unlike"] = [caught(lambda: unlike(("q4", "q4"), ("q8", "q4"))),
                          caught(lambda: unlike(("q4", "q4"), ("q4", "ef(q4)")))]

        def overflown(nonfinite):
            model = sharded(mesh)
            compress_fsdp(model, "q8:64", "q4:64", nonfinite=nonfinite)
            x, y = batch(0, rank)
            (mse_loss(model(x), y) * (math.inf if rank == 0 else 1.0)).backward()
            reports["finite"] = [bool(one.grad.full_tensor().isfinite().all()) for one in model.parameters()]

        reports["passed"], reports["raised"] = caught(lambda: overflown("pass")), caught(lambda: overflown("raise"))

        # a state
        for how in ("ef(q2:32:dither)", "ef21(q2:32)", "q4:64"):
            weights = "q4:64:dither" if how == "q4:64" else "q8:64"
            model = sharded(mesh)
            optimizer, handle = torch.optim.Adam(model.parameters(), lr=3e-3), compress_fsdp(model, weights, how)
            steps(model, rank, range(4), optimizer)
            kept = [one.full_tensor() for one in model.parameters()], optimizer.state_dict(), handle.state_dict()
            again = sharded(mesh, put(plain_net(width=47), kept[0]))
            second, other = torch.optim.Adam(again.parameters(), lr=3e-3), compress_fsdp(again, weights, how)
            second.load_state_dict(kept[1])
            other.load_state_dict(kept[2])
            steps(again, rank, range(4, 8), second)  # the first stands still: what was saved are its own tensors
            whole = sharded(mesh)
            compress_fsdp(whole, weights, how)
            steps(whole, rank, range(8))
            reports[how] = bits(whole) == bits(again)
            saved = [None] * width
            dist.all_gather_object(saved, kept[2])
            reports[f"{how} of another rank"] = caught(lambda: other.load_state_dict(saved[rank - 1]))
        states = (None, [], {**kept[2], "reduce_scatter": None}, {**kept[2], "all_gather": {"": None}}, {"words": {}})
        reports["broken"] = [caught(lambda: other.load_state_dict(state)) for state in states]
        reports["foreign"] = caught(lambda: compress_fsdp(sharded(mesh), "q8", "q4").load_state_dict(kept[2]))

        reports["refused"] = [caught(lambda: compress_fsdp(sharded(mesh), *hows)) for hows in
                           (("ef(q8)", "q4"), ("same", "q4"), ("q8", "aq(q4)"), ("q8", "q99"))]
        reports["refused"] += [caught(lambda: compress_fsdp(sharded(mesh), nonfinite="skip"))]
        reports["refused"] += [caught(lambda: compress_fsdp(again, None, "q4"))]

        # complex gradients cross as they are
        complex_gradients = []
        x = torch.randn(4, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(rank))
        for how in (None, "q2"):
            torch.manual_seed(0)
            model = nn.Linear(8, 8, bias=False, dtype=torch.complex64)
            fully_shard(model, mesh=mesh)
            how and compress_fsdp(model, "q8:64", how)
            model(x).abs().sum().backward()
            complex_gradients.append(model.weight.grad.full_tensor())
        size = complex_gradients[0].imag.abs().sum()
        reports["complex"] = torch.allclose(*complex_gradients) and bool(size > 1)
        leave(reports, rank, folder)


    def put(model, values):
        with torch.no_grad():
            for one, value in zip(model.parameters(), values):
                one.copy_(value)
        return model
"""

REPLICATED = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        own, ours, lossy = sharded(mesh), sharded(mesh), sharded(mesh)
        compress_fsdp(ours, "exact", "exact")
        handle = compress_fsdp(lossy, "q8:64", "ef(q4:64)")
        reports["losses"] = [steps(model, rank, range(10)) for model in (own, ours, lossy)]
        reports["bits"] = [bits(model) for model in (own, ours, lossy)]
        reports["messages"] = handle.link_stats["reduce-scatter"].messages

        # two levels: exact between shards, encoded between replicas
        cases = (("plain", {}, 1), ("parts", {}, 2), ("kept", {"reshard_after_forward": False}, 1))
        for name, arguments, parts in cases:
            plain, exact = sharded(mesh, **arguments), sharded(mesh, **arguments)
            compress_fsdp(exact, None, None, all_reduce="exact")
            for model in (plain, exact):
                steps(model, rank, range(4), parts=parts)
            reports[f"replicas {name}"] = [[one.full_tensor().tolist() for one in model.parameters()]
                                           for model in (plain, exact)]
        def set_factor(model):
            for one in (model, model[0], model[2]):
                one.set_gradient_divide_factor(5.0)
                one.set_force_sum_reduction_for_comms(True)  # gloo knows no factors

        def of_replicas(prepare, **arguments):
            model = sharded(mesh)
            arguments and compress_fsdp(model, None, None, **arguments)
            prepare(model)
            x, y = batch(0, rank)
            mse_loss(model(x), y).backward()
            return torch.cat([one.grad.full_tensor().flatten() for one in model.parameters()])

        reports["factors"] = [torch.allclose(of_replicas(prepare), of_replicas(prepare, all_reduce="exact"))
                              for prepare in (lambda model: None, set_factor)]
        plain, late = sharded(mesh), sharded(mesh)
        handle, reports["late"] = compress_fsdp(late, None, None, all_reduce="exact"), []
        for part in range(3):
            for model in (plain, late):
                model.set_requires_all_reduce(part == 2)
                x, y = batch(part, rank)
                mse_loss(model(x), y).backward()
            reports["late"].append(handle.link_stats["first hop"].messages)
        reports["late"] += [torch.allclose(one.grad.full_tensor(), other.grad.full_tensor())
                            for one, other in zip(plain.parameters(), late.parameters())]
        small = sharded(mesh)
        handle = compress_fsdp(small, None, None, all_reduce="q2", min_numel=1 << 20)
        steps(small, rank, range(2))
        own = sharded(mesh)
        steps(own, rank, range(2))
        reports["small"] = [[one.full_tensor().tolist() for one in model.parameters()] for model in (own, small)]

        model = sharded(mesh)
        optimizer, handle = torch.optim.Adam(model.parameters(), lr=3e-3), None
        handle = compress_fsdp(model, None, None, all_reduce="ef(q3:64)")
        steps(model, rank, range(5), optimizer)
        kept = [one.full_tensor() for one in model.parameters()], optimizer.state_dict(), handle.state_dict()
        again = sharded(mesh, put(plain_net(width=47), kept[0]))
        second, other = torch.optim.Adam(again.parameters(), lr=3e-3), compress_fsdp(
            again, None, None, all_reduce="ef(q3:64)")
        second.load_state_dict(kept[1])
        other.load_state_dict(kept[2])
        reports["loss of two levels"] = steps(again, rank, range(5, 10), second)
        whole = sharded(mesh)
        handle = compress_fsdp(whole, None, None, all_reduce="ef(q3:64)")
        steps(whole, rank, range(10))
        reports["two levels"] = bits(whole)
        reports["resumed"] = bits(again) == bits(whole)
        reports["ratios"] = [handle.link_stats[hop].ratio for hop in ("first hop", "second hop")]
        reports["messages of two levels"] = [one.messages for one in handle.link_stats.values()]
        handle.detach()
        before = handle.link_stats["first hop"].messages
        steps(whole, rank, range(1))
        reports["given back"] = [handle.link_stats["first hop"].messages == before, bits(whole)]

        # one replica was set up otherwise; one overflows, and its shard is an error on all
        def unlike():
            model = sharded(mesh)
            compress_fsdp(model, None, None, all_reduce=["q4", "q8"][rank // 2], timeout=300)
            steps(model, rank, range(1))

        def overflown():
            model = sharded(mesh)
            compress_fsdp(model, None, "q4:64", all_reduce="q4:64", nonfinite="raise")
            x, y = batch(0, rank)
            (mse_loss(model(x), y) * (math.inf if rank == 0 else 1.0)).backward()

        def hooked():
            model = sharded(mesh)
            model.set_all_reduce_hook(lambda shard: None)
            compress_fsdp(model, None, None, all_reduce="q4:64")

        flat = init_device_mesh("cpu", (4,))
        reports["refused"] = [caught(unlike), caught(overflown), caught(hooked),
                              caught(lambda: compress_fsdp(sharded(flat), all_reduce="q4:64")),
                              caught(lambda: compress_fsdp(sharded(mesh), all_reduce="q99"))]
        leave(reports, rank, folder)


    def put(model, values):
        with torch.no_grad():
            for one, value in zip(model.parameters(), values):
                one.copy_(value)
        return model
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(START + RANKS, 2, tmp_path_factory.mktemp("group"))


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return ranks(START + REPLICATED, 4, tmp_path_factory.mktemp("replicated"))


@pytest.mark.parametrize("what", ["plain", "parts", "bf16", "kept"])
def test_exact_messages_give_what_torch_gives(reports, what):
    assert all(report[what] for report in reports)


def test_averages_sums_and_factors_are_what_was_asked_for(reports):
    assert all(report["reduced"] == [True] * 4 for report in reports)


@pytest.mark.parametrize("spec", ["q4:64", "ef(q3:64)"])
def test_all_ranks_compute_with_the_same_weights_and_learn_as_without_compression(reports, spec):
    assert reports[0][f"weights {spec}"] == reports[1][f"weights {spec}"]
    mean, plain = (sum(report[f"loss {key}"] for report in reports) / 2 for key in (spec, None))
    assert mean < 1.15 * plain
    gathered, scattered = reports[0][f"bytes {spec}"]
    assert gathered > 3.5
    assert scattered > 6


def test_weights_of_several_dtypes_and_small_ones_cross_as_they_are(reports):
    assert all((report["mixed"], report["small"]) == ([True, 0], [True, True]) for report in reports)


def test_work_that_is_waited_for_later_gives_the_same_weights(reports):
    assert all(report["async"] for report in reports)


def test_torch_gets_its_own_communication_back(reports):
    assert all(report["detached"] == [True, True, True] for report in reports)


def test_ranks_set_up_otherwise_are_an_error_on_all(reports):
    for report in reports:
        assert [kind for kind, _ in report["unlike"]] == ["MismatchError"] * 2
    assert "q8" in reports[0]["unlike"][0][1]


def test_gradients_that_are_not_finite_stay_so_or_are_an_error_on_all(reports):
    assert all((report["passed"][0], report["raised"][0]) == ("none", "PolicyError") for report in reports)
    assert all(report["finite"] == [False] * 6 for report in reports)


@pytest.mark.parametrize("spec", ["ef(q2:32:dither)", "ef21(q2:32)", "q4:64"])
def test_a_restored_run_continues_as_the_uninterrupted_one(reports, spec):
    assert all(report[spec] for report in reports)
    assert all(report["foreign"][0] == "MismatchError" for report in reports)


def test_the_feedback_of_another_rank_is_an_error_and_so_is_what_is_no_state(reports):
    for report in reports:
        for spec in ("ef(q2:32:dither)", "ef21(q2:32)"):
            assert report[f"{spec} of another rank"][0] == "MismatchError"
        assert report["q4:64 of another rank"][0] == "none"  # it remembers nothing
        assert [kind for kind, _ in report["broken"]] == ["PolicyError"] * 2 + ["MismatchError"] * 3


def test_complex_gradients_cross_as_they_are(reports):
    assert all(report["complex"] for report in reports)


def test_what_cannot_be_compressed_is_refused(reports):
    assert all([kind for kind, _ in report["refused"]] == ["PolicyError"] * 6 for report in reports)
    assert all("detach()" in report["refused"][5][1] for report in reports)
    with pytest.raises(PolicyError, match="fully_shard"):
        compress_fsdp(torch.nn.Linear(2, 2))


def test_replicated_shards_stay_equal(replicated):
    assert all(report["bits"] == replicated[0]["bits"] for report in replicated)
    own, exact, lossy = (sum(report["losses"][index] for report in replicated) for index in range(3))
    assert exact == pytest.approx(own, rel=1e-5)
    assert lossy < 1.1 * own
    assert all(report["messages"] == 30 for report in replicated)


@pytest.mark.parametrize("how", ["replicas plain", "replicas parts", "replicas kept", "small"])
def test_exact_messages_between_replicas_give_what_torch_gives(replicated, how):
    for report in replicated:
        own, ours = (torch.cat([torch.tensor(one).flatten() for one in model]) for model in report[how])
        assert torch.allclose(own, ours, rtol=1e-4, atol=1e-6)


def test_replicas_exchange_nothing_before_the_last_of_several_backward_passes(replicated):
    for report in replicated:
        assert report["late"][:3] == [0, 0, 3] and all(report["late"][3:])


def test_averages_of_replicas_are_divided_by_what_was_asked_for(replicated):
    assert all(report["factors"] == [True, True] for report in replicated)


def test_two_levels_end_with_the_same_weights_everywhere_and_learn(replicated):
    assert len({report["two levels"] for report in replicated}) == 1
    own, lossy = (
        sum(loss) for loss in zip(*((r["losses"][0], r["loss of two levels"]) for r in replicated), strict=True)
    )
    assert lossy < 1.1 * own
    assert all(min(report["ratios"]) > 5 for report in replicated)
    assert all(report["messages of two levels"] == [0, 0, 30, 30] for report in replicated)


def test_two_levels_resume_bit_for_bit_and_give_torch_its_own_all_reduce_back(replicated):
    assert all(report["resumed"] for report in replicated)
    assert all(report["given back"] == [True, replicated[0]["given back"][1]] for report in replicated)


def test_replicas_set_up_otherwise_overflowing_or_absent_are_an_error_on_all(replicated):
    kinds = ["MismatchError", "PolicyError", "PolicyError", "PolicyError", "PolicyError"]
    assert all([kind for kind, _ in report["refused"]] == kinds for report in replicated)
    assert "HSDP" in replicated[0]["refused"][3][1]
