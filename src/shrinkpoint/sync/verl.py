"""verl's checkpoint engine "shrinkpoint": weights go from actor to rollout through a place, as deltas. docs/vllm.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from shrinkpoint.errors import PolicyError
from shrinkpoint.sync.follower import Follower, changed_names
from shrinkpoint.sync.publisher import Publisher


@CheckpointEngineRegistry.register("shrinkpoint")
class ShrinkpointCheckpointEngine(CheckpointEngine):
    """Publishes the actor's weights, and reads them for the rollout.

    verl makes one in each process of the actor and of the rollout. The actor's master rank publishes; every rank of the
    rollout reads the place by itself.

    Args:
        bucket_size: verl's; unused, as nothing is cut into buckets.
        where: place that all processes reach: a directory or a URL.
        is_master: True on the actor's rank 0, which verl says.
        only_changed: yield only tensors that changed. For rollouts that load weights in place; others need all tensors.
        wait: seconds that the rollout waits for a version.
        threads: native threads; None: every core.
        options: more arguments of `Publisher`, such as `keep=8`.

    Raises:
        LockedError: another process publishes here.
        PolicyError: an invalid argument.
    """

    def __init__(
        self,
        bucket_size: int,
        where: str,
        is_master: bool = False,
        only_changed: bool = False,
        wait: float = 600.0,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        self.is_master = is_master
        self._only_changed, self._wait, self._expected = only_changed, wait, 0
        self._publisher = Publisher(where, threads=threads, **options) if is_master else None
        self._follower = None if is_master else Follower(where, threads=threads)
        self._yielded: dict[str, Tensor] = {}

    def prepare(self) -> dict[str, Any]:
        """The number of the next version, from the master rank."""
        if self._publisher is None:
            return {}
        return {"version": 0 if self._publisher.version is None else self._publisher.version + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell every rank the version to expect.

        Raises:
            PolicyError: no rank of the actor is the master, or several are.
        """
        versions = [part["version"] for part in metadata if part]
        if len(versions) != 1:
            found, do = f"{len(versions)} masters", "let verl make the engines: it passes is_master on rank 0"
            raise PolicyError("checkpoint engine", found=found, expected="one master", do=do)
        return {"version": versions * actor_wg_world_size}, {"version": versions * rollout_world_size}

    def init_process_group(self, version: int) -> None:
        """Take note of the version to expect; there is no group to join."""
        self._expected = version

    def finalize(self) -> None:
        """Do nothing: the rollout keeps its version, which the next delta needs."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish full tensors on the master rank; other ranks only take part in gathering them.

        Returns:
            bytes and seconds for verl's metrics; empty on other ranks.
        """
        tensors: dict[str, Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if self.is_master:
                tensors[name] = tensor.detach().to("cpu", copy=True)  # verl may use the memory again
        if self._publisher is None:
            return {}
        report = await asyncio.to_thread(self._publisher.publish, tensors, self._expected)
        nbytes = (report.delta_bytes or 0) + (report.keyframe_bytes or 0)
        return {"weight_sync/bytes": nbytes, "weight_sync/seconds": report.seconds}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the tensors of the expected version, on the CPU.

        Raises:
            NotFoundError: it is not published in time.
            ChainError, FormatError, StorageError: as of `Subscriber.update`; nothing was yielded then.
        """
        assert self._follower is not None
        await asyncio.to_thread(self._follower.read, self._expected, wait=self._wait)
        tensors, yielded = self._follower.tensors, self._yielded
        self._yielded = {}  # so that a rollout that fails half-way gets everything next time
        for name in changed_names(tensors, yielded) if self._only_changed else list(tensors):
            yield name, tensors[name]
        self._yielded = tensors
