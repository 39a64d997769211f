"""Patches torch.distributed.checkpoint so that callers that pass only a path get our writer and reader."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shrinkpoint.errors import PolicyError
from shrinkpoint.schemes.base import Scheme
from shrinkpoint.storage import AnyDirectory
from shrinkpoint.store.directory import is_checkpoint
from shrinkpoint.store.save_settings import OnSave
from shrinkpoint.train.dcp import checkpoint_metadata
from shrinkpoint.train.dcp.directory import is_path
from shrinkpoint.train.dcp.reader import Reader
from shrinkpoint.train.dcp.writer import Writer

_PATCHED_MODULES = (
    "torch.distributed.checkpoint",
    *(f"torch.distributed.checkpoint.{name}" for name in ("filesystem", "_storage_utils", "format_utils")),
)
_SUBCLASS_MODULES = ("_fsspec_filesystem", "hf_storage")
_EXECUTORS = ("_ProcessBasedAsyncCheckpointExecutor", "_ThreadBasedAsyncCheckpointExecutor")
_WRITER_SIGNATURE = inspect.signature(FileSystemWriter.__init__)
_originals: list[tuple[Any, str, Any]] = []
"""The patched attributes: (module, name, original object)."""


def install(
    scheme: str | Scheme = "lossless",
    *,
    keyframe_every: int | Literal["auto"] | None = "auto",
    chain: str | None = None,
    threads: int | None = None,
    group: dist.ProcessGroup | None = None,
    model: Any = None,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    note: str = "",
    on_save: OnSave | None = None,
) -> None:
    """Make torch.distributed.checkpoint use `Writer` and `Reader` wherever it is given only a path.

    Directories that torch's own writer wrote are still read by torch's own reader, which unpickles. Calling this again
    changes the settings. URLs are handled as before.

    Args:
        scheme, keyframe_every, chain, threads, group, model, step, metrics, note, on_save: as for `Writer`.

    Raises:
        PolicyError: settings that `Writer` refuses.
    """
    settings: dict[str, Any] = {"scheme": scheme, "keyframe_every": keyframe_every, "chain": chain, "threads": threads}
    settings |= {"group": group, "model": model, "step": step, "metrics": metrics, "note": note, "on_save": on_save}
    Writer(**settings)
    _PatchedWriter.settings = settings
    if _originals:
        return
    for name in _SUBCLASS_MODULES:  # these must still derive from torch's own classes
        with suppress(ImportError):
            importlib.import_module(f"torch.distributed.checkpoint.{name}")
    for module in map(importlib.import_module, _PATCHED_MODULES):
        for name, replacement in (("FileSystemWriter", _PatchedWriter), ("FileSystemReader", _PatchedReader)):
            if hasattr(module, name):
                _patch(module, name, replacement)
    for name in _EXECUTORS:
        if hasattr(saver, name):
            _patch(saver, name, _make_executor(getattr(saver, name)))


def uninstall() -> None:
    """Undo `install`; without effect if nothing is installed."""
    while _originals:
        module, name, original = _originals.pop()
        setattr(module, name, original)


def _patch(module: Any, name: str, replacement: Any) -> None:
    _originals.append((module, name, getattr(module, name)))
    setattr(module, name, replacement)


class _PatchedWriter(Writer):
    """`Writer` with the constructor of torch's FileSystemWriter."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        given = _WRITER_SIGNATURE.bind(self, path, *args, **kwargs).arguments
        overwrite = given.get("overwrite", True)
        if given.get("_extensions"):
            found, do = "_extensions of FileSystemWriter", "leave them out, or uninstall()"
            raise PolicyError("Writer", found=found, expected="no transformation of bytes", do=do)
        super().__init__(path, **{**self.settings, "overwrite": overwrite and self.settings.get("overwrite", True)})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path: where a URL is passed, torch looks for another writer."""
        return is_path(checkpoint_id)


class _PatchedReader(Reader):
    """`Reader` with the constructor of torch's FileSystemReader, which it uses for torch's own checkpoints."""

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        self._stock: StorageReader | None = None
        super().__init__(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path: where a URL is passed, torch looks for another reader."""
        return is_path(checkpoint_id)

    def reset(self, checkpoint_id: AnyDirectory | None = None) -> None:
        super().reset(checkpoint_id)
        self._stock = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        directory = self._directory
        if isinstance(directory, Path) and (
            not is_checkpoint(directory) or checkpoint_metadata.is_overwritten_by_torch(directory)
        ):
            self._stock = FileSystemReader(directory)
            return self._stock.read_metadata(*args, **kwargs)
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        if self._stock is not None:
            self._stock.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return super().read_data(plan, planner) if self._stock is None else self._stock.read_data(plan, planner)


def _make_executor(stock: type[Any]) -> type[Any]:
    """Wrap an executor of `async_save`, which saves later or in an unpatched process: create the writer at the call."""

    class Executor(stock):  # type: ignore[misc]
        def execute_save(self, *args: Any, **kwargs: Any) -> Any:
            path = kwargs.get("checkpoint_id")
            if kwargs.get("storage_writer") is None and is_path(path):
                kwargs["storage_writer"] = Writer(path, **_PatchedWriter.settings)
            return super().execute_save(*args, **kwargs)

    return Executor
