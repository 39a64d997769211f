"""Gradients of replicas in encoded messages: real processes, a real gloo group."""

from __future__ import annotations

import pytest
import torch
from helpers.processes import ranks

from shrinkpoint.comm import compress_ddp
from shrinkpoint.comm.background_allreduce import MAX_IN_FLIGHT
from shrinkpoint.errors import PolicyError

SAVED = ("q4:64", "q2:32:dither", "top10", "ef(q2:32)", "ef21(q2:32)")

START = '''
    import contextlib, copy, gc, math, time, weakref
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy, mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from helpers.replica_search import Net, batch, bits, caught, digest, drawn, images, join, leave, plain_net
    from shrinkpoint.comm import compress_ddp


    def trained(how, rank, steps, *, begin=0, state=None, group=None, **arguments):
        """A model that was trained, what compressed it, and the optimizer.

        DDP orders its buckets anew after the first step; segments are many, small, and go across parameters.
        """
        arguments = {"segment_numel": 200} | arguments
        model = DDP(plain_net(), process_group=group, bucket_cap_mb=0.005)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        replicas = how and compress_ddp(model, how, **arguments)
        if state:
            model.load_state_dict(state[0]), optimizer.load_state_dict(state[1])
            state[2] and replicas.load_state_dict(state[2])
        losses = []
        for step in range(begin, begin + steps):
            x, y = batch(step, rank)
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return model, replicas, optimizer, losses

'''

LONG = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for how in (None, "q4:64", "ef(q3:32:dither)"):
            model = DDP(Net().to(memory_format=torch.channels_last), bucket_cap_mb=0.02, find_unused_parameters=True,
                        gradient_as_bucket_view=how != "q4:64")
            replicas = how and compress_ddp(model, how, segment_numel=1500)
            optimizer, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
            for step in range(40):
                optimizer.zero_grad()
                for part in range(step % 2, 2):  # in every other step, a first one that only adds up
                    with model.no_sync() if part == 0 else contextlib.nullcontext():
                        x, y = images(2 * step + part, rank)
                        # in every third step, and on one rank only, a branch has no gradient
                        loss = cross_entropy(model(x, step + (rank == 0)), y)
                        loss.backward()
                losses.append(float(loss))
                optimizer.step()
            reports[str(how)] = [bits(model), sum(losses[-10:]) / 10, losses[0], model.module.never.weight.grad is None]
        reports["segments"] = len(replicas.state_dict()["hops"]["first"])

        ends = dist.new_group([0, 2])
        if rank != 1:
            model, replicas, _, losses = trained("q4:64", rank, 8, group=ends)
            reports["ends"] = [bits(model), {name: one.wire_bytes for name, one in replicas.link_stats.items()}]
        single = [dist.new_group([of]) for of in range(width)][rank]
        model, replicas, _, _ = trained("q2", rank, 3, group=single)
        reports["single"] = [bits(model) == bits(trained(None, rank, 3, group=single)[0]),
                          replicas.link_stats["first hop"].messages]
        leave(reports, rank, folder)
