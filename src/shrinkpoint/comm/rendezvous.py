"""What ranks tell each other through the store of their process group, before a payload moves.

Replicas compare their configuration (`ConfigCheck`), pipeline stages compare both ends of each link (`Handshake`), and
the first stage broadcasts the sample ids of a step (`SampleIdBroadcast`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.errors import MismatchError, PolicyError

_generations: dict[tuple[str, str], int] = {}
"""How often this process came to a board: a later time never reads an older word."""


class StoreChannel:
    """Words by seat and round, in the store that a process group was made with.

    It works before the first message and on every backend, and ends that disagree cannot break it. A collective could
    not do that: who was set up otherwise would not take part.

    Args:
        group: None: the default one.
        topic: what the words are about; every process comes to the boards of a kind in the same order.

    Raises:
        PolicyError: this release of torch does not give the store.
    """

    def __init__(self, group: dist.ProcessGroup | None, topic: str) -> None:
        self.group: dist.ProcessGroup = group or dist.distributed_c10d._get_default_group()
        self._topic, self._store = topic, _group_store(self.group)
        name = dist.distributed_c10d._get_process_group_name(self.group)
        _generations[name, topic] = self._generation = _generations.get((name, topic), 0) + 1

    def publish(self, sender: int, message: str, round_index: int = 0) -> None:
        """Leave the word of a seat. Waits for nobody."""
        self._store.set(self._key(sender, round_index), message)

    def read(self, sender: int, timeout: float, round_index: int = 0) -> str:
        """The word of any seat.

        Raises:
            TimeoutError: it was not said within `timeout` seconds.
            ConnectionError: the store is gone.
        """
        key = self._key(sender, round_index)
        try:
            self._store.wait([key], timedelta(seconds=timeout))
            return str(self._store.get(key), "utf-8")
        except RuntimeError as error:  # every store says so that it waited in vain
            kind = TimeoutError if "timeout" in str(error).lower() else ConnectionError
            raise kind(str(error)) from error

    def delete(self, sender: int, round_index: int) -> None:
        """Take a word away that everybody has read."""
        self._store.delete_key(self._key(sender, round_index))

    def _key(self, sender: int, round_index: int) -> str:
        return f"shrinkpoint/{self._topic}/{self._generation}/{round_index}/{sender}"


def _group_store(group: dist.ProcessGroup) -> Any:
    get = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if get is None:
        found = f"torch {torch.__version__} does not give the store of a process group"
        raise PolicyError("process group", found=found, do="use torch 2.6 or newer")
    return get(group)


CONFIG_TIMEOUT = 30.0
"""Seconds to wait for what another rank says."""


class ConfigCheck:
    """One rank's word among those of all ranks of a group. It is said at once, and compared when `check` is called.

    Args:
        group: None: the default one.
        topic: what is set up; attached in the same order on every rank.
        config: plain values, the same on every rank if all is well.
        timeout: seconds to wait for another rank's word.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, topic: str, config: Mapping[str, Any], timeout: float = CONFIG_TIMEOUT
    ) -> None:
        self._topic, self._timeout = topic, timeout
        self._config, self._is_pending = json.dumps(config, sort_keys=True), True
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._channel = StoreChannel(group, topic)
        self._channel.publish(self._rank, self._config)

    def check(self) -> None:
        """Compare the words of all ranks, once.

        Raises:
            MismatchError: they differ, or one is not said within the timeout; on every rank that checks.
        """
        if not self._is_pending:
            return
        said = [self._read(rank) for rank in range(self._world_size)]
        others = [rank for rank, words in enumerate(said) if words != said[0]]
        if others:
            found = f"rank 0 has {said[0]}, rank {others[0]} has {said[others[0]]}"
            raise MismatchError(self._topic, found=found, expected="the same on all ranks", do="set all ranks up alike")
        self._is_pending = False

    def _read(self, rank: int) -> str:
        try:
            return self._channel.read(rank, self._timeout)
        except OSError as error:
            found = f"rank {rank} said nothing of its compression within {self._timeout:g} s"
            raise MismatchError(self._topic, found=found, do="call it on every rank of the group") from error


StageConfig = Mapping[str, Any]
"""What a stage says: plain values; under "links" by the name of a link, what both of its ends must say alike."""


