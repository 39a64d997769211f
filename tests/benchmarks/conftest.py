"""What tests of several benchmarks need."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from helpers.paths import REPOSITORY


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that a test file is named after: benchmarks/fisher_tables.py in test_fisher_tables.py."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module(request.path.stem.removeprefix("test_"))


@pytest.fixture
def tables(program: ModuleType) -> ModuleType:
    """The same, where the program writes tables of documents."""
    return program
