"""Ranks of local steps that die, join and come late: real processes, real kills, real gloo groups."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
from helpers.processes import run_forked
from helpers.timeouts import PATIENCE

KILLS_BY_NIGHT = int(os.environ.get("SHRINKPOINT_RANK_KILLS", "4"))
"""For each setup; a kill takes some seconds, until the others know of it."""

START = """
    import itertools, json, os, random, signal, sys, time
    from pathlib import Path
    import torch.distributed as dist
    from helpers.elastic_training import ElasticRun, exit_codes, kill, lines, start, wait_until
    from shrinkpoint.comm.membership import Membership
    from shrinkpoint.comm.shared_file_store import SharedFileStore
    from shrinkpoint.errors import MembershipError

    folder = Path(sys.argv[1])

    def member(name, size, **settings):
        store = SharedFileStore(folder / "store")
        return Membership(store, size, name=name, **{"patience": 6.0, "timeout": 60.0, **settings})

    def log_of(name):
        return folder / f"{name}.log"

    def trainer(name, size, setup, rounds, last_join, **settings):
        "Start a process that trains, by its name, which is a number."
        def work():
            ElasticRun(int(name), member(name, size, **settings), setup).train(rounds, log_of(name), last_join)
        return start(work, log_of(name))

    def newest(name):
        return max((line["round"] for line in lines(log_of(name)) if "round" in line), default=-1)

    def round_of_joining(*names, generation=1):
        "The round after which the last of these processes joined, in a generation from this one on; None before."
        logs = [[line for line in lines(log_of(name)) if "joined" in line] for name in names]
        found = [[line["round"] for line in log if line["generation"] >= generation] for log in logs]
        return max(map(max, found)) if all(found) else None
"""

KILLS = """
    WIDTH, ROUNDS, KILLS, SETUP, SEED = 3, *map(int, sys.argv[2:4]), sys.argv[4], int(sys.argv[5])
    draws, places = random.Random(SEED), itertools.count(WIDTH)
    VICTIMS = [1 + (number % 3 == 2) for number in range(KILLS)]  # now and then two at once
    LAST = [str(WIDTH + place) for place in range(sum(VICTIMS[:-1]), sum(VICTIMS))]

    def train(place):
        return trainer(str(place), WIDTH, SETUP, ROUNDS, lambda: round_of_joining(*LAST))

    alive = {str(place): train(place) for place in range(WIDTH)}
    dead = []
    for number in range(KILLS):
        # in a round of 5 steps, with 10 ms between them: somewhere in it, or in the exchange at its end
        begin = max(newest(name) for name in alive)
        wait_until(lambda: min(newest(name) for name in alive) >= min(begin + 2, 4 + 6 * number))
        time.sleep(draws.random() * 0.2)
        victims = draws.sample(sorted(alive), VICTIMS[number])
        for victim in victims:
            kill(alive.pop(victim))
            dead.append(victim)
        if draws.random() < 0.5:  # while the others find out, or later
            wait_until(lambda: max(newest(name) for name in alive) >= min(begin + 4, 5 + 6 * number))
        for _ in victims:
            place = next(places)
            alive[str(place)] = train(place)
    codes = exit_codes(alive)
    print(json.dumps({"codes": codes, "logs": {name: lines(log_of(name)) for name in alive}, "dead": dead}))
"""


EXCHANGE = """
    FAULTS = json.loads(sys.argv[3])  # by process, what it does at the end of its average in round 2

    def fail_once(run, fault, facts):
        average, failed = run.local._average.average_, []

        def average_(tensor, group, layout=""):
            if run.local.round == 2 and failed:
                facts["retried with"] = digest(*run.local._residuals.values())
            lost = digest(*run.local._average.residuals().values())
            weights = run.local.state_dict()["weights"]
            moved = [weights[name] - p.detach() for name, p in run.model.named_parameters()]
            result = average(tensor, group, layout)
            if run.local.round == 2 and not failed:
                failed.append(fault)
                facts.update(before=lost, after=digest(*run.local._average.residuals().values()))
                facts["moved"] = [float(x.double().sum()) for x in moved]
                if fault == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "lose":
                    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
                if fault == "end and die":
                    run.membership.form = lambda: os.kill(os.getpid(), signal.SIGKILL)
            return result

        run.local._average.average_ = average_

    def work(name):
        run, facts = ElasticRun(int(name), member(name, len(FAULTS)), sys.argv[2]), {}
        fail_once(run, FAULTS[name], facts)
        with log_of(name).open("a", buffering=1) as file:
            while run.local.round < 4:
                weights = [float(x.double().sum()) for x in run.local.state_dict()["weights"].values()]
                if run.take_step():
                    state = run.local.state_dict()
                    facts["carried"] = digest(*run.local._residuals.values())
                    now = [float(x.double().sum()) for x in state["weights"].values()]
                    file.write(json.dumps({**facts, **run.report(), "was": weights, "now": now}) + "\\n")
                    facts.clear()
            run.local.close()

    from helpers.replica_search import digest
    pids = {name: start(lambda: work(name), log_of(name)) for name in FAULTS}
    codes = exit_codes(pids)
    print(json.dumps([codes, {name: lines(log_of(name)) for name in FAULTS}]))
