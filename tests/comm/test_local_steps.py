"""Ranks that train alone and average once a round: real processes, a real gloo group."""

from __future__ import annotations

import math

import pytest
from helpers.processes import ranks

START = """
    import copy, datetime, math
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import mse_loss
    import shrinkpoint as sp
    from helpers.replica_search import Net, batch, caught, digest, drawn, join, leave, plain_net
    from shrinkpoint.comm import LocalSteps
    from shrinkpoint.comm import OuterSGD
    from shrinkpoint.comm import parse

    SPARSE = {"compressor": "ef(top6.25:256:q2:64, decay=0.95)", "outer": OuterSGD(lr=1.0, momentum=0.0)}
    SETUPS = {
        "exact": {},
        "sparse": SPARSE,
        "momentum": {"compressor": "ef(top6.25:256:q2:64, decay=0.95)", "outer": OuterSGD(lr=0.7, momentum=0.9)},
        "random": {"compressor": "ef(rand25)", "outer": OuterSGD(lr=1.0, momentum=0.0)},
        "dense": {"compressor": "ef(q2:64)"},
        "reference": {"compressor": "ef21(top10:4096)", "outer": OuterSGD(lr=1.0, momentum=0.0)},
        "dither": {"compressor": "q4:64:dither"},
        "adam": {"outer": lambda weights: torch.optim.Adam(weights, lr=1e-2)},
    }


    class Run:
        "A model that trains on the batches of a rank."

        def __init__(self, rank, every=5, *, seed=0, net=plain_net, **arguments):
            self.rank, self.model = rank, net(seed)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
            self.local = LocalSteps(self.model, self.optimizer, every, **arguments)

        @property
        def parts(self):
            return {"model": self.model, "optimizer": self.optimizer, "local": self.local}

        def loss(self, step):
            x, y = batch(step, self.rank)
            return mse_loss(self.model(x), y)

        def steps(self, *numbers):
            ended = []
            for step in numbers:
                loss = self.loss(step)
                self.optimizer.zero_grad()
                loss.backward()
                ended.append(self.local.step())
            return ended

        def held_out(self):
            x, y = batch(10**6, 0, size=512)
            return float(mse_loss(self.model(x), y))

        @property
        def bits(self):
            return digest(*self.model.parameters())

        @property
        def global_bits(self):
            return digest(*self.local.state_dict()["weights"].values())


    def gathered(value, width):
        values = [None] * width
        dist.all_gather_object(values, value)
        return values
"""

LONG = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        for name, arguments in SETUPS.items():
            run = Run(rank, seed=rank, **arguments)  # all begin with the weights of rank 0
            before = run.held_out()
            ended = run.steps(*range(60))
            reports[name] = [run.bits, run.global_bits, before, run.held_out(), ended.count(True), ended[4::5]]
            run.steps(60)
            reports["alone " + name] = run.bits
            reports["momentum " + name] = run.local.outer.param_groups[0].get("momentum")
        ends = dist.new_group([0, 3])
        if rank in (0, 3):
            run = Run(rank, 2, group=ends, **SPARSE)
            run.steps(*range(4))
            reports["ends"] = run.bits
            for every in (1, 30):
                run = Run(rank, every, group=ends)
                run.steps(*range(every))
                reports[f"momentum of {every} steps"] = run.local.outer.param_groups[0]["momentum"]
        leave(reports, rank, folder)
