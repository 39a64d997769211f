"""State in a journal beside gradients: generators, changing buffers, and digests to check a replay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shrinkpoint._native import Hasher
from shrinkpoint.comm.gradient_record import GradientRecord, local_tensor
from shrinkpoint.container.journal_file import JournalRecord
from shrinkpoint.errors import MismatchError, PolicyError
from shrinkpoint.tensors.dtypes import tensor_bytes
from shrinkpoint.tensors.rng import rng_from_bytes, rng_to_bytes

_BUFFER = "buffer/"
_SIZE_DIGITS = 24  # Characters at most of a blob's size in JSON, with what stands around it and its name


class JournalState:
    """Reads and writes what a step changes in a process before `update` is called.

    Args:
        module: the model.
        parameters: of this rank: the weights whose digest is taken.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[Tensor]) -> None:
        self._module, self._parameters = module, list(parameters)
        named = module.named_buffers()
        self._unchanged = {name: tensor_digest([buffer]) for name, buffer in named}  # the digests of buffers

    def blobs(self) -> dict[str, list[Any]]:
        """The states of the generators, and the buffers that have changed since this object was made."""
        named = dict(self._module.named_buffers())
        for name in list(self._unchanged):
            if name not in named or tensor_digest([named[name]]) != self._unchanged[name]:
                del self._unchanged[name]
        changed = {name: buffer for name, buffer in named.items() if name not in self._unchanged}
        return {name: [data] for name, data in rng_to_bytes().items()} | {
            _BUFFER + name: [tensor_bytes(local_tensor(buffer)).data] for name, buffer in changed.items()
        }

    @property
    def nbytes(self) -> int:
        """The bytes of `blobs` as it was last, with those of their names and sizes in a record's JSON, at most."""
        sizes = {name: len(data) for name, data in rng_to_bytes().items()} | {
            _BUFFER + name: local_tensor(buffer).nbytes
            for name, buffer in self._module.named_buffers()
            if name not in self._unchanged
        }
        return sum(sizes.values()) + sum(len(json.dumps(name)) + _SIZE_DIGITS for name in sizes)

    @torch.no_grad()
    def load(self, record: JournalRecord) -> None:
        """Set generators and buffers to what a record has.

        Raises:
            MismatchError: it has a buffer that the model has not, or of another size.
        """
        named = dict(self._module.named_buffers())
        for key, data in record.blobs.items():
            if not key.startswith(_BUFFER):
                continue
            name = key[len(_BUFFER) :]
            buffer = local_tensor(named[name]) if name in named else None
            if buffer is None or buffer.nbytes != data.nbytes:
                found, expected = f"a buffer {name!r} of {data.nbytes} bytes", "a buffer of this model"
                raise MismatchError("journal", found=found, expected=expected, do="build the model as it was saved")
            values = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(buffer.dtype)
            buffer.copy_(values.view(buffer.shape))
            self._unchanged.pop(name, None)
        rng_from_bytes(record.blobs)

    def prepare(self, objects: Mapping[str, Any]) -> None:
        """Let each GradScaler have its tensors, which it makes in the first backward pass: a replay has none."""
        for scaler in objects.values():
            if isinstance(scaler, torch.amp.GradScaler) and self._parameters:
                scaler.scale(torch.zeros((), device=self._parameters[0].device))

    def weight_digest(self) -> str:
        """The digest of this rank's parameters."""
        return tensor_digest(self._parameters)

    def digests(self, objects: Mapping[str, Any]) -> dict[str, str]:
        """Digests by name of all that a replay makes again: parameters, buffers, generators, and states of objects."""
        digests = {"the weights": self.weight_digest()}
        digests |= {f"buffer {name}": tensor_digest([buffer]) for name, buffer in self._module.named_buffers()}
        digests |= {f"generator {name[4:]}": data.hex() for name, data in rng_to_bytes().items()}
        for name, obj in objects.items():
            is_model = isinstance(obj, nn.Module) and self._module in obj.modules()
            if not is_model and callable(getattr(obj, "state_dict", None)):
                digests |= dict(_leaf_digests(obj.state_dict(), name))
        return digests


class OptimizerWatch:
    """Finds what an optimizer steps by and no record has: settings that the loop changes, and other gradients.

    Args:
        record: what keeps gradients.
    """

    def __init__(self, record: GradientRecord) -> None:
        self._record, self._optimizers = record, list[Any]()
        self._gradients, self._settings = self._look()

    def begin(self, objects: Mapping[str, Any]) -> None:
        """Look at the optimizers among objects, and in lists and dicts of these, from now on."""
        self._optimizers = list(_optimizers_in(objects))
        self.note()

    def note(self) -> None:
        """Take all as it is now: `update` has made it, as gradients of copies in another dtype."""
        self._gradients, self._settings = self._look()

    def check(self) -> None:
        """Raise PolicyError if something was changed since it was noted."""
        gradients, settings = self._look()
        if gradients.items() - self._gradients.items():
            found, expected = "a gradient of a parameter that was added, unfrozen or moved", "averaged gradients"
            do = "wrap and compress all trained parameters, again after they change"
            raise PolicyError("journal", found=found, expected=expected, do=do)
        if settings != self._settings:
            new, old = (", ".join(sorted(some)) for some in (settings - self._settings, self._settings - settings))
            found, expected = f"an optimizer with {new or 'less'}", f"what `update` has left: {old or 'less'}"
            do = "step schedulers and set learning rates in `update`, or call journal.save after the change"
            raise PolicyError("journal", found=found, expected=expected, do=do)

    def _look(self) -> tuple[dict[int, tuple[int, int]], set[str]]:
        """Gradients that no record has, in a form that tells if they were changed; and settings of groups."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        others = self._record.others(parameter for group in groups for parameter in group["params"])
        gradients = {id(one): (id(one.grad), one.grad._version) for one in others if one.grad is not None}
        settings = {
            f"{name}={len(value) if name == 'params' else _plain(value)!r:.60} in group {index}"
            for index, group in enumerate(groups)
            for name, value in group.items()
            if name != "initial_lr"  # which a scheduler adds when it is made
        }
        return gradients, settings


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _optimizers_in(nest: Any) -> Iterator[Any]:
    if isinstance(nest, Mapping | list | tuple):
        for member in nest.values() if isinstance(nest, Mapping) else nest:
            yield from _optimizers_in(member)
    elif hasattr(nest, "param_groups"):
        yield nest


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """The digest of this rank's values of tensors."""
    hasher = Hasher()
    for tensor in tensors:
        hasher.update(tensor_bytes(local_tensor(tensor)))
    return hasher.hexdigest()


def _leaf_digests(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _leaf_digests(member, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            yield from _leaf_digests(member, f"{name}.{index}")
    elif isinstance(value, Tensor):
        yield name, tensor_digest([value])
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)
