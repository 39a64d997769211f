"""Set up after every test: the widest instructions are used again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shrinkpoint import _native


@pytest.fixture(autouse=True)
def widest_instructions() -> Iterator[None]:
    yield
    _native._use_simd(2)
