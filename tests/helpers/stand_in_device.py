"""A device without hardware: its tensors lie in host memory, and launches, copies and waits are counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta", 1)
"""Torch accepts it, and computes nothing there. Shapes without values are on the device "meta" without an index."""
_FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::alias", "aten::promote")
_ANSWERS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
"""Operations whose result is a number in host memory."""


class DeviceTensor(Tensor):
    """A tensor on the device, around one in host memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = Tensor._make_wrapper_subclass(cls, held.shape, **layout, device=DEVICE, requires_grad=False)
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def item(self) -> Any:
        return torch.ops.aten._local_scalar_dense(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a tensor on a device that is not there")


def on_host(value: Any) -> Any:
    """The same value with tensors of the device replaced by what they hold; nothing is counted."""
    return tree_map_only(DeviceTensor, lambda tensor: tensor.held, value)


class _Literals(TorchFunctionMode):
    """Makes tensors of numbers in host memory first: the device "meta" makes nothing else of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class StandInDevice(TorchDispatchMode):
    """Computes in host memory what is asked of the device, while it is entered.

    Attributes:
        launches: operations and kernels that the device runs.
        copies: operations that copy from the host to the device.
        waits: operations that copy from the device to the host, which waits for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._literals = _Literals()
        self.launches, self.copies, self.waits = list[str](), list[str](), list[str]()

    def __enter__(self) -> StandInDevice:
        self._literals.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.name()
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_read, asked = any(isinstance(x, DeviceTensor) for x in given), kwargs.get("device")
        kwargs |= {"device": torch.device("cpu")} if asked == DEVICE else {}
        out = func(*on_host(args), **on_host(kwargs))
        if name == "aten::copy_":
            is_made, asked = isinstance(args[0], DeviceTensor), args[0].device
            is_read = isinstance(args[1], DeviceTensor)
        else:
            is_made = asked == DEVICE or (is_read and asked is None and name not in _ANSWERS)
            apart = [x for x in given if x.dim() and not isinstance(x, DeviceTensor)]
            assert not (is_read and apart), f"{name} of tensors on the device and on the host"
        if is_read and not is_made:
            self.waits.append(name)
        elif is_made and given and not is_read:
            self.copies.append(name)
        elif is_made and not func.is_view and not name.startswith(_FREE):
            self.launches.append(name)
        known = {id(x.held): x for x in given if isinstance(x, DeviceTensor)}
        if not is_made:
            return out
        return tree_map_only(Tensor, lambda x: known[id(x)] if id(x) in known else DeviceTensor(x), out)
