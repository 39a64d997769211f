"""On a terminal: long tables go through the pager, long work shows bars; in a pipe there is neither."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.timeouts import PATIENCE

from shrinkpoint.store import Store

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


def on_terminal(*arguments: object, rows: int = 24, stderr_only: bool = False, **env: str) -> tuple[int, str]:
    """Exit code, and what a terminal of 100 columns shows of the command; with `stderr_only`, stdout is a pipe."""
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 100, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "PAGER", "LESS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "shrinkpoint", *map(str, arguments)],
        stdin=slave,
        stdout=subprocess.DEVNULL if stderr_only else slave,
        stderr=slave,
        env={**environ, "TERM": "xterm", **env},
        start_new_session=True,
    )
    os.close(slave)
    shown, deadline = b"", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                data = os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            shown += data
    os.close(master)
    return process.wait(timeout=PATIENCE), shown.decode()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("terminal") / "run"
    with Store(where) as opened:
        for step in (10, 20, 30, 40):
            opened.save(step, {"w": torch.arange(1000.0) + step})
    return where


@pytest.fixture
def pager(tmp_path: Path) -> str:
    """A pager that marks what it shows."""
    script = tmp_path / "pager.sh"
    script.write_text("#!/bin/sh\nsed 's/^/PAGED /'\n")
    script.chmod(0o755)
    return str(script)


def test_a_table_longer_than_the_terminal_is_paged_and_a_short_one_is_not(store, pager):
    code, shown = on_terminal("list", store, rows=5, PAGER=pager)
    assert code == 0 and "PAGED" in shown and "40" in shown
    code, shown = on_terminal("list", store, rows=50, PAGER=pager)
    assert code == 0 and "PAGED" not in shown and "40" in shown


def test_the_exit_code_of_diff_survives_its_pager(store, pager):
    code, shown = on_terminal("diff", f"{store}@10", f"{store}@40", rows=3, PAGER=pager)
    assert code == 1 and "PAGED" in shown


@pytest.mark.parametrize("arguments", [["list", "--no-pager"], ["list", "--json"]])
def test_there_is_no_pager_where_none_is_wanted(store, pager, arguments):
    code, shown = on_terminal(*arguments, store, rows=5, PAGER=pager)
    assert code == 0 and "PAGED" not in shown and "40" in shown


@pytest.mark.parametrize("command", ["cat", "no-such-pager-anywhere"])
def test_without_a_pager_the_table_is_printed(store, command):
    code, shown = on_terminal("list", store, rows=5, PAGER=command)
    assert code == 0 and "40" in shown


def test_a_pager_that_leaves_early_is_no_error(store, tmp_path):
    script = tmp_path / "quits.sh"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    code, shown = on_terminal("show", store, "--tensors", rows=5, PAGER=str(script))
    assert code == 0 and "Traceback" not in shown and "Broken" not in shown


def test_the_table_of_a_pager_is_as_coloured_as_the_terminal(store, pager):
    bold = "\x1b[1m"
    assert bold in on_terminal("list", store, rows=5, PAGER=pager)[1]
    assert bold not in on_terminal("list", store, rows=5, PAGER=pager, TERM="dumb")[1]


def test_bars_are_on_a_terminal_alone(store, child, tmp_path):
    code, shown = on_terminal("verify", store, stderr_only=True)
    assert code == 0 and "\x1b[" in shown
    done = child("verify", store, FORCE_COLOR="1", TERM="xterm")
    assert done.code == 0 and done.stderr == ""


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_output_is_no_error(store, closed):
    """`shrinkpoint list RUN >&-`, as some schedulers start their jobs."""
    descriptor = {"stdout": 1, "stderr": 2}[closed]
    command = [sys.executable, "-m", "shrinkpoint", "list", str(store)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {descriptor}>&-', "sh", *command], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("40" in done.stdout) == (closed == "stderr")
