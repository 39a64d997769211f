"""Replicas of local steps that die, join and come late: torchft's lighthouse, real processes, real kills."""

from __future__ import annotations

import json
import os

import pytest
from helpers.processes import run_forked

pytest.importorskip("torchft")

KILLS_BY_NIGHT = int(os.environ.get("SHRINKPOINT_RANK_KILLS", "4"))
"""For each setup; a kill takes some seconds, until the others know of it."""

START = """
    import json, os, random, signal, sys, time
    from pathlib import Path
    import torch, torch._dynamo, torchft
    from helpers.elastic_training import ElasticRun, exit_codes, host_lighthouse, kill, lines, make_manager, start
    from helpers.elastic_training import make_run, wait_until
    from helpers.replica_search import batch, digest, plain_net
    from torch.nn.functional import mse_loss

    folder = Path(sys.argv[1])

    def log_of(name):
        return folder / f"{name}.log"

    def trainer(name, setup, **changes):
        "Start a process that trains, by its name, which is a number."
        def work():
            run = make_run(name, setup, folder, **changes)
            run.train(log_of(name), folder / "end")
            run.manager.shutdown(wait=False)
        return start(work, log_of(name))

    def newest(name):
        return max((line["round"] for line in lines(log_of(name)) if "round" in line), default=-1)

    def finish(pids, **said):
        (folder / "end").touch()
        codes = exit_codes(pids)
        print(json.dumps({"codes": codes, "logs": {name: lines(log_of(name)) for name in pids}, **said}))
        kill(lighthouse)

    lighthouse = host_lighthouse(folder)
"""

KILLS = """
    SETUP, KILLS = sys.argv[2], int(sys.argv[3])
    draws = random.Random(int(sys.argv[4]))
    alive = {str(place): trainer(str(place), SETUP) for place in range(2)}
    wait_until(lambda: all(newest(name) >= 0 for name in alive))
    for number in range(KILLS):
        begin = max(newest(name) for name in alive)
        wait_until(lambda: min(newest(name) for name in alive) >= begin + 2)
        time.sleep(draws.random() * 0.1)  # in a round, or in the exchange at its end
        victim = draws.choice(sorted(alive))
        kill(alive.pop(victim))
        if draws.random() < 0.5 or not number:  # else while the others find out
            begin = max(newest(name) for name in alive)
            wait_until(lambda: max(newest(name) for name in alive) >= begin + 2)
        alive[str(2 + number)] = trainer(str(2 + number), SETUP)
        wait_until(lambda: newest(str(2 + number)) >= 0)
    begin = max(newest(name) for name in alive)
    wait_until(lambda: min(newest(name) for name in alive) >= begin + 2)
    finish(alive)
"""


def kills(folder, setup, number, seed=0):
    return json.loads(run_forked(START + KILLS, str(folder), setup, str(number), str(seed)).splitlines()[-1])


def check_equal_rounds(report, *, at_end=True):
    """All processes ended well, and had the same bits after each round, and at the end if they ended together."""
    assert set(report["codes"].values()) == {0}, report["logs"]
    rounds: dict[int, set[tuple[str, ...]]] = {}
    for log in report["logs"].values():
        for line in log:
            rounds.setdefault(line["round"], set()).add(tuple(line["bits"]))
    assert all(len(bits) == 1 for bits in rounds.values()), report["logs"]
    assert not at_end or len({(log[-1]["round"], *log[-1]["bits"]) for log in report["logs"].values()}) == 1


def test_a_replica_dies_and_another_one_recovers(tmp_path):
    report = kills(tmp_path, "sparse", 1)
    check_equal_rounds(report)
    (first, *log), new = (report["logs"][name] for name in sorted(report["logs"]))
    assert {line["width"] for line in log} == {1, 2} and first["joined"]
    assert new[0]["joined"] and new[0]["round"] > 2


@pytest.mark.nightly
@pytest.mark.parametrize("setup", ["exact", "sparse", "dense", "random", "reference", "adam"])
def test_replicas_that_die_at_random_moments_leave_equal_bits(setup, tmp_path):
    check_equal_rounds(kills(tmp_path, setup, KILLS_BY_NIGHT, seed=len(setup)))


