"""Promise: what the pages say of a save in each framework is what the committed results give."""

from __future__ import annotations

import json
from types import ModuleType


def test_the_tables_are_what_the_results_give(tables: ModuleType) -> None:
    pages = tables.pages(json.loads(tables.RESULT.read_text()))
    assert len(pages) == 5
    for page, inner in pages.items():
        document = page.read_text()
        assert tables.document_tables.written(document, "frameworks_tables", inner) == document, page.name


def test_the_first_save_stands_apart_and_the_worst_is_of_the_later_ones(tables: ModuleType) -> None:
    figures = {
        "seconds": {"stock": [0.5, 0.2, 0.1, 0.3], "fisher": [9.0, 2.0, 3.0, 1.0]},
        "flush": {"stock": [0.0, 0.04, 0.04, 0.04], "fisher": [0.0, 0.0, 0.0, 0.0]},
        "bytes": {"stock": [80e6, 160e6, 240e6, 320e6], "fisher": [4e6, 5e6, 6e6, 6.4e6]},
        "rise": [0.001, 0.002, 0.003, 0.002],
    }
    stock, own = tables.table(figures, {"stock": "stock", "fisher": "ours"}).splitlines()[2:]
    assert stock == "| stock | 320.0 MB | 1.00x | 1.00x | .50 | .20 | .30 | .040 |"
    assert own == "| ours: rise +0.20 %, +0.30 % | 6.4 MB | 20.00x | 100x | 9.0 | 2.0 | 3.0 | .000 |"
