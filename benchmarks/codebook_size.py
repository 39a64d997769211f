"""How many bins each quantizer needs, alone: nothing pruned, no delta.

    python benchmarks/codebook_size.py            # the published ResNets and four checkpoints of the gpt workload
    python benchmarks/codebook_size.py --quick    # one small network, few images

Every tensor with at least two dimensions and 4096 values is quantized with one number of bins; the smallest number at
which quality is at most .1, 1 or 5 % worse is found by bisection, as if quality rose with it. QD gives each tensor a
power of two by its entropy, between a least and a most number: of all such pairs the one with the smallest mean over
parameters that is good enough counts. A subject and quantizer that are done are a line of results/bins.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import plot
import published_numbers
import torch
import workload_image
import workloads
from lossless_report import table
from run_log import Ledger, version
from torch import Tensor, nn

from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.quantize.codebook import kmeans_codebook, quantize_to_codebook
from shrinkpoint.quantize.levels import histogram_entropy, quantize_uniform, variable_bins
from shrinkpoint.quantize.statistics import LogHistogram
from shrinkpoint.schemes.select import MIN_WEIGHT_NUMEL
from shrinkpoint_lab.baselines.gobo import quantize_with_outliers
from shrinkpoint_lab.baselines.uniform import quantize_adaptive

THRESHOLDS = (0.001, 0.01, 0.05)
POWERS = (2, 4, 8, 16, 32, 64, 128, 256)
FILES = ("workloads.py", "workload_text.py", "workload_image.py", "codebook_size.py")
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A trained model and its quality.

    Attributes:
        family: subjects of one family are averaged.
    """

    name: str
    family: str
    model: nn.Module = field(repr=False)
    evaluate: Callable[[nn.Module], float] = field(repr=False)
    higher_is_better: bool

    def tensors(self) -> dict[str, Tensor]:
        """What is quantized; tied tensors once."""
        found = self.model.named_parameters()
        return {name: p.detach().clone() for name, p in found if p.dim() >= 2 and p.numel() >= MIN_WEIGHT_NUMEL}


@dataclass(frozen=True)
class Setting:
    """Numbers of bins by tensor, and their mean over parameters."""

    mean: float
    bins: dict[str, int]


class Quantizer:
    """One way to quantize; what does not depend on the number of bins is computed once a subject."""

    most = 256
    ordered = True
    """Whether quality can be taken to rise along the ladder."""

    def __init__(self, tensors: Tensors) -> None:
        began = time.perf_counter()
        self.tensors = tensors
        self.prepare()
        self.prepared = time.perf_counter() - began

    def prepare(self) -> None:
        pass

    def ladder(self) -> list[Setting]:
        """Settings from coarse to fine."""
        return [Setting(float(n), dict.fromkeys(self.tensors, n)) for n in range(2, self.most + 1)]

    def quantize(self, name: str, bins: int) -> CodebookTensor:
        raise NotImplementedError


class Unprotected(Quantizer):
    """k-means on the sketch's histogram, sigma .2, for all values; two codes are those of pruned and protected ones."""

    most = 254
    sigma = 0.2
    share = 0.0
    """Of the values that are protected."""

    def prepare(self) -> None:
        self.ids = {name: LogHistogram.bucket_ids(x) for name, x in self.tensors.items()}
        sizes = [LogHistogram.from_bucket_ids(ids).magnitudes() for ids in self.ids.values()]
        limit = sum(sizes[1:], sizes[0]).quantile(1 - self.share) if self.share else float("inf")
        self.protected = {name: x.abs() > limit for name, x in self.tensors.items()}
        self.histograms = {
            name: LogHistogram.from_bucket_ids(ids, mask=~self.protected[name]).buckets()
            for name, ids in self.ids.items()
        }

    def quantize(self, name: str, bins: int) -> CodebookTensor:
        centers = kmeans_codebook(*self.histograms[name], bins, sigma=self.sigma)
        return quantize_to_codebook(self.tensors[name], centers, protected=self.protected[name])