EXCHANGE = """
    SETUP, FAULTS = sys.argv[2], json.loads(sys.argv[3])  # by process, what it does at the end of its first average

    def state_of(run):
        state = run.local.state_dict()
        return [*run.bits(), str(state["feedback"]), str(state["residuals"]), run.local.steps_in_round]

    def work(name):
        run, facts, first = ElasticRun(int(name), make_manager(folder, name), SETUP), {}, []
        average, commit = run.local._average_replicas, run.local._manager.should_commit

        def average_replicas(manager):
            facts.setdefault("before", state_of(run))
            result = average(manager)
            if manager.num_participants() == len(FAULTS) and not first and result == len(FAULTS):
                first.append(run.local.round)
                if FAULTS[name] == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if FAULTS[name] == "lose":
                    raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
            return result

        def should_commit(*arguments):
            is_committed = commit(*arguments)
            if not is_committed:
                facts.setdefault("after", state_of(run))
            return is_committed

        run.local._average_replicas, run.local._manager.should_commit = average_replicas, should_commit
        with log_of(name).open("a", buffering=1) as file:
            while not first or run.local.round < first[0] + 4:
                if run.take_step():
                    file.write(json.dumps({**facts, **run.report(), "first": first}) + "\\n")
                    facts.clear()
            run.local.close()
            file.write(json.dumps({"closed": True, **run.report()}) + "\\n")

    finish({name: start(lambda: work(name), log_of(name)) for name in FAULTS})
"""


def exchange(tmp_path, setup: str, faults: dict[str, str]):
    return json.loads(run_forked(START + EXCHANGE, str(tmp_path), setup, json.dumps(faults)).splitlines()[-1])


NIGHTLY = [pytest.param(setup, marks=pytest.mark.nightly) for setup in ("sparse", "reference", "adam")]


@pytest.mark.parametrize("setup", ["dense", *NIGHTLY])
def test_a_round_that_failed_changes_nothing_and_is_averaged_again(setup, tmp_path):
    report = exchange(tmp_path, setup, {"0": "lose", "1": "die"})
    assert report["codes"] == {"0": 0, "1": -9}, report["logs"]
    log = report["logs"]["0"]
    (failed,) = (line for line in log if "after" in line)
    assert failed["before"] == failed["after"] and failed["round"] == failed["first"][0] + 1
    rounds = [line["round"] for line in log]  # from a later one than the first if this replica started late
    assert rounds == [*range(rounds[0], rounds[-1] + 1), rounds[-1]] and rounds[-1] == failed["round"] + 3


@pytest.mark.nightly
@pytest.mark.parametrize("setup", ["sparse", "dense", "reference", "adam"])
def test_a_replica_that_lost_the_end_of_an_exchange_recovers_from_one_that_committed_it(setup, tmp_path):
    report = exchange(tmp_path, setup, {"0": "lose", "1": "", "2": ""})
    check_equal_rounds(report)
    lost = report["logs"]["0"][-1]["round"] - 3
    at_loss = [lost in [line["round"] for line in report["logs"][name]] for name in "012"]
    assert at_loss == [False, True, True]  # it took over the round after that


OTHERS = """
    def late():
        "A replica with another setting, one that is stopped for a while, and one that joins meanwhile."
        wait_until(lambda: newest("0") >= 2)
        other = trainer("1", "dense", compressor="ef(q4:64)")
        codes = exit_codes({"1": other})
        begin = newest("0")
        wait_until(lambda: newest("0") >= begin + 2)
        pids = {"0": first, "2": trainer("2", "dense")}
        wait_until(lambda: newest("2") >= 0)
        os.kill(pids["2"], signal.SIGSTOP)
        begin = newest("0")
        wait_until(lambda: newest("0") >= begin + 2)
        os.kill(pids["2"], signal.SIGCONT)
        begin = newest("0")
        wait_until(lambda: newest("2") >= begin + 2)
        finish(pids, other=lines(log_of("1")), code=codes["1"])

    first = trainer("0", "dense")
    late()
"""


