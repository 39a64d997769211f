"""Whether bits that go where the loss minds errors most do better than the same bits everywhere.

    python benchmarks/bit_allocation.py

On the text task of wire.py: the model is fine-tuned without compression, `allocate_bits` measures each operator at each
boundary on windows that it was trained on, and what it chose is compared with one operator for all, at no more bytes:
on the loss of held-out text, and over a whole fine-tuning; there also with changes since a sample was here before sent
instead of its activations (AQ-SGD). Writes results/bit_allocation.json.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import wire_task
import workloads
from lossless_report import table
from lossless_speed import machine
from torch import nn

from shrinkpoint import comm
from shrinkpoint_lab.forecast.bit_allocation import allocate_bits

CANDIDATES = ("q2:64", "n3:64", "q3:64", "n4:64", "q4:64", "q6:64", "q8:64")
ASKED = {9.14: "q3:64", 8.0: "n3:64"}
"""How many times smaller, and the best single operator that is as small as that."""
BACKWARD = "q4:64"


def trained(task: wire_task.Task, seed: int, forward: Any, backward: str | None) -> nn.Module:
    """A whole run; `forward` is a spec, an allotment's `per_link`, or None."""
    workloads.seed_everything(seed, 1)
    course = task.build(seed)
    one = forward if isinstance(forward, str) else None
    per = None if isinstance(forward, str) or forward is None else forward
    points = comm.insert_compression(course.model, list(task.after), forward=one, backward=backward, per_point=per)
    for _ in range(task.steps):
        drawn = course.stream.draw()
        points.set_sample_ids(drawn[2])
        task.advance(course, drawn)
    points.remove()
    return course.model


def tested(task: wire_task.Task, model: nn.Module, per_point: dict[int, dict[str, str]]) -> float:
    """The loss of held-out text with compression."""
    points = comm.insert_compression(model, list(task.after), per_point=per_point, sample_every=0)
    with torch.no_grad():
        found = task.test(model)
    points.remove()
    return found


def row(task: wire_task.Task, model: nn.Module, per: dict[int, dict[str, str]], seeds: Sequence[int]) -> dict[str, Any]:
    """What operators do at once to a model that was trained without, and to one that is trained with them."""
    made = [trained(task, seed, per, BACKWARD) for seed in seeds]
    return {
        "operators": [per[number]["forward"] for number in sorted(per)],
        "rise": tested(task, model, per),
        "on": [tested(task, one, per) for one in made],
        "off": [task.test(one) for one in made],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--cache", type=Path, default=Path("results/wire"), help="of the pre-trained model")
    parser.add_argument("--out", type=Path, default=Path("results/bit_allocation.json"))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="a toy: does it all run?")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = wire_task.named("text", args.data, args.cache, quick=args.quick)
    model = trained(task, 0, None, None)
    drawn = task.build(1).stream.draw()
    base, rows = task.test(model), []
    for ratio, spec in ASKED.items():
        found = allocate_bits(
            model, list(task.after), lambda one: float(task.loss(one, drawn)), ratio=ratio, candidates=CANDIDATES
        )
        ways = {
            "alike": {number: {"forward": spec} for number in range(len(task.after))},
            "allotted": found.per_link,
            "allotted, changes": {
                number: {"forward": f"aq({one}, warmup=0)"} for number, one in enumerate(found.specs)
            },
        }
        for name, per in ways.items():
            rows.append(row(task, model, per, args.seeds) | {"ratio": ratio, "way": name})
            rows[-1]["rise"] -= base
            rows[-1]["predicted"] = found.predicted_increase if name != "alike" else None
            print(rows[-1], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    said = {"base": base, "rows": rows, "seeds": args.seeds, "backward": BACKWARD, "machine": machine()}
    args.out.write_text(json.dumps(said, indent=1))
    head = ["ratio", "way", "operators", "rise at once", "predicted", "trained so: on", "off"]
    body = [
        [
            f"{one['ratio']:.1f}",
            one["way"],
            " ".join(one["operators"]),
            f"{one['rise']:+.4f}",
            "-" if one["predicted"] is None else f"{one['predicted']:+.4f}",
            *(" ".join(f"{loss:.4f}" for loss in one[key]) for key in ("on", "off")),
        ]
        for one in rows
    ]
    print(table(head, body))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
