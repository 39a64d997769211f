"""Gradients of replicas as low-rank factors: real processes on gloo, beside the paper's algorithm in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.processes import ranks

from shrinkpoint.comm import LowRank
from shrinkpoint.comm.compressed_allreduce import CompressedAllReduce
from shrinkpoint.comm.low_rank_allreduce import LowRankState, MatrixLayout
from shrinkpoint.errors import MismatchError

SPECS = ("lowrank2", "lowrank2(q8:64)", "lowrank2(q4:64)", "lowrank2(q4:64:dither)", "lowrank2(bf16)")

START = '''
    import copy, math
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy, mse_loss
    from torch.nn.parallel import DistributedDataParallel as DDP
    from helpers.replica_search import Net, batch, caught, digest, drawn, images, join, leave, plain_net
    from helpers.sent_messages import sent_messages
    from shrinkpoint.comm import LocalSteps, background_allreduce, compress_ddp, compress_fsdp

    SHAPES = {"tall": (160, 40), "wide": (40, 170), "square": (48, 48), "conv": (48, 8, 3, 3), "tiny": (2, 3),
              "vector": (33,), "scalar": (), "empty": (0, 7), "last": (48, 8, 3, 3), "turned": (50, 60)}


    class Linear(nn.Module):
        """A model whose gradients are those that a step is given."""

        def __init__(self):
            super().__init__()
            for name, shape in SHAPES.items():
                value = torch.zeros(shape)
                value = value.to(memory_format=torch.channels_last) if name == "last" else value
                value = torch.zeros(shape[::-1]).t() if name == "turned" else value
                self.register_parameter(name, nn.Parameter(value))

        def forward(self, gradients):
            return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


    def given(step, rank):
        """Gradients of a step: a part of rank 3 that turns slowly, and noise that differs between ranks."""
        gradients = {}
        for at, (name, shape) in enumerate(SHAPES.items()):
            noise = drawn(*shape or (1,), seed=10000 * step + 100 * rank + at).view(shape)
            if len(shape) > 1 and math.prod(shape):
                sides = shape[0], math.prod(shape[1:])
                a, b = (drawn(3, side, seed=at) + 0.1 * step * drawn(3, side, seed=50 + at) for side in sides)
                noise = 0.3 * noise + (a.t() @ (torch.tensor([[3.0], [2.0], [1.0]]) * b)).view(shape)
            gradients[name] = noise
        return gradients


    def run(spec, rank, steps, *, begin=0, state=None, change=None, **arguments):
        """The average gradients of some steps, and the handle."""
        model = DDP(Linear(), bucket_cap_mb=0.01)
        handle = compress_ddp(model, spec, **({"segment_numel": 9000} | arguments))
        state and handle.load_state_dict(state)
        averages = []
        for step in range(begin, begin + steps):
            gradients = given(step, rank)
            change and change(step, gradients)
            model.zero_grad()
            model(gradients).backward()
            averages.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
        return averages, handle


    def bits(averages):
        return digest(*(tensor for step in averages for tensor in step.values()))


    def flat(name, tensor):
        """A matrix as its values lie in memory, in float64; None if it is sent as it is."""
        if name in ("tiny", "empty") or tensor.dim() < 2:
            return None
        tensor = tensor.permute(0, 2, 3, 1) if name == "last" else tensor.t() if name == "turned" else tensor
        return tensor.reshape(tensor.shape[0], -1).double()


    def paper(rank_of_factors, width, steps, start):
        """Algorithms 1 and 2 of arXiv 1905.13727, matrix by matrix, of all ranks in one process."""
        averages = [{} for _ in range(steps)]
        for name in SHAPES:
            if flat(name, given(0, 0)[name]) is None:
                for step in range(steps):
                    averages[step][name] = sum(given(step, rank)[name].double() for rank in range(width)) / width
                continue
            right, errors = start[name].double().t(), [0.0] * width
            for step in range(steps):
                sums = [flat(name, given(step, rank)[name]) + errors[rank] for rank in range(width)]
                left = torch.linalg.qr(sum(one @ right for one in sums) / width)[0]
                right = sum(one.t() @ left for one in sums) / width
                averages[step][name] = left @ right.t()
                errors = [one - averages[step][name] for one in sums]
        return averages


    def distance(averages, expected):
        """The largest relative distance of a gradient of a step from what was expected."""
        distances = [0.0]
        for ours, theirs in zip(averages, expected):
            for name, value in theirs.items():
                mine = flat(name, ours[name])
                mine = ours[name].double() if mine is None else mine
                distances.append(float((mine - value).norm() / value.norm()) if value.numel() else 0.0)
        return max(distances)
'''

REFERENCE = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for count in range(width - 1, 9, 2):
            start = compress_ddp(DDP(Linear()), f"lowrank{count}").state_dict()["low_rank"]["right"]
            averages, _ = run(f"lowrank{count}", rank, 5)
            # matrices of which factors would not be half as large are sent as they are
            plain = {name: p.numel() for name, p in Linear().named_parameters() if name not in start}
            expected = paper(count, width, 5, {name: start.get(name) for name in SHAPES}) if len(plain) == 4 else None
            reports[f"lowrank{count}"] = [bits(averages), distance(averages, expected), sorted(plain)]
        leave(reports, rank, folder)
"""

