"""Replicas that train in local steps with torchft, while one of them is killed and another one joins.

    python examples/elastic.py

This process starts the replicas and their lighthouse. It trains twice, the second time without a kill, and prints the
loss of both on data that no replica trains on. It takes a minute on two cores.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torchft
from torch import Tensor, nn
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer

from shrinkpoint.comm import LocalSteps, OuterSGD

ROUNDS, EVERY, WAIT = 40, 10, timedelta(minutes=5)


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :8].sum(1, keepdim=True).tanh()


def train(lighthouse: str, name: str, said: Connection) -> None:
    """Train one replica, whether it is there from the start or joins later."""
    torch.set_num_threads(1)
    torch.manual_seed(int(name))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # torchrun makes one, too
    addresses = {"store_addr": "localhost", "store_port": store.port, "lighthouse_addr": lighthouse}
    replica = {"rank": 0, "world_size": 1, "replica_id": name, "hostname": "localhost"}
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        quorum_timeout=WAIT,  # longer than a round
        **addresses,
        **replica,
    )
    sparse = {"compressor": "ef(top6.25:256:q2:64)", "outer": OuterSGD(lr=1.0, momentum=0.0)}
    local = LocalSteps(model, optimizer, EVERY, manager=manager, **sparse)  # recovers from the others, if there are any
    said.send(("begins with round", local.round))
    step = 0
    while local.round < ROUNDS:  # a replica that joins late has the same number of rounds
        x, y = batch(64, seed=1_000_000 * int(name) + step)
        step += 1
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if local.step():  # if a replica died, the others have gone on without it
            said.send((f"is one of {manager.num_participants()} in round", local.round))
        time.sleep(0.01)  # a larger model would take longer
    local.close()
    x, y = batch(4096, seed=10**9)
    said.send(("ends with loss", (model(x) - y).square().mean().item()))
    manager.shutdown(wait=False)


def run(*, is_killed: bool) -> float:
    """Train two replicas, and return the loss at the end."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=1500)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torchft", "shrinkpoint.comm.local_steps"])  # import them once
    replicas, ends = {}, {}

    def start(name: str) -> None:
        ends[name], end = context.Pipe(duplex=False)
        replicas[name] = context.Process(target=train, args=(lighthouse.address(), name, end))
        replicas[name].start()

    def wait_for(news: str, number: float = 0) -> float:
        """Print what replicas say until one of them says this of a number from this one on."""
        while True:
            ready = wait(list(ends.values()), WAIT.total_seconds())
            for name in [name for name, end in ends.items() if end in ready]:
                text, value = ends[name].recv()
                print(f"replica {name} {text} {value:.9g}", flush=True)
                if text == news and value >= number:
                    return float(value)

    start("0")
    start("1")
    if is_killed:
        wait_for("is one of 2 in round", 5)
        replicas.pop("1").kill()
        ends.pop("1")
        print("replica 1 is killed", flush=True)
        wait_for("is one of 1 in round", 10)
        start("2")
    losses = [wait_for("ends with loss") for _ in replicas]
    for replica in replicas.values():
        replica.join()
    lighthouse.shutdown()
    return losses[0] if len(set(losses)) == 1 else float("nan")


def main() -> int:
    os.environ.setdefault("RUST_LOG", "warn")  # else torchft logs every request
    killed, unkilled = run(is_killed=True), run(is_killed=False)
    print(f"loss with a kill {killed:.4f}, without {unkilled:.4f}")
    return int(killed != killed or unkilled != unkilled)


if __name__ == "__main__":
    sys.exit(main())