@pytest.mark.nightly
def test_replicas_go_on_without_one_that_differs_and_take_back_one_that_was_stopped(tmp_path):
    report = json.loads(run_forked(START + OTHERS, str(tmp_path)).splitlines()[-1])
    check_equal_rounds(report)
    assert report["code"] == 1
    kind, text = report["other"][-1]["error"]
    assert kind == "MismatchError" and "ef(q4:64)" in text and "ef(q2:64)" in text


TORCHFT = """
    SETUP, CHANGES, WIDTH = sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])

    def wait_for_rounds(number):
        begin = max(newest(name) for name in alive)
        wait_until(lambda: min(newest(name) for name in alive) >= begin + number)

    alive = {str(place): trainer(str(place), SETUP, **CHANGES) for place in range(WIDTH)}
    wait_until(lambda: all(newest(name) >= 0 for name in alive))
    wait_for_rounds(4)
    time.sleep(0.02)  # into a round
    kill(alive.pop("1"))
    wait_for_rounds(2)
    alive["9"] = trainer("9", SETUP, **CHANGES)
    wait_until(lambda: newest("9") >= 0)
    wait_for_rounds(8)
    finish(alive)
"""


@pytest.mark.parametrize(
    ("setup", "changes", "width"),
    [
        ("diloco ef(q2:64)", {"delay": 1}, 2),
        ("ddp ef(q4:64)", {}, 2),
        pytest.param("diloco ef(top6.25:256:q2:64, decay=0.95)", {"delay": 2}, 4, marks=pytest.mark.nightly),
        pytest.param("diloco ef21(top10:4096)", {}, 3, marks=pytest.mark.nightly),
        pytest.param("ddp ef21(top10:4096)", {}, 4, marks=pytest.mark.nightly),
    ],
)
def test_torchfts_own_loops_send_compressed_messages_and_states(setup, changes, width, tmp_path):
    program = START + TORCHFT
    report = json.loads(run_forked(program, str(tmp_path), setup, json.dumps(changes), str(width)).splitlines()[-1])
    check_equal_rounds(report, at_end=False)
    log, new = report["logs"]["0"], report["logs"]["9"]
    assert {line["width"] for line in log} >= {width - 1, width} and new[0]["round"] > 6
    assert log[-1]["loss"] < 0.95 * log[0]["loss"]
    raw_bytes, wire_bytes = log[-1]["bytes"]
    assert 0 < wire_bytes < raw_bytes / 6


WRONG = """
    from datetime import timedelta
    import torch.distributed as dist
    from helpers.replica_search import caught
    from shrinkpoint.comm import CompressedManager, LocalSteps

    def work():
        model, manager = plain_net(), make_manager(folder, "0", quorum_timeout=timedelta(seconds=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = lambda **arguments: caught(lambda: LocalSteps(model, optimizer, **arguments))
        wrong = {
            "kind": made(manager="all"),
            "asynchronous": made(manager=make_manager(folder, "1", use_async_quorum=True)),
            "both": made(manager=manager, group=object()),
            "alone": made(manager=manager),
            "twice": made(manager=manager),
            "integers": caught(lambda: CompressedManager(make_manager(folder, "2")).allreduce(torch.tensor([1, 2]))),
        }
        log_of("0").write_text(json.dumps(wrong))

    kill(lighthouse)
    (folder / "lighthouse").unlink()
    lighthouse = host_lighthouse(folder, min_replicas=2)
    finish({"0": start(work, log_of("0"))})
"""


def test_wrong_managers_and_too_few_replicas_are_errors(tmp_path):
    report = json.loads(run_forked(START + WRONG, str(tmp_path)).splitlines()[-1])
    assert report["codes"] == {"0": 0}, report
    (errors,) = report["logs"]["0"]
    assert errors["kind"] == ["PolicyError", errors["kind"][1]] and "expected a torchft.Manager" in errors["kind"][1]
    assert "an asynchronous quorum; expected a synchronous one" in errors["asynchronous"][1]
    assert "a group and a manager; expected one of them" in errors["both"][1]
    assert errors["alone"][0] == "MembershipError" and "quorum_timeout" in errors["alone"][1]
    assert errors["integers"][0] == "PolicyError" and "allreduce: torch.int64" in errors["integers"][1]
    assert errors["twice"][0] == "PolicyError" and "Make a new torchft.Manager" in errors["twice"][1]