"""


def exchange(tmp_path, setup: str, faults: dict[str, str]):
    return json.loads(run_forked(START + EXCHANGE, str(tmp_path), setup, json.dumps(faults)).splitlines()[-1])


@pytest.mark.parametrize("setup", ["sparse", "dense", "reference", "adam"])
def test_a_rank_that_lost_the_end_of_an_exchange_takes_over_from_one_that_ended_it(setup, tmp_path):
    codes, logs = exchange(tmp_path, setup, {"0": "lose", "1": "", "2": "die"})
    assert codes == {"0": 0, "1": 0, "2": -9}, logs
    assert [[line["round"] for line in logs[name]] for name in ("0", "1")] == [[1, 2, 3, 4]] * 2
    assert [line["bits"] for line in logs["0"]] == [line["bits"] for line in logs["1"]]
    assert [line["members"] for line in logs["0"]][1:3] == [["0", "1", "2"], ["0", "1"]]
    # its messages are in that average, so what they lost is what it still has to send; references begin again
    at_loss = logs["0"][2]
    is_kept = setup in ("sparse", "dense")
    assert (at_loss["carried"] == at_loss["after"] != at_loss["before"]) == is_kept
    assert "retried with" not in at_loss


@pytest.mark.parametrize("setup", ["sparse", "dense", "reference", "exact"])
def test_a_round_that_only_a_dead_rank_ended_is_averaged_again_by_the_others(setup, tmp_path):
    codes, logs = exchange(tmp_path, setup, {"0": "lose", "1": "end and die", "2": "lose"})
    assert codes == {"0": 0, "1": -9, "2": 0}, logs
    assert [[line["round"] for line in logs[name]] for name in ("0", "2")] == [[1, 2, 3, 4]] * 2
    assert [line["bits"] for line in logs["0"]] == [line["bits"] for line in logs["2"]]
    assert logs["0"][2]["members"] == ["0", "2"]
    # the message that was lost is not counted as sent
    for name in ("0", "2"):
        again = logs[name][2]
        assert again["retried with"] == (again["before"] if setup in ("sparse", "dense") else digest_of_nothing())
    if setup == "exact":  # the first step of Nesterov's momentum that the dead rank is no part of, as sums of tensors
        before, again = logs["0"][1], logs["0"][2]
        mean = [sum(pair) / 2 for pair in zip(again["moved"], logs["2"][2]["moved"], strict=True)]
        momentum = outer_momentum(logs["0"][:2])
        for was, now, moved, last in zip(before["now"], again["now"], mean, momentum, strict=True):
            assert now == pytest.approx(was - 0.7 * (moved + 0.9 * (0.9 * last + moved)), abs=1e-4)


def digest_of_nothing() -> str:
    return hashlib.sha256(b"").hexdigest()


def outer_momentum(rounds: list[dict]) -> list[float]:
    """The momentum after some rounds, as a sum of each tensor: a step is .7 (g + .9 (.9 m + g))."""
    momentum = [0.0] * len(rounds[0]["now"])
    for line in rounds:
        steps = [(was - now) / 0.7 for was, now in zip(line["was"], line["now"], strict=True)]
        means = [(step - 0.81 * last) / 1.9 for step, last in zip(steps, momentum, strict=True)]
        momentum = [0.9 * last + mean for last, mean in zip(momentum, means, strict=True)]
    return momentum


SLOW = """
    def returning(name):
        "Train; when it was left out, come back as a new process."
        settings = {"patience": 3.0, "name": name}
        run = ElasticRun(int(name), member(size=3, **settings), "sparse")
        try:
            run.train(10**6, log_of(name))
        except MembershipError as error:
            with log_of(name).open("a") as file:
                file.write(json.dumps({"left out": str(error)}) + "\\n")
        ElasticRun(int(name), member(size=3, **settings), "sparse").train(ROUNDS, log_of(name), last_join)

    ROUNDS = 60
    last_join = lambda: round_of_joining("2", generation=3)
    alive = {name: trainer(name, 3, "sparse", ROUNDS, last_join, patience=3.0) for name in "01"}
    alive["2"] = start(lambda: returning("2"), log_of("2"))
    wait_until(lambda: newest("2") >= 3)
    os.kill(alive["2"], signal.SIGSTOP)
    stopped = newest("2")
    wait_until(lambda: min(newest("0"), newest("1")) >= stopped + 3)
    os.kill(alive["2"], signal.SIGCONT)
    codes = exit_codes(alive)
    print(json.dumps([codes, {name: lines(log_of(name)) for name in alive}]))