SHORT = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for spec in ("lowrank2", "lowrank2(q8:64)", "lowrank2(q4:64)", "lowrank2(q4:64:dither)", "lowrank2(bf16)"):
            with sent_messages() as messages:
                whole, handle = run(spec, rank, 6)
            sent = [size for _, size in messages]
            ledger = sum(stats.wire_bytes for stats in handle.link_stats.values())
            half, first = run(spec, rank, 3)
            state = copy.deepcopy(first.state_dict())
            rest, _ = run(spec, rank, 3, begin=3, state=state)

            # what was averaged, and what is left on all ranks, is what there was
            lost = 0.0
            for name, residual in handle.state_dict()["low_rank"]["residuals"].items():
                total = residual.double() / width
                dist.all_reduce(total)
                total += sum(flat(name, step[name]) for step in whole)
                true = sum(flat(name, given(step, of)[name]) for step in range(6) for of in range(width)) / width
                lost = max(lost, float((total - true).norm() / true.norm()))

            inline = background_allreduce.is_gloo
            background_allreduce.is_gloo = lambda *_: False  # as on a GPU: one after the other, in one thread
            same, _ = run(spec, rank, 6)
            background_allreduce.is_gloo = inline
            reports[spec] = {"bits": bits(whole), "resumed": bits(half + rest), "ledger": [ledger, sum(sent)],
                             "lost": lost, "inline": bits(same),
                             "messages": {name: stats.messages for name, stats in handle.link_stats.items()}}

        # a value that is not finite, on one rank and in one step
        def spoil(value):
            def change(step, gradients):
                if step == 2 and rank == 1:
                    gradients["tall"][3, 4] = value
            return change

        for name, value in (("nan", math.nan), ("inf", math.inf)):
            averages, handle = run("lowrank2(q8:64)", rank, 6, change=spoil(value))
            spoilt = [[of for of, tensor in step.items() if not tensor.isfinite().all()] for step in averages]
            after = averages[5]["tall"] - run("lowrank2(q8:64)", rank, 6)[0][5]["tall"]
            reports[name] = [spoilt, bits(averages), int(averages[2]["tall"].isfinite().sum()),
                             float(after.norm() / averages[5]["tall"].norm())]

        # zeros in all steps but the last
        def vanish(step, gradients):
            step < 3 and [tensor.zero_() for tensor in gradients.values()]
        averages, _ = run("lowrank4", rank, 5, change=vanish)
        true = sum(given(4, of)["tall"] for of in range(width)) / width
        reports["zeros"] = [float(sum(t.abs().sum() for step in averages[:3] for t in step.values())),
                            float((averages[4]["tall"] - true).norm() / true.norm())]

        # matrices below min_numel, and their average through another compressor
        averages, handle = run("lowrank2(q4:64)", rank, 1, min_numel=1 << 20)
        torchs = sum(given(0, of)["tall"] for of in range(width)) / width
        factors = handle.state_dict()["low_rank"]["right"]
        reports["small"] = [float((averages[0]["tall"] - torchs).abs().max()), len(factors)]

        # ranks that differ, and states of others
        def differ(spec):
            run(spec[rank], rank, 1)
        reports["differ"] = [caught(lambda: differ(pair)) for pair in
                             (("lowrank2", "lowrank3"), ("lowrank2", "lowrank2(q8:64)"), ("lowrank2", "exact"))]
        _, other = run("lowrank3", rank, 1)
        reports["foreign"] = [caught(lambda: run("lowrank2", rank, 1, state=other.state_dict()))]
        broken = copy.deepcopy(other.state_dict())
        broken["low_rank"]["right"]["tall"] = torch.zeros(3, 41)
        reports["foreign"] += [caught(lambda: run("lowrank3", rank, 1, state=broken))]
        for part in ("low_rank", "hops"):
            partial = {key: value for key, value in other.state_dict().items() if key != part}
            reports["foreign"] += [caught(lambda: run("lowrank3", rank, 1, state=partial))]
        steps = [run("lowrank3", rank, count)[1].state_dict() for count in (1, 2)]
        reports["apart"] = caught(lambda: run("lowrank3", rank, 1, state=steps[rank]))
        reports["refused"] = [caught(lambda: compress_fsdp(nn.Linear(2, 2), None, "lowrank4")),
                              caught(lambda: compress_ddp(DDP(Linear()), "lowrank2(same)"))]
        leave(reports, rank, folder)
