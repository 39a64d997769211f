"""What the ranks of a pipeline agree on before a payload moves, over the store of their process group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from shrinkpoint.errors import MismatchError, PolicyError

_generations: dict[str, int] = {}
"""How often this process came to the table of a group: a later time never reads an older word."""

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
        self._group: dist.ProcessGroup = group or dist.distributed_c10d._get_default_group()
        self._store, self._stages, self._round = _store(self._group), stages, 0
        self._mine, self._generation = tuple(mine), _next_generation(self._group)

    def publish(self, words: Mapping[int, Words]) -> None:
        """Say the word of each of this rank's stages in the next round. Waits for nobody."""
        self._round += 1
        for stage in self._mine:
            said = json.dumps({"digests": _digests(words[stage]), "words": words[stage]})
            self._store.set(self._key(self._round, stage), said)
            if self._round > 2:  # who is in round n - 1 has read all of round n - 2
                self._store.delete_key(self._key(self._round - 2, stage))

    def verify(self, timeout: float | None = None) -> None:
        """Read what all stages said in this round.

        Args:
            timeout: seconds to wait for a stage; None: as long as the group waits for a message.

        Raises:
            MismatchError: two ends of a link do not say the same, or a stage says nothing in time; on every rank that
                verifies.
        """
        patience = _patience(self._group) if timeout is None else timeout
        said = [self._read(stage, patience) for stage in range(self._stages)]
        wrong = [line for lower, upper in pairwise(said) for line in _differences(lower, upper)]
        if wrong:
            do = "give every rank the same arguments, and load the state of the same step on every rank"
            raise MismatchError("pipeline", found="; ".join(wrong), expected="both ends of a link alike", do=do)

    def _read(self, stage: int, patience: float) -> Any:
        key = self._key(self._round, stage)
        try:
            self._store.wait([key], timedelta(seconds=patience))
            return json.loads(self._store.get(key))
        except RuntimeError as error:  # every store says so that it waited in vain
            what = f"within {patience:g} s" if "timeout" in str(error).lower() else f"({error})"
            found = f"stage {stage} did not say what its links are {what}"
            do = "call compress_pipeline, load_state_dict, eval and step alike on every rank"
            raise MismatchError("pipeline", found=found, do=do) from error

    def _key(self, round_: int, stage: int) -> str:
        return f"shrinkpoint/wire/{self._generation}/{round_}/{stage}"


def _next_generation(group: dist.ProcessGroup) -> int:
    _generations[group.group_name] = _generations.get(group.group_name, 0) + 1
    return _generations[group.group_name]


def _patience(group: dist.ProcessGroup) -> float:
    """Seconds after which the group itself gives up on a message."""
    try:
        device = group._device_types[0]
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):  # a backend without such options
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def _store(group: dist.ProcessGroup) -> Any:
    get = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if get is None:
        found = f"torch {torch.__version__} does not give the store of a process group"
        raise PolicyError("compress_pipeline", found=found, do="use torch 2.6 or newer")
    return get(group)


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
