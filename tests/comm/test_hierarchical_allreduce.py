"""Gradients in two levels, exact within a node and compressed between nodes: four real processes on gloo."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

PROGRAM = """
    import copy
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from helpers.replica_search import batch, caught, digest, join, leave, plain_net
    from helpers.sent_messages import sent_messages
    from shrinkpoint.comm import background_allreduce, compress_ddp

    def trained(rank, spec, steps, begin=0, state=None, segment_numel=700, net=plain_net, **arguments):
        model = DDP(net(), bucket_cap_mb=0.005)
        handle = spec and compress_ddp(model, spec, segment_numel=segment_numel, **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if state is not None:
            for part, saved in zip((model, optimizer, handle), copy.deepcopy(state)):
                part.load_state_dict(saved)
        losses = []
        for step in range(begin, begin + steps):
            optimizer.zero_grad()
            x, y = batch(step, rank)
            loss = mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return model, optimizer, handle, losses

    def bits(model):
        return digest(*model.parameters())

    def distance(one, other):
        return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one.parameters(), other.parameters()))

    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        plain, _, _, losses = trained(rank, None, 6)
        reports["plain loss"] = sum(losses[-4:])

        # exact at both levels, in nodes of two, and all ranks in one node whatever the compressor
        for name, spec, size in (("two nodes", "exact", 2), ("one node", "q2:64", 4)):
            model = trained(rank, spec, 6, ranks_per_node=size)[0]
            reports[name] = [bits(model), distance(model, plain)]

        for spec in ("q4:64", "ef(q3:64)", "q4:64:dither"):
            with sent_messages() as messages:
                model, _, handle, losses = trained(rank, spec, 6, ranks_per_node=2)
            # by whether the peer is of this node
            inside = [peer // 2 == rank // 2 for peer, _ in messages]
            sizes = [size for _, size in messages]
            sent = [sum(size for size, at in zip(sizes, inside) if at is within) for within in (True, False)]
            ledger = {hop: stats.wire_bytes for hop, stats in handle.link_stats.items()}
            half = trained(rank, spec, 3, ranks_per_node=2)
            state = [part.state_dict() for part in half[:3]]
            again = trained(rank, spec, 3, begin=3, state=state, ranks_per_node=2)[0]
            inline = background_allreduce.is_gloo
            background_allreduce.is_gloo = lambda *_: False  # as on a GPU: one after the other, in one thread
            same = trained(rank, spec, 6, ranks_per_node=2)[0]
            background_allreduce.is_gloo = inline
            flat = trained(rank, spec, 2)[2]
            reports[spec] = {"bits": bits(model), "resumed": bits(again), "inline": bits(same),
                             "loss": sum(losses[-4:]), "sent": sent, "ledger": ledger,
                             "flat": 3 * sum(stats.wire_bytes for stats in flat.link_stats.values())}

        # other dtypes, small parameters, and feedback at the second hop
        half = trained(rank, "q8:64", 5, net=lambda: plain_net().bfloat16(), ranks_per_node=2, min_numel=100,
                       average_compressor="q8:64")
        reports["bfloat16"] = bits(half[0])

        # a subgroup, and a group whose ranks do not follow each other
        group = dist.new_group([3, 1]), dist.new_group([0, 2])
        own = group[rank % 2 == 0]
        model = DDP(plain_net(), process_group=own, bucket_cap_mb=0.005)
        compress_ddp(model, "q8:64", ranks_per_node=2)
        x, y = batch(0, rank)
        mse_loss(model(x), y).backward()
        reports["subgroup"] = digest(*(p.grad for p in model.parameters()))

        def unlike():
            trained(rank, "q4:64", 1, ranks_per_node=1 if rank == 3 else 2, timeout=60)

        reports["refused"] = [caught(lambda: compress_ddp(DDP(plain_net()), ranks_per_node=n)) for n in (3, 0, 8)]
        reports["refused"] += [caught(lambda: compress_ddp(DDP(plain_net()), "lowrank2", ranks_per_node=2))]
        reports["refused"] += [caught(half[2].record_gradients)]
        reports["unlike"] = caught(unlike)
        reports["foreign"] = caught(lambda: trained(rank, "q4:64", 1, state=[*state[:2], flat.state_dict()],
                                                    ranks_per_node=2))
        leave(reports, rank, folder)
"""
SPECS = ("q4:64", "ef(q3:64)", "q4:64:dither")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(PROGRAM, 4, tmp_path_factory.mktemp("nodes"))


@pytest.mark.parametrize("name", ["two nodes", "one node"])
def test_exact_levels_give_torchs_averages_to_the_same_bits_on_all_ranks(reports, name):
    for report in reports:
        assert report[name][0] == reports[0][name][0]
        assert report[name][1] < 1e-5


@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_of_all_nodes_are_equal_in_threads_and_without_and_resume(reports, spec):
    expected = reports[0][spec]["bits"]
    assert all(report[spec][name] == expected for report in reports for name in ("bits", "inline", "resumed"))


@pytest.mark.parametrize("spec", SPECS)
def test_replicas_learn_as_without_compression(reports, spec):
    ours, plain = (sum(report[spec]["loss"] for report in reports), sum(report["plain loss"] for report in reports))
    assert ours < 1.1 * plain


@pytest.mark.parametrize("spec", SPECS)
def test_other_nodes_get_the_compressed_share_alone(reports, spec):
    for report in reports:
        within, across = report[spec]["sent"]
        ledger = report[spec]["ledger"]
        assert across == ledger["first hop"] + ledger["second hop"]
        assert within == ledger["first hop, node"] + ledger["second hop, node"]
        # of what a rank of one level sends, 2/3 cross; here a half of the model there and back, and nothing more
        assert across < 0.6 * report[spec]["flat"] * 2 / 3 < within


def test_other_dtypes_and_other_groups(reports):
    assert len({report["bfloat16"] for report in reports}) == 1
    assert reports[0]["subgroup"] == reports[2]["subgroup"] != reports[1]["subgroup"] == reports[3]["subgroup"]


def test_what_cannot_be_in_two_levels_is_refused(reports):
    for report in reports:
        assert [kind for kind, _ in report["refused"]] == ["PolicyError"] * 5
        assert report["unlike"][0] == "MismatchError" and "ranks_per_node" in report["unlike"][1]
        assert report["foreign"][0] == "MismatchError"
