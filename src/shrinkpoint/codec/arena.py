"""Memory for what a file decodes to, in few large pieces.

Tensors are many and small beside a large page of the system; taken one by one, the first touch of their pages costs
more than decoding them. The native pool asks for large pages, and keeps what was freed for the next file of a chain.
"""

from __future__ import annotations

import threading

import numpy as np

from shrinkpoint import _native
from shrinkpoint.codec.coder import Bytes

_ALIGN = 64
_MIN_BLOCK, _MAX_BLOCK = 1 << 20, 1 << 25


class Arena:
    """Hands out uncleared memory, to several threads.

    Pieces grow with what was taken before, so that a small file takes little.

    What is handed out keeps its piece alive: of a file that was decoded as a whole, this costs nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: Bytes = np.empty(0, np.uint8)
        self._next_size = _MIN_BLOCK

    def allocate(self, nbytes: int) -> Bytes:
        """A block of exactly `nbytes`, aligned for every dtype."""
        rounded = -(-nbytes // _ALIGN) * _ALIGN
        if rounded > self._next_size // 2:
            return _native.empty(nbytes)
        with self._lock:
            if rounded > self._block.nbytes:
                self._block = _native.empty(self._next_size)
                self._next_size = min(2 * self._next_size, _MAX_BLOCK)
            block, self._block = self._block[:nbytes], self._block[rounded:]
        return block