"""

SHORT = """
    def plain(run, step):
        loss = run.loss(step)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()


    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)

        # every=1, without compression: weights are averaged after each step
        run, own = Run(rank, 1, outer=OuterSGD(lr=1.0, momentum=0.0)), Run(rank, 10**6)
        reports["average"] = []
        for step in range(5):
            run.steps(step)
            plain(own, step)
            for parameter, averaged in zip(own.model.parameters(), run.model.parameters(), strict=True):
                mean = sum(gathered(parameter.detach(), width)) / width
                parameter.data.copy_(mean)
                reports["average"].append(bool(torch.allclose(mean, averaged, rtol=0, atol=1e-6)))
        reports["moved"] = float((own.model[0].weight - plain_net()[0].weight).norm())
        hops = run.local.link_stats.items()
        reports["ledger"] = {name: [hop.messages, hop.raw_bytes, hop.wire_bytes] for name, hop in hops}

        # two rounds by hand: what each rank sends, the mean of what is decoded, and Nesterov's momentum
        spec, diloco = "top12.5:512:q2:64", OuterSGD(lr=0.7, momentum=0.9)
        run = Run(rank, 3, compressor="ef(top12.5:512:q2:64, decay=0.5)", outer=diloco)
        compressor, sizes = parse(spec), [p.numel() for p in run.model.parameters()]
        weights = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
        # the layout of a segment: from the last parameter to the first, each at a multiple of 64 values
        def laid_out(flat):
            parts = [nn.functional.pad(x, (0, -len(x) % 64)) for x in reversed(flat.split(sizes))]
            return torch.cat(parts)
        def restored(flat):
            parts = flat.split([size + -size % 64 for size in reversed(sizes)])
            return torch.cat([part[:size] for part, size in zip(reversed(parts), sizes, strict=True)])
        error, momentum, reports["by hand"] = 0.0, 0.0, []
        for number in range(2):
            run.steps(3 * number, 3 * number + 1)
            plain(run, 3 * number + 2)
            now = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
            error = 0.5 * error + laid_out(weights - now)
            sent = compressor.decode(compressor.encode(error), torch.empty_like(error))
            error = error - sent
            mean = restored(sum(gathered(sent, width)) / width)
            momentum = 0.9 * momentum + mean
            weights = weights - 0.7 * (mean + 0.9 * momentum)
            run.local.advance()  # for a step that the loop took
            now = torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])
            reports["by hand"].append(bool(torch.allclose(now, weights, rtol=0, atol=1e-6)))
        hop = run.local.link_stats["all-gather"]
        size = compressor.wire_bytes(error.shape, error.dtype)
        reports["bytes"] = [hop.messages, hop.wire_bytes, size, hop.raw_bytes]

        # a run that is saved in the middle of a round, and restored in the middle of another one
        for name, arguments in SETUPS.items():
            run = Run(rank, **arguments)
            run.steps(*range(8))
            with sp.CheckpointManager(f"{folder}/{name}/{rank}") as manager:
                manager.save(8, **run.parts)
            run.steps(*range(8, 17))
            again = Run(rank, seed=9, **arguments)
            again.steps(90, 91)
            sp.CheckpointManager(f"{folder}/{name}/{rank}").restore(**again.parts)
            reports["place " + name] = [again.local.round, again.local.steps_in_round]
            again.steps(*range(8, 17))
            reports["resumed " + name] = [again.bits == run.bits, again.global_bits == run.global_bits, run.bits]
            again.steps(*range(17, 20)), run.steps(*range(17, 20))
            reports["resumed " + name] += [again.bits == run.bits, again.bits]

        # parameters of several dtypes, and one that is frozen
        class Mixed(Net):
            def __init__(self, seed):
                super().__init__(seed)
                self.conv.weight.requires_grad_(False)

        model = Mixed(rank).to(memory_format=torch.channels_last)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers = [torch.optim.SGD(trained[:4], lr=0.1), torch.optim.AdamW(trained[4:], lr=3e-3)]
        local = LocalSteps(model, optimizers, 2, compressor="ef(top10:256)")
        frozen = digest(model.conv.weight)
        for step in range(4):
            x = drawn(8, 36, seed=1000 * step + rank)
            model(x.view(8, 1, 6, 6), step).square().mean().backward()
            local.step()
            local_bits = digest(*trained)
        reports["mixed"] = [digest(*trained), digest(model.conv.weight) == frozen]
        reports["dtypes"] = sorted({str(weights.dtype) for weights in local.state_dict()["weights"].values()})

        # a bfloat16 model: the global weights keep what is too small for it
        narrow = nn.Linear(64, 64).bfloat16()
        local = LocalSteps(narrow, torch.optim.SGD(narrow.parameters(), lr=1.0), 1, outer=OuterSGD(2**-12, 0.0))
        weights = local.state_dict()["weights"]["bias"]
        began = weights.clone()
        for _ in range(4):
            with torch.no_grad():
                narrow.bias.add_(1.0)
            local.advance()
        moved = weights.clone()
        local.advance()  # where nobody has moved, nothing changes
        reports["narrow"] = [digest(*narrow.parameters()), str(narrow.weight.dtype)]
        reports["small steps"] = [float((moved - began).mean()), bool(torch.equal(moved, weights))]

        # one rank alone averages with nobody
        single = [dist.new_group([of]) for of in range(width)][rank]
        run, own = Run(rank, 2, group=single, outer=OuterSGD(1.0, 0.0), compressor="ef(top10)"), Run(rank, 10**6)
        run.steps(0, 1), plain(own, 0), plain(own, 1)
        pairs = zip(run.model.parameters(), own.model.parameters(), strict=True)
        reports["single"] = [
            all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs),
            run.local.link_stats["all-gather"].messages,
        ]
        leave(reports, rank, folder)
