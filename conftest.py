"""Blocks of README and docs run in a directory of their own: what they save must not land in the project.

The garbage collector does not walk over what has been imported, a million objects, in any test.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

# Examples take as long as the machine lets them: a limit of time would fail on a busy one, and nowhere else.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


# Helpers that change torch or the environment where they are imported: in programs of their own.
collect_ignore_glob = ["tests/helpers/torchtitan_training.py", "tests/helpers/v*_program.py"]
collect_ignore_glob += ["src/shrinkpoint/sync/v*.py"]  # vLLM and verl are in another environment
if find_spec("torchtitan") is None:  # it needs Python 3.11 or newer
    collect_ignore_glob += ["src/shrinkpoint/train/torchtitan/*"]


@pytest.fixture(autouse=True)
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
        if request.node.name == "object_storage.md":
            request.getfixturevalue("s3")
    yield
    logging.disable(logging.NOTSET)  # a page may have asked a framework to be quiet


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> object:
    """A server of the S3 protocol, without faults; the environment of the test says where it is."""
    from helpers.s3_server import shared_server

    server = shared_server()
    server.clear()
    monkeypatch.delenv("SHRINKPOINT_CACHE", raising=False)  # of whoever runs the tests
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    return server


_frozen_modules = 0


def pytest_configure() -> None:
    gc.disable()  # until all is collected: a tenth of that time


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


def pytest_runtest_teardown() -> None:
    if len(sys.modules) > _frozen_modules + 100:
        _freeze()


def _freeze() -> None:
    global _frozen_modules
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()
