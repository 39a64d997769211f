"""Compression of activations and gradients between pipeline stages, replicas and shards; local steps.

    from shrinkpoint import comm

    wire = comm.compress_pipeline(schedule, forward="q4:64", backward="q4:64")   # before the first step
    points = comm.insert_compression(model, after=["layer1"], forward="q4:64", backward="q4:64")  # in one process
    local = comm.LocalSteps(model, optimizer, every=30)  # ranks that train alone, and average once a round

Compressors and feedbacks are given as objects or as specs (`parse`). Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shrinkpoint.comm.aqsgd import AQSGD as AQSGD
    from shrinkpoint.comm.compressed_manager import CompressedManager as CompressedManager
    from shrinkpoint.comm.compressors.base import Cast as Cast
    from shrinkpoint.comm.compressors.base import Compressor as Compressor
    from shrinkpoint.comm.compressors.base import CompressorContext as CompressorContext
    from shrinkpoint.comm.compressors.base import Identity as Identity
    from shrinkpoint.comm.compressors.hadamard import Hadamard as Hadamard
    from shrinkpoint.comm.compressors.quantizers import BlockFloat as BlockFloat
    from shrinkpoint.comm.compressors.quantizers import NormalFloat as NormalFloat
    from shrinkpoint.comm.compressors.quantizers import Uniform as Uniform
    from shrinkpoint.comm.compressors.sparse import RandomK as RandomK
    from shrinkpoint.comm.compressors.sparse import SameIndices as SameIndices
    from shrinkpoint.comm.compressors.sparse import TopK as TopK
    from shrinkpoint.comm.ddp import compress_ddp as compress_ddp
    from shrinkpoint.comm.error_feedback import EF as EF
    from shrinkpoint.comm.error_feedback import EF21 as EF21
    from shrinkpoint.comm.error_feedback import EFMixed as EFMixed
    from shrinkpoint.comm.error_feedback import ErrorFeedback as ErrorFeedback
    from shrinkpoint.comm.fsdp import compress_fsdp as compress_fsdp
    from shrinkpoint.comm.link import Link as Link
    from shrinkpoint.comm.link import LinkStats as LinkStats
    from shrinkpoint.comm.link import MessageContext as MessageContext
    from shrinkpoint.comm.local_steps import LocalSteps as LocalSteps
    from shrinkpoint.comm.local_steps import OuterSGD as OuterSGD
    from shrinkpoint.comm.low_rank import LowRank as LowRank
    from shrinkpoint.comm.moment_steps import MomentSteps as MomentSteps
    from shrinkpoint.comm.pipeline import CompressedPipeline as CompressedPipeline
    from shrinkpoint.comm.pipeline import compress_pipeline as compress_pipeline
    from shrinkpoint.comm.recommendation import recommend as recommend
    from shrinkpoint.comm.simulate import CompressionPoints as CompressionPoints
    from shrinkpoint.comm.simulate import insert_compression as insert_compression
    from shrinkpoint.comm.spec import parse as parse
    from shrinkpoint.comm.tensor_parallel import compress_tensor_parallel as compress_tensor_parallel

_NAMES = {
    "aqsgd": "AQSGD",
    "compressed_manager": "CompressedManager",
    "compressors.base": "Cast Compressor CompressorContext Identity",
    "compressors.hadamard": "Hadamard",
    "compressors.quantizers": "BlockFloat NormalFloat Uniform",
    "compressors.sparse": "RandomK SameIndices TopK",
    "ddp": "compress_ddp",
    "error_feedback": "EF EF21 EFMixed ErrorFeedback",
    "fsdp": "compress_fsdp",
    "link": "Link LinkStats MessageContext",
    "local_steps": "LocalSteps OuterSGD",
    "low_rank": "LowRank",
    "moment_steps": "MomentSteps",
    "pipeline": "compress_pipeline CompressedPipeline",
    "recommendation": "recommend",
    "simulate": "CompressionPoints insert_compression",
    "spec": "parse",
    "tensor_parallel": "compress_tensor_parallel",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""The module of each public name; it is imported when the name is used first."""

__all__ = sorted(_MODULES, key=str.lower)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