"""

WRONG = """
    def of_rank(rank, width, folder):
        reports = join(rank, width, folder)
        wrong = reports["wrong"] = {}

        def made(model, *, of=None, every=5, **arguments):
            optimizer = torch.optim.SGD((of or model).parameters(), lr=0.1)
            return LocalSteps(model, optimizer, every, **arguments)

        width_of = lambda of: 48 + 8 * (rank == of)
        wrong["shapes"] = caught(lambda: made(plain_net(width=width_of(1))))
        wrong["dtypes"] = caught(lambda: made(plain_net().to((torch.float32, torch.float64)[rank])))
        class Swapped(nn.Module):
            def __init__(self, *names):
                super().__init__()
                for name in names:
                    self.register_parameter(name, nn.Parameter(torch.ones(3, 3)))

        wrong["names"] = caught(lambda: made(Swapped(*("ab", "ba")[rank])))
        wrong["number"] = caught(lambda: made((plain_net()[:4], plain_net())[rank]))
        partly = plain_net()
        partly.requires_grad_(rank == 0)
        wrong["frozen"] = caught(lambda: made(partly))
        wrong["empty"] = caught(lambda: made(nn.ReLU(), of=plain_net()))
        wrong["strange"] = caught(lambda: made(plain_net(), of=plain_net() if rank else None))
        lazy = nn.LazyLinear(3)
        wrong["lazy"] = caught(lambda: LocalSteps(lazy, torch.optim.SGD(lazy.parameters())))
        wrong["complex"] = caught(lambda: made(nn.Linear(3, 3, dtype=torch.complex64)))
        wrong["meta"] = caught(lambda: made(nn.Linear(3, 3, device="meta")))
        apart = plain_net(seed=rank)
        apart[0].requires_grad_(False)
        made(apart)
        reports["frozen"] = digest(*apart.parameters())
        thawed = plain_net()
        thawed[0].requires_grad_(False)
        local = made(thawed, every=1)
        thawed[0].requires_grad_(True)
        thawed(batch(0, rank)[0]).sum().backward()
        wrong["thawed"] = caught(local.step)
        replaced, longer = plain_net(), nn.Sequential(plain_net())
        local = made(replaced, every=1)
        replaced[0].weight = nn.Parameter(replaced[0].weight.detach().clone())
        wrong["replaced"] = caught(local.advance)
        local = made(longer, every=1)
        if rank:
            longer.append(nn.Linear(4, 4))
        wrong["added"] = caught(local.advance)
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = LocalSteps(model, optimizer, 1)
        if rank:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
        wrong["outside"] = caught(local.advance)
        for name, tensor in {
            "expanded": torch.ones(1).expand(3),
            "float8": torch.ones(3).to(torch.float8_e4m3fn),
            "sparse": torch.eye(3).to_sparse(),
        }.items():
            model = plain_net()
            if rank:
                model.register_parameter("odd", nn.Parameter(tensor, requires_grad=name != "sparse"))
            wrong[name] = caught(lambda: made(model))
        alone = plain_net()
        local = made(alone)
        wrong["twice"] = caught(lambda: made(alone))
        wrong["twice, compiled"] = caught(lambda: made(torch.compile(alone)))
        wrong["twice, in part"] = caught(lambda: made(nn.Sequential(alone[0], nn.ReLU())))
        local.close()
        other = made(alone)
        del other
        made(alone)
        wrong["no optimizer"] = caught(lambda: LocalSteps(alone, []))
        matrices = lambda tensors: torch.optim.SGD([x for x in tensors if x.dim() == 2], lr=1.0)
        wrong["part"] = caught(lambda: made(plain_net(), outer=matrices))
        wrong["no outer"] = caught(lambda: made(plain_net(), outer=lambda tensors: None))
        wrong["group"] = caught(lambda: made(plain_net(), group="all"))
        wrong["every"] = caught(lambda: made(plain_net(), every=5 + rank))
        wrong["zero"] = caught(lambda: made(plain_net(), every=0))
        wrong["compressor"] = caught(lambda: made(plain_net(), compressor=("top10", "top20")[rank]))
        wrong["outer"] = caught(lambda: made(plain_net(), outer=OuterSGD(0.5 + 0.5 * rank)))

        hasty = dist.new_group(timeout=datetime.timedelta(seconds=2))
        absent = dist.new_group()
        if rank == 0:
            wrong["absent"] = caught(lambda: made(plain_net(), group=absent, timeout=0.3))
        dist.barrier()

        # two objects, stepped in another order on each rank
        pair = [made(plain_net(), every=1, group=hasty) for _ in range(2)]
        wrong["order"] = caught(lambda: [local.step() for local in (pair if rank else pair[::-1])])
        dist.barrier()

        # a weight that is not finite, on one rank
        for name, value in ("nan", math.nan), ("inf", math.inf):
            run = Run(rank, 2, **SPARSE)
            run.steps(0, 1, 2)
            before = copy.deepcopy(run.local.state_dict())
            with torch.no_grad():
                run.model[2].weight[3, 4:6] = value if rank == 1 else 0.0
            wrong[name] = caught(lambda: run.local.step())
            after = run.local.state_dict()
            reports["kept " + name] = [
                digest(*before["weights"].values()) == digest(*after["weights"].values()),
                str(before["feedback"]) == str(after["feedback"]),
                run.local.link_stats["all-gather"].messages,
                all(weights.grad is None for weights in after["weights"].values()),
            ]
            with torch.no_grad():
                run.model[2].weight[3, 4:6] = 0.0
            run.local.step()  # and once it is mended, the round ends
            reports["mended " + name] = run.bits

        # a state of another step on one rank, of another run, and of what is not one
        run = Run(rank, 2, **SPARSE)
        run.steps(0, 1)
        state = copy.deepcopy(run.local.state_dict())
        run.steps(2, 3, 4)
        if rank == 1:
            run.local.load_state_dict(state)
        wrong["apart"] = caught(lambda: run.steps(5, 6))
        other = Run(rank, 2, seed=5, **SPARSE)
        other.steps(0, 1)
        if rank == 1:
            other.local.load_state_dict(state)
        wrong["another"] = caught(lambda: other.steps(2, 3))
        scheduled = Run(rank, 2)
        if rank == 1:
            scheduled.local.outer.param_groups[0]["lr"] = 0.1
        wrong["schedule"] = caught(lambda: scheduled.steps(0, 1))

        loads = reports["loads"] = {}
        for name, changed in {
            "rank": {"config": {**state["config"], "rank": "7 of 9"}},
            "weights": {"weights": {**state["weights"], "0.weight": torch.zeros(2, 2)}},
            "missing": {"weights": {k: v for k, v in state["weights"].items() if k != "0.bias"}},
            "feedback": {"feedback": {"first": {}, "second": {}}},
            "outer": {"outer": {}},
            "residuals": {"residuals": [1]},
            "round": {"round": -1},
        }.items():
            loads[name] = caught(lambda: Run(rank, 2, **SPARSE).local.load_state_dict({**state, **changed}))
        loads["compressor"] = caught(lambda: Run(rank, 2).local.load_state_dict(state))
        loads["nothing"] = caught(lambda: Run(rank, 2).local.load_state_dict({}))
        loads["none"] = caught(lambda: Run(rank, 2).local.load_state_dict(None))
        leave(reports, rank, folder)
