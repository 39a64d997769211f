"""Inshrinkerator (arXiv 2306.11800), a part at a time: sigma, bins, protection, metric, and scope of pruning.

    python benchmarks/inshrinkerator_parts.py            # two trainings, three seeds: about 40 minutes of one core
    python benchmarks/inshrinkerator_parts.py --quick    # toys, seconds

A training is looked at after a quarter, half, three quarters and all of its steps, with gradients recorded over the 50
steps before, as the scheme records them. Every row changes the state in one way and evaluates what a reader would get:
the rise of the held-out loss, relative, right after loading.

* sigma: the weight of density in the clustering, at 4, 8 and 16 bins, .5 % protected, nothing pruned; bits of the codes
  are their entropy by tensor, and the error is relative to the deviation of the weights.
* bins, protection: one of both changes, sigma .2.
* metric: the smallest values by magnitude or by sensitivity are set to zero, and nothing else is done; how far the
  two agree: Spearman's correlation of the ranks, and the overlap of the smallest 30 % and of the largest half per cent.
* scope: the same share of each tensor, of each type of layer (the paper), or of all values together is pruned.

A seed of a training is a line of results/inshrinkerator_parts.jsonl; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import workload_image
import workloads
from lossless_report import table
from run_log import Ledger, version
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import Workload, evaluating

import shrinkpoint as sp
from shrinkpoint.errors import UnmeasuredLossWarning
from shrinkpoint.quantize.layer_types import layer_types_of_model
from shrinkpoint.quantize.statistics import code_entropy
from shrinkpoint.schemes.inshrinkerator.partition import (
    MAGNITUDE,
    SENSITIVITY,
    PrunePartition,
    score_weights,
)
from shrinkpoint.schemes.search.space import Axis, Space
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL
from shrinkpoint.tensors.flat_state import flatten

FILES = ("workloads.py", "workload_text.py", "workload_image.py", "inshrinkerator_parts.py")
SIGMAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.7, 1.0)
SIGMA_BINS = (4, 8, 16)
BINS = (4, 6, 8, 12, 16, 32)
PROTECTED = (0.0, 0.0005, 0.005, 0.01)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
SCOPES = ("tensor", "layer type", "all")
SPACE = Space(
    (
        Axis("bins", BINS),
        Axis("embedding_bins", (16, 32)),
        Axis("prune", (0.0,)),
        Axis("protect", PROTECTED),
    ),
    (MAGNITUDE, SENSITIVITY),
)
PLAIN = {"bins": 8, "embedding_bins": 16, "metric": MAGNITUDE, "prune": 0.0, "protect": 0.005}
IMAGES = 1000
Evaluate = Callable[[nn.Module], float]
Row = dict[str, Any]


@dataclass(frozen=True)
class Gradients:
    """What a recorder had at a stage."""

    mean: Mapping[str, Tensor]


def quality(name: str, work: Workload, data: Path, *, quick: bool) -> Evaluate:
    """The held-out loss: of images, too, since one image of a thousand is a tenth of a per cent of top-1."""
    if name == "gpt":
        return work.evaluate
    images, labels = workload_image.cifar(data, "test")
    count = 64 if quick else IMAGES
    middle, classes = images[:count, :, 4:28, 4:28], labels[:count]

    def loss(model: nn.Module) -> float:
        with evaluating(model):
            parts = zip(middle.split(250), classes.split(250), strict=True)
            sums = [F.cross_entropy(model(workload_image.normal(x)), y, reduction="sum") for x, y in parts]
        return float(sum(sums)) / count

    return loss


def stages(work: Workload, seed: int) -> Iterator[tuple[int, nn.Module, Gradients]]:
    """The model after each quarter of its training, and the gradients recorded before it."""
    workloads.seed_everything(seed, torch.get_num_threads())
    course = work.build(seed)
    quarter = work.steps // 4
    recorder = sp.train.GradientRecorder(course.model, save_interval=quarter, batches=min(50, quarter))
    for step in range(1, 4 * quarter + 1):
        work.advance(course, recorder)
        if step % quarter == 0:
            yield step, course.model, Gradients({name: x.clone() for name, x in recorder.mean.items()})


class Stage:
    """One model, the rise of whose loss is measured with changed weights.

    Args:
        model: is as it was after every call.
    """

    def __init__(self, model: nn.Module, gradients: Gradients, evaluate: Evaluate) -> None:
        self.model, self.gradients, self.evaluate = model, gradients, evaluate
        self.parameters = dict(model.named_parameters())
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.base = evaluate(model)
        self._partitions: dict[str, PrunePartition] = {}
        self._quantized: dict[tuple[Any, ...], Row] = {}

    def rise(self, changed: Mapping[str, Tensor]) -> float:
        """Of the loss, relative, with these values in place of the model's own."""
        with torch.no_grad():
            for name, value in changed.items():
                self.parameters[name].copy_(value)
            loss = self.evaluate(self.model)
            for name in changed:
                self.parameters[name].copy_(self.values[name])
        return (loss - self.base) / abs(self.base)

    def quantized(self, *, sigma: float = 0.2, **config: Any) -> Row:
        """The scheme's codes with one setting: the rise, the bits and the error; no setting is measured twice."""
        bins = {"embedding_bins": max(16, config.get("bins", 8))} if "bins" in config else {}
        setting = PLAIN | bins | config
        key = (sigma, *setting.values())
        if key not in self._quantized:
            scheme = sp.Inshrinkerator(config=setting, sigma=sigma, gradients=self.gradients, space=SPACE)
            self._quantized[key] = self._measure(scheme)
        return self._quantized[key]

    def _measure(self, scheme: sp.Inshrinkerator) -> Row:
        with torch.no_grad():
            kept = scheme.quantize(flatten({"model": dict(self.model.state_dict())}), None)
        codes = {name.removeprefix("model/"): one for name, one in kept.quantized.items()}
        decoded = {name: one.dequantize(torch.float32).reshape(self.values[name].shape) for name, one in codes.items()}
        count = sum(one.codes.numel() for one in codes.values())
        bits = sum(code_entropy(one.codes) * one.codes.numel() for one in codes.values()) / count
        squares = [(decoded[name] - self.values[name]).square().sum() for name in decoded]
        spread = [(self.values[name] - self.values[name].mean()).square().sum() for name in decoded]
        error = float((sum(squares) / sum(spread)).sqrt())
        return {"rise": self.rise(decoded), "bits": bits, "error": error, "weights": count}

    def partition(self, scope: str) -> PrunePartition:
        """Thresholds of the weights that the scheme quantizes; those of one type share one."""
        if scope not in self._partitions:
            weights = {name: x for name, x in self.values.items() if x.dim() >= 2 and x.numel() >= MIN_WEIGHT_NUMEL}
            types = {
                "tensor": {name: name for name in weights},
                "layer type": layer_types_of_model(self.model),
                "all": dict.fromkeys(weights, "all"),
            }[scope]
            self._partitions[scope] = PrunePartition(score_weights(weights, types, self.gradients.mean))
        return self._partitions[scope]

    def pruned(self, scope: str, metric: str, share: float) -> Row:
        """The smallest values by a metric are zero, and the others as they are."""
        partition = self.partition(scope)
        weights, zeroed, count = partition.weights, {}, 0
        for name, weight in weights.items():
            mask, _ = partition.masks(weight, metric, share, 0.0)
            zeroed[name] = self.values[name].masked_fill(mask.reshape(self.values[name].shape), 0.0)
            count += int(mask.sum())
        return {"rise": self.rise(zeroed), "pruned": count / sum(w.values.numel() for w in weights.values())}

    def agreement(self) -> Row:
        """How far magnitude and sensitivity rank alike, over all weights that have a gradient.

        Sensitivity has the magnitude as a factor, so that they agree by half even where the gradient says nothing: what
        they would with the gradients of other weights is the row "chance".
        """
        weights = [weight for weight in self.partition("all").weights.values() if weight.sensitivity is not None]
        size = torch.cat([weight.values.abs() for weight in weights])
        sensitive = torch.cat([weight.sensitivity for weight in weights if weight.sensitivity is not None])
        slope = (sensitive / size.clamp(min=torch.finfo(size.dtype).tiny))[torch.randperm(len(size))]
        return agreement(size, sensitive) | {"chance": agreement(size, slope * size)["spearman"]}


