"""The training in a process of its own: follow it, and kill it while it saves."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shrinkpoint.errors import ShrinkpointError

Listener = Callable[[dict[str, Any]], None]
POLL = 0.0005
"""Seconds between two looks at the store; a save takes tens of milliseconds at least."""


class Child:
    """One process of `shrinkpoint.demo.train`; used in a `with` statement, it does not outlive the block.

    Args:
        arguments: of the training.
        listen: called with every event it prints, in a thread of this process.
        log: where its standard error goes.
    """

    def __init__(self, arguments: Sequence[str], listen: Listener, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "shrinkpoint.demo.train", *arguments]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._reader = threading.Thread(target=self._follow, args=(listen,), daemon=True)
        self._reader.start()

    def _follow(self, listen: Listener) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # the last line of a killed process may be cut
                    listen(json.loads(line))

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> None:
        """Wait for a good end.

        Raises:
            ShrinkpointError: it ended badly; the message carries the end of its log.
        """
        code = self.process.wait()
        self._reader.join()
        if code:
            raise ShrinkpointError(
                f"training process {self.process.pid}",
                found=f"exit code {code}",
                expected="0",
                do=f"read {self.log}, which ends with: {self.log.read_text()[-2000:]}",
            )

    def kill(self) -> None:
        """SIGKILL: no handler runs, no buffer is written. Nothing happens when it has ended."""
        self.process.kill()
        self.process.wait()
        self._reader.join()


def unfinished(store: Path, since: int = 0) -> dict[str, int]:
    """Files of saves that have begun and have no manifest yet: path inside the store -> bytes so far.

    Args:
        since: look only at this step and those after it.
    """
    found: dict[str, int] = {}
    for folder in store.glob("step-*"):
        if int(folder.name.removeprefix("step-")) >= since and not (folder / "manifest.json").exists():
            found.update(_sizes(store, folder))
    return found


def _sizes(store: Path, folder: Path) -> dict[str, int]:
    sizes = {}
    for path in folder.glob("*"):  # links to the files of the chain lie deeper, and are not being written
        try:
            if path.is_file():
                sizes[path.relative_to(store).as_posix()] = path.stat().st_size
        except FileNotFoundError:  # renamed while we looked
            continue
    return sizes


def kill_in_a_save(child: Child, store: Path, since: int, written: int = 0) -> dict[str, int]:
    """Kill `child` in the middle of the first save of a step not before `since`.

    Args:
        written: bytes of the payload to see in the file before the kill.

    Returns:
        what the interrupted save left behind; empty when the save was faster than the kill, or the child ended.
    """
    while child.alive:
        if any(size >= written for size in unfinished(store, since).values()):
            child.kill()
            return unfinished(store, since)
        time.sleep(POLL)
    child.wait()
    return {}
