"""GB/s at which messages are encoded and decoded where the tensor is: a GPU, or for comparison a CPU.

    python benchmarks/device_messages.py                  # 1, 16 and 64 M values on a CUDA device
    python benchmarks/device_messages.py --device cpu --numel 1048576 --repeats 5

GB/s are raw bytes of the tensor, the median of all repeats, by CUDA events on a GPU and by the clock on a CPU. On a GPU
compressors are torch operations; on a CPU native code. Beside them stand torch's casts to bfloat16 and float8 and a
copy. "launch" is the time that the host needs to enqueue one encoding, in milliseconds. Results go to
results/device_messages.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lossless_speed import machine
from torch import Tensor

from shrinkpoint.comm.compressors.base import Compressor, CompressorContext
from shrinkpoint.comm.spec import parse

SPECS = ("bf16", "q8:64", "q4:64", "q2:64", "n4:64", "n3:64", "block4:32", "h64(q4:64)", "q4:64:dither", "top10")
Ways = tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], object]]


def subjects() -> dict[str, Ways]:
    """By name: what encodes a tensor, and what decodes that into another one."""
    found: dict[str, Ways] = {"copy": (Tensor.clone, lambda message, out: out.copy_(message))}
    for name, dtype in (("cast to bfloat16", torch.bfloat16), ("cast to float8_e4m3fn", torch.float8_e4m3fn)):
        found[name] = (lambda x, dtype=dtype: x.to(dtype), lambda message, out: out.copy_(message))
    return found | {spec: _ours(spec) for spec in SPECS}


def _ours(spec: str) -> Ways:
    compressor, context = parse(spec), CompressorContext(key=1)
    assert isinstance(compressor, Compressor)
    return (lambda x: compressor.encode(x, context), lambda wire, out: compressor.decode(wire, out, context))


def seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Of one call: until it is done, and until the host goes on."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        start.record()
        work()
        end.record()
        launched = time.perf_counter() - began
        end.synchronize()
        return start.elapsed_time(end) / 1e3, launched
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began,) * 2


def measure(ways: Ways, x: Tensor, repeats: int) -> dict[str, float]:
    encode, decode = ways
    out, message = torch.empty_like(x), encode(x)
    decode(message, out)
    error = float((x.float() - out.float()).norm() / x.float().norm())
    turns = [
        (seconds(lambda: encode(x), x.device), seconds(lambda: decode(message, out), x.device)) for _ in range(repeats)
    ]
    taken = [median(turn[way][0] for turn in turns) for way in (0, 1)]
    return {
        "encode": x.nbytes / taken[0] / 1e9,
        "decode": x.nbytes / taken[1] / 1e9,
        "launch": 1e3 * median(turn[0][1] for turn in turns),
        "bits": 8 * message.nbytes / x.numel(),
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--numel", type=int, nargs="+", default=(1 << 20, 1 << 24, 1 << 26))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/device_messages.json"))
    args = parser.parse_args()
    name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "CPU"
    figures: dict[str, Any] = {"machine": machine(), "device": name, "date": date.today().isoformat(), "rows": []}
    for dtype in (torch.float32, torch.bfloat16):
        for numel in args.numel:
            x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(args.device, dtype)
            print(f"\n{numel} values of {dtype} on {name}: GB/s of encoding and decoding, ms to launch, bits, error")
            for subject, ways in subjects().items():
                row = measure(ways, x, args.repeats)
                figures["rows"].append({"subject": subject, "dtype": str(dtype), "numel": numel, **row})
                print(f"  {subject:24}" + "".join(f"{value:10.3f}" for value in row.values()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
