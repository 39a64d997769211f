"""Processes that train in local steps with a membership, and may be killed: what they run, and what starts them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.replica_search import batch, digest, plain_net
from helpers.timeouts import PATIENCE
from torch.nn.functional import mse_loss

from shrinkpoint.comm.local_steps import LocalSteps
from shrinkpoint.comm.membership import Membership
from shrinkpoint.comm.outer_sgd import OuterSGD

SETUPS: dict[str, dict[str, Any]] = {
    "exact": {},
    "sparse": {"compressor": "ef(top6.25:256:q2:64, decay=0.95)", "outer": OuterSGD(lr=1.0, momentum=0.0)},
    "dense": {"compressor": "ef(q2:64)"},
    "random": {"compressor": "ef(rand25)", "outer": OuterSGD(lr=0.5, momentum=0.5)},
    "reference": {"compressor": "ef21(top10:4096)", "outer": OuterSGD(lr=1.0, momentum=0.0)},
    "adam": {"outer": lambda weights: torch.optim.Adam(weights, lr=1e-2)},
}


class ElasticRun:
    """A model that trains on batches of its own; `place` tells the batches of processes from each other."""

    def __init__(self, place: int, membership: Membership, setup: str, every: int = 5) -> None:
        torch.set_num_threads(1)
        self.place, self.membership, self.step = place, membership, 0
        self.model = plain_net(place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.local = LocalSteps(self.model, self.optimizer, every, membership=membership, **SETUPS[setup])

    def take_step(self) -> bool:
        x, y = batch(self.step, self.place)
        self.step += 1
        self.optimizer.zero_grad()
        mse_loss(self.model(x), y).backward()
        return self.local.step()

    def bits(self) -> list[str]:
        """Of what all ranks have the same: global weights, and the state of the outer optimizer."""
        state = self.local.state_dict()
        moments = [value for moment in state["outer"]["state"].values() for value in moment.values()]
        return [
            digest(*state["weights"].values()),
            digest(*(value.reshape(1) if value.dim() == 0 else value for value in moments if value is not None)),
        ]

    def report(self) -> dict[str, Any]:
        return {
            "round": self.local.round,
            "bits": self.bits(),
            "generation": self.membership.generation,
            "members": self.membership.members,
        }

    def train(self, rounds: int, log: Path, last_join: Callable[[], int | None] = lambda: 0) -> None:
        """Train until so many rounds have ended; append a line to a file after each.

        A process that starts late waits for the others if these end before it has joined. `last_join` is the round
        after which the last of them joined, as it is in its log, and None before: all go on to the end of the next one.
        They see it then, since no rank is in a round before all have ended the last.
        """
        with log.open("a", buffering=1) as file:
            file.write(json.dumps({"joined": True, **self.report()}) + "\n")
            while (joined := last_join()) is None or self.local.round < max(rounds, joined + 1):
                time.sleep(0.01)
                if self.take_step():
                    file.write(json.dumps(self.report()) + "\n")
            self.local.close()
            file.write(json.dumps({"closed": True}) + "\n")


def start(work: Callable[[], object], log: Path) -> int:
    """Fork a process that does this; what it raises is at the end of the log. Its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        with log.open("a") as file:
            file.write(json.dumps({"error": [type(error).__name__, str(error)]}) + "\n")
        os._exit(1)


def lines(log: Path) -> list[dict[str, Any]]:
    """What a process has written so far."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_until(condition: Callable[[], object], patience: float = PATIENCE / 2) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def exit_codes(pids: Mapping[str, int]) -> dict[str, int]:
    """Wait for processes: 0 for one that ended well, -9 for one that had to be killed since it did not end."""
    deadline, codes = time.monotonic() + PATIENCE / 2, dict[str, int]()
    while len(codes) < len(pids):
        for name, pid in pids.items():
            if name in codes:
                continue
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[name] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return {name: codes[name] for name in pids}
