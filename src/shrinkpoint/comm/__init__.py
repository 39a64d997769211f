"""Codes cross a wire: activations and gradients made small between pipeline stages and between replicas.

    from shrinkpoint import comm

    wire = comm.compress_pipeline(schedule, forward="q4:64", backward="q4:64")   # before the first step
    points = comm.insert_points(model, after=["layer1", "layer2"], forward="q4:64", backward="q4:64")  # in one process

Operators and feedbacks are given as objects or as words (`parse`). Names here are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shrinkpoint.comm.accordion import Accordion as Accordion
    from shrinkpoint.comm.advice import advise as advise
    from shrinkpoint.comm.allotment import Allotment as Allotment
    from shrinkpoint.comm.allotment import allot as allot
    from shrinkpoint.comm.ddp import compress_ddp as compress_ddp
    from shrinkpoint.comm.feedback.aqsgd import AQSGD as AQSGD
    from shrinkpoint.comm.feedback.base import Feedback as Feedback
    from shrinkpoint.comm.feedback.ef import EF as EF
    from shrinkpoint.comm.feedback.ef21 import EF21 as EF21
    from shrinkpoint.comm.feedback.mixed import EFMixed as EFMixed
    from shrinkpoint.comm.fsdp import compress_fsdp as compress_fsdp
    from shrinkpoint.comm.ledger import Ledger as Ledger
    from shrinkpoint.comm.link import At as At
    from shrinkpoint.comm.link import Link as Link
    from shrinkpoint.comm.operators.base import Context as Context
    from shrinkpoint.comm.operators.base import Operator as Operator
    from shrinkpoint.comm.operators.blockfloat import BlockFloat as BlockFloat
    from shrinkpoint.comm.operators.cast import Cast as Cast
    from shrinkpoint.comm.operators.exact import Exact as Exact
    from shrinkpoint.comm.operators.normal import Normal as Normal
    from shrinkpoint.comm.operators.randomk import RandomK as RandomK
    from shrinkpoint.comm.operators.rotated import Rotated as Rotated
    from shrinkpoint.comm.operators.same import SameIndices as SameIndices
    from shrinkpoint.comm.operators.topk import TopK as TopK
    from shrinkpoint.comm.operators.uniform import Uniform as Uniform
    from shrinkpoint.comm.pipeline import Wire as Wire
    from shrinkpoint.comm.pipeline import compress_pipeline as compress_pipeline
    from shrinkpoint.comm.points import Points as Points
    from shrinkpoint.comm.points import insert_points as insert_points
    from shrinkpoint.comm.spec import parse as parse

_HOMES = {
    "AQSGD": "feedback.aqsgd", "Accordion": "accordion", "Allotment": "allotment", "At": "link",
    "BlockFloat": "operators.blockfloat", "Cast": "operators.cast", "Context": "operators.base", "EF": "feedback.ef",
    "EF21": "feedback.ef21", "EFMixed": "feedback.mixed", "Exact": "operators.exact", "Feedback": "feedback.base",
    "Ledger": "ledger", "Link": "link", "Normal": "operators.normal", "Operator": "operators.base", "Points": "points",
    "RandomK": "operators.randomk", "Rotated": "operators.rotated", "SameIndices": "operators.same",
    "TopK": "operators.topk", "Uniform": "operators.uniform", "Wire": "pipeline", "advise": "advice",
    "allot": "allotment", "compress_ddp": "ddp", "compress_fsdp": "fsdp", "compress_pipeline": "pipeline",
    "insert_points": "points", "parse": "spec",
}  # fmt: skip

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
