"""Notes the signal by which a scheduler announces that it will end the process."""

from __future__ import annotations

import os
import signal
import weakref
from types import FrameType
from typing import Any
from weakref import WeakSet

from shrinkpoint.errors import PolicyError

_SIGNAL = signal.SIGTERM


class PreemptionWatch:
    """Notes SIGTERM, which then does not end the process, until it is closed or freed.

    The handler that was there before is called, too, and is put back by `close`. In forked processes, such as those of
    a data loader, SIGTERM does what it did before.

    Attributes:
        is_signalled: the signal has come.

    Raises:
        PolicyError: this is not the main thread, which alone may set handlers; or the handler that is there cannot be
            called, as it was not set in Python.
    """

    def __init__(self) -> None:
        self.is_signalled = False
        self._pid = os.getpid()
        previous = signal.getsignal(_SIGNAL)
        do = "make the manager in the main thread, before other libraries set handlers"
        if previous is None:
            found, expected = "a handler of SIGTERM that was not set in Python", "one that can be called"
            raise PolicyError("PreemptionCheckpointingPolicy", found=found, expected=expected, do=do)
        try:
            signal.signal(_SIGNAL, _Handler(self, previous))
        except ValueError as error:
            where, found = "PreemptionCheckpointingPolicy", "a thread that may not handle signals"
            raise PolicyError(where, found=found, expected="the main thread", do=do) from error
        _WATCHES.add(self)

    @property
    def is_active(self) -> bool:
        """True if the signal is noted: this is not closed, and not the copy in a forked process."""
        return self in _WATCHES and self._pid == os.getpid()

    def close(self) -> None:
        """Put the handlers back that were there before, as far as no later one stands in front of them."""
        _WATCHES.discard(self)
        try:
            while isinstance(handler := signal.getsignal(_SIGNAL), _Handler) and not handler.is_active:
                signal.signal(_SIGNAL, handler.previous)
        except ValueError:  # another thread than the main one: the handler stays, and only calls the one before
            return


_WATCHES: WeakSet[PreemptionWatch] = WeakSet()


class _Handler:
    """A handler of a signal that notes it for a watch and calls the handler before.

    A watch that is closed while a later handler stands in front of this one leaves it there; it then only passes on.

    Args:
        watch: is not kept alive.
        previous: the handler before, as `signal.getsignal` returns it.
    """

    def __init__(self, watch: PreemptionWatch, previous: Any) -> None:
        self._watch, self.previous = weakref.ref(watch), previous

    @property
    def is_active(self) -> bool:
        watch = self._watch()
        return watch is not None and watch.is_active

    def __call__(self, number: int, frame: FrameType | None) -> None:
        watch = self._watch()
        if watch is not None and watch.is_active:
            watch.is_signalled = True
        if callable(self.previous):
            self.previous(number, frame)
        elif self.previous == signal.SIG_DFL and not any(other.is_active for other in [*_WATCHES]):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
