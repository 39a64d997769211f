"""Finished runs of a study, one JSON object a line, so that a study can be stopped and started again.

A run is done when the ledger has a line with its settings and the present code. Lines are appended in one write, so
that two processes may share a ledger.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.studies.harness import REPO, machine

CORE = ("codec", "container", "quantize", "schemes", "sharding", "store", "tensors", "train")
"""What decides which bytes a save writes, under src/shrinkpoint; the laboratory's baselines and native/ as well."""


@dataclass
class Ledger:
    """A file of finished runs.

    Attributes:
        any_version: count a run of older code as done too.
    """

    path: Path
    any_version: bool = False

    def records(self) -> list[dict[str, Any]]:
        """All whole lines, oldest first; what a crash cut short is passed over."""
        if not self.path.exists():
            return []
        out = []
        for line in self.path.read_text().splitlines():
            try:
                out.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return out

    def find(self, settings: Mapping[str, Any], version: str) -> dict[str, Any] | None:
        """The newest run of these settings: of this code, or of any where that is allowed."""
        wanted = json.loads(json.dumps(settings))
        for record in reversed(self.records()):
            if record["settings"] == wanted and (self.any_version or record["version"] == version):
                return record
        return None

    def add(self, settings: Mapping[str, Any], version: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Append a run, with the machine and the time."""
        about = {
            "machine": {**machine(), "python": platform.python_version()},
            "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }
        record = {"settings": dict(settings), "version": version, **result, **about}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record, default=plain) + "\n"
        with self.path.open("ab", buffering=0) as file:
            if file.tell() and not self.path.read_bytes().endswith(b"\n"):
                line = "\n" + line
            file.write(line.encode())
            os.fsync(file.fileno())
        return record


@cache
def version(*files: str, core: bool = True) -> str:
    """A digest of these files of lab/studies and, with `core`, of all code that decides what a save writes.

    It is taken once a process, as near as can be to when the code was loaded: what is edited later does not count.
    """
    paths = [REPO / "lab" / "studies" / name for name in files]
    if core:
        roots = [REPO / "src" / "shrinkpoint" / room for room in CORE]
        roots.append(REPO / "lab" / "src" / "shrinkpoint_lab" / "baselines")
        paths += [path for root in roots for path in root.rglob("*.py")] + [*(REPO / "native").rglob("*.[ch]pp")]
    return _digest(sorted(paths))


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(REPO)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def plain(value: Any) -> Any:
    """What JSON does not know: paths and numpy or torch numbers."""
    return value.item() if hasattr(value, "item") else str(value)