"""

LONG = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for spec in (None, "lowrank2", "lowrank2(q4:64)"):
            model = DDP(Net().to(memory_format=torch.channels_last), bucket_cap_mb=0.02, find_unused_parameters=True)
            handle = spec and compress_ddp(model, spec, segment_numel=2000)
            optimizer, losses = torch.optim.Adam(model.parameters(), lr=2e-3), []
            for step in range(100):
                optimizer.zero_grad()
                x, y = images(step, rank)
                # in every third step, and on one rank only, a branch has no gradient
                loss = cross_entropy(model(x, step + (rank == 0)), y)
                loss.backward()
                losses.append(float(loss))
                optimizer.step()
            reports[str(spec)] = [digest(*model.module.parameters()), sum(losses[-20:]) / 20, losses[0]]
        reports["groups"] = len(handle.state_dict()["low_rank"]["right"])
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return ranks(START + SHORT, 2, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return ranks(START + LONG, 3, tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module", params=[2, 3])
def reference(request, tmp_path_factory):
    return ranks(START + REFERENCE, request.param, tmp_path_factory.mktemp("reference"))


def test_averages_are_those_of_the_papers_algorithm(reference):
    """Odd numbers of factors on two ranks, even ones on three."""
    for report in reference:
        assert len(report) == 4
        for spec, (bits, distance, plain) in report.items():
            assert distance < 1e-4, spec
            assert plain == ["empty", "scalar", "tiny", "vector"]
            assert bits == reference[0][spec][0]


def test_all_ranks_get_the_same_bits_in_threads_and_without(short):
    for spec in SPECS:
        assert short[0][spec]["bits"] == short[1][spec]["bits"] == short[0][spec]["inline"] == short[1][spec]["inline"]


def test_a_resumed_run_gives_the_same_bits(short):
    for spec in SPECS:
        assert all(report[spec]["resumed"] == report[spec]["bits"] for report in short)


def test_the_ledger_has_the_bytes_that_were_sent(short):
    for spec in SPECS:
        for report in short:
            ledger, sent = report[spec]["ledger"]
            assert ledger == sent > 0


def test_bytes_are_those_of_factors_and_small_tensors(short):
    # values that are sent: small tensors in 64 each, and factors of rank 2 that begin at multiples of 64
    left = 2 * (160 + 40 + 48 + 48 + 48 + 60) + (0 + 48 + 32 + 32 + 32 + 8)
    right = 2 * (40 + 170 + 48 + 72 + 72 + 50) + (48 + 44 + 32 + 48 + 48 + 28)
    assert left % 64 == right % 64 == 0
    assert short[0]["lowrank2"]["ledger"][0] >= 6 * 4 * (left + right + 3 * 64)
    assert short[0]["lowrank2"]["ledger"][0] <= 6 * 4 * (left + right + 3 * 64 + 8 * 128)
    exact, eight, four = (short[0][f"lowrank2{inner}"]["ledger"][0] for inner in ("", "(q8:64)", "(q4:64)"))
    assert exact / eight > 3.4 and exact / four > 6


def test_nothing_is_lost_for_good_whatever_factors_are_sent_through(short):
    for spec in SPECS:
        assert all(report[spec]["lost"] < 1e-5 for report in short)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_value_that_is_not_finite_reaches_all_ranks_and_is_forgotten(short, value):
    for report in short:
        spoilt, digest, finite, after = report[value]
        assert spoilt == [[], [], ["tall"], [], [], []] and finite == 0
        assert digest == short[0][value][1] and after < 1


def test_a_gradient_that_was_zero_is_approximated_as_soon_as_it_is_not(short):
    assert all(report["zeros"][0] == 0 and report["zeros"][1] < 0.3 for report in short)


def test_gradients_below_min_numel_are_exact(short):
    assert all(report["small"][0] < 1e-6 and not report["small"][1] for report in short)


def test_ranks_and_states_that_differ_are_an_error_on_all_ranks(short):
    for report in short:
        assert [kind for kind, _ in report["differ"]] == ["MismatchError"] * 3
        assert [kind for kind, _ in report["foreign"]] == ["MismatchError"] * 4
        assert report["apart"][0] == "MismatchError"


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            None,
            [],
            {},
            {"residuals": None},
            {"right": [1]},
            {"residuals": {}},
            {"hops": None},
            {"hops": {"first": {}}},
        ),
        *({"right": {"weight": None}}, {"right": {"weight": torch.zeros(2, 9)}}),
        {"residuals": {"weight": torch.zeros(9, 8, dtype=torch.float64)}},
    ],
    ids=str,
)
def test_what_is_no_state_of_factors_is_refused_and_changes_nothing(wrong):
    weight, low_rank = torch.zeros(9, 8), LowRank(2)
    layout = MatrixLayout([("weight", weight)], low_rank, 0, 1 << 20)
    state = LowRankState(low_rank, layout, CompressedAllReduce(None, name="test"))
    before = copy.deepcopy(state.state_dict())
    changed = {"residuals": {"weight": torch.ones(9, 8)}, "right": {"weight": torch.ones(2, 8)}}
    with pytest.raises(MismatchError, match="low rank"):
        state.load_state_dict({**before, **changed, **wrong} if wrong else wrong)
    assert str(state.state_dict()) == str(before)
    state.load_state_dict({**before, **changed})
    assert torch.equal(state.state_dict()["residuals"]["weight"], torch.ones(9, 8))


def test_a_low_rank_is_refused_where_it_cannot_be(short):
    assert all([kind for kind, _ in report["refused"]] == ["PolicyError"] * 2 for report in short)


@pytest.mark.parametrize("spec", ["lowrank2", "lowrank2(q4:64)"])
def test_replicas_stay_equal_and_learn_with_branches_and_several_dtypes(long, spec):
    assert all(report[spec][0] == long[0][spec][0] for report in long)
    mean, plain = (sum(report[key][1] for report in long) / 3 for key in (spec, "None"))
    assert mean < plain + 0.15 and mean < long[0]["None"][2] / 2
    assert long[0]["groups"] >= 3
