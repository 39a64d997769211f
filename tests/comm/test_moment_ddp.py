"""Gradients in steps of the shared second moment: real processes on gloo."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

START = '''
    import copy, math
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.functional import cross_entropy, mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from helpers.replica_search import Net, batch, bits, caught, digest, images, join, leave, plain_net
    from shrinkpoint.comm import LocalSteps, compress_ddp, compress_fsdp, moment_allreduce

    moment_allreduce.WARMUP_STEPS = 4


    def wide_net():
        return plain_net(width=512)


    def trained(how, rank, steps, *, begin=0, state=None, group=None, net=wide_net, scaler=None, clip=None, parts=1,
                change=None, **arguments):
        """The model, what compressed it, its optimizer, and the bits a value of both hops of the last ten steps."""
        model = DDP(net(), process_group=group, bucket_cap_mb=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        handle = compress_ddp(model, how, optimizer=optimizer, **({"segment_numel": 90_000} | arguments))
        for part, saved in zip((model, optimizer, handle), copy.deepcopy(state) or ()):
            part.load_state_dict(saved)
        before = None
        for step in range(begin, begin + steps):
            if step == begin + steps - 10:
                before = copy.deepcopy([(one.raw_bytes, one.wire_bytes) for one in handle.link_stats.values()])
            change and change(step, model, optimizer)
            optimizer.zero_grad()
            for part in range(parts):
                model.require_backward_grad_sync = part == parts - 1
                x, y = batch(parts * step + part, rank)
                loss = mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)
                (scaler.scale(loss) if scaler else loss).backward()
            scaler and scaler.unscale_(optimizer)
            clip and nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler:
                scaler.step(optimizer), scaler.update()
            else:
                optimizer.step()
        after = [(one.raw_bytes, one.wire_bytes) for one in handle.link_stats.values()]
        bits = 8 * next(model.parameters()).itemsize
        counts = [bits * (w - v) / (r - q) for (r, w), (q, v) in zip(after, before)] if before and after[0][0] else None
        return model, handle, optimizer, counts

'''

TWO = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        model, handle, _, reports["bits"] = trained("v0.7", rank, 30)
        x, y = batch(500, 0, 256)
        reports["losses"] = [mse_loss(one(x), y).item() for one in (model, trained("exact", rank, 30)[0])]
        reports["equal"] = bits(model)
        for name, options in {
            "scaled": {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**16)},
            "clipped": {"clip": 0.01},
            "accumulated": {"parts": 3},
            "bfloat16": {"net": lambda: wide_net().bfloat16()},
            "small exact": {"min_numel": 4096},
        }.items():
            model, handle, _, counts = trained("v0.7", rank, 32, **options)
            reports[name] = [bits(model), counts]

        # a run that is resumed, within the warm-up and behind it; and without the state of its messages
        whole = trained("v0.7", rank, 16)
        reports["resumed"] = [bits(whole[0])]
        for begin in (2, 9):
            state = [part.state_dict() for part in trained("v0.7", rank, begin)[:3]]
            state = [state[0], state[2], state[1]]
            again = trained("v0.7", rank, 16 - begin, begin=begin, state=state)
            reports["resumed"].append(bits(again[0]))
            reports["scales"] = again[1].state_dict()["moment_steps"] == whole[1].state_dict()["moment_steps"]
        without = trained("v0.7", rank, 7, begin=9, state=state[:2])
        reports["without"] = bits(without[0])

        # ranks that do not have the same second moment, and those that have none
        def changed(step, model, optimizer):
            if step == 8 and rank == 0:
                optimizer.state[model.module[2].weight]["exp_avg_sq"][3, 3] *= 1.001

        def dropped(step, model, optimizer):
            if step == 8:
                optimizer.state.clear()

        # a group of its own, in which messages are under way when a rank raises
        group = dist.new_group([0, 1])
        reports["differ"] = caught(lambda: trained("v0.7", rank, 12, group=group, change=changed))
        reports["dropped"] = bits(trained("v0.7", rank, 12, change=dropped)[0])

        # values that are not finite, and one of a million steps
        model, handle, optimizer, _ = trained("v0.7", rank, 8)
        x, y = batch(0, rank)
        scales = handle.state_dict()["moment_steps"]["scales"]
        for factor in (math.nan, 1e6):
            model.zero_grad()
            loss = mse_loss(model(x), y)
            weight = model.module[2].weight
            loss = loss + (weight[5, 7] * (factor if rank else 0.0))
            loss.backward()
            grads = [p.grad for p in model.parameters()]
            reports[str(factor)] = [float(weight.grad[5, 7]), sum(int((~g.isfinite()).sum()) for g in grads),
                                    digest(*grads)]
            if factor != factor:
                after = handle.state_dict()["moment_steps"]["scales"]
                reports["kept"] = [scales[name] == scale for name, scale in after.items()].count(True)
        scaler, before = torch.amp.GradScaler("cpu", init_scale=4.0), bits(model)
        optimizer.zero_grad()
        scaler.scale(mse_loss(model(x), y) * (math.inf if rank == 1 else 1.0)).backward()
        scaler.step(optimizer), scaler.update()
        reports["skipped"] = [bits(model) == before, scaler.get_scale()]

        def overflown():
            model, _, _, _ = trained("v0.7", rank, 8, nonfinite="raise")
            (mse_loss(model(x), y) * (math.nan if rank == 0 else 1.0)).backward()

        reports["raised"] = caught(overflown)

        # parameters that the optimizer does not have, and such without a gradient
        model = DDP(wide_net(), bucket_cap_mb=0.2)
        optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if n != "module.2.bias"])
        handle = compress_ddp(model, "v0.7", optimizer=optimizer, segment_numel=50_000)
        for step in range(8):
            optimizer.zero_grad()
            mse_loss(model(batch(step, rank)[0]), batch(step, rank)[1]).backward()
            optimizer.step()
        state = handle.state_dict()
        own, others = ({n: s["count"] for n, s in hops["first"].items()}
                       for hops in (state["moment_steps"]["hops"], state["hops"]))
        reports["partly"] = [bits(model), own, others]

        model = DDP(Net().to(memory_format=torch.channels_last), bucket_cap_mb=0.02, find_unused_parameters=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        handle = compress_ddp(model, "v0.7", optimizer=optimizer, segment_numel=1500)
        for step in range(12):
            optimizer.zero_grad()
            x, y = images(step, rank)
            cross_entropy(model(x, step + (rank == 0)), y).backward()
            optimizer.step()
        reports["unused"] = [bits(model), len(handle.state_dict()["moment_steps"]["hops"]["first"])]

        # calls that cannot be met
        net = plain_net()
        adam, sgd = torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters(), lr=0.1)
        zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam)
        for name, options in {
            "none": {}, "sgd": {"optimizer": sgd}, "zero": {"optimizer": zero}, "list": {"optimizer": [adam]},
            "average": {"optimizer": adam, "average_compressor": "q4:64"},
        }.items():
            reports["refused " + name] = caught(lambda: compress_ddp(DDP(plain_net()), "v0.7", **options))
        reports["refused fsdp"] = caught(lambda: compress_fsdp(fully_shard(plain_net()), "q8:64", "v0.7"))
        reports["refused local"] = caught(lambda: LocalSteps(plain_net(), sgd, compressor="v0.7"))
        model = DDP(plain_net())
        handle = compress_ddp(model, "v0.7", optimizer=torch.optim.Adam(model.parameters()))
        reports["refused journal"] = caught(handle.record_gradients)
        single = [dist.new_group([of]) for of in range(width)][rank]
        model, handle, _, _ = trained("v0.7", rank, 6, group=single)
        reports["single"] = [bits(model), bits(trained("exact", rank, 6, group=single)[0]),
                             handle.link_stats["first hop"].messages]
        leave(reports, rank, folder)
"""

