"""Programs that save checkpoints, each behind `save`, `load` and its version: what `run.py` compares.

Every one is called as its documentation asks for, and waited for until the checkpoint is written: the comparison is of
whole saves, not of what a loop waits for. Those that take tensors only get the tensors of the state, without the plain
values beside them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.tensors.flat_state import FlatState, flatten

Tensors = Mapping[str, Tensor]
Evaluate = Callable[[Any], float]
"""The loss of a nested state."""


class Method(ABC):
    """One program with its settings, on one run.

    Args:
        folder: an empty directory for the checkpoints.
        threads: how many it may use, where it can be told.
        evaluate: for those that measure.
    """

    package: ClassVar[str]
    lossy: ClassVar[bool] = False

    def __init__(self, folder: Path, threads: int, evaluate: Evaluate) -> None:
        self.folder, self.threads, self.evaluate = folder, threads, evaluate

    @classmethod
    def version(cls) -> str:
        """Of the package.

        Raises:
            PackageNotFoundError: it is not installed.
        """
        return importlib.metadata.version(cls.package)

    def input(self, state: Any, flat: FlatState) -> Any:
        """A state in the form that `save` takes, in memory of its own where it changes that; not timed."""
        return dict(flat.tensors)

    @abstractmethod
    def save(self, step: int, state: Any) -> None:
        """Write a checkpoint of what `input` returned."""

    @abstractmethod
    def load(self, step: int, like: Tensors) -> Any:
        """Read a checkpoint, from files alone.

        Args:
            like: empty tensors of the shapes and dtypes that were saved, for programs that load in place.
        """

    def tensors(self, loaded: Any) -> Tensors:
        """The tensors of what `load` returned, by the names that `flatten` gives them; not timed."""
        return loaded  # type: ignore[no-any-return]


class TorchSave(Method):
    """`torch.save` and `torch.load(weights_only=True)`."""

    package = "torch"

    def input(self, state: Any, flat: FlatState) -> Any:
        return state

    def save(self, step: int, state: Any) -> None:
        torch.save(state, self.folder / f"{step}.pt")

    def load(self, step: int, like: Tensors) -> Any:
        return torch.load(self.folder / f"{step}.pt", weights_only=True)

    def tensors(self, loaded: Any) -> Tensors:
        return flatten(loaded).tensors


class DCP(Method):
    """`torch.distributed.checkpoint` of one process."""

    package = "torch"
    extensions: ClassVar[tuple[str, ...]] = ()

    def save(self, step: int, state: Any) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import _extension

        extensions = [getattr(_extension, name)() for name in self.extensions]
        writer = dcp.FileSystemWriter(self.folder / str(step), thread_count=self.threads, _extensions=extensions)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def load(self, step: int, like: Tensors) -> Any:
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(like), storage_reader=dcp.FileSystemReader(self.folder / str(step)), no_dist=True)
        return like


class DCPZstandard(DCP):
    """The same with its ZStandard extension, which torch calls experimental."""

    package = "zstandard"
    extensions = ("ZStandard",)


class SafeTensors(Method):
    """`safetensors.torch`; a load copies the tensors out of the map of the file."""

    package = "safetensors"

    def save(self, step: int, state: Any) -> None:
        from safetensors.torch import save_file

        save_file(state, self.folder / f"{step}.safetensors")

    def load(self, step: int, like: Tensors) -> Any:
        from safetensors.torch import load_file

        return {name: tensor.clone() for name, tensor in load_file(self.folder / f"{step}.safetensors").items()}


class ZipNN(Method):
    """ZipNN's compression of each tensor, a file of blobs with their sizes: it has no format for whole states.

    It changes its input in place, so that it gets a copy.
    """

    package = "zipnn"

    def input(self, state: Any, flat: FlatState) -> Any:
        return {name: bytearray(tensor.contiguous().numpy().data) for name, tensor in flat.tensors.items()}

    def save(self, step: int, state: Any) -> None:
        blobs = {name: self._coder().compress(values) for name, values in state.items()}
        with (self.folder / f"{step}.znn").open("wb") as file:
            file.writelines(blobs.values())
        sizes = {name: len(blob) for name, blob in blobs.items()}
        (self.folder / f"{step}.json").write_text(json.dumps(sizes))

    def load(self, step: int, like: Tensors) -> Any:
        sizes = json.loads((self.folder / f"{step}.json").read_text())
        with (self.folder / f"{step}.znn").open("rb") as file:
            values = {name: bytearray(self._coder().decompress(file.read(size))) for name, size in sizes.items()}
        return {name: torch.frombuffer(x, dtype=like[name].dtype).view(like[name].shape) for name, x in values.items()}

    def _coder(self) -> Any:
        from zipnn import ZipNN

        return ZipNN(input_format="byte", bytearray_dtype="float32", threads=self.threads)


class Orbax(Method):
    """Orbax's `StandardCheckpointer`, of numpy arrays: it knows no torch tensors."""

    package = "orbax-checkpoint"

    def __init__(self, *arguments: Any) -> None:
        import orbax.checkpoint as ocp

        super().__init__(*arguments)
        self._checkpointer = ocp.StandardCheckpointer()

    def input(self, state: Any, flat: FlatState) -> Any:
        return {name: tensor.numpy() for name, tensor in flat.tensors.items()}

    def save(self, step: int, state: Any) -> None:
        self._checkpointer.save(self.folder / str(step), state)
        self._checkpointer.wait_until_finished()

    def load(self, step: int, like: Tensors) -> Any:
        arrays = self._checkpointer.restore(self.folder / str(step), {name: x.numpy() for name, x in like.items()})
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class _Holder:
    """What has a `state_dict`."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


class Moonclip(Method):
    """moonclip's `CheckpointManager`, saving before it returns."""

    package = "moonclip"
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        os.environ["MOONCLIP_THREADS"] = str(self.threads)
        self._manager = self._open()

    def _open(self) -> Any:
        from moonclip import CheckpointManager

        return CheckpointManager(str(self.folder), async_save=False, **self.settings)

    def input(self, state: Any, flat: FlatState) -> Any:
        return {name: _Holder(part) for name, part in state.items()}

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step=step, **state)

    def load(self, step: int, like: Tensors) -> Any:
        manager = self._open()
        return manager.load({found["step"]: found["id"] for found in manager.list_snapshots()}[step])

    def tensors(self, loaded: Any) -> Tensors:
        return flatten(loaded).tensors


