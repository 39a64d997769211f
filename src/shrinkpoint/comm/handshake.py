"""What the ranks of a pipeline agree on before a payload moves, over the store of their process group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from shrinkpoint.comm.board import Board
from shrinkpoint.errors import MismatchError

Words = Mapping[str, Any]
"""What a stage says: plain values; under "links" by the name of a link, what both of its ends must say alike."""


class Handshake:
    """The seats of a rank's stages at the table of all stages of a pipeline.

    Every stage publishes a word per round, and every rank reads those of all stages, so that all come to the same
    verdict. The words travel through the store that the group itself was made with: it works before the first message,
    on every backend, and ends that disagree cannot break it.

    Args:
        group: the stages' process group; None: the default one.
        mine: the indices of this rank's stages, of `stages`.
    """

    def __init__(self, group: dist.ProcessGroup | None, mine: Sequence[int], stages: int) -> None:
        self._board, self._mine = Board(group, "wire"), tuple(mine)
        self._stages, self._round = stages, 0

    def publish(self, words: Mapping[int, Words]) -> None:
        """Say the word of each of this rank's stages in the next round. Waits for nobody."""
        self._round += 1
        for stage in self._mine:
            word = {"digests": _digests(words[stage]), "words": words[stage]}
            self._board.say(stage, json.dumps(word), self._round)
            if self._round > 2:  # who is in round n - 1 has read all of round n - 2
                self._board.wipe(stage, self._round - 2)

    def verify(self, timeout: float | None = None) -> None:
        """Read what all stages said in this round.

        Args:
            timeout: seconds to wait for a stage; None: as long as the group waits for a message.

        Raises:
            MismatchError: two ends of a link do not say the same, or a stage says nothing in time; on every rank that
                verifies.
        """
        patience = group_patience(self._board.group) if timeout is None else timeout
        said = [self._read(stage, patience) for stage in range(self._stages)]
        wrong = [line for lower, upper in pairwise(said) for line in _differences(lower, upper)]
        if wrong:
            do = "give every rank the same arguments, and load the state of the same step on every rank"
            raise MismatchError("pipeline", found="; ".join(wrong), expected="both ends of a link alike", do=do)

    def _read(self, stage: int, patience: float) -> Any:
        try:
            return json.loads(self._board.hear(stage, patience, self._round))
        except OSError as error:
            what = f"within {patience:g} s" if isinstance(error, TimeoutError) else f"({error})"
            found = f"stage {stage} did not say what its links are {what}"
            do = "call compress_pipeline, load_state_dict, eval and step alike on every rank"
            raise MismatchError("pipeline", found=found, do=do) from error


def group_patience(group: dist.ProcessGroup) -> float:
    """Seconds after which the group itself gives up on a message."""
    try:
        device = group._device_types[0]
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):  # a backend without such options
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def _digests(words: Words) -> dict[str, str]:
    links = words["links"]
    return {
        name: hashlib.sha256(json.dumps([name, links[name]], sort_keys=True).encode()).hexdigest() for name in links
    }


def _differences(lower: Any, upper: Any) -> list[str]:
    """What two neighbouring stages do not agree on, a line each."""
    lines = [
        f"{what} is {lower['words'][what]} at one end and {upper['words'][what]} at the other"
        for what in sorted(lower["words"].keys() - {"links"})
        if lower["words"][what] != upper["words"].get(what)
    ]
    both = lower["digests"].keys() & upper["digests"].keys()
    for name in sorted(both):
        if lower["digests"][name] != upper["digests"][name]:
            one, other = (words["words"]["links"][name] for words in (lower, upper))
            lines.append(f"link {name!r} is {_apart(one, other)} at one end and {_apart(other, one)} at the other")
    return lines


def _apart(one: Any, other: Any) -> Any:
    """What of `one` is not in `other`; all of it where that cannot be said."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: value for key, value in one.items() if key not in other or other[key] != value}
    return one
