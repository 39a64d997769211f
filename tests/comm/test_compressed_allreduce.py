"""Averages over ranks in encoded messages: real processes, a real gloo group."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

from shrinkpoint.comm.compressed_allreduce import as_feedback
from shrinkpoint.errors import PolicyError

RANKS = """
    import torch, math, warnings
    import torch.distributed as dist
    import torch.nn.functional as F
    from helpers.replica_search import caught, digest, drawn, join, leave
    from shrinkpoint.comm.compressors.base import NO_CONTEXT
    from shrinkpoint.comm import parse
    from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce

    SPECS = ("exact", "bf16", "q4:64", "q3", "n3:64", "top10", "block4:32", "h64(q4:64)")
    CASES = [("q4:64", size, torch.float32) for size in (1, 63, 193, 4097)]
    CASES += [(spec, 1000, torch.float32) for spec in SPECS]
    CASES += [("exact", 100_001, torch.float32)]  # gloo has another way with messages of more than 128 KiB
    CASES += [(spec, 300, dtype) for spec in ("q4:64", "exact") for dtype in
              (torch.bfloat16, torch.float16, torch.float64)]


    def alone(spec, tensors):
        "What one process makes of the tensors of all ranks."
        compressor, width, size = parse(spec), len(tensors), tensors[0].numel()
        share = math.ceil(math.ceil(size / width) / 64) * 64
        rows = [F.pad(x, (0, share * width - size)).view(width, share) for x in tensors]
        crossed = lambda x: compressor.decode(compressor.encode(x, NO_CONTEXT), torch.empty_like(x), NO_CONTEXT)
        out = []
        for owner in range(width):
            total = torch.zeros(share, dtype=torch.promote_types(tensors[0].dtype, torch.float32))
            for rank in range(width):
                total += rows[rank][owner] if rank == owner else crossed(rows[rank][owner])
            out.append(crossed((total / width).to(tensors[0].dtype)))
        return torch.cat(out)[:size]


    def of_rank(rank, width, folder):
        reports, group = join(rank, width, folder), dist.group.WORLD
        reports["digests"], reports["wrong"] = [], []
        for spec, size, dtype in CASES:
            tensors = [drawn(size, seed=size + of, dtype=dtype) for of in range(width)]
            mean = CompressedAllReduce(spec, name="g").average_(tensors[rank].clone(), group)
            if digest(mean) != digest(alone(spec, tensors)):
                reports["wrong"].append([spec, size, str(dtype)])
            reports["digests"].append(digest(mean))

        # noise and random places follow from the message: another one each time, the same at both ends
        hops, x = CompressedAllReduce("q2:64:dither", name="g"), drawn(640, seed=3)
        means = [hops.average_(x.clone(), group) for _ in range(40)]
        reports["noise"] = [digest(mean) for mean in means]
        errors = [means[0] - x, sum(means) / 40 - x]
        reports["noise_error"] = [float(error.norm() / x.norm()) for error in errors]
        reports["random"] = digest(CompressedAllReduce("rand25", name="g").average_(x.clone(), group))

        # a value that is not finite, on one rank only
        reports["lost"], reports["finite"] = [], []
        for spec in ("q4:64", "n3:64", "top10", "rand5", "ef(q4:64)", "bf16", "ef21(top10)"):
            for value in (math.nan, -math.inf):
                for place in (0, 999):
                    hops, x = CompressedAllReduce(spec, name="g"), drawn(1000, seed=rank)
                    if rank == width - 1:
                        x[place] = value
                    hops.average_(x, group)
                    told = "rand" not in spec and math.isfinite(x[place]) or bool(x.isfinite().all())
                    reports["lost"] += [[spec, value, place]] * told
                    for _ in range(2):  # and it is forgotten
                        after = hops.average_(drawn(1000, seed=rank), group)
                    reports["finite"].append(bool(after.isfinite().all()))

        # what both hops lose comes later
        mean = sum(drawn(1000, seed=of) for of in range(width)) / width
        for spec in ("top10", "ef(top10)", "efmixed(top10)", "ef21(top10)"):
            hops = CompressedAllReduce(spec, name="g")
            steps = [hops.average_(drawn(1000, seed=rank), group) for _ in range(60)]
            reports[spec] = [float((sum(steps) / 60 - mean).norm() / mean.norm()), float((steps[-1] - mean).norm())]
        # a state of a version whose second hop had no feedback
        old, hops = CompressedAllReduce("ef(top10)", "top10", name="g"), CompressedAllReduce("ef(top10)", name="g")
        old.average_(drawn(1000, seed=rank), group)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            hops.load_state_dict(old.state_dict())
        reports["old state"] = [str(one.message) for one in warned]
        first, second = (hop.state_dict()[""]["out"]["residual"] for hop in hops.hops)
        reports["old state"] += [len(first), len(second)]

        # a state, and layouts
        for spec in ("ef(q2:64:dither)", "ef21(q2:64)"):
            first = CompressedAllReduce(spec, name="g")
            for step in range(4):
                first.average_(drawn(500, seed=10 * step + rank), group, "a")
            later = CompressedAllReduce(spec, name="g")
            later.load_state_dict(first.state_dict())
            goes_on = [[digest(hops.average_(drawn(500, seed=10 * step + rank), group, "a")) for step in range(4, 8)]
                       for hops in (first, later)]
            reports["restored " + spec] = goes_on[0] == goes_on[1]
            anew, fresh = [hops.average_(drawn(500, seed=rank), group, "b") for hops in (first,
            CompressedAllReduce(spec, name="g"))]
            reports["anew " + spec] = digest(anew) == digest(fresh)
        reports["foreign"] = caught(lambda: CompressedAllReduce("q4", name="g").load_state_dict({"hops": 1}))

        # other groups
        pair = dist.new_group([0, width - 1])
        if rank in (0, width - 1):
            x = CompressedAllReduce("exact", name="g").average_(torch.full((100,), float(rank)), pair)
            reports["pair"] = sorted(set(x.tolist()))
            tensors, other = [drawn(999, seed=of) for of in (0, width - 1)], width - 1 - rank
            came = torch.zeros(1)
            work = dist.irecv(came, other, pair)  # what others receive in the group is not taken for ours
            x = CompressedAllReduce("q4:64", name="g").average_(drawn(999, seed=rank), pair)
            dist.send(torch.ones(1), other, pair)
            work.wait()
            reports["pair"] += [digest(x) == digest(alone("q4:64", tensors)), float(came)]
        single = [dist.new_group([of]) for of in range(width)][rank]
        hops, x = CompressedAllReduce("q2", name="g"), drawn(100, seed=1)
        hops.average_(x, single)
        reports["single"] = [digest(x) == digest(drawn(100, seed=1)), hops.link_stats["first hop"].messages]
        reports["empty"] = CompressedAllReduce("q2", name="g").average_(torch.empty(0), group).numel()

        # bytes
        hops = CompressedAllReduce("q4:64", name="g")
        hops.average_(drawn(64 * width * 10, seed=1), group)
        reports["bytes"] = {name: [stats.messages, stats.raw_bytes, stats.wire_bytes]
                            for name, stats in hops.link_stats.items()}
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(RANKS, 3, tmp_path_factory.mktemp("group"))


