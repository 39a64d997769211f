"""Replicas that train with a torchft manager and may be killed: the processes, what they run, and their lighthouse."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from helpers.replica_search import batch, digest, plain_net
from helpers.timeouts import PATIENCE
from torch.distributed import TCPStore
from torch.nn.functional import mse_loss

from shrinkpoint.comm.local_steps import LocalSteps, OuterSGD

SETUPS: dict[str, dict[str, Any]] = {
    "exact": {},
    "sparse": {"compressor": "ef(top6.25:256:q2:64, decay=0.95)", "outer": OuterSGD(lr=1.0, momentum=0.0)},
    "dense": {"compressor": "ef(q2:64)"},
    "random": {"compressor": "ef(rand25)", "outer": OuterSGD(lr=0.5, momentum=0.5)},
    "reference": {"compressor": "ef21(top10:4096)", "outer": OuterSGD(lr=1.0, momentum=0.0)},
    "adam": {"outer": lambda weights: torch.optim.Adam(weights, lr=1e-2)},
}


def host_lighthouse(folder: Path, min_replicas: int = 1) -> int:
    """Start a process with torchft's lighthouse, whose address is in a file then. Its process id."""

    def work() -> None:
        from torchft.coordination import LighthouseServer

        settings = {"join_timeout_ms": 5000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1500}
        server = LighthouseServer(bind="[::]:0", min_replicas=min_replicas, **settings)
        (folder / "new").write_text(server.address())
        (folder / "new").rename(folder / "lighthouse")
        time.sleep(PATIENCE)

    pid = start(work, folder / "lighthouse.log")
    wait_until((folder / "lighthouse").exists)
    return pid


def make_manager(folder: Path, name: str, **settings: Any) -> Any:
    """A manager of a replica of one process. Its attribute `store` keeps the store alive that it needs."""
    import torchft

    store, seconds = TCPStore("localhost", 0, is_master=True, wait_for_workers=False), timedelta(seconds=1)
    fixed = {"load_state_dict": None, "state_dict": None, "use_async_quorum": False, "rank": 0, "world_size": 1}
    addresses = {"store_addr": "localhost", "store_port": store.port, "hostname": "localhost"}
    group = torchft.ProcessGroupGloo(timeout=PATIENCE / 4 * seconds)
    waits = {"timeout": PATIENCE / 4 * seconds, "quorum_timeout": PATIENCE / 4 * seconds, "min_replica_size": 1}
    lighthouse = (folder / "lighthouse").read_text()
    arguments = {**fixed, **addresses, **waits, "lighthouse_addr": lighthouse, "replica_id": name, **settings}
    manager = torchft.Manager(pg=group, **arguments)
    manager.store = store
    return manager


class ElasticRun:
    """A model that trains on batches of its own; `place` tells the batches of processes from each other."""

    def __init__(self, place: int, manager: Any, setup: str, every: int = 5, **changes: Any) -> None:
        torch.set_num_threads(1)
        self.place, self.manager, self.step = place, manager, 0
        self.model = plain_net(place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.local = LocalSteps(self.model, self.optimizer, every, manager=manager, **{**SETUPS[setup], **changes})

    def take_step(self) -> bool:
        x, y = batch(self.step, self.place)
        self.step += 1
        self.optimizer.zero_grad()
        mse_loss(self.model(x), y).backward()
        return self.local.step()

    def bits(self) -> list[str]:
        """Of what all replicas have the same: global weights, parameters, and the state of the outer optimizer."""
        state = self.local.state_dict()
        moments = [value for moment in state["outer"]["state"].values() for value in moment.values()]
        return [
            digest(*state["weights"].values()),
            digest(*self.model.parameters()),
            digest(*(value.reshape(1) if value.dim() == 0 else value for value in moments if value is not None)),
        ]

    def report(self) -> dict[str, Any]:
        return {"round": self.local.round, "bits": self.bits(), "width": self.manager.num_participants()}

    def train(self, log: Path, end: Path) -> None:
        """Train until there is a file `end` at the end of a round; append a line to a file after each round."""
        with log.open("a", buffering=1) as file:
            file.write(json.dumps({"joined": True, **self.report()}) + "\n")
            has_ended = False
            while not has_ended:
                time.sleep(0.01)
                if self.take_step():
                    file.write(json.dumps(self.report()) + "\n")
                    has_ended = end.exists()
            self.local.close()
            file.write(json.dumps({"closed": True, **self.report()}) + "\n")


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
