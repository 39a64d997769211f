"""Ranks that train in local steps while one of them is killed and another one joins.

    python examples/elastic.py

This process starts the ranks and hosts their store, which has to outlive them. It takes some seconds on two cores.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore

from shrinkpoint.comm import LocalSteps, Membership, OuterSGD

ROUNDS, EVERY, RANKS = 40, 10, 3
WAIT = timedelta(minutes=10)


def train(port: int, name: str, begin: str) -> None:
    """What each rank does, whether it is there from the start or joins when something has begun."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    store = TCPStore("127.0.0.1", port, is_master=False)
    store.wait([begin], WAIT)
    membership = Membership(store, RANKS, min_size=2, name=name, timeout=600, patience=5)

    sparse = {"compressor": "ef(top6.25:256:q2:64, decay=0.95)", "outer": OuterSGD(lr=1.0, momentum=0.0)}
    local = LocalSteps(model, optimizer, EVERY, membership=membership, **sparse)  # waits for the others
    print(f"rank {name} begins with round {local.round}", flush=True)
    while local.round < ROUNDS:  # a rank that joins late has the same number of rounds
        x = torch.randn(64, 32)
        loss = (model(x) - x[:, :8].sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if local.step():  # if a rank died, the others have gone on without it
            store.set(f"round {local.round}", "")
            if name == membership.members[0]:
                print(f"round {local.round}: loss {loss.item():.3f}, ranks {' '.join(membership.members)}", flush=True)
        time.sleep(0.02)  # a larger model would take longer
    local.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(f"rank {name} ends with weights of norm {weights.norm().item():.9f}", flush=True)


def main() -> int:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    begins = ["round 0"] * RANKS + ["round 10"]  # the last one joins later
    ranks = [context.Process(target=train, args=(store.port, str(name), begin)) for name, begin in enumerate(begins)]
    for rank in ranks:
        rank.start()
    store.set("round 0", "")
    store.wait(["round 5"], WAIT)
    ranks.pop(1).kill()
    print("rank 1 is killed", flush=True)
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