"""


def test_a_rank_that_was_too_slow_is_told_that_it_was_left_out_and_may_come_back(tmp_path):
    codes, logs = json.loads(run_forked(START + SLOW, str(tmp_path)).splitlines()[-1])
    assert codes == {"0": 0, "1": 0, "2": 0}, logs["2"][-1]
    left_out = next(line["left out"] for line in logs["2"] if "left out" in line)
    assert "process '2' was too slow, and generation 2 has gone on without it" in left_out
    assert "Join as a new process" in left_out
    bits = [{line["round"]: line["bits"] for line in log if "round" in line} for log in logs.values()]
    assert bits[2].items() <= bits[0].items() == bits[1].items()


JOIN = """
    import torch
    from helpers.replica_search import caught, plain_net
    from shrinkpoint.comm.local_steps import LocalSteps

    def host(port_file):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(port_file).with_suffix(".new").write_text(str(store.port))
        Path(port_file).with_suffix(".new").rename(port_file)
        time.sleep(3600)

    port_file = folder / "port"
    host_pid = start(lambda: host(port_file), folder / "host.log")
    wait_until(port_file.exists)

    def member(name, size, **settings):
        store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False)
        return Membership(store, size, name=name, **{"patience": 6.0, "timeout": 60.0, **settings})

    def scheduled(name):
        "Two ranks whose outer rate is another one since the start."
        run = ElasticRun(int(name), member(name, 2), "dense")
        run.local.outer.param_groups[0]["lr"] = 0.25
        run.train(10**6, log_of(name))

    def joining(name):
        run = ElasticRun(int(name), member(name, 2), "dense")
        state = run.local.state_dict()
        parameters = [torch.equal(p, state["weights"][key]) for key, p in run.model.named_parameters()]
        buffers = [hop for hop in state["feedback"].values()]
        facts = {
            "rate": run.local.outer.param_groups[0]["lr"],
            "parameters": all(parameters),
            "feedback": [s["out"].get("residual") or None for hop in buffers for s in hop.values()],
            "residuals": len(state["residuals"]),
        }
        with log_of(name).open("a") as file:
            file.write(json.dumps({"facts": facts}) + "\\n")
        run.train(10**6, log_of(name))

    def misfit(name):
        model = plain_net(0, width=40)
        settings = {"compressor": "ef(q2:64)", "membership": member(name, 2)}
        make = lambda: LocalSteps(model, torch.optim.SGD(model.parameters()), 5, **settings)
        log_of(name).write_text(json.dumps({"caught": caught(make)}) + "\\n")

    pids = {name: start(lambda: scheduled(name), log_of(name)) for name in "01"}
    wait_until(lambda: min(newest(name) for name in pids) >= 2)
    refused = {"5": start(lambda: misfit("5"), log_of("5"))}
    codes = exit_codes(refused)
    after = max(newest(name) for name in pids)
    wait_until(lambda: min(newest(name) for name in pids) >= after + 2)
    pids["2"] = start(lambda: joining("2"), log_of("2"))
    wait_until(lambda: sum("bits" in line for line in lines(log_of("2"))) >= 5)
    kill(host_pid)
    codes |= exit_codes(pids)
    print(json.dumps([codes, {name: lines(log_of(name)) for name in "0125"}]))
