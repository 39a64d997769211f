"""A child that is forked while a save runs in the background never hangs, and takes nothing from its parent."""

from __future__ import annotations

import json
import os

import pytest
from helpers.processes import run_forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")

CHILD = """
import json, os, select, signal, sys, threading, warnings
from pathlib import Path
import torch, shrinkpoint as sp
from shrinkpoint.errors import LockedError
from shrinkpoint.storage import LocalStorage

warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
folder = Path(sys.argv[1])
has_begun, may_end = threading.Event(), threading.Event()

def block(*_):
    has_begun.set()
    may_end.wait()

class SlowStorage(LocalStorage):
    \"\"\"Waits within the save of step 2, which holds all locks then.\"\"\"

    def put(self, key, data):
        if "2" in key:
            block()
        super().put(key, data)

def in_child(call):
    \"\"\"What a call returns or raises in a forked child, or that it hangs.\"\"\"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = call()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(result, default=str).encode())
        os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], 100)[0]:
        os.kill(pid, signal.SIGKILL)
    data = os.read(reader, 1 << 16)
    os.waitpid(pid, 0)
    return json.loads(data) if data else "hangs"
"""

MANAGER = """
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
parts = {"model": model, "optimizer": optimizer, "rng": False}
manager = sp.CheckpointManager(SlowStorage(folder / "run"), scheme=SCHEME, background=True, mirror=folder / "mirror")
manager.save(1, **parts)
manager.wait()
manager.flush()
manager.save(2, **parts)
has_begun.wait()

def save_elsewhere():
    with sp.CheckpointManager(folder / "other", scheme=SCHEME, background=True) as other:
        other.save(7, **parts)
        return other.restore(**parts).step

calls = {
    "restore": lambda: manager.restore(**parts).step,
    "load": lambda: sp.Store(folder / "run").load(1) is not None,
    "own load": lambda: manager.store.load(1) is not None,
    "wait": lambda: manager.wait().step,
    "save": lambda: manager.save(3, **parts),
    "new": lambda: sp.CheckpointManager(folder / "run").save(3, **parts),
    "flush": lambda: manager.flush(),
    "close": lambda: manager.close(),
    "elsewhere": save_elsewhere,
}
said = {name: in_child(call) for name, call in calls.items()}
said["parent's lock"] = in_child(lambda: sp.Store(folder / "run").lock())
may_end.set()
said["parent"] = manager.wait().step
said["parent's next"] = [manager.save(3, **parts).step, manager.wait().step]
manager.close()
said["verified"] = [sp.Store(folder / "run").steps(), len(sp.Store(folder / "run").verify(deep=True))]
said["mirror"] = sp.Store(folder / "mirror").steps()
print(json.dumps(said))
"""

DIRECTORIES = """
from shrinkpoint.train.journal_segments import AppendFile
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.checkpointer import wait_for_writes

state = {"w": torch.randn(64, 64)}
slow = Checkpointer(background=True, on_save=lambda report: report.step == 2 and block())
slow.save(folder / "1", state, step=1)
slow.wait()
slow.save(folder / "2", state, step=2)
has_begun.wait()

def save_twice():
    slow.save(folder / "3", state, step=3)
    return slow.save(folder / "4", state, step=4).step

calls = {
    "wait": lambda: slow.wait().step,
    "load": lambda: slow.load(folder / "1").step,
    "wait for writes": lambda: wait_for_writes(folder / "2"),
    "save": save_twice,
    "discard": lambda: slow.discard(folder / "4"),
    "close": lambda: slow.close(),
}
said = {name: in_child(call) for name, call in calls.items()}
may_end.set()
said["parent"] = [slow.wait().step, slow.save(folder / "5", state, step=5).step, slow.wait().step]
(folder / "journal").write_bytes(b"ab")
file = AppendFile(folder / "journal", 2)
said["append"] = in_child(lambda: file.append([b"c"]))
file.append([b"d"])
said["journal"] = (folder / "journal").read_text()
print(json.dumps(said))
"""


@pytest.mark.parametrize("scheme", ["'lossless'", "sp.Fisher(relative_error=.3)"])
def test_child_of_a_background_save_reads_and_is_refused_to_write(tmp_path, scheme):
    said = json.loads(run_forked(CHILD + MANAGER.replace("SCHEME", scheme), str(tmp_path)).splitlines()[-1])
    assert [said[name] for name in ("restore", "load", "own load", "wait", "elsewhere")] == [1, True, True, 1, 7]
    for name in ("save", "new", "parent's lock"):
        assert "LockedError" in said[name] and "is saving here already" in said[name]
    assert said["close"] is None and ("StorageError" in said["flush"] or said["flush"] is None)
    assert (said["parent"], said["parent's next"], said["verified"]) == (2, [3, 3], [[1, 2, 3], 0])
    assert said["mirror"] == [1, 2, 3]


def test_child_of_a_framework_s_save_goes_on_by_itself(tmp_path):
    said = json.loads(run_forked(CHILD + DIRECTORIES, str(tmp_path)).splitlines()[-1])
    assert [said[name] for name in ("wait", "load", "wait for writes", "save")] == [2, 1, None, 4]
    assert said["discard"] is said["close"] is None and said["parent"] == [2, 5, 5]
    assert "StorageError" in said["append"] and said["journal"] == "abd"
