"""torchft's own loops with compressed messages: the loss of runs in which a replica is killed and another one joins.

    python -m lab.studies.elastic.replicas              # about fifteen minutes on two cores
    python -m lab.studies.elastic.replicas --cases "diloco ef(q2:64)" --seeds 0
    python -m lab.studies.elastic.replicas --report     # the table of what was written

Three processes with a manager of torchft each train a GPT of 0.12 M parameters on text: in DiLoCo of three fragments,
each averaged every 30 steps, 3 steps after it was sent, or in DDP. In the killed run one of them kills itself in the
middle of a round, and a process with other weights joins later, also in the middle of one. Batches differ between
replicas. The loss is that of held-out text by the weights that all replicas share at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from lab.studies.harness import default_data, environment, program
from lab.studies.harness.seeded import run_seeds
from lab.studies.workloads.text import drawn, loss_of, text, windows
from shrinkpoint.comm import CompressedManager
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

CASES = ("diloco ef(q2:64)", "ddp ef(q4:64)")  # or with "none" for a compressor
SHAPE = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0)
WIDTH, KILLED, JOINS = 3, "1", "3"
ROUNDS = {"diloco": 60, "ddp": 300}
"""An average of one fragment is a round; of DDP every step is one."""
KILL, JOIN = 1 / 3, 1 / 2  # of these rounds
DELAY = 3


class Replica:
    """The process of one replica.

    Args:
        name: of the replica; tells its batches from those of others.
        job: case, seed, folder, and whether there is a kill.
    """

    def __init__(self, name: str, job: dict[str, Any]) -> None:
        import torchft

        from shrinkpoint.train.torchft import CompressedTransport

        self.name, self.job, self.kind, self.step = name, job, job["case"].split()[0], 0
        compressor = None if job["case"].endswith(" none") else job["case"].split(" ", 1)[1]
        torch.manual_seed(100 * job["seed"] + int(name))
        self.model = GPT(SHAPE)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95))
        self.store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        options: dict[str, Any] = {"load_state_dict": None, "state_dict": None, "min_replica_size": 1, "rank": 0}
        options |= {"store_addr": "localhost", "store_port": self.store.port, "hostname": "localhost", "world_size": 1}
        options |= {"replica_id": name, "lighthouse_addr": job["lighthouse"], "quorum_timeout": timedelta(minutes=10)}
        own = ["inner"] if self.kind == "diloco" else []
        if compressor:
            options["checkpoint_transport"] = CompressedTransport(own_moments=own)
        manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), use_async_quorum=False, **options)
        manager.register_state_dict_fn("model", self.model.load_state_dict, self.model.state_dict)
        manager.register_state_dict_fn("inner", self.optimizer.load_state_dict, self.optimizer.state_dict)
        self.manager = CompressedManager(manager, compressor, fragments=3 if self.kind == "diloco" else 1)

    def train(self) -> None:
        """Train to the last round, and print the shared loss; or die in a round, if it is this one's lot."""
        step = self._diloco() if self.kind == "diloco" else self._ddp()
        rounds, log = ROUNDS[self.kind], Path(self.job["folder"], self.name)
        log.write_text("0")
        while self.name != JOINS and not Path(self.job["folder"], "go").exists():
            time.sleep(0.01)
        _, whole = text(default_data())
        while self.manager.current_step() < rounds:
            number = 1_000_003 * self.job["seed"] + 10_007 * int(self.name) + self.step
            batch = drawn(whole[: len(whole) * 9 // 10], 16, SHAPE.context, torch.Generator().manual_seed(number))
            is_last = self.job["killed"] and self.name == KILLED and self.manager.current_step() >= KILL * rounds
            if is_last and self.step % 10 == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            next(step)(batch)
            self.step += 1
            log.write_text(str(self.manager.current_step()))
        held = windows(whole[len(whole) * 9 // 10 :], SHAPE.context, 768)
        for own, shared in self._shared():
            own.detach().copy_(shared)
        bits = sum(float(p.detach().double().abs().sum()) for p in self.model.parameters())
        links = self.manager.link_stats.values()
        sent = sum(link.raw_bytes for link in links) / max(1, sum(link.wire_bytes for link in links))
        print(json.dumps({"loss": loss_of(self.model, held), "weights": bits, "ratio": sent}), flush=True)
        time.sleep(3.0)  # another one may still read
        self.manager.shutdown(wait=False)

    def _shared(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        fragments = self.diloco._fragments if self.kind == "diloco" else []
        return [
            (p, part.original_parameters[name])
            for part in fragments
            for name, p in part._model_fragment.named_parameters()
        ]

    def _diloco(self) -> Iterator[Any]:
        from torchft.local_sgd import DiLoCo

        model = self.model  # the head is the embedding
        parts = [nn.ModuleList([model.token, model.position, model.norm]), *model.blocks]
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.6, nesterov=True) for part in parts]
        self.diloco = DiLoCo(self.manager, parts, self.optimizer, outer, sync_every=30, fragment_sync_delay=DELAY)
        return self._steps(model)

    def _ddp(self) -> Iterator[Any]:
        import torchft

        self.optimizer = torchft.Optimizer(self.manager, self.optimizer)
        return self._steps(torchft.DistributedDataParallel(self.manager, self.model))

    def _steps(self, model: nn.Module) -> Iterator[Any]:
        def step(batch: Any) -> None:
            self.optimizer.zero_grad()
            model(*batch).backward()
            self.optimizer.step()

        if self.kind == "ddp":
            while True:
                yield step
        with self.diloco:
            while True:
                yield step


@contextmanager
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    started: dict[str, subprocess.Popen[str]] = {}
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def run(case: str, seed: int, *, killed: bool) -> dict[str, Any]:
    """Train once; the loss, and by how much messages were smaller."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=1500)
    with tempfile.TemporaryDirectory() as folder, processes() as started:
        job = {"case": case, "seed": seed, "killed": killed, "folder": folder, "lighthouse": lighthouse.address()}

        def start(name: str) -> None:
            command = program("lab.studies.elastic.replicas", "--replica", name, json.dumps(job))
            variables = environment(OMP_NUM_THREADS="1")
            started[name] = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)

        def wait(name: str, least: float) -> None:
            while not (path := Path(folder, name)).exists() or (least and float(path.read_text() or 0) < least):
                if started["0"].poll() not in (None, 0):
                    raise RuntimeError("replica 0 failed")
                time.sleep(0.05)

        for name in map(str, range(WIDTH)):
            start(name)
        for name in map(str, range(WIDTH)):
            wait(name, 0)
        Path(folder, "go").touch()
        if killed:
            wait("0", JOIN * ROUNDS[case.split()[0]])
            start(JOINS)
        survivors = [name for name in started if not (killed and name == KILLED)]
        ends = [json.loads(started[name].communicate()[0].splitlines()[-1]) for name in survivors]
        code = started[KILLED].wait()
    assert code == (-signal.SIGKILL if killed else 0)
    assert len({end["weights"] for end in ends}) == 1, f"replicas differ: {ends}"
    return {"loss": ends[0]["loss"], "ratio": ends[0]["ratio"]}


def fill(section: dict[str, Any], case: str, seed: int, arguments: argparse.Namespace) -> None:
    row = {name: run(case, seed, killed=name == "killed") for name in ("unkilled", "killed")}
    print(case, seed, json.dumps(row), flush=True)
    section.setdefault(case, []).append({"seed": seed, "date": date.today().isoformat(), **row})


def report(document: dict[str, Any]) -> None:
    print("| loop and messages | unkilled, by seed | killed and joined, by seed | difference | smaller |")
    print("|---|---|---|---|---|")
    for case, rows in document["replicas"].items():
        losses = {name: [row[name]["loss"] for row in rows] for name in ("unkilled", "killed")}
        each = " | ".join(", ".join(f"{loss:.4f}" for loss in losses[name]) for name in losses)
        difference = fmean(losses["killed"]) - fmean(losses["unkilled"])
        print(f"| `{case}` | {each} | {difference:+.4f} | {rows[0]['killed']['ratio']:.1f}x |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--replica"]:
        torch.set_num_threads(1)
        Replica(sys.argv[2], json.loads(sys.argv[3])).train()
    else:
        os.environ.setdefault("RUST_LOG", "warn")  # before torchft is imported, which logs every request
        run_seeds(__doc__, fill, report, section="replicas", out="elastic_replicas.json", cases=CASES)