class Handshake:
    """The seats of a rank's stages at the table of all stages of a pipeline.

    Every stage publishes a word per round, and every rank reads those of all stages, so that all come to the same
    verdict. The words travel through the store that the group itself was made with: it works before the first message,
    on every backend, and ends that disagree cannot break it.

    Args:
        group: the stages' process group; None: the default one.
        own_stages: the indices of this rank's stages, of `num_stages`.
    """

    def __init__(self, group: dist.ProcessGroup | None, own_stages: Sequence[int], num_stages: int) -> None:
        self._channel, self._own_stages = StoreChannel(group, "wire"), tuple(own_stages)
        self._num_stages, self._round = num_stages, 0

    def publish(self, configs: Mapping[int, StageConfig]) -> None:
        """Say the word of each of this rank's stages in the next round. Waits for nobody."""
        self._round += 1
        for stage in self._own_stages:
            word = {"digests": _link_digests(configs[stage]), "words": configs[stage]}
            self._channel.publish(stage, json.dumps(word), self._round)
            if self._round > 2:  # who is in round n - 1 has read all of round n - 2
                self._channel.delete(stage, self._round - 2)

    def verify(self, timeout: float | None = None) -> None:
        """Read what all stages said in this round.

        Args:
            timeout: seconds to wait for a stage; None: as long as the group waits for a message.

        Raises:
            MismatchError: two ends of a link do not say the same, or a stage says nothing in time; on every rank that
                verifies.
        """
        patience = group_timeout(self._channel.group) if timeout is None else timeout
        said = [self._read(stage, patience) for stage in range(self._num_stages)]
        wrong = [line for lower, upper in pairwise(said) for line in _stage_differences(lower, upper)]
        if wrong:
            do = "give every rank the same arguments, and load the state of the same step on every rank"
            raise MismatchError("pipeline", found="; ".join(wrong), expected="both ends of a link alike", do=do)

    def _read(self, stage: int, timeout: float) -> Any:
        try:
            return json.loads(self._channel.read(stage, timeout, self._round))
        except OSError as error:
            what = f"within {timeout:g} s" if isinstance(error, TimeoutError) else f"({error})"
            found = f"stage {stage} did not say what its links are {what}"
            do = "call compress_pipeline, load_state_dict, eval and step alike on every rank"
            raise MismatchError("pipeline", found=found, do=do) from error


def group_timeout(group: dist.ProcessGroup) -> float:
    """Seconds after which the group itself gives up on a message."""
    try:
        device = group._device_types[0]
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):  # a backend without such options
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def _link_digests(config: StageConfig) -> dict[str, str]:
    links = config["links"]
    return {
        name: hashlib.sha256(json.dumps([name, links[name]], sort_keys=True).encode()).hexdigest() for name in links
    }


def _stage_differences(lower: Any, upper: Any) -> list[str]:
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
            lines.append(
                f"link {name!r} is {_unshared_items(one, other)} at one end "
                f"and {_unshared_items(other, one)} at the other"
            )
    return lines


def _unshared_items(description: Any, other: Any) -> Any:
    """What of `description` is not in `other`; all of it where that cannot be said."""
    if isinstance(description, dict) and isinstance(other, dict):
        return {key: value for key, value in description.items() if key not in other or other[key] != value}
    return description


_MAX_LAG_STEPS = 64
"""Steps after which a word is taken away. No rank is so far behind: the gradients of a step come from all stages."""


class SampleIdBroadcast:
    """Where the ranks of a pipeline learn which samples a step has, in the store of their process group.

    What crosses follows from them (AQ-SGD sends a sample exactly when it comes first), so both ends of a link need them
    before a buffer is posted. A store serves every backend, and is read before the first payload moves.

    Args:
        group: the stages' process group; None: the default one.
        is_source: this rank has the first stage.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, is_source: bool) -> None:
        self._channel, self._is_source, self._step = StoreChannel(group, "samples"), is_source, 0

    def broadcast(self, ids: Tensor | None) -> Tensor:
        """The ids of the step that begins, on every rank; on all of them it must be called for the same steps.

        Raises:
            PolicyError: on every rank: the first stage was told none.
            MismatchError: the rank of the first stage said nothing in time.
        """
        self._step += 1
        if self._is_source:
            word = "" if ids is None else ids.to(torch.int64).cpu().numpy().tobytes().hex()
            self._channel.publish(0, word, self._step)
            if self._step > _MAX_LAG_STEPS:
                self._channel.delete(0, self._step - _MAX_LAG_STEPS)
        else:
            word = self._receive()
        if not word:
            do = "call set_sample_ids on the rank of the first stage before each step"
            raise PolicyError("AQSGD", found="no sample ids", expected="one a row of the batch", do=do)
        return torch.frombuffer(bytearray.fromhex(word), dtype=torch.int64)

    def _receive(self) -> str:
        waits = group_timeout(self._channel.group)
        try:
            return self._channel.read(0, waits, self._step)
        except OSError as error:
            found = f"the first stage did not say which samples step {self._step} has within {waits:g} s"
            do = "begin the same steps on every rank"
            raise MismatchError("pipeline", found=found, do=do) from error