class Inshrinkerator(Unprotected):
    """With 0.5 % of all values protected, the middle of the search space; the paper disables pruning alone here."""

    share = 0.005


class Density(Inshrinkerator):
    """The same with sigma 1: values weigh by their number alone, not by their magnitude too."""

    sigma = 1.0


class QD(Quantizer):
    """Uniform, bits by entropy."""

    ordered = False

    def ladder(self) -> list[Setting]:
        names, sizes = list(self.tensors), [x.numel() for x in self.tensors.values()]
        entropies = [histogram_entropy(x) for x in self.tensors.values()]
        found = []
        for least in POWERS:
            for most in (power for power in POWERS if power >= least):
                bins = variable_bins(entropies, least, most)
                mean = sum(n * size for n, size in zip(bins, sizes, strict=True)) / sum(sizes)
                found.append(Setting(mean, dict(zip(names, bins, strict=True))))
        return sorted(found, key=lambda one: one.mean)

    def quantize(self, name: str, bins: int) -> CodebookTensor:
        return quantize_uniform(self.tensors[name], bins)


class CNR(Quantizer):
    """Uniform on the best range; what lies outside gets its ends."""

    def prepare(self) -> None:
        self.histograms = {name: LogHistogram.from_tensor(x).buckets() for name, x in self.tensors.items()}

    def quantize(self, name: str, bins: int) -> CodebookTensor:
        return quantize_adaptive(self.tensors[name], bins, *self.histograms[name])


class GOBO(Quantizer):
    """Outliers exact, k-means with L1 for the rest; one code is the outliers'."""

    most = 255

    def quantize(self, name: str, bins: int) -> CodebookTensor:
        return quantize_with_outliers(self.tensors[name], bins)


QUANTIZERS = {
    "cnr": CNR,
    "qd": QD,
    "gobo": GOBO,
    "inshrinkerator": Inshrinkerator,
    "density": Density,
    "unprotected": Unprotected,
}


class Search:
    """The smallest settings of one quantizer on one subject; no setting is measured twice."""

    def __init__(self, subject: Subject, quantizer: Quantizer) -> None:
        self.subject, self.quantizer = subject, quantizer
        self.ladder = quantizer.ladder()
        self.base = subject.evaluate(subject.model)
        self.seen: dict[int, float] = {}
        self.quantizing: list[tuple[float, float]] = []  # bins, seconds

    def degradation(self, place: int) -> float:
        if place not in self.seen:
            setting = self.ladder[place]
            quality = self._quality(setting)
            worse = self.base - quality if self.subject.higher_is_better else quality - self.base
            self.seen[place] = worse / abs(self.base)
        return self.seen[place]

    def _quality(self, setting: Setting) -> float:
        """Of the model with quantized tensors; its own are put back."""
        began = time.perf_counter()
        made = {name: self.quantizer.quantize(name, n).dequantize(torch.float32) for name, n in setting.bins.items()}
        self.quantizing.append((setting.mean, time.perf_counter() - began))
        parameters = dict(self.subject.model.named_parameters())
        try:
            _put(parameters, made)
            return self.subject.evaluate(self.subject.model)
        finally:
            _put(parameters, self.quantizer.tensors)

    def smallest(self, threshold: float) -> Setting | None:
        """By bisection, or one by one where settings have no order; None if even the finest setting is worse."""
        low, high = 0, len(self.ladder) - 1
        if self.degradation(high) > threshold:
            return None
        if not self.quantizer.ordered:
            return next(self.ladder[n] for n in range(high + 1) if self._meets(n, threshold))
        while low < high:
            middle = (low + high) // 2
            if self.degradation(middle) <= threshold:
                high = middle
            else:
                low = middle + 1
        return self.ladder[high]

    def _meets(self, place: int, threshold: float) -> bool:
        """Measured only where no setting that is at least as fine for every tensor is known to be worse."""
        mine = self.ladder[place].bins
        for other, worse in self.seen.items():
            if worse > threshold and all(mine[name] <= n for name, n in self.ladder[other].bins.items()):
                return False
        return self.degradation(place) <= threshold