def test_every_rank_holds_the_same_bits_and_what_one_process_computes(reports):
    assert reports[0]["wrong"] == []
    assert all(report["digests"] == reports[0]["digests"] for report in reports)


def test_noise_is_another_in_each_message_and_averages_out(reports):
    assert all((report["noise"], report["random"]) == (reports[0]["noise"], reports[0]["random"]) for report in reports)
    assert len(set(reports[0]["noise"])) == 40
    once, often = reports[0]["noise_error"]
    assert often < once / 4


def test_what_is_not_finite_on_one_rank_reaches_all_and_is_then_forgotten(reports):
    assert all(report["lost"] == [] for report in reports)
    assert all(all(report["finite"]) for report in reports)


def test_feedback_sends_later_what_a_message_lost(reports):
    plain, _ = reports[0]["top10"]
    for spec in ("ef(top10)", "efmixed(top10)"):
        assert reports[0][spec][0] < plain / 2.5
    assert reports[0]["ef21(top10)"][1] < 1e-4


def test_a_state_without_feedback_of_averages_is_loaded_and_says_what_starts_anew(reports):
    for report in reports:
        text, *buffers = report["old state"]
        assert "no feedback of averages" in text and buffers == [2, 0]


@pytest.mark.parametrize("spec", ["ef(q2:64:dither)", "ef21(q2:64)"])
def test_a_restored_state_continues_as_the_saved_one(reports, spec):
    assert all(report[f"restored {spec}"] for report in reports)
    assert all(report["foreign"][0] == "MismatchError" for report in reports)


@pytest.mark.parametrize("spec", ["ef(q2:64:dither)", "ef21(q2:64)"])
def test_another_layout_begins_anew(reports, spec):
    assert all(report[f"anew {spec}"] for report in reports)


def test_groups_may_be_any_and_one_rank_alone_sends_nothing(reports):
    assert reports[0]["pair"] == reports[2]["pair"] == [1.0, True, 1.0]
    assert all((report["single"], report["empty"]) == ([True, 0], 0) for report in reports)


def test_link_stats_count_what_each_rank_sends_to_the_others(reports):
    share = 64 * 10
    raw, wire = 2 * share * 4, 2 * 368  # 4 bits a value and 4 bytes a group are 360; messages are multiples of 16
    expected = {"first hop": [2, raw, wire], "second hop": [1, raw, wire]}
    assert all(report["bytes"] == expected for report in reports)


@pytest.mark.parametrize("spec", ["same", "aq(q2:64)", "ef(same:bf16)", "q9", "nonsense"])
def test_what_averages_cannot_be_sent_with_is_refused(spec):
    with pytest.raises(PolicyError):
        as_feedback(spec)


def test_none_is_the_bytes_as_they_are():
    assert as_feedback(None).spec == "exact"
