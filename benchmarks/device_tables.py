"""Tables of what `device_all.py` has measured on a GPU, as they stand in docs/gpu.md.

    python benchmarks/device_tables.py            # writes them between the marks of docs/gpu.md
    python benchmarks/device_tables.py --check    # says whether they are what the results give

They rest on benchmarks/results/device.json; without it the document says that nothing was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))  # device_all.py and its parts are started by their paths
from lab.studies.harness import document_tables  # noqa: E402

DOCUMENT = REPO / "docs" / "gpu.md"
RESULT = REPO / "benchmarks" / "results" / "device.json"
NOT_MEASURED = "Not measured yet."
Row = dict[str, Any]


def markdown(document: Row) -> str:
    """A table for each part: columns are the figures of its rows, in the order in which they occur first."""
    quick = ", toys (--quick)" if document["quick"] else ""
    parts = [
        f"`{document['command']}`, {document['date']}, on {document['device']}{quick}, {document['seconds']:.0f} s."
    ]
    for part in document["parts"]:
        head = list(dict.fromkeys(name for row in part["rows"] for name in row))
        rows = [[_cell(row.get(name)) for name in head] for row in part["rows"]]
        table = document_tables.table(head, rows) if rows else "No rows."
        parts.append(f"**{part['title']}** (`{part['name']}`, {part['seconds']:.0f} s)\n\n{table}")
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


def document_text() -> str:
    """What stands between the marks of the document."""
    return markdown(json.loads(RESULT.read_text())) if RESULT.exists() else NOT_MEASURED


if __name__ == "__main__":
    document_tables.main(__doc__, __file__, {DOCUMENT: document_text()})
