"""What links remember: by sample across stages, and through a checkpoint."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

PROGRAM = """
    import torch
    import torch.distributed as dist
    from helpers.pipeline_model import ROWS, V_SHAPED, batches, build, failure, join, same, step, tell, trained_here
    from helpers.pipeline_model import weights

    import shrinkpoint as sp
    from shrinkpoint.comm import compress_pipeline

    EPOCHS, BATCHES = 3, 3
    HOWS = {
        "everywhere": dict(forward="aq(q2:64, warmup=2)", backward="q4:64"),
        "gradients": dict(forward="q4:64", backward="aq(q3:64)"),
        "last": dict(forward="q4:64", backward="q4:64", per={1: {"forward": "aq(top25)"}}),
        "through": dict(
            forward=None, backward="ef(q2:64)", per={1: {"forward": "aq(q1:16)", "backward": "ef21(top25)"}}
        ),
    }


    def epochs():
        rows = torch.cat([x for x, _ in batches(BATCHES)]), torch.cat([y for _, y in batches(BATCHES)])
        made = torch.Generator().manual_seed(3)
        order = [part for _ in range(EPOCHS) for part in torch.randperm(BATCHES * ROWS, generator=made).split(ROWS)]
        return [(rows[0][ids], rows[1][ids]) for ids in order], order


    def run(kind, rank, width, stages, data, ids, per=None, **how):
        schedule, mine = build(kind, rank, width, stages)
        wire = compress_pipeline(schedule, per_link=per, **how)
        losses = []
        for (x, y), which in zip(data, ids):
            if 0 in mine:
                wire.set_sample_ids(which)
            losses += step(schedule, mine, stages - 1, x, y)
        return wire, mine, losses


    def resumed(rank, width, folder, data, ids, how):
        wire, mine, _ = run("1F1B", rank, width, width, data[:5], ids[:5], **how)
        with sp.CheckpointManager(f"{folder}/store{rank}") as manager:
            manager.save(5, model=mine[rank], wire=wire)
        schedule, mine = build("1F1B", rank, width, width, seed=9)
        wire = compress_pipeline(schedule, per_link=how.get("per"), forward=how["forward"], backward=how["backward"])
        with sp.CheckpointManager(f"{folder}/store{rank}") as manager:
            manager.restore(model=mine[rank], wire=wire)
        for (x, y), which in zip(data[5:], ids[5:]):
            if rank == 0:
                wire.set_sample_ids(which)
            step(schedule, mine, width - 1, x, y)
        return weights(mine)


    STAGES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "LoopedBFS": 4, "InterleavedZeroBubble": 4,
              "ZBVZeroBubble": 4, "DualPipeV": 4}


    def visited(kind, rank, group, data, ids):
        "Of 24 samples 14 are remembered: most messages hold some that are and some that are not."
        stages, how = STAGES[kind], dict(forward="aq(q2:16, most_bytes=448)", backward="aq(q4:16, most_bytes=448)")
        schedule, mine = build(kind, rank, 2, stages, group=group)
        wire = compress_pipeline(schedule, **how)
        for (x, y), which in zip(data, ids):
            if 0 in mine:
                wire.set_sample_ids(which)
            step(schedule, mine, stages - 1, x, y)
        turns = {1: {"forward": None, "backward": None}} if kind in V_SHAPED else {}
        expected = trained_here(stages, data, ids=ids, per_point=turns, backwards=kind == "LoopedBFS", **how)
        sizes = {name: [one.wire_bytes, one.raw_bytes] for name, one in wire.link_stats().items()}
        return [same(weights(mine), expected[1]), sizes]


    def of_rank(rank, width, folder):
        join(rank, width, folder)
        data, ids = epochs()
        reports = {}
        for name, how in HOWS.items():
            _, mine, losses = run("1F1B", rank, width, width, data, ids, **how)
            here = {key: value for key, value in how.items() if key != "per"}
            expected = trained_here(width, data, ids=ids, per_point=how.get("per"), **here)
            reports[name] = [same(weights(mine), expected[1]), not losses or losses == expected[0]]
            if name in ("everywhere", "through"):
                found = resumed(rank, width, f"{folder}/{name}", data, ids, how)
                reports[name].append(same(found, expected[1]))
        pair = dist.new_group([0, 1])
        if rank < 2:
            schedule, mine = build("ZBVZeroBubble", rank, 2, 4, group=pair)
            how = dict(forward="aq(q2:64)", backward="q4:64")
            wire = compress_pipeline(schedule, **how)
            for (x, y), which in zip(data, ids):
                if rank == 0:
                    wire.set_sample_ids(which)
                step(schedule, mine, 3, x, y)
            expected = trained_here(4, data, ids=ids, per_point={1: {"forward": None, "backward": None}}, **how)
            reports["turn"] = same(weights(mine), expected[1])
            reports["schedules"] = {kind: visited(kind, rank, pair, data, ids) for kind in STAGES}
            schedule, mine = build("1F1B", rank, 2, 2, group=pair)
            compress_pipeline(schedule, forward="aq(q2:64)", backward="q4:64")
            reports["links"] = failure(lambda: wire.load_state_dict({"links": {"7 forward": {}}}))
            reports["untold"] = failure(lambda: step(schedule, mine, 1, *data[0]))
        tell(rank, folder, reports)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(PROGRAM, 3, tmp_path_factory.mktemp("state"))


@pytest.mark.parametrize("case", ["everywhere", "gradients", "last", "through"])
def test_sample_ids_of_the_first_stage_reach_all_that_need_them(reports, case):
    assert [report[case][:2] for report in reports] == [[[], True]] * 3


def test_ids_pass_the_turn_of_a_v_schedule(reports):
    assert [report["turn"] for report in reports[:2]] == [[], []]


@pytest.mark.parametrize(
    "kind", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_a_sample_that_comes_first_or_again_after_it_was_forgotten_is_exact_in_every_schedule(reports, kind):
    for report in reports[:2]:
        unlike, sizes = report["schedules"][kind]
        assert unlike == []
        assert sizes == reports[0]["schedules"][kind][1]
        for wire, raw in sizes.values():  # 9 steps of 8 samples: 8 bytes for each id, 64 for an exact row
            assert 24 * 64 < wire - 9 * 8 * 8 < raw * 0.9


def test_without_sample_ids_every_rank_ends_with_an_error(reports):
    for report in reports[:2]:
        kind, text = report["untold"]
        assert kind == "PolicyError" and "no sample ids" in text


def test_a_state_of_other_links_is_refused_by_their_names(reports):
    for report in reports[:2]:
        kind, text = report["links"]
        assert kind == "MismatchError" and text.startswith("pipeline: links 7 forward; expected those of this rank, 0 ")


def test_a_run_restored_through_the_manager_is_the_uninterrupted_one(reports):
    assert [report[case][2] for case in ("everywhere", "through") for report in reports] == [[]] * 6