@torch.no_grad()
def _put(parameters: Mapping[str, nn.Parameter], values: Tensors) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


def study(subject: Subject, kind: str) -> dict[str, Any]:
    """The smallest bins by threshold, what was measured on the way, and seconds per million parameters."""
    quantizer = QUANTIZERS[kind](subject.tensors())
    search = Search(subject, quantizer)
    found = {str(threshold): search.smallest(threshold) for threshold in sorted(THRESHOLDS, reverse=True)}
    millions = sum(x.numel() for x in quantizer.tensors.values()) / 1e6
    tried = sorted((search.ladder[place].mean, worse) for place, worse in search.seen.items())
    return {
        "family": subject.family,
        "base": search.base,
        "bins": {threshold: one.mean if one else None for threshold, one in found.items()},
        "tried": tried,
        "quantized millions": millions,
        "preparing seconds per million": quantizer.prepared / millions,
        "quantizing seconds per million": fmean(seconds for _, seconds in search.quantizing) / millions,
        "by bins": [[n, seconds / millions] for n, seconds in search.quantizing],
    }


def resnets(data: Path, depths: tuple[int, ...], images: int) -> dict[str, Callable[[], Subject]]:
    def make(depth: int) -> Subject:
        x, y = workload_image.cifar(data, "test")
        seen, model = (x[:images], y[:images]), workload_image.pretrained(data, depth)
        return Subject(f"ResNet-{depth}", f"ResNet-{depth}", model, lambda m: workload_image.accuracy(m, seen), True)

    return {f"ResNet-{depth}": (lambda depth=depth: make(depth)) for depth in depths}


