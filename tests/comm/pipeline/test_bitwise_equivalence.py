"""A compressed pipeline of real processes is bit for bit the model with the same points in one process."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

SCHEDULES = {
    "GPipe": 2,
    "1F1B": 2,
    "Interleaved1F1B": 4,
    "LoopedBFS": 4,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 4,
    "DualPipeV": 4,
}
HOWS = [
    ("q4:64", "q8:64"),
    ("q2", "q1"),
    ("q5:row", "q3:16:dither"),
    ("bf16", "fp16"),
    ("exact", "n3:64"),
    ("block4:32", "h64(q4:64)"),
    ("top10", "same"),
    ("top20:bf16", "same:q4:64"),
    ("top10:tensor:q4:64", "rand25"),
    ("rand25:scaled", "same"),
    ("ef(top10)", "ef(q2:64)"),
    ("efmixed(top10)", "ef21(top20)"),
    ("ef21(top10)", "ef21(q2:64)"),
    (None, "q4:64"),
    ("q4:64", None),
]
BETWEEN = {
    0: {"forward": "q8", "backward": "q1"},
    1: {"forward": "q4:row", "backward": "exact"},
    2: {"forward": "q2:16", "backward": None},
}
"""Boundaries 0 and 2 lie between the same two ranks, and 1 goes the other way."""
SHARED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
PROGRAM = f"""
    import torch.distributed as dist
    from helpers.pipeline_model import batches, join, tell, versus
    from torch.distributed.pipelining import schedules

    SCHEDULES, HOWS, BETWEEN, SHARED = {SCHEDULES!r}, {HOWS!r}, {BETWEEN!r}, {SHARED!r}


    def counted(call):
        "What a call gives, and how many receives torch posted meanwhile."
        torchs, counts = schedules._batch_p2p, []

        def posted(ops, desc=None):
            counts.append(sum(op.op is dist.irecv for op in ops))
            return torchs(ops, desc)

        schedules._batch_p2p = posted
        found = call()
        schedules._batch_p2p = torchs
        return {{**found, "receives": sum(counts)}}


    def of_rank(rank, width, folder):
        join(rank, width, folder)
        data, reports = batches(3), {{}}
        for kind, stages in SCHEDULES.items():
            how = dict(forward="ef21(top25)", backward="q4:64:dither")
            reports[kind] = versus(kind, rank, width, stages, data, **how)
        for forward, backward in HOWS:
            how = dict(forward=forward, backward=backward)
            reports[f"{{forward}} {{backward}}"] = versus("1F1B", rank, width, 2, data, **how)
        for kind in SHARED:
            how = dict(forward="q4", backward="q4:64", per=BETWEEN)
            reports[f"between {{kind}}"] = versus(kind, rank, width, 4, data, **how)
        for kind in ("1F1B", "Interleaved1F1B", "LoopedBFS"):
            for how in ("q4:64", None):
                case = (kind, rank, width, SCHEDULES[kind], data)
                reports[f"{{kind}}, {{how}}"] = counted(lambda: versus(*case, forward=how, backward=how))
        tell(rank, folder, reports)
"""
DEEP = """
    from helpers.pipeline_model import batches, join, tell, versus


    def of_rank(rank, width, folder):
        join(rank, width, folder)
        per = {1: {"forward": "q8", "backward": "q4:row"}, 2: {"backward": None}}
        how = dict(forward="top10", backward="same", per=per)
        tell(rank, folder, {kind: versus(kind, rank, width, 4, batches(2), **how) for kind in ("GPipe", "1F1B")})
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(PROGRAM, 2, tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return ranks(DEEP, 4, tmp_path_factory.mktemp("deep"))


@pytest.mark.parametrize("case", [*SCHEDULES, *(f"{forward} {backward}" for forward, backward in HOWS)])
def test_weights_losses_and_outputs_are_those_of_the_points_in_one_process(reports, case):
    assert [(report[case]["weights"], report[case]["losses"], report[case]["output"]) for report in reports] == [
        ([], True, True)
    ] * 2


@pytest.mark.parametrize("kind", ["GPipe", "1F1B"])
def test_each_boundary_of_four_stages_has_its_own_compressors(deep, kind):
    assert [(report[kind]["weights"], report[kind]["losses"]) for report in deep] == [([], True)] * 4
    raw, wire = deep[1][kind]["bytes"]["1 forward"]
    messages = 3 * 4  # two steps and an evaluation
    assert (raw, wire) == (messages * 32 * 4, messages * (64 + 8))  # whole tiles of 64 values, and two numbers
    assert len(set(deep[2][kind]["bytes"]["2 backward"])) == 1


@pytest.mark.parametrize("kind", SHARED)
def test_messages_of_two_boundaries_between_the_same_ranks_are_not_mixed_up(reports, kind):
    """They are told apart by their tags, and uncompressed ones by their order."""
    assert [(report[f"between {kind}"]["weights"], report[f"between {kind}"]["losses"]) for report in reports] == [
        ([], True)
    ] * 2


@pytest.mark.parametrize("kind", ["1F1B", "Interleaved1F1B", "LoopedBFS"])
def test_receives_of_gloo_are_posted_before_the_sends_that_torch_posts_them_with(reports, kind):
    assert [report[f"{kind}, q4:64"]["receives"] for report in reports] == [0, 0]
    assert all(report[f"{kind}, None"]["receives"] for report in reports)


def test_both_ends_count_the_same_bytes(reports):
    for case in reports[0]:
        lower, upper = (report[case]["bytes"] for report in reports)
        assert lower == upper and lower


def test_a_turn_on_one_rank_carries_nothing(reports):
    assert set(reports[0]["ZBVZeroBubble"]["bytes"]) == {"0 forward", "0 backward", "2 forward", "2 backward"}
