"""Schemes: named policies that decide for a whole state how each tensor is stored. Imported when first used."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from shrinkpoint.schemes.base import QuantizedState as QuantizedState
    from shrinkpoint.schemes.base import Scheme as Scheme
    from shrinkpoint.schemes.evaluate import ModelEvaluator as ModelEvaluator
    from shrinkpoint.schemes.evaluate import iter_modules as iter_modules
    from shrinkpoint.schemes.fisher.activations import Activations as Activations
    from shrinkpoint.schemes.fisher.scheme import Fisher as Fisher
    from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator as Inshrinkerator
    from shrinkpoint.schemes.lc_checkpoint import SCAR as SCAR
    from shrinkpoint.schemes.lc_checkpoint import TOPN as TOPN
    from shrinkpoint.schemes.lc_checkpoint import LCCheckpoint as LCCheckpoint
    from shrinkpoint.schemes.lossless import Lossless as Lossless
    from shrinkpoint.schemes.lossless import Recode as Recode
    from shrinkpoint.schemes.plan import QuantizationPlan as QuantizationPlan
    from shrinkpoint.schemes.planner import Planner as Planner
    from shrinkpoint.schemes.registry import get_scheme as get_scheme
    from shrinkpoint.schemes.registry import scheme_factory as scheme_factory
    from shrinkpoint.schemes.search.scheme import SearchScheme as SearchScheme

_MODULES = {
    "Activations": "fisher.activations",
    "Fisher": "fisher.scheme",
    "Inshrinkerator": "inshrinkerator.scheme",
    "LCCheckpoint": "lc_checkpoint",
    "Lossless": "lossless",
    "ModelEvaluator": "evaluate",
    "Planner": "planner",
    "QuantizationPlan": "plan",
    "QuantizedState": "base",
    "Recode": "lossless",
    "SCAR": "lc_checkpoint",
    "Scheme": "base",
    "SearchScheme": "search.scheme",
    "TOPN": "lc_checkpoint",
    "get_scheme": "registry",
    "iter_modules": "evaluate",
    "scheme_factory": "registry",
}
"""The module of each name."""

__all__ = list(_MODULES)


@cache
def added_schemes() -> dict[str, EntryPoint]:
    """Schemes that other installed packages add, such as the laboratory, by id and by name of the class.

    They are entry points of the group "shrinkpoint.schemes": id = "module:class".
    """
    from importlib.metadata import entry_points

    entries = entry_points(group="shrinkpoint.schemes")
    return {key: entry for entry in entries for key in (entry.name, entry.attr)}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name[:1].isupper() and name in added_schemes():
        return added_schemes()[name].load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