FOUR = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for name, options in {"one level": {}, "two levels": {"ranks_per_node": 2}}.items():
            model, handle, optimizer, counts = trained("v0.7", rank, 18, **options)
            state = [part.state_dict() for part in trained("v0.7", rank, 8, **options)[:3]]
            again = trained("v0.7", rank, 10, begin=8, state=[state[0], state[2], state[1]], **options)[0]
            reports[name] = [bits(model), bits(again), counts[:2]]
            reports["rank " + name] = handle.state_dict().get("rank")

        def changed(step, model, optimizer):
            if step == 8 and rank == 3:
                optimizer.state[model.module[0].bias]["exp_avg_sq"].mul_(2)

        reports["differ"] = caught(lambda: trained("v0.7", rank, 12, change=changed))
        leave(reports, rank, folder)
"""
REFUSALS = {
    "none": "no optimizer",
    "sgd": "SGD, which keeps no mean of squares",
    "zero": "a ZeroRedundancyOptimizer",
    "list": "a torch.optim.Optimizer",
    "average": "steps on both hops",
    "fsdp": "moment steps",
    "local": "moment steps",
    "journal": "whose steps are not on the wire",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return ranks(START + TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return ranks(START + FOUR, 4, tmp_path_factory.mktemp("four"))


def all_equal(values):
    return all(value == values[0] for value in values)


def test_replicas_are_equal_to_the_last_bit_with_fewer_than_three_bits(two):
    assert all_equal([report["equal"] for report in two])
    assert all(2.0 < bits < 3.0 for report in two for bits in report["bits"])


def test_replicas_learn_as_without_compression(two):
    ours, exact = two[0]["losses"]
    assert ours < exact * 1.1 + 1e-3


@pytest.mark.parametrize("how", ["scaled", "clipped", "accumulated", "bfloat16", "small exact"])
def test_steps_follow_what_changes_the_size_of_gradients(two, how):
    assert all_equal([report[how][0] for report in two])
    assert all(1.5 < bits < 3.3 for report in two for bits in report[how][1])


def test_restored_replicas_continue_as_the_uninterrupted_ones(two):
    for report in two:
        assert all_equal([*report["resumed"], *two[0]["resumed"]])
        assert report["scales"]
    assert two[0]["without"] == two[1]["without"]


def test_ranks_with_other_second_moments_are_a_mismatch_on_all(two, four):
    for report in (*two, *four):
        kind, text = report["differ"]
        assert kind == "MismatchError" and "another second moment" in text


def test_gradients_take_the_other_way_where_moments_are_gone(two):
    assert two[0]["dropped"] == two[1]["dropped"]


def test_values_that_are_not_finite_reach_every_rank(two):
    for report in two:
        value, count, _ = report["nan"]
        assert value != value and count == 1
        assert report["kept"] == 1  # the scale of the segment with that value; all others follow their gradients
        assert report["skipped"] == [True, 2.0]
        assert report["raised"][0] == "PolicyError"


def test_gradient_of_a_million_steps_arrives(two):
    assert two[0]["1000000.0"] == two[1]["1000000.0"]
    assert two[0]["1000000.0"][0] == pytest.approx(5e5, rel=1e-3)


def test_segments_without_a_second_moment_take_the_other_way(two):
    digests, own, others = zip(*(report["partly"] for report in two), strict=True)
    assert all_equal(digests) and all_equal(own) and all_equal(others)
    assert set(own[0].values()) == {4} and 8 in others[0].values() and 4 in others[0].values()
    assert all_equal([report["unused"] for report in two]) and two[0]["unused"][1] > 0


@pytest.mark.parametrize("why", REFUSALS)
def test_what_has_no_shared_moment_is_refused(two, why):
    for report in two:
        kind, text = report[f"refused {why}"]
        assert kind == "PolicyError" and REFUSALS[why] in text


def test_group_of_one_rank_sends_nothing(two):
    for report in two:
        own, exact, messages = report["single"]
        assert own == exact and messages == 0


@pytest.mark.parametrize("levels", ["one level", "two levels"])
def test_four_ranks_are_equal_and_resume(four, levels):
    first = four[0][levels]
    assert all(report[levels][:2] == [first[0], first[0]] for report in four)
    assert all(1.5 < bits < 3.2 for report in four for bits in report[levels][2])
    assert [report[f"rank {levels}"] for report in four] == (
        [None] * 4 if levels == "one level" else [f"rank {rank} of 4" for rank in range(4)]
    )
