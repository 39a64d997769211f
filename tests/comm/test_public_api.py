"""Every name in `shrinkpoint.comm.__all__` exists."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from shrinkpoint import comm


def test_every_public_name_is_there():
    typed = {
        alias.asname
        for node in ast.walk(ast.parse(Path(comm.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shrinkpoint.comm.")
        for alias in node.names
    }
    assert typed == set(comm.__all__) == {name for name in comm.__all__ if getattr(comm, name) is not None}


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = comm.nothing


def test_a_function_is_not_hidden_by_the_module_it_lives_in():
    importlib.import_module("shrinkpoint.comm.recommendation")
    assert callable(comm.recommend)
