"""Messages between ranks through the store of their process group, before a payload moves.

The store works on every backend, and ranks that disagree cannot break it. A collective could not be used: a rank that
was configured differently would not take part in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shrinkpoint.comm.state_check import SAME_ADVICE
from shrinkpoint.errors import MismatchError, PolicyError

CONFIG_TIMEOUT = 30.0  # Seconds to wait for the configuration of another rank, by default
_MAX_LAG_STEPS = 64
"""Steps after which sample ids are deleted. No rank lags by as much: the gradients of a step come from all stages."""

_generations: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()
"""Channels that this process has opened, by group and topic, so that a new channel never reads an older message.

A group that takes the place of one with the same name has a store, or a part of one, of its own: ranks that were in
the earlier group and those that were not count alike.
"""


def group_timeout(group: dist.ProcessGroup) -> float:
    """Seconds after which the group itself gives up waiting for a message."""
    try:
        device = group._device_types[0]
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):  # a backend without such options
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


class StoreChannel:
    """Text messages by sender and round, in the key-value store that a process group was created with.

    Args:
        group: None for the default group.
        topic: what the messages are about. Every process must open the channels of a topic in the same order.

    Raises:
        PolicyError: this release of torch does not expose the store.
    """

    def __init__(self, group: dist.ProcessGroup | None, topic: str) -> None:
        self.group: dist.ProcessGroup = group or dist.distributed_c10d._get_default_group()
        get_store = getattr(dist.distributed_c10d, "_get_process_group_store", None)
        if get_store is None:
            problem = f"torch {torch.__version__} does not give the store of a process group"
            raise PolicyError("process group", found=problem, do="use torch 2.6 or newer")
        self._topic, self._store = topic, get_store(self.group)
        topics = _generations.setdefault(self.group, {})
        topics[topic] = self._generation = topics.get(topic, 0) + 1

    def publish(self, sender: int, message: str, round_index: int = 0) -> None:
        """Store the message of a sender, without waiting for other processes."""
        self._store.set(self._key(sender, round_index), message)

    def read(self, sender: int, timeout: float, round_index: int = 0) -> str:
        """Wait for the message of a sender and return it; TimeoutError if it is not published in `timeout` seconds."""
        key = self._key(sender, round_index)
        try:
            self._store.wait([key], timedelta(seconds=timeout))
            return str(self._store.get(key), "utf-8")
        except RuntimeError as error:  # what every store raises after a wait that ended without the key
            kind = TimeoutError if "timeout" in str(error).lower() else ConnectionError
            raise kind(str(error)) from error

    def delete(self, sender: int, round_index: int) -> None:
        """Delete a message that all processes have read."""
        self._store.delete_key(self._key(sender, round_index))

    def _key(self, sender: int, round_index: int) -> str:
        return f"shrinkpoint/{self._topic}/{self._generation}/{round_index}/{sender}"


class ConfigCheck:
    """Publishes configurations (plain values) of this process's participants, and compares those of all of them.

    Participants are ranks or stages. Every process reads all configurations, so that all come to the same result.

    Args:
        group: None for the default group.
        topic: part of the keys of messages.
        where: names the place in errors.
        compare: raises an error if the configurations, in the order of participants, do not fit each other.
        count: the number of participants; None for the ranks of the group.
        kind: what a participant is called in errors.
        advice: what to do if one of them publishes nothing in time.
        timeout: seconds to wait for each of them; None for as long as the group waits for a message.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        topic: str,
        where: str,
        compare: Callable[[Sequence[Any]], None],
        *,
        count: int | None = None,
        kind: str = "rank",
        advice: str = "call it on every rank of the group",
        timeout: float | None = None,
    ) -> None:
        self._channel, self._where, self._compare = StoreChannel(group, topic), where, compare
        self._count = self._channel.group.size() if count is None else count
        self._kind, self._advice, self._timeout = kind, advice, timeout
        self._round, self._is_pending = 0, False

    def publish(self, configs: Mapping[int, Mapping[str, Any]]) -> None:
        """Publish the configuration of each participant of this process in the next round."""
        self._round, self._is_pending = self._round + 1, True
        for participant, config in configs.items():
            self._channel.publish(participant, json.dumps(config, sort_keys=True), self._round)
            if self._round > 2:  # a process in round n - 1 has read all of round n - 2
                self._channel.delete(participant, self._round - 2)

    def read(self, timeout: float | None = None) -> list[Any]:
        """The configurations of all participants in this round.

        Raises:
            MismatchError: one of them published nothing in time.
        """
        self._is_pending = False
        timeout = self._timeout if timeout is None else timeout
        timeout = group_timeout(self._channel.group) if timeout is None else timeout
        configs = []
        for participant in range(self._count):
            try:
                configs.append(json.loads(self._channel.read(participant, timeout, self._round)))
            except (TimeoutError, ConnectionError) as error:
                reason = f"within {timeout:g} s" if isinstance(error, TimeoutError) else f"({error})"
                problem = f"{self._kind} {participant} published no configuration {reason}"
                raise MismatchError(self._where, found=problem, do=self._advice) from error
        return configs

    def check(self, timeout: float | None = None) -> None:
        """Compare the configurations of this round, unless that was done; errors are raised by every rank."""
        if self._is_pending:
            self._compare(self.read(timeout))


