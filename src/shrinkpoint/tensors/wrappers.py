"""Removes wrappers of frameworks from modules and from the names of their tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

_PARALLEL = "module"  # The name that data-parallel wrappers give to what they wrap; modules of users have it, too
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""The names that only frameworks give to what they wrap."""
_Plain = Callable[[str], str]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module within what wraps it for training, compiled or replicated."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def match_names(saved: Iterable[str], live: Iterable[str]) -> dict[str, str]:
    """The saved name of each live name that has one, whatever wrappers either side has.

    Equal names are taken first. If some have no partner, wrappers are taken off both sides, the fewest that give the
    most pairs. Names that are alike without their wrappers are not paired.

    >>> match_names(["module.0.weight"], ["0._orig_mod.weight"])
    {'0._orig_mod.weight': 'module.0.weight'}
    >>> match_names(["module.module.weight", "module.weight"], ["module.weight", "weight"])
    {'module.weight': 'module.module.weight', 'weight': 'module.weight'}
    """
    saved, live = list(saved), list(live)
    pairs = {name: name for name in set(saved).intersection(live)}
    for saved_plain, live_plain in zip(_plain_forms(saved), _plain_forms(live), strict=True):
        if len(pairs) == len(live) == len(saved):
            break
        by_plain = _unique(saved, saved_plain)
        candidates = {name: by_plain[plain] for plain, name in _unique(live, live_plain).items() if plain in by_plain}
        if len(candidates) > len(pairs):
            pairs = candidates
    return pairs


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Names without wrappers, by name, for a model that is not there yet; equal ones where some would coincide.

    >>> plain_names(["module._orig_mod.0.weight", "module._orig_mod.0.bias"])
    {'module._orig_mod.0.weight': '0.weight', 'module._orig_mod.0.bias': '0.bias'}
    """
    plain = _plain_forms(names)[1]
    unique = _unique(names, plain)
    return (
        {name: form for form, name in unique.items()} if len(unique) == len(names) else {name: name for name in names}
    )


def match_state_keys(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved `state_dict` of a module under the keys of the live one; keys without a partner stay as they are.

    Args:
        live: the module's own `state_dict`.
    """
    if saved.keys() == live.keys() or not all(isinstance(key, str) for key in saved):
        return saved
    pairs = match_names(saved, live)
    if all(key == saved_key for key, saved_key in pairs.items()):
        return saved
    new_names = {saved_key: key for key, saved_key in pairs.items()}
    renamed = OrderedDict((new_names.get(key, key), value) for key, value in saved.items())
    versions = getattr(saved, "_metadata", None)  # of modules, by their paths
    if isinstance(versions, Mapping):
        paths = {key.rpartition(".")[0]: saved_key.rpartition(".")[0] for key, saved_key in pairs.items()}
        vars(renamed)["_metadata"] = OrderedDict(
            (path, versions[old]) for path, old in paths.items() if old in versions
        )
    return renamed


def _plain_forms(names: Collection[str]) -> list[_Plain]:
    """Functions that take wrappers off names, from the careful one to the one that takes off most."""
    leading = 0
    parts = [_without(name, _WRAPPERS) for name in names]
    while parts and all(len(part) > leading + 1 and part[leading] == _PARALLEL for part in parts):
        leading += 1
    return [
        lambda name: ".".join(_without(name, _WRAPPERS)),
        lambda name: ".".join(_without(name, _WRAPPERS)[leading:]),
        lambda name: ".".join(_without(name, {*_WRAPPERS, _PARALLEL})),
    ]


def _without(name: str, wrappers: Collection[str]) -> list[str]:
    return [part for part in name.split(".") if part not in wrappers]


def _unique(names: Iterable[str], plain: _Plain) -> dict[str, str]:
    """Each name by its plain form, without those that share one."""
    by_plain: dict[str, list[str]] = {}
    for name in names:
        by_plain.setdefault(plain(name), []).append(name)
    return {form: found[0] for form, found in by_plain.items() if len(found) == 1}
