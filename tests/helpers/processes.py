"""Runs a program in other processes and returns its results."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import cache
from pathlib import Path

import pytest
from helpers.paths import TESTS
from helpers.timeouts import PATIENCE

_SERVER = """
import faulthandler, gc, json, os, signal, sys, traceback
import torch._dynamo, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed.pipelining
import shrinkpoint.train.dcp, shrinkpoint.comm.ddp, shrinkpoint.schemes.fisher
from shrinkpoint.comm import compress_pipeline

def of_program(request):
    program, width, arguments, directory, environment, output, errors = request
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for path, mode, descriptor in (os.devnull, os.O_RDONLY, 0), (output, os.O_WRONLY, 1), (errors, os.O_WRONLY, 2):
        os.dup2(os.open(path, mode), descriptor)
    faulthandler.register(signal.SIGUSR1, file=2)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), globals())
    children = []
    for rank in range(width):
        children.append(os.fork())
        if children[-1] == 0:
            finish(lambda: in_group(rank, width, arguments))
    if any([os.waitpid(child, 0)[1] for child in children]):
        os._exit(1)

def in_group(rank, width, arguments):
    # A DDP model must be freed before its gloo group. If it drops the last reference, it joins threads of gloo while
    # it holds the GIL, and these wait for the GIL to free the context of a backward pass (torch 2.13).
    of_rank(rank, width, *arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

def finish(work):
    try:
        work()
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        sys.stdout.flush()
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)

def in_child(work):
    pid = os.fork()
    if pid == 0:
        finish(work)
    return pid

gc.collect()
gc.freeze()
for line in sys.stdin:
    pid = in_child(lambda: of_program(json.loads(line)))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@cache
def _server() -> subprocess.Popen[bytes]:
    """A process that imports torch and the package once and forks every program: importing takes the longest."""
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[bytes]) -> None:
    with server:
        assert server.stdin is not None
        server.stdin.close()


def ranks(program: str, width: int, folder: Path, *, timeout: float = PATIENCE) -> list[dict]:
    """The results that each of `width` processes wrote to `{folder}/{rank}.json`.

    Args:
        program: defines `of_rank(rank, width, folder)`.
        timeout: seconds for all of them.
    """
    run_forked(program, str(folder), width=width, timeout=timeout)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(width)]


def run_forked(program: str, *arguments: str, width: int = 0, code: int = 0, timeout: float = PATIENCE) -> str:
    """What a program prints in a process of its own, in which torch and most of the package are imported already.

    Args:
        arguments: its `sys.argv[1:]`.
        width: that many processes then call its `of_rank(rank, width, *arguments)`.
        code: with which it must end; negative: the signal.
    """
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        files = [str(Path.cwd()), environment, output.name, errors.name]
        request = [textwrap.dedent(program), width, arguments, *files]
        server.stdin.write(json.dumps(request).encode() + b"\n")
        pid = int(server.stdout.readline())
        try:
            ended, _, _ = select.select([server.stdout], [], [], timeout)
            if not ended:
                os.killpg(pid, signal.SIGUSR1)  # every process writes where its threads are
                time.sleep(1.0)
                pytest.fail(f"still running after {timeout} s\n{errors.read()}")
        except BaseException:
            os.killpg(pid, signal.SIGKILL)  # ranks that wait for each other would outlive the test
            server.stdout.readline()
            raise
        assert int(server.stdout.readline()) == code, errors.read()
        return output.read()
