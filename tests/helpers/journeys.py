"""Counts the functions and files of the package that a call runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import shrinkpoint

_PACKAGE = str(Path(shrinkpoint.__file__).parent)


@dataclass
class Journey:
    """What ran since the last `clear`, in this thread and in those that were started since `follow`.

    Attributes:
        functions: their code. Lambdas and comprehensions belong to the function around them.
        changes: number of calls that went to another file than the thread's call before.
    """

    functions: set[CodeType] = field(default_factory=set)
    changes: int = 0
    _files: dict[int, str] = field(default_factory=dict)  # of the last call, by thread

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_PACKAGE) or code.co_name.startswith("<"):
            return
        self.functions.add(code)
        thread = threading.get_ident()
        self.changes += code.co_filename != self._files.get(thread)
        self._files[thread] = code.co_filename

    def clear(self) -> None:
        self.functions, self.changes, self._files = set(), 0, {}

    @property
    def counts(self) -> tuple[int, int, int]:
        """Functions, files, changes of file."""
        return len(self.functions), len({code.co_filename for code in self.functions}), self.changes


@contextmanager
def follow() -> Iterator[Journey]:
    journey = Journey()
    threading.setprofile(journey)
    sys.setprofile(journey)
    try:
        yield journey
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
