"""Training processes of the demo: started, watched by the lines that they print, and killed in the middle of a save."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shrinkpoint.errors import ShrinkpointError

EventListener = Callable[[dict[str, Any]], None]
POLL_SECONDS = 0.0005
"""Seconds between two scans of the store; a save takes tens of milliseconds at least."""


class TrainingProcess:
    """A process of `shrinkpoint_lab.demo.train`; used in a `with` statement, it is killed at the end of the block.

    Args:
        arguments: command-line arguments of the training.
        on_event: called with every event that the process prints, in a thread of this process.
        log: file for its standard error.
    """

    def __init__(self, arguments: Sequence[str], on_event: EventListener, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "shrinkpoint_lab.demo.train", *arguments]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._reader = threading.Thread(target=self._read_events, args=(on_event,), daemon=True)
        self._reader.start()

    def _read_events(self, on_event: EventListener) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # the last line of a killed process may be cut
                    on_event(json.loads(line))

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> None:
        """Waits until the process has ended.

        Raises:
            ShrinkpointError: its exit code is not 0; the message has the end of its log.
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
        """Sends SIGKILL, so that no handler runs and no buffer is written; does nothing if the process has ended."""
        self.process.kill()
        self.process.wait()
        self._reader.join()


def unfinished_files(store: Path, first_step: int = 0) -> dict[str, int]:
    """Files of saves that have begun and have no manifest yet: path inside the store -> bytes so far.

    Args:
        store: directory of the store.
        first_step: ignore earlier steps.
    """
    sizes: dict[str, int] = {}
    for directory in store.glob("step-*"):
        if int(directory.name.removeprefix("step-")) < first_step or (directory / "manifest.json").exists():
            continue
        for path in directory.glob("*"):  # links to files of the chain are in a subdirectory, and not being written
            with suppress(FileNotFoundError):  # renamed since it was listed
                if path.is_file():
                    sizes[path.relative_to(store).as_posix()] = path.stat().st_size
    return sizes


def kill_during_save(child: TrainingProcess, store: Path, first_step: int, min_bytes: int = 0) -> dict[str, int]:
    """Kills `child` in the middle of its first save of `first_step` or a later step.

    Args:
        child: the training process.
        store: directory of its store.
        first_step: ignore saves of earlier steps.
        min_bytes: bytes of the payload that must be in the file before the kill.

    Returns:
        files that the interrupted save left behind: path inside the store -> bytes; empty if the save had ended before
        the kill, or the child ended.
    """
    while child.is_alive:
        if any(size >= min_bytes for size in unfinished_files(store, first_step).values()):
            child.kill()
            return unfinished_files(store, first_step)
        time.sleep(POLL_SECONDS)
    child.wait()
    return {}
