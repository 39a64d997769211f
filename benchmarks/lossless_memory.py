"""Peak memory of a save beyond the state itself, measured in a process of its own (Linux only).

`python benchmarks/lossless_memory.py NEW.pt [BASE.pt]` loads a checkpoint, makes it larger by keeping slightly
different copies
of every tensor, saves it with `shrinkpoint.save` and prints, as JSON, how far the resident set rose above where it
stood before the call, relative to the state. With BASE the save is a delta against it, and the base that the save
reads is part of the rise.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from shrinkpoint_lab.bench.systems import resident_bytes

COPIES = 8
MODES = ("keyframe", "delta")


def enlarged(path: Path, copies: int) -> dict[str, Any]:
    """The checkpoint with `copies` variants of each tensor, in the same form as one model and one optimizer."""
    saved = torch.load(path, weights_only=True)
    names: dict[int, str] = {}
    for name, tensor in saved["model"].items():
        names.setdefault(tensor.data_ptr(), name)  # tied tensors once, in the optimizer's order
    model: dict[str, Any] = {}
    slots: dict[int, Any] = {}
    for copy in range(copies):
        scale = 1 + copy / 1024
        for name, slot in zip(names.values(), saved["optimizer"]["state"].values(), strict=True):
            model[f"{copy}.{name}"] = saved["model"][name] * scale
            slots[len(slots)] = {
                "step": slot["step"].clone(),
                "exp_avg": slot["exp_avg"] * scale,
                "exp_avg_sq": slot["exp_avg_sq"] * scale,
            }
    group = {**saved["optimizer"]["param_groups"][0], "params": list(range(len(slots)))}
    return {"model": model, "optimizer": {"state": slots, "param_groups": [group]}, "step": saved["step"]}


def size(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(size(one) for one in state.values())
    return sum(size(one) for one in state) if isinstance(state, (list, tuple)) else 0


def settle() -> int:
    """Give unused memory back, start the peak anew, and return the resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def child(new: Path, base: Path | None, copies: int) -> dict[str, float]:
    import shrinkpoint as sp

    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "base.safetensors" if base else None
        sp.save(enlarged(new, 1), Path(folder) / "warm.safetensors")
        if base and old:
            sp.save(enlarged(base, copies), old)
        state = enlarged(new, copies)
        before = settle()
        sp.save(state, Path(folder) / "new.safetensors", base=old)
        peak = resident_bytes("VmHWM")
    total = size(state)
    return {"state": total, "before": before, "peak": peak, "beyond": (peak - before) / total}


def study(new: Path, base: Path) -> dict[str, dict[str, Any]]:
    """The keyframe and the delta, each in a child process; {"error": ...} for one that failed."""
    found: dict[str, dict[str, Any]] = {}
    for mode, arguments in zip(MODES, ([new], [new, base]), strict=True):
        command = [sys.executable, __file__, *map(str, arguments)]
        run = subprocess.run(command, capture_output=True, text=True)
        found[mode] = json.loads(run.stdout) if run.returncode == 0 else {"error": run.stderr.strip().splitlines()[-1]}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("new", type=Path)
    parser.add_argument("base", type=Path, nargs="?")
    parser.add_argument("--copies", type=int, default=COPIES)
    args = parser.parse_args()
    print(json.dumps(child(args.new, args.base, args.copies)))