def gpts(data: Path, folder: Path, *, quick: bool) -> dict[str, Callable[[], Subject]]:
    """The gpt workload after a quarter, half, three quarters and all of its steps, trained where it is not kept yet."""
    work = workloads.named("gpt", data, quick=quick)
    steps = [work.steps * quarter // 4 for quarter in (1, 2, 3, 4)]

    def make(step: int) -> Subject:
        mark = version("workloads.py", "workload_text.py", core=False)
        paths = {at: folder / f"gpt-{mark}{'-quick' if quick else ''}-{at}.pt" for at in steps}
        if not all(path.exists() for path in paths.values()):
            _train(work, paths)
        model = work.build(0).model.eval()
        model.load_state_dict(torch.load(paths[step], weights_only=True))
        return Subject(f"gpt, step {step}", "gpt", model, work.evaluate, False)

    return {f"gpt, step {step}": (lambda step=step: make(step)) for step in steps}


def _train(work: workloads.Workload, paths: Mapping[int, Path]) -> None:
    workloads.seed_everything(0, torch.get_num_threads())
    course = work.build(0)
    for step in range(1, work.steps + 1):
        loss = work.advance(course)
        if step in paths:
            print(f"          training the gpt: step {step}, loss {loss:.3f}", flush=True)
            paths[step].parent.mkdir(parents=True, exist_ok=True)
            torch.save(course.model.state_dict(), paths[step])


def rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By family, threshold and quantizer: the mean of the bins, None where a subject has no setting that is enough."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["family"], record["settings"]["quantizer"]), []).append(record)
    out = []
    for (family, quantizer), found in groups.items():
        bins = {str(t): [record["bins"][str(t)] for record in found] for t in THRESHOLDS}
        means = {t: None if None in some else fmean(some) for t, some in bins.items()}
        seconds = {key: fmean(r[f"{key} seconds per million"] for r in found) for key in ("preparing", "quantizing")}
        out.append({"family": family, "quantizer": quantizer, "subjects": len(found), "bins": means, **seconds})
    return out


def show(found: list[dict[str, Any]], records: list[dict[str, Any]], path: Path) -> None:
    by = {(row["family"], row["quantizer"]): row for row in found}
    families = list(dict.fromkeys(row["family"] for row in found))
    head = ["mean bins", *(f"{100 * t:g} %: {q}" for t in THRESHOLDS for q in QUANTIZERS)]
    lines = [[f, *(_bins(by.get((f, q)), t) for t in THRESHOLDS for q in QUANTIZERS)] for f in families]
    lines += [[f"paper: {model}", *_printed(figures)] for model, figures in published_numbers.BINS.items()]
    print(f"\n{table(head, lines)}\n")
    head = ["s per million parameters", "subjects", "preparing", "quantizing"]
    cells = [
        [f"{r['family']}, {r['quantizer']}", str(r["subjects"]), f"{r['preparing']:.4f}", f"{r['quantizing']:.4f}"]
        for r in found
    ]
    print(table(head, cells))
    print("\npaper, clustering into 32 bins on an A40, s per million parameters:", end=" ")
    print(
        ", ".join(
            f"{name} {seconds / millions:.4f}" for name, (millions, seconds) in published_numbers.CLUSTERING.items()
        )
    )
    path.with_suffix(".json").write_text(json.dumps({"rows": found, "paper": published_numbers.BINS}, indent=1))
    plot.write([_panel(family, records) for family in families], path, "Bins needed by each quantizer alone")


def _printed(figures: Sequence[Sequence[float | None]]) -> list[str]:
    """The paper's cells in our columns; it has the first four quantizers alone."""
    return [
        "x" if n is None else f"{n:.1f}" if n else "" for at in figures for n in (*at, *[0] * (len(QUANTIZERS) - 4))
    ]


def _bins(row: Mapping[str, Any] | None, threshold: float) -> str:
    if row is None:
        return "-"
    bins = row["bins"][str(threshold)]
    return "x" if bins is None else f"{bins:.1f}"


def _panel(family: str, records: list[dict[str, Any]]) -> plot.Panel:
    lines = []
    for record in records:
        if record["family"] == family:
            bins, worse = zip(*record["tried"], strict=True)
            percent = [max(0.01, 100 * one) for one in worse]
            lines.append(plot.Line(record["settings"]["quantizer"], bins, percent, kind="markers"))
    return plot.Panel(f"{family}: worse by bins (at least .01 is drawn)", "mean bins", "%", lines, log=True, log_x=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--out", type=Path, help="ledger; default results/bins.jsonl")
    parser.add_argument("--images", type=int, default=1000, help="of CIFAR-10's test part, for an accuracy")
    parser.add_argument("--only", nargs="*", default=[], help="subjects whose name contains one of these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--any-version", action="store_true", help="runs of older code count as done")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    version(*FILES)  # before anybody edits
    out = args.out or Path(f"results/bins{'-quick' if args.quick else ''}.jsonl")
    ledger, images = Ledger(out, args.any_version), 50 if args.quick else args.images
    depths = (20,) if args.quick else (20, 32, 44, 56)
    makers = {**gpts(args.data, out.parent / "bins", quick=args.quick), **resnets(args.data, depths, images)}
    records = []
    for name, make in makers.items():
        if args.only and not any(word.lower() in name.lower() for word in args.only):
            continue
        records += [_record(name, make, kind, images, ledger) for kind in QUANTIZERS]
    if records:
        show(rows(records), records, out.with_suffix(""))


def _record(name: str, make: Callable[[], Subject], kind: str, images: int, ledger: Ledger) -> dict[str, Any]:
    settings = {"subject": name, "quantizer": kind, "images": images}
    known = ledger.find(settings, version(*FILES))
    if known is not None:
        return known
    began = time.perf_counter()
    found = study(make(), kind)
    seconds = time.perf_counter() - began
    print(f"{name}, {kind}: {found['bins']}, {seconds:.0f} s", flush=True)
    return ledger.add(settings, version(*FILES), {**found, "seconds": seconds})


if __name__ == "__main__":
    main()