"""


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    return json.loads(run_forked(START + JOIN, str(tmp_path_factory.mktemp("join"))).splitlines()[-1])


def test_a_new_rank_gets_weights_outer_state_and_round_and_has_no_feedback(joined):
    logs = joined[1]
    facts = logs["2"][0]["facts"]
    assert facts == {"rate": 0.25, "parameters": True, "feedback": [None] * len(facts["feedback"]), "residuals": 0}
    bits = [{line["round"]: line["bits"] for line in logs[name] if "round" in line} for name in "012"]
    shared = bits[0].keys() & bits[1].keys() & bits[2].keys()
    assert len(shared) >= 3 and min(bits[2]) > 2
    assert all(bits[0][at] == bits[1][at] == bits[2][at] for at in shared)
    assert next(line["members"] for line in logs["2"] if "members" in line) == ["0", "1", "2"]


def test_a_new_rank_with_another_model_is_refused_and_the_others_go_on(joined):
    codes, logs = joined
    kind, text = logs["5"][0]["caught"]
    assert codes["5"] == 0 and kind == "MismatchError" and "0.weight, float32 (40, 24) on rank 2" in text


def test_when_the_host_of_the_store_dies_all_ranks_say_so(joined):
    codes, logs = joined
    for name in "012":
        kind, text = logs[name][-1]["error"]
        assert codes[name] == 1 and kind == "MembershipError" and "the store does not answer" in text


FEW = """
    def work(name, **settings):
        run = ElasticRun(int(name), member(name, 2, min_size=2, **settings), "exact")
        run.train(12, log_of(name), lambda: round_of_joining("2"))

    alone = start(lambda: work("9", timeout=1.0), log_of("9"))
    codes = exit_codes({"9": alone})
    pids = {name: start(lambda: work(name), log_of(name)) for name in "01"}
    wait_until(lambda: min(newest(name) for name in pids) >= 2)
    kill(pids.pop("0"))
    time.sleep(1)
    pids["2"] = start(lambda: work("2"), log_of("2"))
    codes |= exit_codes(pids)
    print(json.dumps([codes, {name: lines(log_of(name)) for name in "0129"}]))
"""


def test_too_few_ranks_wait_for_new_ones_and_not_for_ever(tmp_path):
    codes, logs = json.loads(run_forked(START + FEW, str(tmp_path)).splitlines()[-1])
    assert codes == {"9": 1, "1": 0, "2": 0}, logs
    kind, text = logs["9"][-1]["error"]
    assert kind == "MembershipError" and "too few processes in 1 s: 1; expected 2 or more" in text
    assert logs["1"][-2]["members"] == logs["2"][-2]["members"] == ["1", "2"]
    assert logs["1"][-2]["bits"] == logs["2"][-2]["bits"] and logs["1"][-2]["round"] >= 12


def check_kills(tmp_path, rounds: int, kills: int, setup: str, seed: int) -> None:
    arguments = str(tmp_path), str(rounds), str(kills), setup, str(seed)
    report = json.loads(run_forked(START + KILLS, *arguments, timeout=3 * PATIENCE).splitlines()[-1])
    logs = report["logs"]
    assert set(report["codes"].values()) == {0}, (report["codes"], {name: log[-1:] for name, log in logs.items()})
    bits: dict[int, list] = {}
    last = max(line["round"] for log in logs.values() for line in log if "round" in line)
    assert last >= rounds
    for log in logs.values():
        ended = [line["round"] for line in log if "round" in line]
        assert ended == [*range(ended[0], last + 1)] and log[-1] == {"closed": True}
        for line in log[:-1]:
            bits.setdefault(line["round"], []).append(line["bits"])
    assert all(found == [found[0]] * len(found) for found in bits.values())
    assert max(len(found) for found in bits.values()) == len(logs) == 3
    assert len(report["dead"]) >= kills


@pytest.mark.parametrize(("rounds", "setup"), [(14, "sparse"), (14, "dense"), (0, "sparse")])
def test_survivors_of_kills_at_random_moments_have_the_same_bits(rounds, setup, tmp_path):
    """With 0 rounds the others wait for a newcomer only, which joins in the middle of a round of theirs or after it."""
    check_kills(tmp_path, rounds, 1, setup, seed=len(setup))


@pytest.mark.nightly
@pytest.mark.parametrize("setup", ["exact", "sparse", "dense", "random", "reference", "adam"])
def test_survivors_of_many_kills_have_the_same_bits(setup, tmp_path):
    check_kills(tmp_path, 8 + 6 * KILLS_BY_NIGHT, KILLS_BY_NIGHT, setup, seed=len(setup))