def agreement(one: Tensor, other: Tensor) -> Row:
    """Spearman's correlation, and the share of the smallest and of the largest values that are the same."""
    order = [x.argsort().argsort().double() for x in (one, other)]
    low, high = len(one) * 3 // 10, max(1, len(one) // 200)
    both = [(ranks < low, ranks >= len(one) - high) for ranks in order]
    return {
        "spearman": float(torch.corrcoef(torch.stack(order))[0, 1]),
        "smallest 30 %": float((both[0][0] & both[1][0]).sum()) / max(1, low),
        "largest .5 %": float((both[0][1] & both[1][1]).sum()) / high,
    }


def study(name: str, seed: int, data: Path, *, quick: bool) -> dict[str, Any]:
    """All rows of one training."""
    work = workloads.named(name, data, quick=quick)
    evaluate = quality(name, work, data, quick=quick)
    rows: list[Row] = []
    bases = []
    for step, model, gradients in stages(work, seed):
        stage = Stage(model, gradients, evaluate)
        bases.append(stage.base)
        found: list[Row] = []
        for sigma in SIGMAS:
            found += [
                {"part": "sigma", "sigma": sigma, "bins": n, **stage.quantized(sigma=sigma, bins=n)} for n in SIGMA_BINS
            ]
        found += [{"part": "bins", "bins": n, **stage.quantized(bins=n)} for n in BINS]
        found += [{"part": "protection", "protect": share, **stage.quantized(protect=share)} for share in PROTECTED]
        for scope in SCOPES:
            for metric in (MAGNITUDE, SENSITIVITY):
                for share in SHARES:
                    row = {"part": "pruning", "scope": scope, "metric": metric, "share": share}
                    found.append({**row, **stage.pruned(scope, metric, share)})
        found.append({"part": "agreement", **stage.agreement()})
        rows += [{"step": step, **row} for row in found]
        print(f"          {name}, seed {seed}, step {step}: loss {stage.base:.4f}", flush=True)
    return {"base": bases, "rows": rows, "facts": work.facts}


