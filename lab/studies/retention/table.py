"""The table of docs/store_studies.md, "What retention holds", out of the committed result.

    python -m lab.studies.retention.table            # writes it between the marks of the document
    python -m lab.studies.retention.table --check    # says whether it is what the result gives

`run.py` measures. A row is one scheme through one writer; its cells have a figure for each number of checkpoints to
keep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lab.studies.harness import DOCS, RESULTS, document_tables

DOCUMENT = DOCS / "store_studies.md"
RESULT = RESULTS / "retention.json"
HEAD = ("scheme", "held", "plain / held", "peak after a save", "peak while saving", "files", "save s", "rise %")
WRITERS = {"CheckpointManager": "`CheckpointManager`", "Trainer": "`ShrinkTrainer`", "Lightning": "`ShrinkIO`"}
TRAININGS = {"gpt": "GPT, AdamW", "gpt-2": "GPT-2, AdamW", "perceptron": "perceptron, SGD"}
PLAIN = {"CheckpointManager": "`torch.save`", "Trainer": "stock Trainer", "Lightning": "stock Lightning"}

Row = Mapping[str, Any]


def tables(document: Mapping[str, Any]) -> str:
    """A table for each training and writer."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in document["rows"]:
        groups.setdefault((row["training"], row["writer"]), []).append(row)
    return "\n\n".join(_table(*key, rows) for key, rows in groups.items())


def _table(training: str, writer: str, rows: Sequence[Row]) -> str:
    """All schemes of a training, under a title with the size of a plain checkpoint."""
    schemes: dict[str, list[Row]] = {}
    for row in rows:
        schemes.setdefault(row["scheme"], []).append(row)
    numbers = ", ".join(str(row["last"]) for row in rows if row["scheme"] == rows[0]["scheme"])
    size = rows[0]["plain checkpoint"] / 1e6
    title = f"**{TRAININGS[training]}, {WRITERS[writer]}**: {size:.2f} MB a plain checkpoint; the last {numbers} kept"
    return f"{title}\n\n{document_tables.table(HEAD, (line(found) for found in schemes.values()))}"


def line(rows: Sequence[Row]) -> list[str]:
    """The cells of one scheme; bytes are counted in plain checkpoints."""
    first = rows[0]
    is_plain = first["scheme"] == "plain"

    def each(key: str) -> str:
        return ", ".join(f"{row[key] / row['plain checkpoint']:.2f}" for row in rows)

    files = "" if first["files"] is None else ", ".join(f"{row['files']:.1f}" for row in rows)
    rises = [row for row in rows if row["rise"] is not None]
    return [
        PLAIN[first["writer"]] if is_plain else name(first["scheme"]),
        each("held"),
        "" if is_plain else ", ".join(f"{row['ratio']:.2f}" for row in rows),
        each("peak after"),
        each("peak"),
        files,
        f"{fmean(row['seconds'] for row in rows):.3f}",
        ", ".join(f"{100 * row['rise']:+.2f}" for row in rises),
    ]


def name(scheme: str) -> str:
    """
    >>> name("fisher(relative_error=.3)"), name("qd finest")
    ('fisher, `relative_error=0.3`', 'qd, finest')
    """
    plain, _, settings = document_tables.label(scheme).removesuffix(")").partition("(")
    return f"{plain}, `{settings}`" if settings else plain.replace(" ", ", ", 1)


if __name__ == "__main__":
    document_tables.main(__doc__, __file__, {DOCUMENT: tables(json.loads(RESULT.read_text())["result"])})
