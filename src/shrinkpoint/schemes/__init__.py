"""Schemes: named policies that decide for a whole state how each tensor is stored. Imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shrinkpoint.baselines.excp import ExCP as ExCP
    from shrinkpoint.baselines.gobo import GOBO as GOBO
    from shrinkpoint.baselines.uniform import CNR as CNR
    from shrinkpoint.baselines.uniform import QD as QD
    from shrinkpoint.schemes.base import PlanningScheme as PlanningScheme
    from shrinkpoint.schemes.base import QuantizedState as QuantizedState
    from shrinkpoint.schemes.base import Resumable as Resumable
    from shrinkpoint.schemes.base import Scheme as Scheme
    from shrinkpoint.schemes.evaluate import ModelEvaluator as ModelEvaluator
    from shrinkpoint.schemes.evaluate import iter_modules as iter_modules
    from shrinkpoint.schemes.fisher.activations import Activations as Activations
    from shrinkpoint.schemes.fisher.scheme import Fisher as Fisher
    from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator as Inshrinkerator
    from shrinkpoint.schemes.lc_checkpoint.scheme import LCCheckpoint as LCCheckpoint
    from shrinkpoint.schemes.lc_checkpoint.sparse_update import SCAR as SCAR
    from shrinkpoint.schemes.lc_checkpoint.sparse_update import TOPN as TOPN
    from shrinkpoint.schemes.lossless import Lossless as Lossless
    from shrinkpoint.schemes.lossless import Recode as Recode
    from shrinkpoint.schemes.plan import QuantizationPlan as QuantizationPlan
    from shrinkpoint.schemes.registry import get_scheme as get_scheme
    from shrinkpoint.schemes.registry import scheme_factory as scheme_factory
    from shrinkpoint.schemes.search.scheme import SearchScheme as SearchScheme

_MODULES = {
    "Activations": "schemes.fisher.activations",
    "CNR": "baselines.uniform",
    "ExCP": "baselines.excp",
    "Fisher": "schemes.fisher.scheme",
    "GOBO": "baselines.gobo",
    "Inshrinkerator": "schemes.inshrinkerator.scheme",
    "LCCheckpoint": "schemes.lc_checkpoint.scheme",
    "Lossless": "schemes.lossless",
    "ModelEvaluator": "schemes.evaluate",
    "PlanningScheme": "schemes.base",
    "QD": "baselines.uniform",
    "QuantizationPlan": "schemes.plan",
    "QuantizedState": "schemes.base",
    "Recode": "schemes.lossless",
    "Resumable": "schemes.base",
    "SCAR": "schemes.lc_checkpoint.sparse_update",
    "Scheme": "schemes.base",
    "SearchScheme": "schemes.search.scheme",
    "TOPN": "schemes.lc_checkpoint.sparse_update",
    "get_scheme": "schemes.registry",
    "iter_modules": "schemes.evaluate",
    "scheme_factory": "schemes.registry",
}
"""The module of each name, below `shrinkpoint`. The baselines stand above this package, so they are named by text."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"shrinkpoint.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
