"""Memory for what a file decodes to, in few large pieces.

Tensors are many and small beside a large page of the system; taken one by one, the first touch of their pages costs
more than decoding them. The native pool asks for large pages, and keeps what was freed for the next file of a chain.
"""

from __future__ import annotations

import threading

import numpy as np

from shrinkpoint import _native
from shrinkpoint.codec.run import Bytes

_ALIGN = 64
_FIRST, _LARGEST = 1 << 20, 1 << 25


class Slab:
    """Hands out uncleared memory, to several threads.

    Pieces grow with what was taken before, so that a small file takes little.

    What is handed out keeps its piece alive: of a file that was decoded as a whole, this costs nothing.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._free: Bytes = np.empty(0, np.uint8)
        self._next = _FIRST

    def take(self, nbytes: int) -> Bytes:
        """A block of exactly `nbytes`, aligned for every dtype."""
        rounded = -(-nbytes // _ALIGN) * _ALIGN
        if rounded > self._next // 2:
            return _native.empty(nbytes)
        with self._guard:
            if rounded > self._free.nbytes:
                self._free = _native.empty(self._next)
                self._next = min(2 * self._next, _LARGEST)
            block, self._free = self._free[:nbytes], self._free[rounded:]
        return block
