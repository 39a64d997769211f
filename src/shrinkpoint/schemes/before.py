"""All that a measurement may change, as it was before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shrinkpoint.state.dtypes import raw
from shrinkpoint.state.rng import capture, reinstate


class Before:
    """Taken once, put back after every measurement: a loop must not notice that its model was tried out.

    That is: values of tensors; of modules which tensors they hold (a forward pass may bind a new buffer,
    `load_state_dict` new parameters), the memory these lie in (`half` and `to` exchange it), their gradients and their
    training modes; and the random generators.

    Args:
        tensors: whose values are copied, one copy of each.
        modules: with all that is below them.
    """

    def __init__(self, tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
        self._generators = capture()
        self._copies = [(bits, bits.clone()) for bits in (raw(tensor.detach()) for tensor in tensors)]
        parts = [part for module in modules for part in module.modules()]
        self._modules = [(part, part.training, dict(part._parameters), dict(part._buffers)) for part in parts]
        parameters = {id(one): one for part in parts for one in part.parameters(recurse=False)}.values()
        self._parameters = [(one, one.data, one.grad, one.requires_grad) for one in parameters]

    def without_gradients(self) -> None:
        """Take the gradients away: what `evaluate` adds to them, or clears, is then not the loop's."""
        for parameter, *_ in self._parameters:
            parameter.grad = None

    def put_back(self) -> None:
        """Can be repeated, where it was interrupted."""
        for module, training, parameters, buffers in self._modules:
            module.training = training
            _rebind(module._parameters, parameters)
            _rebind(module._buffers, buffers)
        for parameter, data, gradient, requires_grad in self._parameters:
            if parameter.data_ptr() != data.data_ptr() or parameter.dtype != data.dtype:
                parameter.data = data
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, before in self._copies:
                if not torch.equal(tensor, before):  # a write counts as a change for whoever watches the version
                    tensor.copy_(before)
        reinstate(self._generators)


def _rebind(now: dict[str, Any], before: dict[str, Any]) -> None:
    if list(now) != list(before) or any(now[name] is not one for name, one in before.items()):
        now.clear()
        now.update(before)
