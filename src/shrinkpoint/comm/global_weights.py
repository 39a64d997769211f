"""The weights that all ranks share between rounds of local steps, and each rank's pseudo-gradient of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shrinkpoint import _native, validate
from shrinkpoint.comm.gradient_layout import SEGMENT_NUMEL, GradientCollector, GradientLayout
from shrinkpoint.errors import MismatchError
from shrinkpoint.tensors.dtypes import tensor_bytes


class GlobalWeights:
    """The weights where a round began: float32, or float64 for parameters that are; contiguous, on their devices.

    Narrower parameters are rounded copies of them, so that a small outer step is not lost.

    Args:
        parameters: the local weights, by name.

    Attributes:
        tensors: by name. Between `set_gradients` and `clear_gradients` their `grad` is the pseudo-gradient.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().to(
                torch.promote_types(parameter.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format
            )
            for name, parameter in parameters.items()
        }
        self._layout = GradientLayout(self.tensors.items(), 0, SEGMENT_NUMEL)

    def broadcast(self, group: dist.ProcessGroup) -> None:
        """Take over the weights of rank 0 of the group, and write them into the parameters of other ranks."""
        for weights in self.tensors.values():
            dist.broadcast(weights, dist.get_global_rank(group, 0), group)
        if group.rank():
            self.copy_to_parameters()

    def copy_to_parameters(self) -> None:
        """Write the weights into the parameters in place, rounded to their dtypes."""
        for name, parameter in self._parameters.items():
            parameter.detach().copy_(self.tensors[name])

    def set_gradients(self) -> None:
        """Compute the pseudo-gradients: the parameters as the round began with them minus what they are now."""
        for name, weights in self.tensors.items():
            now = self._parameters[name].detach()
            began = weights.to(now.dtype).to(weights.dtype)
            weights.grad = torch.sub(began, now.to(weights.dtype), out=torch.empty_like(weights))

    def clear_gradients(self) -> None:
        """Free the pseudo-gradients."""
        for weights in self.tensors.values():
            weights.grad = None

    def average_gradients(self, average: Callable[[Tensor, str], Tensor]) -> None:
        """Replace the pseudo-gradients by their averages over the ranks.

        Args:
            average: averages the flat values of a segment in place, given its name.
        """
        collector = GradientCollector(self._layout)
        for weights in self.tensors.values():
            gradient = weights.grad
            assert gradient is not None
            for filled in collector.add(weights, gradient.view(-1)):
                flat = torch.empty(filled.segment.numel, dtype=weights.dtype, device=weights.device)
                filled.copy_to(flat)
                filled.copy_from(average(flat, filled.segment.name))

    def check_fit(self, tensors: Mapping[str, Any]) -> None:
        """Raise a MismatchError if saved tensors are not those of these weights."""
        expected = {name: describe_tensor(weights) for name, weights in self.tensors.items()}
        found = {
            name: describe_tensor(tensor) if isinstance(tensor, Tensor) else validate.type_name(tensor)
            for name, tensor in tensors.items()
        }
        for name in {**expected, **found}:
            if expected.get(name) != found.get(name):
                problem, advice = found.get(name, "nothing"), "build the model as it was saved"
                where = f"LocalSteps, global weights {name}"
                raise MismatchError(where, found=problem, expected=expected.get(name, "nothing"), do=advice)

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Copy saved tensors into the weights, not into the parameters; a MismatchError if they do not fit."""
        self.check_fit(tensors)
        for name, weights in self.tensors.items():
            weights.copy_(tensors[name])


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """A digest of all bits: 32 hex digits."""
    parts = [bytes.fromhex(_native.xxh3_128(tensor_bytes(tensor.detach().cpu().contiguous()))) for tensor in tensors]
    return _native.xxh3_128(b"".join(parts))


def describe_tensor(tensor: Tensor) -> str:
    """The dtype and shape of a tensor, as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