class MoonclipBfloat16(Moonclip):
    """The same with `save_dtype="bf16"`, as its own page has it."""

    lossy = True
    settings: ClassVar[dict[str, Any]] = {"save_dtype": "bf16"}


class Shrinkpoint(Method):
    """A store of ours, lossless."""

    package = "shrinkpoint"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._scheme = self.scheme()
        self._store = sp.Store(self.folder, threads=self.threads)

    def scheme(self) -> Any:
        return "lossless"

    def input(self, state: Any, flat: FlatState) -> Any:
        return state

    def save(self, step: int, state: Any) -> None:
        self._store.save(step, state, scheme=self._scheme)

    def load(self, step: int, like: Tensors) -> Any:
        return sp.load(self.folder, step=step, threads=self.threads)

    def tensors(self, loaded: Any) -> Tensors:
        return flatten(loaded).tensors


class FisherBudget(Shrinkpoint):
    """`Fisher(budget="1%")`, which measures the loss before it writes."""

    lossy = True

    def scheme(self) -> Any:
        return sp.Fisher(budget="1%", evaluate=self.evaluate)


class ExCP(Shrinkpoint):
    """ExCP in our implementation, with the rule, the float16 centres and the LZMA of its released code."""

    lossy = True
    settings: ClassVar[dict[str, Any]] = {"paper": True, "rule": "released", "paper_fp16": True}

    def scheme(self) -> Any:
        return sp.ExCP(**self.settings)


class ExCPPaper(ExCP):
    """ExCP in our implementation, with the paper's rule, float32 centres and our coder."""

    settings: ClassVar[dict[str, Any]] = {}


METHODS: dict[str, type[Method]] = {
    "torch.save": TorchSave,
    "torch DCP": DCP,
    "torch DCP + ZStandard": DCPZstandard,
    "safetensors": SafeTensors,
    "Orbax": Orbax,
    "ZipNN": ZipNN,
    "moonclip": Moonclip,
    'moonclip, save_dtype="bf16"': MoonclipBfloat16,
    "ExCP, as released": ExCP,
    "ExCP, the paper's rule": ExCPPaper,
    "shrinkpoint, lossless": Shrinkpoint,
    'shrinkpoint, Fisher(budget="1%")': FisherBudget,
}
