"""Writes checkpoints of this library as files that others read, and compares these with what they should hold."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shrinkpoint.container.header import SAFETENSORS_DTYPES
from shrinkpoint.convert import dcp, directory, safetensors_file, torch_file
from shrinkpoint.convert.part import STATE_KEY, origin_info, tensor_suffix
from shrinkpoint.errors import CorruptError, PolicyError, ShrinkpointError
from shrinkpoint.storage import atomic_replace, check_no_loss
from shrinkpoint.tensors.compare import same_bits
from shrinkpoint.tensors.dtypes import dtype_name
from shrinkpoint.tensors.flat_state import flatten
from shrinkpoint.tensors.names import StatePath, as_tensor, child_items, is_array, named_leaves
from shrinkpoint.tensors.tree_decoder import MatchPath, match_patterns

_SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors"}
_ABSENT = object()


class ExportCounts(NamedTuple):
    """Counts of `write_state`: tensors (each name counted), bytes, values left out, numpy values replaced."""

    tensors: int
    nbytes: int
    num_omitted: int
    num_converted: int


def write_state(state: Any, out: Path, *, as_torch: bool, patterns: Sequence[str] = ()) -> ExportCounts | None:
    """Writes a state atomically as a torch file, or its tensors as a safetensors file.

    Args:
        patterns: names to write, as of `match_patterns`; empty: all.

    Returns:
        the counts; None if no name matches, and nothing was written.

    Raises:
        PolicyError: safetensors has no such dtype.
        StorageError: writing failed.
    """
    state = select_state(state, patterns)
    if state is None:
        return None
    leaves = named_leaves(state)
    tensors = {name: as_tensor(leaf) for name, leaf in leaves.items() if is_array(leaf)}
    if not as_torch:
        for name, tensor in tensors.items():
            if dtype_name(tensor.dtype) not in SAFETENSORS_DTYPES:
                found, do = f"dtype {dtype_name(tensor.dtype)}", "add --to torch, or leave it out with --only"
                raise PolicyError(name, found=found, expected="a dtype that safetensors has", do=do)
    with atomic_replace(out) as temporary:
        if as_torch:
            torch_file.write(temporary, _numpy_to_torch(state))
        else:
            safetensors_file.write(temporary, tensors, {"metadata": {"format": "pt"}})
    num_numpy = sum(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves.values())
    num_omitted, num_converted = (0, num_numpy) if as_torch else (len(leaves) - len(tensors), 0)
    return ExportCounts(len(tensors), out.stat().st_size, num_omitted, num_converted)


def select_state(state: Any, patterns: Sequence[str]) -> Any:
    """Return what of a state has a matching name, in its nest; None for nothing, and all if there are no patterns."""
    selected = _select(state, match_patterns(patterns), ()) if patterns else state
    return None if selected is _ABSENT else selected


def _select(value: Any, matches: MatchPath, path: StatePath) -> Any:
    items = child_items(value)
    if (items is None or path) and matches(path):
        return value
    if items is None:
        return _ABSENT
    pairs = [(key, _select(item, matches, (*path, key))) for key, item in items]
    selected = [(key, item) for key, item in pairs if item is not _ABSENT]
    return _rebuild(value, selected) if selected else _ABSENT


def _numpy_to_torch(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return as_tensor(value) if is_array(value) else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    items = None if isinstance(value, torch.Size | Counter) else child_items(value)
    if items is None:
        return value
    rebuilt = _rebuild(value, [(key, _numpy_to_torch(item)) for key, item in items])
    if isinstance(value, OrderedDict):
        vars(rebuilt).update(vars(value))  # `_metadata`, which load_state_dict reads
    return rebuilt


def _rebuild(container: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """A dict, list or tuple like `container` with other items; a dict in place of a namespace."""
    if isinstance(container, dict | Namespace):
        return OrderedDict(pairs) if isinstance(container, OrderedDict) else dict(pairs)
    items = [item for _, item in pairs]
    return tuple(items) if isinstance(container, tuple) else items


def target_form(state: Any, requested_form: str, where: str) -> dict[str, Any]:
    """Decides how a state is written: the form, the name, and what else the form needs.

    Args:
        requested_form: "torch", "safetensors", "dcp", or "original" for the form it had before it was converted.

    Raises:
        PolicyError: the original form is asked for, and the state was not converted.
    """
    origin = origin_info(state)
    if requested_form == "original":
        if origin is None:
            expected, do = "one that was, which names its original form", "add --to torch, safetensors or dcp"
            raise PolicyError(where, found="a checkpoint that was not converted", expected=expected, do=do)
        return origin
    if origin is not None and origin["form"] == requested_form:
        return origin
    return {"form": requested_form, "name": "" if origin is None else origin["name"]}


def unique_name(name: str, step: int, form: str, used_names: Collection[str]) -> str:
    """The name to write one of several checkpoints under: its old one, with the step added if that is used already.

    Names are compared without case, as some file systems do.

    Args:
        form: the form that was asked for.
        used_names: case-folded names of the checkpoints written before.

    >>> unique_name("v1.0-step=10.ckpt", 10, "torch", ()), unique_name("v1.0-step=10.ckpt", 10, "dcp", ())
    ('v1.0-step=10.pt', 'v1.0-step=10')
    >>> unique_name("Last.pt", 20, "original", {"last.pt"})
    'Last-step-20.pt'
    """
    old_suffix = tensor_suffix(name)
    stem = name.removesuffix(old_suffix) or f"step-{step}"
    suffix = old_suffix if form == "original" else _SUFFIXES.get(form, "")
    while f"{stem}{suffix}".casefold() in used_names:
        stem += f"-step-{step}"
    return f"{stem}{suffix}"


def write_checkpoint(out: Path, state: Any, description: Mapping[str, Any]) -> int:
    """Writes a checkpoint to `out`, a file or a directory, atomically; existing files of the same names are replaced.

    Returns:
        the number of plain values left out, which safetensors cannot hold.

    Raises:
        PolicyError: the form cannot hold the state; `out` has other files, or is a directory instead of a file.
        CorruptError: the stored origin is one that no release writes, or names files outside of `out`.
        StorageError: writing failed.
    """
    try:
        form, content, num_omitted = description["form"], _content(state), 0
        info = dict(description)
        if form == "safetensors" and (origin_info(state) or {}).get("form") != "safetensors":
            content, num_omitted = _tensors_by_name(content)
            info["metadata"] = {"format": "pt"}
        if out.name in ("", ".."):
            raise PolicyError(str(out), found="a directory in use", expected="a new name", do="choose another name")
        with atomic_replace(out) as temporary:
            if form in ("folder", "dcp"):
                temporary.mkdir()
            if form == "folder":
                directory.write(temporary, content, info)
            elif form == "dcp":
                dcp.write(temporary, content)
            elif form in ("safetensors", "torch"):
                directory.write_part(temporary, content, info)
            else:
                do = "use a newer release, or add --to torch"
                raise CorruptError(str(out), found=f"the form {form!r:.40}", expected="a known one", do=do)
            check_no_loss(out, temporary)
        return num_omitted
    except (KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ShrinkpointError):
            raise
        found = f"a converted checkpoint that contradicts itself ({type(error).__name__}: {error!s:.80})"
        raise CorruptError(str(out), found=found, expected="one that convert wrote", do="add --to torch") from error


def describe_written_difference(out: Path, state: Any, description: Mapping[str, Any], *, exact: bool) -> str:
    """Reads what `write_checkpoint` wrote, and says in what it differs from the state; "" where it does not.

    Args:
        exact: also compare the types of the containers, and which tensors share memory.
    """
    content, form = _content(state), description["form"]
    if form == "torch":
        written = torch_file.read(out).content
    else:
        written = (safetensors_file.read(out) if form == "safetensors" else directory.read(out, opaque=True)).content
    if exact:
        flat, flat_written = flatten(content), flatten(written)
        if flat.tree != flat_written.tree:
            return "other plain values or another nest"
        leaves, written_leaves = dict[str, Any](flat.tensors), dict[str, Any](flat_written.tensors)
    elif form == "safetensors":
        leaves, written_leaves = dict[str, Any](_tensors_by_name(content)[0]), written
    else:
        leaves, written_leaves = named_leaves(content), named_leaves(written)
    different = (name for name, leaf in leaves.items() if not _equal_leaves(leaf, written_leaves.get(name)))
    return next((f"{name} is different" for name in different), "")


def _equal_leaves(left: Any, right: Any) -> bool:
    if is_array(left):
        return is_array(right) and same_bits(as_tensor(left), as_tensor(right))
    return repr(left) == repr(right)


def _content(state: Any) -> Any:
    """The content of a converted checkpoint without its origin; any other state unchanged."""
    return state if origin_info(state) is None else state[STATE_KEY]


def _tensors_by_name(content: Any) -> tuple[dict[str, Tensor], int]:
    """The tensors and arrays of a nest by name, and the number of its other leaves."""
    if isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values()):
        return dict(content), 0
    leaves = named_leaves(content)
    tensors = {name: as_tensor(leaf) for name, leaf in leaves.items() if is_array(leaf)}
    return tensors, len(leaves) - len(tensors)
