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

from shrinkpoint.comm import CompressedManager, LinkStats, LocalSteps, OuterSGD

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


class Run:
    """A model that trains on batches of its own; `place` tells the batches of processes from each other."""

    joins_when_made = False  # else at the end of its first round
    links: Mapping[str, LinkStats]

    def __init__(self, place: int, manager: Any) -> None:
        torch.set_num_threads(1)
        self.place, self.manager, self.step = place, manager, 0
        self.model = plain_net(place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    @property
    def round(self) -> int:
        """The number of rounds that replicas have averaged."""
        return int(self.manager.current_step())

    def take_step(self) -> bool:
        """Take a step, and return whether a round ended."""
        round = self.round
        x, y = batch(self.step, self.place)
        self.step += 1
        self.optimizer.zero_grad()
        mse_loss(self.model(x), y).backward()
        self.optimizer.step()
        return self.round > round

    def bits(self) -> list[str]:
        """Of what all replicas have the same at the end of a round."""
        return [digest(*self.model.parameters())]

    def close(self) -> None:
        pass

    def report(self) -> dict[str, Any]:
        x, y = batch(10**6, 0, size=256)
        with torch.no_grad():
            loss = float(mse_loss(self.model(x), y))
        sent = [sum(getattr(link, key) for link in self.links.values()) for key in ("raw_bytes", "wire_bytes")]
        said = {"round": self.round, "bits": self.bits(), "width": self.manager.num_participants()}
        return {**said, "loss": loss, "bytes": sent}

    def train(self, log: Path, end: Path) -> None:
        """Train until there is a file `end` at the end of a round; append a line to a file after each round."""
        with log.open("a", buffering=1) as file:
            has_ended = False
            if self.joins_when_made:
                file.write(json.dumps({"joined": True, **self.report()}) + "\n")
            while not has_ended:
                time.sleep(0.01)
                if self.take_step():
                    file.write(json.dumps(self.report()) + "\n")
                    has_ended = end.exists()
            self.close()
            file.write(json.dumps({"closed": True, **self.report()}) + "\n")


class ElasticRun(Run):
    """LocalSteps."""

    joins_when_made = True

    def __init__(self, place: int, manager: Any, setup: str, every: int = 5, **changes: Any) -> None:
        super().__init__(place, manager)
        self.local = LocalSteps(self.model, self.optimizer, every, manager=manager, **{**SETUPS[setup], **changes})
        self.links = self.local.link_stats

    @property
    def round(self) -> int:
        return self.local.round

    def take_step(self) -> bool:
        super().take_step()
        return self.local.advance()

    def bits(self) -> list[str]:
        """Of global weights, parameters, and the state of the outer optimizer."""
        state = self.local.state_dict()
        moments = [value for moment in state["outer"]["state"].values() for value in moment.values()]
        return [
            digest(*state["weights"].values()),
            *super().bits(),
            digest(*(value.reshape(1) if value.dim() == 0 else value for value in moments if value is not None)),
        ]

    def close(self) -> None:
        self.local.close()


class DiLoCoRun(Run):
    """torchft's DiLoCo of three fragments. A replica recovers through our transport, with coded inner moments."""

    def __init__(self, place: int, manager: Any, compressor: str, delay: int = 0) -> None:
        from torchft.local_sgd import DiLoCo

        super().__init__(place, manager)
        manager.register_state_dict_fn("model", self.model.load_state_dict, self.model.state_dict)
        manager.register_state_dict_fn("inner", self.optimizer.load_state_dict, self.optimizer.state_dict)
        parts = [self.model[:2], self.model[2:4], self.model[4:]]
        compressed = CompressedManager(manager, compressor, fragments=len(parts))
        self.links = compressed.link_stats
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.5, nesterov=True) for part in parts]
        settings = {"sync_every": 3 * len(parts), "fragment_sync_delay": delay}
        self.diloco = DiLoCo(compressed, parts, self.optimizer, outer, **settings)
        self.diloco.__enter__()

    def bits(self) -> list[str]:
        """Of global weights, and the state of the outer optimizers."""
        fragments = self.diloco._fragments
        weights = [tensor for part in fragments for tensor in part.original_parameters.values()]
        states = [state for part in fragments for state in part._outer_optimizer.state.values()]
        return [digest(*weights), digest(*(state["momentum_buffer"] for state in states))]


class ReplicatedRun(Run):
    """torchft's DDP and its wrapper of an optimizer. A replica recovers through our transport."""

    def __init__(self, place: int, manager: Any, compressor: str) -> None:
        from torchft import DistributedDataParallel, Optimizer

        super().__init__(place, manager)
        manager.register_state_dict_fn("model", self.model.load_state_dict, self.model.state_dict)
        manager.register_state_dict_fn("inner", self.optimizer.load_state_dict, self.optimizer.state_dict)
        compressed = CompressedManager(manager, compressor)
        self.links = compressed.link_stats
        self.model = DistributedDataParallel(compressed, self.model, bucket_cap_mb=0.005)
        self.optimizer = Optimizer(compressed, self.optimizer)


def make_run(name: str, setup: str, folder: Path, **changes: Any) -> Run:
    """The run of a process, which is named by its place. A setup of torchft's own begins with "diloco " or "ddp "."""
    kind, _, compressor = setup.partition(" ")
    if not compressor:
        return ElasticRun(int(name), make_manager(folder, name), setup, **changes)
    from shrinkpoint.train.torchft import CompressedTransport

    own = ["inner"] if kind == "diloco" else []
    manager = make_manager(folder, name, checkpoint_transport=CompressedTransport(own_moments=own))
    return (DiLoCoRun if kind == "diloco" else ReplicatedRun)(int(name), manager, compressor, **changes)


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
