"""Points of reference for the harness that are no schemes of ours: what PyTorch and bitsandbytes do today."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.tensors.flat_state import FlatState, flatten, unflatten
from shrinkpoint.tensors.info import Role
from shrinkpoint_lab.bench.series import Series
from shrinkpoint_lab.bench.systems import PeakMemory, RoundTrip

BLOCK = 256
_MOMENTS = (Role.MOMENT1, Role.MOMENT2)


@dataclass(frozen=True)
class DCP:
    """torch.distributed.checkpoint with its ZStandard extension; every checkpoint stands alone."""

    name: str = "torch DCP + zstd"

    def run(self, series: Series) -> Iterator[RoundTrip]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._extension import ZStandard

        for one in series:
            flat = flatten(one.state)
            tensors = {name: tensor.contiguous() for name, tensor in flat.tensors.items()}
            like = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
            with tempfile.TemporaryDirectory(dir=memory) as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                peak, began = PeakMemory(), time.perf_counter()
                writer = dcp.FileSystemWriter(folder, _extensions=[ZStandard()], sync_files=False)
                dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
                encode, rise = time.perf_counter() - began, peak.rise
                stored = sum(file.stat().st_size for file in Path(folder).iterdir())
                began = time.perf_counter()
                dcp.load(like, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
                decode = time.perf_counter() - began
            yield _returned(one.step, flat, like, stored, {}, encode, decode, rise)


@dataclass(frozen=True)
class EightBit:
    """bitsandbytes' 8-bit optimizer states (dynamic map, blocks of 256 values); weights and the rest as they are.

    What is stored is counted, not written: one byte a moment, four a block, and the raw bytes of everything else.
    """

    name: str = "bitsandbytes 8-bit states"

    def run(self, series: Series) -> Iterator[RoundTrip]:
        import bitsandbytes.functional as bnb

        maps = {Role.MOMENT1: bnb.create_dynamic_map(signed=True), Role.MOMENT2: bnb.create_dynamic_map(signed=False)}
        for one in series:
            flat = flatten(one.state)
            roles: dict[str, int] = {}
            peak, began = PeakMemory(), time.perf_counter()
            coded: dict[str, Any] = {}
            for name, info in flat.infos.items():
                size = info.nbytes
                if info.role in _MOMENTS and info.dtype == "F32" and info.numel:
                    x = flat.tensors[name].contiguous()
                    coded[name] = bnb.quantize_blockwise(x, code=maps[info.role], blocksize=BLOCK)
                    size = info.numel + 4 * -(-info.numel // BLOCK)
                roles[info.role.value] = roles.get(info.role.value, 0) + size
            encode, rise, began = time.perf_counter() - began, peak.rise, time.perf_counter()
            decoded = {name: bnb.dequantize_blockwise(*found) for name, found in coded.items()}
            decode = time.perf_counter() - began
            tensors = {name: decoded.get(name, tensor) for name, tensor in flat.tensors.items()}
            yield _returned(one.step, flat, tensors, sum(roles.values()), roles, encode, decode, rise)


def _returned(
    step: int,
    flat: FlatState,
    tensors: Mapping[str, Tensor],
    stored: int,
    roles: Mapping[str, int],
    encode: float,
    decode: float,
    peak: int | None,
) -> RoundTrip:
    state = unflatten(flat.tree, dict(tensors), where=f"step {step}")
    return RoundTrip(step, True, stored, roles, tensors, state, encode, decode, peak=peak)
