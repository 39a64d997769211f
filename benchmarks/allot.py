"""Whether bits that go where the loss minds errors most do better than the same bits everywhere.

    python benchmarks/allot.py

On the text task of wire.py: the model is fine-tuned without compression, `allot` measures each operator at each
boundary on windows that it was trained on, and what it chose is compared with one operator for all, at no more bytes:
on the loss of held-out text, and over a whole fine-tuning. Writes results/allot.json.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import wire_task
import workloads
from report import table
from speed import machine
from torch import nn

from shrinkpoint import comm

CANDIDATES = ("q2:64", "q3:64", "q4:64", "q6:64", "q8:64")
PLAIN = {"q3:64": 9.14, "q4:64": 7.11}
"""One operator for all, and how many times smaller its messages are."""
BACKWARD = "q6:64"


def trained(task: wire_task.Task, seed: int, forward: Any, backward: str | None) -> nn.Module:
    """A whole run; `forward` is a spec, an allotment's `per_link`, or None."""
    workloads.seed_everything(seed, 1)
    course = task.build(seed)
    one = forward if isinstance(forward, str) else None
    per = None if isinstance(forward, str) or forward is None else forward
    points = comm.insert_points(course.model, list(task.after), forward=one, backward=backward, per_point=per)
    for _ in range(task.steps):
        task.advance(course, course.stream.draw())
    points.remove()
    return course.model


def tested(task: wire_task.Task, model: nn.Module, per_point: dict[int, dict[str, str]]) -> float:
    """The loss of held-out text with compression."""
    points = comm.insert_points(model, list(task.after), per_point=per_point, sample_every=0)
    with torch.no_grad():
        found = task.test(model)
    points.remove()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--cache", type=Path, default=Path("results/wire"), help="of the pre-trained model")
    parser.add_argument("--out", type=Path, default=Path("results/allot.json"))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = wire_task.named("text", args.data, args.cache, quick=args.quick)
    model = trained(task, 0, None, None)
    drawn = task.build(1).stream.draw()
    base, rows = task.test(model), []
    for spec, ratio in PLAIN.items():
        found = comm.allot(
            model, list(task.after), lambda one: float(task.loss(one, drawn)), ratio=ratio, candidates=CANDIDATES
        )
        ways = {"alike": {number: {"forward": spec} for number in range(len(task.after))}, "allotted": found.per_link}
        for name, per in ways.items():
            rise = tested(task, model, per) - base
            after = [tested(task, trained(task, seed, per, BACKWARD), per) for seed in args.seeds if spec != "q4:64"]
            rows.append({
                "ratio": ratio, "way": name, "operators": [per[number]["forward"] for number in sorted(per)],
                "rise": rise, "predicted": found.predicted if name == "allotted" else None, "trained": after,
            })  # fmt: skip
            print(rows[-1], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    said = {"base": base, "rows": rows, "seeds": args.seeds, "backward": BACKWARD, "machine": machine()}
    args.out.write_text(json.dumps(said, indent=1))
    head = ["ratio", "way", "operators", "rise at once", "predicted", "loss, trained so"]
    body = [
        [f"{row['ratio']:.1f}", row["way"], " ".join(row["operators"]), f"{row['rise']:+.4f}",
         "-" if row["predicted"] is None else f"{row['predicted']:+.4f}",
         " ".join(f"{one:.4f}" for one in row["trained"]) or "-"]
        for row in rows
    ]  # fmt: skip
    print(table(head, body))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
