"""Calls in the threads of a pool, where threads cannot be had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shrinkpoint.threads import submit_or_run


@pytest.fixture
def pool(monkeypatch):
    """A pool that can start no thread until the test allows it: it has queued what it refuses."""
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(pool, "_adjust_thread_count", lambda: (_ for _ in ()).throw(RuntimeError("no thread")))
        yield pool


def test_call_that_was_queued_and_refused_is_made_once(pool, monkeypatch):
    calls = []
    assert submit_or_run(pool, lambda: calls.append(1) or 7).result() == 7
    with pytest.raises(ValueError, match="seven"):
        submit_or_run(pool, int, "seven")
    monkeypatch.undo()
    assert pool.submit(len, "ab").result() == 2  # its thread takes what was queued before
    assert calls == [1]


def test_call_in_a_thread_has_its_result_its_error_and_can_be_cancelled():
    with ThreadPoolExecutor(1) as pool:
        assert submit_or_run(pool, pow, 2, 3).result() == 8
        with pytest.raises(ValueError, match="seven"):
            submit_or_run(pool, int, "seven").result()
    calls = []
    with pytest.raises(ValueError, match="seven"):
        submit_or_run(pool, int, "seven")  # a pool that is shut down: at once, here
    assert submit_or_run(pool, lambda: calls.append(1)).done() and calls == [1]
