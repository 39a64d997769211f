"""Promise: each committed result is in the list beside it, and documents name no other."""

from __future__ import annotations

import re

from helpers.paths import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))
NAMED = re.compile(r"`(?:benchmarks/results/)?([\w.-]+\.json)`")


def test_the_list_has_every_result() -> None:
    listed = set(NAMED.findall((BENCHMARKS / "results" / "README.md").read_text()))
    assert listed == {path.name for path in RESULTS}


def test_documents_name_no_result_that_is_not_there() -> None:
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        named = set(re.findall(r"benchmarks/results/([\w.-]+\.json)", page.read_text()))
        assert named <= {path.name for path in RESULTS}, page.name
