"""Set up before any test: one thread for torch, and temporary directories in memory if it has enough space."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Set before torch is imported, here and in every process a test starts: on two cores, workers of two threads each
mostly wait for each other."""

MEMORY = Path("/dev/shm")
MIN_FREE = 4 << 30
"""Bytes that must be free there; the whole suite takes a tenth of it."""


def pytest_configure() -> None:
    """Choose where pytest makes `tmp_path`, and `tempfile` its directories, here and in every process a test starts.

    PYTEST_DEBUG_TEMPROOT and TMPDIR of the caller's, or --basetemp, go before.
    """
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MIN_FREE:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
        os.environ.setdefault("TMPDIR", str(MEMORY))
        tempfile.tempdir = None  # it is read again


LONGEST_FIRST = (
    "lab/tests/demo",
    "tests/train/torchtitan",
    "tests/comm/test_",
    "tests/train",
    "tests/test_lazy_imports.py",
    "tests/test_examples.py",
    "tests/docs",
    "tests/benchmarks",
    "tests/store",
    "tests/comm",
    "tests/schemes",
    "tests/sync",
    "lab",
    "tests",
)
"""Files and folders whose tests begin first: what begins last and takes long leaves a core idle."""


@pytest.fixture
def single_rank_group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """No state that accelerate keeps of an earlier test, nor for a later one."""
    from helpers import accelerate_runs

    accelerate_runs.forget()
    yield
    accelerate_runs.forget()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next(rank for rank, place in enumerate((*LONGEST_FIRST, "")) if item.nodeid.startswith(place))
    )
