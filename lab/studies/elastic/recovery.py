"""Recovery of a torchft replica: bytes and seconds of our transport beside torchft's, and the loss after it.

    python -m lab.studies.elastic.recovery              # about ten minutes on two cores; links take root
    python -m lab.studies.elastic.recovery --only after --seeds 0
    python -m lab.studies.elastic.recovery --report     # the tables of what was written

"state": a GPT of 3.2 M parameters is trained on text with AdamW, in rounds of DiLoCo with one replica. Two processes
in network namespaces send its state from one to the other on links of 100 Mbit/s, 1 Gbit/s and without a limit. The
transports take turns. Bytes are what the kernel counted. Seconds run from the moment at which both replicas begin
until the receiver has the state, and `send` is how long the sender's training waits. Processor time is the sum of both.

"after": a GPT of 0.12 M parameters goes on from a state that was recovered, with the same batches each time. The loss
is compared with that of the run that went on from its own state.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.studies.harness import RESULTS, default_data, environment, machine, program
from lab.studies.link import hosts
from lab.studies.workloads.text import drawn, loss_of, text, windows
from shrinkpoint_lab.demo.workload import GPT, GPTConfig

LARGE = GPTConfig(layers=4, width=256, heads=8, context=64, dropout=0.0)
SMALL = GPTConfig(layers=2, width=64, heads=2, context=32, dropout=0.0)
LINKS = (100, 1000, 0)  # Mbit/s; 0: no limit
METHODS = ("HTTPTransport", "PGTransport", "ours", "ours, own moments")
AFTER = (1, 5, 20, 60)
SECONDS = timedelta(minutes=3)


class Training:
    """A GPT with AdamW, whose rounds of 30 steps an outer Nesterov momentum ends, as in DiLoCo."""

    def __init__(self, shape: GPTConfig, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.shape, self.seed = GPT(shape), shape, seed
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.shared = [p.detach().clone() for p in self.model.parameters()]
        self.outer = torch.optim.SGD(self.shared, lr=0.7, momentum=0.6, nesterov=True)
        _, whole = text(default_data())
        cut = len(whole) * 9 // 10
        self.text, self.held = whole[:cut], windows(whole[cut:], shape.context, 512)

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
            self.optimizer.zero_grad()
            self.model(*drawn(self.text, 8, self.shape.context, generator)).backward()
            self.optimizer.step()
            if step % 30 == 29:
                with torch.no_grad():
                    for own, shared in zip(self.model.parameters(), self.shared, strict=True):
                        shared.grad = shared - own
                    self.outer.step()
                    for own, shared in zip(self.model.parameters(), self.shared, strict=True):
                        own.copy_(shared)

    def loss(self) -> float:
        return loss_of(self.model, self.held)

    def state(self) -> dict[str, Any]:
        """As a manager of torchft's DiLoCo gives it to its transport."""
        names = [name for name, _ in self.model.named_parameters()]
        fragment = {
            "outer_optimizer": self.outer.state_dict(),
            "original_parameters": dict(zip(names, self.shared, strict=True)),
        }
        user = {
            "model": self.model.state_dict(),
            "inner": self.optimizer.state_dict(),
            "StreamingDiLoCoFragment_0": fragment,
        }
        return {"user": user, "torchft": {"step": 7, "batches_committed": 14}}

    def load(self, state: Any) -> None:
        self.model.load_state_dict(state["user"]["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["user"]["inner"]))
        for own, saved in zip(
            self.shared, state["user"]["StreamingDiLoCoFragment_0"]["original_parameters"].values(), strict=True
        ):
            own.copy_(saved)
        self.outer.load_state_dict(copy.deepcopy(state["user"]["StreamingDiLoCoFragment_0"]["outer_optimizer"]))


def leaves(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        return [leaf for key in nest for leaf in leaves(nest[key])]
    return [leaf for member in nest for leaf in leaves(member)] if isinstance(nest, list | tuple) else [nest]


def is_same(first: Any, second: Any) -> bool:
    pairs = zip(leaves(first), leaves(second), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def make_transports(state: Any) -> dict[str, Any]:
    from torchft.checkpointing import HTTPTransport
    from torchft.checkpointing.pg_transport import PGTransport

    from shrinkpoint.train.torchft import CompressedTransport

    target = copy.deepcopy(state)
    return {
        "HTTPTransport": HTTPTransport(SECONDS, 0),
        "PGTransport": PGTransport(dist.group.WORLD, SECONDS, torch.device("cpu"), lambda: target),  # into its tensors
        "ours": CompressedTransport(SECONDS),
        "ours, own moments": CompressedTransport(SECONDS, own_moments=["inner"]),
    }


def of_host(job: dict[str, Any]) -> None:
    """One of the two processes: 0 sends, 1 receives. It prints what it measured."""
    rank, address = job["rank"], job["address"]
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.DEVICE
    dist.init_process_group("gloo", f"tcp://{address}:29511", SECONDS, rank=rank, world_size=2)
    whole = torch.load(job["file"])
    rows: list[dict[str, Any]] = []
    for kind in ("ddp", "diloco"):
        state = (
            whole if kind == "diloco" else {**whole, "user": {key: whole["user"][key] for key in ("model", "inner")}}
        )
        transports = make_transports(state)
        for repeat in range(job["repeats"] + 1):  # the first one warms up
            for name, transport in transports.items():
                if kind == "ddp" and "own" in name:  # replicas of DDP have the same moments
                    continue
                port = [transport.metadata().rpartition(":")[2]]
                dist.broadcast_object_list(port)
                dist.barrier()
                sent, began, processor = hosts.sent_bytes(), time.perf_counter(), time.process_time()
                if rank == 0:
                    transport.send_checkpoint([1], 7, state, SECONDS)
                    row = {"send": time.perf_counter() - began}
                else:
                    received = transport.recv_checkpoint(0, f"http://{address}:{port[0]}", 7, SECONDS)
                    row = {"seconds": time.perf_counter() - began}
                dist.barrier()
                row |= {"processor": time.process_time() - processor, "sent": hosts.sent_bytes() - sent}
                if rank == 1:
                    row["is_same"] = is_same(received, state)
                transport.disallow_checkpoint()
                if repeat:
                    rows.append({"kind": kind, "name": name, **row})
        for transport in transports.values():
            transport.shutdown(wait=False)
    dist.barrier()
    print(json.dumps(rows), flush=True)
    os._exit(0)  # threads of servers may still wait


def measure_state(document: dict[str, Any], args: argparse.Namespace) -> None:
    if refusal := hosts.refusal():
        print(f"no links here: {refusal}")
        return
    training = Training(LARGE, 0)
    training.train(range(args.steps))
    state = training.state()
    parameters = sum(p.numel() for p in training.model.parameters())
    document["state"] = {"parameters": parameters, "steps": args.steps, "loss": training.loss(), "links": {}}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, file := str(Path(folder, "state")))
        for link in LINKS:
            with hosts.Network(2) as network:
                network.shape(link or None)
                job = {"address": network.address(0), "file": file, "repeats": args.repeats}
                commands = [
                    program("lab.studies.elastic.recovery", "--host", json.dumps(job | {"rank": rank}))
                    for rank in (0, 1)
                ]
                outputs = network.run(commands, env=environment(RUST_LOG="warn"), timeout=1200)
            sides = [json.loads(output.splitlines()[-1]) for output in outputs]
            rows = []
            for one, other in zip(*sides, strict=True):
                both = {"processor": one["processor"] + other["processor"], "sent": one["sent"], "send": one["send"]}
                rows.append(other | both)
            document["state"]["links"][str(link)] = rows


def recovered(state: Any, how: str) -> Any:
    """The state as a replica has it after a recovery."""
    from shrinkpoint.train.torchft import CompressedTransport

    ends = [CompressedTransport(SECONDS, own_moments=["inner"] if how == "coded" else []) for _ in range(2)]
    ends[0].send_checkpoint([1], 7, state, SECONDS)
    result = ends[1].recv_checkpoint(0, ends[0].metadata(), 7, SECONDS)
    for end in ends:
        end.shutdown()
    if how == "none":
        result["user"]["inner"]["state"] = {}
    return result


def measure_after(document: dict[str, Any], args: argparse.Namespace) -> None:
    rows = document.setdefault("after", [])
    for seed in args.seeds:
        training = Training(SMALL, seed)
        training.train(range(465))  # half a round is left
        state = copy.deepcopy(training.state())
        for how in ("own", "exact", "coded", "none"):
            training.load(state if how == "own" else recovered(state, how))
            losses, done = [training.loss()], 465
            for steps in AFTER:
                training.train(range(done, 465 + steps))
                done = 465 + steps
                losses.append(training.loss())
            rows.append({"seed": seed, "how": how, "losses": losses})
            print(rows[-1], flush=True)


def report(document: dict[str, Any]) -> None:
    if "state" in document:
        for kind in ("ddp", "diloco"):
            for link, rows in document["state"]["links"].items():
                print(f"\n{kind}, {link} Mbit/s\n\n| transport | MB | smaller | seconds | sender waits | processor |")
                print("|---|---|---|---|---|---|")
                first = 0.0
                for name in METHODS:
                    if not (own := [row for row in rows if (row["kind"], row["name"]) == (kind, name)]):
                        continue
                    mean = {key: median(row[key] for row in own) for key in ("sent", "seconds", "send", "processor")}
                    first = first or mean["sent"]
                    exact = "" if all(row["is_same"] for row in own) else " (lossy)"
                    spread = f"{min(row['seconds'] for row in own):.2f} to {max(row['seconds'] for row in own):.2f}"
                    cells = f"{mean['sent'] / 1e6:.1f} | {first / mean['sent']:.2f}x | {mean['seconds']:.2f} ({spread})"
                    print(f"| {name}{exact} | {cells} | {mean['send']:.2f} | {mean['processor']:.2f} |")
    print("\n| inner moments | " + " | ".join(f"{steps} steps later" for steps in (0, *AFTER)) + " |")
    print("|---" * (len(AFTER) + 2) + "|")
    own = {row["seed"]: row["losses"] for row in document.get("after", []) if row["how"] == "own"}
    for how in ("exact", "coded", "none"):
        rows = [row for row in document.get("after", []) if row["how"] == how]
        rises = [[a - b for a, b in zip(row["losses"], own[row["seed"]], strict=True)] for row in rows]
        cells = [
            f"{fmean(column):+.4f} ({min(column):+.4f} to {max(column):+.4f})" for column in zip(*rises, strict=True)
        ]
        print(f"| {how} | {' | '.join(cells)} |")


PARTS: dict[str, Callable[[dict[str, Any], argparse.Namespace], None]] = {
    "state": measure_state,
    "after": measure_after,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=105, help="of the model whose state is sent")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "elastic_recovery.json")
    parser.add_argument("--report", action="store_true", help="print the tables of what was written")
    args = parser.parse_args()
    document = json.loads(args.out.read_text()) if args.out.exists() else {}
    if not args.report:
        os.environ.setdefault("RUST_LOG", "warn")  # before torchft is imported, which logs every request
        hosts.leave_on_signals()
        torch.set_num_threads(1)
        document |= {"date": date.today().isoformat(), "machine": machine()}
        for name in args.only:
            document.pop(name, None)
            PARTS[name](document, args)
            args.out.write_text(json.dumps(document))
    report(document)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--host"]:
        of_host(json.loads(sys.argv[2]))
    else:
        main()
