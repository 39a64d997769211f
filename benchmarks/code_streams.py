"""What the parts of a delta coder of codes are worth: the paper's ablation, on a training of ours, and beside it ours.

    python benchmarks/code_streams.py            # the gpt workload, 40 checkpoints: three minutes
    python benchmarks/code_streams.py --quick    # a toy

While the model trains, its weights are quantized at every checkpoint with a fixed setting, and the codes of all its
weights are coded against those of the checkpoint before in each of these ways. Bytes are of the codes alone; centers
and protected values, which cost the same whatever codes the codes, are left out. Ratios are of 4 bytes a weight, over
all deltas together; the best delta is in the JSON, and in the table for the paper's own measure.

* fixed: a whole number of bits a code, no delta;
* Huffman, + run lengths, + rearranged: the cyclic delta (arXiv 2306.11800 sec. 3.5) without and with its two parts;
* context: the code under the code before, rANS; + moments: and under the moments, in a file that has them;
* H(now | before): the entropy that such a coder cannot go below, if it knew all frequencies in advance (per tensor).
"""

from __future__ import annotations

import argparse
import copy
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import published_numbers
import workloads
from lossless_report import table
from lossless_speed import machine
from workloads import Course, Workload

import shrinkpoint as sp
from shrinkpoint.codec.codebook_tensor import CodebookTensor
from shrinkpoint.codec.reference import Reference
from shrinkpoint.schemes.base import QuantizedState
from shrinkpoint.schemes.encode.records import encode_records
from shrinkpoint.tensors.flat_state import FlatState, flatten

FORMS = {"fixed": "packed", "Huffman": "huffman", "+ run lengths": "runs", "+ rearranged": "rearranged"}
"""Name here to name of a coder."""
OURS = ("context", "+ moments")
ENTROPY = "H(now | before)"
SETTINGS = {
    "4 bins": {"bins": 4, "embedding_bins": 16, "prune": 0.0, "protect": 0.0005},
    "16 bins": {"bins": 16, "embedding_bins": 32, "prune": 0.2, "protect": 0.005},
}
"""The coarsest setting of the paper's space, and a middling one."""


@dataclass
class Series:
    """The deltas of one run of checkpoints.

    Attributes:
        paper: fresh centers at every checkpoint; else they go on from the ones before.
        sizes: bytes of all weights' codes, by form, one for each delta.
        moved: share of the codes that changed, one for each delta.
    """

    name: str
    setting: str
    paper: bool
    generation: int = 0
    sizes: dict[str, list[float]] = field(default_factory=dict)
    moved: list[float] = field(default_factory=list)
    weights: int = 0

    def __post_init__(self) -> None:
        self._scheme = sp.Inshrinkerator(config=SETTINGS[self.setting], paper=self.paper)
        self._scheme.resume(None, self.generation)
        self._reference: Reference | None = None

    def observe(self, course: Course) -> QuantizedState:
        """Quantize what is there now; from the second time on, code it in every form."""
        flat = flatten({"model": course.model.state_dict(), "optimizer": course.optimizer.state_dict()})
        kept = self._scheme.quantize(flat, self._reference)
        if self._reference is not None:
            self._measure(kept, self._reference)
        self._reference = Reference(kept.state.tensors, kept.quantized)
        return kept

    def _measure(self, kept: QuantizedState, reference: Reference) -> None:
        pairs = [(one, reference.quantized[name]) for name, one in kept.quantized.items()]
        self.weights = sum(one.codes.numel() for one, _ in pairs)
        self.moved.append(sum(int((a.codes != b.codes).sum()) for a, b in pairs) / self.weights)
        weights = _only(kept.state, kept.quantized)
        for form, coder in FORMS.items():
            self._add(form, _bytes(weights, reference, kept.quantized, coder))
        self._add(OURS[0], _bytes(weights, reference, kept.quantized, "context"))
        self._add(OURS[1], _bytes(kept.state, reference, kept.quantized, "context"))
        self._add(ENTROPY, sum(entropy_under(a.codes.numpy(), b.codes.numpy()) for a, b in pairs))

    def _add(self, form: str, size: float) -> None:
        self.sizes.setdefault(form, []).append(size)

    def ratio(self, form: str) -> float:
        """Over all deltas."""
        return 4 * self.weights * len(self.sizes[form]) / sum(self.sizes[form])

    def best(self, form: str) -> float:
        """Of the smallest delta."""
        return 4 * self.weights / max(min(self.sizes[form]), 1.0)


