"""GB/s of float32 and bfloat16 tensors on one core: every operator natively and by torch operations, and rivals.

All subjects run in turns on one pinned core, so that a busy moment meets all of them; the first round does not count.
Every subject makes a new message, and decodes into the same tensor. Times are the least processor time of all turns,
since others may use the machine, and its memory, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shrinkpoint.comm.compressors.base import Compressor, CompressorContext
from shrinkpoint.comm.spec import parse

SPECS = (
    *("exact", "bf16", "fp16", "q8", "q4", "q8:64", "q6:64", "q4:64", "q3:64", "q2:64", "q4:row", "q4:64:dither"),
    *("n4:64", "n3:64", "n2:64", "block8:32", "block4:32", "h64(q4:64)", "h64>5(q4:64)"),
    *("top10", "top10:bf16", "top10:q4:64", "same:bf16", "rand10"),
)
NUMBERS = 1 << 20
"""Of the tensor: 4 MiB of float32, 2 MiB of bfloat16."""
SLOW_TURNS = 5
"""Of torch operations, which take a hundred times as long as the rest."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Subject:
    """`encode` gives what `decode` takes; `wire` says how many bytes of that would be sent."""

    name: str
    path: str
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any, Tensor], object]
    wire: Callable[[Any], int]


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """By dtype {"bytes", "rows": of every subject GB/s each way and together, bytes, error, break-even Mbit/s}."""
    side = 256 if args.smoke else int(NUMBERS**0.5)
    values = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {args.core} if args.core in before else before)
    found: dict[str, Any] = {"torch": torch.__version__, "repeats": args.repeats, "machine": machine()}
    found["date"] = time.strftime("%Y-%m-%d")
    try:
        for name, dtype in DTYPES.items():
            x = values.to(dtype)
            found[name] = {"bytes": x.nbytes, "rows": _measured(subjects(x), x, args.repeats)}
    finally:
        os.sched_setaffinity(0, before)
    return found


def machine() -> str:
    """The number of cores, and the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()


def subjects(x: Tensor) -> list[Subject]:
    """Ours, by torch operations too where they are float32, then the rivals that are installed."""
    listed = []
    for spec in SPECS:
        operator = parse(spec)
        assert isinstance(operator, Compressor)
        context = CompressorContext(key=1, indices=torch.arange(0, x.numel(), 10) if spec.startswith("same") else None)
        listed.append(_subject(spec, "native", operator.encode, operator.decode, context))
        if hasattr(operator, "_encode_torch") and x.dtype == torch.float32:
            listed.append(_subject(spec, "torch", operator._encode_torch, operator._decode_torch, context))  # type: ignore[attr-defined]
    return listed + rivals()


def _subject(
    spec: str, path: str, encode: Callable[..., Any], decode: Callable[..., Any], context: CompressorContext
) -> Subject:
    return Subject(spec, path, lambda x: encode(x, context), lambda wire, out: decode(wire, out, context), Tensor.numel)


def rivals() -> list[Subject]:
    copies: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("memcpy: torch's clone, and copy_ back", Tensor.clone),
        ("torch: cast to bfloat16", Tensor.bfloat16),
        ("torch: cast to float8_e4m3fn", lambda x: x.to(torch.float8_e4m3fn)),
    ]
    listed = [
        Subject(name, "rival", encode, lambda y, out: out.copy_(y), lambda y: y.nbytes) for name, encode in copies
    ]
    listed += [_per_tensor(bits) for bits in (8, 4)]
    if find_spec("bitsandbytes"):
        listed += _bitsandbytes()
    return listed


def _per_tensor(bits: int) -> Subject:
    """torch's own quantized tensors, one range; two codes a byte where four bits are asked for."""

    def encode(x: Tensor) -> tuple[Tensor, float]:
        lo, hi = (float(one) for one in torch.aminmax(x))
        step = max(hi - lo, 1e-30) / (2**bits - 1)
        zero = min(max(round(-lo / step), 0), 2**bits - 1)
        codes = torch.quantize_per_tensor(x.float(), step, zero, torch.quint8).int_repr()
        if bits == 8:
            return codes, (step, zero)
        half = codes.view(2, -1).clamp_(max=15)
        return half[0] | half[1] << 4, (step, zero)

    def decode(message: tuple[Tensor, Any], out: Tensor) -> None:
        codes, (step, zero) = message
        if bits == 4:
            codes = torch.cat([codes & 15, codes >> 4]).view(out.shape)
        out.copy_(torch._make_per_tensor_quantized_tensor(codes, step, zero).dequantize())

    return Subject(f"torch.quantize_per_tensor, {bits} bits", "rival", encode, decode, lambda m: m[0].nbytes + 8)


def _bitsandbytes() -> list[Subject]:
    from bitsandbytes import functional

    def size(message: tuple[Tensor, Any]) -> int:
        return message[0].nbytes + message[1].absmax.nbytes

    eight = Subject(
        "bitsandbytes, 8 bits, blocks of 64",
        "rival",
        partial(functional.quantize_blockwise, blocksize=64),
        lambda m, out: out.copy_(functional.dequantize_blockwise(m[0], m[1])),
        size,
    )
    four = [
        Subject(
            f"bitsandbytes, {kind}, blocks of 64",
            "rival",
            partial(functional.quantize_4bit, blocksize=64, quant_type=kind),
            lambda m, out: out.copy_(functional.dequantize_4bit(m[0], m[1])),
            size,
        )
        for kind in ("nf4", "fp4")
    ]
    return [eight, *four]


def _measured(found: list[Subject], x: Tensor, repeats: int) -> list[dict[str, Any]]:
    taken: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    out = torch.empty_like(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(repeats + 1):
            for one in found:
                if one.path == "torch" and turn > SLOW_TURNS:
                    continue
                marks = [_now()]
                message = one.encode(x)
                marks.append(_now())
                one.decode(message, out)
                marks.append(_now())
                if turn:
                    taken.setdefault((one.name, one.path), []).append(marks)
                else:
                    error = float((x.float() - out.float()).norm() / x.float().norm())
                    rows[one.name, one.path] = {
                        "name": one.name,
                        "path": one.path,
                        "wire": one.wire(message),
                        "error": error,
                    }
    for key, marks_of_all in taken.items():
        rows[key] |= _figures(x.nbytes, rows[key]["wire"], marks_of_all)
    return list(rows.values())


def _figures(raw: int, wire: int, turns: list[list[tuple[float, float]]]) -> dict[str, float]:
    """Least processor times, and the wall time of both ways together; from the clocks before, between and after."""
    encode = min(max(between[1] - before[1], 1e-9) for before, between, _ in turns)
    decode = min(max(after[1] - between[1], 1e-9) for _, between, after in turns)
    wall = median(after[0] - before[0] for before, _, after in turns)
    return {
        "encode": raw / encode / 1e9,
        "decode": raw / decode / 1e9,
        "both": raw / (encode + decode) / 1e9,
        "wall": raw / wall / 1e9,
        "break_even": 8 * (raw - wire) / (encode + decode) / 1e6,
    }


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