"""

NAMES = ("exact", "sparse", "momentum", "random", "dense", "reference", "dither", "adam")


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return ranks(START + LONG, 4, tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return ranks(START + SHORT, 2, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    return ranks(START + WRONG, 2, tmp_path_factory.mktemp("wrong"))


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_have_the_same_bits_after_each_round_and_their_own_within_one(long, name):
    assert len({report[name][0] for report in long}) == len({report[name][1] for report in long}) == 1
    assert len({report[f"alone {name}"] for report in long}) == 4
    assert all(report[name][4:] == [12, [True] * 12] for report in long)


# Without "momentum": outer momentum repeats what error feedback sends late, and this small model diverges.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "momentum"])
def test_ranks_that_train_alone_learn_together(long, name):
    _, _, before, after, *_ = long[0][name]
    assert after < 0.7 * before, (before, after)


def test_outer_momentum_grows_with_the_ranks_unless_it_is_given(long):
    momenta = [long[0][f"momentum {name}"] for name in ("exact", "dense", "sparse", "momentum", "adam")]
    four = pytest.approx(1 - 4 ** (-0.6 * math.log(5, 30)))  # rounds of five steps
    assert momenta == [four, four, 0.0, 0.9, None]
    assert long[0]["momentum of 1 steps"] == 0
    assert long[0]["momentum of 30 steps"] == 1 - 2**-0.6


def test_a_group_may_be_some_of_the_ranks(long):
    assert long[0]["ends"] == long[3]["ends"]


def test_rounds_of_one_step_without_compression_average_weights(short):
    assert all(report["average"] == [True] * 30 for report in short)
    assert all(report["moved"] > 0.1 for report in short)


def test_rounds_are_what_the_papers_say(short):
    assert all(report["by hand"] == [True, True] for report in short)


def test_the_ledger_counts_what_is_sent(short):
    values = 64 * (18 + 1 + 36 + 1 + 3 + 1)  # parameters at multiples of 64 values
    hops = short[0]["ledger"]
    assert hops == {hop: [5, 5 * 4 * values / 2, 5 * 4 * values / 2] for hop in ("first hop", "second hop")}
    messages, wire_bytes, message_bytes, raw_bytes = short[0]["bytes"]
    assert (messages, raw_bytes) == (2, 2 * 4 * values)
    assert 0 <= wire_bytes - 2 * message_bytes < 2 * 16
    assert wire_bytes < raw_bytes / 15


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_saved_in_the_middle_of_a_round_continues_bit_for_bit(short, name):
    for report in short:
        assert report[f"place {name}"] == [1, 3]
        assert [report[f"resumed {name}"][at] for at in (0, 1, 3)] == [True] * 3
    assert short[0][f"resumed {name}"][2] != short[1][f"resumed {name}"][2]
    assert short[0][f"resumed {name}"][4] == short[1][f"resumed {name}"][4]


def test_parameters_may_have_several_dtypes_and_optimizers_and_be_frozen(short):
    assert short[0]["mixed"][0] == short[1]["mixed"][0]
    assert all(report["mixed"][1] for report in short)
    assert short[0]["dtypes"] == ["torch.float32", "torch.float64"]


def test_steps_too_small_for_bfloat16_add_up_in_the_global_weights(short):
    assert short[0]["narrow"] == short[1]["narrow"]
    assert short[0]["narrow"][1] == "torch.bfloat16"
    mean, is_still = short[0]["small steps"]
    assert mean == pytest.approx(4 * 2**-12, rel=0.01)
    assert is_still


def test_one_rank_alone_sends_nothing(short):
    assert all(report["single"] == [True, 0] for report in short)


MISMATCHES = {
    "shapes": "0.weight, float32 (48, 24) on rank 0, 0.weight, float32 (56, 24) on rank 1",
    "dtypes": "0.weight, float64 (48, 24) on rank 1",
    "names": "a, float32 (3, 3) on rank 0, b, float32 (3, 3) on rank 1",
    "number": "parameter 4: none on rank 0, 4.weight, float32 (4, 48) on rank 1",
    "every": "every: 5 on rank 0, 6 on rank 1",
    "compressor": "top10 on rank 0, top20 on rank 1",
    "outer": "lr=1.0",
    "apart": "round: 2 on rank 0, 1 on rank 1",
    "another": "global weights",
    "schedule": "lr=0.1",
    "order": "published no configuration within 2 s",
}
PROBLEMS = {
    "frozen": "LocalSteps, model, rank 1: no parameter that requires a gradient",
    "empty": "no parameter that requires a gradient",
    "strange": "rank 1",
    "lazy": "without a shape",
    "complex": "torch.complex64",
    "zero": "a whole number from 1",
    "meta": "on the meta device",
    "thawed": "LocalSteps, 0.weight, rank 0: a parameter that requires a gradient since",
    "replaced": "LocalSteps, 0.weight, rank 0: a parameter that was added or replaced since",
    "added": "LocalSteps, 1.weight, rank 1: a parameter that was added or replaced since",
    "outside": "LocalSteps, optimizer, rank 1: a tensor of shape (7,)",
    "expanded": "LocalSteps, odd, rank 1: a tensor whose elements share memory",
    "float8": "LocalSteps, odd, rank 1: torch.float8_e4m3fn; expected a floating-point dtype of 16 bits or more",
    "sparse": "LocalSteps, odd, rank 1: a tensor of layout torch.sparse_coo",
    "twice": "LocalSteps, model, rank 0: parameters that another LocalSteps averages",
    "twice, compiled": "LocalSteps, model, rank 0: parameters that another LocalSteps averages",
    "twice, in part": "LocalSteps, model, rank 0: parameters that another LocalSteps averages",
    "no optimizer": "LocalSteps, optimizer: an empty list; expected an optimizer",
    "part": "an optimizer of 3 of them and of 0 others; expected one of the 6 tensors",
    "no outer": "a function that returns a torch.optim.Optimizer",
    "group": "LocalSteps, group: 'all'",
    "nan": "2 values that are not finite",
    "inf": "2 values that are not finite",
}


@pytest.mark.parametrize(("expected", "texts"), [("MismatchError", MISMATCHES), ("PolicyError", PROBLEMS)])
def test_wrong_use_is_an_error_on_every_rank(wrong, expected, texts):
    for report in wrong:
        for name, text in texts.items():
            kind, found = report["wrong"][name]
            assert kind == expected and text in found, (name, found)


def test_frozen_parameters_are_those_of_rank_0_too(wrong):
    assert wrong[0]["frozen"] == wrong[1]["frozen"]


def test_a_rank_that_does_not_call_it_is_named(wrong):
    kind, text = wrong[0]["wrong"]["absent"]
    assert kind == "MismatchError" and "rank 1 published no configuration within 0.3 s" in text


@pytest.mark.parametrize("name", ["nan", "inf"])
def test_weights_that_are_not_finite_change_nothing_anywhere(wrong, name):
    assert all("pseudo-gradient of 2.weight, rank 1" in report["wrong"][name][1] for report in wrong)
    assert all(report[f"kept {name}"] == [True, True, 1, True] for report in wrong)
    assert wrong[0][f"mended {name}"] == wrong[1][f"mended {name}"]


LOADS = ("rank", "weights", "missing", "feedback", "outer", "residuals", "compressor", "nothing", "none", "round")


@pytest.mark.parametrize("name", LOADS)
def test_a_state_of_another_set_up_is_refused(wrong, name):
    expected = "PolicyError" if name == "round" else "MismatchError"
    assert all(report["loads"][name][0] == expected for report in wrong)
