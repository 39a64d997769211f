"""Stages of every make: shapes given or found, traced, with several tensors, with statistics, in evaluation."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

PROGRAM = """
    import warnings

    import torch
    from helpers.pipeline_model import (
        CPU, ROWS, WIDTH, batches, build, descend, failure, join, loss_of, parts, same, scheduled, step, tell,
        trained_here, weights,
    )
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

    from shrinkpoint.comm import compress_pipeline, insert_compression

    HOW = dict(forward="q4:64", backward="q8:64")


    def train(schedule, module, rank, data):
        for x, y in data:
            step(schedule, {rank: module}, 1, x, y)


    def here(model, data, after, micro=4, **how):
        points = insert_compression(model, after, micro_batches=micro, **(how or HOW))
        for x, y in data:
            for part, wanted in zip(x.tensor_split(micro), y.tensor_split(micro)):
                (loss_of(model(part), wanted) / micro).backward()
            descend([model])
        points.remove()
        return model.state_dict()


    def given_shapes(rank, data):
        module = parts(2)[rank]
        like = torch.empty(ROWS // 4, WIDTH, requires_grad=True)
        stage = PipelineStage(module, rank, 2, CPU, input_args=like, output_args=like)
        wire = compress_pipeline(stage, **HOW)
        train(scheduled("1F1B", [stage]), module, rank, data)
        return [same(weights({rank: module}), trained_here(2, data, **HOW)[1]), failure(wire.reset_shapes)]


    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.left(x), torch.arange(len(x)), self.right(x)


    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.side, self.table = nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH), nn.Embedding(8, WIDTH)

        def forward(self, left, number, right):
            return self.body(left) + self.side(right) + self.table(number % 8)


    class Whole(nn.Module):
        def __init__(self, first, last):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            between = self.first(x)
            return self.last(*between) if isinstance(between, tuple) else self.last(between)


    def whole(*kinds):
        torch.manual_seed(5)
        return Whole(*(kind() for kind in kinds))


    def cut(rank, data, *kinds, schedule="GPipe", **how):
        model = whole(*kinds)
        module = model.last if rank else model.first
        stage = PipelineStage(module, rank, 2, CPU)
        wire = compress_pipeline(stage, **(how or HOW))
        train(scheduled(schedule, [stage]), module, rank, data)
        expected = here(whole(*kinds), data, ["first"], **how)
        prefix = "last." if rank else "first."
        found = {prefix + name: value for name, value in module.state_dict().items()}
        counts = {name: [stats.messages, stats.wire_bytes] for name, stats in wire.link_stats().items()}
        return [same(found, expected), counts]


    def norm():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


    def traced(rank, data):
        part = torch.empty(ROWS // 4, WIDTH)
        stages = pipeline(parts(2), (part,), split_spec={"1": SplitPoint.BEGINNING})
        stage = stages.build_stage(rank, CPU)
        compress_pipeline(stage, **HOW)
        train(scheduled("1F1B", [stage]), stage.submod, rank, data)
        return same(dict(stage.submod.named_parameters()), trained_here(2, data, **HOW)[1])


    def evaluated(rank, data):
        schedule, mine = build("1F1B", rank, 2, 2)
        how = dict(forward="ef21(top10)", backward="ef21(q2:64)")
        wire = compress_pipeline(schedule, **how)
        seen, (x, y) = {}, data[0]

        def run():
            return schedule.eval(*([x] if rank == 0 else []), **({"target": y, "losses": []} if rank else {}))

        step(schedule, mine, 1, *data[0])
        seen["on"] = run()
        wire.inference = False
        before = wire.stats()
        seen["off"] = run()
        is_counted = wire.stats() != before
        wire.inference = True
        step(schedule, mine, 1, *data[1])
        expected = {}

        def each(points, model):
            if expected:
                return
            model.eval()
            with torch.no_grad():
                expected["on"] = torch.cat([model(part) for part in x.tensor_split(4)])
                points.inference = False
                expected["off"] = torch.cat([model(part) for part in x.tensor_split(4)])
                points.inference = True
            model.train()

        final = trained_here(2, data[:2], each=each, **how)[1]
        alike = [bool(torch.equal(seen[name], expected[name])) for name in seen if rank]
        return [same(weights(mine), final), alike, not is_counted]


    def warned(rank):
        schedule, _ = build("1F1B", rank, 2, 2)
        wire = compress_pipeline(schedule, forward="top10", backward="q4:64")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wire.inference = False
            wire.inference = False
        return [one.category.__name__ for one in caught]


    def resized(rank, data):
        schedule, mine = build("1F1B", rank, 2, 2)
        wire = compress_pipeline(schedule, **HOW)
        small = [(x[:6], y[:6]) for x, y in data[1:2]]
        expected = [trained_here(2, steps, micro=2, **HOW)[1] for steps in (data[:1], data[:1] + small)]
        del schedule, wire
        schedule, mine = build("1F1B", rank, 2, 2, micro=2)
        wire = compress_pipeline(schedule, **HOW)
        step(schedule, mine, 1, *data[0])
        found = [same(weights(mine), expected[0])]
        wire.reset_shapes()
        step(schedule, mine, 1, *small[0])
        return found + [same(weights(mine), expected[1])]


    def detached(rank, data):
        schedule, mine = build("1F1B", rank, 2, 2)
        wire = compress_pipeline(schedule, forward="q1", backward="q1")
        wire.detach()
        train(schedule, mine[rank], rank, data)
        first = same(weights(mine), trained_here(2, data)[1])
        compress_pipeline(schedule, **HOW)
        return [first, failure(lambda: compress_pipeline(schedule, **HOW))]


    def refused(rank, data):
        schedule, mine = build("1F1B", rank, 2, 2)
        wire = compress_pipeline(schedule, nonfinite="raise", **HOW)
        broken = data[0][0].clone()
        broken[5, 3] = float("nan")
        reports = [failure(lambda: step(schedule, mine, 1, broken, data[0][1]))]
        inputs, named = [broken] if rank == 0 else [], {"target": broken} if rank else {}
        reports.append(failure(lambda: schedule.eval(*inputs, **named)))
        reports.append(failure(wire.check))
        reports.append(failure(lambda: step(schedule, mine, 1, *data[1])))
        return [one and one[0] for one in reports], {name: one["nonfinite"] for name, one in wire.stats().items()}


    def wrong(rank):
        schedule, _ = build("1F1B", rank, 2, 2)
        unknown, _ = build("1F1B", rank, 2, 2)
        unknown._stage._retrieve_recv_grads = None
        return [
            failure(lambda: compress_pipeline(unknown)),
            failure(lambda: compress_pipeline(schedule, per_link={1: {"forward": "q4"}})),
            failure(lambda: compress_pipeline(schedule, per_link={0: {"foreward": "q4"}})),
            failure(lambda: compress_pipeline([])),
            failure(lambda: compress_pipeline(nn.Linear(2, 2))),
            failure(lambda: compress_pipeline(schedule, forward="q99")),
            failure(lambda: compress_pipeline(schedule, per_link={0: "q4"})),
            failure(lambda: compress_pipeline(schedule, per_link=["q4"])),
            failure(lambda: compress_pipeline(schedule, forward="same")),
            failure(lambda: compress_pipeline(schedule, forward="q4:64", backward="ef(same)")),
            failure(lambda: compress_pipeline(schedule, per_link={0: {"forward": None, "backward": "same"}})),
            failure(lambda: compress_pipeline(schedule, forward="h64(top10)", backward="same")),
        ]


    def wrong_later(rank):
        wire = compress_pipeline(build("1F1B", rank, 2, 2)[0], **HOW)
        reports = [failure(lambda: setattr(wire, "inference", "no"))]
        for ids in ("abc", None, [1.5], [[1], [2, 3]], [2**70]):
            reports.append(failure(lambda: wire.set_sample_ids(ids)))
        return reports


    def of_rank(rank, width, folder):
        join(rank, width, folder)
        data = batches(3)
        reports = {
            "given": given_shapes(rank, data), "tensors": cut(rank, data, Two, One),
            "fused": cut(rank, data, Two, One, schedule="1F1B"),
            "same": cut(rank, data, Two, One, forward="top25", backward="same", min_numel=16),
            "norm": cut(rank, data, norm, norm), "traced": traced(rank, data), "evaluated": evaluated(rank, data),
            "warned": warned(rank), "resized": resized(rank, data), "detached": detached(rank, data),
            "refused": refused(rank, data), "wrong": wrong(rank),
            "wrong later": wrong_later(rank),
        }
        tell(rank, folder, reports)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(PROGRAM, 2, tmp_path_factory.mktemp("stages"))


def test_stages_with_given_shapes_are_compressed_alike(reports):
    assert [report["given"][0] for report in reports] == [[], []]
    assert all("shapes that they were built with" in report["given"][1][1] for report in reports)


def test_several_tensors_cross_and_integers_as_they_are(reports):
    for case in ("tensors", "fused", "same"):
        assert [report[case][0] for report in reports] == [[], []]
        assert reports[0][case][1] == reports[1][case][1]
    messages = {name: count for name, (count, _) in reports[0]["tensors"][1].items()}
    assert messages == {"0 forward": 3 * 4 * 3, "0 backward": 3 * 4 * 2}  # integers have no gradient


def test_statistics_of_batch_norm_are_those_without_a_pipeline(reports):
    """torch runs the module on uninitialised memory to find shapes; its running mean must not keep that."""
    assert [report["norm"][0] for report in reports] == [[], []]


def test_traced_stages_are_compressed_alike(reports):
    assert [report["traced"] for report in reports] == [[], []]


def test_evaluation_is_that_of_one_process_and_changes_no_state(reports):
    assert [report["evaluated"] for report in reports] == [[[], [], True], [[], [True, True], True]]


def test_evaluation_without_the_topk_it_was_trained_with_is_warned_of_once(reports):
    assert [report["warned"] for report in reports] == [["LossWarning"]] * 2


def test_a_batch_of_another_size_crosses_after_reset_shapes(reports):
    assert [report["resized"] for report in reports] == [[[], []], [[], []]]


def test_a_detached_pipeline_is_what_it_was(reports):
    assert [report["detached"][0] for report in reports] == [[], []]
    assert all("PolicyError" in report["detached"][1][0] for report in reports)


def test_values_that_are_not_finite_are_refused_at_both_ends(reports):
    sender, receiver = (report["refused"] for report in reports)
    assert sender[0] == receiver[0]
    assert receiver[0] == ["PolicyError", "PolicyError", None, None]
    assert sender[1]["0 forward"] > 0 and receiver[1]["0 forward"] > 0


def test_what_cannot_be_is_refused_when_it_is_asked_for(reports):
    for report in reports:
        assert [name for name, _ in report["wrong"]] == ["PolicyError"] * 12
        assert [name for name, _ in report["wrong later"]] == ["PolicyError"] * 6
        assert "torch 2" in report["wrong"][0][1] and "_retrieve_recv_grads" in report["wrong"][0][1]