def _only(flat: FlatState, symbols: Mapping[str, CodebookTensor]) -> FlatState:
    """The quantized weights, without the moments that would be context."""
    weights = {name.removeprefix("model/"): flat.tensors[name] for name in symbols}
    return flatten({"model": weights})


def _bytes(flat: FlatState, reference: Reference, symbols: Mapping[str, CodebookTensor], coder: str) -> int:
    """Of the codes of all `symbols` of a state, with what describes them."""
    total = 0
    for one in encode_records(flat, reference, quantized=symbols, coders=(coder,), threads=1):
        if one.recipe["kind"] == "quantized":
            side, codes, _ = struct.unpack_from("<IQQ", bytes(one.parts["symbols"]))
            total += side + codes
    return total


def entropy_under(now: Any, before: Any) -> float:
    """Bytes: the empirical entropy of codes under the codes in their places before, of one tensor."""
    joint = np.bincount(before.reshape(-1).astype(np.int64) * 256 + now.reshape(-1), minlength=65536).reshape(256, 256)
    rows = joint.sum(1, keepdims=True)
    share = joint / np.maximum(rows, 1)
    return float(-(joint * np.log2(np.where(share > 0, share, 1.0))).sum() / 8)


def series_of(workload: Workload, seed: int) -> Iterator[Series]:
    """One training for all settings, and a branch of it that was restored half way."""
    course = workload.build(seed)
    watching = [
        Series("fresh centers" if paper else "continued centers", setting, paper)
        for setting in SETTINGS
        for paper in (True, False)
    ]
    branches: list[tuple[Course, Series]] = []
    for step in range(1, workload.steps + 1):
        for one in (course, *(branch for branch, _ in branches)):
            workload.advance(one)
        if step % workload.interval:
            continue
        kept = [series.observe(course) for series in watching]
        for branch, series in branches:
            series.observe(branch)
        if step // workload.interval == workload.checkpoints // 2:
            branches = [_restored(course, kept[i], watching[i]) for i in range(1, len(watching), 2)]
    yield from watching
    yield from (series for _, series in branches)


def _restored(course: Course, kept: QuantizedState, series: Series) -> tuple[Course, Series]:
    """A copy of the training that goes on from a checkpoint, and the deltas from there."""
    branch = copy.deepcopy(course)
    branch.model.load_state_dict(
        {name.removeprefix("model/"): kept.state.tensors[name] for name in kept.quantized}, False
    )
    again = Series("continued, restored", series.setting, False, generation=1)
    again._reference = Reference(kept.state.tensors, kept.quantized)
    return branch, again


def report(found: list[Series]) -> str:
    forms = [*FORMS, *OURS, ENTROPY]
    rows = [
        [f"{one.setting}, {one.name}", f"{100 * sum(one.moved) / len(one.moved):.2f}"]
        + [f"{one.ratio(form):.1f}" for form in forms]
        for one in found
    ]
    best = [[f"{one.setting}, {one.name}", "", *(f"{one.best(form):.1f}" for form in forms)] for one in found]
    printed = [
        [
            "paper, ResNet-152, overall",
            "",
            "",
            *(f"{published_numbers.ABLATION[name][0]:.0f}" for name in published_numbers.ABLATION),
            "",
            "",
            "",
        ],
        [
            "paper, ResNet-152, best",
            "",
            "",
            *(f"{published_numbers.ABLATION[name][1]:.0f}" for name in published_numbers.ABLATION),
            "",
            "",
            "",
        ],
    ]
    head = ["", "moved %", *forms]
    return "\n\n".join(
        [
            "ratio over all deltas\n\n" + table(head, rows + printed[:1]),
            "ratio of the best delta\n\n" + table(head, best + printed[1:]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=workloads.default_data())
    parser.add_argument("--workload", default="gpt", help="gpt, resnet or wide")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a toy: does it run?")
    parser.add_argument("--out", type=Path, default=Path("results/codes.json"))
    options = parser.parse_args()
    workloads.seed_everything(options.seed, options.threads)
    found = [*series_of(workloads.named(options.workload, options.data, quick=options.quick), options.seed)]
    print(report(found))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"workload": options.workload, "seed": options.seed, "quick": options.quick, "settings": SETTINGS}
    written = {"machine": machine(), **settings, "series": [asdict(one) for one in found]}
    options.out.write_text(json.dumps(written, indent=1))
    print("written:", options.out)


if __name__ == "__main__":
    main()
