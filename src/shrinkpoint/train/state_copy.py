"""The copy of a state that is written, on its way to the host while the loop goes on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shrinkpoint.schemes.base import Scheme
from shrinkpoint.schemes.plan import QuantizationPlan
from shrinkpoint.tensors.flat_state import FlatState, copy_on_devices, snapshot
from shrinkpoint.tensors.memory import SideStreams
from shrinkpoint.train.planning import SavePlan


class StateCopy:
    """Begins to copy a state; the loop may change it as soon as this returns.

    On a CUDA device with memory for it, the copy is made there, which takes a thousandth of a second for each few
    gigabytes, and is planned for and brought to the host by `finish`. Otherwise what is not planned yet comes to the
    host at once. Nothing waits for that here: on the devices, what the loop enqueues next waits until the state was
    read, and codes cross while it runs.

    Args:
        state: on any device.
        plan: how it is written.
        reuse: tensors of earlier copies, for `snapshot`.
        streams: on which it is read; they must be those of `finish`.
        background: `finish` is called beside the loop.
    """

    def __init__(
        self, state: FlatState, plan: SavePlan, reuse: Mapping[str, Tensor], streams: SideStreams, *, background: bool
    ) -> None:
        self._streams, self._plan, self._reuse = streams, plan, reuse
        self._copy: FlatState | None = None
        names = _replaced_names(plan.scheme)
        self._device_copy = None if state.is_on_cpu or names or not background else copy_on_devices(state)
        if self._device_copy is not None:
            streams.fork(self._device_copy.tensors.values())
            return
        streams.fork(state.tensors.values())
        with streams.use():
            self._copy = snapshot(state, reuse=reuse, without=names, wait=False)
        streams.join()
        with streams.use():
            self._plan = plan._replace(scheme=_to_host(plan.scheme))
        self._reuse = {}

    def finish(self) -> tuple[FlatState, Scheme]:
        """Wait until the copy is in host memory; return it with the scheme that writes it. Called once."""
        device_copy, self._device_copy = self._device_copy, None
        copy, self._copy = self._copy, None
        if copy is not None:
            self._streams.synchronize()
            return copy, self._plan.scheme_for(copy)
        assert device_copy is not None
        with self._streams.use():
            scheme = self._plan.scheme_for(device_copy)
            copy = snapshot(device_copy, reuse=self._reuse, without=_replaced_names(scheme), wait=False)
            scheme, self._reuse = _to_host(scheme), {}
        self._streams.synchronize()
        return copy, scheme


def _replaced_names(scheme: Scheme) -> frozenset[str]:
    """Names of tensors whose values a scheme has quantized already, and which a copy need not have."""
    return scheme.replaced_names if isinstance(scheme, QuantizationPlan) else frozenset()


def _to_host(scheme: Scheme) -> Scheme:
    return scheme.to_host() if isinstance(scheme, QuantizationPlan) else scheme
