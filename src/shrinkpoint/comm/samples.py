"""The ids of a step's samples, told by the rank of the first stage to all others before any message."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.board import Board
from shrinkpoint.comm.handshake import group_patience
from shrinkpoint.errors import MismatchError, PolicyError

_LEFT = 64
"""Steps after which a word is taken away. No rank is so far behind: the gradients of a step come from all stages."""


class Samples:
    """Where the ranks of a pipeline learn which samples a step has, in the store of their process group.

    What crosses follows from them (AQ-SGD sends a sample exactly when it comes first), so both ends of a link need them
    before a buffer is posted. A store serves every backend, and is read before the first payload moves.

    Args:
        group: the stages' process group; None: the default one.
        sends: this rank has the first stage.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, sends: bool) -> None:
        self._board, self._sends, self._turn = Board(group, "samples"), sends, 0

    def shared(self, ids: Tensor | None) -> Tensor:
        """The ids of the step that begins, on every rank; on all of them it must be called for the same steps.

        Raises:
            PolicyError: on every rank: the first stage was told none.
            MismatchError: the rank of the first stage said nothing in time.
        """
        self._turn += 1
        if self._sends:
            word = "" if ids is None else ids.to(torch.int64).cpu().numpy().tobytes().hex()
            self._board.say(0, word, self._turn)
            if self._turn > _LEFT:
                self._board.wipe(0, self._turn - _LEFT)
        else:
            word = self._heard()
        if not word:
            do = "call set_sample_ids on the rank of the first stage before each step"
            raise PolicyError("AQSGD", found="no sample ids", expected="one a row of the batch", do=do)
        return torch.frombuffer(bytearray.fromhex(word), dtype=torch.int64)

    def _heard(self) -> str:
        waits = group_patience(self._board.group)
        try:
            return self._board.hear(0, waits, self._turn)
        except OSError as error:
            found = f"the first stage did not say which samples step {self._turn} has within {waits:g} s"
            do = "begin the same steps on every rank"
            raise MismatchError("pipeline", found=found, do=do) from error
