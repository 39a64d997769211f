"""Gradients of replicas on the wire: bytes of a step, what training makes of them, whether replicas stay equal.

    python -m lab.studies.gradients.run                # about seven minutes on one core
    python -m lab.studies.gradients.run --steps 20 --seeds 1

Two and three real processes on gloo train a small model with DistributedDataParallel and with FSDP2, uncompressed, with
the hooks that torch has, and with ours. Bytes are counted twice: by our ledger, and by the kernel on the loopback
interface of a network namespace of the run's own, headers included; where there can be none (it takes root) only by the
ledger, which does not see what torch sends itself. The loss is that of data no rank trained on. The largest group runs
one seed, the others all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

from lab.studies.harness import environment, fork_ranks, machine, program
from shrinkpoint.comm import ErrorFeedback, compress_ddp, compress_fsdp, parse

SIZES = (64, 512, 512, 64)
BATCH = 32
WARM = 5
"""Steps before bytes are counted: groups meet, and DDP orders its buckets anew."""
HEADS, WIDTHS = ("ledger", "kernel", "ratio", "loss", "+-", "ms"), (9, 9, 8, 9, 8, 8)
TOP, BOTH = "top10:bf16", ", both hops"
"""Names of feedback without `BOTH` are of runs that have it on the first hop alone."""
OURS = (
    *("q8:64", "q4", "q4:64", "ef(q4:64)", "n3:64", "q3:64", "ef(q3:64)", "q2:64", "ef(q2:64)", f"ef(q2:64){BOTH}"),
    *("lowrank4", "lowrank4(q8:64)", "lowrank4(q4:64)", "lowrank8(q8:64)", "lowrank16(q8:64)", "lowrank16(q4:64)"),
    *(TOP, f"ef({TOP})", f"ef({TOP}){BOTH}", f"ef21({TOP})"),
)
FSDP = (
    (None, None),
    (None, "q4:64"),
    ("q8:64", "q8:64"),
    ("q8:64", "q4:64"),
    ("q8:64", "ef(q4:64)"),
    ("q8:64", "n3:64"),
    ("q4:64", "q4:64"),
)


def bf16_under_another_name(state: Any, bucket: Any) -> Any:
    """What torch refuses on gloo by its name, and what works there."""
    return bf16_compress_hook(state, bucket)


bf16_under_another_name.__annotations__ = {}  # torch compares them with types, and these are words


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for pair in pairwise(SIZES) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Task:
    """Inputs, and what a fixed random layer makes of them."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(99)
        self.weight = torch.randn(64, 64, generator=random) / 8

    def draw(self, size: int, seed: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 64, generator=torch.Generator().manual_seed(seed))
        return x, (x @ self.weight).tanh()


def replicas(name: str, seed: int) -> tuple[nn.Module, dict[str, Any] | None]:
    """A model whose replicas average their gradients as named, and our ledgers if they are ours."""
    one = DDP(model(seed), bucket_cap_mb=25)
    if name == "fp16 hook":
        one.register_comm_hook(None, fp16_compress_hook)
    elif name == "bf16 hook":
        one.register_comm_hook(None, bf16_under_another_name)
    elif name.startswith("PowerSGD"):
        rank = int(name.removeprefix("PowerSGD "))
        one.register_comm_hook(PowerSGDState(None, rank, start_powerSGD_iter=2), powerSGD_hook)
    elif name != "none":
        how, both = name.removesuffix(BOTH), name.endswith(BOTH)
        parsed = parse(how)
        is_first_alone = isinstance(parsed, ErrorFeedback) and not both
        average = parsed.compressor if is_first_alone else None
        return one, dict(compress_ddp(one, how, average_compressor=average).link_stats)
    return one, None


def shards(name: str, seed: int) -> tuple[nn.Module, dict[str, Any] | None]:
    """The same, sharded."""
    weights, gradients = (None if word == "none" else word for word in name.split(" / "))
    one, mesh = model(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (one[0], one[2], one[4], one):
        fully_shard(part, mesh=mesh)
    return one, dict(compress_fsdp(one, weights, gradients).link_stats) if name != "none / none" else None


def train(make: Callable[[str, int], Any], name: str, seed: int, steps: int, *, private: bool) -> dict[str, Any]:
    """One run, as this rank sees it; what is summed over ranks is the same on all."""
    task, rank, (net, ledgers) = Task(), dist.get_rank(), make(name, seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    began = (0, 0, 0.0)
    for step in range(steps):
        if step == WARM:
            began = counters(ledgers, private)
        x, y = task.draw(BATCH, 1 + rank + 10 * (step + 1000 * seed))
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
    ended, count = counters(ledgers, private), steps - WARM
    wire, kernel, seconds = (after - before for after, before in zip(ended, began, strict=True))
    with torch.no_grad():
        x, y = task.draw(2048, 0)
        out = net(x)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (hashlib.sha256(out.numpy().tobytes()).hexdigest(), wire))
    return {
        "loss": float(mse_loss(out, y)),
        "equal": len({one for one, _ in said}) == 1,
        "ledger": sum(one for _, one in said) / count if ledgers else None,
        "kernel": kernel / count if private else None,
        "seconds": seconds / count,
    }


def counters(ledgers: dict[str, Any] | None, private: bool) -> tuple[int, int, float]:
    """Bytes this rank sent by our account, bytes that came in over lo, and the time; no rank is elsewhere."""
    dist.barrier()
    lines = Path("/proc/net/dev").read_text().splitlines() if private else []
    kernel = sum(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))
    wire = sum(one.wire_bytes for one in ledgers.values()) if ledgers else 0
    dist.barrier()
    return wire, kernel, time.perf_counter()