def groups(records: list[dict[str, Any]], part: str, *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of a part by what `keys` say, over stages and seeds of one training."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for record in records:
        for row in record["rows"]:
            if row["part"] == part:
                found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def percent(rows: list[Row], key: str = "rise") -> str:
    """Mean and deviation, in per cent."""
    figures = [100 * row[key] for row in rows]
    return f"{fmean(figures):+.2f} ± {stdev(figures):.2f}" if len(figures) > 1 else f"{figures[0]:+.2f}"


def show(name: str, records: list[dict[str, Any]]) -> None:
    by = groups(records, "sigma", "sigma", "bins")
    head = [f"{name}: sigma", *(f"{n} bins: rise %, bits, error" for n in SIGMA_BINS)]
    cells = [[f"{sigma:g}", *(quantized_cell(by[sigma, n]) for n in SIGMA_BINS)] for sigma in SIGMAS]
    print("\n" + table(head, cells))
    for part, key in (("bins", "bins"), ("protection", "protect")):
        rows = groups(records, part, key)
        print(
            "\n"
            + table(
                [f"{name}: {part}", "rise %, bits, error"], [[f"{k[0]:g}", quantized_cell(v)] for k, v in rows.items()]
            )
        )
    by = groups(records, "pruning", "scope", "metric", "share")
    head = [f"{name}: pruned, rise %", *(f"{share:.0%}" for share in SHARES)]
    cells = [
        [f"{metric}, by {scope}", *(percent(by[scope, metric, share]) for share in SHARES)]
        for scope in SCOPES
        for metric in (MAGNITUDE, SENSITIVITY)
    ]
    print("\n" + table(head, cells))
    head = [f"{name}: magnitude and sensitivity, by step", "Spearman", "by chance", "smallest 30 %", "largest .5 %"]
    cells = [
        [
            str(step[0]),
            *(
                f"{fmean(row[key] for row in rows):.2f}"
                for key in ("spearman", "chance", "smallest 30 %", "largest .5 %")
            ),
        ]
        for step, rows in groups(records, "agreement", "step").items()
    ]
    print("\n" + table(head, cells))


def quantized_cell(rows: list[Row]) -> str:
    return f"{percent(rows)}, {fmean(row['bits'] for row in rows):.2f}, {fmean(row['error'] for row in rows):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--only", nargs="+", choices=("gpt", "resnet"), default=("gpt", "resnet"))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="toys: does it all run?")
    parser.add_argument("--any-version", action="store_true", help="runs of older code count as done")
    parser.add_argument("--report", action="store_true", help="only the tables")
    parser.add_argument("--out", type=Path, help="ledger; default results/inshrinkerator_parts.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", UnmeasuredLossWarning)  # it is measured here, beside the scheme
    out = args.out or Path(f"results/inshrinkerator_parts{'-quick' if args.quick else ''}.jsonl")
    ledger, mark = Ledger(out, args.any_version), version(*FILES)
    means = {}
    for name in args.only:
        records = []
        for seed in args.seeds[: 1 if args.quick else None]:
            settings = {"workload": name, "seed": seed, "quick": args.quick}
            record = ledger.find(settings, mark)
            if record is None and not args.report:
                record = ledger.add(settings, mark, study(name, seed, args.data, quick=args.quick))
            records += [record] if record else []
        if records:
            show(name, records)
            means[name] = summary(records)
    out.with_suffix(".json").write_text(json.dumps(means, indent=1))


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over stages and seeds of every row, for a file that is committed."""
    parts = {
        "sigma": ("sigma", "bins"),
        "bins": ("bins",),
        "protection": ("protect",),
        "pruning": ("scope", "metric", "share"),
        "agreement": ("step",),
    }
    out: dict[str, Any] = {
        "machine": records[-1]["machine"],
        "dates": sorted({record["at"][:10] for record in records}),
        "seeds": [record["settings"]["seed"] for record in records],
        "loss by stage": [record["base"] for record in records],
    }
    for part, keys in parts.items():
        out[part] = []
        for names, rows in groups(records, part, *keys).items():
            figures = {key for key in rows[0] if key not in ("part", "step", *keys)}
            means = {key: fmean(row[key] for row in rows) for key in sorted(figures)}
            spread = (
                {"deviation of the rise": stdev(row["rise"] for row in rows)}
                if "rise" in means and len(rows) > 1
                else {}
            )
            out[part].append({**dict(zip(keys, names, strict=True)), **means, **spread, "rows": len(rows)})
    return out


if __name__ == "__main__":
    main()