"""

SHORT = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        reports["own"] = bits(trained(None, rank, 6)[0])
        reports["exact"] = bits(trained("exact", rank, 6)[0])
        reports["small"] = bits(trained("q2", rank, 6, min_numel=1 << 20)[0])

        # ranks that were not set up alike
        hows = [("q4:64", "q8:64"), ("q4:64", "ef(q4:64)")]
        reports["differ"] = [caught(lambda: trained(pair[rank], rank, 1)) for pair in hows]
        reports["differ"] += [caught(lambda: trained("q4", rank, 1, average_compressor=("q8", None)[rank]))]
        other = dist.new_group([0, 1])
        if rank == 0:
            reports["absent"] = caught(lambda: trained("q4", rank, 1, group=other, timeout=0.3))
        else:
            DDP(plain_net(), process_group=other, bucket_cap_mb=0.005)  # and nothing more: it never says a word

        # a gradient that is not finite
        model, _, optimizer, _ = trained("q4:64", rank, 2)
        scaler, before = torch.amp.GradScaler("cpu", init_scale=4.0), bits(model)
        x, y = batch(0, rank)
        loss = mse_loss(model(x), y) * (math.inf if rank == 1 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        reports["skipped"] = [bits(model) == before, scaler.get_scale()]

        # every value that crosses is counted, in every message: rank 0 sends half of its gradient to rank 1
        flat = DDP(nn.Linear(640, 2, bias=False))
        counted = compress_ddp(flat, "q4:64")
        reports["counted"] = []
        for bad in (0, 0, 70):
            features = torch.ones(1, 640)
            features[0, 640 - bad :] = math.inf if rank == 0 else 1.0
            flat(features).sum().backward()
            reports["counted"].append([hop.nonfinite for hop in counted.link_stats.values()])
            flat.zero_grad()

        def overflown():
            model, _, _, _ = trained("q4:64", rank, 1, nonfinite="raise")
            (mse_loss(model(x), y) * (math.nan if rank == 0 else 1.0)).backward()

        reports["raised"] = caught(overflown)

        # a state
        for how in ("q4:64", "q2:32:dither", "top10", "ef(q2:32)", "ef21(q2:32)"):
            model, replicas, optimizer, _ = trained(how, rank, 4)
            state = copy.deepcopy([model.state_dict(), optimizer.state_dict(), replicas.state_dict()])
            stateless = copy.deepcopy(state)  # an optimizer goes on in the tensors that it is given
            reports[how] = bits(trained(how, rank, 4, begin=4, state=state)[0])
            reports["whole " + how] = bits(trained(how, rank, 8)[0])
            if how == "q4:64":  # what has no state needs none
                reports["stateless"] = bits(trained(how, rank, 4, begin=4, state=[*stateless[:2], None])[0])
        _, replicas, _, _ = trained("q4", rank, 1)
        reports["foreign"] = caught(lambda: replicas.load_state_dict(state[2]))
        _, ahead, _, _ = trained("ef21(q2:32)", rank, 1)
        one_more = trained("ef21(q2:32)", rank, 2)[1].state_dict()
        model, replicas, optimizer, _ = trained("ef21(q2:32)", rank, 2)
        replicas.load_state_dict(one_more if rank == 0 else ahead.state_dict())
        reports["apart"] = caught(lambda: mse_loss(model(x), y).backward())
        saved = [None, None]
        dist.all_gather_object(saved, ahead.state_dict())
        bad_hops = ({"first": {"0": {"count": "x", "out": {}, "into": {}}}, "second": {}}, {"first": None}, None)
        reports["other rank"] = [caught(lambda: replicas.load_state_dict(saved[1 - rank]))]
        reports["broken"] = [caught(lambda: replicas.load_state_dict({**ahead.state_dict(), "hops": hops}))
                             for hops in bad_hops]

        # calls that cannot be met
        taken = DDP(plain_net())
        compress_ddp(taken, "q4")
        reports["refused"] = [caught(lambda: compress_ddp(taken, "q4"))]
        reports["refused"] += [caught(lambda: compress_ddp(DDP(plain_net()), how)) for how in ("same", "aq(q2)", "no")]
        reports["refused"] += [caught(lambda: compress_ddp(DDP(plain_net()), nonfinite="skip"))]
        skipping = DDP(plain_net(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
        reports["refused"] += [caught(lambda: compress_ddp(skipping))]
        halves = DDP(plain_net().to([torch.float32, torch.bfloat16][rank]), init_sync=False)
        compress_ddp(halves, "q4:64")
        reports["dtypes"] = caught(lambda: halves(x.to(next(halves.parameters()).dtype)).sum().backward())

        # another collective of the same group in the middle of the backward pass, and buckets that torch makes anew
        class Sum(torch.autograd.Function):
            def forward(context, x):
                return x.clone()

            def backward(context, gradient):
                total = gradient.clone()
                dist.all_reduce(total)
                return gradient

        net = plain_net()
        model = DDP(nn.Sequential(net[:2], net[2:]), bucket_cap_mb=0.005)
        model.module[0].register_forward_hook(lambda module, x, y: Sum.apply(y))
        compress_ddp(model, "q4:64", segment_numel=200)
        for step in range(6):
            x, y = batch(step, rank)
            mse_loss(model(x), y).backward()
        reports["beside"] = digest(*(p.grad for p in model.parameters()))

        # parameters that DDP does not average
        net, extra = plain_net(), plain_net()[0]
        net[0].requires_grad_(False)
        model = DDP(net)
        compress_ddp(model, "q4:64")

        def step(*more):
            model.zero_grad()
            (mse_loss(model(x), y) + sum(part(x).sum() for part in more)).backward()

        step()
        net[0].requires_grad_(True)
        reports["thawed"] = [caught(step)]
        model = DDP(plain_net())
        compress_ddp(model, "q4:64")
        model.module[0].extra = extra
        reports["thawed"] += [caught(lambda: step(extra))]

        # ranks whose data ends sooner
        model = DDP(plain_net(), bucket_cap_mb=0.005)
        replicas, optimizer = compress_ddp(model, "q4:64"), torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(3 + 2 * rank):
                x, y = batch(step, rank)
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
        reports["joined"] = bits(model)

        # a graph that is declared static, with buckets of two dtypes
        class Halves(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.first, self.last = nn.Linear(24, 48), nn.Linear(48, 4).bfloat16()

            def forward(self, x):
                return self.last(self.first(x).bfloat16()).float()

        gradients = {}
        for is_static in (False, True):
            model = DDP(Halves(), bucket_cap_mb=0.005, static_graph=is_static)
            replicas = compress_ddp(model, "q8:64", segment_numel=200)
            gradients[is_static] = []
            for step in range(3):
                model.zero_grad()
                model(batch(step, rank)[0]).square().mean().backward()
                gradients[is_static].append(digest(*(p.grad for p in model.parameters())))
        reports["static"] = [gradients[True], gradients[True] == gradients[False]]

        # a copy, which is compressed once it is asked to be; and the end of both
        model, replicas, _, _ = trained("q4:64", rank, 2)
        copied, gradients = copy.deepcopy(model), []
        for spec in (None, "q4:64"):
            again = spec and compress_ddp(copied, spec)
            copied.zero_grad()
            x, y = batch(0, rank)
            mse_loss(copied(x), y).backward()
            gradients.append(digest(*(p.grad for p in copied.parameters())))
        counts = {state["count"] for state in replicas.state_dict()["hops"]["first"].values()}
        reports["copied"] = [*gradients, counts == {2}]
        ends = [weakref.ref(one) for one in (model, replicas, copied, again)]
        del model, replicas, copied, again
        for _ in range(1000):  # a thread may be about to leave its last task
            gc.collect()
            alive = sum(end() is not None for end in ends)
            if not alive:
                break
            time.sleep(0.01)
        reports["alive"] = alive
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return ranks(START + LONG, 3, tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return ranks(START + SHORT, 2, tmp_path_factory.mktemp("short"))


@pytest.mark.parametrize("spec", ["q4:64", "ef(q3:32:dither)"])
def test_replicas_are_equal_to_the_last_bit_after_many_steps(long, spec):
    assert all(report[spec][0] == long[0][spec][0] for report in long)
    assert all(report[spec][3] for report in long)
    assert long[0]["segments"] > 2 * MAX_IN_FLIGHT


@pytest.mark.parametrize("spec", ["q4:64", "ef(q3:32:dither)"])
def test_replicas_learn_as_without_compression(long, spec):
    mean, plain = (sum(report[key][1] for report in long) / 3 for key in (spec, "None"))
    assert plain < long[0]["None"][2] / 2
    assert mean < plain + 0.1


def test_exact_messages_give_what_torch_gives(short):
    assert all(report["exact"] == report["small"] == short[0]["own"] for report in short)


def test_ranks_set_up_otherwise_are_an_error_on_all(short):
    for report in short:
        assert [kind for kind, _ in report["differ"]] == ["MismatchError"] * 3
    told = short[0]["differ"][0][1]
    assert "q8:64" in told and "on rank 0" in told and "min_numel" not in told  # which they have in common
    kind, text = short[0]["absent"]
    assert kind == "MismatchError"
    assert "rank 1 published no configuration" in text


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks_or_is_an_error_on_all(short):
    assert all(report["skipped"] == [True, 2.0] for report in short)
    assert all(report["raised"][0] == "PolicyError" for report in short)


def test_gradients_that_are_not_finite_are_counted_in_every_message(short):
    # of the two rows of the gradient each rank owns one: 70 values cross, and 70 of each average are spread by groups
    assert short[0]["counted"] == [[0, 0], [0, 0], [70, 70]]
    assert short[1]["counted"] == [[0, 0], [0, 0], [0, 128]]


@pytest.mark.parametrize("spec", SAVED)
def test_restored_replicas_continue_as_the_uninterrupted_ones(short, spec):
    assert all(report[spec] == report[f"whole {spec}"] == short[0][spec] for report in short)
    assert all(report["stateless"] == report["q4:64"] for report in short)


def test_a_state_of_another_set_up_or_of_another_step_is_an_error(short):
    assert all(report["foreign"][0] == report["apart"][0] == "MismatchError" for report in short)


def test_the_feedback_of_another_rank_is_an_error_and_so_is_what_is_no_state(short):
    for report in short:
        kind, text = report["other rank"][0]
        assert kind == "MismatchError" and "rank 0 of 2" in text and "rank 1 of 2" in text
    assert all([kind for kind, _ in report["broken"]] == ["MismatchError"] * 3 for report in short)


def test_ranks_whose_parameters_have_other_dtypes_are_an_error_on_all(short):
    assert all(report["dtypes"][0] == "MismatchError" for report in short)


def test_what_cannot_be_compressed_is_refused(short):
    assert all([kind for kind, _ in report["refused"]] == ["PolicyError"] * 6 for report in short)
    assert all("skip_all_reduce_unused_params" in report["refused"][5][1] for report in short)
    with pytest.raises(PolicyError, match="DistributedDataParallel"):
        compress_ddp(torch.nn.Linear(2, 2))


def test_trained_parameters_that_ddp_does_not_average_are_refused(short):
    for report in short:
        (kind, thawed), (other_kind, added) = report["thawed"]
        assert kind == other_kind == "PolicyError"
        assert "compress_ddp, 0.weight" in thawed and "compress_ddp, 0.extra.weight" in added


def test_ranks_whose_data_ends_sooner_do_not_hold_up_the_others(short):
    assert short[0]["joined"] == short[1]["joined"]


def test_a_static_graph_makes_no_difference(short):
    assert short[0]["static"] == short[1]["static"] and all(report["static"][1] for report in short)


def test_a_copy_of_a_model_is_compressed_when_it_is_asked_to_be(short):
    for report in short:
        plain, compressed, is_untouched = report["copied"]
        assert [plain, compressed] == short[0]["copied"][:2] and plain != compressed and is_untouched


def test_a_model_and_its_handle_are_freed(short):
    assert all(report["alive"] == 0 for report in short)


def test_another_collective_in_the_middle_of_a_backward_pass_is_not_disturbed(short):
    assert short[0]["beside"] == short[1]["beside"]


def test_groups_may_be_any_and_one_rank_alone_sends_nothing(long):
    assert long[0]["ends"] == long[2]["ends"]
    assert all(report["single"] == [True, 0] for report in long)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replicas_on_gpus_are_equal_to_the_last_bit(tmp_path):
    reports = ranks(START + NCCL, 2, tmp_path)
    assert reports[0] == reports[1]


NCCL = """
    def of_rank(rank, width, folder):
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=width)
        reports = {}
        for how in ("q4:64", "ef(q3:32:dither)", "ef21(top10)"):
            model = DDP(plain_net().cuda(), device_ids=[rank], bucket_cap_mb=0.005)
            compress_ddp(model, how)
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
            for step in range(20):
                x, y = (one.cuda() for one in batch(step, rank))
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
            reports[how] = digest(*(one.cpu() for one in model.module.parameters()))
        leave(reports, rank, folder)
"""
