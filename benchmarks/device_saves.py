"""What saves of a state in device memory cost: GB/s, and how long the loop and the device wait, beside torch.save.

    python benchmarks/device_saves.py                     # 350 M and 1.5 B parameters on a CUDA device
    python benchmarks/device_saves.py --models tiny --device cpu

States are those of GPTs with AdamW's moments, some simulated training steps apart (`scale_states.py`), made where they
are saved from. Each method saves a keyframe and two deltas in the background:

* stall: until `save` returns.
* device: until what the loop enqueues next on the device is done.
* save: until the checkpoint is durable; GB/s of raw state are those of it.

"at once" is the same without memory for a copy on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from scale_report import markdown
from scale_states import MODELS, GPTShapes, StateHolder, Weight, state_dicts

import shrinkpoint as sp

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
SCHEMES = ("lossless", "fisher", "lossless, at once", "fisher, at once")


class DeviceState:
    """A model's and an optimizer's state dict on a device, in training."""

    def __init__(self, shapes: GPTShapes, device: torch.device, seed: int = 0) -> None:
        self._weights = {
            name: Weight(shape, torch.Generator(device).manual_seed(seed * 1_000_003 + index))
            for index, (name, shape) in enumerate(shapes.shapes())
        }
        tensors = {}
        for name, weight in self._weights.items():
            tensors |= {f"value.{name}": weight.value, f"exp_avg.{name}": weight.moment1}
            tensors[f"exp_avg_sq.{name}"] = weight.moment2
        self.state = state_dicts(shapes, tensors)
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    @property
    def objects(self) -> dict[str, StateHolder]:
        """The model and the optimizer, as far as a manager asks for them."""
        return {name: StateHolder(state) for name, state in self.state.items()}

    def advance(self, steps: int) -> None:
        """Training steps, in place."""
        for weight in self._weights.values():
            weight.advance(steps)


class Meter:
    """Clocks of a device, and rows of one model."""

    def __init__(self, model: str, live: DeviceState, device: torch.device) -> None:
        self.rows: list[Row] = []
        self._model, self._live, self._device = model, live, device

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def wait_for_loop(self) -> None:
        """Wait for what the loop's stream has been given."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def start(self) -> float:
        """Begin an operation."""
        self.synchronize()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return time.perf_counter()

    def add(self, method: str, operation: str, seconds: float, **more: float) -> None:
        """Keep a row."""
        if self._device.type == "cuda":
            beyond = torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
            more["device_states"] = beyond / self._live.nbytes
        numbers = {"seconds": seconds, "gigabytes_a_second": self._live.nbytes / 1e9 / seconds, **more}
        self.rows.append(
            {"model": self._model, "method": method, "operation": operation, "state_bytes": self._live.nbytes}
            | {name: round(number, 4) for name, number in numbers.items()}
        )


def save_with_torch(meter: Meter, live: DeviceState, folder: Path) -> None:
    """A copy to host memory, and `torch.save` with and without bringing the file to the disk."""
    tensors = list(_tensors(live.state))
    for operation in ("copy to the host", "copy to the host again"):
        start = meter.start()
        host = [tensor.to("cpu", copy=True) for tensor in tensors]
        meter.add("copy", operation, time.perf_counter() - start)
    del host
    path = folder / "state.pt"
    for operation in ("keyframe", "keyframe, synced"):
        start = meter.start()
        with path.open("wb") as file:
            torch.save(live.state, file)
            if operation.endswith("synced"):
                file.flush()
                os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        meter.add("torch.save", operation, seconds, stall=seconds, device=seconds, ratio=1.0)
        path.unlink()


def save_with_manager(meter: Meter, live: DeviceState, folder: Path, method: str, steps: int) -> None:
    """Saves in the background, one after the other."""
    scheme = "lossless" if method.startswith("lossless") else sp.Fisher(relative_error=0.3)
    no_memory = patch("shrinkpoint.tensors.flat_state._free_bytes", lambda device: 0)
    with (
        no_memory if method.endswith("at once") else nullcontext(),
        sp.CheckpointManager(folder / method, scheme=scheme, background=True) as manager,
    ):
        for number, operation in enumerate(("keyframe", "delta", "delta, warm")):
            live.advance(steps if number else 0)
            start = meter.start()
            manager.save(number, **live.objects, rng=False)
            stall = time.perf_counter() - start
            meter.wait_for_loop()
            device = time.perf_counter() - start
            report = manager.wait()
            assert report is not None
            meter.add(method, operation, time.perf_counter() - start, stall=stall, device=device, ratio=report.ratio)


def measure(model: str, device: torch.device, folder: Path, steps: int) -> list[Row]:
    """All rows of one model."""
    live = DeviceState(MODELS[model], device)
    meter = Meter(model, live, device)
    save_with_torch(meter, live, folder)
    for method in SCHEMES:
        save_with_manager(meter, live, folder, method, steps)
    return meter.rows


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in state.values() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from _tensors(value)


def table(rows: list[Row]) -> Iterator[str]:
    """Lines of a Markdown table."""
    columns = ("seconds", "gigabytes_a_second", "stall", "device", "ratio", "device_states")
    heads = ("save, s", "GB/s", "stall, s", "device, s", "ratio", "device memory, states")
    lines = [["model", "method", "operation", *heads]]
    for row in rows:
        values = [f"{row[column]:.3f}" if column in row else "" for column in columns]
        lines.append([row["model"], row["method"], row["operation"], *values])
    yield from markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["350M", "1.5B"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10, help="simulated training steps between saves")
    parser.add_argument("--folder", type=Path, help="for checkpoints; a temporary one if left out")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "device_saves.json")
    arguments = parser.parse_args()
    device, rows = torch.device(arguments.device), []
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows += measure(model, device, Path(folder), arguments.steps)
    print("\n".join(table(rows)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    document = {"date": date.today().isoformat(), "torch": torch.__version__, "device": name, "rows": rows}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