def of_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=args.part)
    rows = []
    for kind, make, name in cases(args):
        runs = [train(make, name, seed, args.steps, private=args.private) for seed in range(args.seeds)]
        rows.append({"kind": kind, "world": args.part, "name": name, "runs": runs})
        if rank == 0:
            print(f"{args.part} ranks, {kind} {name}: loss {runs[0]['loss']:.4f}", file=sys.stderr, flush=True)
    if rank == 0:
        args.out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def cases(args: argparse.Namespace) -> list[tuple[str, Callable[[str, int], Any], str]]:
    hooks = ["none", "fp16 hook", "bf16 hook", "PowerSGD 4", "PowerSGD 16", *OURS]
    pairs = [" / ".join(word or "none" for word in pair) for pair in FSDP]
    every = [("ddp", replicas, name) for name in hooks] + [("fsdp", shards, name) for name in pairs]
    return [case for case in every if not args.only or case[2] in args.only]


def namespace() -> list[str]:
    """What a command is run with to have a network of its own; nothing where that is not permitted."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        print("no network namespace here (it takes root): the kernel's counters are left out", file=sys.stderr)
        return []
    return ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def measure(args: argparse.Namespace, world: int) -> list[dict[str, Any]]:
    inside = namespace()
    variables = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", GLOG_minloglevel="2")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = program("lab.studies.gradients.run", "--part", world, "--steps", args.steps, "--out", out)
        seeds = args.seeds if world < max(args.worlds) or len(args.worlds) == 1 else 1
        command += ["--seeds", str(seeds), *(["--private"] if inside else []), "--only", *args.only]
        subprocess.run([*inside, *command], check=True, env=variables)
        rows: list[dict[str, Any]] = json.loads(out.read_text())
        return rows


def show(figures: dict[str, Any]) -> None:
    """A table for each kind and number of ranks; bytes are those of all ranks together."""
    print(
        f"{figures['parameters']} parameters, {figures['steps']} steps, {figures['seeds']} seeds; MB a step, all ranks"
    )
    groups = sorted({(row["kind"], row["world"]) for row in figures["rows"]})
    for kind, world in groups:
        rows = [row for row in figures["rows"] if (row["kind"], row["world"]) == (kind, world)]
        heads = "".join(f"{head:>{width}}" for head, width in zip(HEADS, WIDTHS, strict=True))
        print(f"\n{kind + f', {world} ranks':28}{heads}  equal")
        for row in rows:
            print(line(row, rows[0]))


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    runs, plain = row["runs"], first["runs"][0]["kernel"]
    ledger, kernel = (None if runs[0][key] is None else runs[0][key] / 1e6 for key in ("ledger", "kernel"))
    words = ["" if value is None else f"{value:.3f}" for value in (ledger, kernel)]
    words.append(f"{plain / runs[0]['kernel']:.2f}" if plain else "")
    losses = [run["loss"] for run in runs]
    spread = stdev(losses) if len(losses) > 1 else 0.0
    milliseconds, equal = 1000 * mean(run["seconds"] for run in runs), all(run["equal"] for run in runs)
    words += [f"{mean(losses):.4f}", f"{spread:.4f}", f"{milliseconds:.1f}"]
    figures = "".join(f"{word:>{width}}" for word, width in zip(words, WIDTHS, strict=True))
    return f"{row['name']:28}{figures}  {'yes' if equal else 'NO'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=(2, 3))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="names of rows")
    parser.add_argument("--out", type=Path, default=Path("results/replicas.json"))
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--private", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.part:
        sys.exit(fork_ranks(args.part, lambda rank, folder: of_rank(rank, args, folder)))
    rows = [row for world in args.worlds for row in measure(args, world)]
    parameters = sum(one.numel() for one in model(0).parameters())
    figures = {"torch": torch.__version__, "parameters": parameters, "steps": args.steps, "seeds": args.seeds}
    figures |= {"machine": machine(), "date": date.today().isoformat(), "rows": rows}
    args.out.write_text(json.dumps(figures, indent=1))
    show(figures)


if __name__ == "__main__":
    main()
