"""Steps of gradients from the second moments of an optimizer, which replicas share bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shrinkpoint import _native, validate
from shrinkpoint.comm.compressors.base import Compressor, check_compressor
from shrinkpoint.comm.compressors.quantizers import Uniform
from shrinkpoint.comm.compressors.step_codes import SMALLEST_ROOT
from shrinkpoint.comm.gradient_layout import GradientLayout, Piece, Segment, is_dense
from shrinkpoint.errors import PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.optimizers import OPTIMIZERS, SQUARE_MEANS, MomentKind, moment_kinds

MAX_STEP = 4.0
"""The coarsest steps: with coarser ones almost all of a gradient is rounded to 0."""


@dataclass(frozen=True)
class MomentSteps:
    """Rounds gradients to multiples of `step` roots of Adam's second moment, for `compress_ddp(optimizer=)`.

    All replicas hold the same second moment, so that no scales are sent. The multiples are entropy-coded, on gloo. The
    steps follow the size of gradients relative to the second moment, which clipping and a `GradScaler` change.

    Attributes:
        step: relative to the size of gradients; from above 0 to 4.
        compressor: for the first 100 steps, and for parameters without a second moment.

    Raises:
        PolicyError: a step out of range, or the compressor is none.
    """

    step: float = 0.7
    compressor: Compressor = field(default_factory=lambda: Uniform(4, 64))

    def __post_init__(self) -> None:
        validate.check_float("MomentSteps, step", self.step, maximum=MAX_STEP, do="pass 0.7, or 0.5 to lose less")
        check_compressor("MomentSteps", self.compressor)

    @property
    def spec(self) -> str:
        """The setting as text, which `shrinkpoint.comm.parse` reads back."""
        inner = "" if self.compressor == Uniform(4, 64) else f"({self.compressor.spec})"
        return f"v{self.step!r}".removesuffix(".0") + inner

    def __str__(self) -> str:
        return self.spec


class SecondMoments:
    """The second moments that an optimizer keeps of parameters.

    Raises:
        PolicyError: the optimizer keeps none, or keeps only those of a part of the parameters on each rank.
    """

    def __init__(self, optimizer: object) -> None:
        expected, advice = "a torch.optim.Optimizer", "call compress_ddp(model, spec, optimizer=optimizer)"
        validate.check_instance(_WHERE, optimizer, torch.optim.Optimizer, expected=expected, do=advice)
        assert isinstance(optimizer, torch.optim.Optimizer)
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise _refused("a ZeroRedundancyOptimizer, of which each rank has a part", "second moments on every rank")
        name = type(optimizer).__name__
        slots = [slot for row in OPTIMIZERS if name in row.torch_classes.split() for slot in row.slots]
        if type(optimizer).__module__.startswith("torch.optim") and not any(
            slot.kind is MomentKind.SQUARE_MEAN for slot in slots
        ):
            raise _refused(f"{name}, which keeps no mean of squares", "an optimizer such as Adam, AdamW or RMSprop")
        self._optimizer, self._names = optimizer, dict[int, str]()

    def check_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Raise a PolicyError unless the optimizer has at least one of these parameters."""
        if self._settings().keys().isdisjoint(map(id, parameters)):
            found = f"{type(self._optimizer).__name__} of other parameters"
            raise PolicyError(_WHERE, found=found, expected="the optimizer of this model", do="pass that optimizer")

    def find(self, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """The second moment of each parameter; None if there is none yet.

        Raises:
            PolicyError: the optimizer keeps something for these parameters, and no second moment of any.
        """
        state, settings, has_state = self._optimizer.state, dict[int, Mapping[str, Any]](), False
        found: list[Tensor | None] = []
        for parameter in parameters:
            slot = state.get(parameter) or {}
            has_state = has_state or any(isinstance(value, Tensor) and value.dim() for value in slot.values())
            if self._names.get(id(parameter)) not in slot:
                settings = settings or self._settings()
                self._names[id(parameter)] = _square_mean(slot, settings.get(id(parameter), {}))
            found.append(_usable(slot.get(self._names[id(parameter)]), parameter))
        if has_state and not any(moment is not None for moment in found):
            found_text = f"{type(self._optimizer).__name__}, whose state has no mean of squares like the parameters"
            raise _refused(found_text, "an optimizer such as Adam, AdamW or RMSprop")
        return found

    def _settings(self) -> dict[int, Mapping[str, Any]]:
        """The settings of each parameter's group."""
        return {
            id(parameter): {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        }


_WHERE = "compress_ddp, optimizer"


def _refused(found: str, expected: str) -> PolicyError:
    return PolicyError(_WHERE, found=found, expected=expected, do='use that, or compress with "q4:64"')


def _square_mean(slot: Mapping[Any, Any], settings: Mapping[str, Any]) -> str:
    """The name of the second moment among what an optimizer keeps for a parameter; "" if there is none.

    That of centered RMSprop is one, too, although checkpoints keep it exact.
    """
    kinds = moment_kinds(slot, settings)
    is_known = MomentKind.UNKNOWN not in kinds.values()
    return next((name for name in kinds if is_known and name in SQUARE_MEANS), "")


def _usable(moment: object, parameter: Tensor) -> Tensor | None:
    """The second moment, if it has a value for each of the parameter's on this rank."""
    if not isinstance(moment, Tensor) or isinstance(moment, DTensor) or moment.shape != parameter.shape:
        return None
    is_number = moment.is_floating_point() or moment.is_complex()
    return moment if is_number and moment.device == parameter.device else None


class SegmentRoots:
    """The roots of second moments, laid out as the gradients of segments.

    Args:
        parameters: those of the layout.

    Raises:
        PolicyError: the optimizer has none of them.
    """

    def __init__(self, layout: GradientLayout, parameters: Iterable[Tensor], moments: SecondMoments) -> None:
        self._parameters, self._second_moments = list(parameters), moments
        moments.check_parameters(self._parameters)
        self._members: dict[int, list[tuple[int, Piece]]] = {}
        for index, parameter in enumerate(self._parameters):
            for segment, piece in layout.pieces(parameter):
                self._members.setdefault(segment.index, []).append((index, piece))
        self._moments: list[Tensor | None] = []

    def begin(self) -> frozenset[int]:
        """Look the second moments up; return the indices of segments in which no parameter lacks one."""
        self._moments = self._second_moments.find(self._parameters)
        members = self._members.items()
        return frozenset(at for at, found in members if all(self._moments[index] is not None for index, _ in found))

    def roots(self, segment: Segment, numel: int) -> Tensor:
        """The root for each of so many values of a segment: float32, 1-d; between and behind gradients, and where the
        second moment is 0 or not finite, `SMALLEST_ROOT`."""
        roots = torch.zeros(numel, dtype=torch.float32, device="cpu")
        for index, piece in self._members[segment.index]:
            moment = self._moments[index]
            assert moment is not None  # of a segment that `begin` has returned
            flat = _flat(moment, self._parameters[index])[piece.start : piece.start + piece.numel]
            roots[piece.offset : piece.offset + piece.numel] = flat
        _native.step_roots(tensor_bytes(roots), least=SMALLEST_ROOT)  # torch rounds roots otherwise elsewhere
        return roots


def _flat(moment: Tensor, parameter: Tensor) -> Tensor:
    """The values of a second moment in the order in which DDP's buckets have those of the gradient; 1-d."""
    moment = moment.detach()
    if is_dense(parameter):
        if moment.stride() != parameter.stride():
            moment = torch.empty_like(parameter, dtype=moment.dtype, memory_format=torch.preserve_format).copy_(moment)
        flat = moment.as_strided((moment.numel(),), (1,), moment.storage_offset())
    else:
        flat = moment.reshape(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
