"""Ranks that disagree, that never come or that die: an error on every rank, and no hang."""

from __future__ import annotations

import contextlib
import json

import pytest
from helpers.processes import ranks

DISAGREE = """
    import copy

    import torch.distributed as dist
    from helpers.pipeline_model import batches, build, failure, join, step, tell

    from shrinkpoint.comm import compress_pipeline


    def alone(rank, width, x, y):
        "All but rank 0 compress."
        schedule, mine = build("1F1B", rank, width, width, group=dist.new_group([0, 1, 2]))
        if rank == 0:
            return None
        compress_pipeline(schedule, timeout=2)
        return failure(lambda: step(schedule, mine, width - 1, x, y))


    def of_rank(rank, width, folder):
        join(rank, width, folder)
        (x, y), = batches(1)
        reports = [alone(rank, width, x, y)]
        for hows in (
            [dict(forward="q4:64"), dict(forward="q8:64"), dict(forward="q4:64")],
            [dict(backward="q4:64"), dict(backward="q4:64"), dict(backward=None)],
            [dict(), dict(per_link={1: {"forward": "top10"}}), dict(min_numel=7)],
            [dict(nonfinite="raise"), dict(), dict()],
        ):
            schedule, mine = build("1F1B", rank, width, width)
            compress_pipeline(schedule, **hows[rank])
            reports.append(failure(lambda: step(schedule, mine, width - 1, x, y)))
        schedule, mine = build("1F1B", rank, width, width)
        wire = compress_pipeline(schedule, forward="ef21(q2:64)", backward="q4:64")
        step(schedule, mine, width - 1, x, y)
        state = wire.state_dict()
        wire.detach()
        wire = compress_pipeline(schedule, forward="ef21(q2:64)", backward="q4:64")
        if rank == 1:
            wire.load_state_dict(state)
        reports.append(failure(lambda: step(schedule, mine, width - 1, x, y)))
        reports.append(failure(lambda: wire.load_state_dict({"links": {}})))
        own = copy.deepcopy(wire.state_dict())
        last = max(own["links"])
        reports.append([failure(lambda: wire.load_state_dict(wrong)) for wrong in (None, {}, {"links": None})])
        for wrong in (
            None, {}, {"how": "q4:64"}, {**own["links"][last], "how": "q1"}, {**own["links"][last], "counts": None},
            {**own["links"][last], "counts": {"a": 1}}, {**own["links"][last], "counts": {"0.0": "x"}},
            {**own["links"][last], "feedback": None}, {**own["links"][last], "feedback": {}},
        ):
            links = {name: {**state, "counts": {"0.0": 77}} for name, state in own["links"].items()} | {last: wrong}
            reports[-1].append(failure(lambda: wire.load_state_dict({"links": links})))
        reports[-1].append(str(wire.state_dict()) == str(own))
        schedule, mine = build("1F1B", rank, width, width)
        wire = compress_pipeline(schedule)
        step(schedule, mine, width - 1, x, y)
        wire.inference = rank != 2
        given = [x] if rank == 0 else []
        reports.append(failure(lambda: schedule.eval(*given, **({"target": y} if rank == 2 else {}))))
        tell(rank, folder, reports)
"""
DEAD = """
    import json, os, signal
    import torch
    import torch.distributed as dist
    from helpers.pipeline_model import batches, build, failure, join, step

    from shrinkpoint.comm import compress_pipeline


    def of_rank(rank, width, folder):
        join(rank, width, folder, seconds=120)
        schedule, mine = build("1F1B", rank, width, width)
        compress_pipeline(schedule)

        def train():
            for number, (x, y) in enumerate(batches(3)):
                if rank == 1 and number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                step(schedule, mine, width - 1, x, y)

        reports = failure(train)
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(reports, file)
        os._exit(0)
"""
UNEVEN = """
    import json, os
    from helpers.pipeline_model import batches, build, failure, join, step

    from shrinkpoint.comm import compress_pipeline


    def of_rank(rank, width, folder):
        join(rank, width, folder, seconds=120)
        schedule, mine = build("1F1B", rank, width, width)
        compress_pipeline(schedule)
        reports = [failure(lambda: step(schedule, mine, width - 1, x, y)) for x, y in batches(1, rows=10)]
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(reports, file)
        os._exit(0)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """By case, what each rank says."""
    cases = ["alone", "compressors", "off", "options", "values", "state", "links", "forms", "inference"]
    reports = ranks(DISAGREE, 3, tmp_path_factory.mktemp("disagree"))
    return dict(zip(cases, zip(*reports, strict=True), strict=True))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("compressors", ["'0 forward'", "q4:64", "q8:64"]),
        ("off", ["'1 backward'", "off"]),
        ("options", ["'1 forward'", "top10", "min_numel"]),
        ("values", ["nonfinite is raise at one end and pass at the other"]),
        ("state", ["'state'"]),
        ("inference", ["inference is True at one end and False at the other"]),
    ],
)
def test_every_rank_of_a_pipeline_that_disagrees_raises(reports, case, words):
    assert [name for name, _ in reports[case]] == ["MismatchError"] * 3
    assert all(word in text for _, text in reports[case] for word in words)


def test_the_state_of_other_links_is_refused(reports):
    assert all(name == "MismatchError" and "links none" in text for name, text in reports["links"])


def test_what_is_no_state_is_refused_and_changes_nothing(reports):
    for *refusals, is_unchanged in reports["forms"]:
        assert [name for name, _ in refusals] == ["MismatchError"] * 12
        assert is_unchanged


def test_a_rank_that_never_compressed_is_named(reports):
    assert reports["alone"][0] is None
    for name, text in reports["alone"][1:]:
        assert name == "MismatchError"
        assert "stage 0 published no configuration" in text and "within 2 s" in text


def test_the_others_of_a_dead_rank_get_an_error(tmp_path):
    with contextlib.suppress(AssertionError):  # for one of the processes was killed
        ranks(DEAD, 3, tmp_path)
    reports = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2)}
    assert not (tmp_path / "1.json").exists()
    assert all(report is not None for report in reports.values())


def test_micro_batches_of_different_sizes_are_refused_before_they_are_sent(tmp_path):
    """torch posts buffers of the first micro-batch's shape: a message of another size would end the other process."""
    sender, receiver = ranks(UNEVEN, 2, tmp_path)
    assert sender[0][0] == "MismatchError"
    assert "micro-batch 2" in sender[0][1] and "reset_shapes" in sender[0][1]
    assert receiver[0] is not None