def replica_check(group: dist.ProcessGroup, where: str, config: Mapping[str, Any], timeout: float) -> ConfigCheck:
    """Publish the configuration of this rank, which must be equal on all ranks. The first `check` compares them."""

    def compare(configs: Sequence[Any]) -> None:
        for rank, own in enumerate(configs):
            for name in sorted(configs[0].keys() | own.keys()):
                first, other = (f"{config.get(name)!r:.200}" for config in (configs[0], own))
                if configs[0].get(name) != own.get(name):
                    problem = f"{name}: {first} on rank 0, {other} on rank {rank}"
                    raise MismatchError(where, found=problem, expected="the same on all ranks", do=SAME_ADVICE)

    check = ConfigCheck(group, where, where, compare, timeout=timeout)
    check.publish({group.rank(): config})
    return check


def stage_check(group: dist.ProcessGroup | None, num_stages: int) -> ConfigCheck:
    """Compare neighbouring pipeline stages: options, and both ends of each link.

    The entry "links" of a configuration maps the name of each link of the stage to what both ends of that link must
    have in common; all other entries must be equal at neighbouring stages.
    """

    def compare(configs: Sequence[Any]) -> None:
        differences = [line for lower, upper in pairwise(configs) for line in _stage_differences(lower, upper)]
        if differences:
            problem, expected = "; ".join(differences), "both ends of a link alike"
            advice = "pass the same arguments, and load the state of the same step, on all ranks"
            raise MismatchError("pipeline", found=problem, expected=expected, do=advice)

    advice = "call compress_pipeline, load_state_dict, eval and step in the same order on all ranks"
    return ConfigCheck(group, "wire", "pipeline", compare, count=num_stages, kind="stage", advice=advice)


def _stage_differences(lower: Any, upper: Any) -> list[str]:
    """Describe the differences between the configurations of two neighbouring stages, one a line."""
    lines = [
        f"{name} is {lower[name]} at one end and {upper[name]} at the other"
        for name in sorted(lower.keys() - {"links"})
        if lower[name] != upper.get(name)
    ]
    for name in sorted(lower["links"].keys() & upper["links"].keys()):
        ends = lower["links"][name], upper["links"][name]
        if ends[0] != ends[1]:
            texts = _unshared_items(*ends), _unshared_items(*reversed(ends))
            lines.append(f"link {name!r} is {texts[0]} at one end and {texts[1]} at the other")
    return lines


def _unshared_items(description: Any, other: Any) -> Any:
    """The items of `description` that `other` lacks or has another value for; all of it if either is no dict."""
    if isinstance(description, dict) and isinstance(other, dict):
        return {key: value for key, value in description.items() if key not in other or other[key] != value}
    return description


class SampleIdBroadcast:
    """Broadcasts the sample ids of each step from the rank of the first stage, through the store of the group.

    The size of a message follows from the ids (AQ-SGD sends a sample uncompressed when it comes first), so both ends of
    a link need them before a buffer is posted.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, is_source: bool) -> None:
        self._channel, self._is_source, self._step = StoreChannel(group, "samples"), is_source, 0

    def broadcast(self, ids: Tensor | None) -> Tensor:
        """Return the ids of the step that begins: int64, 1-d, on the CPU. All ranks call it for the same steps.

        Args:
            ids: integers, 1-d, on the rank of the first stage; others' are ignored.

        Raises:
            PolicyError: the first stage was given no ids; raised on every rank.
            MismatchError: the rank of the first stage published nothing in time.
        """
        self._step += 1
        if self._is_source:
            message = "" if ids is None else ids.to(torch.int64).cpu().numpy().tobytes().hex()
            self._channel.publish(0, message, self._step)
            if self._step > _MAX_LAG_STEPS:
                self._channel.delete(0, self._step - _MAX_LAG_STEPS)
        else:
            timeout = group_timeout(self._channel.group)
            try:
                message = self._channel.read(0, timeout, self._step)
            except (TimeoutError, ConnectionError) as error:
                problem = f"the first stage published no sample ids of step {self._step} within {timeout:g} s"
                raise MismatchError("pipeline", found=problem, do="begin the same steps on all ranks") from error
        if not message:
            advice = "call set_sample_ids on the rank of the first stage before each step"
            raise PolicyError("AQSGD", found="no sample ids", expected="one for each row of the batch", do=advice)
        return torch.frombuffer(bytearray.fromhex(message), dtype=torch.int64)
