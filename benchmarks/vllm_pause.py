"""Pauses of a vLLM engine that follows a trainer, beside copies of the tensors that changed.

    .venv/rollouts/bin/python benchmarks/vllm_pause.py --out benchmarks/results/vllm_pause.json

One process, one engine after the other: a Llama of 117 M random weights in bfloat16, and the same with linear layers in
8 bits. At each update 3% of the values change, in every tensor or in the query projections alone. Minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 128}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}


def build(kind: str, folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).bfloat16()
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if kind == "int8":
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
            tensors[f"{name}_scale"] = scale.bfloat16()
            tensors[name] = (tensors[name].float() / scale).round().to(torch.int8)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    if kind == "int8":
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": QUANTIZED}
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def change(tensors: dict[str, Tensor], names: list[str]) -> None:
    """Change 3% of the values of tensors, by one unit in the last place."""
    for name in names:
        bits = tensors[name].view(torch.int16 if tensors[name].dtype == torch.bfloat16 else torch.int8)
        bits[torch.rand(bits.shape) < 0.03] ^= 1


def timed(function: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def measure(kind: str, rounds: int) -> list[dict[str, Any]]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from vllm import LLM

    from shrinkpoint.sync import Publisher

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder, place = Path(name) / "model", str(Path(name) / "place")
        tensors = build(kind, folder)
        options = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 64, "skip_tokenizer_init": True}
        llm = LLM(str(folder), **options, weight_transfer_config={"backend": "shrinkpoint"})
        llm.init_weight_transfer_engine({"init_info": {"where": place}})
        engine = llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
        publisher, copies = Publisher(place), {name: tensor.clone() for name, tensor in tensors.items()}
        cells = []
        for what in ("every tensor", "query projections"):
            names = [name for name in tensors if what == "every tensor" or "q_proj.weight" in name]
            names = [name for name in names if not name.endswith("_scale")]
            rows = []
            for number in range(rounds + 1):
                change(tensors, names)
                report = publisher.publish(tensors)
                llm.start_weight_update()
                engine._reading.result()  # the engine generates meanwhile
                call = timed(llm.update_weights, {"update_info": {"version": report.version}})
                llm.finish_weight_update(str(report.version))
                copy = timed(lambda names=names: [copies[name].copy_(tensors[name]) for name in names])
                if number or what != "every tensor":  # the first update learns the layout
                    rows.append({"pause": engine.pause, "call": call, "copy": copy, "delta_bytes": report.delta_bytes})
            medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            size = sum(tensors[name].nbytes for name in names)
            cells.append({"kind": kind, "changed": what, "changed_bytes": size, **medians, "rows": rows})
        reload = timed(lambda: llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)}))
        return [cell | {"vllm_reload": reload} for cell in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/vllm_pause.json"))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    cells = []
    for kind in ("base", "int8"):  # in processes of their own: vLLM has one engine in each
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            cells += pool.apply(measure, (kind, arguments.rounds))
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    machine = {"cpu": cpu.partition(": ")[2], "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    document = {"date": str(date.today()), "machine": machine | {"torch": torch.__version__, "vllm": "0.32.0"}}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document | {"cells": cells}, indent=1) + "\n")
    print("kind   changed             MB changed   pause ms   call ms   copy ms   pause / copy   vLLM's reload ms")
    for cell in cells:
        times = [1000 * cell[key] for key in ("pause", "call", "copy")]
        print(
            f"{cell['kind']:<6} {cell['changed']:<18} {cell['changed_bytes'] / 1e6:>11.1f}"
            f" {times[0]:>10.2f} {times[1]:>9.2f} {times[2]:>9.2f} {times[0] / times[2]:>14.2f}"
            f" {1000 * cell['vllm_reload']:>18.0f}"
        )


if __name__ == "__main__":
    main()
