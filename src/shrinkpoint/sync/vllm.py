"""vLLM's weight transfer: a server that generates with the versions that a `Publisher` writes. docs/vllm.md."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from shrinkpoint.errors import PolicyError, StorageError
from shrinkpoint.sync.follower import Follower, changed_names, layout_of
from shrinkpoint.sync.vllm_layout import LayerPlan, plan_layers, reload_layers

_log = logging.getLogger("shrinkpoint")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The settings that a server gets once: the place, and options of `Subscriber`."""

    where: str
    threads: int | None = None
    max_bytes: int | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The settings that a server gets at each update."""

    version: int | None = None  # the lowest that will do; None: the newest that is published
    wait: float = 60.0  # seconds to wait for that version


class _Prepared(NamedTuple):
    """A version that is ready to be written."""

    version: int
    tensors: dict[str, Tensor]
    changed: list[str]  # names of the tensors that the model lacks
    staged: list[Callable[[], None]]
    reloaded: list[LayerPlan] | None  # layers that the model's own loader quantizes; None: the whole model


class ShrinkpointEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Brings one worker's model to the newest version that is published.

    `start_weight_update` begins to read, decode and prepare in a thread, while the server generates. `update_weights`
    waits for the thread and writes the layers that changed. Every worker reads the place by itself, and all workers
    write the same version.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *components: Any) -> None:
        super().__init__(*components)
        self.version: int | None = None  # that the model has
        self.pause = 0.0  # seconds that the last update took to write
        self._follower: Follower | None = None
        self._written: dict[str, Tensor] = {}  # tensors that the model has
        self._plans: list[LayerPlan] | None = None
        self._layout: dict[str, Any] | None = None  # of the tensors that the plans are for
        self._thread = ThreadPoolExecutor(1, "shrinkpoint")
        self._reading: Future[_Prepared] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the place; nothing is read yet."""
        self._follower = Follower(init_info.where, threads=init_info.threads, max_bytes=init_info.max_bytes)
        self._written = {}

    def start_weight_update(self) -> None:
        """Begin to read what is published now, while the server generates."""
        self._reading = self._thread.submit(self._prepare)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Write a version into the model.

        Raises:
            NotFoundError: the version is not published in time.
            ChainError, FormatError, StorageError: the version cannot be read; the model is unchanged.
            MismatchError: the model does not load such tensors; it is unchanged.
            PolicyError: the server does not know the place.
        """
        prepared = self._agree(update_info)
        if self._layout != (layout := layout_of(prepared.tensors)):
            self._plans, self._layout, self._written = plan_layers(self.model, prepared.tensors), layout, {}
            prepared = self._prepare(prepared.version)
        began = time.perf_counter()
        if prepared.changed:
            self._write(prepared)
        self.pause = time.perf_counter() - began
        previous, self.version, self._written = self.version, prepared.version, prepared.tensors
        _log.info("version %d from %s, written in %.1f ms", self.version, previous, 1000 * self.pause)

    def finish_weight_update(self) -> None:
        """Do nothing: `update_weights` has written everything."""

    def shutdown(self) -> None:
        """Let the place go."""
        self._reading, self._follower, self._written = None, None, {}

    def _write(self, prepared: _Prepared) -> None:
        self._written = {}  # so that an update that fails half-way is written whole by the next one
        with torch.no_grad():
            for take_over in prepared.staged:
                take_over()
        if prepared.reloaded is None or prepared.reloaded:
            reload_layers(self.model, prepared.reloaded, prepared.tensors, self.model_config)

    def _agree(self, update_info: UpdateInfo) -> _Prepared:
        """Prepare the same version on all workers: the newest that any of them has read. All raise if one fails."""
        reading, self._reading, highest = self._reading, None, update_info.version or 0
        prepare = partial(self._prepare, 0, update_info.wait) if reading is None else reading.result
        while True:
            try:
                prepared, error = prepare(), None
            except Exception as caught:  # the other workers wait for this one
                prepared, error = None, caught
            version = -1 if prepared is None else prepared.version
            versions = torch.tensor([-version, max(version, highest)])
            dist.all_reduce(versions, dist.ReduceOp.MAX, group=get_world_group().cpu_group)
            lowest, highest = -int(versions[0]), int(versions[1])
            if error is not None:
                raise error
            if lowest < 0:
                do = "read its log, and update again"
                raise StorageError("weight transfer", found="another worker that cannot read the version", do=do)
            if prepared is not None and lowest == highest:
                return prepared
            prepare = partial(self._prepare, highest, update_info.wait)

    def _prepare(self, minimum: int = 0, wait: float = 60.0) -> _Prepared:
        """Read the newest version, and stage the layers that it changes."""
        if self._follower is None:
            do = 'call init_weight_transfer_engine({"where": ...})'
            raise PolicyError("weight transfer", found="no place to read from", do=do)
        version, tensors = self._follower.read(minimum, wait=wait), self._follower.tensors
        changed = changed_names(tensors, self._written)
        if self._plans is None or self._layout != layout_of(tensors):
            return _Prepared(version, tensors, changed, [], None)
        affected = [plan for plan in self._plans if not plan.sources.isdisjoint(changed)]
        staged = [plan.stage(tensors, self.model_config.dtype) for plan in affected if plan.is_staged]
        return _Prepared(version, tensors, changed, staged, [plan for plan in affected if not plan.is_staged])
