"""Replicas that train in local steps with torchft, while one of them is killed and another one joins.

    python examples/elastic.py

It starts replicas and their lighthouse, and trains again without a kill: a minute on two cores.
"""

import os
import sys
import time
from datetime import timedelta
from subprocess import PIPE, Popen

import torch
from torch import Tensor, nn

from shrinkpoint.comm import LocalSteps, OuterSGD


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :8].sum(1, keepdim=True).tanh()


def train(name: str, lighthouse: str) -> None:
    """Train one replica, there from the start or joining later; it recovers from others, if there are any."""
    import torchft

    torch.manual_seed(int(name))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's
    options = {"store_addr": "localhost", "store_port": store.port, "lighthouse_addr": lighthouse}
    options |= {"replica_id": name, "load_state_dict": None, "state_dict": None, "min_replica_size": 1}
    options |= {"rank": 0, "world_size": 1, "hostname": "localhost", "quorum_timeout": timedelta(minutes=5)}
    manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), use_async_quorum=False, **options)
    outer = OuterSGD(lr=1.0, momentum=0.0)
    local = LocalSteps(model, optimizer, 10, manager=manager, compressor="ef(top6.25:256:q2:64)", outer=outer)
    print(f"replica {name} begins with round {local.round}", flush=True)
    for step in range(10**6):
        x, y = batch(64, seed=1_000_000 * int(name) + step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if local.step():  # if a replica died, the others have gone on without it
            print(f"replica {name} is one of {manager.num_participants()} in round {local.round}", flush=True)
            if local.round >= 40 and manager.num_participants() == 2:  # the same on all of them
                break
        time.sleep(0.01)  # a larger model would take longer
    local.close()
    x, y = batch(4096, seed=10**9)
    print(f"loss {(model(x) - y).square().mean():.4f}", flush=True)
    manager.shutdown(wait=False)


def run(*, is_killed: bool) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=1500)

    def start(name: str) -> Popen[str]:
        return Popen([sys.executable, __file__, name, lighthouse.address()], stdout=PIPE, text=True)

    first, other, names = start("0"), start("1"), ["1", "2"]
    for line in first.stdout or ():
        print(line, end="", flush=True)
        if is_killed and "is one of 2" in line and len(names) == 2:
            other.kill()
            print(f"replica {names.pop(0)} is killed", flush=True)
        if is_killed and "is one of 1" in line and len(names) == 1:
            other = start(names.pop())
    print(other.communicate()[0], end="")


if __name__ == "__main__":
    os.environ.setdefault("RUST_LOG", "warn")  # before torchft is imported, which logs every request
    if len(sys.argv) > 1:
        train(*sys.argv[1:])
    else:
        run(is_killed=True)
        run(is_killed=False)
