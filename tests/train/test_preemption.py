"""SIGTERM is noted while somebody watches for it, handlers of others are called, and all is put back."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from helpers.processes import run_forked

from shrinkpoint.errors import PolicyError
from shrinkpoint.train.save_decision import PreemptionWatch


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[str]]:
    """The calls of a handler of the user's, which is put back after each test."""
    noted: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: noted.append("user"))
    yield noted
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_users_handler_is_called_and_put_back(calls):
    before = signal.getsignal(signal.SIGTERM)
    watch = PreemptionWatch()
    assert not watch.is_signalled
    terminate()
    assert watch.is_signalled and calls == ["user"]
    watch.close()
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is before
    terminate()
    assert calls == ["user", "user"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_watches_are_closed_in_any_order(calls, order):
    before = signal.getsignal(signal.SIGTERM)
    watches = [PreemptionWatch() for _ in range(3)]
    for index, position in enumerate(order):
        terminate()
        assert len(calls) == index + 1
        assert all(watches[other].is_signalled for other in order[index:])
        watches[position].close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_came_later_stays_and_what_is_behind_it_passes_on(calls):
    watch = PreemptionWatch()
    behind = signal.getsignal(signal.SIGTERM)

    def later(number, frame):
        calls.append("later")
        behind(number, frame)

    signal.signal(signal.SIGTERM, later)
    terminate()
    assert watch.is_signalled and calls == ["later", "user"]
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is later
    watch.is_signalled = False
    terminate()
    assert not watch.is_signalled and calls == ["later", "user"] * 2


def test_a_watch_that_nobody_holds_is_no_watch(calls):
    before = signal.getsignal(signal.SIGTERM)
    PreemptionWatch()
    second = PreemptionWatch()
    second.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_main_thread_may_watch():
    errors = []

    def watch() -> None:
        try:
            PreemptionWatch()
        except PolicyError as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "main thread" in errors[0].message


PROGRAM = """
    import json
    import os
    import signal
    from shrinkpoint.train.save_decision import PreemptionWatch

    def outcome(work):
        # how a forked process ends that runs this; 0 if it does not die
        pid = os.fork()
        if not pid:
            os._exit(work() or 0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    def watched():
        watch = PreemptionWatch()
        terminate()
        return 0 if watch.is_signalled else 9

    def forked():
        watch = PreemptionWatch()
        return 0 if outcome(terminate) == -signal.SIGTERM and not watch.is_signalled else 9

    def closed():
        watch = PreemptionWatch()
        behind = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *arguments: behind(*arguments))
        watch.close()
        terminate()

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print(json.dumps([outcome(watched), outcome(forked), outcome(closed)]))
"""


def test_without_a_watch_the_process_ends_and_so_do_forked_ones():
    assert json.loads(run_forked(PROGRAM)) == [0, 0, -signal.SIGTERM]
