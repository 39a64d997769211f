"""Training processes of the demo, forked from one that has imported torch already: an import costs more than a run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import BinaryIO

from shrinkpoint_lab.demo.train import parse_arguments, train

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch._dynamo", "helpers.forked_training"])


class ForkedTraining:
    """What the demo takes of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], *, stdout: int, stderr: BinaryIO, text: bool) -> None:
        _, *module, first = command[:4]
        assert module == ["-m", "shrinkpoint_lab.demo.train"] and text
        lines, output = _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_train, args=([first, *command[4:]], output, stderr.name))
        self._process.start()
        output.close()
        self.stdout = os.fdopen(os.dup(lines.fileno()))
        lines.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _train(arguments: list[str], output: Connection, errors: str) -> None:
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    train(parse_arguments(arguments))
