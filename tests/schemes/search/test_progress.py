"""What a person sees of a search."""

from __future__ import annotations

import io
import math
import sys

import pytest

from shrinkpoint.schemes.search.scheme import progress_printer
from shrinkpoint.schemes.search.space import Axis, Point, Space
from shrinkpoint.schemes.search.trials import Trial

SPACE = Space(
    (Axis("bins", (8, 16)), Axis("prune", (0.2, 0.0)), Axis("protect", (0.005,))), ("magnitude", "sensitivity")
)
SMALL = Trial(Point("magnitude", (0, 0, 0)), 1000.0, 0.0043, 0.1)
FAILS = Trial(Point("sensitivity", (0, 1, 0)), 800.0, 0.0231, 0.1)
LOST = Trial(Point("sensitivity", (0, 0, 0)), 700.0, math.nan, 0.1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_line_a_trial():
    stream = io.StringIO()
    progress = progress_printer(SPACE, 0.01, 9800, stream)
    progress(FAILS, None, 6)
    progress(SMALL, SMALL, 5)
    progress(LOST, SMALL, 0)
    assert stream.getvalue().splitlines() == [
        "bins 8 · prune 0 · protect 0.005 · sensitivity   12.2x   +2.31% > 1%  no   none yet   ~6 left",
        "bins 8 · prune 0.2 · protect 0.005 · magnitude   9.8x   +0.43% <= 1%  ok   best 9.8x   ~5 left",
        "bins 8 · prune 0.2 · protect 0.005 · sensitivity   14.0x   not a number, 1% allowed  no   best 9.8x   done",
    ]


def test_a_terminal_shows_one_line_that_changes_and_ends_with_the_search(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    progress = progress_printer(SPACE, 0.01, 9800, stream)
    progress(FAILS, None, 1)
    assert "\n" not in stream.getvalue()
    progress(SMALL, SMALL, 0)
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\r\x1b[2K") == 2 and "best 9.8x" in stream.getvalue()


def test_a_narrow_terminal_gets_no_more_than_a_line(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    progress_printer(SPACE, 0.01, 9800, stream)(SMALL, SMALL, 3)
    assert "\n" not in stream.getvalue() and "…" in stream.getvalue()


@pytest.mark.parametrize("without", ["rich", "cursor"])
def test_a_terminal_that_cannot_do_it_gets_plain_lines(monkeypatch, without):
    monkeypatch.setenv("TERM", "dumb" if without == "cursor" else "xterm")
    if without == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    progress_printer(SPACE, 0.01, 9800, stream)(SMALL, SMALL, 3)
    assert stream.getvalue().endswith("~3 left\n") and "\x1b" not in stream.getvalue()


def test_a_broken_stream_does_not_end_the_search():
    progress_printer(SPACE, 0.01, 9800, Broken())(SMALL, SMALL, 3)
    closed = io.StringIO()
    progress = progress_printer(SPACE, 0.01, 9800, closed)
    closed.close()
    progress(SMALL, SMALL, 3)


def test_stderr_is_the_default(capsys):
    progress_printer(SPACE, 0.01, 9800)(SMALL, SMALL, 3)
    assert "~3 left" in capsys.readouterr().err
