"""Lossless ratios and speeds: the tables of docs/benchmarks.md, "Without loss", out of the result that is committed.

    python -m benchmarks.lossless.table            # writes them between the marks of the document
    python -m benchmarks.lossless.table --check    # says whether they are what the result gives

`run.py` measures; its output is results/lossless.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.lossless import report
from lab.studies.harness import DOCS, RESULTS, document_tables

DOCUMENT = DOCS / "benchmarks.md"
RESULT = RESULTS / "lossless.json"
STREAMS = {"W fp32": "weights", "W bf16": "bf16 weights", "m": "first moments", "v": "second moments"}
STREAMS |= {"W + m + v": "whole state"}
SUBJECTS = {
    "ours: W, core alone": "native core alone, memory at hand",
    "ours: W in one piece": "as one tensor, digests included",
    "ours: W": "as the tensors of the model, digests included",
    "ours: W + m + v": "whole state",
    "ours: W + m + v delta": "whole state, a delta",
}
"""Ours, of what is timed; rivals get the weights in one piece."""
WAYS = ("encode", "decode")

Result = Mapping[str, Any]


def sizes(series: Mapping[str, Result]) -> str:
    """Ratios of a series, a line a stream: ours, that of the best rival, of torch's own compression, of the entropy."""
    rows = []
    for name, stream in series.items():
        ours, (rival, theirs) = report.ours(stream), report.best(stream)
        dcp, entropy = stream["raw"] / stream["rivals"]["dcp-zstd"], report.entropy(stream)
        assert ours is not None, name
        rows.append((label(name), f"**{ratio(ours)}**", f"{ratio(theirs)} {rival}", ratio(dcp), ratio(entropy)))
    return document_tables.table(
        ("stream", "shrinkpoint", "best other", "torch DCP, ZStandard", "held-out entropy"), rows
    )


def label(stream: str) -> str:
    """
    >>> label("W bf16, 10 later"), label("W + m + v, 1 later"), label("v"), label("W fp32, epoch later")
    ('bf16 weights, 10 steps later', 'whole state, 1 step later', 'second moments', 'weights, an epoch later')
    """
    name, _, distance = stream.removesuffix(" later").partition(", ")
    words = {"": "", "1": ", 1 step later", "epoch": ", an epoch later"}
    return STREAMS[name] + words.get(distance, f", {distance} steps later")


def ratio(value: float) -> str:
    """
    >>> ratio(1.2081), ratio(12.44), ratio(873.2)
    ('1.208', '12.44', '873')
    """
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 0}f}"


def speeds(found: Mapping[str, Result]) -> str:
    """GB/s of raw bytes by the processor's time of one thread, ours before the rivals."""
    one = found["1"]
    names = [name for name in SUBJECTS if name in one] + sorted(name for name in one if not name.startswith("ours"))
    rows = [[SUBJECTS.get(name, name), *(f"{one[name][way]['cpu']:.2f}" for way in WAYS)] for name in names]
    return document_tables.table(("", *WAYS), rows)


def parts(document: Result) -> dict[str, str]:
    """What stands between the marks, by part: two series, and speeds."""
    result = document["result"]
    *_, demo, published = result["series"].values()
    return {"demo": sizes(demo), "published": sizes(published), "speeds": speeds(result["speed"])}


if __name__ == "__main__":
    document_tables.main(__doc__, __file__, {DOCUMENT: parts(json.loads(RESULT.read_text()))})
